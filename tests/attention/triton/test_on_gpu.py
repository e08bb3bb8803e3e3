"""The compiled kernels against the float64 reference over stored bytes: python -m pytest -m gpu here."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.base import HeadRotation
from kvant.attention.long import list_long
from kvant.attention.triton import backend as backend_module
from kvant.attention.triton import dense_prefill, launch, prefill
from kvant.attention.triton.backend import TritonBackend
from kvant.attention.triton.format import format_of
from kvant.attention.triton.info import SERVED
from kvant.kernels.triton.zero import PageEraser
from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from tests.attention.saturating import LARGEST, counted
from tests.attention.triton import case

pytestmark = pytest.mark.gpu

FORMATS = [name for name in KVDtype if name in SERVED - {KVDtype.FP8_E4M3FNUZ}]  # AMD's alone
QUANTISED = [name for name in FORMATS if name.format.bits < 16]
FLOATS = (torch.bfloat16, torch.float16)
MANY = (*((17 * i % 900 + 1, 1) for i in range(180)), (3000, 1), (5, 1))
LONG = ((700, 1), (33, 1), (1, 1), (2049, 1))
VERIFY = ((700, 16), (33, 5), (16, 16), (1100, 16))
PREFILL = ((300, 300), (700, 130), (65, 1))
STEPS = {"decode": LONG, "many": MANY, "verify": VERIFY, "prefill": PREFILL}


def check(x: case.Case, backend: TritonBackend | None = None) -> None:
    """16-bit products with float32 sums: bfloat16 keeps 8 bits, float16 11."""
    backend = backend or TritonBackend()
    expected_bytes = _written(x)
    backend.write(x.cache, x.k, x.v, x.step)
    assert case.same_bytes((*x.cache.k, *x.cache.v), expected_bytes)
    found = backend.attend(x.cache, x.q, x.step, x.params)
    names = {choice.dtype for choice in (x.cache.spec.k, x.cache.spec.v) if choice is not None}
    bound = 1e-3
    if x.q.dtype is torch.bfloat16 or KVDtype.BFLOAT16 in names:
        bound = 5e-3
    if x.q.dtype is torch.float32:
        bound = 2e-5
    assert case.error(found, x.expected()) < bound


@pytest.mark.parametrize("tokens", [3, 700])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", [KVDtype.INT4_FEEDBACK, KVDtype.INT4_SHORT_FEEDBACK], ids=str)
def test_keys_rounded_with_feedback_equal_the_definition_byte_for_byte(
    name: KVDtype, head_dim: int, tokens: int
) -> None:
    """By the writer, and by the one that turns keys, here by no angle."""
    x = case.prepare(
        name, KVDtype.INT4_SHORT, heads=(8, 8), head_dims=(head_dim, head_dim), dtype=torch.bfloat16,
        sequences=((tokens, tokens),), device="cuda",
    )  # fmt: skip
    cache = replace(x.cache, k_rounding=case.rounding(8, head_dim, "cuda"))
    k = x.k * torch.exp2(torch.arange(tokens, device="cuda") % 50 - 30)[:, None, None].bfloat16()
    k[0], k[1, 0, 5] = 0, float("nan")
    want = [plane.contiguous().clone() for plane in cache.k]
    for plane, part in zip(want, codec_for(name).encode(k, cache.k_rounding), strict=True):
        plane.flatten(0, 1)[x.step.slot_mapping] = part
    TritonBackend().write(cache, k, x.v, x.step)
    assert case.same_bytes(cache.k, want)
    for plane in cache.k:
        plane.view(torch.uint8).fill_(0)
    for plane in want:
        kept = plane.flatten(0, 1)[x.step.slot_mapping].clone()
        plane.view(torch.uint8).fill_(0)
        plane.flatten(0, 1)[x.step.slot_mapping] = kept
    angles = torch.zeros(tokens, head_dim // 2, dtype=torch.bfloat16, device="cuda")
    no_turn = HeadRotation(angles + 1, angles, True, None, None, 1e-6)
    assert x.v is not None
    qkv = torch.cat([part.flatten(1) for part in (x.q, k, x.v)], 1)
    TritonBackend().write_rotated(cache, qkv, no_turn, x.step)
    assert case.same_bytes(cache.k, want)


def _written(x: case.Case) -> list[torch.Tensor]:
    """What storage holds after the step's rows are written by definition."""
    keep = x.step.slot_mapping >= 0
    out = []
    for planes, choice, rows, scale in (
        (x.cache.k, x.cache.spec.k, x.k, x.cache.k_scale),
        (x.cache.v, x.cache.spec.v, x.v, x.cache.v_scale),
    ):
        assert choice is not None
        for plane, part in zip(planes, codec_for(choice.dtype).encode(rows, scale), strict=True):
            plane = plane.contiguous().clone()
            plane.flatten(0, 1)[x.step.slot_mapping[keep]] = part[keep]
            out.append(plane)
    return out


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("sequences", list(STEPS.values()), ids=list(STEPS))
@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_every_format_is_written_and_read_as_its_definition_says(
    name: KVDtype, sequences: Any, causal: bool, dtype: torch.dtype
) -> None:
    if dtype is torch.float32:
        sequences = tuple((length, min(new, 4)) for length, new in sequences)
    check(
        case.prepare(
            name, heads=(8, 2), head_dims=(128, 128), sequences=sequences, causal=causal,
            dtype=dtype, device="cuda",
        )
    )  # fmt: skip


