"""Every query reads the first and the latest rows wide and the others narrow, in every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvant.attention.base import AttentionBackend
from kvant.attention.cpu.backend import CpuBackend
from kvant.attention.need import Need
from kvant.attention.reference.backend import ReferenceBackend
from kvant.attention.verify.trial import Trial, run_trial
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.spec import WideRows
from tests.attention.driver import choice, layer
from tests.attention.verify.test_trial import CPU, HOST

STEP = ((33, 5), (1, 1), (3, 3), (9, 1), (20, 20), (301, 16))
BACKENDS: dict[str, AttentionBackend] = {
    "reference": ReferenceBackend(),
    "reference, invariant": ReferenceBackend(batch_invariant=True),
    "cpu": CpuBackend(),
}
FEEDBACK = KVDtype.INT4_SHORT_FEEDBACK
PAIRS = [
    (KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD),
    (KVDtype.TURBOQUANT_K3, KVDtype.TURBOQUANT_V3),
    (KVDtype.NVFP4, KVDtype.FP8_E4M3),
    (KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.BFLOAT16),
]


def need_of(
    k: KVDtype,
    v: KVDtype,
    *,
    wide: KVDtype = KVDtype.FLOAT32,
    sink: int = 4,
    recent: int = 20,
    sinks: bool = False,
    softcap: float = 0.0,
    sides: str = "kv",
) -> Need:
    g = layer(num_q_heads=6, num_kv_heads=2, head_dim_k=64, sinks=sinks, softcap=softcap)
    wide_k, wide_v = (choice(wide) if side in sides else None for side in "kv")
    rows = WideRows(wide_k, wide_v, sink, recent)
    return Need(g, k, v, ComputeDtype.FLOAT32, 16, CPU, wide=rows)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("k", "v"), PAIRS, ids=str)
def test_both_forms_are_read_where_they_are_defined(name: str, k: KVDtype, v: KVDtype) -> None:
    for sink, recent in ((4, 20), (0, 1), (17, 100), (40, 7)):
        outcome = run_trial(
            BACKENDS[name], Trial(need_of(k, v, sink=sink, recent=recent), STEP), HOST
        )
        assert outcome.wrong is None, f"{sink}, {recent}: {outcome.wrong}"


@pytest.mark.parametrize("name", BACKENDS)
def test_wide_rows_have_any_wide_format_and_layers_what_they_have(name: str) -> None:
    int4 = KVDtype.INT4_PER_TOKEN_HEAD
    for made in (
        need_of(int4, int4, wide=KVDtype.BFLOAT16),
        need_of(int4, int4, wide=KVDtype.INT8_PER_TOKEN_HEAD),
        need_of(int4, int4, sinks=True),
        need_of(int4, int4, softcap=5.0),
    ):
        outcome = run_trial(BACKENDS[name], Trial(made, STEP, odd_rows=True), HOST)
        assert outcome.wrong is None


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("sides", ["k", "v"])
def test_one_side_alone_is_read_wide(name: str, sides: str) -> None:
    for k, v in (*PAIRS, (KVDtype.FP8_E4M3, KVDtype.INT4_SHORT), (FEEDBACK, KVDtype.NORMAL2)):
        for sink, recent in ((4, 20), (0, 7)):
            made = need_of(k, v, sink=sink, recent=recent, sides=sides)
            outcome = run_trial(BACKENDS[name], Trial(made, STEP), HOST)
            assert outcome.wrong is None, f"{k}/{v}, {sink}, {recent}: {outcome.wrong}"


@pytest.mark.parametrize("name", ["reference, invariant", "cpu"])
def test_a_query_has_the_same_bits_alone_and_in_a_prompt(name: str) -> None:
    """Two trials store the same rows; one computes all queries of a prompt, the other the last one."""
    from kvant.attention.verify import trial

    int4 = KVDtype.INT4_PER_TOKEN_HEAD
    made = trial._Case(Trial(need_of(int4, int4), ((70, 70), (90, 40))), HOST)
    backend = BACKENDS[name]
    backend.write(made.cache, made.k, made.v, made.step)
    whole = backend.attend(made.cache, made.q, made.step, made.params)
    step = replace(
        made.step,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seqlens_kv=made.step.seqlens_kv[1:],
        page_table=made.step.page_table[1:],
        max_seqlen_q=1,
    )
    alone = backend.attend(made.cache, made.q[-1:], step, made.params)
    assert torch.equal(alone[0], whole[-1])
