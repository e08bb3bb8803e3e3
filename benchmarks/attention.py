"""`python -m benchmarks.attention`: decode attention alone on a GPU, compared with its peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.command import run_command
from kvant.cli.bench_attention import Batches, Formats, Lengths, PageSizes, Repeats, run_grid
from kvant.cli.output import OutFile
from kvant.errors import UnknownName

if TYPE_CHECKING:
    import torch

    from kvant.measure.attention_grid import Peer

_PEERS = ("flashinfer", "flash-attention-3")


def attention(
    formats: Formats = None,
    batches: Batches = None,
    lengths: Lengths = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="P",
            help=f"{' or '.join(_PEERS)}; may be repeated.",
            show_default=False,
        ),
    ] = None,
    peer_page_sizes: Annotated[
        list[int] | None,
        typer.Option(
            "--peer-page-size", help="Page size of the peers; default 16.", show_default=False
        ),
    ] = None,
    page_sizes: PageSizes = None,
    fa3: Annotated[
        Path | None,
        typer.Option("--fa3-library", help="_vllm_fa3_C*.so; the installed vLLM's if not given."),
    ] = None,
    repeats: Repeats = 5,
    out: OutFile = None,
) -> None:
    """Microseconds of one query per sequence, Kvant and its peers turn by turn over the same pages."""

    def made(device: torch.device) -> list[Peer]:
        return [_peer(name, fa3, device) for name in peers or ()]

    run_grid(
        "python -m benchmarks.attention", formats, batches, lengths, page_sizes, repeats, out,
        peers=made, peer_page_sizes=peer_page_sizes,
    )  # fmt: skip


def _peer(name: str, fa3: Path | None, device: torch.device) -> Peer:
    from benchmarks.attention_peers import flash_attention_3_peer, flashinfer_peer

    if name not in _PEERS:
        raise UnknownName("peer", name, _PEERS, asked_by="--peer")
    return flashinfer_peer(device) if name == _PEERS[0] else flash_attention_3_peer(fa3)


if __name__ == "__main__":
    run_command(attention)
