"""`python -m benchmarks.vllm` over a stand-in of vLLM: what it asks for and what it keeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmarks import vllm

asked_of: list[_Engine] = []


class _Engine:
    def __init__(self, **asked: Any) -> None:
        self.asked = asked
        asked_of.append(self)
        self.generated: list[int] = []
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(
                model_config=SimpleNamespace(get_vocab_size=lambda: 100, is_hybrid=False),
                scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
                cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16),
            )
        )

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        self.generated.append(len(prompts))
        tokens = [0] * params.max_tokens
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]) for _ in prompts]


def test_engine_arguments_reach_vllm_and_every_load_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = ModuleType("vllm")
    stand_in.LLM = _Engine  # type: ignore[attr-defined]
    stand_in.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setattr(vllm, "_facts", lambda: {"gpu": "none"})
    monkeypatch.setattr(sys, "argv", [
        "vllm.py", "shape", "--load", "12x3/5", "--load", "1x2/2", "--repeats", "3",
        "--engine", '{"quantization": "fp8"}', "--out", str(tmp_path / "out.json"),
    ])  # fmt: skip

    vllm.main()

    (engine,) = asked_of
    assert engine.asked["quantization"] == "fp8"
    assert engine.asked["load_format"] == "dummy"
    assert not engine.asked["enable_prefix_caching"]
    assert engine.generated == [8, 12, 12, 12, 1, 1, 1, 1]
    monkeypatch.setattr(
        sys, "argv", ["vllm.py", "shape", "--load", "1x2/2", "--load-format", "auto"]
    )
    vllm.main()
    assert asked_of.pop().asked["load_format"] == "auto"
    rounds = json.loads((tmp_path / "out.json").read_text())["rounds"]
    assert [(one["load"], len(one["seconds"])) for one in rounds] == [("12x3/5", 3), ("1x2/2", 3)]
    assert {one["capacity_tokens"] for one in rounds} == {160}
