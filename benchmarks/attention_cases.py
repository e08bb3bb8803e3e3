"""Times paged attention on a GPU: every format, one query and many, against the card's own bandwidth.

    python -m benchmarks.attention_cases --out result.json

Pages lie in random order. Times are medians of CUDA events; each row says how many bytes of K and V
it had to read and how much of the read bandwidth, measured in the same run, that is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvant.attention.triton.backend import TritonBackend
from kvant.kv.dtype import PAIR_NAMES, KVDtype
from kvant.measure.attention_inputs import Case, kv_bytes, make_inputs
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.gpu_time import time_us
from kvant.measure.read_bandwidth import read_bandwidth


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. us: every repetition."""

    case: str
    k: str
    v: str
    causal: bool
    queries: int
    us: list[float]
    median_us: float
    gb: float
    tb_per_s: float
    of_read_bandwidth: float


GRID: dict[str, tuple[tuple[int, ...], int]] = {
    "B64 L8192": ((8192,) * 64, 1),
    "B64 L8192 16 queries": ((8192,) * 64, 16),
    "B1 L131072": ((131072,), 1),
    "1 x 128k + 31 x 4k": ((131072,) + (4096,) * 31, 1),
    "same tokens, uniform": ((8064,) * 32, 1),
    "B1 L1024": ((1024,), 1),
}

_SAME = (
    KVDtype.BFLOAT16,
    KVDtype.FP8_E4M3,
    KVDtype.FP8_E5M2,
    KVDtype.FP8_PER_TOKEN_HEAD,
    KVDtype.INT8_PER_TOKEN_HEAD,
    KVDtype.INT4_PER_TOKEN_HEAD,
    KVDtype.NVFP4,
)
FORMATS = {**{str(dtype): (dtype, dtype) for dtype in _SAME}, **PAIR_NAMES}
"""K and V by the name that `--format` takes."""


def run(
    formats: Sequence[tuple[KVDtype, KVDtype]],
    names: Sequence[str],
    device: torch.device,
    bandwidth: float,
) -> list[Row]:
    """Times every format on every named case, formats in turn."""
    backend = TritonBackend()
    rows = []
    for name in names:
        lengths, queries = GRID[name]
        for causal in (True, False) if queries > 1 else (True,):
            for k, v in formats:
                case = Case(k, v, lengths, queries, causal)
                x = make_inputs(case, device)
                small = kv_bytes(case) < 200e6
                us = time_us(
                    lambda x=x: backend.attend(x.cache, x.q, x.step, x.params),  # type: ignore[misc]
                    inner=20 if small else 4,
                )
                median = statistics.median(us)
                gb = kv_bytes(case) / 1e9
                speed = gb / median * 1e3
                rows.append(
                    Row(name, str(k), str(v), causal, queries, us, median, gb, speed,
                        speed / bandwidth)
                )  # fmt: skip
                del x
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'case':24} {'format':28} {'causal':7} {'us':>8} {'TB/s':>6} {'of read':>8}"]
    for r in rows:
        name = r.k if r.k == r.v else f"{r.k}/{r.v}"
        lines.append(
            f"{r.case:24} {name:28} {r.causal!s:7} {r.median_us:8.1f} {r.tb_per_s:6.2f} "
            f"{r.of_read_bandwidth:8.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON result")
    parser.add_argument("--case", action="append", choices=sorted(GRID), default=[])
    parser.add_argument("--format", action="append", choices=sorted(FORMATS), default=[])
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    bandwidth = read_bandwidth(device)
    formats = [FORMATS[name] for name in options.format or FORMATS]
    rows = run(formats, options.case or list(GRID), device, bandwidth)
    print(f"read bandwidth {bandwidth:.2f} TB/s")
    print(table(rows))
    if options.out is not None:
        command = command_line("python -m benchmarks.attention_cases", arguments)
        facts = {
            **measurement_facts(command, ("torch", "triton")),
            "read_tb_per_s": bandwidth,
            "rows": [asdict(r) for r in rows],
        }
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
