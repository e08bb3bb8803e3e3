"""What a plan of a damaged config.json accepts, an engine starts: every field of some families, in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant import LLM
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.plan.plan import PlanRequest
from tests.models import tiny
from tests.models.damage import refused_late
from tests.planned import plan_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "olmo2", "phi3", "gpt_oss"],
)
def test_a_plan_accepts_only_what_starts(family: str, tmp_path: Path) -> None:
    path = tiny.build(family, tmp_path)
    request = PlanRequest(str(path), DeviceFacts(DeviceKind.CPU))
    found = refused_late(path, lambda: plan_of(request), lambda: LLM(path, kv_cache_memory="1MiB"))
    assert not found
