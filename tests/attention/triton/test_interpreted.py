"""The kernels under Triton's CPU interpreter: decoding, indexing, masks and bytes, at small sizes.

The interpreter's bfloat16 is broken (NaN, subnormals, products), so rows here are float16 or float32
and bfloat16 pages are read in float32 and not written; what the compiled kernels do is for the GPU
tests.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.base import LongQuery
from kvant.attention.launching import Shape
from kvant.attention.long import list_long
from kvant.attention.triton import backend, dense_prefill, launch, prefill
from kvant.attention.triton.backend import TritonBackend, attend
from kvant.attention.triton.cut import NEVER_SPLIT
from kvant.attention.triton.dense_prefill import attend_dense
from kvant.attention.triton.info import SERVED
from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from tests.attention.saturating import LARGEST, counted
from tests.attention.triton import case

pytestmark = [
    pytest.mark.skipif(not case.INTERPRETED, reason="compiled here: the gpu tests cover this"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, on NaN and infinities
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FORMATS = [dtype for dtype in KVDtype if dtype in SERVED]
WRITTEN = [name for name in FORMATS if name is not KVDtype.BFLOAT16]
SPLIT = Shape(rows=16, tile=16, warps=1, stages=1, programs=8)
WHOLE = Shape(rows=16, tile=16, warps=1, stages=1, programs=1, least=NEVER_SPLIT)

MANY = Shape(rows=64, tile=16, warps=1, stages=1, programs=8)
MANY_WHOLE = Shape(rows=64, tile=16, warps=1, stages=1, programs=1, least=NEVER_SPLIT)


def check(x: case.Case, shape: Shape = SPLIT, *, bound: float = 2e-3, fixed: bool = False) -> None:
    written = x.cache.spec.k, x.cache.spec.v
    bfloat16 = any(choice is not None and choice.dtype is KVDtype.BFLOAT16 for choice in written)
    (case.EXACT if bfloat16 else TritonBackend()).write(x.cache, x.k, x.v, x.step)
    found = attend(x.cache, x.q, x.step, x.params, shape, fixed=fixed)
    assert case.error(found, x.expected()) < bound


@pytest.mark.parametrize("shape", [SPLIT, WHOLE], ids=["split", "whole"])
def test_masks_of_tiles_that_need_none_change_no_bit(shape: Shape) -> None:
    x = case.prepare(KVDtype.BFLOAT16, sequences=((70, 1), (16, 1), (33, 1)), dtype=torch.float32)
    case.EXACT.write(x.cache, x.k, x.v, x.step)
    masked = attend(x.cache, x.q, x.step, x.params, replace(shape, masked=True))
    assert torch.equal(masked, attend(x.cache, x.q, x.step, x.params, shape))
    assert case.error(masked, x.expected()) < 2e-3


@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_every_format_is_read_as_its_definition_says(name: KVDtype) -> None:
    check(case.prepare(name, sequences=((40, 1), (17, 2)), dtype=_dtype(name)))


def _dtype(*names: KVDtype) -> torch.dtype:
    return torch.float32 if KVDtype.BFLOAT16 in names else torch.float16


def _pairs() -> list[tuple[KVDtype, KVDtype]]:
    """Every format once as K and once as V, with partners of other word sizes."""
    return list(zip(FORMATS, FORMATS[3:] + FORMATS[:3], strict=True))


@pytest.mark.parametrize(("k", "v"), _pairs(), ids=str)
def test_k_and_v_formats_are_independent(k: KVDtype, v: KVDtype) -> None:
    check(case.prepare(k, v, sequences=((21, 1),), causal=False, dtype=_dtype(k, v)))


VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"window": 9},
    "window, both ways": {"window": 9, "causal": False},
    "all see all": {"causal": False},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0},
    "pages of 32": {"page_size": 32},
    "unequal head sizes": {"head_dims": (64, 96)},
    "head size 80": {"head_dims": (80, 80)},
    "one head each": {"heads": (3, 3)},
    "a scale per head": {"per_head_scales": True},
    "padding": {"padding": 3},
}


@pytest.mark.parametrize("variant", list(VARIANTS.values()), ids=list(VARIANTS))
@pytest.mark.parametrize("shape", [SPLIT, WHOLE], ids=["split", "whole"])
def test_every_kind_of_attention_matches_the_reference(
    variant: dict[str, Any], shape: Shape
) -> None:
    x = case.prepare(
        KVDtype.FP8_E4M3, KVDtype.NVFP4, sequences=((45, 3), (5, 5), (33, 1)), **variant
    )
    check(x, shape)


@pytest.mark.parametrize(
    ("shape", "fixed"), [(SPLIT, False), (WHOLE, False), (SPLIT, True)], ids=str
)
def test_a_work_map_that_is_written_once_gives_the_same_bits(
    shape: Shape, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = case.prepare(
        KVDtype.FP8_E4M3, sequences=((45, 3), (5, 5)), window=33, sinks=True, padding=3
    )
    TritonBackend().write(x.cache, x.k, x.v, x.step)
    scanned = attend(x.cache, x.q, x.step, x.params, shape, fixed=fixed)
    case.cut_with(monkeypatch, MOST_SCANNED=0)
    for _ in range(2):  # as two layers
        listed = attend(x.cache, x.q, x.step, x.params, shape, fixed=fixed)
        assert torch.equal(listed, scanned)
    assert len(x.step.lists) in (1, 2), "of the items, and of the tokens where parts are joined"


LONG_STEPS = {
    "squares of one size": ((40, 1), (256, 256), (300, 300), (270, 270), (260, 260)),
    "whole squares": ((256, 256), (256, 256)),
    "a stored beginning": ((12, 2), (500, 260), (1290, 266)),
}


@pytest.mark.parametrize("sequences", list(LONG_STEPS.values()), ids=list(LONG_STEPS))
def test_long_stretches_are_multiplied_as_squares_and_put_back_where_they_belong(
    sequences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = case.prepare(
        KVDtype.FP8_E4M3, KVDtype.INT4_PER_TOKEN_HEAD, heads=(2, 1), head_dims=(16, 16),
        sequences=sequences,
    )  # fmt: skip
    TritonBackend().write(x.cache, x.k, x.v, x.step)
    lengths = np.array([new for _, new in sequences])
    step = list_long(x.step, lengths, np.array([length for length, _ in sequences]))
    monkeypatch.setattr(prefill, "_product", _product)
    found = torch.full((len(x.q), 2, 16), torch.nan, dtype=x.q.dtype)
    prefill.attend_long(x.cache, x.q, found, step, x.params)
    first = step.long[0].first_token
    assert found[:first].isnan().all()
    assert case.error(found[first:], x.expected()[first:]) < 2e-3


@pytest.mark.parametrize("most", [600, 8448, 16384])
def test_every_product_of_new_prompts_is_planned_at_the_start(most: int) -> None:
    planned = set(prefill.sizes(most, 40960))
    for each in (256, 257, 300, 511, 513, 1025, 2049, 3000):
        for count in range(1, most // each + 1):
            lengths = np.full(count, each)
            step = list_long(case.prepare(KVDtype.FLOAT16).step, lengths, lengths)
            for some in prefill._together(step.long):
                size = prefill.square_size(each)
                assert (len(some), size, size, True) in planned


def _product(q: Any, k: Any, v: Any, scale: float, *, causal: bool) -> Any:
    """What cuDNN is asked for."""
    group = q.shape[2] // k.shape[2]
    k, v = (part.float().repeat_interleave(group, 2) for part in (k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", q.float(), k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    out = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v)
    return out.to(q.dtype).contiguous(), scores.logsumexp(-1)


@pytest.mark.parametrize(
    "variant",
    [VARIANTS[name] for name in ("window", "sinks", "pages of 32", "padding")],
    ids=["window", "sinks", "pages of 32", "padding"],
)
def test_eight_numbers_a_word_and_minima_are_masked_like_the_others(
    variant: dict[str, Any],
) -> None:
    x = case.prepare(
        KVDtype.TURBOQUANT_K3, KVDtype.TURBOQUANT_V3, sequences=((35, 3), (5, 5)), **variant
    )
    check(x, WHOLE)


def test_tokens_of_no_sequence_get_zeros() -> None:
    x = case.prepare(KVDtype.FLOAT16, sequences=((5, 2),), padding=2)
    TritonBackend().write(x.cache, x.k, x.v, x.step)
    for shape in (SPLIT, WHOLE):
        found = attend(x.cache, x.q, x.step, x.params, shape)
        assert torch.equal(found[2:], torch.zeros_like(found[2:]))
        assert found[:2].abs().sum() > 0


@pytest.mark.parametrize(
    ("shape", "new", "fewest_joined"),
    [(SPLIT, 3, 1), (SPLIT, 3, 64), (WHOLE, 3, 1), (MANY, 20, 64), (MANY_WHOLE, 20, 64)],
    ids=str,
)
def test_sequences_without_tokens_behind_a_step_change_nothing(
    shape: Shape, new: int, fewest_joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As recorded steps with pieces of prompts are padded: their bounds are of the largest step."""
    case.cut_with(monkeypatch, FEWEST_JOINED=fewest_joined)
    x = case.prepare(
        KVDtype.INT4_PER_TOKEN_HEAD, heads=(2, 1), head_dims=(32, 32),
        sequences=((45, new), (33, 1), (1, 1)),
    )  # fmt: skip
    TritonBackend().write(x.cache, x.k, x.v, x.step)
    count = len(x.q)
    behind = (torch.full((3,), count), torch.zeros(3), torch.full((3, 3), 10**6))
    names = ("cu_seqlens_q", "seqlens_kv", "page_table")
    padded = {
        name: torch.cat([getattr(x.step, name), rows.to(torch.int32)])
        for name, rows in zip(names, behind, strict=True)
    }
    step = replace(x.step, **padded, max_seqlen_q=count + 3, max_seqlen_kv=300)
    q = torch.cat([x.q, torch.full_like(x.q[:1], torch.nan).expand(3, -1, -1)])
    found = attend(x.cache, q, step, x.params, shape)
    assert case.error(found[:count], x.expected()) < 2e-3
    assert torch.equal(found[count:], torch.zeros_like(found[count:]))


PROMPTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "window": {"window": 40},
    "window, both ways": {"window": 40, "causal": False},
    "sinks and a soft cap": {"sinks": True, "softcap": 3.0},
}


@pytest.mark.parametrize("asked", list(PROMPTS.values()), ids=list(PROMPTS))
def test_prompts_of_several_sequences_share_a_launch(asked: dict[str, Any]) -> None:
    sequences = ((30, 1), (150, 80), (70, 70), (300, 65))
    x = case.prepare(KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.FP8_E4M3, sequences=sequences, **asked)
    TritonBackend().write(x.cache, x.k, x.v, x.step)
    new = np.array([n for _, n in sequences])
    first = np.cumsum(new) - new
    long = tuple(LongQuery(i, int(first[i]), int(new[i]), sequences[i][0]) for i in (1, 2, 3))
    found = torch.zeros_like(x.q)
    attend_dense(x.cache, x.q, found, replace(x.step, long=long), x.params)
    assert case.error(found[1:], x.expected()[1:]) < 2e-3


@pytest.mark.parametrize("asked", list(PROMPTS.values()), ids=list(PROMPTS))
@pytest.mark.parametrize("head", [64, 128, 256])
def test_devices_whose_programs_have_too_little_memory_keep_to_the_kernel_for_pages(
    head: int, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = case.prepare(KVDtype.FP8_E4M3, head_dims=(head, head), **asked)
    monkeypatch.setattr(dense_prefill, "has_ptx", lambda device: True)
    served = []
    for capability, kib in (((9, 0), 227), ((10, 0), 227), ((12, 0), 99)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        monkeypatch.setattr(
            dense_prefill, "shared_memory_of_a_program", lambda _, kib=kib: kib * 1024
        )
        served.append(dense_prefill.serves(x.cache, x.q, x.params, causal=x.step.causal))
    assert served == [True, True, False]


def test_an_empty_sequence_gets_zeros_and_harms_no_other() -> None:
    x = case.prepare(KVDtype.INT4_PER_TOKEN_HEAD, sequences=((20, 1), (1, 1)))
    TritonBackend().write(x.cache, x.k, x.v, x.step)
    x.step.seqlens_kv[1] = 0
    found = attend(x.cache, x.q, x.step, x.params, SPLIT)
    assert torch.equal(found[1], torch.zeros_like(found[1]))
    assert case.error(found[:1], x.expected()[:1]) < 2e-3


def test_in_batch_invariant_mode_a_query_has_the_same_bits_alone_and_among_others() -> None:
    x = case.prepare(KVDtype.INT8_PER_TOKEN_HEAD, sequences=((37, 9), (40, 1)))
    TritonBackend().write(x.cache, x.k, x.v, x.step)
    found = attend(x.cache, x.q, x.step, x.params, SPLIT, fixed=True)
    alone = copy.copy(x.step)
    for last in (8, 5):
        object.__setattr__(alone, "cu_seqlens_q", torch.tensor([0, 1], dtype=torch.int32))
        length = torch.tensor([37 - 8 + last], dtype=torch.int32)
        object.__setattr__(alone, "seqlens_kv", length)
        object.__setattr__(alone, "page_table", x.step.page_table[:1])
        object.__setattr__(alone, "max_seqlen_q", 1)
        one = attend(x.cache, x.q[last : last + 1], alone, x.params, SPLIT, fixed=True)
        assert torch.equal(one[0], found[last])


@pytest.mark.parametrize(
    "asked", [{"causal": False}, {"window": 20, "padding": 3}, {"sinks": True}], ids=str
)
def test_in_batch_invariant_mode_parts_take_no_more_memory_than_is_planned_for(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = case.prepare(
        KVDtype.INT4_PER_TOKEN_HEAD, heads=(2, 1), head_dims=(32, 32),
        sequences=((37, 7), (40, 3)), **asked,
    )  # fmt: skip
    monkeypatch.setattr(backend, "FIXED_SPLIT", 32)
    invariant = TritonBackend(batch_invariant=True)
    invariant.write(x.cache, x.k, x.v, x.step)
    whole = invariant.attend(x.cache, x.q, x.step, x.params)
    most = 2**14
    monkeypatch.setattr(backend, "MOST_PARTS", most)
    launched, taken = backend.combine, []

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*given: Any, **options: Any) -> None:
                taken.append(sum(part.numel() * part.element_size() for part in given[:2]))
                launched[grid](*given, **options)

            return launch

    monkeypatch.setattr(backend, "combine", Watched())
    for _ in range(2):  # as two layers
        assert torch.equal(invariant.attend(x.cache, x.q, x.step, x.params), whole)
    assert len(taken) == 4, "the second sequence is cut"
    assert max(taken) <= most


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_of_zeros_are_read_as_zeros(fixed: bool) -> None:
    """Their scales are the smallest there are: nothing made of them may overflow."""
    for name in (KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD):
        x = case.prepare(name, sequences=((20, 20),))
        zeros = torch.zeros_like(x.k)
        TritonBackend().write(x.cache, zeros, zeros, x.step)
        found = attend(x.cache, x.q, x.step, x.params, SPLIT, fixed=fixed)
        assert torch.equal(found, torch.zeros_like(found))


def test_float32_queries_are_computed_in_float32() -> None:
    for name in (KVDtype.FLOAT32, KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.NVFP4):
        x = case.prepare(name, sequences=((20, 1),), dtype=torch.float32)
        check(x, bound=2e-6)


ROWS = ("normal", "zeros", "constant", "infinite", "nan", "subnormal", "halves", "large")


@pytest.mark.parametrize(("name", "head_dim"), list(itertools.product(WRITTEN, (64, 96))), ids=str)
def test_encoders_equal_the_definition_byte_for_byte(name: KVDtype, head_dim: int) -> None:
    x = case.prepare(
        name, head_dims=(head_dim, head_dim), sequences=((16, 16),), dtype=torch.float32
    )
    k = x.k.clone()
    for row, kind in enumerate(ROWS):
        k[row] = _row(kind, k[row])
    step = x.step
    step.slot_mapping[9] = -1
    want = [plane.contiguous().clone() for plane in x.cache.k]
    keep = step.slot_mapping >= 0
    for plane, part in zip(want, codec_for(name).encode(k, x.cache.k_scale), strict=True):
        plane.flatten(0, 1)[step.slot_mapping[keep]] = part[keep]
    TritonBackend().write(x.cache, k, x.v, step)
    assert case.same_bytes(x.cache.k, want)


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("name", [KVDtype.INT4_FEEDBACK, KVDtype.INT4_SHORT_FEEDBACK], ids=str)
def test_keys_rounded_with_feedback_equal_the_definition_byte_for_byte(
    name: KVDtype, head_dim: int
) -> None:
    x = case.prepare(
        name, KVDtype.INT4_SHORT, heads=(2, 2), head_dims=(head_dim, head_dim), sequences=((16, 16),),
        dtype=torch.float32,
    )  # fmt: skip
    cache = replace(x.cache, k_rounding=case.rounding(2, head_dim))
    k = x.k.clone()
    for row, kind in enumerate(ROWS):
        k[row] = _row(kind, k[row])
    want = [plane.contiguous().clone() for plane in cache.k]
    for plane, part in zip(want, codec_for(name).encode(k, cache.k_rounding), strict=True):
        plane.flatten(0, 1)[x.step.slot_mapping] = part
    TritonBackend().write(cache, k, x.v, x.step)
    assert case.same_bytes(cache.k, want)


def _row(kind: str, x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    if kind == "zeros":
        x[:] = 0.0
        x[0, 0] = -0.0
    elif kind == "constant":
        x[:] = 1.5
    elif kind == "infinite":
        x[:, 0] = float("inf")
    elif kind == "nan":
        x[0, 5] = float("nan")
    elif kind == "subnormal":
        x *= 1e-41
    elif kind == "halves":
        x = (x * 4).round() / 2
    elif kind == "large":
        x *= 1e36
    return x


@pytest.mark.parametrize("name", [name for name in WRITTEN if name in LARGEST], ids=str)
def test_the_writer_counts_what_a_format_cannot_hold(name: KVDtype) -> None:
    rows = torch.float32 if name is KVDtype.FLOAT16 else torch.float16
    assert counted(TritonBackend(), name, rows=rows) == [(1, 2, 0)]


@pytest.mark.parametrize("name", [KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD], ids=str)
@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"window": 30}], ids=str)
def test_items_of_one_query_are_joined_where_they_are_computed(
    name: KVDtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case.cut_with(monkeypatch, FEWEST_JOINED=1)
    check(case.prepare(name, sequences=((90, 1), (17, 1), (1, 1)), padding=3, **options))


@pytest.mark.parametrize("options", [{}, {"window": 30}, {"padding": 1}], ids=str)
def test_a_sequence_alone_finds_its_work_as_among_others(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = case.prepare(KVDtype.FP8_E4M3, sequences=((90, 1),), **options)
    TritonBackend().write(x.cache, x.k, x.v, x.step)
    alone = TritonBackend().attend(x.cache, x.q, x.step, x.params)
    monkeypatch.setattr(backend, "lanes", lambda num_seqs: 128)
    assert torch.equal(TritonBackend().attend(x.cache, x.q, x.step, x.params), alone)
    assert case.error(alone, x.expected()) < 1e-3


def test_many_rows_are_rotated_by_an_ordinary_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    class Watched:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *given, **named: launched.append((given[2], named["AHEAD"]))

    monkeypatch.setattr(launch, "rotate_rows", Watched())
    monkeypatch.setattr(launch, "ahead", lambda device: {"AHEAD": True})
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 4)
    for rows in (1, 32, 33):
        launch.rotate(torch.zeros(rows, 16), 16)
    assert launched == [(1, True), (32, True), (33, False)]
