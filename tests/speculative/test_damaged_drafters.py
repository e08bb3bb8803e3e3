"""What a plan of a drafter with a damaged config.json accepts, an engine starts and drafts with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvant import LLM, SamplingParams
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.plan.plan import PlanRequest
from kvant.plan.speculative_config import parse_speculative_config
from tests.models.damage import refused_late
from tests.planned import plan_of
from tests.speculative.pair import Pair


@pytest.mark.slow
def test_a_plan_accepts_only_drafters_that_start(pair: Pair, tmp_path: Path) -> None:
    draft = tmp_path / "d"
    shutil.copytree(pair.draft, draft)
    asked = {"method": "dflash", "model": str(draft)}
    request = PlanRequest(
        str(pair.target),
        DeviceFacts(DeviceKind.CPU),
        speculative=parse_speculative_config(asked),
    )

    def start() -> None:
        llm = LLM(pair.target, kv_cache_memory="1MiB", speculative_config=asked)
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3, temperature=0))

    assert not refused_late(draft, lambda: plan_of(request), start)
