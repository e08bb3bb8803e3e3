"""The metrics of /metrics: Kvant's own names, and the vLLM names that dashboards and routers read.

Label values come from closed sets; no text of a client becomes one.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvant.server import wire

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from kvant.kv.offload.stats import OffloadStats
    from kvant.server.messages import Ready, Report, Stats, Times
    from kvant.server.requests import Generation
    from kvant.server.service import Admission, Running
    from kvant.server.supervisor import Supervisor
    from kvant.speculative.counts import SpeculationStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_TOKENS = tuple(float(2**k) for k in range(18))


class Metrics:
    """Counts of one server. model: the name it answers with, the one value of its label."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        label = ("model_name",)

        def counter(name: str, text: str, *more: str) -> Counter:
            """With a label of its own, else the one that is counted from the start."""
            family = Counter(name, text, (*label, *more), registry=self._registry)
            return family if more else family.labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, label, buckets=buckets, registry=self._registry)
            return family.labels(model)

        both = ("kvant", "vllm")
        self._prompt_tokens = [counter(f"{p}:prompt_tokens", "Prompt tokens.") for p in both]
        self._tokens = [counter(f"{p}:generation_tokens", "New tokens.") for p in both]
        self._success = [
            counter(
                f"{p}:request_success", "Sequences that ended by themselves.", "finished_reason"
            )
            for p in both
        ]
        caches = ("kvant:prefix_cache", "vllm:prefix_cache", "vllm:gpu_prefix_cache")
        self._queries = [counter(f"{p}_queries", "Prompt tokens looked up.") for p in caches]
        self._hits = [counter(f"{p}_hits", "Prompt tokens found in the cache.") for p in caches]
        self._aborted = counter("kvant:requests_aborted", "Sequences that clients left.")
        self._failed = counter("kvant:requests_failed", "Sequences that failed.", "kind")
        self._corrupted = counter("vllm:corrupted_requests", "Sequences that met NaN or Inf.")
        self._http = counter(
            "kvant:http_requests", "Answers by route and status.", "route", "status"
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to token.", _SECONDS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Step to step.", _TOKEN_SECONDS)
        self._per_prompt = histogram("vllm:request_prompt_tokens", "Tokens a prompt.", _TOKENS)
        self._per_answer = histogram("vllm:request_generation_tokens", "Tokens an answer.", _TOKENS)
        self._queue = histogram("vllm:request_queue_time_seconds", "Until it first ran.", _SECONDS)
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "First run to first token.", _SECONDS
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "First token to last.", _SECONDS
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "First run to last token.", _SECONDS
        )
        self._each = histogram(
            "vllm:request_time_per_output_token_seconds", "Decode time a token.", _TOKEN_SECONDS
        )
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens", "Longest answer of a request.", _TOKENS
        )
        self._iteration = histogram("vllm:iteration_tokens_total", "Tokens a step.", _TOKENS)
        self._steps = counter("kvant:steps", "Steps of all engines.")
        self._audits = counter("kvant:page_audits", "Audits of all pages by an idle engine.")
        self._audit_faults = counter("kvant:page_audit_faults", "Audits that found something.")
        self._scale_audits = counter(
            "kvant:scale_audits", "Looks of an idle engine at the scales of cached pages."
        )
        self._scale_faults = counter(
            "kvant:scale_audit_faults", "Scales that changed without a write."
        )
        self._preemptions = [counter(f"{p}:num_preemptions", "Preemptions.") for p in both]
        self._n = histogram("vllm:request_params_n", "n of a request.", _TOKENS[:8])
        self._max = histogram("vllm:request_params_max_tokens", "max_tokens asked.", _TOKENS)
        ProcessCollector(registry=self._registry)
        for success in self._success:
            for reason in ("stop", "length"):
                success.labels(model, reason)
        for kind in (
            "refused",
            "numerical_error",
            "engine_fault",
            "engine_died",
            "shutting_down",
        ):
            self._failed.labels(model, kind)

    def watch(self, supervisor: Supervisor, admission: Admission) -> None:
        """Show the engine's own numbers as they are at the time of a scrape."""
        self._registry.register(_EngineGauges(self._model, supervisor, admission))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def submitted(self, generation: Generation, prompt_tokens: list[int]) -> None:
        self._n.observe(generation.n)
        if generation.max_tokens is not None:
            self._max.observe(generation.max_tokens)
        for count in prompt_tokens:
            self._per_prompt.observe(count)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def stepped(self, before: Report, report: Report) -> None:
        """What one report of the engine adds. A new engine counts from nothing."""
        if report.stats.num_steps < before.stats.num_steps:
            before = type(report)(type(report.stats)())
        self._audits.inc(report.num_audits - before.num_audits)
        self._audit_faults.inc(report.num_audit_faults - before.num_audit_faults)
        self._scale_audits.inc(report.num_scale_audits - before.num_scale_audits)
        self._scale_faults.inc(report.num_scale_faults - before.num_scale_faults)
        if tokens := report.num_tokens - before.num_tokens:
            self._iteration.observe(tokens)
        self._count(before.stats, report.stats)

    def _count(self, before: Stats, after: Stats) -> None:
        if steps := after.num_steps - before.num_steps:
            self._steps.inc(steps)
        for one in self._preemptions:
            one.inc(after.num_preemptions - before.num_preemptions)

    def timed(self, times: Times, tokens: int) -> None:
        """Where the time of one sequence went."""
        self._queue.observe(times.queue)
        self._prefill.observe(times.prefill)
        self._decode.observe(times.decode)
        self._inference.observe(times.prefill + times.decode)
        if tokens > 1:
            self._each.observe(times.decode / (tokens - 1))

    def answered_whole(self, longest: int) -> None:
        """Count a request whose answers have ended; longest: tokens of the longest."""
        self._longest.observe(longest)

    def finished(
        self, reason: str, *, seconds: float, prompt_tokens: int, cached_tokens: int, tokens: int
    ) -> None:
        for success in self._success:
            success.labels(self._model, reason).inc()
        for family, count in (
            (self._prompt_tokens, prompt_tokens),
            (self._tokens, tokens),
            (self._queries, prompt_tokens),
            (self._hits, cached_tokens),
        ):
            for one in family:
                one.inc(count)
        self._e2e.observe(seconds)
        self._per_answer.observe(tokens)

    def aborted(self, count: int) -> None:
        self._aborted.inc(count)

    def failed(self, kind: str) -> None:
        self._failed.labels(self._model, kind).inc()
        if kind == "numerical_error":
            self._corrupted.inc()

    def answered(self, route: str, status: int) -> None:
        """route: a path of the table of routes, or "other"."""
        self._http.labels(self._model, route, str(status)).inc()


