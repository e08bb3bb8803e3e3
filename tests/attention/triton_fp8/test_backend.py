"""Who attends to which queries, and that the definition of rounding is what rounded products compute."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, HeadRotation, RotatingWriter, Step
from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.reference.backend import ReferenceBackend
from kvant.attention.triton_fp8.backend import TritonFp8Backend
from kvant.attention.triton_fp8.info import SERVED
from kvant.attention.verify.trial import Trial, run_trial
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.pool import LayerCache
from tests.attention import driver
from tests.attention.triton_fp8.tiles import Tiles

CPU = torch.device("cpu")
LONG = ((40, 3), (33, 5), (600, 512), (256, 256))
FEW = ((40, 1), (300, 255))


def need(
    k: KVDtype = KVDtype.FP8_E4M3, v: KVDtype = KVDtype.FP8_PER_TOKEN_HEAD, **layer: Any
) -> Need:
    asked = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim_k": 64, **layer}
    facts = DeviceFacts(DeviceKind.CUDA, "sm_90")
    return Need(driver.layer(**asked), k, v, ComputeDtype.FLOAT16, 16, facts)


class Few(ReferenceBackend):
    """The backend of few queries; remembers how many sequences of how many queries it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[int, int]] = []

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        self.given.append((step.seqlens_kv.shape[0], len(q)))
        return super().attend(cache, q, step, params)

    def write_rotated(
        self, cache: LayerCache, qkv: Tensor, rotation: HeadRotation, step: Step
    ) -> Tensor:
        return qkv + 1

    def attend_rotated(
        self,
        cache: LayerCache,
        qkv: Tensor,
        rotation: HeadRotation,
        step: Step,
        params: AttentionParams,
    ) -> Tensor | None:
        return qkv + 2


@pytest.mark.parametrize(
    ("sequences", "few", "long"),
    [(FEW, [(2, 256)], 0), (LONG, [(2, 8)], 1), (LONG[2:], [], 1)],
    ids=["few alone", "long beside few", "long alone"],
)
def test_long_stretches_go_one_way_and_what_stands_beside_them_the_other(
    sequences: tuple[tuple[int, int], ...], few: list[tuple[int, int]], long: int
) -> None:
    rest, tiles = Few(), Tiles()
    trial = Trial(need(), sequences, rounds_long=True)
    assert run_trial(TritonFp8Backend(rest, tiles), trial, CPU).wrong is None
    assert rest.given == few
    assert tiles.calls == long


def test_tokens_of_no_sequence_get_zeros_behind_prompts_too() -> None:
    trial = Trial(need(), LONG, odd_rows=True, rounds_long=True)
    assert run_trial(TritonFp8Backend(Few(), Tiles()), trial, CPU).wrong is None


def test_it_rotates_what_it_writes() -> None:
    backend = TritonFp8Backend(Few(), Tiles())
    assert isinstance(backend, RotatingWriter)
    made = driver.pool(driver.plan([driver.layer()], KVDtype.FP8_E4M3), 2)
    step = driver.step([[1]], [2], [2])
    angles = HeadRotation(torch.ones(2, 16), torch.zeros(2, 16), False, None, None, 1e-6)
    qkv = torch.zeros(2, 8 * 32)
    assert torch.equal(backend.write_rotated(made[0], qkv, angles, step), qkv + 1)
    found = backend.attend_rotated(made[0], qkv, angles, step, AttentionParams(1.0))
    assert found is not None
    assert torch.equal(found, qkv + 2)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize(("k", "v"), list(itertools.product(SERVED, repeat=2)), ids=str)
def test_tiles_of_rounded_products_are_what_the_definition_says(
    k: KVDtype, v: KVDtype, causal: bool
) -> None:
    trial = Trial(need(k, v, causal=causal), ((40, 3), (420, 300)), rounds_long=True)
    outcome = run_trial(TritonFp8Backend(Few(), Tiles()), trial, CPU)
    assert outcome.wrong is None
    assert outcome.error < 1e-3


WRONG = {
    "queries as they came": Tiles(rounds_queries=False),
    "probabilities as they are": Tiles(rounds_weights=False),
    "nothing rounded": Tiles(rounds_queries=False, rounds_weights=False),
    "a key too many": Tiles(ahead=1),
    "a key too few": Tiles(ahead=-1),
}


@pytest.mark.parametrize("wrong", list(WRONG.values()), ids=list(WRONG))
@pytest.mark.parametrize("name", SERVED, ids=str)
def test_rounding_less_or_reading_other_keys_fails_the_check(name: KVDtype, wrong: Tiles) -> None:
    trial = Trial(need(name, name), ((600, 512),), rounds_long=True)
    outcome = run_trial(TritonFp8Backend(Few(), wrong), trial, CPU)
    assert outcome.wrong is not None
    assert outcome.error > 2 * outcome.bound


def test_a_backend_that_rounds_unasked_fails_the_check() -> None:
    trial = Trial(need(), LONG)
    assert run_trial(TritonFp8Backend(Few(), Tiles()), trial, CPU).wrong is not None


def test_a_sequence_of_fewer_queries_keeps_the_exact_definition() -> None:
    class Rounding(Few):
        def attend(
            self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams
        ) -> Tensor:
            return super().attend(cache, q.to(torch.float8_e4m3fn).to(q.dtype), step, params)

    trial = Trial(need(), LONG, rounds_long=True)
    assert run_trial(TritonFp8Backend(Rounding(), Tiles()), trial, CPU).wrong is not None
