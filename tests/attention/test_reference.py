"""The reference backend against transformers' eager attention in float64, over what is stored."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvant.attention.base import AttentionParams, Step
from kvant.attention.reference.backend import ReferenceBackend, backend
from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from kvant.kv.pool import LayerCache
from tests.attention import driver, oracle

EXACT = ReferenceBackend(torch.float64)
FORMATS = list(KVDtype)
EXTRA: dict[str, dict[str, Any]] = {
    "plain": {}, "sinks": {"sinks": True}, "softcap": {"softcap": 5.0}
}  # fmt: skip
HEAD_DIMS = (16, 32, 96)  # every format takes them; 96 is no power of two


@dataclass(frozen=True)
class Case:
    """One layer and one step, and what was written before and in it."""

    cache: LayerCache
    step: Step
    params: AttentionParams
    q: Tensor
    k: Tensor
    v: Tensor


def poison(cache: LayerCache) -> None:
    """Fill all storage with NaN (0xff in bytes: NaN as e4m3 and e5m2, -1 as int8)."""
    for plane in (*cache.k, *cache.v):
        plane.view(torch.uint8).fill_(0xFF)


def prepare(
    *,
    k: KVDtype = KVDtype.FLOAT32,
    v: KVDtype | None = None,
    heads: tuple[int, int] = (4, 2),
    head_dims: tuple[int, int] = (32, 32),
    page_size: int = 16,
    sequences: tuple[tuple[int, int], ...] = ((40, 1), (23, 23)),
    causal: bool = True,
    window: int | None = None,
    sinks: bool = False,
    softcap: float = 0.0,
    padding: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Sequences of (length, new tokens) over scattered pages; the older tokens are already written.

    Everything that is not written holds NaN, page tables past a sequence's end point to a NaN page.
    """
    made = torch.Generator().manual_seed(seed)
    geometry = driver.layer(
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim_k=head_dims[0],
        head_dim_v=head_dims[1],
        window=window,
        sinks=sinks,
        softcap=softcap,
        causal=causal,
    )
    counts = [-(-length // page_size) for length, _ in sequences]
    pages = (1 + torch.randperm(sum(counts) + 2, generator=made)).tolist()
    tables = [[pages.pop() for _ in range(count)] for count in counts]
    plan = driver.plan([geometry], k, v, page_size=page_size, fixed_scale=0.013)
    cache = driver.pool(plan, sum(counts) + 3)[0]
    poison(cache)

    def normal(tokens: int, num_heads: int, head_dim: int) -> Tensor:
        return torch.randn(tokens, num_heads, head_dim, generator=made).to(dtype)

    older = [(length - new, table) for (length, new), table in zip(sequences, tables, strict=True)]
    before = [(old, old, table) for old, table in older if old]
    if before:
        lengths, new, chosen = zip(*before, strict=True)
        total = sum(new)
        EXACT.write(
            cache,
            normal(total, heads[1], head_dims[0]),
            normal(total, heads[1], head_dims[1]),
            driver.step(chosen, lengths, new, page_size=page_size),
        )
    lengths, new = zip(*sequences, strict=True)
    step = driver.step(tables, lengths, new, page_size=page_size, causal=causal, padding=padding)
    tokens = len(step.positions)
    return Case(
        cache,
        step,
        AttentionParams(
            scale=head_dims[0] ** -0.5,
            window=window,
            softcap=softcap,
            sinks=torch.randn(heads[0], generator=made) if sinks else None,
        ),
        normal(tokens, heads[0], head_dims[0]),
        normal(tokens, heads[1], head_dims[0]),
        normal(tokens, heads[1], head_dims[1]),
    )


def check_exact(case: Case) -> None:
    """In float64 the backend agrees with the judge to what the judge's own softmax leaves open."""
    EXACT.write(case.cache, case.k, case.v, case.step)
    found = EXACT.attend(case.cache, case.q.double(), case.step, case.params)
    expected = oracle.attend(case.cache, case.q, case.step, case.params)
    close = 2e-6 if case.params.softcap else 1e-12
    torch.testing.assert_close(found, expected, atol=close, rtol=close)


cases = st.fixed_dictionaries(
    {
        "k": st.sampled_from(FORMATS),
        "v": st.sampled_from(FORMATS),
        "heads": st.tuples(st.integers(1, 4), st.integers(1, 3)).map(lambda t: (t[0] * t[1], t[1])),
        "head_dims": st.tuples(st.sampled_from(HEAD_DIMS), st.sampled_from(HEAD_DIMS)),
        "page_size": st.sampled_from((1, 4, 16)),
        "sequences": st.lists(
            st.integers(1, 50).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
            min_size=1,
            max_size=4,
        )
        .filter(lambda found: any(new for _, new in found))
        .map(tuple),
        "causal": st.booleans(),
        "window": st.none() | st.integers(1, 60),
        "padding": st.integers(0, 3),
        "seed": st.integers(0, 2**32),
    }
)


@settings(max_examples=60, deadline=None)
@given(cases, st.sampled_from(("plain", "sinks", "softcap")))
def test_attention_is_what_transformers_computes_on_the_stored_rows(
    facts: dict[str, Any], kind: str
) -> None:
    extra = EXTRA[kind]
    check_exact(prepare(**facts, **extra))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_format_is_read_as_it_was_stored(dtype: KVDtype, causal: bool) -> None:
    check_exact(prepare(k=dtype, causal=causal, sequences=((37, 5), (20, 1))))


def pairs() -> list[tuple[KVDtype, KVDtype]]:
    """Each format beside two others as K and as V: pairwise, not the full cross."""
    return [
        (dtype, FORMATS[(i + step) % len(FORMATS)])
        for step in (1, 4)
        for i, dtype in enumerate(FORMATS)
    ]


@pytest.mark.parametrize(("k", "v"), pairs(), ids=lambda dtype: str(dtype))
def test_k_and_v_may_have_different_formats_and_head_sizes(k: KVDtype, v: KVDtype) -> None:
    check_exact(prepare(k=k, v=v, head_dims=(96, 32), sequences=((19, 3),)))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 100])
