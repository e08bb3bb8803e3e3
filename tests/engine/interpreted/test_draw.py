"""The GPU's kernel for drawing, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvant.engine.drawing import draw_from_whole
from kvant.engine.triton_draw import draw_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("size", [5, 4096, 9000])
def test_it_draws_what_is_drawn_row_by_row_on_a_cpu(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(12, size, generator=generator) * 3
    logits[3, ::2] = -torch.inf
    logits[4, 1:] = -torch.inf
    logits[5] = 0.25
    logits[6, size // 2 :] = -torch.inf
    rows = torch.tensor([3, 4, 5, 6, 11, 0, 0, 7])
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.7, 2.0, 0.1, 1.0, 1.0], dtype=torch.float64)
    for u in (0.0, 0.3, 0.999, 1 - 2**-53):
        shares = torch.full((8,), u, dtype=torch.float64)
        wanted, totals = draw_from_whole(logits, rows, temperature, shares)
        given = (part.to(DEVICE) for part in (logits, rows, temperature, shares))
        found, sums = draw_rows(*given)
        torch.testing.assert_close(sums.cpu(), totals, rtol=1e-12, atol=0)
        assert found.tolist() == wanted.tolist()