class _EngineGauges(Collector):
    def __init__(self, model: str, supervisor: Supervisor, admission: Admission) -> None:
        self._model, self._supervisor, self._admission = model, supervisor, admission

    def collect(self) -> Iterable[Metric]:
        stats, ready = self._supervisor.stats, self._supervisor.ready
        usage = stats.num_held_pages / stats.num_usable_pages if stats.num_usable_pages else 0.0
        for names, text, value in (
            (("num_requests_running",), "Sequences that run.", stats.num_running),
            (("num_requests_waiting",), "Sequences that wait.", stats.num_waiting),
            (("kv_cache_usage_perc", "gpu_cache_usage_perc"), "Pages in use, of 1.", usage),
        ):
            shown = [f"vllm:{name}" for name in names] + [f"kvant:{names[0]}"]
            for name in shown:
                yield self._gauge(name, text, value)
        yield self._waiting_by_reason(stats)
        yield self._gauge("kvant:pages_held", "Pages that sequences hold.", stats.num_held_pages)
        yield self._gauge("kvant:pages_idle", "Cached pages without owner.", stats.num_idle_pages)
        yield self._gauge("kvant:pages_usable", "Pages in all.", stats.num_usable_pages)
        admission = self._admission
        yield self._gauge("kvant:sequences_held", "Places in use.", admission.held)
        yield self._gauge("kvant:sequences_most", "Places in all.", admission.capacity)
        yield self._gauge(
            "kvant:queued_prompt_tokens",
            "Tokens of prompts without an answer token.",
            admission.queued_tokens,
        )
        yield self._gauge(
            "kvant:queued_prompt_tokens_most", "As many may wait.", admission.most_tokens
        )
        yield self._gauge(
            "kvant:prompt_tokens_per_second", "As measured.", admission.tokens_per_second
        )
        deaths = CounterMetricFamily(
            "kvant:engine_deaths", "Engines that died.", labels=("model_name",)
        )
        deaths.add_metric((self._model,), self._supervisor.num_deaths)
        yield deaths
        yield saturation_metric(self._model, stats)
        if stats.speculation is not None:
            yield from draft_metrics(self._model, stats.speculation)
        if stats.offload is not None:
            yield from offload_metrics(self._model, stats.offload)
        yield self._gauge("kvant:engine_up", "1: ready.", float(self._supervisor.is_ready))
        if ready is not None:
            info = GaugeMetricFamily(
                "vllm:cache_config_info",
                "The cache's shape, in its labels.",
                labels=("model_name", "block_size", "num_gpu_blocks"),
            )
            pages = str(stats.num_usable_pages)
            info.add_metric((self._model, str(ready.page_size), pages), 1)
            yield info
            bytes_ = self._gauge(
                "kvant:kv_bytes_per_token", "Stored for each token.", ready.bytes_per_token
            )
            yield bytes_
            yield from self._layers(ready, stats)

    def _layers(self, ready: Ready, stats: Stats) -> Iterable[Metric]:
        """What every layer stores, and how much of each format is held."""
        label = ("model_name", "k", "v")
        each = GaugeMetricFamily(
            "kvant:layer_kv_bytes_per_token", "Stored by one layer.", labels=(*label, "layer")
        )
        held = GaugeMetricFamily(
            "kvant:kv_bytes_held", "In pages that sequences hold.", labels=label
        )
        by_format: dict[tuple[str, str], int] = {}
        for layer in layers_of(ready.plan):
            formats = (self._model, layer.k, layer.v)
            each.add_metric((*formats, str(layer.index)), layer.bytes_per_token)
            by_format[layer.k, layer.v] = (
                by_format.get((layer.k, layer.v), 0) + layer.bytes_per_token
            )
        for (k, v), size in by_format.items():
            held.add_metric((self._model, k, v), size * stats.num_held_pages * ready.page_size)
        yield each
        yield held

    def _waiting_by_reason(self, stats: Stats) -> Metric:
        """capacity: waits for a place in a step. deferred: waits until its form is compiled."""
        found = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait, by reason.",
            labels=("model_name", "reason"),
        )
        found.add_metric((self._model, "capacity"), stats.num_waiting - stats.num_compiling)
        found.add_metric((self._model, "deferred"), stats.num_compiling)
        return found

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family


