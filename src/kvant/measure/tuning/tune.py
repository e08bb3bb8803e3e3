"""One tuning: measure the cost of each format in each place, search, and verify on held-out text.

    1  each format on all layers' keys, or all layers' values; formats that are worse in bytes and KL drop out
    2  each remaining format on one layer and side only: a reading for each, or an estimate (`gradients.py`)
    3  the search (`search.py`), over the figures of 2, scaled so that their sums equal those of 1. Under a
       byte budget, policies that avoid one of its formats are searched for too; all are read on the text of
       1, and one of them is taken if it clearly loses less
    4  the found policy and the best uniform formats, on text that no earlier step has read

Each layer that can store wide rows (`kvant.kv.wide`) gets one of several choices of them, for both sides or
for one, because costs of sides are measured apart. Steps 1 and 2 are done for the least and the largest
number of rows; costs of other numbers lie on a line between them. Estimates of 2 are made for all numbers,
and the factors that scale them lie on that line. What wide rows bring depends on the length
of a sequence. So step 1 reads a window as long as the sequence whose bytes count.

Finished parts are kept on disk (`kvant.measure.quality.kept`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
from torch import Tensor

from kvant.engine.llm import LLM
from kvant.errors import BadValue, ConfigError, WayOut
from kvant.kv.dtype import Follow, KVDtype
from kvant.kv.format import Side
from kvant.kv.groups import bits_per_value_at, bytes_per_token_at, kept_tokens, wide_bytes_at
from kvant.kv.names import FormatRequest, SideRequests, whole_formats
from kvant.kv.request import Asked, AskedWide, KVRequest, WideRule, parse_selectors, rules_for
from kvant.kv.spec import KVPlan
from kvant.measure.own_engine import plan_storing, runner_of
from kvant.measure.quality.compare import Compared, kept_together, windows_at_once
from kvant.measure.quality.evaluate import Part, batches, comparison, run_parts, unpack
from kvant.measure.quality.kept import Kept
from kvant.measure.quality.kl_statistics import Statistics, join, statistics_of
from kvant.measure.quality.texts import Text, windows
from kvant.measure.tuning.checks import check_tunable, layers_with_rows
from kvant.measure.tuning.costs import Costs
from kvant.measure.tuning.gradients import SAMPLES, Estimator, stored_at
from kvant.measure.tuning.search import (
    Assignment,
    LayerOption,
    Option,
    Place,
    best_within,
    best_without_one,
    fewest_bytes,
    least_kl,
    not_beaten,
    smallest_under,
)
from kvant.plan.resolution import resolve_again

ROUNDS = 4
"""Verifications for --max-kl after which budgets shrink by a fixed factor, down to the policy of least KL."""
CLEARLY = 2.0
"""Standard errors of a paired difference from which one policy loses less than another."""
AT_ONCE = 8  # plans that read side by side; their results are kept as one part
Rows = AskedWide | None
"""Rows that a layer stores wide too; None for none."""
Layers = Mapping[Place, KVDtype]
Policy = Assignment[int, LayerOption]
Key = TypeVar("Key", tuple[Side, KVDtype, Rows], tuple[int, Side, KVDtype, Rows])
"""What a plan stores in a narrow format: one side of every layer, or one side of one layer."""


Costed = Mapping[tuple[Side, KVDtype, Rows], float]
"""A figure of each format on one side of every layer."""
CostedAlone = Mapping[tuple[int, Side, KVDtype, Rows], float]
"""The cost of each format on one side of one layer."""
Front = Mapping[tuple[Side, Rows], Sequence[KVDtype]]
"""The formats that did not drop out."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Windows [n, context] int64. measured: for step 2; whole: for step 1; held_out: for step 4.

    whole: as long as those of held_out; `measured` if these are no longer.
    """

    measured: Tensor
    whole: Tensor
    held_out: Tensor


def divide_text(
    text: Text,
    llm: LLM,
    context: int,
    measured: int,
    held_out: int,
    verify_context: int | None = None,
) -> Lesson:
    """Divides a text into measured and held-out windows.

    Raises BadValue, with the tokens needed, if it is short. context: tokens of a measured window.
    verify_context: of a held-out one, None for the same.
    """
    last = verify_context or context
    seen = -(-measured // context) * context
    first = max(seen, last)
    rest = -(-held_out // last) * last
    if len(text.token_ids) < first + rest:
        sizes = context if last == context else f"{context} and {last}"
        raise BadValue(
            f"the text {text.name} is too short to tune on",
            why=f"it has {len(text.token_ids)} tokens; {first + rest} are needed: {first} to "
            f"measure and {rest} to verify, in windows of {sizes}",
            ways_out=(WayOut("give a longer text", ("--text", "FILE")),),
        )
    short = windows(text, llm, context, seen)[: seen // context]
    return Lesson(
        short,
        windows(text, llm, last, last)[:1] if last > context else short,
        windows(text, llm, last, rest, begin=first)[: rest // last],
    )


@dataclass(frozen=True, slots=True)
class Verified:
    """A policy or a uniform format on held-out text. predicted: KL from the search, None for uniform formats.

    bytes_per_token: of a sequence as long as a held-out window, on which the bytes of wide rows depend. rows:
    what a uniform format stores wide too.
    """

    name: str
    bytes_per_token: int
    bits: float
    figures: Statistics
    predicted: float | None = None
    rows: Rows = None


@dataclass(frozen=True, slots=True)
class Avoided:
    """A format that the policy avoids, because it then loses less on the text of step 1.

    kl: mean KL there. kl_with: that of the policy that the search found best.
    """

    side: Side
    dtype: KVDtype
    kl: float
    kl_with: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result.

    options: of every place, with costs beside the wide rows of its layer. chosen: the policy by layer.
    policy, uniform: figures on held-out text. length: tokens of the sequence whose bytes count. costs: where
    those of single layers come from. avoided: a format that was dropped after the search.
    """

    options: Mapping[Place, Sequence[Option]]
    chosen: Policy
    plan: KVPlan
    policy: Verified
    uniform: tuple[Verified, ...]
    length: int
    costs: Costs = Costs.MEASURED
    avoided: Avoided | None = None

    @property
    def rows(self) -> Rows:
        """Rows that all layers store wide too; None if there are none, or others in other layers."""
        found = {option.rows for option in self.chosen.chosen.values()}
        return found.pop() if len(found) == 1 else None

    @property
    def best_uniform(self) -> Verified | None:
        """The uniform format of least KL with no more bytes than the policy; None if there is none."""
        return self._best(self.uniform)

    @property
    def best_without_rows(self) -> Verified | None:
        """The same among those without wide rows."""
        return self._best([one for one in self.uniform if one.rows is None])

    @property
    def as_good(self) -> Verified | None:
        """The smallest uniform format with no more KL than the policy; None if there is none."""
        most = self.policy.figures.kld_mean
        found = [one for one in self.uniform if one.figures.kld_mean <= most]
        return min(found, key=lambda one: one.bytes_per_token) if found else None

    def _best(self, some: Sequence[Verified]) -> Verified | None:
        within = [u for u in some if u.bytes_per_token <= self.policy.bytes_per_token]
        return min(within, key=lambda u: u.figures.kld_mean) if within else None


