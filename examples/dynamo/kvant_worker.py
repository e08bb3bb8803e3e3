"""Kvant as an engine of NVIDIA Dynamo: tokens in, tokens out, and events of its prefix cache.

    pip install kvant ai-dynamo uvloop
    python -m dynamo.frontend --discovery-backend file
    python examples/dynamo/kvant_worker.py smollm2 --discovery-backend file --max-num-seqs 32

Dynamo renders chat templates, tokenises and speaks HTTP. It routes by the events, whose hashes are Kvant's.
Flags that Dynamo's worker does not know are options of Kvant's engine. Requests with a constraint, with
several answers or from another worker's prefill are refused.
"""

from __future__ import annotations

import argparse
import queue
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import fields
from typing import Any

from dynamo.common.backend import (
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    LLMEngine,
    LlmRegistration,
    WorkerConfig,
)
from dynamo.common.backend.publisher import PushSource
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import InvalidArgument

from kvant import LLM, AsyncLLM, SamplingParams
from kvant.errors import RequestError
from kvant.kv.events import PageEvent, PageLog, Removed, Stored
from kvant.plan.config import ENGINE_OPTIONS
from kvant.plan.options import Kind
from kvant.sampling.logprobs import TokenLogprobs

_REASONS = {"stop": "stop", "length": "length", "cancelled": "cancelled"}
_SAMPLING = {field.name for field in fields(SamplingParams)}
_STOPS = {"max_tokens": "max_tokens", "min_tokens": "min_tokens", "ignore_eos": "ignore_eos"}


def read_params(request: GenerateRequest, otherwise: SamplingParams) -> SamplingParams:
    """Sampling of a request, over the model's own. Raises RequestError for what is not served."""
    sampling = _given(request.get("sampling_options"))
    stops, output = _given(request.get("stop_conditions")), _given(request.get("output_options"))
    if request.get("prefill_result") or request.get("multi_modal_data"):
        raise RequestError("this worker computes whole text requests only")
    if sampling.get("n", 1) != 1:
        raise RequestError("one answer a request", param="n")
    if sampling.pop("guided_decoding", None):
        raise RequestError("constrained answers need `kvant serve`", param="guided_decoding")
    chosen = {name: getattr(otherwise, name) for name in _SAMPLING}
    chosen |= {name: value for name, value in sampling.items() if name in _SAMPLING}
    chosen |= {_STOPS[name]: value for name, value in stops.items() if name in _STOPS}
    # Dynamo finds stop strings in the text that it decodes itself.
    token_ids = [*stops.get("stop_token_ids", ()), *stops.get("stop_token_ids_hidden", ())]
    chosen["stop_token_ids"] = tuple(dict.fromkeys(token_ids))
    for name in ("logprobs", "prompt_logprobs"):
        chosen[name] = output.get(name)
    return SamplingParams(**{**chosen, "n": 1, "stop": ()})


def _given(options: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (options or {}).items() if value is not None}