@pytest.mark.parametrize("new", [1, 8, 40])
def test_a_window_counts_the_token_itself(window: int, causal: bool, new: int) -> None:
    check_exact(prepare(window=window, causal=causal, sequences=((40, new),)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "sinks", "softcap"])
def test_float32_arithmetic_errs_by_float32_rounding_only(dtype: torch.dtype, kind: str) -> None:
    extra = EXTRA[kind]
    case = prepare(sequences=((200, 1), (90, 90), (130, 7)), dtype=dtype, **extra)
    fast = backend()
    fast.write(case.cache, case.k, case.v, case.step)
    found = fast.attend(case.cache, case.q, case.step, case.params)
    expected = oracle.attend(case.cache, case.q, case.step, case.params)
    assert found.dtype is dtype
    rounding = 4e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, atol=rounding, rtol=rounding)


def test_what_else_is_in_the_step_does_not_change_a_bit() -> None:
    together = prepare(sequences=((40, 3), (23, 23), (300, 1)))
    fast = backend()
    fast.write(together.cache, together.k, together.v, together.step)
    found = fast.attend(together.cache, together.q, together.step, together.params)
    step, offsets = together.step, together.step.cu_seqlens_q.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(offsets)):
        alone = Step(
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
            seqlens_kv=step.seqlens_kv[i : i + 1],
            page_table=step.page_table[i : i + 1],
            slot_mapping=step.slot_mapping[start:end],
            positions=step.positions[start:end],
            max_seqlen_q=end - start,
            max_seqlen_kv=int(step.seqlens_kv[i]),
        )
        one = fast.attend(together.cache, together.q[start:end], alone, together.params)
        assert torch.equal(one, found[start:end])


def test_many_long_sequences_are_decoded_in_groups_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = prepare(sequences=((60, 1), (23, 23), (5, 5), (90, 1)))
    fast = backend()
    fast.write(case.cache, case.k, case.v, case.step)
    whole = fast.attend(case.cache, case.q, case.step, case.params)
    monkeypatch.setattr("kvant.attention.reference.backend.GROUP_PAGES", 4)
    assert torch.equal(fast.attend(case.cache, case.q, case.step, case.params), whole)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@given(slots=st.lists(st.integers(0, 31), unique=True, min_size=1, max_size=12), data=st.data())
@settings(max_examples=15, deadline=None)
def test_writes_land_in_their_slots_and_nowhere_else(
    dtype: KVDtype, slots: list[int], data: st.DataObject
) -> None:
    mapped = [-1 if data.draw(st.booleans()) else slot for slot in slots]
    plan = driver.plan([driver.layer()], dtype, page_size=4, fixed_scale=0.02)
    cache = driver.pool(plan, 8)[0]
    for plane in (*cache.k, *cache.v):
        plane.fill_(99)
    k, v = torch.randn(2, len(slots), 2, 32)
    step = Step(
        cu_seqlens_q=torch.tensor([0, len(slots)], dtype=torch.int32),
        seqlens_kv=torch.tensor([len(slots)], dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.tensor(mapped),
        positions=torch.zeros(len(slots), dtype=torch.int64),
        max_seqlen_q=len(slots),
        max_seqlen_kv=len(slots),
    )
    backend().write(cache, k, v, step)
    codec = codec_for(dtype)
    for planes, rows, scale in ((cache.k, k, cache.k_scale), (cache.v, v, cache.v_scale)):
        for plane, encoded in zip(planes, codec.encode(rows, scale), strict=True):
            expected = torch.full_like(plane, 99)
            for row, slot in enumerate(mapped):
                if slot >= 0:
                    expected[slot // 4, slot % 4] = encoded[row]
            assert torch.equal(plane, expected)


def test_a_query_sees_its_own_token_as_stored_not_as_computed() -> None:
    """One token alone attends to itself: the answer is its decoded value, not its value."""
    case = prepare(k=KVDtype.INT4_PER_TOKEN_HEAD, sequences=((1, 1),), heads=(2, 2))
    EXACT.write(case.cache, case.k, case.v, case.step)
    found = EXACT.attend(case.cache, case.q.double(), case.step, case.params)
    _, stored = oracle.stored_rows(case.cache, case.step.page_table[0], 1)
    torch.testing.assert_close(found, stored)
    assert not torch.allclose(found, case.v.double(), atol=1e-3)


def test_tokens_of_no_sequence_get_zeros() -> None:
    case = prepare(sequences=((9, 2),), padding=3)
    EXACT.write(case.cache, case.k, case.v, case.step)
    found = EXACT.attend(case.cache, case.q, case.step, case.params)
    assert torch.equal(found[2:], torch.zeros_like(found[2:]))


def test_nan_in_a_query_stays_with_its_sequence() -> None:
    case = prepare(sequences=((9, 2), (12, 1)))
    case.q[:2] = float("nan")
    EXACT.write(case.cache, case.k, case.v, case.step)
    found = EXACT.attend(case.cache, case.q, case.step, case.params)
    assert found[:2].isnan().all()
    assert found[2:].isfinite().all()
