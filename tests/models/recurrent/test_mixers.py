"""How mixers multiply with the weights of their projections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvant.models.recurrent.mixers import LayerStates, ShortConv
from kvant.weights import linear
from kvant.weights.codecs import encode
from kvant.weights.format import INT8_CHANNEL
from kvant.weights.linear import NarrowLinear


@pytest.mark.parametrize("singly", [False, True])
def test_narrow_projections_multiply_rows_alike_where_tokens_run_in_turn(
    monkeypatch: pytest.MonkeyPatch, singly: bool
) -> None:
    asked: list[bool] = []
    whole = linear.multiply

    def multiply(*args: Any, alike: bool, **options: Any) -> Tensor:
        asked.append(alike)
        return whole(*args, alike=alike, **options)

    monkeypatch.setattr(linear, "multiply", multiply)
    projections = NarrowLinear(INT8_CHANNEL, 96, 32, None), NarrowLinear(INT8_CHANNEL, 32, 32, None)
    for one in projections:
        one.put(encode(torch.randn(one.out_features, 32), INT8_CHANNEL))
    mixer = ShortConv(SimpleNamespace(in_proj=projections[0], out_proj=projections[1]))
    monkeypatch.setattr(ShortConv, "between", lambda self, projected, states: projected[:, :32])
    packed: Any = SimpleNamespace(singly=singly)
    x = torch.randn(3, 32)
    found = mixer.run(x, LayerStates(packed, None, None))
    assert torch.equal(found, projections[1](projections[0](x)[:, :32]))
    assert asked == [singly, singly, False, False]
