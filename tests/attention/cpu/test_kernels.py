"""The CPU kernels: bytes against the codecs, attention against the float64 oracle, bits among themselves."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvant.attention.base import Step
from kvant.attention.cpu.backend import CpuBackend, scratch_bytes
from kvant.attention.cpu.formats import SERVED
from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from tests.attention import driver, oracle
from tests.attention.test_reference import EXTRA, Case, pairs, prepare
from tests.kv.codecs.comparison import plane_bytes
from tests.strategies import finite_rows

BACKEND = CpuBackend()
FORMATS = [dtype for dtype in KVDtype if dtype is not KVDtype.FP8_E4M3FNUZ]


def run(case: Case) -> Tensor:
    BACKEND.write(case.cache, case.k, case.v, case.step)
    return BACKEND.attend(case.cache, case.q, case.step, case.params)


def check(case: Case, *, error: float = 1e-5) -> None:
    """float32 arithmetic's rounding and no more, over what is stored."""
    found = run(case)
    expected = oracle.attend(case.cache, case.q, case.step, case.params)
    assert found.dtype is case.q.dtype
    close = max(error, torch.finfo(found.dtype).eps)
    torch.testing.assert_close(found.double(), expected, atol=close, rtol=close)


def test_every_format_but_another_device_s_has_kernels() -> None:
    assert set(FORMATS) == SERVED


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_format_is_read_as_it_is_stored(dtype: KVDtype, causal: bool) -> None:
    """One query and few take codes as they are, many decode a tile first; over several splits."""
    check(prepare(k=dtype, causal=causal, sequences=((600, 1), (300, 5), (110, 90))))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_head_sizes_that_fill_no_tile_of_lanes(dtype: KVDtype) -> None:
    for head_dims in ((96, 32), (32, 96), (64, 160), (128, 64)):
        check(prepare(k=dtype, head_dims=head_dims, sequences=((70, 3), (40, 30)), seed=1))


def test_head_sizes_in_steps_of_sixteen() -> None:
    for dtype in (KVDtype.FLOAT16, KVDtype.FP8_E5M2, KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.NVFP4):
        for head_dims in ((16, 80), (80, 16), (48, 112)):
            check(prepare(k=dtype, head_dims=head_dims, sequences=((70, 3), (40, 30))))


@pytest.mark.parametrize(("k", "v"), pairs()[: len(KVDtype)], ids=lambda dtype: str(dtype))
def test_k_and_v_may_have_different_formats_and_head_sizes(k: KVDtype, v: KVDtype) -> None:
    if KVDtype.FP8_E4M3FNUZ not in (k, v):
        check(prepare(k=k, v=v, head_dims=(96, 32), sequences=((19, 3),)))


cases = st.fixed_dictionaries(
    {
        "k": st.sampled_from(FORMATS),
        "v": st.sampled_from(FORMATS),
        "heads": st.tuples(st.integers(1, 9), st.integers(1, 3)).map(lambda t: (t[0] * t[1], t[1])),
        "head_dims": st.tuples(st.sampled_from((32, 64, 96)), st.sampled_from((32, 64, 96))),
        "page_size": st.sampled_from((1, 4, 16, 24)),
        "sequences": st.lists(
            st.integers(1, 700).flatmap(
                lambda n: st.tuples(st.just(n), st.integers(0, min(n, 80)))
            ),
            min_size=1,
            max_size=3,
        )
        .filter(lambda found: any(new for _, new in found))
        .map(tuple),
        "causal": st.booleans(),
        "window": st.none() | st.integers(1, 400),
        "padding": st.integers(0, 3),
        "seed": st.integers(0, 2**32),
    }
)


@settings(max_examples=40, deadline=None)
@given(cases, st.sampled_from(("plain", "sinks", "softcap")))
def test_attention_is_what_transformers_computes_on_the_stored_rows(
    facts: dict[str, Any], kind: str
) -> None:
    check(prepare(**facts, **EXTRA[kind]), error=3e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_models_lose_their_own_rounding_only(dtype: torch.dtype) -> None:
    check(prepare(k=KVDtype.INT8_PER_TOKEN_HEAD, sequences=((90, 1), (50, 50)), dtype=dtype))


# -- bits --------------------------------------------------------------------------------------


def alone(step: Step, i: int, first: int, end: int) -> Step:
    """Sequence i's queries first..end as a step of their own, as if the later ones were not there."""
    start, stop = (int(x) for x in step.cu_seqlens_q[i : i + 2])
    length = int(step.seqlens_kv[i]) - (stop - start) + end
    return Step(
        cu_seqlens_q=torch.tensor([0, end - first], dtype=torch.int32),
        seqlens_kv=torch.tensor([length], dtype=torch.int32),
        page_table=step.page_table[i : i + 1],
        slot_mapping=step.slot_mapping[start + first : start + end],
        positions=step.positions[start + first : start + end],
        max_seqlen_q=end - first,
        max_seqlen_kv=length,
    )


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    "dtype", [KVDtype.FLOAT32, KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.NVFP4], ids=str
)
def test_batching_chunking_and_threads_do_not_change_a_bit(
    dtype: KVDtype, window: int | None
) -> None:
    case = prepare(
        k=dtype, sequences=((2900, 100), (23, 23), (700, 1)), heads=(6, 2), window=window
    )
    found = run(case)
    starts = case.step.cu_seqlens_q.tolist()
    for i, chunk in ((0, 1), (0, 7), (0, 40), (1, 5), (2, 1)):
        size = starts[i + 1] - starts[i]
        for first, end in itertools.pairwise([*range(0, size, chunk), size]):
            rows = slice(starts[i] + first, starts[i] + end)
            part = alone(case.step, i, first, end)
            one = BACKEND.attend(case.cache, case.q[rows], part, case.params)
            assert torch.equal(one, found[rows])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            again = BACKEND.attend(case.cache, case.q, case.step, case.params)
            assert torch.equal(again, found)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_writers_store_the_codec_s_bytes_in_their_slots_and_nowhere_else(
    dtype: KVDtype, data: st.DataObject
) -> None:
    given_as = data.draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16)))
    rows = data.draw(finite_rows(32, 6))
    bound = torch.finfo(given_as).max
    heads = torch.stack([rows, rows.flip(0)], 1).clamp(-bound, bound).to(given_as)
    odd = [float("inf"), -float("inf")]
    if dtype.format.codec != "native":  # torch itself writes several NaNs in 16 bits
        odd.append(float("nan"))
    if data.draw(st.booleans()):
        heads[0, 0, data.draw(st.integers(0, 31))] = data.draw(st.sampled_from(odd))
    check_bytes(dtype, heads, data.draw(st.permutations(range(-2, 8)))[: len(heads)])


