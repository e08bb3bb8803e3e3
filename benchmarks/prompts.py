"""Times attention of prompts on a GPU: the cost of decoding each format, and the gain of fp8 products.

    python -m benchmarks.prompts --out result.json

Calls are launched as the engine launches steps with long prompts, without CUDA graphs, over pages in
random order. A repetition is a group of calls of about 0.2 s after some uncounted ones: products
of this size run at a clock that the power limit sets, which a few calls would not show. All contestants
for one case take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvant.attention.base import AttentionBackend
from kvant.attention.need import BackendInfo
from kvant.attention.triton.info import INFO as TRITON
from kvant.attention.triton_fp8.info import INFO as TRITON_FP8
from kvant.attention.triton_fp8.info import SERVED as FP8
from kvant.kv.dtype import KVDtype
from kvant.measure.attention_inputs import Case, make_inputs
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.gpu_time import elapsed_us

REPEATS = 3
GROUP_US = 200e3
LEAD_US = 50e3

BASE = KVDtype.BFLOAT16
READ: dict[BackendInfo, tuple[KVDtype, ...]] = {
    TRITON: (
        BASE, *FP8, KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.NVFP4,
    ),
    TRITON_FP8: FP8,
}  # fmt: skip
"""Formats of K and V alike, by the backend that reads them."""
_ALL = READ[TRITON]


@dataclass(frozen=True, slots=True)
class Prompts:
    """`count` sequences of `new` query tokens each, after `before` stored ones.

    formats: the formats to time by default; other cases show the decoding cost of the others.
    """

    count: int
    new: int
    before: int
    formats: tuple[KVDtype, ...]

    def case(self, dtype: KVDtype) -> Case:
        return Case(dtype, dtype, (self.before + self.new,) * self.count, self.new)


PROMPTS = {
    "1 x 8192": Prompts(1, 8192, 0, (BASE, *FP8)),
    "4 x 8192": Prompts(4, 8192, 0, _ALL),
    "16 x 2048": Prompts(16, 2048, 0, (BASE, *FP8)),
    "2048 after 32768": Prompts(1, 2048, 32768, _ALL),
    "8192 after 8192": Prompts(1, 8192, 8192, (BASE, *FP8)),
    "8192 after 122880": Prompts(
        1, 8192, 122880, (BASE, KVDtype.FP8_E4M3, KVDtype.FP8_PER_TOKEN_HEAD)
    ),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of one contestant. us: per call, every repetition."""

    case: str
    backend: BackendInfo
    dtype: KVDtype
    flop: int
    us: list[float]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. us: per call, every repetition.

    over_bfloat16: the time of Triton's backend over bfloat16 divided by this one; over_triton: over the same
    format. None: not measured, or itself.
    """

    case: str
    backend: str
    format: str
    us: list[float]
    median_us: float
    tflops: float
    over_bfloat16: float | None
    over_triton: float | None


def flop(case: Case) -> int:
    """Returns multiplications and additions of both products, for queries and keys that see each other."""
    assert case.window is None
    n = case.queries
    seen = sum(
        n * (length - n) + (n * (n + 1) // 2 if case.causal else n * n) for length in case.lengths
    )
    return 4 * case.head_dim * case.q_heads * seen


def group_us(call: Callable[[], object], one_us: float) -> float:
    """Returns microseconds per call, from a group of calls. one_us: estimate for one call."""
    lead, count = (max(1, round(us / one_us)) for us in (LEAD_US, GROUP_US))
    for _ in range(lead):
        call()  # the first of the group is launched while these run

    def group() -> None:
        for _ in range(count):
            call()

    return elapsed_us(group) / count


def measure(
    name: str,
    formats: Sequence[KVDtype],
    backends: Mapping[BackendInfo, AttentionBackend],
    device: torch.device,
) -> list[Timed]:
    """Measures all contestants for this case, in turn."""
    calls: list[tuple[Timed, Callable[[], Tensor], float]] = []
    for dtype in formats:
        case = PROMPTS[name].case(dtype)
        x = make_inputs(case, device)
        assert x.step.long
        for info, backend in backends.items():
            if dtype in READ[info]:
                run = partial(backend.attend, x.cache, x.q, x.step, x.params)
                run()  # kernels are compiled and plans made
                rough = min(elapsed_us(run) for _ in range(2))
                calls.append((Timed(name, info, dtype, flop(case), []), run, rough))
    for _ in range(REPEATS):
        for timed, call, rough in calls:
            timed.us.append(round(group_us(call, rough), 2))
    return [
        timed for timed, _, _ in sorted(calls, key=lambda one: list(READ).index(one[0].backend))
    ]


def rows(timed: Sequence[Timed]) -> list[Row]:
    """Returns medians, and their ratios to Triton's backend for the same prompts."""
    medians = {(t.case, t.backend, t.dtype): statistics.median(t.us) for t in timed}
    found = []
    for t in timed:
        us = medians[t.case, t.backend, t.dtype]
        base = medians.get((t.case, TRITON, BASE))
        same = medians.get((t.case, TRITON, t.dtype)) if t.backend is not TRITON else None
        found.append(
            Row(
                t.case, t.backend.name, str(t.dtype), t.us, us, t.flop / us / 1e6,
                None if base is None else base / us, None if same is None else same / us,
            )
        )  # fmt: skip
    return found


def table(found: Sequence[Row]) -> str:
    lines = [
        f"{'prompts':18} {'backend':11} {'format':20} {'us':>9} {'TFLOP/s':>8} {'over bfloat16':>14} "
        f"{'over triton':>12}"
    ]
    for r in found:
        over = ["-" if x is None else f"{x:.2f}" for x in (r.over_bfloat16, r.over_triton)]
        lines.append(
            f"{r.case:18} {r.backend:11} {r.format:20} {r.median_us:9.1f} {r.tflops:8.0f} {over[0]:>14} "
            f"{over[1]:>12}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    names = {str(dtype): dtype for dtype in _ALL}
    infos = {info.name: info for info in READ}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON result")
    parser.add_argument("--case", action="append", choices=list(PROMPTS), default=[])
    parser.add_argument("--format", action="append", choices=list(names), default=[])
    parser.add_argument("--backend", action="append", choices=list(infos), default=[])
    options = parser.parse_args(arguments)
    asked = [names[name] for name in options.format]
    chosen = [infos[name] for name in options.backend or infos]
    if not any(dtype in READ[info] for info in chosen for dtype in asked or _ALL):
        parser.error(f"{', '.join(options.backend)} reads none of {', '.join(options.format)}")
    backends = {info: importlib.import_module(info.module).backend() for info in chosen}
    device = torch.device("cuda")
    timed: list[Timed] = []
    for name in options.case or PROMPTS:
        timed += measure(name, asked or PROMPTS[name].formats, backends, device)
    found = rows(timed)
    print(table(found))
    if options.out is not None:
        command = command_line("python -m benchmarks.prompts", arguments)
        facts = measurement_facts(command, ("torch", "triton"))
        facts["rows"] = [asdict(r) for r in found]
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
