"""Decode attention in batches of equal lengths: Kvant and its peers over the same pages, turn by turn.

Sequences smaller than the level-2 cache are read from it in every repetition, by all engines.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvant.attention.triton.backend import TritonBackend
from kvant.errors import EngineFault
from kvant.kv.dtype import KVDtype
from kvant.kv.pool import LayerCache
from kvant.measure.attention_inputs import Case, Inputs, kv_bytes, make_cache, make_inputs
from kvant.measure.gpu_time import captured, replay_us

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = tuple(1024 << i for i in range(8))
OWN = "kvant"
SMALL_PAGE = 16
_AIM_US = 4000.0
_ROUGH_TB_PER_S = 3.0
_SHARE = 0.8  # of free memory
_NONSENSE = 0.2


Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another implementation of decode attention over the same pages.

    reads: the formats to measure it with. prepare: plans one step and returns the call that computes it,
    [batch, num_q_heads, head_dim].
    """

    name: str
    reads: frozenset[KVDtype]
    prepare: Callable[[Inputs], Run]


@dataclass(frozen=True, slots=True)
class Timed:
    """One engine at one point.

    us: every repetition. difference: largest deviation of its output from Kvant's.
    """

    batch: int
    length: int
    format: str
    who: str
    page_size: int
    us: list[float]
    median_us: float
    difference: float


def measure_grid(
    formats: Sequence[KVDtype],
    batches: Sequence[int],
    lengths: Sequence[int],
    peers: Sequence[Peer],
    page_sizes: Sequence[int],
    device: torch.device,
    *,
    repeats: int = 5,
    own_page_sizes: Sequence[int] = (SMALL_PAGE,),
) -> Iterator[Timed]:
    """Measures every point that fits into memory. page_sizes: page sizes of the peers."""
    for dtype in formats:
        cases = [Case(dtype, dtype, (n,) * batch) for batch in batches for n in lengths]
        free, _ = torch.cuda.mem_get_info(device)
        cases = [case for case in cases if kv_bytes(case) < _SHARE * free]
        most = max(sum(case.lengths) for case in cases)
        cache = make_cache(cases[0], most // cases[0].page_size, device)
        served = [peer for peer in peers if dtype in peer.reads]
        for case in cases:
            yield from _measure_point(
                case, cache, served, page_sizes, own_page_sizes, device, repeats
            )
        del cache
        torch.cuda.empty_cache()


def _measure_point(
    case: Case,
    cache: LayerCache,
    peers: Sequence[Peer],
    page_sizes: Sequence[int],
    own_page_sizes: Sequence[int],
    device: torch.device,
    repeats: int,
) -> Iterator[Timed]:
    mine = make_inputs(case, device, cache=cache)
    backend = TritonBackend()

    def own(x: Inputs) -> torch.Tensor:
        return backend.attend(x.cache, x.q, x.step, x.params)

    runs: dict[tuple[str, int], Run] = {}
    differences: dict[tuple[str, int], float] = {}
    for size in sorted({*page_sizes, *own_page_sizes}):
        same, theirs = (mine, mine) if size == case.page_size else _paged(mine, size)
        expected = own(same).double()
        contestants: list[tuple[str, Run]] = []
        if size in own_page_sizes:
            contestants.append((OWN, partial(own, theirs)))
        if size in page_sizes:
            contestants += [(peer.name, peer.prepare(theirs)) for peer in peers]
        for name, run in contestants:
            off = float((run().double() - expected).norm() / expected.norm())
            if not off < _NONSENSE:
                raise EngineFault(f"{name} is {off:.2g} away from Kvant on {case}")
            runs[name, size] = run
            differences[name, size] = round(off, 5)
    inner = int(_AIM_US / (kv_bytes(case) / _ROUGH_TB_PER_S / 1e6 + 8))
    inner = min(max(inner, 1), 100)
    graphs = {key: captured(run, inner) for key, run in runs.items()}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(repeats):
        for key, graph in graphs.items():
            times[key].append(round(replay_us(graph) / inner, 3))
    for (who, size), us in times.items():
        yield Timed(
            len(case.lengths), case.lengths[0], str(case.k), who, size, us, statistics.median(us),
            differences[who, size],
        )  # fmt: skip


def _paged(x: Inputs, size: int) -> tuple[Inputs, Inputs]:
    """Returns the same tokens in pages of `size`: as consecutive small pages, and as large pages.

    size: a multiple of the cache's page size that divides the sequences' lengths.
    """
    factor = size // x.cache.page_size
    seqs, columns = x.step.page_table.shape
    order = torch.randperm(seqs * columns // factor, device=x.q.device).to(torch.int32)
    large = order.view(seqs, columns // factor)
    within = torch.arange(factor, dtype=torch.int32, device=x.q.device)
    small = (large[:, :, None] * factor + within).view(seqs, columns)
    k, v = (
        tuple(
            plane[: seqs * columns].reshape(-1, size, *plane.shape[2:]) for plane in planes
        )
        for planes in (x.cache.k, x.cache.v)
    )  # fmt: skip
    cache = replace(x.cache, k=k, v=v)
    return (
        Inputs(x.cache, x.q, replace(x.step, page_table=small), x.params),
        Inputs(cache, x.q, replace(x.step, page_table=large), x.params),
    )


def table(rows: Sequence[Timed]) -> str:
    """Formats one line per point: all times, and Kvant's best time over the best peer's."""
    everyone = list(dict.fromkeys((r.who, r.page_size) for r in rows))
    names = "".join(f"{f'{who} p{size}':>22}" for who, size in everyone)
    lines = [f"{'format':22} {'batch':>5} {'length':>7}{names}  over best"]
    points: dict[tuple[str, int, int], dict[tuple[str, int], float]] = {}
    for r in rows:
        at = points.setdefault((r.format, r.batch, r.length), {})
        at[r.who, r.page_size] = r.median_us
    for (name, batch, length), us in points.items():
        cells = "".join(f"{us.get(key, float('nan')):22.1f}" for key in everyone)
        mine, theirs = (
            [t for (who, _), t in us.items() if (who == OWN) is it] for it in (True, False)
        )
        ratio = f"{min(mine) / min(theirs):.2f}" if theirs else "-"
        lines.append(f"{name:22} {batch:5} {length:7}{cells}  {ratio}")
    return "\n".join(lines)
