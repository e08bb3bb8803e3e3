"""The results of an evaluation as plain data: schema 1 of `kvant eval --format json`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvant.kv.groups import bits_per_value_at, bytes_per_token_at, depends_on_length
from kvant.kv.spec import KVPlan
from kvant.measure.quality import generation
from kvant.measure.quality.compare import Compared, mean_by_position
from kvant.measure.quality.evaluate import Evaluation, formats_at, unpack
from kvant.measure.quality.kept import Arrays
from kvant.measure.quality.kl_statistics import Distances, join, statistics_of
from kvant.measure.quality.texts import evaluated

SCHEMA = 1


def report(evaluation: Evaluation, parts: Mapping[str, Arrays]) -> dict[str, Any]:
    """Returns everything that was measured. The order of keys is stable.

    A format's figures are those of the longest context; `contexts` has those of each context.
    """
    who, extent, text = evaluation.contenders, evaluation.extent, evaluation.text
    formats: dict[str, dict[str, Any]] = {}
    by_context = {context: _of_context(parts, context) for context in extent.contexts}
    longest = by_context[extent.contexts[-1]]
    answers = parts.get("answers")
    sides = {} if "sides" not in parts else unpack(parts["sides"])
    for name, plan in who.formats.items():
        head = _statistics(longest[name], extent.contexts[-1])
        entry: dict[str, Any] = {
            **head,
            **_bytes(plan, extent.contexts[-1]),
            "backends": sorted({s.backend for s in plan.layers if s.backend is not None}),
            "contexts": {
                str(context): {
                    **_statistics(found[name], context),
                    **(_bytes(plan, context) if depends_on_length(plan) else {}),
                    "by_position": mean_by_position(found[name], context),
                }
                for context, found in by_context.items()
            },
            "decode": _decode(longest[name]),
        }
        if f"k {name}" in sides:
            entry["k_alone"] = _mean_kl(sides[f"k {name}"])
            entry["v_alone"] = _mean_kl(sides[f"v {name}"])
        if answers is not None:
            same = generation.agreement(answers[""].tolist(), answers[name].tolist())
            entry["generation"] = asdict(same)
        if "acceptance" in parts:
            entry["acceptance_length"] = float(parts["acceptance"][name])
        if extent.needle_contexts:
            entry["needles"] = _needles(parts, name, extent.needle_contexts)
        formats[name] = entry
    noise = join([one.decode for one in longest[""]])
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "model": evaluation.llm.planned.target.local.name,
        "baseline": ", ".join(who.baseline.formats),
        "baseline_bytes_per_token": round(bytes_per_token_at(who.baseline, extent.contexts[-1])),
        "compute_dtype": who.baseline.compute_dtype.value,
        "text": {"name": text.name, "sha256": text.sha256, "tokens": len(text.token_ids)},
        "contexts": list(extent.contexts),
        **described_rows(who.formats.values()),
        "noise_floor": _brief(noise),
        "baseline_decode": _speed(longest[""]),
        "formats": formats,
        "pareto": pareto(formats),
        "refused": dict(who.refused),
    }
    if "acceptance" in parts:
        found["baseline_acceptance_length"] = float(parts["acceptance"][""])
    if extent.needle_contexts:
        found["baseline_needles"] = _needles(parts, "", extent.needle_contexts)
    if "layers" in parts:
        alone = unpack(parts["layers"])
        found["layers"] = {
            "format": who.layered,
            "index": list(who.layers),
            "kld_mean": [_mean_kl(alone[str(i)]) for i in who.layers],
        }
    return found


def described_rows(plans: Iterable[KVPlan]) -> dict[str, Any]:
    """Returns the key `wide_rows`, about tokens that are stored wide too; nothing if there are none."""
    layers = [layer for plan in plans for layer in plan.layers]
    rows = next((layer.wide for layer in layers if layer.wide is not None), None)
    if rows is None:
        return {}
    formats = {side.value: str(choice.dtype) for side, choice in rows.sides.items()}
    return {"wide_rows": {"sink": rows.sink, "recent": rows.recent, **formats}}


def pareto(formats: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns formats for which no other has at most the bytes and at most the mean KL, sorted by bytes.

    Bytes are those of a token and, with recurrent states, of a sequence: neither may be more.
    """
    sizes = {
        name: (one["bytes_per_token"], one.get("bytes_per_sequence", 0), one["kld_mean"])
        for name, one in formats.items()
    }
    found: list[str] = []
    for name in sorted(sizes, key=sizes.__getitem__):
        if not any(all(a <= b for a, b in zip(sizes[n], sizes[name], strict=True)) for n in found):
            found.append(name)
    return found


def _bytes(plan: KVPlan, context: int) -> dict[str, Any]:
    """Returns the size of a sequence of `context` tokens, including wide rows."""
    return {
        "bytes_per_token": round(bytes_per_token_at(plan, context)),
        "bits_per_value": round(bits_per_value_at(plan, context), 4),
        **({"bytes_per_sequence": plan.bytes_per_sequence} if plan.has_states else {}),
    }


def _of_context(parts: Mapping[str, Arrays], context: int) -> dict[str, list[Compared]]:
    """Returns every format's batches. The noise floor is that of each batch's first group of formats."""
    found: dict[str, list[Compared]] = {}
    for part, arrays in parts.items():
        if part.startswith(formats_at(context)):
            for name, one in unpack(arrays).items():
                if name or part.endswith("-0"):
                    found.setdefault(name, []).append(one)
    return found


def _statistics(batches: Sequence[Compared], context: int) -> dict[str, Any]:
    """Computes statistics over the evaluated positions, as llama.cpp does."""
    first = evaluated(context)[0]
    chosen = [_where(one.prefill, one.positions >= first) for one in batches]
    return asdict(statistics_of(join(chosen)))


def _where(found: Distances, chosen: Any) -> Distances:
    return Distances(
        found.kl[chosen], found.nll[chosen], found.baseline_nll[chosen], found.same_top[chosen]
    )


def _decode(batches: Sequence[Compared]) -> dict[str, Any]:
    """Compares the decode path with the prefill path at the same positions."""
    decode = join([one.decode for one in batches])
    first = min(one.positions.max() for one in batches) + 1 - len(batches[0].step_ms)
    prefill = join([_where(one.prefill, one.positions >= first) for one in batches])
    return {
        **_brief(decode),
        "prefill_kld_mean": float(prefill.kl.mean()),
        **_speed(batches),
    }


def _brief(found: Distances) -> dict[str, Any]:
    whole = statistics_of(found)
    return {
        "positions": whole.positions,
        "kld_mean": whole.kld_mean,
        "kld_max": whole.kld_max,
        "same_top": whole.same_top,
    }


def _speed(batches: Sequence[Compared]) -> dict[str, Any]:
    """Returns speed at the median of all decode steps, for the model without sampling."""
    sequences = len(batches[0].decode) // len(batches[0].step_ms)
    same = [one for one in batches if len(one.decode) == len(batches[0].decode)]
    steps = [ms for one in same for ms in one.step_ms.tolist()]
    return {
        "sequences": sequences,
        "tokens_per_second": round(1000 * sequences / statistics.median(steps), 2),
    }


def _mean_kl(found: Compared) -> float:
    return float(found.prefill.kl.mean())


def _needles(parts: Mapping[str, Arrays], name: str, contexts: Sequence[int]) -> dict[str, Any]:
    return {
        str(length): {
            "found": int(parts[f"needles-{length}"][name]),
            "of": len(generation.DEPTHS),
        }
        for length in contexts
    }