def _pairs() -> list[tuple[KVDtype, KVDtype]]:
    ordered = list(itertools.permutations(FORMATS, 2))
    return ordered[::5]  # every format several times on either side


@pytest.mark.parametrize(("k", "v"), _pairs(), ids=str)
def test_k_and_v_formats_are_independent(k: KVDtype, v: KVDtype) -> None:
    for sequences in (LONG, VERIFY):
        check(
            case.prepare(
                k, v, heads=(8, 2), head_dims=(128, 128), sequences=sequences,
                dtype=torch.bfloat16, device="cuda",
            )
        )  # fmt: skip


VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"window": 100},
    "window, both ways": {"window": 100, "causal": False},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0},
    "pages of 32": {"page_size": 32},
    "pages of 64": {"page_size": 64},
    "unequal head sizes": {"head_dims": (128, 64)},
    "head size 64": {"head_dims": (64, 64)},
    "head size 80": {"head_dims": (80, 80)},
    "head size 96": {"head_dims": (96, 96)},
    "head size 256": {"head_dims": (256, 256)},
    "head size 512": {"head_dims": (512, 512)},
    "one head each": {"heads": (4, 4)},
    "groups of 3": {"heads": (9, 3)},
    "groups of 16": {"heads": (32, 2)},
    "a scale per head": {"per_head_scales": True},
    "padding": {"padding": 3},
}


@pytest.mark.parametrize("sequences", list(STEPS.values()), ids=list(STEPS))
@pytest.mark.parametrize("variant", list(VARIANTS.values()), ids=list(VARIANTS))
@pytest.mark.parametrize(
    ("k", "v"),
    [
        (KVDtype.BFLOAT16, KVDtype.BFLOAT16),
        (KVDtype.FP8_E4M3, KVDtype.NVFP4),
        (KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT8_PER_TOKEN_HEAD),
        (KVDtype.NVFP4, KVDtype.INT4_PER_TOKEN_HEAD),
        (KVDtype.TURBOQUANT_K4, KVDtype.TURBOQUANT_V4),
    ],
    ids=str,
)
def test_every_kind_of_attention_matches_the_reference(
    k: KVDtype, v: KVDtype, variant: dict[str, Any], sequences: Any
) -> None:
    asked: dict[str, Any] = {"heads": (8, 2), "head_dims": (128, 128), **variant}
    check(case.prepare(k, v, sequences=sequences, dtype=torch.bfloat16, device="cuda", **asked))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("name", QUANTISED, ids=str)
