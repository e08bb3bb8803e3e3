"""One evaluation: the parts to measure, and their order.

Parts are independent, and finished parts are kept on disk (`kept.py`). Each compares formats over a batch of
windows (`compare.py`) or generates text (`generation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvant.engine.llm import LLM
from kvant.errors import BadValue, ConfigError, WayOut
from kvant.kv.geometry import Attention
from kvant.kv.names import FormatRequest, Request
from kvant.kv.request import Asked, AskedWide, KVRequest, parse_rule
from kvant.kv.spec import KVPlan
from kvant.measure.own_engine import plan_storing, recorder_like, runner_of
from kvant.measure.quality import generation
from kvant.measure.quality.compare import (
    Compared,
    OnProgress,
    Outside,
    compare_windows,
    contender_tokens,
    kept_together,
    windows_at_once,
)
from kvant.measure.quality.kept import Arrays, Kept, measured_by
from kvant.measure.quality.kl_statistics import Distances
from kvant.measure.quality.texts import Text, windows
from kvant.models.loaded import LoadedModel
from kvant.plan.resolution import resolve_again

_DECODE_COST = 3  # a generated token takes about as long as this many tokens of a prompt


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.

    contexts: lengths of windows, increasing. tokens: of text for each context, one window at least. decode:
    positions of each window that are read again one token at a time. side_tokens, layer_tokens: length of the
    window for K and V apart and for each layer alone; 0 for neither. answers, answer_tokens: greedy answers
    that are compared, 0 for none. needle_contexts: lengths of prompts with a hidden number.
    """

    contexts: tuple[int, ...]
    tokens: int
    decode: int
    side_tokens: int
    layer_tokens: int
    answers: int
    answer_tokens: int
    needle_contexts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a measurement. tokens: approximate number of tokens it reads. run: measures it."""

    name: str
    tokens: int
    run: Callable[[OnProgress], Arrays]


@dataclass(frozen=True, slots=True)
class Contenders:
    """The plans to compare, by format name, without formats that need as many bytes as the baseline.

    refused: reasons why formats cannot be measured here, by name. layered: the format that each plan of
    `layers` stores in the layer of its index only, "" without layers. k_only, v_only: the other side is
    stored as in the baseline; none for formats of states, and none for models that keep latents.
    """

    baseline: KVPlan
    formats: Mapping[str, KVPlan]
    k_only: Mapping[str, KVPlan]
    v_only: Mapping[str, KVPlan]
    layered: str
    layers: Mapping[int, KVPlan]
    refused: Mapping[str, str]


def choose_contenders(
    llm: LLM,
    baseline: FormatRequest,
    formats: Sequence[FormatRequest],
    layered: FormatRequest | None,
    *,
    named: bool,
    rows: AskedWide | None = None,
    states: Sequence[Request] = (),
) -> Contenders:
    """Plans all formats. named: the user named them, so a refusal is an error (ConfigError).

    layered: None for the format with the fewest bytes. rows: wide rows beside each format. states: formats of
    recurrent states, each beside the baseline and beside every format. Raises BadValue if no format is left,
    and if the model has no recurrent states.
    """
    wide = plan_storing(llm, baseline)
    has_sides = not any(spec.geometry.attention is Attention.MLA for spec in wide.layers)
    plans: dict[str, KVPlan] = {}
    k_only: dict[str, KVPlan] = {}
    v_only: dict[str, KVPlan] = {}
    refused: dict[str, str] = {}
    by_name = {str(one): one for one in formats}
    for name, one in by_name.items():
        try:
            plan = plan_storing(llm, one, wide=rows)
            if plan.bytes_per_token >= wide.bytes_per_token and not named:
                continue
            if has_sides:
                k_plan = plan_storing(llm, FormatRequest(one.k, baseline.v), wide=rows)
                v_plan = plan_storing(llm, FormatRequest(baseline.k, one.v), wide=rows)
                k_only[name], v_only[name] = k_plan, v_plan
        except ConfigError as fault:
            if named:
                raise
            refused[name] = fault.why or fault.what
            continue
        plans[name] = plan
    narrow = dict(plans)
    for state in states:
        for name, one in {"": baseline, **{n: by_name[n] for n in narrow}}.items():
            label = ", ".join(filter(None, (name, f"state {state}")))
            plans[label] = plan_storing(llm, one, wide=rows if name else None, state=state)
    if not plans:
        raise BadValue(
            f"no format needs fewer bytes than the baseline, {baseline}",
            why="; ".join(f"{name}: {why}" for name, why in refused.items())
            or "a baseline is the widest format, such as the model's own dtype",
            ways_out=(WayOut("compare with the model's own dtype", ("--baseline", "model")),),
        )
    if layered is None and not narrow:
        return Contenders(wide, plans, k_only, v_only, "", {}, refused)
    least = min(narrow, key=lambda name: narrow[name].bytes_per_token, default="")
    chosen = least if layered is None else str(layered)
    layers = dict(_layers(llm, baseline, chosen, rows))
    return Contenders(wide, plans, k_only, v_only, chosen, layers, refused)


def _layers(
    llm: LLM, baseline: FormatRequest, name: str, rows: AskedWide | None
) -> Iterator[tuple[int, KVPlan]]:
    """Yields plans in which only one layer stores the format, for each layer with KV in turn."""
    asked = Asked(baseline, f"--baseline {baseline}")
    for layer in llm.plan.layers:
        if not layer.geometry.has_kv:
            continue
        rule = parse_rule(f"{layer.geometry.index}:{name}", asked_by="kvant eval")
        request = KVRequest(explicit=(asked,), format_defaults=False, wide=rows).merged(rule.target)
        yield layer.geometry.index, resolve_again(llm.planned, request)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The whole evaluation. drafter: `--speculative-config`, to measure how many of its drafts are
    accepted; None without. baseline_name: the format's name, as a user gives it.
    """

    llm: LLM
    contenders: Contenders
    text: Text
    extent: Extent
    drafter: str | None = None
    baseline_name: str = "model"

    @property
    def model(self) -> LoadedModel:
        return runner_of(self.llm).model

    def inputs(self) -> dict[str, object]:
        """Returns everything on which the figures depend, except the machine's speed."""
        from dataclasses import asdict

        who = self.contenders
        plans = {name: plan.fingerprint for name, plan in who.formats.items()}
        return {
            **measured_by(self.llm),
            "baseline": who.baseline.fingerprint,
            "plans": plans,
            "backends": {n: [s.backend for s in p.layers] for n, p in who.formats.items()},
            "layered": who.layered,
            "text": self.text.sha256,
            "extent": asdict(self.extent),
            "drafter": self.drafter,
        }

    def parts(self) -> list[Part]:
        """Returns all parts; parts that may be refused come first, then the most informative ones."""
        who, extent = self.contenders, self.extent
        plans = {"": who.baseline, **who.formats}
        found = []
        if self.drafter is not None and extent.answers:
            tokens = extent.answers * extent.answer_tokens * len(plans)
            found.append(Part("acceptance", tokens, partial(self._acceptance, plans)))
        for context in extent.contexts:
            texts = windows(self.text, self.llm, context, extent.tokens)
            decode = min(extent.decode, context // 4)
            most = windows_at_once(
                who.baseline, who.formats.values(), context, vocab_size=self.llm.engine.vocab_size,
                device=self.model.device,
            )  # fmt: skip
            for name, batch in batches(formats_at(context), texts, most):
                groups = kept_together(who.baseline, who.formats, batch, self.model.device)
                for number, group in enumerate(groups):
                    found.append(self._comparison(f"{name}-{number}", group, batch, decode))
        if extent.side_tokens and who.k_only:
            batch = windows(self.text, self.llm, extent.side_tokens, 0)[:1]
            sides = {f"k {name}": plan for name, plan in who.k_only.items()}
            sides |= {f"v {name}": plan for name, plan in who.v_only.items()}
            found.append(self._comparison("sides", sides, batch, 0))
        if extent.layer_tokens and who.layers:
            batch = windows(self.text, self.llm, extent.layer_tokens, 0)[:1]
            layers = {str(i): plan for i, plan in who.layers.items()}
            found.append(self._comparison("layers", layers, batch, 0))
        if extent.answers:
            each = generation.PROMPT_TOKENS + _DECODE_COST * extent.answer_tokens
            tokens = extent.answers * each * len(plans)
            found.append(Part("answers", tokens, partial(self._answers, plans)))
        for length in extent.needle_contexts:
            tokens = len(generation.DEPTHS) * length * len(plans)
            found.append(Part(f"needles-{length}", tokens, partial(self._needles, plans, length)))
        return found

    def _comparison(
        self, name: str, plans: Mapping[str, KVPlan], batch: Tensor, decode: int
    ) -> Part:
        return comparison(self.llm, self.contenders.baseline, name, plans, batch, decode=decode)

    def _answers(self, plans: Mapping[str, KVPlan], on_progress: OnProgress) -> Arrays:
        extent = self.extent
        prompts = generation.prompts_of(self.text.token_ids, extent.answers)
        found = {}
        for name, plan in plans.items():
            answers = generation.answers_of(self.llm, plan, prompts, extent.answer_tokens)
            found[name] = np.array(answers)
            on_progress(
                len(prompts) * (generation.PROMPT_TOKENS + _DECODE_COST * extent.answer_tokens)
            )
        return found

    def _acceptance(self, plans: Mapping[str, KVPlan], on_progress: OnProgress) -> Arrays:
        extent = self.extent
        prompts = generation.prompts_of(self.text.token_ids, extent.answers)
        assert self.drafter is not None
        found = {}
        for name in plans:
            length = generation.acceptance_length(
                self.llm, name or self.baseline_name, self.drafter, prompts, extent.answer_tokens
            )
            found[name] = np.array(length)
            on_progress(len(prompts) * extent.answer_tokens)
        return found

    def _needles(self, plans: Mapping[str, KVPlan], length: int, on_progress: OnProgress) -> Arrays:
        wanted = generation.needles(self.llm, self.text.token_ids, length)
        found = {}
        for name, plan in plans.items():
            found[name] = np.array(generation.found_needles(self.llm, plan, wanted))
            on_progress(len(wanted) * length)
        return found


def formats_at(context: int) -> str:
    """Returns what names of parts begin with that compare all formats over windows of this length."""
    return f"formats-{context}-"


def batches(name: str, windows: Tensor, most: int) -> Iterator[tuple[str, Tensor]]:
    """Yields at most `most` of windows [n, context] at a time, and a name that says which they are.

    So parts that another division left on disk are not taken for those of this one.
    """
    first = 0
    for batch in torch.split(windows, most):
        yield f"{name}{first}+{len(batch)}", batch
        first += len(batch)


def comparison(
    llm: LLM,
    baseline: KVPlan,
    name: str,
    plans: Mapping[str, KVPlan],
    batch: Tensor,
    *,
    decode: int = 0,
    scales: Mapping[str, Outside] | None = None,
) -> Part:
    """Returns the part that compares plans with `baseline` over batch [windows, context] int64.

    Arguments: as in `compare_windows`.
    """

    def run(on_progress: OnProgress) -> Arrays:
        found = compare_windows(
            runner_of(llm).model,
            baseline,
            plans,
            batch,
            vocab_size=llm.engine.vocab_size,
            decode=decode,
            on_progress=on_progress,
            scales=scales,
            recorder=recorder_like(runner_of(llm)),
        )
        return pack(found)

    return Part(name, contender_tokens(baseline, plans, batch, decode), run)


def run_parts(
    parts: Sequence[Part], kept: Kept, on_progress: Callable[[int, int], None]
) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Measures all parts that are not kept yet, and returns all by name.

    on_progress: called with the number of tokens done, and of all that this call reads.
    """
    found = {part.name: kept.read(part.name) for part in parts}
    total = sum(part.tokens for part in parts if found[part.name] is None)
    done = 0
    results: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for part in parts:
        arrays = found[part.name]
        if arrays is None:
            begin = done

            def more(tokens: int) -> None:
                nonlocal done
                done += tokens
                on_progress(done, total)

            arrays = dict(part.run(more))
            kept.write(part.name, arrays)
            done = begin + part.tokens
            on_progress(done, total)
        results[part.name] = arrays
    return results


_FIELDS = ("kl", "nll", "baseline_nll", "same_top")


def pack(found: Mapping[str, Compared]) -> dict[str, npt.NDArray[Any]]:
    """Returns results as arrays for `Kept`."""
    arrays: dict[str, npt.NDArray[Any]] = {"names": np.array(list(found))}
    for index, one in enumerate(found.values()):
        for path, distances in (("prefill", one.prefill), ("decode", one.decode)):
            for field in _FIELDS:
                arrays[f"{index}.{path}.{field}"] = getattr(distances, field)
        arrays[f"{index}.positions"] = one.positions
        arrays[f"{index}.step_ms"] = one.step_ms
    return arrays


def unpack(arrays: Arrays) -> dict[str, Compared]:
    found = {}
    for index, name in enumerate(arrays["names"].tolist()):
        prefill, decode = (
            Distances(*(arrays[f"{index}.{path}.{field}"] for field in _FIELDS))
            for path in ("prefill", "decode")
        )
        where, step_ms = arrays[f"{index}.positions"], arrays[f"{index}.step_ms"]
        found[name] = Compared(prefill, where, decode, step_ms)
    return found
