"""The result of a tuning as a policy file for --kv-cache-policy, as plain data, and for other engines."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvant.kv.dtype import Follow, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import ModelGeometry
from kvant.kv.request import AskedWide
from kvant.measure.tuning.search import Option
from kvant.measure.tuning.tune import Tuned, Verified

SCHEMA = 1
_MODELOPT = {(8, 8): "FP8", (8, 4): "FP8_K_NVFP4_V", (4, 4): "NVFP4"}
"""ModelOpt's algorithm for layers with about these bits of K and V."""


def policy_text(tuned: Tuned, geometry: ModelGeometry, model: str, made_by: str) -> str:
    """Returns YAML with one rule per layer, and the costs that decided it as a comment."""
    policy, best = tuned.policy, tuned.best_uniform
    said = (
        f"Made by `{made_by}`: {policy.bits:.2f} bits per value, mean KL divergence "
        f"{policy.figures.kld_mean:.3g} on {policy.figures.positions:,} positions of held-out text"
    )
    if best is not None:
        said += f" ({best.name} in every layer: {best.figures.kld_mean:.3g})"
    rows, length = tuned.rows, tuned.length
    if rows is not None:
        said += f". Bits are those of {length:,} tokens, with wide rows"
    lines = [f"# {line}" for line in textwrap.wrap(said + ".", 110, break_on_hyphens=False)]
    lines += [
        "# After a rule: what each format adds to the KL divergence in that layer and side alone.",
        "model:",
        f"  name: {model}",
        f'  fingerprint: "{geometry.fingerprint}"',
    ]
    if rows is not None:
        lines += [f"recent_tokens: {rows.recent}", f"sink_tokens: {rows.sink}"]
        lines += [f"recent_dtype: {rows.format}"]
    lines += ["rules:"]
    for index in sorted({place[0] for place in tuned.chosen.chosen}):
        k, v = (name_of(tuned, index, side) for side in Side)
        why = "; ".join(f"{s.value.upper()}: {explain(tuned.options[index, s])}" for s in Side)
        lines.append(f'  - {{layers: "{index}", k: {k}, v: {v}}}  # {why}')
    return "\n".join(lines) + "\n"


def name_of(tuned: Tuned, index: int, side: Side) -> str:
    """Returns the chosen format's name, or `model` for the model dtype, which is another for other models."""
    chosen = tuned.chosen.chosen[index, side].dtype
    wide = tuned.plan.compute_dtype.kv_dtype
    return str(Follow.MODEL) if chosen is wide else str(chosen)


def explain(options: Sequence[Option]) -> str:
    """Returns the formats of one place with their costs, narrowest first."""
    return ", ".join(f"{option.dtype} {option.kl:.1e}" for option in options)


def report(tuned: Tuned, geometry: ModelGeometry, model: str) -> dict[str, Any]:
    """Returns schema 1 of `kvant tune --format json`, without facts about the machine.

    `tokens` there is the length of a held-out window, for which bytes are counted.
    """
    best = tuned.best_uniform
    layers = []
    for index in sorted({place[0] for place in tuned.chosen.chosen}):
        entry: dict[str, Any] = {"layer": index, "name": geometry.layers[index].name}
        for side in Side:
            entry[side.value] = {
                "format": name_of(tuned, index, side),
                "kl_alone": {str(o.dtype): o.kl for o in tuned.options[index, side]},
            }
        layers.append(entry)
    return {
        "schema": SCHEMA,
        "model": model,
        "fingerprint": geometry.fingerprint,
        "tokens": tuned.length,
        "wide_rows": _rows(tuned.rows),
        "policy": _entry(tuned.policy),
        "uniform": {one.name: _entry(one) for one in tuned.uniform},
        "best_uniform": None if best is None else best.name,
        "layers": layers,
        "other_engines": other_engines(tuned, geometry),
    }


def _rows(rows: AskedWide | None) -> dict[str, Any] | None:
    if rows is None:
        return None
    return {"recent": rows.recent, "sink": rows.sink, "format": str(rows.format)}


def _entry(one: Verified) -> dict[str, Any]:
    entry = {"bytes_per_token": one.bytes_per_token, "bits": round(one.bits, 4)}
    if one.predicted is not None:
        entry["predicted_kl"] = one.predicted
    return {**entry, **asdict(one.figures)}


def other_engines(tuned: Tuned, geometry: ModelGeometry) -> dict[str, Any]:
    """Returns the nearest settings for vLLM and ModelOpt, which are coarser than the policy.

    vLLM stores one format and skips layers, which keep the model dtype. Here it skips the layers that store
    more bytes than the most frequent pair. ModelOpt names an algorithm per layer.
    """
    sizes: dict[int, int] = {}
    pairs: dict[int, tuple[KVDtype, KVDtype]] = {}
    for index in sorted({place[0] for place in tuned.chosen.chosen}):
        k, v = (tuned.chosen.chosen[index, side] for side in Side)
        sizes[index], pairs[index] = k.bytes + v.bytes, (k.dtype, v.dtype)
    usual = Counter(pairs.values()).most_common(1)[0][0]
    size = next(sizes[index] for index, pair in pairs.items() if pair == usual)
    skipped = [index for index in pairs if sizes[index] > size]
    algos: Mapping[int, str | None] = {
        index: _MODELOPT.get((_about(k), _about(v))) for index, (k, v) in pairs.items()
    }
    return {
        "vllm": {
            "kv_cache_dtype": "/".join(dict.fromkeys(map(str, usual))),
            "kv_cache_dtype_skip_layers": skipped,
        },
        "modelopt": {
            "kv_cache_schema_version": 1,
            "kv_cache_quantized_layers": {
                geometry.layers[index].name: {"quant_algo": algo}
                for index, algo in algos.items()
                if algo is not None
            },
        },
    }


def _about(dtype: KVDtype) -> int:
    """Returns 8 for formats of 5 to 8 bits, 4 for fewer, 16 for more."""
    bits = dtype.format.bits
    return 16 if bits > 8 else 8 if bits > 4 else 4
