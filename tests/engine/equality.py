"""Engines over one loaded model: every question of sameness gets a fresh pool and loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kvant import LLM
from kvant.engine.build import make_speculation
from kvant.engine.engine import Engine
from kvant.engine.result import Result
from kvant.execution.proposing import load_proposer
from kvant.execution.runner import ModelRunner
from kvant.kv.checkpoint.rounding import FILE_NAME, SUFFIX
from kvant.kv.dtype import KVDtype
from kvant.kv.groups import lay_out
from kvant.kv.names import FormatRequest, known_names
from kvant.kv.offload.tiers import Tiers
from kvant.kv.pages import CacheIdentity, SharedPages
from kvant.kv.request import Asked, KVRequest
from kvant.kv.scale_audit import ScaleAudit
from kvant.plan.limits import Limits
from kvant.plan.resolution import resolve_again
from kvant.sampling.sampling_params import SamplingParams
from tests.engine.fakes import finish
from tests.models import tiny

FORMATS = [d.format.name for d in KVDtype if d.format.name in known_names()]
COVERING = ("float32", "fp8_e4m3", "int8_per_token_head", "int4_feedback", "nvfp4", "turboquant_k3")
"""One format of each kind of page: native, a scale for all, scales in the row, feedback, blocks, codebook."""


def llama_for_every_format(directory: Path) -> Path:
    """A tiny llama with rounding matrices, which int4_feedback reads from the checkpoint.

    Two layers: a wrong number in one already changes what the next stores.
    """
    path = tiny.build("llama", directory, num_hidden_layers=2)
    config = json.loads((path / "config.json").read_text())
    heads, size = config["num_key_value_heads"], config["head_dim"]
    values = 0.1 * np.random.default_rng(0).normal(size=(heads, size, size))
    matrices = np.triu(values, 1).astype(np.float32)
    modules = [f"model.layers.{i}.self_attn" for i in range(config["num_hidden_layers"])]
    save_file({name + SUFFIX: matrices for name in modules}, path / FILE_NAME)
    return path


class Bench:
    """dtype: what the pools of this bench store, in every layer; None for what `llm` was made with."""

    def __init__(self, llm: LLM, dtype: KVDtype | FormatRequest | None = None) -> None:
        self.llm = llm
        self.plan = llm.plan
        if dtype is not None:
            pair = FormatRequest(dtype, dtype) if isinstance(dtype, KVDtype) else dtype
            asked = KVRequest(explicit=(Asked(pair, "test"),), format_defaults=False)
            self.plan = resolve_again(llm.planned, asked)
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        self.model = runner.model

    def engine(
        self,
        *,
        num_pages: int = 400,
        chunk: int = 512,
        caching: bool = False,
        seqs: int = 40,
        max_model_len: int | None = None,
        seed: int | None = None,
        drafting: bool = False,
        answering: bool = False,
        recorded: bool = False,
        windows: bool = False,
        offload: Callable[[SharedPages, ModelRunner], Tiers] | None = None,
    ) -> Engine:
        """drafting: with the proposer that `llm` was made with. answering: with tokenizer and end.
        recorded: steps as graphs, where there can be some. windows: layers with windows release pages.
        offload: makes the tiers behind the pages.
        """
        page_size = self.plan.page_size
        layout = lay_out(self.plan) if windows else None
        runner = ModelRunner(self.model, num_pages, self.plan, layout=layout)
        longest = max_model_len or (num_pages - 1) * page_size
        planned = self.llm.planned
        proposer = load_proposer(planned, runner) if drafting else None
        if recorded:
            assert runner.capture(seqs, chunk, longest) is None
        return Engine(
            runner,
            Limits(
                max_num_seqs=seqs,
                max_num_batched_tokens=chunk,
                max_model_len=longest,
                page_size=page_size,
                prefix_caching=caching,
            ),
            num_pages,
            layout=layout,
            identity=CacheIdentity("test", None, self.plan.fingerprint),
            vocab_size=self.llm.engine.vocab_size,
            eos_token_ids=sorted(self.llm.engine.eos_token_ids) if answering else (),
            tokenizer=self.llm.engine.tokenizer if answering else None,
            seed=seed,
            scale_audit=ScaleAudit(runner.pools),
            speculation=make_speculation(planned, proposer, runner),
            offload=None if offload is None else lambda shared: offload(shared, runner),
        )

    def alone(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, **options: object
    ) -> list[tuple[int, ...]]:
        """Every prompt by itself, in one piece, in a fresh pool."""
        found = []
        for prompt in prompts:
            result = run(self.engine(), [prompt], num_tokens, **options)[0]
            assert result.num_cached_tokens == 0
            found.append(result.token_ids)
        return found


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    after_step: Callable[[], None] = lambda: None,
    **options: object,
) -> list[Result]:
    """All at once, until the end. options: of the sampling, greedy by default."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": num_tokens, **options})  # type: ignore[arg-type]
    numbers = [engine.submit(prompt, params) for prompt in prompts]
    results = finish(engine, after_step)
    return [results[number] for number in numbers]


def tokens(results: Sequence[Result]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]
