"""Times paged attention on this CPU: every format, against the memory's own read bandwidth.

    python -m benchmarks.cpu --out result.json

SmolLM2's shape (9 query heads, 3 KV heads, head size 64), pages of 16 tokens in random order. Times
are medians. For comparison, the same run measures the reference backend, torch's scaled_dot_product_attention
over contiguous float32, and a read of as many bytes. Each row says how many bytes of K and V it had to read
and the share of the read bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory_reading import read_everything
from kvant.attention.base import AttentionBackend, AttentionParams
from kvant.attention.cpu.backend import CpuBackend
from kvant.attention.cpu.formats import SERVED
from kvant.attention.reference.backend import ReferenceBackend
from kvant.kv.codecs import codec_for
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.pool import KVPool
from kvant.kv.spec import Choice, KVPlan, LayerSpec, Role, Scale, ScaleState, Source
from kvant.measure.attention_inputs import Inputs, paged_step

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
Pair = tuple[KVDtype, KVDtype]


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of `lengths` stored tokens, the last `queries` of each being new."""

    name: str
    lengths: tuple[int, ...]
    queries: int

    @property
    def elements(self) -> int:
        """Number of stored numbers that are read."""
        return sum(self.lengths) * KV_HEADS * 2 * HEAD_DIM

    @property
    def operations(self) -> int:
        """Number of additions and multiplications of causal attention."""
        pairs = sum(self.queries * (n - self.queries) + self.queries * (self.queries + 1) // 2
                    for n in self.lengths)  # fmt: skip
        return 4 * pairs * Q_HEADS * HEAD_DIM


