"""Strict JSON out of a full pool on a GPU, with CUDA graphs and without: python -m pytest -m gpu here.

Needs pydantic and llguidance, which a machine lent for its GPU may not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvant.attention.triton.info import SERVED
from kvant.kv.names import FormatRequest, whole_formats
from tests.engine import tiny_chat

if TYPE_CHECKING:
    from tests.engine.test_pressure import Answerer

pytestmark = pytest.mark.gpu

FORMATS = [asked for asked in whole_formats() if {asked.k, asked.v} <= SERVED]


@pytest.fixture(scope="module")
def answerer(tmp_path_factory: pytest.TempPathFactory) -> Answerer:
    pytest.importorskip("pydantic")
    pytest.importorskip("llguidance")
    from tests.engine.test_pressure import Answerer

    path = tiny_chat.build(tmp_path_factory.mktemp("pressure"), family="qwen3")
    return Answerer(path, dtype="bfloat16", device="cuda", batch_invariant=True, max_num_seqs=8)


@pytest.mark.case("A50")
@pytest.mark.parametrize("wanted", FORMATS, ids=str)
def test_no_answer_is_corrupted_with_graphs_or_without(
    answerer: Answerer, wanted: FormatRequest
) -> None:
    """Prefix hits, chunks, preemption and drafts at once, each three of them, and all four."""
    from tests.engine.test_pressure import CELLS, EVERYTHING

    for cell in CELLS:
        on = (cell.prefix, cell.chunked, cell.preempted, cell.drafting)
        if sum(on) == 3 or cell == EVERYTHING:
            answerer.check(wanted, cell, 5, recorded=True)
    answerer.check(wanted, EVERYTHING, 5)