@dataclass
class Tuner:
    """Runs one tuning. llm: the model; its plan stores the model dtype.

    formats: candidates of each side; empty for all. beside: uniform formats to verify; empty for all. rows:
    what a layer may store wide too; if None is one of them, also each side alone. costs: where those of
    single layers come from. Raises NotServable for a model that cannot be tuned.
    """

    llm: LLM
    lesson: Lesson
    formats: Sequence[tuple[Side, KVDtype]]
    kept: Kept
    on_progress: Callable[[int, int], None]
    beside: Sequence[FormatRequest] = ()
    rows: Sequence[Rows] = (None,)
    costs: Costs = Costs.MEASURED

    def __post_init__(self) -> None:
        check_tunable(self.llm.planned, self.costs)

    @cached_property
    def wide(self) -> KVPlan:
        return plan_storing(self.llm, FormatRequest(Follow.MODEL, Follow.MODEL))

    @property
    def length(self) -> int:
        """Tokens of the sequence whose bytes count."""
        return self.lesson.held_out.shape[1]

    @cached_property
    def _able(self) -> frozenset[int]:
        return layers_with_rows(self.llm.planned.target.geometry)

    @cached_property
    def _measured_rows(self) -> list[Rows]:
        """Those of `rows` that steps 1 and 2 read: of each format, the least and the largest number."""
        ends = [(some[0], some[-1]) for some in self._alike().values()]
        return [one for one in self.rows if one is None or any(one in pair for pair in ends)]

    def _alike(self) -> dict[tuple[int, SideRequests], list[AskedWide]]:
        """Returns the choices that differ in the number of last rows only, by that number."""
        found: dict[tuple[int, SideRequests], list[AskedWide]] = {}
        for rows in self.rows:
            if rows is not None:
                found.setdefault((rows.sink, rows.format), []).append(rows)
        return {key: sorted(some, key=lambda one: one.recent) for key, some in found.items()}

    def stored_bytes(self, plan: KVPlan) -> int:
        """Returns bytes per token of a sequence of `length` tokens, including wide rows."""
        return round(bytes_per_token_at(plan, self.length))

    def _bits(self, num_bytes: float) -> float:
        """Returns bits per value of a sequence of `length` tokens that takes `num_bytes` a token."""
        whole = bytes_per_token_at(self.wide, self.length) * self.length
        return bits_per_value_at(self.wide, self.length) * num_bytes / whole

    def places(self) -> list[Place]:
        """Returns every stored side."""
        return [
            (spec.geometry.index, side)
            for spec in self.wide.layers
            if spec.k is not None
            for side in Side
        ]

    def for_bits(self, bits: float) -> Tuned:
        """Returns the policy of least KL with at most `bits` bits per value, including scales.

        Raises BadValue before it measures, with the fewest possible bits, if none is that small.
        """
        least = fewest_bytes(self._layers(self._free_of_cost())).bytes
        # A suggested number of bits may come out just below whole bytes.
        budget = int(bits / self._bits(1) + 1e-6 * self.length)
        if budget < least:
            fewest = self._bits(least)
            raise BadValue(
                f"--budget {bits:g}bits cannot be met",
                why=f"the narrowest policy has {fewest:.2f} bits per value",
                ways_out=(WayOut("take the narrowest", ("--budget", f"{_up(fewest)}bits")),),
            )
        options = self.options()
        found = best_within(self._layers(options), budget)
        assert found is not None, "the narrowest formats are among the options"
        others = best_without_one(self._all_ways(options), found, budget)
        found, avoided = self._least_read(found, others)
        tuned = replace(self._verified(options, found), avoided=avoided)
        return self.beside_uniform(tuned)

    def for_kl(self, most: float) -> Tuned:
        """Returns the policy of fewest bytes whose measured mean KL is at most `most`, on held-out text.

        Raises BadValue, with the closest policy found, if none is that good.
        """
        options, aim = self.options(), most
        layers = self._layers(options)
        closest: Tuned | None = None
        for number in itertools.count(1):
            found = smallest_under(layers, aim) or least_kl(layers)
            tuned = self._verified(options, found)
            measured = tuned.policy.figures.kld_mean
            if closest is None or measured < closest.policy.figures.kld_mean:
                closest = tuned
            if measured <= most:
                return self.beside_uniform(tuned)
            if found.bytes >= least_kl(layers).bytes:
                break
            aim = found.kl * (most / measured * 0.95 if number < ROUNDS else 0.25)
        assert closest is not None
        measured = closest.policy.figures.kld_mean
        raise BadValue(
            f"--max-kl {most:g} cannot be met",
            why=f"the closest policy has a mean KL divergence of {measured:.3g} on held-out text, with "
            f"{closest.policy.bits:.2f} bits per value",
            ways_out=(WayOut("take the closest", ("--max-kl", f"{_up(measured, 6)}")),),
        )

    # -- measuring -----------------------------------------------------------------------------

    def options(self) -> dict[Rows, dict[Place, list[Option]]]:
        """Returns the candidates of every place, with costs, for each choice of wide rows.

        Formats that another beats everywhere are left out. Costs of numbers of rows that were not measured
        are those of `between`.
        """
        uniform = self._means("uniform", self._narrow_plans, self.lesson.whole)
        kept = {
            (side, rows): self._front(
                side, {d: kl for (s, d, r), kl in uniform.items() if s is side and r == rows}
            )
            for side in Side
            for rows in self._measured_rows
        }
        if self.costs is Costs.GRADIENTS:
            return self._estimated(uniform, kept)
        alone = self._means("alone", self._plans_of_one_layer(kept), self.lesson.measured)
        scales = self._scales(uniform, alone, kept)
        options = {rows: self._scaled(rows, alone, scales) for rows in self._measured_rows}
        for rows, (less, more, share) in self._between().items():
            options[rows] = {
                place: between(options[less][place], options[more][place], share)
                for place in self.places()
            }
        return {
            rows: {place: not_beaten(found) for place, found in options[rows].items()}
            for rows in self.rows
        }

    def _estimated(self, uniform: Costed, kept: Front) -> dict[Rows, dict[Place, list[Option]]]:
        """Returns the same as `options`, with costs of single layers from gradients."""
        between_ends = self._between()
        front = dict(kept)
        for rows, (less, more, _) in between_ends.items():
            for side in Side:
                both = [one for one in kept[side, less] if one in kept[side, more]]
                front[side, rows] = both
        alone = self._estimates(self._plans_of_one_layer(front))
        scales = self._scales(uniform, alone, kept)
        for rows, (less, more, share) in between_ends.items():
            for side in Side:
                for dtype in front[side, rows]:
                    ends = scales[side, dtype, less], scales[side, dtype, more]
                    scales[side, dtype, rows] = ends[0] ** (1 - share) * ends[1] ** share
        return {
            rows: {
                place: not_beaten(found)
                for place, found in self._scaled(rows, alone, scales).items()
            }
            for rows in self.rows
        }

    def _between(self) -> dict[Rows, tuple[Rows, Rows, float]]:
        """Returns the numbers of rows that step 1 does not read: both ends, and the share of the way."""
        found: dict[Rows, tuple[Rows, Rows, float]] = {}
        for alike in self._alike().values():
            less, more = alike[0], alike[-1]
            for rows in alike[1:-1]:
                share = math.log(rows.recent / less.recent, more.recent / less.recent)
                found[rows] = less, more, share
        return found

    def _scales(
        self, uniform: Costed, alone: CostedAlone, kept: Front
    ) -> dict[tuple[Side, KVDtype, Rows], float]:
        """Returns the factors with which costs of single layers add up to those of all layers."""
        found: dict[tuple[Side, KVDtype, Rows], float] = {}
        for (side, rows), dtypes in kept.items():
            for dtype in dtypes:
                total = sum(alone[i, s, dtype, rows] for i, s in self.places() if s is side)
                found[side, dtype, rows] = uniform[side, dtype, rows] / total if total > 0 else 1.0
        return found

    def _scaled(self, rows: Rows, alone: CostedAlone, scales: Costed) -> dict[Place, list[Option]]:
        """Returns the options of every place with these wide rows, the model dtype among them."""
        return {
            (index, side): [
                self._model_dtype(index, side),
                *(
                    Option(d, self._bytes(index, side, d), alone[index, side, d, rows] * scale)
                    for (s, d, r), scale in scales.items()
                    if s is side and r == rows
                ),
            ]
            for index, side in self.places()
        }

    def _estimates(self, plans: Mapping[tuple[int, Side, KVDtype, Rows], KVPlan]) -> CostedAlone:
        """Returns estimated costs of plans that store one format in one place."""
        asked = {key: stored_at(key[:2], plan) for key, plan in plans.items()}
        distinct = list(dict.fromkeys(asked.values()))
        estimator = Estimator(
            self.llm,
            self.wide,
            lambda side, dtype: self.plan_of(
                {place: dtype for place in self.places() if place[1] is side}, {}
            ),
        )
        digest = hashlib.sha256(str(distinct).encode()).hexdigest()[:12]
        parts = [
            Part(
                f"gradients-{digest}-{number}",
                SAMPLES * len(ids),
                partial(estimator.costs, distinct, ids, number),
            )
            for number, ids in enumerate(self.lesson.measured)
        ]
        found = [
            arrays["costs"] for arrays in run_parts(parts, self.kept, self.on_progress).values()
        ]
        costs = dict(zip(distinct, np.mean(found, axis=0).tolist(), strict=True))
        return {key: costs[one] for key, one in asked.items()}

    def _model_dtype(self, index: int, side: Side) -> Option:
        spec = self.wide.layers[index]
        choice = spec.k if side is Side.K else spec.v
        assert choice is not None
        return Option(choice.dtype, self._bytes(index, side, choice.dtype), 0.0)

    def _free_of_cost(self) -> dict[Rows, dict[Place, list[Option]]]:
        """Returns all candidates without measuring any."""
        return {
            rows: {
                (index, side): [
                    self._model_dtype(index, side),
                    *(
                        Option(d, self._bytes(index, side, d), 0.0)
                        for s, d, r in self._narrow_plans
                        if s is side and r == rows
                    ),
                ]
                for index, side in self.places()
            }
            for rows in self.rows
        }

    def _layers(
        self, options: Mapping[Rows, Mapping[Place, Sequence[Option]]]
    ) -> dict[int, list[LayerOption]]:
        """Returns the ways to store each layer, without ways that another one beats."""
        return {index: not_beaten(ways) for index, ways in self._all_ways(options).items()}

    def _all_ways(
        self, options: Mapping[Rows, Mapping[Place, Sequence[Option]]]
    ) -> dict[int, list[LayerOption]]:
        """Returns the ways to store each layer."""
        found: dict[int, list[LayerOption]] = {index: [] for index, _ in self.places()}
        for rows in self._ways(options):
            for index in found:
                if index not in self._able and found[index]:
                    continue  # it stores none with any choice
                costs = {side: options[self._measured_as(rows, index, side)] for side in Side}
                for k in costs[Side.K][index, Side.K]:
                    for v in costs[Side.V][index, Side.V]:
                        size = self._wide_bytes(index, k.dtype, v.dtype, rows)
                        if size is not None:
                            sides = {Side.K: k, Side.V: v}
                            stored = rows if index in self._able else None
                            found[index].append(LayerOption(sides, stored, size))
        return found

    def _ways(self, measured: Iterable[Rows]) -> list[Rows]:
        """Returns what a layer may store wide: each choice, and beside None each side of it alone."""
        found = list(measured)
        if None in found:
            for rows in tuple(found):
                if rows is not None and len(rows.format.named) > 1:
                    found += [_alone(rows, side) for side in Side]
        return found

    def _measured_as(self, rows: Rows, index: int, side: Side) -> Rows:
        """Returns the choice in `self.rows` with which the costs of this side were measured."""
        if index not in self._able:
            return None if None in self.rows else self.rows[0]
        if rows is None or rows in self.rows:
            return rows
        whole = (one for one in self.rows if one is not None and _alone(one, side) == rows)
        return next(whole, None)

    def _bytes(self, index: int, side: Side, dtype: KVDtype) -> int:
        spec = self.wide.layers[index]
        g = spec.geometry
        head_dim = g.head_dim_k if side is Side.K else g.head_dim_v
        rows = kept_tokens(self.wide, spec, self.length)
        return g.num_kv_heads * dtype.format.row_bytes(head_dim) * rows

    def _wide_bytes(self, index: int, k: KVDtype, v: KVDtype, rows: Rows) -> int | None:
        """Returns the bytes of a layer's wide rows; None if they would be narrower than the layer's own."""
        if rows is None:
            return 0
        spec = self._with_rows(rows).layers[index]
        if spec.wide is None:
            return 0
        stored = {Side.K: k, Side.V: v}
        more = [
            stored[side].format.bits - wide.dtype.format.bits
            for side, wide in spec.wide.sides.items()
        ]
        if min(more) >= 0:
            return 0  # such a layer keeps one form
        if max(more) > 0:
            return None
        assert spec.k is not None
        assert spec.v is not None
        own = replace(spec, k=replace(spec.k, dtype=k), v=replace(spec.v, dtype=v))
        return wide_bytes_at(own, self.wide.page_size, self.length)

    def _with_rows(self, rows: AskedWide) -> KVPlan:
        """Returns a plan with these wide rows in every layer that can have them."""
        if rows not in self._plans_with_rows:
            sides = {Side.K: rows.format.k, Side.V: rows.format.v}
            narrow = [(s, dtype) for s, dtype, _ in self._narrow_plans if sides[s] is not None]
            narrow.sort(key=lambda one: one[1].format.bits)
            places = {
                place: dtype for s, dtype in narrow[:1] for place in self.places() if place[1] is s
            }
            every = {index for index, _ in self.places()}
            self._plans_with_rows[rows] = self.plan_of(places, dict.fromkeys(every, rows))
        return self._plans_with_rows[rows]

    @cached_property
    def _plans_with_rows(self) -> dict[AskedWide, KVPlan]:
        return {}

    @cached_property
    def _narrow_plans(self) -> dict[tuple[Side, KVDtype, Rows], KVPlan]:
        """Returns plans that store all layers' keys, or all values, in one candidate and the rest wide.

        Raises BadValue if none is narrower than the model dtype.
        """
        plans: dict[tuple[Side, KVDtype, Rows], KVPlan] = {}
        refused: list[str] = []
        places = self.places()
        for side in Side:
            for dtype in _candidates(side):
                if self.formats and (side, dtype) not in self.formats:
                    continue
                layers = {place: dtype for place in places if place[1] is side}
                for rows in self._measured_rows:
                    every = {index: _of_side(rows, side) for index, _ in places}
                    try:
                        plan = self.plan_of(layers, every)
                    except ConfigError as fault:
                        refused.append(f"{dtype}: {fault.why or fault.what}")
                        continue
                    if plan.bytes_per_token < self.wide.bytes_per_token:
                        plans[side, dtype, rows] = plan
        if not plans:
            raise BadValue(
                "no format is narrower than the model dtype and served here",
                why="; ".join(dict.fromkeys(refused)) or "every named format is as wide",
            )
        return plans

    def _front(self, side: Side, uniform: Mapping[KVDtype, float]) -> list[KVDtype]:
        layers = [index for index, s in self.places() if s is side]
        options = [
            Option(d, sum(self._bytes(index, side, d) for index in layers), kl)
            for d, kl in uniform.items()
        ]
        return [option.dtype for option in not_beaten(options)]

    def _plans_of_one_layer(self, kept: Front) -> dict[tuple[int, Side, KVDtype, Rows], KVPlan]:
        return {
            (index, side, dtype, rows): self.plan_of(
                {(index, side): dtype}, {index: _of_side(rows, side)}
            )
            for (side, rows), dtypes in kept.items()
            for index, s in self.places()
            if s is side
            for dtype in dtypes
        }

    def _means(self, what: str, plans: Mapping[Key, KVPlan], ids: Tensor) -> dict[Key, float]:
        """Returns the mean KL of every plan over windows ids [n, context]."""
        first: dict[str, str] = {}
        """The first name of each plan: rows in other formats on the other side store nothing else here."""
        same = {
            _label(key): first.setdefault(plan.fingerprint, _label(key))
            for key, plan in plans.items()
        }
        keys = {_label(key): key for key in plans}
        names = list(first.values())
        parts = []
        for start in range(0, len(names), AT_ONCE):
            some = {name: plans[keys[name]] for name in names[start : start + AT_ONCE]}
            parts += self._comparisons(f"{what}-{start}", some, ids)
        kl = {
            name: [float(one.prefill.kl.mean()) for one in found]
            for name, found in self._run(parts).items()
        }
        return {keys[name]: sum(kl[one]) / len(kl[one]) for name, one in same.items()}

    def _run(self, parts: Sequence[Part]) -> dict[str, list[Compared]]:
        """Returns what comparisons found, by the plan's name: one for each batch of windows."""
        found: dict[str, list[Compared]] = {}
        for arrays in run_parts(parts, self.kept, self.on_progress).values():
            for name, one in unpack(arrays).items():
                if name:  # without one it is the noise floor
                    found.setdefault(name, []).append(one)
        return found

    def _comparisons(self, what: str, plans: Mapping[str, KVPlan], ids: Tensor) -> list[Part]:
        is_measured = ids.shape[1] == self.lesson.measured.shape[1]
        most = windows_at_once(
            self.wide, plans.values(), ids.shape[1], vocab_size=self.llm.engine.vocab_size,
            device=runner_of(self.llm).device,
            option="--context" if is_measured else "--verify-context",
        )  # fmt: skip
        device = runner_of(self.llm).device
        return [
            comparison(self.llm, self.wide, f"{name}-{number}", group, batch)
            for name, batch in batches(f"{what}-", ids, most)
            for number, group in enumerate(kept_together(self.wide, plans, batch, device))
        ]

    # -- choosing ------------------------------------------------------------------------------

    def _least_read(
        self, found: Policy, others: Mapping[tuple[Side, KVDtype], Policy]
    ) -> tuple[Policy, Avoided | None]:
        """Returns `found`, or the one of `others` that clearly loses least on the text of step 1.

        others: by the format that each avoids. Costs of one format may be less certain than those of others,
        and sums of costs do not tell.
        """
        plan = self._plan_of_policy(found)
        plans = {key: self._plan_of_policy(other) for key, other in others.items()}
        distinct = {one.fingerprint: one for one in (plan, *plans.values())}
        if len(distinct) == 1:
            return found, None
        digest = hashlib.sha256(" ".join(distinct).encode()).hexdigest()[:12]
        parts = self._comparisons(f"policies-{digest}", distinct, self.lesson.whole)
        read = {
            name: np.concatenate([one.prefill.kl for one in some])
            for name, some in self._run(parts).items()
        }
        own = read[plan.fingerprint]
        best = min(plans, key=lambda key: read[plans[key].fingerprint].mean())
        other = read[plans[best].fingerprint]
        less = own - other
        if less.mean() <= CLEARLY * less.std() / math.sqrt(len(less)):
            return found, None
        return others[best], Avoided(*best, float(other.mean()), float(own.mean()))

    # -- verifying -----------------------------------------------------------------------------

    def _verified(
        self, options: Mapping[Rows, Mapping[Place, Sequence[Option]]], chosen: Policy
    ) -> Tuned:
        """Measures the policy on held-out text, without uniform formats."""
        plan = self._plan_of_policy(chosen)
        counted = round(bytes_per_token_at(plan, self.length) * self.length)
        assert counted == chosen.bytes, "the search counts what the plan stores"
        (policy,) = self._on_held_out(plan.fingerprint[:12], {"policy": (plan, None)})
        policy = replace(policy, predicted=chosen.kl)
        beside = {
            (index, side): options[self._measured_as(one.rows, index, side)][index, side]
            for index, one in chosen.chosen.items()
            for side in Side
        }
        return Tuned(beside, chosen, plan, policy, (), self.length, self.costs)

    def beside_uniform(self, tuned: Tuned) -> Tuned:
        """Adds uniform formats of up to twice the policy's bytes, measured on the same text.

        Each is verified without wide rows, with as many as fit into the policy's bytes, and with those
        of `rows` that take more.
        """
        plans: dict[str, tuple[KVPlan, Rows]] = {}
        most = 2 * tuned.policy.bytes_per_token
        for one in self.beside or whole_formats():
            with contextlib.suppress(ConfigError):
                for rows in self._rows_beside(one, tuned.policy.bytes_per_token):
                    plan = plan_of_uniform(self.llm, one, rows)
                    if self.stored_bytes(plan) <= most and plan.has_wide_rows is (rows is not None):
                        plans[", ".join(filter(None, (str(one), described(rows))))] = plan, rows
        if not plans:
            return tuned
        digest = hashlib.sha256(" ".join(plans).encode()).hexdigest()[:12]
        return replace(tuned, uniform=tuple(self._on_held_out(digest, plans)))

    def _rows_beside(self, one: FormatRequest, most: int) -> list[Rows]:
        """Returns wide rows of a uniform format to verify: as many as `most` bytes per token allow, and more.

        Raises ConfigError for a format that is not served.
        """
        found: list[Rows] = [None]
        page = self.wide.page_size

        def stored(rows: AskedWide) -> float:
            return bytes_per_token_at(plan_of_uniform(self.llm, one, rows), self.length)

        for alike in self._alike().values():
            least = replace(alike[0], recent=page)
            size = stored(least)
            each = stored(replace(least, recent=2 * page)) - size
            fitting = 0 if size > most else page
            if fitting and each > 0:
                fitting += int((most - size) / each + 1e-6) * page
            fitting = min(fitting, self.length)
            more = [one for one in alike if one.recent > fitting]
            found += [*([replace(least, recent=fitting)] if fitting else ()), *more]
        return found

    def _on_held_out(self, label: str, plans: Mapping[str, tuple[KVPlan, Rows]]) -> list[Verified]:
        stored = {name: plan for name, (plan, _) in plans.items()}
        parts = self._comparisons(f"verified-{label}", stored, self.lesson.held_out)
        found = self._run(parts)
        return [
            Verified(
                name,
                self.stored_bytes(plan),
                bits_per_value_at(plan, self.length),
                statistics_of(join([one.prefill for one in found[name]])),
                rows=rows,
            )
            for name, (plan, rows) in plans.items()
        ]

    def _plan_of_policy(self, chosen: Policy) -> KVPlan:
        return self.plan_of(
            {(i, s): o.dtype for i, one in chosen.chosen.items() for s, o in one.sides.items()},
            {index: one.rows for index, one in chosen.chosen.items()},
        )

    def plan_of(self, layers: Layers, rows: Mapping[int, Rows]) -> KVPlan:
        """Returns the plan that stores these formats in these places, and the model dtype elsewhere.

        rows: what layers store wide too, by index; nothing for layers that cannot.
        """
        asked = Asked(FormatRequest(Follow.MODEL, Follow.MODEL), "kvant tune")
        rules = tuple(
            WideRule(selector, one, "kvant tune")
            for index, one in rows.items()
            if one is not None and index in self._able
            for selector in parse_selectors(str(index), asked_by="kvant tune")
        )
        request = KVRequest(explicit=(asked,), format_defaults=False, wide_rules=rules)
        for (index, side), dtype in layers.items():
            sides = (dtype, None) if side is Side.K else (None, dtype)
            request = request.merged(rules_for(str(index), *sides, asked_by="kvant tune"))
        return resolve_again(self.llm.planned, request)


