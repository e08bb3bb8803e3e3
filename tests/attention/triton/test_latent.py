"""The kernel for latents under Triton's interpreter, and compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.launching import Shape
from kvant.attention.triton.backend import TritonBackend, attend
from kvant.kv.dtype import KVDtype
from tests.attention.triton import case

pytestmark = [
    pytest.mark.skipif(not case.INTERPRETED, reason="compiled here: verification covers this"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FORMATS = [
    KVDtype.FLOAT32, KVDtype.FLOAT16, KVDtype.BFLOAT16, KVDtype.FP8_E4M3, KVDtype.FP8_E5M2,
    KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.INT8_PER_TOKEN_HEAD,
]  # fmt: skip
SHAPE = Shape(rows=16, tile=16, warps=1, stages=1, programs=4)
STEPS: dict[str, dict[str, Any]] = {
    "decode": {"sequences": ((40, 1), (17, 1), (1, 1))},
    "verify": {"heads": (8, 1), "sequences": ((40, 3), (33, 5)), "padding": 2},
    "prompt": {"heads": (4, 1), "sequences": ((23, 23), (40, 9))},
    "few heads": {"heads": (2, 1), "sequences": ((40, 3), (33, 17))},
    "many heads": {"heads": (20, 1), "sequences": ((40, 1), (33, 2))},
    "uneven": {"head_dims": (56, 40), "sequences": ((40, 1), (33, 2))},
    "small pages": {"page_size": 4, "sequences": ((40, 1), (33, 2))},
}


def prepare(name: KVDtype, **options: Any) -> case.Case:
    dtype = torch.float32 if name in (KVDtype.FLOAT32, KVDtype.BFLOAT16) else torch.float16
    given = {"heads": (16, 1), "head_dims": (48, 32), "dtype": dtype, "latent": True, **options}
    return case.prepare(name, **given)


def check(x: case.Case, shape: Shape, *, fixed: bool = False) -> None:
    assert x.cache.spec.k is not None
    bfloat16 = x.cache.spec.k.dtype is KVDtype.BFLOAT16  # which the interpreter writes wrongly
    (case.EXACT if bfloat16 else TritonBackend()).write(x.cache, x.k, x.v, x.step)
    found = attend(x.cache, x.q, x.step, x.params, shape, fixed=fixed)
    assert case.error(found, x.expected()) < 2e-3


@pytest.mark.parametrize("name", FORMATS, ids=str)
def test_every_format_is_read_as_its_definition_says(name: KVDtype) -> None:
    check(prepare(name, sequences=((40, 1), (17, 2))), SHAPE)


@pytest.mark.parametrize("step", list(STEPS.values()), ids=list(STEPS))
def test_every_step_is_computed_as_the_reference_does(step: dict[str, Any]) -> None:
    for name in (KVDtype.FLOAT16, KVDtype.INT8_PER_TOKEN_HEAD):
        check(prepare(name, **step), SHAPE)


def test_the_writer_stores_the_definitions_bytes() -> None:
    for name in (KVDtype.FLOAT16, KVDtype.INT8_PER_TOKEN_HEAD):
        x, y = prepare(name, padding=2), prepare(name, padding=2)
        TritonBackend().write(x.cache, x.k, x.v, x.step)
        case.EXACT.write(y.cache, y.k, y.v, y.step)
        for found, expected in zip(x.cache.k, y.cache.k, strict=True):
            assert found.view(torch.uint8).equal(expected.view(torch.uint8))


@pytest.mark.parametrize("name", [KVDtype.FLOAT16, KVDtype.FP8_PER_TOKEN_HEAD], ids=str)
def test_in_batch_invariant_mode_a_query_has_the_same_bits_alone_and_among_others(
    name: KVDtype,
) -> None:
    together = prepare(name, heads=(8, 1), sequences=((40, 5), (33, 1), (20, 3)))
    case.EXACT.write(together.cache, together.k, together.v, together.step)
    kept = TritonBackend(batch_invariant=True)
    whole = kept.attend(together.cache, together.q, together.step, together.params)
    assert case.error(whole, together.expected()) < 2e-3
    start = 0
    for sequence, new in enumerate((5, 1, 3)):
        step = together.step
        for query in range(new):
            length = step.seqlens_kv[sequence : sequence + 1] - (new - 1 - query)
            alone = replace(
                step,
                cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
                seqlens_kv=length,
                page_table=step.page_table[sequence : sequence + 1],
                slot_mapping=step.slot_mapping[:1],
                positions=step.positions[:1],
                max_seqlen_q=1,
            )
            at = start + query
            one = kept.attend(together.cache, together.q[at : at + 1], alone, together.params)
            assert torch.equal(one[0], whole[at])
        start += new
