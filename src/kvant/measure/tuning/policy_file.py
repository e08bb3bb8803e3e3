"""The result of a tuning as a policy file for --kv-cache-policy, as plain data, and for other engines."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvant.kv.dtype import PAIR_NAMES, Follow, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import ModelGeometry
from kvant.kv.groups import depends_on_length
from kvant.kv.request import AskedWide
from kvant.measure.tuning.costs import Costs
from kvant.measure.tuning.search import Option
from kvant.measure.tuning.tune import Avoided, Tuned, Verified

SCHEMA = 1
_MODELOPT = {(8, 8): "FP8", (8, 4): "FP8_K_NVFP4_V", (4, 4): "NVFP4"}
"""ModelOpt's algorithm for layers with about these bits of K and V."""

Pair = tuple[KVDtype, KVDtype]
"""A format of K and one of V."""

_ALONE = (
    KVDtype.FP8_E4M3, KVDtype.FP8_E5M2, KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.FP8_PER_TOKEN_HEAD,
    KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.NVFP4,
)  # fmt: skip
_VLLM: dict[Pair, str] = {
    **{(dtype, dtype): str(dtype) for dtype in _ALONE},
    **{pair: name for name, pair in PAIR_NAMES.items() if not pair[0].format.takes_rounding},
}
"""Names of narrow formats that vLLM has too; of equally wide ones, the first replaces Kvant's own."""


def policy_text(tuned: Tuned, geometry: ModelGeometry, model: str, made_by: str) -> str:
    """Returns YAML with one rule per layer, and the costs that decided it as a comment."""
    policy, best = tuned.policy, tuned.best_uniform
    said = (
        f"Made by `{made_by}`: {policy.bits:.2f} bits per value, mean KL divergence "
        f"{policy.figures.kld_mean:.3g} on {policy.figures.positions:,} positions of held-out text"
    )
    if best is not None:
        said += f" ({best.name} in every layer: {best.figures.kld_mean:.3g})"
    if depends_on_length(tuned.plan, tuned.length):
        said += f". Bits are those of {tuned.length:,} tokens"
        said += ", with wide rows" if tuned.plan.has_wide_rows else ""
    rows = tuned.rows
    lines = [f"# {line}" for line in textwrap.wrap(said + ".", 110, break_on_hyphens=False)]
    lines += [
        "# After a rule: what each format adds to the KL divergence in that layer and side alone"
        + (", estimated from gradients." if tuned.costs is Costs.GRADIENTS else "."),
        "model:",
        f"  name: {model}",
        f'  fingerprint: "{geometry.fingerprint}"',
    ]
    if rows is not None:
        lines += [f"{key}: {value}" for key, value in _keys(rows).items()]
    lines += ["rules:"]
    for index in sorted(tuned.chosen.chosen):
        k, v = (name_of(tuned, index, side) for side in Side)
        why = "; ".join(f"{s.value.upper()}: {explain(tuned.options[index, s])}" for s in Side)
        own = None if rows is not None else tuned.chosen.chosen[index].rows
        more = "".join(f", {key}: {value}" for key, value in _keys(own).items()) if own else ""
        lines.append(f'  - {{layers: "{index}", k: {k}, v: {v}{more}}}  # {why}')
    return "\n".join(lines) + "\n"


def _keys(rows: AskedWide) -> dict[str, object]:
    """Returns rows as the keys of a policy file."""
    return {
        "recent_tokens": rows.recent, "sink_tokens": rows.sink, "recent_dtype": rows.format,
    }  # fmt: skip


def name_of(tuned: Tuned, index: int, side: Side) -> str:
    """Returns the chosen format's name, or `model` for the model dtype, which is another for other models."""
    chosen = tuned.chosen.chosen[index].sides[side].dtype
    wide = tuned.plan.compute_dtype.kv_dtype
    return str(Follow.MODEL) if chosen is wide else str(chosen)


def explain(options: Sequence[Option]) -> str:
    """Returns the formats of one place with their costs, narrowest first."""
    return ", ".join(f"{option.dtype} {option.kl:.1e}" for option in options)


