"""Tiny hybrids through the kernels of recurrent layers give the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvant import LLM, SamplingParams
from kvant.kv.state_pool import StateCache
from kvant.models.fused import info
from kvant.models.recurrent import conv, mixers, packed, scan
from tests.models import families
from tests.speculative import scripted

pytest.importorskip("triton")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")]
PROMPTS = ([3, 17, 5, 90, 41], [7], [(7 * i) % 97 + 3 for i in range(80)])


def take_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(_: torch.Tensor, cache: StateCache) -> bool:
        return cache.spec.choice.dtype.format.is_native

    for module in (conv, mixers, packed, scan):
        monkeypatch.setattr(module, "takes_kernels", takes)


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "granitemoehybrid", "lfm2"])
def test_batch_invariant_numbers_are_the_same_however_steps_are_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward of GPUs: alone, in a batch, in pieces, from the prefix cache, with drafts."""
    take_kernels(monkeypatch)
    monkeypatch.setattr(info, "_refuse_invariant_states", lambda _: None)
    families.build(name, tmp_path)
    prompts = [[5 + (i * i + n) % 90 for i in range(n)] for n in (21, 1, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2)

    def opened(**options: object) -> LLM:
        llm = LLM(
            tmp_path, device="cpu", dtype="float32", batch_invariant=True, page_size=4, max_model_len=40,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        assert llm.planned.forward.name == "fused"
        return llm

    def numbers(llm: LLM, some: list[list[int]]) -> list[object]:
        return [(list(one.token_ids), one.logprobs) for one in llm.generate(some, params)]

    alone = opened(max_num_seqs=1, max_num_batched_tokens=64)
    expected = [numbers(alone, [prompt])[0] for prompt in prompts]
    together = opened(max_num_seqs=3, max_num_batched_tokens=8)
    assert numbers(together, prompts) == expected
    assert numbers(together, prompts) == expected  # from the prefix cache
    asked = {"method": "tests.speculative.scripted:METHOD", "num_speculative_tokens": 2}
    drafting = opened(max_num_seqs=3, speculative_config=asked)
    answers = [list(one[0]) for one in expected]  # type: ignore[index]
    known = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    scripted.speculate(drafting.engine, known, wrong_every=3)
    assert numbers(drafting, prompts) == expected


@pytest.mark.parametrize(
    "name", ["qwen3_5_text", "bamba", "lfm2", "kimi_linear", "falcon_h1", "minimax"]
)
def test_a_family_through_its_kernels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_kernels(monkeypatch)
    monkeypatch.setattr(families, "PROMPTS", PROMPTS)
    monkeypatch.setattr(families, "NUM_TOKENS", 6)
    monkeypatch.setattr(families, "ALL_EQUAL", 18)
    found = families.compare(name, tmp_path / "model", quick=True)
    assert found.why is None
