"""The metrics of /metrics: Kvant's own names, and the vLLM names that dashboards and routers read.

Label values come from closed sets and never from a client's text.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
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
_FAILURES = ("refused", "numerical_error", "engine_fault", "engine_died", "shutting_down")


class Metrics:
    """The metrics of one server. model: the model's name in answers, the value of the label model_name.

    aborted counts sequences. first_token, next_token: seconds. longest_answer: tokens, of each request.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        label = ("model_name",)

        def counter(name: str, text: str, *more: str) -> Counter:
            """Makes a counter: the family if it has more labels, else its one counter, which starts at 0."""
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
        self.aborted = counter("kvant:requests_aborted", "Sequences that clients left.")
        self._failed = counter("kvant:requests_failed", "Sequences that failed.", "kind")
        self._corrupted = counter("vllm:corrupted_requests", "Sequences that met NaN or Inf.")
        self._http = counter(
            "kvant:http_requests", "Answers by route and status.", "route", "status"
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to token.", _SECONDS
        )
        self.next_token = histogram(
            "vllm:inter_token_latency_seconds", "Step to step.", _TOKEN_SECONDS
        )
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
        self.longest_answer = histogram(
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
        for kind in _FAILURES:
            self._failed.labels(model, kind)

    def watch(self, supervisor: Supervisor, admission: Admission) -> None:
        """Adds the engine's numbers, which are read at each scrape."""
        self._registry.register(_EngineGauges(self._model, supervisor, admission))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def submitted(self, generation: Generation, prompt_tokens: list[int]) -> None:
        self._n.observe(generation.n)
        if generation.max_tokens is not None:
            self._max.observe(generation.max_tokens)
        for count in prompt_tokens:
            self._per_prompt.observe(count)

    def stepped(self, before: Report, report: Report) -> None:
        """Adds what changed between two reports of the engine. A restarted engine counts from 0."""
        if report.stats.num_steps < before.stats.num_steps:
            before = type(report)(type(report.stats)())
        self._audits.inc(report.num_audits - before.num_audits)
        self._audit_faults.inc(report.num_audit_faults - before.num_audit_faults)
        self._scale_audits.inc(report.num_scale_audits - before.num_scale_audits)
        self._scale_faults.inc(report.num_scale_faults - before.num_scale_faults)
        if tokens := report.num_tokens - before.num_tokens:
            self._iteration.observe(tokens)
        self._steps.inc(report.stats.num_steps - before.stats.num_steps)
        for one in self._preemptions:
            one.inc(report.stats.num_preemptions - before.stats.num_preemptions)

    def timed(self, times: Times, tokens: int) -> None:
        """Adds the times of one sequence. tokens: of its answer."""
        self._queue.observe(times.queue)
        self._prefill.observe(times.prefill)
        self._decode.observe(times.decode)
        self._inference.observe(times.prefill + times.decode)
        if tokens > 1:
            self._each.observe(times.decode / (tokens - 1))

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

    def failed(self, kind: str) -> None:
        self._failed.labels(self._model, kind).inc()
        if kind == "numerical_error":
            self._corrupted.inc()

    def answered(self, route: str, status: int) -> None:
        """Counts an HTTP response. route: a path of the table of routes, or "other"."""
        self._http.labels(self._model, route, str(status)).inc()


class _EngineGauges(Collector):
    def __init__(self, model: str, supervisor: Supervisor, admission: Admission) -> None:
        self._model, self._supervisor, self._admission = model, supervisor, admission

    def collect(self) -> Iterable[Metric]:
        model, admission = self._model, self._admission
        stats, ready = self._supervisor.stats, self._supervisor.ready
        usage = stats.num_held_pages / stats.num_usable_pages if stats.num_usable_pages else 0.0
        running, waiting, used = (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
        )
        for name, text, value in (
            (f"vllm:{running}", "Sequences that run.", stats.num_running),
            (f"kvant:{running}", "Sequences that run.", stats.num_running),
            (f"vllm:{waiting}", "Sequences that wait.", stats.num_waiting),
            (f"kvant:{waiting}", "Sequences that wait.", stats.num_waiting),
            (f"vllm:{used}", "Pages in use, of 1.", usage),
            ("vllm:gpu_cache_usage_perc", "Pages in use, of 1.", usage),
            (f"kvant:{used}", "Pages in use, of 1.", usage),
            ("kvant:pages_held", "Pages that sequences hold.", stats.num_held_pages),
            ("kvant:pages_idle", "Cached pages without owner.", stats.num_idle_pages),
            ("kvant:pages_usable", "Pages in all.", stats.num_usable_pages),
            ("kvant:sequences_held", "Places in use.", admission.held),
            ("kvant:sequences_most", "Places in all.", admission.capacity),
            (
                "kvant:queued_prompt_tokens",
                "Tokens of prompts without an answer token.",
                admission.queued_tokens,
            ),
            ("kvant:queued_prompt_tokens_most", "As many may wait.", admission.most_tokens),
            ("kvant:prompt_tokens_per_second", "As measured.", admission.tokens_per_second),
            ("kvant:engine_up", "1: ready.", float(self._supervisor.is_ready)),
        ):
            yield _gauge(model, name, text, value)
        # capacity: waits for a place in a step. deferred: waits until its form is compiled.
        reasons: _Values = {
            ("capacity",): stats.num_waiting - stats.num_compiling,
            ("deferred",): stats.num_compiling,
        }
        name = "vllm:num_requests_waiting_by_reason"
        yield _gauge(model, name, "Sequences that wait, by reason.", reasons, "reason")
        deaths = self._supervisor.num_deaths
        yield _counter(model, "kvant:engine_deaths", "Engines that died.", deaths)
        yield saturation_metric(model, stats)
        if stats.speculation is not None:
            yield from draft_metrics(model, stats.speculation)
        if stats.offload is not None:
            yield from offload_metrics(model, stats.offload)
        if ready is not None:
            shape: _Values = {(str(ready.page_size), str(stats.num_usable_pages)): 1}
            text = "The cache's shape, in its labels."
            labels = ("block_size", "num_gpu_blocks")
            yield _gauge(model, "vllm:cache_config_info", text, shape, *labels)
            size = ready.bytes_per_token
            yield _gauge(model, "kvant:kv_bytes_per_token", "Stored for each token.", size)
            yield from self._layers(ready, stats)

    def _layers(self, ready: Ready, stats: Stats) -> Iterable[Metric]:
        """Yields each layer's bytes per token, and the bytes held by format."""
        each: _Values = {}
        held: _Values = {}
        tokens = stats.num_held_pages * ready.page_size
        for layer in layers_of(ready.plan):
            formats, size = (layer.k, layer.v), layer.bytes_per_token
            each[*formats, str(layer.index)] = size
            held[formats] = held.get(formats, 0) + size * tokens
        name = "kvant:layer_kv_bytes_per_token"
        yield _gauge(self._model, name, "Stored by one layer.", each, "k", "v", "layer")
        text = "In pages that sequences hold."
        yield _gauge(self._model, "kvant:kv_bytes_held", text, held, "k", "v")


_Values = dict[tuple[str, ...], float]
"""Values of a metric by the values of its labels."""


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    model: str,
    name: str,
    text: str,
    values: float | _Values,
    *labels: str,
) -> Metric:
    """Returns a family of metrics. labels: beside model_name; without any, `values` is one number."""
    family = kind(name, text, labels=("model_name", *labels))
    for own, value in values.items() if isinstance(values, dict) else (((), values),):
        family.add_metric((model, *own), value)
    return family