CASES = (
    Case("1 query, 64k tokens", (65536,), 1),
    Case("8 queries of 8 sequences, 4k tokens each", (4096,) * 8, 1),
    Case("prefill 2048", (2048,), 2048),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. seconds: every repetition, in order; first_s: with compilation or load."""

    case: str
    what: str
    bytes: int
    seconds: list[float]
    median_s: float
    first_s: float
    elements_per_s_per_thread: float
    of_read_bandwidth: float
    gflops: float
    over_float32: float


def make_inputs(case: Case, pair: Pair, *, seed: int = 0) -> Inputs:
    """Returns random numbers on pages in random order."""
    made = torch.Generator().manual_seed(seed)
    pages = [-(-n // PAGE_SIZE) for n in case.lengths]
    total = sum(pages)
    geometry = LayerGeometry(0, "bench", Attention.FULL, Q_HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM)
    choices = [Choice(d, Source.EXPLICIT, "bench", (), Scale(ScaleState.NONE)) for d in pair]
    spec = LayerSpec(geometry, choices[0], choices[1], "bench")
    plan = KVPlan(Role.TARGET, "bench", ComputeDtype.FLOAT32, "bench", PAGE_SIZE, (spec,))
    encoded: list[Tensor] = []
    scales: dict[tuple[int, Side], Tensor] = {}
    x = torch.randn(total * PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=made)
    for side, dtype in zip((Side.K, Side.V), pair, strict=True):
        takes = dtype.format.takes_outside_scale
        scale = torch.full((1,), 0.01) if takes else None
        if scale is not None:
            scales[0, side] = scale
        encoded += codec_for(dtype).encode(x, scale)
    cache = KVPool(plan, total, device=torch.device("cpu"), scales=scales)[0]
    for plane, rows in zip((*cache.k, *cache.v), encoded, strict=True):
        plane.copy_(rows.view(plane.shape))
    order = torch.randperm(total, generator=made).to(torch.int32)
    step = paged_step(case.lengths, case.queries, order, PAGE_SIZE)
    q = torch.randn(len(step.positions), Q_HEADS, HEAD_DIM, generator=made)
    return Inputs(cache, q, step, AttentionParams(scale=HEAD_DIM**-0.5))


def time_s(run: Callable[[], object], *, repeats: int, budget_s: float = 3.0) -> list[float]:
    """Returns seconds of each repetition: at least 3, and as many as fit the budget."""
    times: list[float] = []
    while len(times) < 3 or (len(times) < repeats and sum(times) < budget_s):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def read_bandwidth(num_bytes: int) -> float:
    """Returns bytes per second of reading memory with all of torch's threads, the best of 40."""
    x = torch.ones(num_bytes // 4)
    read_everything(x)
    return num_bytes / min(time_s(lambda: read_everything(x), repeats=40))


def _sdpa(case: Case) -> Callable[[], object]:
    """torch's fused attention over contiguous float32 keys and values, one tensor per call."""
    lengths = set(case.lengths)
    assert len(lengths) == 1
    n = lengths.pop()
    k, v = torch.randn(2, len(case.lengths), KV_HEADS, n, HEAD_DIM)
    q = torch.randn(len(case.lengths), Q_HEADS, case.queries, HEAD_DIM)
    causal = case.queries > 1
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def measure(
    case: Case, pairs: Sequence[Pair], bandwidth: float, *, reference: bool
) -> list[Row]:  # fmt: skip
    """Measures every format on one case, torch's attention, and the reference backend."""
    rows: list[Row] = []
    threads = torch.get_num_threads()
    base = 0.0

    def add(what: str, num_bytes: int, run: Callable[[], object], repeats: int) -> None:
        nonlocal base
        start = time.perf_counter()
        run()
        first = time.perf_counter() - start
        seconds = time_s(run, repeats=repeats)
        median = statistics.median(seconds)
        base = base or median
        rows.append(
            Row(
                case.name,
                what,
                num_bytes,
                seconds,
                median,
                first,
                case.elements / median / threads,
                num_bytes / median / bandwidth,
                case.operations / median / 1e9,
                median / base,
            )
        )

    def attend(backend: AttentionBackend, x: Inputs) -> Callable[[], object]:
        return lambda: backend.attend(x.cache, x.q, x.step, x.params)

    backend = CpuBackend()
    for pair in pairs:
        x = make_inputs(case, pair)
        row_bytes = sum(dtype.format.row_bytes(HEAD_DIM) for dtype in pair)
        num_bytes = sum(case.lengths) * KV_HEADS * row_bytes
        name = "/".join(dict.fromkeys(map(str, pair)))
        add(name, num_bytes, attend(backend, x), 25)
        if reference and pair[0] in (KVDtype.FLOAT32, KVDtype.INT8_PER_TOKEN_HEAD):
            add(f"reference backend, {name}", num_bytes, attend(ReferenceBackend(), x), 7)
    add("torch sdpa, float32, contiguous", case.elements * 4, _sdpa(case), 15)
    return rows


def pairs() -> list[Pair]:
    """Returns every format that the backend has, float32 first."""
    return [(dtype, dtype) for dtype in KVDtype if dtype in SERVED]


def table(rows: Sequence[Row]) -> str:
    """Formats a table for readers; all repetitions are in the JSON."""
    lines = [
        "| format | MB | ms | G elements/s a core | of read bandwidth | GFLOP/s | over float32 |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for r in rows:
        lines.append(
            f"| {r.what} | {r.bytes / 1e6:.1f} | {r.median_s * 1e3:.2f} | "
            f"{r.elements_per_s_per_thread / 1e9:.2f} | {r.of_read_bandwidth:.2f} | "
            f"{r.gflops:.0f} | {r.over_float32:.2f} |"
        )
    return "\n".join(lines)


def bench(*, reference: bool) -> dict[str, object]:
    """Measures everything and prints tables; returns the content of the JSON."""
    start = time.perf_counter()
    CpuBackend()
    start_s = time.perf_counter() - start
    bandwidth = read_bandwidth(CASES[0].elements * 4)
    print(
        f"read bandwidth {bandwidth / 1e9:.1f} GB/s with {torch.get_num_threads()} threads; "
        f"kernels of every format loaded in {start_s:.2f} s"
    )
    rows: list[Row] = []
    for case in CASES:
        found = measure(case, pairs(), bandwidth, reference=reference)
        print(f"\n## {case.name}\n{table(found)}")
        rows += found
    return {
        "read_bytes_per_s": bandwidth,
        "start_s": start_s,
        "rows": [asdict(row) for row in rows],
    }
