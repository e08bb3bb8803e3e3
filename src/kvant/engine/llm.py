"""`LLM`: the engine for Python programs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from kvant.engine.build import BuiltEngine, build_engine
from kvant.engine.result import Result, as_metrics
from kvant.engine.text import Message, Tokenizing
from kvant.errors import EngineFault, RequestError
from kvant.kv.spec import KVPlan
from kvant.models import local
from kvant.plan.config import EngineConfig, LLMOptions, config_of
from kvant.plan.plan import Plan
from kvant.sampling.generation_defaults import recommended_params
from kvant.sampling.sampling_params import EMBEDDING, SamplingParams

if TYPE_CHECKING:
    from kvant.engine.engine import Engine
    from kvant.engine.requests import TokenStream

Prompt = str | Sequence[int]
_log = logging.getLogger(__name__)


class LLM:
    """A model that answers, with a KV cache in the requested formats.

        llm = LLM("smollm2", kv_cache_dtype="fp8_per_token_head")
        for result in llm.generate(["Once upon a time", "The sea"], SamplingParams(temperature=0)):
            print(result.text)

    model: a directory, a .gguf file, a hub id, or "smollm2", the default. Options are the flags of the
    same names (docs/configuration.md). Missing options come from KVANT_ variables, else from the defaults.
    Sizes are bytes or texts such as "2GiB". Not thread-safe: use `kvant.AsyncLLM` for concurrent requests.
    Raises ConfigError, before weights are read, if an option cannot be honoured.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        progress: local.Progress | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        self._built = build_engine(config_of(model, options), progress=progress)
        self._log_warnings()

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: local.Progress | None = None) -> LLM:
        """Builds an LLM from a configuration, for example one read from command line flags."""
        llm = cls.from_built(build_engine(config, progress=progress))
        llm._log_warnings()
        return llm

    @classmethod
    def from_built(cls, built: BuiltEngine) -> LLM:
        """Wraps a built engine whose warnings the caller reports."""
        llm = cls.__new__(cls)
        llm._built = built
        return llm

    @property
    def plan(self) -> KVPlan:
        """What every layer stores, and who decided it."""
        return self._built.kv

    @property
    def planned(self) -> Plan:
        """The whole plan: the KV plan, geometry, weights and memory."""
        return self._built.planned

    @property
    def model_path(self) -> Path:
        """The model's directory in transformers' format."""
        return self._built.path

    @property
    def engine(self) -> Engine:
        return self._built.engine

    def metrics(self) -> dict[str, Any]:
        """Returns the engine's counters since its start, by their names in `EngineStats`.

        With speculation also `spec_decode_*`: drafts, drafted and accepted tokens, accepted tokens by
        position, and mean_acceptance_length, the tokens per step including the target's own.
        """
        return as_metrics(self.engine.stats)

    @property
    def tokenizing(self) -> Tokenizing | None:
        """The tokenizer and chat template; None for a model without tokenizer files."""
        return self._built.tokenizing

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about choices that the user did not make."""
        return self._built.notes

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings, such as a downgrade or a slow backend. They are logged too."""
        return self._built.warnings

    @cached_property
    def default_params(self) -> SamplingParams:
        """Parameters of requests without parameters of their own: from the model's generation_config.json,
        else the defaults of `SamplingParams`. Parameters passed with a request replace all of them. To
        change some, use `dataclasses.replace(llm.default_params, max_tokens=64)`.
        """
        return recommended_params(self.model_path)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str = "",
    ) -> list[Result]:
        """Completes one or several prompts in one batch; returns results in the order of the prompts.

        A prompt is a text or a list of token ids. sampling_params: one for all prompts, one for each, or None
        for `default_params`. Each prompt gives n consecutive results. Raises RequestError, before anything
        runs, if any request cannot be served. A grammar that does not compile is found while other requests
        run, and ends them all. salt: see `Engine.submit`.
        """
        chosen = self.default_params if sampling_params is None else sampling_params
        requests = _pair(prompts, chosen)
        engine = self.engine
        numbers: list[int] = []
        results: dict[int, Result] = {}
        try:
            for prompt, params in requests:
                numbers += engine.submit_choices(self.encode(prompt), params, salt=salt)
            pending = set(numbers)
            while pending:
                for progress in engine.step():
                    if progress.result is not None and progress.number in pending:
                        if progress.result.error is not None:
                            raise progress.result.error
                        results[progress.number] = progress.result
                        pending.remove(progress.number)
        finally:
            for number in numbers:
                engine.cancel(number)  # does nothing to ended requests
        return [results[number] for number in numbers]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str = "",
    ) -> list[Result]:
        """Answers one or several conversations with the model's chat template; otherwise like `generate`."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        several = cast(Sequence[Sequence[Message]], [messages] if is_one else messages)
        prompts = [self.encode_chat(conversation) for conversation in several]
        return self.generate(prompts, sampling_params, salt=salt)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        salt: str = "",
    ) -> list[NDArray[np.float32]]:
        """Returns a float32 vector [hidden_size] for each prompt. Needs an LLM made with `task="embed"`, or a
        checkpoint of sentence-transformers. prompts: as in `generate`.

        dimensions: keep only this many leading values, if the checkpoint was trained for it. normalize:
        scale each vector to length 1. Raises RequestError if this LLM generates or refuses `dimensions`.
        """
        pooling = self._built.pooling
        if pooling is None:
            raise RequestError('this LLM generates text: make it with task="embed"', param="prompt")
        if dimensions is not None and not pooling.allows(dimensions):
            raise RequestError(pooling.refusal(dimensions), param="dimensions")
        results = self.generate(prompts, EMBEDDING, salt=salt)
        found = []
        for result in results:
            if result.hidden is None:
                raise EngineFault("the model computed NaN or Inf for a prompt")
            found.append(pooling.vector(result.hidden, dimensions, normalize=normalize))
        return found

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, salt: str = ""
    ) -> TokenStream:
        """Completes one prompt piece by piece; the last piece carries the result. n must be 1.

        Leaving the loop early cancels the request.
        """
        number = self.engine.submit(
            self.encode(prompt), sampling_params or self.default_params, salt=salt
        )
        return self.engine.stream(number)

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Returns a prompt's token ids; a list is returned as it is. Raises RequestError for other types."""
        if isinstance(prompt, str):
            return self._tokenizing().encode(prompt)
        if not _is_list(prompt):
            raise _no_prompt(prompt)
        return prompt

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of a conversation, rendered with the model's chat template."""
        return self._tokenizing().encode_chat(messages)

    def _log_warnings(self) -> None:
        for line in self.warnings:
            _log.warning("%s", line)

    def refit(self, model: str | Path) -> None:
        """Switches to weights and KV scales of another checkpoint of this model: `kvant.engine.refit`."""
        from kvant.engine.refit import refit

        self._built = refit(self._built, str(model))

    def _tokenizing(self) -> Tokenizing:
        if self.tokenizing is None:
            raise RequestError(
                f"{self.model_path} has no tokenizer: give prompts as lists of token ids",
                param="prompt",
            )
        return self.tokenizing


def _pair(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[tuple[Prompt, SamplingParams]]:
    """Returns each prompt with its parameters. A list of integers is one prompt, not several."""
    several: list[Prompt]
    if not isinstance(prompts, str) and not _is_list(prompts):
        raise _no_prompt(prompts)
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        several = [prompts]  # type: ignore[list-item]
    else:
        several = list(prompts)  # type: ignore[arg-type]
    if isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in several]
    if not _is_list(params) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(
            "sampling_params is a SamplingParams, or a list of them, one for each prompt",
            param="sampling_params",
        )
    if len(params) != len(several):
        raise RequestError(
            f"{len(several)} prompts and {len(params)} sampling_params", param="sampling_params"
        )
    return list(zip(several, params, strict=True))


def _is_list(given: object) -> bool:
    """Returns whether this is a list of token ids. It is not for bytes, a sequence of numbers in Python."""
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)


def _no_prompt(given: object) -> RequestError:
    kind = type(given).__name__
    how = ": give its .tolist()" if hasattr(given, "tolist") else ""
    return RequestError(
        f"a prompt is a text or a list of token ids, not {kind}{how}", param="prompt"
    )