def plan_of_uniform(llm: LLM, one: FormatRequest, rows: AskedWide | None = None) -> KVPlan:
    """Plans every layer in one format, without the format's protective defaults. rows: stored wide too."""
    request = KVRequest(explicit=(Asked(one, "kvant tune"),), format_defaults=False, wide=rows)
    return resolve_again(llm.planned, request)


def between(less: Sequence[Option], more: Sequence[Option], share: float) -> list[Option]:
    """Returns the options of a place with a number of wide rows between two that were measured.

    less, more: the options with fewer and with more rows. share: 0 for the first number of rows, 1 for the
    second, linear in its logarithm. So is the logarithm of a cost. A format that dropped out on one side is
    no option.
    """
    other = {option.dtype: option.kl for option in more}

    def middle(first: float, second: float) -> float:
        if first == 0 or second == 0:  # no logarithm
            return float(first * (1 - share) + second * share)
        return float(first ** (1 - share) * second**share)

    return [
        replace(option, kl=middle(option.kl, other[option.dtype]))
        for option in less
        if option.dtype in other
    ]


def _candidates(side: Side) -> list[KVDtype]:
    """Returns formats that can store this side, without formats made for the other side."""
    found = {one.k if side is Side.K else one.v for one in whole_formats()}
    return [d for d in KVDtype if d in found or (side is Side.K and d.format.takes_rounding)]