class QueueLog(PageLog):
    """Hands events from the engine's thread to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: queue.SimpleQueue[PageEvent | None] = queue.SimpleQueue()

    def stored(self, digest: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        super().stored(digest, parent, tokens)
        self._hand_over()

    def removed(self, digest: bytes) -> None:
        super().removed(digest)
        self._hand_over()

    def _hand_over(self) -> None:
        for event in self.take():
            self.waiting.put(event)


class KvantEngine(LLMEngine):
    """options: of `kvant.LLM`. name: the model's for clients."""

    def __init__(self, model: str, name: str, options: dict[str, Any]) -> None:
        self._model, self._name, self._options = model, name, options
        self._log = QueueLog()
        self._llm: AsyncLLM | None = None
        self._streams: dict[str, Any] = {}
        self._publishing: threading.Thread | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[KvantEngine, WorkerConfig]:
        parser = argparse.ArgumentParser()
        parser.add_argument("model")
        parser.add_argument("--served-model-name")
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--component", default="kvant")
        parser.add_argument("--discovery-backend", default="etcd")
        parser.add_argument("--request-plane", default="tcp")
        parser.add_argument("--event-plane")
        known, rest = parser.parse_known_args(argv)
        name = known.served_model_name or known.model
        config = WorkerConfig(
            namespace=known.namespace, component=known.component, model_name=known.model,
            served_model_name=name, discovery_backend=known.discovery_backend,
            request_plane=known.request_plane, event_plane=known.event_plane,
        )  # fmt: skip
        return cls(known.model, name, read_options(rest)), config

    async def start(self, worker_id: int) -> EngineConfig:
        llm = LLM(self._model, **self._options)
        llm.engine.tell(self._log)
        self._llm = AsyncLLM.from_llm(llm)
        limits = llm.engine.limits
        return EngineConfig(
            model=str(llm.model_path),
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=limits.max_model_len,
                kv_cache_block_size=llm.plan.page_size,
                total_kv_blocks=llm.engine.stats.num_usable_pages,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
            ),
        )

    async def generate(
        self, request: GenerateRequest, context: Any
    ) -> AsyncGenerator[GenerateChunk, None]:
        assert self._llm is not None
        try:
            params = read_params(request, self._llm.default_params)
        except RequestError as fault:
            raise InvalidArgument(str(fault)) from None
        prompt = request["token_ids"]
        stream = self._llm.generate(prompt, params)
        self._streams[context.id()] = stream
        count = 0
        try:
            async with stream:
                async for piece in stream:
                    count += len(piece.token_ids)
                    chunk: GenerateChunk = {"token_ids": list(piece.token_ids), "index": 0}
                    if piece.logprobs:
                        chunk["log_probs"] = [one.logprob for one in piece.logprobs]
                        chunk["top_logprobs"] = [_top(one) for one in piece.logprobs]
                    if piece.result is not None:
                        if piece.result.error is not None:
                            raise InvalidArgument(str(piece.result.error))
                        chunk["finish_reason"] = _REASONS.get(piece.result.finish_reason, "error")
                        chunk["completion_usage"] = {
                            "prompt_tokens": len(prompt),
                            "completion_tokens": count,
                            "total_tokens": len(prompt) + count,
                            "prompt_tokens_details": {
                                "cached_tokens": piece.result.num_cached_tokens
                            },
                        }
                    yield chunk
        finally:
            self._streams.pop(context.id(), None)

    async def abort(self, context: Any) -> None:
        if (stream := self._streams.get(context.id())) is not None:
            stream.cancel()

    async def kv_event_sources(self) -> list[PushSource]:
        return [PushSource(on_ready=self._publish)]

    async def cleanup(self) -> None:
        if self._llm is not None:
            self._llm.close()
            self._llm = None
        if self._publishing is not None:
            self._log.waiting.put(None)
            self._publishing.join(5)
            self._publishing = None

    def _publish(self, publisher: Any) -> None:
        self._publishing = threading.Thread(target=self._tell, args=(publisher,), daemon=True)
        self._publishing.start()

    def _tell(self, publisher: Any) -> None:
        while (event := self._log.waiting.get()) is not None:
            match event:
                case Stored():
                    publisher.publish_stored(
                        list(event.tokens),
                        [len(event.tokens)],
                        [_signed(event.digest)],
                        None if event.parent is None else _signed(event.parent),
                    )
                case Removed():
                    publisher.publish_removed([_signed(event.digest)])


def read_options(rest: Sequence[str]) -> dict[str, Any]:
    """Flags of Kvant's engine, as arguments of `LLM`."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    by_name = {option.name: option for option in ENGINE_OPTIONS if option.name != "model"}
    for option in by_name.values():
        kind = {"action": argparse.BooleanOptionalAction} if option.kind is Kind.SWITCH else {}
        parser.add_argument(option.flag, dest=option.name, **kind)
    given = {
        name: value for name, value in vars(parser.parse_args(rest)).items() if value is not None
    }
    return {
        name: option.read_text(value, option.flag) if isinstance(value, str) else value
        for name, value in given.items()
        for option in (by_name[name],)
    }


def _signed(digest: bytes) -> int:
    """The last 64 bits of a page's hash."""
    return int.from_bytes(digest[-8:], "big", signed=True)


def _top(one: TokenLogprobs) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
        for rank, (token, logprob) in enumerate(one.top, 1)
    ]


if __name__ == "__main__":
    run(KvantEngine)