def saturation_metric(model: str, stats: Stats) -> Metric:
    """By layer and side; layers that held everything are left out."""
    found = CounterMetricFamily(
        "kvant:kv_saturated_values",
        "Values beyond what a layer holds, stored as its largest.",
        labels=("model_name", "layer", "side"),
    )
    for layer, k, v in stats.saturated:
        for side, count in (("k", k), ("v", v)):
            found.add_metric((model, layer, side), count)
    return found


_TIER_COUNTERS = (
    ("pages_stored", "Pages that a tier took.", "stored"),
    ("pages_restored", "Pages that came back from a tier.", "restored"),
    ("pages_bad", "Pages that were not what was stored; computed again.", "bad"),
    ("pages_evicted", "Pages that gave way to others.", "evicted"),
    ("pages_dropped", "Pages that a tier could not take in time.", "dropped"),
    ("bytes_stored", "Bytes that a tier took.", "bytes_stored"),
    ("bytes_restored", "Bytes that came back from a tier.", "bytes_restored"),
    ("late", "Requests that did not wait for a tier any longer.", "late"),
)
_TIER_GAUGES = (
    ("pages", "Pages in a tier.", "num_pages"),
    ("bytes", "Bytes in a tier.", "num_bytes"),
)


def offload_metrics(model: str, offload: OffloadStats) -> Iterable[Metric]:
    """Counters of the tiers behind the device's pages, and what they hold."""
    tiers = {"host": offload.host, "disk": offload.disk}
    for name, text, field_name in _TIER_COUNTERS:
        counter = CounterMetricFamily(f"kvant:offload_{name}", text, labels=("model_name", "tier"))
        for tier, counts in tiers.items():
            if counts is not None:
                counter.add_metric((model, tier), getattr(counts, field_name))
        yield counter
    for name, text, field_name in _TIER_GAUGES:
        gauge = GaugeMetricFamily(f"kvant:offload_{name}", text, labels=("model_name", "tier"))
        for tier, counts in tiers.items():
            if counts is not None:
                gauge.add_metric((model, tier), getattr(counts, field_name))
        yield gauge
    for name, text, value in (
        ("restores", "Requests whose pages came back.", offload.num_restores),
        ("tokens_restored", "Tokens that were not computed again.", offload.num_restored_tokens),
        ("restore_seconds", "Time that requests waited for copies.", offload.restore_seconds),
    ):
        total = CounterMetricFamily(f"kvant:offload_{name}", text, labels=("model_name",))
        total.add_metric((model,), value)
        yield total


