"""The proof of the first forward: who must write, who must attend, and what a gap is called."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvant.attention.base import (
    AttentionBackend,
    AttentionParams,
    HeadRotation,
    RotatingWriter,
    Step,
    StepCall,
)
from kvant.attention.reference.backend import ReferenceBackend, backend
from kvant.attention.watch import WatchedBackend, check_all_were_reached, watch
from kvant.errors import EngineFault
from kvant.kv.geometry import Attention
from kvant.kv.pool import LayerCache
from tests.attention import driver

ROWS = torch.ones(3, 2, 32)
OWNER = driver.layer(index=0)
SHARING = dataclasses.replace(driver.layer(index=1), attention=Attention.SHARED, shared_with=0)
RECURRENT = dataclasses.replace(driver.layer(index=2), attention=Attention.NONE)


def watched(owner: AttentionBackend | None = None) -> tuple[StepCall, tuple[WatchedBackend, ...]]:
    """A call over an owner, a layer that shares its KV, and a layer without attention."""
    pool = driver.pool(driver.plan([OWNER, SHARING, RECURRENT]), 3)
    backends = (owner or backend(), backend(), backend())
    return watch(StepCall(driver.step([[1]], [3], [3]), pool, backends))


def write(call: StepCall, layer: int) -> None:
    call.backends[layer].write(call.pool[layer], ROWS, ROWS, call.step)


def attend(call: StepCall, layer: int) -> torch.Tensor:
    q = torch.ones(3, 4, 32)
    return call.backends[layer].attend(call.pool[layer], q, call.step, AttentionParams(1.0))


def test_an_owner_that_writes_and_attends_and_a_sharer_that_attends_are_enough() -> None:
    call, backends = watched()
    write(call, 0)
    attend(call, 0)
    attend(call, 1)
    check_all_were_reached(call, backends, "Model")


@pytest.mark.parametrize(
    ("writes", "attends", "silent"),
    [
        ((), (0, 1), "layers.0"),
        ((0,), (1,), "layers.0"),
        ((0,), (0,), "layers.1"),
        ((0, 1), (0,), "layers.1"),
    ],
)
def test_a_gap_names_the_model_and_the_layer(
    writes: tuple[int, ...], attends: tuple[int, ...], silent: str
) -> None:
    call, backends = watched()
    for layer in writes:
        write(call, layer)
    for layer in attends:
        attend(call, layer)
    with pytest.raises(EngineFault, match=f"Model.*{silent}.self_attn:"):
        check_all_were_reached(call, backends, "Model")


def test_a_watched_backend_passes_everything_on() -> None:
    call, _ = watched()
    write(call, 0)
    assert torch.equal(attend(call, 0), torch.ones(3, 4, 32))


class Rotating(ReferenceBackend):
    apart = True

    def write_rotated(
        self, cache: LayerCache, qkv: torch.Tensor, rotation: HeadRotation, step: Step
    ) -> torch.Tensor:
        return qkv[:, :128].view(-1, 4, 32)

    def attend_rotated(
        self,
        cache: LayerCache,
        qkv: torch.Tensor,
        rotation: HeadRotation,
        step: Step,
        params: AttentionParams,
    ) -> torch.Tensor | None:
        return None if self.apart else qkv[:, :128].view(-1, 4, 32)


def test_a_backend_that_rotates_does_so_in_the_watched_forward_too() -> None:
    call, backends = watched(Rotating(torch.float64))
    rotating, plain, _ = call.backends
    assert not isinstance(plain, RotatingWriter)
    assert isinstance(rotating, RotatingWriter)
    rotation = HeadRotation(ROWS, ROWS, True, None, None, 1e-6)
    q = rotating.write_rotated(call.pool[0], torch.ones(3, 256), rotation, call.step)
    assert q.shape == (3, 4, 32)
    attend(call, 0)
    attend(call, 1)
    check_all_were_reached(call, backends, "Model")


@pytest.mark.parametrize("apart", [False, True])
def test_one_launch_that_rotates_and_attends_counts_as_both(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rotating, "apart", apart)
    call, backends = watched(Rotating(torch.float64))
    rotating = call.backends[0]
    assert isinstance(rotating, RotatingWriter)
    rotation = HeadRotation(ROWS, ROWS, True, None, None, 1e-6)
    params = AttentionParams(1.0)
    rows = torch.ones(3, 256)
    out = rotating.attend_rotated(call.pool[0], rows, rotation, call.step, params)
    attend(call, 1)
    if not apart:
        assert out is not None
        check_all_were_reached(call, backends, "Model")
        return
    assert out is None
    with pytest.raises(EngineFault, match=r"layers\.0"):
        check_all_were_reached(call, backends, "Model")