def described(rows: Rows) -> str:
    """Returns `last 112 wide`, say; nothing for no rows."""
    if rows is None:
        return ""
    is_usual = rows.format == SideRequests(Follow.MODEL, Follow.MODEL)
    stored = "" if is_usual else f" in {rows.format}"
    return f"last {rows.recent} wide{stored}"


def _of_side(rows: Rows, side: Side) -> Rows:
    """Returns rows whose other side is in the model dtype, so that only this side loses anything."""
    if rows is None:
        return None
    stored = rows.format
    k, v = (stored.k, Follow.MODEL) if side is Side.K else (Follow.MODEL, stored.v)
    return replace(rows, format=SideRequests(k, v))


def _alone(rows: AskedWide, side: Side) -> AskedWide:
    """Returns rows of one side alone."""
    stored = rows.format
    k, v = (stored.k, None) if side is Side.K else (None, stored.v)
    return replace(rows, format=SideRequests(k, v))


def _label(key: tuple[Side, KVDtype, Rows] | tuple[int, Side, KVDtype, Rows]) -> str:
    """Returns the name of a plan in the parts on disk, such as `3 k nvfp4 last 112 wide`."""
    words = (part.value if isinstance(part, Side) else str(part) for part in key[:-1])
    return " ".join(filter(None, (*words, described(key[-1]))))


def _up(value: float, digits: int = 2) -> float:
    """Rounds up, so that the way out that an error suggests works."""
    scale = 10.0**digits
    return math.ceil(value * scale) / scale