def draft_metrics(model: str, drafts: SpeculationStats) -> Iterable[Metric]:
    """vLLM's counters of drafts. Call only for an engine that drafts: dashboards take the name as a yes."""
    for name, text, count in (
        ("num_drafts", "Sequences that had drafts, over all steps.", drafts.num_drafts),
        ("num_draft_tokens", "Tokens drafted.", drafts.num_draft_tokens),
        ("num_accepted_tokens", "Drafted tokens that stood.", drafts.num_accepted_tokens),
    ):
        counter = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=("model_name",))
        counter.add_metric((model,), count)
        yield counter
    by_place = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that stood, by their place among the drafts.",
        labels=("model_name", "position"),
    )
    for position, count in enumerate(drafts.accepted_per_position):
        by_place.add_metric((model, str(position)), count)
    yield by_place
    plain = CounterMetricFamily(
        "kvant:spec_decode_num_plain_steps",
        "Steps of answering sequences without drafts.",
        labels=("model_name",),
    )
    plain.add_metric((model,), drafts.num_plain_steps)
    yield plain
    length = drafts.num_emitted_tokens / drafts.num_drafts if drafts.num_drafts else 0.0
    for name, text, value in (
        ("mean_acceptance_length", "Tokens of a step with drafts, the target's own too.", length),
        ("pays", "1: the next step will draft.", float(drafts.pays)),
    ):
        gauge = GaugeMetricFamily(f"kvant:spec_decode_{name}", text, labels=("model_name",))
        gauge.add_metric((model,), value)
        yield gauge


@dataclass(frozen=True, slots=True)
class LayerMetric:
    """One layer of a plan. k and v: names of formats, "none" for a layer that stores nothing itself."""

    index: int
    k: str
    v: str
    bytes_per_token: int


def layers_of(plan: bytes) -> list[LayerMetric]:
    """The layers of `kvant plan --format json`."""

    def named(choice: dict[str, str] | None) -> str:
        return "none" if choice is None else choice["format"]

    return [
        LayerMetric(layer["layer"], named(layer["k"]), named(layer["v"]), layer["bytes_per_token"])
        for layer in json.loads(plan)["target"]["layers"]
    ]


_MOST_ENDED = 16


@dataclass(slots=True)
class Activity:
    """Numbers of the requests that run and of the last ones that ended; no contents, no names."""

    running: dict[int, Running] = field(default_factory=dict)
    ended: deque[wire.LiveRequest] = field(default_factory=lambda: deque(maxlen=_MOST_ENDED))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated: int = 0

    def opened(self, running: Running) -> None:
        self.running[id(running)] = running

    def closed(self, running: Running) -> None:
        one = numbers_of(running)
        one.cached = sum(s.ended.num_cached_tokens for s in running.sequences.values() if s.ended)
        self.running.pop(id(running), None)
        self.ended.appendleft(one)
        self.prompt_tokens += one.prompt
        self.cached_tokens += one.cached


def numbers_of(running: Running) -> wire.LiveRequest:
    new = sum(len(sequence.token_ids) for sequence in running.sequences.values())
    seconds = (running.last_event or time.monotonic()) - running.started
    return wire.LiveRequest(running.num_prompt_tokens, None, new, round(seconds, 3))
