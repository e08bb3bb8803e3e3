"""`kvant bench attention`: decode attention alone on a GPU, beside its peers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.cli.out_file import OutFile, write_json
from kvant.errors import BadValue, NotServable, UnknownName
from kvant.kv.dtype import KVDtype

if TYPE_CHECKING:
    import torch

    from kvant.measure.attention_peers import Peer

_PEERS = ("flashinfer", "flash-attention-3")
_FORMATS = (KVDtype.BFLOAT16, KVDtype.FP8_E4M3)


def attention(
    formats: Annotated[
        list[str] | None,
        typer.Option("--kv-format", help="KV cache format; may be repeated.", show_default=False),
    ] = None,
    batches: Annotated[
        list[int] | None,
        typer.Option("--batch", help="Sequences; 1, 2, .. 256 without.", show_default=False),
    ] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", help="Tokens of each; 1k, 2k, .. 128k without."),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="P",
            help=f"{' or '.join(_PEERS)}; may be repeated.",
            show_default=False,
        ),
    ] = None,
    peer_pages: Annotated[
        list[int] | None,
        typer.Option("--peer-page-size", help="Of the peers; 16 without.", show_default=False),
    ] = None,
    own_pages: Annotated[
        list[int] | None,
        typer.Option("--page-size", "--block-size", help="Of Kvant; 16 without."),
    ] = None,
    fa3: Annotated[
        Path | None,
        typer.Option("--fa3-library", help="_vllm_fa3_C*.so; without, the installed vLLM's."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 5,
    out: OutFile = None,
) -> None:
    """Microseconds of one query against batches of equal lengths; points that do not fit are left out."""
    import torch

    if not torch.cuda.is_available():
        raise NotServable("attention on a GPU is to be measured", why="torch sees no GPU here")

    from dataclasses import asdict

    from kvant.measure.attention_bench import read_bandwidth
    from kvant.measure.attention_grid import BATCHES, LENGTHS, SMALL_PAGE, measure_grid, table
    from kvant.measure.facts import command_line, measurement_facts

    device = torch.device("cuda")
    stored = [_parse(name) for name in formats or map(str, _FORMATS)]
    sizes, own_sizes = peer_pages or [SMALL_PAGE], own_pages or [SMALL_PAGE]
    largest = max(*sizes, *own_sizes)
    for n in lengths or ():
        if n < 1 or n % largest:
            raise BadValue(f"--length {n}", why=f"lengths are multiples of {largest} here")
    for n in (*sizes, *own_sizes):
        if n < 1 or n % SMALL_PAGE:
            raise BadValue(f"pages of {n} tokens", why=f"they are multiples of {SMALL_PAGE} here")
    beside = [_peer(name, fa3, device) for name in peers or ()]
    bandwidth = read_bandwidth(device)
    sys.stderr.write(f"read bandwidth {bandwidth:.2f} TB/s\n")
    facts = measurement_facts(command_line("kvant"), ["torch", "triton"])
    found = []
    for one in measure_grid(
        stored, batches or BATCHES, lengths or LENGTHS, beside, sizes, device,
        repeats=repeats, own_page_sizes=own_sizes,
    ):  # fmt: skip
        found.append(one)
        if out is not None:  # at every row, so that what was measured is kept
            document = {**facts, "read_tb_per_s": bandwidth, "rows": [asdict(r) for r in found]}
            write_json(out, document)
    sys.stdout.write(table(found) + "\n")


def _parse(name: str) -> KVDtype:
    from kvant.kv.names import parse_format

    wanted = parse_format(name, asked_by="--kv-format")
    if not isinstance(wanted.k, KVDtype) or wanted.k is not wanted.v:
        raise BadValue(f"--kv-format {name}", why="keys and values are of one format here")
    return wanted.k


def _peer(name: str, fa3: Path | None, device: torch.device) -> Peer:
    from kvant.measure.attention_peers import flash_attention_3_peer, flashinfer_peer

    if name not in _PEERS:
        raise UnknownName("peer", name, _PEERS, asked_by="--peer")
    return flashinfer_peer(device) if name == _PEERS[0] else flash_attention_3_peer(fa3)
