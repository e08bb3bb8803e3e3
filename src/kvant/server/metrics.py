"""What /metrics says: Kvant's own names, and the vLLM names that dashboards and routers read.

Label values come from closed sets; nothing a client sends becomes one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from kvant.server.supervisor import Supervisor
    from kvant.server.validate import Generation

ROUTES = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/tokenize",
        "/detokenize", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/v1/kv/plan",
    }
)  # fmt: skip
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
            return Counter(name, text, (*label, *more), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, label, buckets=buckets, registry=self._registry)

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
        self._unknown = counter("kvant:unknown_fields", "Request fields that nobody knows.")
        self._http = counter(
            "kvant:http_requests", "Answers by route and status.", "route", "status"
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to token.", _SECONDS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Step to step.", _TOKEN_SECONDS)
        self._per_prompt = histogram("vllm:request_prompt_tokens", "Tokens a prompt.", _TOKENS)
        self._per_answer = histogram("vllm:request_generation_tokens", "Tokens an answer.", _TOKENS)
        self._n = histogram("vllm:request_params_n", "n of a request.", _TOKENS[:8])
        self._max = histogram("vllm:request_params_max_tokens", "max_tokens asked.", _TOKENS)
        for many in (self._prompt_tokens, self._tokens, self._queries, self._hits):
            for one in many:
                one.labels(model)  # a counter is there from the start
        for success in self._success:
            for reason in ("stop", "length"):
                success.labels(model, reason)
        for kind in ("refused", "numerical_error", "engine_fault", "engine_died"):
            self._failed.labels(model, kind)
        for single in (self._aborted, self._corrupted, self._unknown):
            single.labels(model)

    def watch(self, supervisor: Supervisor) -> None:
        """Show the engine's own numbers, as they are when somebody asks."""
        self._registry.register(_EngineGauges(self._model, supervisor))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def submitted(self, generation: Generation, prompt_tokens: list[int]) -> None:
        self._n.labels(self._model).observe(generation.n)
        if generation.max_tokens is not None:
            self._max.labels(self._model).observe(generation.max_tokens)
        self._unknown.labels(self._model).inc(len(generation.unknown))
        for count in prompt_tokens:
            self._per_prompt.labels(self._model).observe(count)

    def first_token(self, seconds: float) -> None:
        self._ttft.labels(self._model).observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._itl.labels(self._model).observe(seconds)

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
                one.labels(self._model).inc(count)
        self._e2e.labels(self._model).observe(seconds)
        self._per_answer.labels(self._model).observe(tokens)

    def aborted(self, count: int) -> None:
        self._aborted.labels(self._model).inc(count)

    def failed(self, kind: str) -> None:
        self._failed.labels(self._model, kind).inc()
        if kind == "numerical_error":
            self._corrupted.labels(self._model).inc()

    def answered(self, route: str, status: int) -> None:
        known = route if route in ROUTES else "other"
        self._http.labels(self._model, known, str(status)).inc()


class _EngineGauges(Collector):
    def __init__(self, model: str, supervisor: Supervisor) -> None:
        self._model, self._supervisor = model, supervisor

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
        yield self._gauge("kvant:pages_held", "Pages that sequences hold.", stats.num_held_pages)
        yield self._gauge("kvant:pages_idle", "Cached pages without owner.", stats.num_idle_pages)
        yield self._gauge("kvant:pages_usable", "Pages in all.", stats.num_usable_pages)
        yield self._gauge("kvant:steps", "Steps of this engine.", stats.num_steps)
        for prefix in ("kvant", "vllm"):
            family = CounterMetricFamily(
                f"{prefix}:num_preemptions", "Preemptions of this engine.", labels=("model_name",)
            )
            family.add_metric((self._model,), stats.num_preemptions)
            yield family
        yield self._gauge("kvant:engine_deaths", "Engines that died.", self._supervisor.num_deaths)
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

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family
