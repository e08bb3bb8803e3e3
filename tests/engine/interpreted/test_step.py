"""What a recorded step does before and after the model in one launch each, as plain torch does it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvant.execution.layout import lay_out
from kvant.execution.triton_step import likeliest, plain_step

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_a_plain_step_is_laid_out_as_one_without_drafts() -> None:
    torch.manual_seed(0)
    starts = torch.tensor([5, 0, 31, 16, 700], device=DEVICE)
    ends = torch.tensor([6, 0, 32, 17, 701], device=DEVICE)
    table = torch.randint(1, 99, (5, 50), dtype=torch.int32, device=DEVICE)
    found = plain_step(starts, ends, table, 16, 800)
    expected = lay_out(starts, ends, table, 0, 16, 800).step
    for name in ("cu_seqlens_q", "seqlens_kv", "slot_mapping", "positions", "page_table"):
        a, b = getattr(found, name), getattr(expected, name)
        assert a.dtype is b.dtype, name
        assert a.tolist() == b.tolist(), name
    assert (found.max_seqlen_q, found.max_seqlen_kv) == (1, 800)


@pytest.mark.parametrize("size", [7, 4096, 9001])
def test_the_likeliest_token_is_the_first_of_the_largest_and_unsound_rows_are_told(
    size: int,
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, size, device=DEVICE)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 2] = logits[3, size - 1] = 50.0
    logits[4, size - 1] = torch.inf
    logits[5, size - 1] = 60.0
    tokens = torch.arange(7, device=DEVICE)
    results, after = likeliest(logits, tokens, 10 * tokens).view(2, 3, 7)
    sound = torch.isfinite(logits.max(-1).values)
    assert results[0].tolist() == tokens.tolist()
    assert results[1].tolist() == sound.tolist() == [1, 0, 0, 1, 0, 1, 1]
    assert results[2][sound].tolist() == logits.argmax(-1)[sound].tolist()
    assert results[2, 3] == 2
    assert after.tolist() == [results[2].tolist(), (10 * tokens + 1).tolist(), [1] * 7]
    assert ((results[2] >= 0) & (results[2] < size)).all()
