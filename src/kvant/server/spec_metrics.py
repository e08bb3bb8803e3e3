"""What /metrics says of drafts: vLLM's counters, and how many tokens a step gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from kvant.speculative.counts import SpeculationStats


def draft_metrics(model: str, drafts: SpeculationStats) -> Iterable[Metric]:
    """Nothing is shown by an engine that makes no drafts: dashboards take a name as a yes."""
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
