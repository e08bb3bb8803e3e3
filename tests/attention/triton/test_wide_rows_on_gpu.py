"""The compiled kernels write and read both forms of layers with wide rows: python -m pytest -m gpu here."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.triton.backend import TritonBackend
from kvant.attention.verify.trial import Trial, run_trial
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.spec import WideRows
from tests.attention import driver

pytestmark = pytest.mark.gpu

INT4 = KVDtype.INT4_PER_TOKEN_HEAD
STEPS = {
    "decode": ((700, 1), (33, 1), (1, 1), (2049, 1)),
    "many": (*((17 * i % 900 + 1, 1) for i in range(180)), (3000, 1)),
    "verify": ((33, 5), (16, 16), (700, 16)),
    "prompts": ((65, 1), (300, 300), (700, 130)),
}


def need(
    k: KVDtype = INT4,
    v: KVDtype = INT4,
    *,
    rows: tuple[int, int] = (4, 128),
    wide: KVDtype = KVDtype.BFLOAT16,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    compute: ComputeDtype = ComputeDtype.BFLOAT16,
    batch_invariant: bool = False,
    sides: str = "kv",
    **layer: object,
) -> Need:
    geometry = driver.layer(
        num_q_heads=heads[0], num_kv_heads=heads[1], head_dim_k=head_dim, **layer
    )  # type: ignore[arg-type]
    wide_k, wide_v = (driver.choice(wide) if side in sides else None for side in "kv")
    both = WideRows(wide_k, wide_v, *rows)
    device = DeviceFacts(DeviceKind.CUDA, "sm_90")
    return Need(geometry, k, v, compute, 16, device, batch_invariant, both)


def holds(made: Need, step: str) -> None:
    outcome = run_trial(
        TritonBackend(batch_invariant=made.batch_invariant),
        Trial(made, STEPS[step], odd_rows=True),
        torch.device("cuda"),
    )
    assert outcome.wrong is None


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rows", [(4, 128), (0, 1), (40, 300)])
def test_every_kind_of_step_reads_both_forms(
    rows: tuple[int, int], step: str, batch_invariant: bool
) -> None:
    holds(need(rows=rows, batch_invariant=batch_invariant), step)


@pytest.mark.parametrize("step", ["decode", "prompts"])
@pytest.mark.parametrize(
    ("k", "v", "wide"),
    [
        (KVDtype.TURBOQUANT_K3, KVDtype.TURBOQUANT_V3, KVDtype.BFLOAT16),
        (KVDtype.NVFP4, KVDtype.FP8_E4M3, KVDtype.FLOAT16),
        (INT4, KVDtype.TURBOQUANT_V4, KVDtype.INT8_PER_TOKEN_HEAD),
        (KVDtype.INT4_FEEDBACK, INT4, KVDtype.FP8_PER_TOKEN_HEAD),
        (KVDtype.INT4_SHORT_FEEDBACK, KVDtype.INT4_SHORT, KVDtype.BFLOAT16),
        (KVDtype.INT4_SHORT_FEEDBACK, KVDtype.NORMAL2, KVDtype.BFLOAT16),
    ],
    ids=str,
)
def test_formats_of_both_forms_are_free(k: KVDtype, v: KVDtype, wide: KVDtype, step: str) -> None:
    holds(need(k, v, wide=wide), step)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("sides", ["k", "v"])
def test_one_side_alone_is_read_wide(sides: str, step: str) -> None:
    holds(need(sides=sides), step)
    holds(need(KVDtype.INT4_SHORT_FEEDBACK, KVDtype.NORMAL2, sides=sides), step)
    holds(need(KVDtype.FP8_E4M3, KVDtype.INT4_SHORT, sides=sides), step)


@pytest.mark.parametrize("step", ["decode", "prompts"])
def test_layers_have_what_others_have(step: str) -> None:
    holds(need(sinks=True), step)
    holds(need(softcap=5.0), step)
    holds(need(head_dim=64, heads=(9, 3)), step)
    holds(need(compute=ComputeDtype.FLOAT32, wide=KVDtype.FLOAT32), step)
