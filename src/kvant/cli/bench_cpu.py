"""`kvant bench cpu`: how fast attention is on this machine, beside what its memory allows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def cpu(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write every repetition as JSON.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads; torch's number if not given.")
    ] = None,
    reference: Annotated[
        bool, typer.Option(help="Measure the reference backend too, which is slow.")
    ] = True,
) -> None:
    """Time attention in every KV format, beside torch's and the read bandwidth of memory."""
    import torch

    from kvant.measure.cpu_attention_bench import bench

    if threads is not None:
        torch.set_num_threads(threads)
    raise typer.Exit(bench(out, reference=reference))
