"""`LLM`: the engine for Python programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvant.attention.select import parse_backend
from kvant.engine.build import build_engine
from kvant.engine.config import EngineConfig, kv_requests, make_config
from kvant.engine.device import host_device
from kvant.engine.planning import DEFAULT_PAGE_SIZE, Plan, PlanRequest
from kvant.engine.result import Result
from kvant.engine.sampling_params import SamplingParams
from kvant.engine.stream import TokenStream
from kvant.engine.tokenizing import Message, Tokenizing
from kvant.errors import BadValue, RequestError
from kvant.kv.memory import parse_size
from kvant.kv.names import parse_compute_dtype
from kvant.kv.spec import KVPlan
from kvant.models import local

if TYPE_CHECKING:
    from kvant.engine.engine import Engine

Prompt = str | Sequence[int]


class LLM:
    """A model that answers, with a KV cache in the formats that were asked for.

        llm = LLM("smollm2", kv_cache_dtype="fp8_per_token_head")
        for result in llm.generate(["Once upon a time", "The sea"], SamplingParams(temperature=0)):
            print(result.text)

    model: a directory, a .gguf file, a hub id, or "smollm2". Arguments mean what the flags of the same
    names mean (`kvant generate --help`). Sizes are bytes or texts such as "2GiB". block_size is another
    name for page_size. Not thread-safe. Raises ConfigError, before weights are read, for everything
    that cannot be as asked.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        dtype: str = "auto",
        kv_cache_dtype: str | None = None,
        kv_cache_dtype_skip_layers: str | Sequence[int | str] = (),
        kv_cache_rules: str | Sequence[str] = (),
        kv_cache_policy: str | Path | None = None,
        kv_missing_scales: str = "error",
        kv_cache_memory: int | str | None = None,
        strict: bool = False,
        attention_backend: str | None = None,
        batch_invariant: bool = False,
        page_size: int | None = None,
        block_size: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        revision: str | None = None,
        device: str = "auto",
        seed: int | None = None,
        progress: local.Progress | None = None,
    ) -> None:
        plan = PlanRequest(
            model=str(model),
            requests=kv_requests(
                kv_cache_dtype=kv_cache_dtype,
                skip_layers=_texts(kv_cache_dtype_skip_layers),
                rules=_texts(kv_cache_rules),
                policy=None if kv_cache_policy is None else Path(kv_cache_policy),
                missing_scales=kv_missing_scales,
                strict=strict,
                label=lambda name, value: f"{name}={value!r}",
            ),
            revision=revision,
            dtype=parse_compute_dtype(dtype, asked_by="dtype"),
            backend=parse_backend(attention_backend, asked_by="attention_backend"),
            page_size=_page_size(page_size, block_size),
            max_model_len=_at_least_one("max_model_len", max_model_len),
            kv_cache_bytes=_size("kv_cache_memory", kv_cache_memory),
            batch_invariant=batch_invariant,
            device=host_device(device, asked_by="device"),
        )
        config = make_config(
            plan,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_caching=enable_prefix_caching,
            seed=seed,
        )
        self._built = build_engine(config, progress=progress)

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: local.Progress | None = None) -> LLM:
        """An LLM of a configuration that was made elsewhere, as from command line flags."""
        llm = cls.__new__(cls)
        llm._built = build_engine(config, progress=progress)
        return llm

    @property
    def plan(self) -> KVPlan:
        """What every layer stores, and who decided it."""
        return self._built.kv

    @property
    def planned(self) -> Plan:
        """The plan with everything around it: geometry, weights, memory."""
        return self._built.planned

    @property
    def model_path(self) -> Path:
        """The model's directory in transformers' format."""
        return self._built.path

    @property
    def engine(self) -> Engine:
        return self._built.engine

    @property
    def tokenizing(self) -> Tokenizing | None:
        """The tokenizer and chat template; None for a model without tokenizer files."""
        return self._built.tokenizing

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about what was chosen where nothing was asked."""
        return self._built.notes

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str = "",
    ) -> list[Result]:
        """Complete one or several prompts, all in one batch; results in the order of the prompts.

        A prompt is a text or a list of token ids. sampling_params: one for all or one for each. If any
        request is wrong, RequestError, and none is run. salt: see `Engine.submit`.
        """
        requests = _pair(prompts, sampling_params)
        engine, numbers = self.engine, []
        results: dict[int, Result] = {}
        try:
            for prompt, params in requests:
                numbers.append(engine.submit(self.encode(prompt), params, salt=salt))
            pending = set(numbers)
            while pending:
                for progress in engine.step():
                    if progress.result is not None and progress.number in pending:
                        results[progress.number] = progress.result
                        pending.remove(progress.number)
        finally:
            for number in numbers:
                engine.cancel(number)  # does nothing to those that ended
        return [results[number] for number in numbers]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, salt: str = ""
    ) -> TokenStream:
        """Complete one prompt piece by piece; the last piece carries the result.

        Leaving the loop early cancels the request.
        """
        number = self.engine.submit(
            self.encode(prompt), sampling_params or SamplingParams(), salt=salt
        )
        return self.engine.stream(number)

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt; token ids stay as they are."""
        return prompt if not isinstance(prompt, str) else self._tokenizing().encode(prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation as a prompt, by the model's chat template."""
        return self._tokenizing().encode_chat(messages)

    def _tokenizing(self) -> Tokenizing:
        if self.tokenizing is None:
            raise RequestError(
                f"{self.model_path} has no tokenizer: give prompts as lists of token ids",
                param="prompt",
            )
        return self.tokenizing


def _pair(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters. A list of numbers is one prompt, not several."""
    several: list[Prompt]
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        several = [prompts]  # type: ignore[list-item]
    else:
        several = list(prompts)  # type: ignore[arg-type]
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params or SamplingParams()) for prompt in several]
    if len(params) != len(several):
        raise RequestError(
            f"{len(several)} prompts and {len(params)} sampling_params", param="sampling_params"
        )
    return list(zip(several, params, strict=True))


def _texts(given: str | Sequence[int | str]) -> list[str]:
    return [given] if isinstance(given, str) else [str(item) for item in given]


def _size(name: str, given: int | str | None) -> int | None:
    if given is None:
        return None
    return parse_size(str(given), asked_by=name)


def _at_least_one(name: str, given: int | None) -> int | None:
    if given is not None and given < 1:
        raise BadValue(f"{name} is {given}", why="it must be 1 or more")
    return given


def _page_size(page_size: int | None, block_size: int | None) -> int:
    if page_size is not None and block_size is not None and page_size != block_size:
        raise BadValue(
            f"page_size is {page_size} and block_size is {block_size}",
            why="they are two names for one thing",
        )
    found = block_size if page_size is None else page_size
    return _at_least_one("page_size", found) or DEFAULT_PAGE_SIZE