def test_scores_and_values_may_grow_along_the_keys(name: KVDtype, causal: bool) -> None:
    """Maxima and value scales of the first keys are far too small for the last ones."""
    x = case.prepare(
        name, heads=(8, 2), head_dims=(128, 128), sequences=((600, 600), (200, 40)), causal=causal,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    growth = torch.logspace(-4, 2, 640, base=2, device="cuda")[:, None, None].bfloat16()
    check(replace(x, k=x.k * growth, v=x.v * growth))


@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_in_batch_invariant_mode_a_query_has_the_same_bits_however_it_is_asked(
    name: KVDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TritonBackend(batch_invariant=True)
    x = case.prepare(
        name, heads=(8, 2), head_dims=(128, 128), sequences=((2100, 40), (700, 9), (1300, 1)),
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    check(x, backend)
    found = backend.attend(x.cache, x.q, x.step, x.params)
    for last in (39, 17):
        one = replace(
            x.step,
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
            seqlens_kv=torch.tensor([2060 + last + 1], dtype=torch.int32, device="cuda"),
            page_table=x.step.page_table[:1],
            max_seqlen_q=1,
            max_seqlen_kv=2060 + last + 1,
        )
        alone = backend.attend(x.cache, x.q[last : last + 1], one, x.params)
        assert torch.equal(alone[0], found[last])
    monkeypatch.setattr(backend_module, "MOST_PARTS", 2**19)  # of 28 queries
    assert torch.equal(backend.attend(x.cache, x.q, x.step, x.params), found)


@pytest.mark.parametrize("head_dim", [64, 96, 256, 512])
@pytest.mark.parametrize("window", [None, 100])
def test_three_bits_are_read_at_every_head_size_they_have(
    head_dim: int, window: int | None
) -> None:
    for causal, sequences in itertools.product((True, False), (LONG, VERIFY)):
        check(
            case.prepare(
                KVDtype.TURBOQUANT_K3, KVDtype.TURBOQUANT_V3, heads=(8, 2), causal=causal,
                head_dims=(head_dim, head_dim), sequences=sequences, window=window, sinks=True,
                dtype=torch.bfloat16, device="cuda",
            )
        )  # fmt: skip


def test_hundreds_of_sequences_are_joined_like_few() -> None:
    lengths = [1 + 7 * i % 60 for i in range(299)]
    sequences = [(length, 1) for length in (*lengths[:150], 5000, *lengths[150:])]
    check(
        case.prepare(
            KVDtype.INT4_PER_TOKEN_HEAD, heads=(32, 8), head_dims=(128, 128), sequences=sequences,
            sinks=True, dtype=torch.bfloat16, device="cuda",
        )
    )  # fmt: skip


def test_a_captured_graph_follows_the_lengths() -> None:
    backend = TritonBackend()
    x = case.prepare(
        KVDtype.INT8_PER_TOKEN_HEAD, heads=(8, 2), head_dims=(128, 128),
        sequences=((900, 1), (1500, 1)), dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    backend.write(x.cache, x.k, x.v, x.step)
    backend.attend(x.cache, x.q, x.step, x.params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = backend.attend(x.cache, x.q, x.step, x.params)
    for lengths in ((900, 1500), (17, 1499), (1, 1)):
        x.step.seqlens_kv.copy_(torch.tensor(lengths, dtype=torch.int32))
        found.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert case.error(found, x.expected()) < 5e-3


@pytest.mark.parametrize("sequences", [((600, 1),), VERIFY, ((900, 300),)], ids=str)
@pytest.mark.parametrize(
    ("k", "v"),
    [
        (KVDtype.BFLOAT16, KVDtype.BFLOAT16),
        (KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.FP8_E4M3),
        (KVDtype.NVFP4, KVDtype.INT4_PER_TOKEN_HEAD),
        (KVDtype.TURBOQUANT_K3, KVDtype.TURBOQUANT_V3),
    ],
    ids=str,
)
def test_rows_beyond_int32_words_are_written_and_reached(
    k: KVDtype, v: KVDtype, sequences: Any
) -> None:
    x = case.prepare(
        k, v, heads=(8, 4), head_dims=(128, 128), sequences=sequences, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    lengths, new = (np.array(numbers) for numbers in zip(*sequences, strict=True))
    near = list_long(x.step, new, lengths)
    codes = ((x.cache.k[0], k), (x.cache.v[0], v))
    least = min(plane[0].view(format_of(name).word).numel() for plane, name in codes)
    skipped = 2**31 // least + 1
    cache = case.far_away(x.cache, skipped)
    moved = list_long(
        replace(
            x.step,
            page_table=x.step.page_table + skipped,
            slot_mapping=x.step.slot_mapping + skipped * x.cache.page_size,
        ),
        new,
        lengths,
    )
    backend = TritonBackend()
    backend.write(x.cache, x.k, x.v, near)
    backend.write(cache, x.k, x.v, moved)
    for planes, bigs in ((x.cache.k, cache.k), (x.cache.v, cache.v)):
        assert case.same_bytes(planes, [big[skipped:] for big in bigs])
    found = backend.attend(cache, x.q, moved, x.params)
    assert torch.equal(found, backend.attend(x.cache, x.q, near, x.params))


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"window": 100}], ids=str)
@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_a_recorded_step_with_pieces_of_prompts_follows_what_it_is_given(
    name: KVDtype, options: dict[str, Any]
) -> None:
    """The padding holds NaN, and its page table names pages of real sequences."""
    tokens, seqs = 192, 8
    x = case.prepare(
        name, heads=(8, 2), head_dims=(128, 128), sequences=((700, 90), (33, 33), (1500, 60), (40, 1)),
        dtype=torch.bfloat16, device="cuda", **options,
    )  # fmt: skip
    backend = TritonBackend()
    backend.write(x.cache, x.k, x.v, x.step)
    given = len(x.q)
    q = torch.full((tokens, *x.q.shape[1:]), torch.nan, dtype=torch.bfloat16, device="cuda")
    q[:given] = x.q
    ends = torch.zeros(seqs + 1, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(seqs, dtype=torch.int32, device="cuda")
    table = torch.full((seqs, 128), 1, dtype=torch.int32, device="cuda")
    table[:4, : x.step.page_table.shape[1]] = x.step.page_table

    def attend() -> torch.Tensor:
        step = replace(
            x.step, cu_seqlens_q=ends, seqlens_kv=lengths, page_table=table,
            max_seqlen_q=tokens, max_seqlen_kv=2048,
        )  # fmt: skip
        return backend.attend(x.cache, q, step, x.params)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    for news in ((90, 33, 60, 1), (1, 1, 1, 1), (70, 33, 1, 1), (90, 1, 60, 1)):
        cu = torch.tensor([0, *np.cumsum(news)], dtype=torch.int32, device="cuda")
        ends[:] = cu[-1]
        ends[:5] = cu
        lengths[:4] = x.step.seqlens_kv
        q[:] = torch.nan
        q[: sum(news)] = x.q[: sum(news)]
        found.fill_(torch.nan)
        graph.replay()
        step = replace(x.step, cu_seqlens_q=cu, max_seqlen_q=max(news))
        right = case.EXACT.attend(x.cache, q[: sum(news)].double(), step, x.params)
        assert case.error(found[: sum(news)], right) < 5e-3, news
        assert not found[sum(news) :].any()


LONG_STEPS = {
    "square": ((700, 700),),
    "after a prefix": ((6500, 900), (1025, 1000)),
    "beside others": ((40, 1), (900, 7), (33, 33), (5000, 300), (2100, 2100)),
    "squares of one size": ((40, 1), (300, 300), (270, 270), (512, 512), (400, 400), (1024, 1024)),
    "whole squares": ((512, 512), (512, 512), (512, 512)),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sequences", list(LONG_STEPS.values()), ids=list(LONG_STEPS))
@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_long_prompts_read_what_is_stored(
    name: KVDtype, sequences: Any, dtype: torch.dtype
) -> None:
    x = case.prepare(
        name, heads=(8, 2), head_dims=(128, 128), sequences=sequences, dtype=dtype, device="cuda"
    )
    lengths = np.array([new for _, new in sequences])
    step = list_long(x.step, lengths, np.array([length for length, _ in sequences]))
    assert step.long
    assert prefill.serves(x.cache, x.q, x.params, causal=True)
    check(replace(x, step=step))


LONG_KINDS: dict[str, dict[str, Any]] = {
    "all": {"causal": False},
    "window": {"window": 100},
    "window, both ways": {"window": 100, "causal": False},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0},
    "head size 64": {"head_dims": (64, 64), "softcap": 3.0},
    "head size 256": {"head_dims": (256, 256)},
    # rows whose first tiles lie before their window, at other factors of the softmax than 128's
    "window, head size 64": {"window": 100, "head_dims": (64, 64)},
    "window, both ways, head size 256": {"window": 100, "causal": False, "head_dims": (256, 256)},
}


@pytest.mark.parametrize("asked", list(LONG_KINDS.values()), ids=list(LONG_KINDS))
@pytest.mark.parametrize("sequences", list(LONG_STEPS.values()), ids=list(LONG_STEPS))
@pytest.mark.parametrize("name", [KVDtype.BFLOAT16, KVDtype.INT4_PER_TOKEN_HEAD], ids=str)
def test_long_prompts_of_every_kind_read_what_is_stored(
    name: KVDtype, sequences: Any, asked: dict[str, Any]
) -> None:
    x = case.prepare(
        name, sequences=sequences, dtype=torch.bfloat16, device="cuda",
        **{"heads": (8, 2), "head_dims": (128, 128), **asked},
    )  # fmt: skip
    lengths = np.array([new for _, new in sequences])
    step = list_long(x.step, lengths, np.array([length for length, _ in sequences]))
    assert not prefill.serves(x.cache, x.q, x.params, causal=step.causal)
    assert dense_prefill.serves(x.cache, x.q, x.params, causal=step.causal)
    check(replace(x, step=step))


@pytest.mark.parametrize("lengths", [(40000,), (70000, 3)], ids=["one", "two"])
@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_few_sequences_are_cut_into_many_parts(name: KVDtype, lengths: tuple[int, ...]) -> None:
    check(
        case.prepare(
            name, heads=(32, 8), head_dims=(128, 128), sequences=[(n, 1) for n in lengths],
            dtype=torch.bfloat16, device="cuda",
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 200}, {"sinks": True, "padding": 2}], ids=str)
@pytest.mark.parametrize("lengths", [(900,), (700, 1, 2049)], ids=str)
def test_launches_ahead_give_the_bits_of_launches_one_after_another(
    name: KVDtype,
    options: dict[str, Any],
    lengths: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = case.prepare(
        name, heads=(32, 8), head_dims=(128, 128), sequences=[(n, 1) for n in lengths],
        dtype=torch.bfloat16, device="cuda", **options,
    )  # fmt: skip
    angles = torch.rand(4096, 64, device="cuda").to(torch.bfloat16)
    weight = torch.rand(128, device="cuda").to(torch.bfloat16)
    rotation = HeadRotation(angles, angles, True, weight, weight, 1e-6)
    qkv = torch.cat([part.flatten(1) for part in (x.q, x.k, x.v)], dim=1)
    given = [qkv.roll(shift, 1) for shift in range(30)]  # another token's rows each time

    def run() -> list[torch.Tensor]:
        backend, found = TritonBackend(), []
        for rows in given:
            q = backend.write_rotated(x.cache, rows, rotation, x.step)
            found.append(backend.attend(x.cache, q, x.step, x.params))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(launch, "launches_ahead", lambda device: False)
        expected = run()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = run()
        for _ in range(3):
            graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_pages_are_cleared_in_every_group_and_no_other_page_is_touched() -> None:
    groups = [
        torch.full((9, size), 7, dtype=torch.uint8, device="cuda") for size in (16 * 68, 16 * 400)
    ]
    chosen = [[3, 8], [1]]
    PageEraser([[pages] for pages in groups]).clear(chosen)
    for pages, gone in zip(groups, chosen, strict=True):
        cleared = (pages == 0).all(1).tolist()
        kept = (pages == 7).all(1).tolist()
        assert cleared == [page in gone for page in range(9)]
        assert kept == [page not in gone for page in range(9)]


@pytest.mark.parametrize("name", [*FORMATS], ids=str)
def test_the_writer_counts_what_a_format_cannot_hold(name: KVDtype) -> None:
    expected = [(1, 2, 0)] if name in LARGEST else []
    assert counted(TritonBackend(), name, rows=torch.bfloat16, device="cuda") == expected


@pytest.mark.parametrize("name", FORMATS, ids=str)
@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"window": 200}], ids=str)
def test_items_of_one_query_are_joined_where_they_are_computed(
    name: KVDtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case.cut_with(monkeypatch, FEWEST_JOINED=1)
    x = case.prepare(
        name, sequences=LONG, padding=3, dtype=torch.bfloat16, device="cuda", **options
    )
    check(x)
    check(x)  # what programs count is as it was before