def check_bytes(dtype: KVDtype, x: Tensor, slots: list[int]) -> None:
    plan = driver.plan([driver.layer(head_dim_k=x.shape[-1])], dtype, page_size=4, fixed_scale=0.02)
    cache = driver.pool(plan, 2)[0]
    for plane in (*cache.k, *cache.v):
        plane.fill_(99)
    tokens = len(x)
    step = Step(
        cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32),
        seqlens_kv=torch.tensor([tokens], dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.tensor([max(slot, -1) for slot in slots]),
        positions=torch.zeros(tokens, dtype=torch.int64),
        max_seqlen_q=tokens,
        max_seqlen_kv=tokens,
    )
    k, v = x, x.flip(-1)
    BACKEND.write(cache, k, v, step)
    codec = codec_for(dtype)
    for planes, given_rows, scale in ((cache.k, k, cache.k_scale), (cache.v, v, cache.v_scale)):
        for plane, encoded in zip(planes, codec.encode(given_rows, scale), strict=True):
            expected = torch.full_like(plane, 99)
            for row, slot in enumerate(slots):
                if slot >= 0:
                    expected[slot // 4, slot % 4] = encoded[row]
            assert plane_bytes(plane) == plane_bytes(expected)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_many_ordinary_rows_have_the_codec_s_bytes(dtype: KVDtype) -> None:
    """More tokens than one thread takes; magnitudes over many powers of two."""
    made = torch.Generator().manual_seed(3)
    x = (
        torch.randn(300, 2, 96, generator=made)
        * torch.randn(300, 2, 1, generator=made).exp2().exp2()
    )
    plan = driver.plan([driver.layer(head_dim_k=96)], dtype, fixed_scale=0.013)
    cache, step = driver.pool(plan, 21)[0], driver.step([list(range(1, 20))], [300], [300])
    BACKEND.write(cache, x, -x, step)
    for planes, rows, scale in ((cache.k, x, cache.k_scale), (cache.v, -x, cache.v_scale)):
        for plane, encoded in zip(planes, codec_for(dtype).encode(rows, scale), strict=True):
            stored = plane.flatten(0, 1)[16:316]
            assert plane_bytes(stored) == plane_bytes(encoded)


# -- odd numbers -------------------------------------------------------------------------------


def test_tokens_of_no_sequence_get_zeros() -> None:
    found = run(prepare(sequences=((9, 2), (5, 0)), padding=3))
    assert torch.equal(found[2:], torch.zeros_like(found[2:]))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_nan_in_a_key_or_value_reaches_those_who_see_it(dtype: KVDtype) -> None:
    for side in ("k", "v"):
        case = prepare(k=dtype, sequences=((80, 2), (12, 1)))
        getattr(case, side)[0, :, 5] = float("nan")
        found = run(case)
        hit = found[:2].isnan()
        if side == "v" and dtype.format.rotation.value != "hadamard":
            hit = hit[..., 5]
        assert hit.all()
        assert found[2:].isfinite().all()


def test_nan_in_a_query_stays_with_its_sequence() -> None:
    case = prepare(sequences=((9, 2), (12, 1)))
    case.q[:2] = float("nan")
    found = run(case)
    assert found[:2].isnan().all()
    assert found[2:].isfinite().all()


def test_a_recorded_call_keeps_the_table_it_addresses_when_its_backend_is_gone() -> None:
    case = prepare(k=KVDtype.NVFP4, sequences=((40, 1),))
    backend = CpuBackend()
    table = weakref.ref(backend._e4m3)
    scratch = torch.empty(1, scratch_bytes(case.cache), dtype=torch.uint8)
    recorded = backend.record(
        case.cache, case.q, case.k, case.v, torch.empty_like(case.q), case.params, scratch
    )
    del backend
    gc.collect()
    assert table() is not None
    del recorded
    gc.collect()
    assert table() is None, "something else held it: this test could not fail"
