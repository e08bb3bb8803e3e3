"""An engine whose recorded steps run the GPU's own kernels around the model, under Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvant.engine.result import Result
from kvant.execution import graphs
from kvant.sampling import sampler, triton_draw
from tests.engine.in_flight import alone, make, some_params

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors lie on the host")


@pytest.mark.parametrize("num_pages", [16, 200], ids=["dry", "ample"])
def test_answers_are_those_of_each_request_alone(
    num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn ones; where steps begin and which tokens follow is the kernels' to say."""
    for module in (sampler, graphs):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    numbers = random.Random(num_pages)
    drawn: list[int] = []
    draw_from_few = triton_draw.draw_from_few

    def count(*given: Tensor) -> None:
        drawn.append(len(given[1]))
        draw_from_few(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_draw, "draw_from_few", count)
    engine, _ = make(num_pages)
    recorded = len(drawn)
    for module in (sampler, graphs):  # those alone are drawn without kernels
        monkeypatch.setattr(module, "has_kernels", lambda device: False)
    asked = {}
    results: dict[int, Result] = {}
    left = 8
    while left or engine.has_work:
        if left and (not engine.has_work or numbers.random() < 0.2):
            prompt = [numbers.randrange(4, 97) for _ in range(numbers.randint(1, 9))]
            params = some_params(numbers)
            asked[engine.submit(prompt, params)] = prompt, params
            left -= 1
        with monkeypatch.context() as kernels:
            for module in (sampler, graphs):
                kernels.setattr(module, "has_kernels", lambda device: True)
            found = engine.step()
        results |= {piece.number: piece.result for piece in found if piece.result is not None}
        engine.audit()
    assert len(drawn) > recorded + 10
    for number, (prompt, params) in asked.items():
        expected = alone(prompt, params)
        assert results[number].token_ids == expected.token_ids
        assert results[number].finish_reason is expected.finish_reason