_counter = partial(_family, CounterMetricFamily)
_gauge = partial(_family, GaugeMetricFamily)


def saturation_metric(model: str, stats: Stats) -> Metric:
    """Returns the counts of saturated values by layer and side; layers without any are left out."""
    found: _Values = {}
    for layer, k, v in stats.saturated:
        found |= {(layer, "k"): k, (layer, "v"): v}
    text = "Values beyond what a layer holds, stored as its largest."
    return _counter(model, "kvant:kv_saturated_values", text, found, "layer", "side")


_TIER_METRICS = (
    (_counter, "pages_stored", "Pages that a tier took.", "stored"),
    (_counter, "pages_restored", "Pages that came back from a tier.", "restored"),
    (_counter, "pages_bad", "Pages that were not what was stored; computed again.", "bad"),
    (_counter, "pages_evicted", "Pages that gave way to others.", "evicted"),
    (_counter, "pages_dropped", "Pages that a tier could not take in time.", "dropped"),
    (_counter, "bytes_stored", "Bytes that a tier took.", "bytes_stored"),
    (_counter, "bytes_restored", "Bytes that came back from a tier.", "bytes_restored"),
    (_counter, "late", "Requests that did not wait for a tier any longer.", "late"),
    (_gauge, "pages", "Pages in a tier.", "num_pages"),
    (_gauge, "bytes", "Bytes in a tier.", "num_bytes"),
)


