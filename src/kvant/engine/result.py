"""Results of requests, and statistics of an engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from kvant.errors import RequestError
from kvant.kv.offload.stats import OffloadStats
from kvant.kv.pages import GroupPages
from kvant.kv.saturation import Saturated
from kvant.sampling.logprobs import TokenLogprobs
from kvant.scheduling.request import FinishReason
from kvant.speculative.counts import SpeculationStats, spec_decode


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a request.

    token_ids: the answer's tokens, including the token that ended it. text: the answer's text without that
    token; it includes a stop string only if requested. stop_reason: the stop string or stop token that ended
    it; None for an end-of-sequence token. num_cached_tokens: prompt tokens whose K and V came from the prefix
    cache. num_pages: pages it held when it ended. prompt_logprobs: one entry per prompt token, None for the
    first; None as a whole if not requested or not finished. error: why it was refused. hidden: from an
    embedding engine, the last token's hidden state after the final norm, as little-endian float32.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    num_cached_tokens: int
    num_pages: int
    num_preemptions: int
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: RequestError | None = None
    hidden: bytes | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class Progress(NamedTuple):
    """What one step added to one request. result: the whole result, in the last piece only.

    logprobs: one entry per token of token_ids, if requested. prompt_logprobs: in the first piece only; see
    `Result`.
    """

    number: int
    token_ids: tuple[int, ...]
    text: str
    result: Result | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state between two steps. Steps, tokens and preemptions are counted since its start.

    speculation: counts of drafts; None without a drafter. saturated: layers that received values beyond
    the range of their formats, as of the last check. num_compiling: waiting requests whose grammar is still
    being compiled; num_waiting includes them. offload: counters of the tiers behind the pages, or None.
    groups: pages of each group of layers.
    """

    num_running: int
    num_waiting: int
    num_held_pages: int
    num_idle_pages: int
    num_usable_pages: int
    num_steps: int
    num_computed_tokens: int
    num_preemptions: int
    speculation: SpeculationStats | None = None
    saturated: tuple[Saturated, ...] = ()
    num_compiling: int = 0
    offload: OffloadStats | None = None
    groups: tuple[GroupPages, ...] = ()


def as_metrics(stats: EngineStats) -> dict[str, Any]:
    """Returns the numbers by name, as JSON values; with speculation also `spec_decode_*`.

    groups: pages of each group. kv_saturated_values: counts of K and V by layer; layers without any are
    omitted. offload: counters of the tiers, if there are tiers.
    """
    found = {field.name: getattr(stats, field.name) for field in fields(stats)}
    found["kv_saturated_values"] = {
        one.layer: {"k": one.k, "v": one.v} for one in found.pop("saturated")
    }
    found["groups"] = [asdict(group) for group in stats.groups]
    offload = found.pop("offload")
    if offload is not None:
        found["offload"] = asdict(offload)
    speculation = found.pop("speculation")
    return found if speculation is None else {**found, **spec_decode(speculation)}
