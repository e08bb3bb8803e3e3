"""Error of each format on rows of normal numbers, by head size.

    python -m benchmarks.head_sizes --out head-sizes.json

Rotation makes any row about normal, so these figures do not depend on a model. The error is the sum of
squared differences over the sum of squares. Bits are per value and include scales.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from benchmarks.command import run_command
from kvant.cli.output import OutFile, write_json
from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from kvant.measure.facts import command_line, measurement_facts

FORMATS = (
    KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_SHORT, KVDtype.NVFP4,
    KVDtype.TURBOQUANT_K4, KVDtype.TURBOQUANT_V4, KVDtype.TURBOQUANT_K3, KVDtype.TURBOQUANT_V3,
    KVDtype.NORMAL2,
)  # fmt: skip
HEAD_SIZES = (64, 128)


def head_sizes(
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of each head size.")] = 8192,
    out: OutFile = None,
) -> None:
    """Encode and decode rows of normal numbers in every format that needs no scale from outside."""
    found = {}
    for dtype in FORMATS:
        codec, given = codec_for(dtype), dtype.format.takes_outside_scale
        scale = torch.ones(1) if given else None
        sizes = {}
        for head in HEAD_SIZES:
            x = torch.randn(rows, 1, head, generator=torch.Generator().manual_seed(head))
            lost = codec.decode(codec.encode(x, scale), scale, torch.float32) - x
            error = float(lost.square().sum() / x.square().sum())
            sizes[str(head)] = {"bits": dtype.format.row_bytes(head) * 8 / head, "error": error}
        found[str(dtype)] = sizes
        print(str(dtype), sizes)
    if out is not None:
        facts = measurement_facts(command_line("python -m benchmarks.head_sizes"), ["torch"])
        write_json(out, {"schema": 1, "rows": rows, "formats": found, **facts})


if __name__ == "__main__":
    run_command(head_sizes)