def offload_metrics(model: str, offload: OffloadStats) -> Iterable[Metric]:
    """Yields the counters of the tiers behind the device's pages, and the tiers' contents."""
    tiers = {"host": offload.host, "disk": offload.disk, "peer": offload.peer}
    for kind, name, text, field_name in _TIER_METRICS:
        values: _Values = {
            (tier,): getattr(counts, field_name)
            for tier, counts in tiers.items()
            if counts is not None
        }
        yield kind(model, f"kvant:offload_{name}", text, values, "tier")
    for name, text, value in (
        ("restores", "Requests whose pages came back.", offload.num_restores),
        ("tokens_restored", "Tokens that were not computed again.", offload.num_restored_tokens),
        ("restore_seconds", "Time that requests waited for copies.", offload.restore_seconds),
    ):
        yield _counter(model, f"kvant:offload_{name}", text, value)


def draft_metrics(model: str, drafts: SpeculationStats) -> Iterable[Metric]:
    """Yields vLLM's counters of drafts. Only for engines with drafts: dashboards test for the names."""
    places: _Values = {(str(at),): n for at, n in enumerate(drafts.accepted_per_position)}
    length = drafts.num_emitted_tokens / drafts.num_drafts if drafts.num_drafts else 0.0
    of_vllm, own = "vllm:spec_decode", "kvant:spec_decode"
    text = "Sequences that had drafts, over all steps."
    yield _counter(model, f"{of_vllm}_num_drafts", text, drafts.num_drafts)
    name = f"{of_vllm}_num_draft_tokens"
    yield _counter(model, name, "Tokens drafted.", drafts.num_draft_tokens)
    name, text = f"{of_vllm}_num_accepted_tokens", "Drafted tokens that stood."
    yield _counter(model, name, text, drafts.num_accepted_tokens)
    text = "Drafted tokens that stood, by their place among the drafts."
    yield _counter(model, f"{name}_per_pos", text, places, "position")
    text = "Steps of answering sequences without drafts."
    yield _counter(model, f"{own}_num_plain_steps", text, drafts.num_plain_steps)
    text = "Tokens of a step with drafts, the target's own too."
    yield _gauge(model, f"{own}_mean_acceptance_length", text, length)
    yield _gauge(model, f"{own}_pays", "1: the next step will draft.", float(drafts.pays))


@dataclass(frozen=True, slots=True)
class LayerMetric:
    """One layer of a plan. k, v: names of formats, "none" for a layer that stores nothing itself."""

    index: int
    k: str
    v: str
    bytes_per_token: int


def layers_of(plan: bytes) -> list[LayerMetric]:
    """Returns the layers in the JSON of `kvant plan --format json`."""

    def named(choice: dict[str, str] | None) -> str:
        return "none" if choice is None else choice["format"]

    return [
        LayerMetric(layer["layer"], named(layer["k"]), named(layer["v"]), layer["bytes_per_token"])
        for layer in json.loads(plan)["target"]["layers"]
    ]


_MOST_ENDED = 16


@dataclass(slots=True)
class Activity:
    """Numbers of the running requests and of the last ones that ended, without contents or names."""

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