def report(tuned: Tuned, geometry: ModelGeometry, model: str) -> dict[str, Any]:
    """Returns schema 1 of `kvant tune --format json`, without facts about the machine.

    `tokens` there is the length of a held-out window, for which bytes are counted.
    """
    best, narrow, equal = tuned.best_uniform, tuned.best_without_rows, tuned.as_good
    layers = []
    for index in sorted(tuned.chosen.chosen):
        entry: dict[str, Any] = {"layer": index, "name": geometry.layers[index].name}
        entry["wide_rows"] = _rows(tuned.chosen.chosen[index].rows)
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
        "costs": tuned.costs.value,
        "wide_rows": _rows(tuned.rows),
        "avoided": None if tuned.avoided is None else _avoided(tuned.avoided),
        "policy": _entry(tuned.policy),
        "uniform": {one.name: _entry(one) for one in tuned.uniform},
        "best_uniform": None if best is None else best.name,
        "best_without_wide_rows": None if narrow is None else narrow.name,
        "smallest_as_good": None if equal is None else equal.name,
        "layers": layers,
        "other_engines": other_engines(tuned, geometry),
    }


def _rows(rows: AskedWide | None) -> dict[str, Any] | None:
    if rows is None:
        return None
    return {"recent": rows.recent, "sink": rows.sink, "format": str(rows.format)}


def _avoided(one: Avoided) -> dict[str, Any]:
    return {
        "side": one.side.value, "format": str(one.dtype), "kld_mean": one.kl, "kld_mean_with": one.kl_with,
    }  # fmt: skip


def _entry(one: Verified) -> dict[str, Any]:
    entry = {"bytes_per_token": one.bytes_per_token, "bits": round(one.bits, 4)}
    if one.predicted is not None:
        entry["predicted_kl"] = one.predicted
    return {**entry, **asdict(one.figures)}


def other_engines(tuned: Tuned, geometry: ModelGeometry) -> dict[str, Any]:
    """Returns the nearest settings for vLLM and ModelOpt, which are coarser than the policy.

    vLLM stores one of its own formats, and skipped layers store the model dtype. Here a layer's nearest
    format is the narrowest of vLLM's with no fewer bits in K and in V, and the model dtype if there is none.
    The most frequent one is stored, and layers that need more bits are skipped. So no layer stores fewer bits
    than in the policy. ModelOpt names an algorithm per layer.
    """
    pairs: dict[int, Pair] = {}
    for index in sorted(tuned.chosen.chosen):
        k, v = (tuned.chosen.chosen[index].sides[side] for side in Side)
        pairs[index] = k.dtype, v.dtype
    algos: Mapping[int, str | None] = {
        index: _MODELOPT.get((_about(k), _about(v))) for index, (k, v) in pairs.items()
    }
    return {
        "vllm": vllm_map(pairs),
        "modelopt": {
            "kv_cache_schema_version": 1,
            "kv_cache_quantized_layers": {
                geometry.layers[index].name: {"quant_algo": algo}
                for index, algo in algos.items()
                if algo is not None
            },
        },
    }


def vllm_map(pairs: Mapping[int, Pair]) -> dict[str, Any]:
    """Returns vLLM's settings for the formats of layers, by index; see `other_engines`."""
    nearest = [_nearest_of_vllm(pair) for pair in pairs.values()]
    stored = Counter(pair for pair in nearest if pair is not None).most_common(1)
    if not stored:
        return {"kv_cache_dtype": "auto", "kv_cache_dtype_skip_layers": []}
    usual = stored[0][0]
    skipped = [str(index) for index, pair in pairs.items() if not _holds(usual, pair)]
    return {"kv_cache_dtype": _VLLM[usual], "kv_cache_dtype_skip_layers": skipped}


def _nearest_of_vllm(pair: Pair) -> Pair | None:
    if pair in _VLLM:
        return pair
    fitting = [one for one in _VLLM if _holds(one, pair)]
    return min(fitting, key=lambda one: sum(dtype.format.bits for dtype in one), default=None)


def _holds(one: Pair, other: Pair) -> bool:
    """Returns whether `one` has no fewer bits than `other` in K and in V."""
    return all(a.format.bits >= b.format.bits for a, b in zip(one, other, strict=True))


def _about(dtype: KVDtype) -> int:
    """Returns 8 for formats of 5 to 8 bits, 4 for fewer, 16 for more."""
    bits = dtype.format.bits
    return 16 if bits > 8 else 8 if bits > 4 else 4
