"""One tuning: measure the cost of each format in each place, search, and verify on held-out text.

    1  each format on all layers' keys, or all layers' values; formats that are worse in bytes and KL drop out
    2  each remaining format on one layer and side only
    3  the search (`search.py`), over the figures of 2, scaled so that their sums equal those of 1
    4  the found policy and the best uniform formats, on text that no earlier step has read

With wide rows (`kvant.kv.wide`), every plan of these steps stores them, and budgets count their pages.

Finished parts of 1, 2 and 4 are kept on disk (`kvant.measure.quality.kept`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from kvant.engine.llm import LLM
from kvant.errors import BadValue, ConfigError, WayOut
from kvant.kv.dtype import Follow, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention
from kvant.kv.groups import bytes_per_token_at
from kvant.kv.names import FormatRequest, whole_formats
from kvant.kv.request import Asked, AskedWide, KVRequest, rules_for
from kvant.kv.spec import KVPlan
from kvant.measure.own_engine import plan_storing, runner_of
from kvant.measure.quality.compare import windows_at_once
from kvant.measure.quality.evaluate import Part, batches, comparison, run_parts, unpack
from kvant.measure.quality.kept import Kept
from kvant.measure.quality.kl_statistics import Statistics, join, statistics_of
from kvant.measure.quality.texts import Text, windows
from kvant.measure.tuning.search import (
    Assignment,
    Option,
    Place,
    best_within,
    fewest_bytes,
    least_kl,
    not_beaten,
    smallest_under,
)
from kvant.plan.resolution import resolve_again

ROUNDS = 4
"""Maximum number of verifications for --max-kl, each with a new budget."""
AT_ONCE = 8  # plans that read side by side; their results are kept as one part
Told2 = Callable[[int, int], None]
Layers = Mapping[Place, KVDtype]
Key = TypeVar("Key", tuple[Side, KVDtype], tuple[int, Side, KVDtype])
"""What a plan stores in a narrow format: one side of every layer, or one side of one layer."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Windows [n, context] int64. measured: for steps 1 and 2; held_out: for step 4."""

    measured: Tensor
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
    first = -(-measured // context) * context
    rest = -(-held_out // last) * last
    if len(text.token_ids) < first + rest:
        sizes = context if last == context else f"{context} and {last}"
        raise BadValue(
            f"the text {text.name} is too short to tune on",
            why=f"it has {len(text.token_ids)} tokens; {first + rest} are needed: {measured} to "
            f"measure and {held_out} to verify, in windows of {sizes}",
            ways_out=(WayOut("give a longer text", ("--text", "FILE")),),
        )
    return Lesson(
        windows(text, llm, context, first)[: first // context],
        windows(text, llm, last, rest, begin=first)[: rest // last],
    )


@dataclass(frozen=True, slots=True)
class Verified:
    """A policy or a uniform format on held-out text. predicted: KL from the search, None for uniform formats.

    bytes_per_token: of a sequence as long as a held-out window, on which the bytes of wide rows depend.
    """

    name: str
    bytes_per_token: int
    bits: float
    figures: Statistics
    predicted: float | None = None


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result.

    options: of every place, with measured costs. chosen: the policy's formats. policy, uniform: their figures
    on held-out text. length: tokens of the sequence whose bytes count. rows: what the policy stores wide too.
    """

    options: Mapping[Place, Sequence[Option]]
    chosen: Assignment
    plan: KVPlan
    policy: Verified
    uniform: tuple[Verified, ...]
    length: int
    rows: AskedWide | None = None

    @property
    def best_uniform(self) -> Verified | None:
        """The uniform format of least KL with no more bytes than the policy; None if there is none."""
        within = [u for u in self.uniform if u.bytes_per_token <= self.policy.bytes_per_token]
        return min(within, key=lambda u: u.figures.kld_mean) if within else None


@dataclass
class Tuner:
    """Runs one tuning. llm: the model; its plan stores the model dtype. formats: candidates; empty for all.

    beside: uniform formats to verify; empty for all. rows: what every plan stores wide too. Uniform formats
    are verified with and without these rows.
    """

    llm: LLM
    lesson: Lesson
    formats: Sequence[KVDtype]
    kept: Kept
    told: Told2
    beside: Sequence[FormatRequest] = ()
    rows: AskedWide | None = None

    @property
    def wide(self) -> KVPlan:
        return plan_storing(self.llm, FormatRequest(Follow.MODEL, Follow.MODEL))

    def stored_bytes(self, plan: KVPlan) -> int:
        """Returns bytes per token of a sequence as long as a held-out window, including wide rows."""
        return round(bytes_per_token_at(plan, self.lesson.held_out.shape[1]))

    def places(self) -> list[Place]:
        """Returns every stored side. Raises BadValue for MLA, whose single latent cannot be tuned yet."""
        if any(spec.geometry.attention is Attention.MLA for spec in self.wide.layers):
            raise BadValue(
                f"{self.llm.planned.target.local.name} stores one latent instead of K and V",
                why="tuning chooses formats of K and V apart",
            )
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
        whole = self.wide.bytes_per_token_16bit
        rows, least = self._fewest_bytes()
        # A suggested number of bits may come out just below whole bytes.
        budget = int(bits * whole / 16 + 1e-6) - rows
        if budget < least:
            fewest = 16 * (least + rows) / whole
            raise BadValue(
                f"--budget {bits:g}bits cannot be met",
                why=f"the narrowest policy has {fewest:.2f} bits per value",
                ways_out=(WayOut("take the narrowest", ("--budget", f"{_up(fewest)}bits")),),
            )
        options = self.options()
        found = best_within(options, budget)
        assert found is not None, "the narrowest formats are among the options"
        return self.beside_uniform(self._verified(options, found))

    def for_kl(self, most: float) -> Tuned:
        """Returns the policy of fewest bytes whose measured mean KL is at most `most`, on held-out text.

        Raises BadValue, with the closest policy found, if none is that good.
        """
        options, aim = self.options(), most
        closest: Tuned | None = None
        for _ in range(ROUNDS):
            found = smallest_under(options, aim) or least_kl(options)
            tuned = self._verified(options, found)
            measured = tuned.policy.figures.kld_mean
            if closest is None or measured < closest.policy.figures.kld_mean:
                closest = tuned
            if measured <= most:
                return self.beside_uniform(tuned)
            if found.bytes >= least_kl(options).bytes:
                break
            aim = found.kl * most / measured * 0.95
        assert closest is not None
        measured = closest.policy.figures.kld_mean
        raise BadValue(
            f"--max-kl {most:g} cannot be met",
            why=f"the closest policy has a mean KL divergence of {measured:.3g} on held-out text, with "
            f"{closest.policy.bits:.2f} bits per value",
            ways_out=(WayOut("take the closest", ("--max-kl", f"{_up(measured, 6)}")),),
        )

    # -- measuring -----------------------------------------------------------------------------

    def options(self) -> dict[Place, list[Option]]:
        """Returns the candidates of every place, with costs.

        Formats that another beats everywhere are left out.
        """
        places = self.places()
        uniform = self._uniform_sides()
        kept = {side: self._front(side, uniform[side]) for side in Side}
        alone = self._one_by_one(places, kept)
        wide = self.wide
        options: dict[Place, list[Option]] = {}
        for index, side in places:
            spec = wide.layers[index]
            choice = spec.k if side is Side.K else spec.v
            assert choice is not None
            found = [Option(choice.dtype, self._bytes(index, side, choice.dtype), 0.0)]
            for dtype in kept[side]:
                total = sum(alone[i, s, dtype] for i, s in places if s is side)
                scale = uniform[side][dtype] / total if total > 0 else 1.0
                cost = alone[index, side, dtype] * scale
                found.append(Option(dtype, self._bytes(index, side, dtype), cost))
            options[index, side] = not_beaten(found)
        return options

    def _bytes(self, index: int, side: Side, dtype: KVDtype) -> int:
        g = self.wide.layers[index].geometry
        head_dim = g.head_dim_k if side is Side.K else g.head_dim_v
        return g.num_kv_heads * dtype.format.row_bytes(head_dim)

    def _fewest_bytes(self) -> tuple[int, int]:
        """Returns bytes per token: of wide rows, an upper bound, and the fewest of all else."""
        narrow = {
            place: [
                Option(d, self._bytes(*place, d), 0.0)
                for s, d in self._narrow_plans
                if s is place[1]
            ]
            for place in self.places()
        }
        plan = self._plan_of(
            fewest_bytes({place: found for place, found in narrow.items() if found})
        )
        return self.stored_bytes(plan) - plan.bytes_per_token, plan.bytes_per_token

    @cached_property
    def _narrow_plans(self) -> dict[tuple[Side, KVDtype], KVPlan]:
        """Returns plans that store all layers' keys, or all values, in one candidate and the rest wide.

        Raises BadValue if none is narrower than the model dtype.
        """
        plans: dict[tuple[Side, KVDtype], KVPlan] = {}
        refused: list[str] = []
        places = self.places()
        for side in Side:
            for dtype in _candidates(side):
                if self.formats and dtype not in self.formats:
                    continue
                layers = {place: dtype for place in places if place[1] is side}
                try:
                    plan = self.plan_of(layers)
                except ConfigError as fault:
                    refused.append(f"{dtype}: {fault.why or fault.what}")
                    continue
                if plan.bytes_per_token < self.wide.bytes_per_token:
                    plans[side, dtype] = plan
        if not plans:
            raise BadValue(
                "no format is narrower than the model dtype and served here",
                why="; ".join(refused) or "every named format is as wide",
            )
        return plans

    def _uniform_sides(self) -> dict[Side, dict[KVDtype, float]]:
        """Returns the mean KL with all layers' keys, or all values, in one format and the rest wide."""
        kl: dict[Side, dict[KVDtype, float]] = {side: {} for side in Side}
        for (side, dtype), mean in self._means("uniform", self._narrow_plans).items():
            kl[side][dtype] = mean
        return kl

    def _front(self, side: Side, uniform: Mapping[KVDtype, float]) -> list[KVDtype]:
        index = self.places()[0][0]
        options = [Option(d, self._bytes(index, side, d), kl) for d, kl in uniform.items()]
        return [option.dtype for option in not_beaten(options)]

    def _one_by_one(
        self, places: Sequence[Place], kept: Mapping[Side, Sequence[KVDtype]]
    ) -> dict[tuple[int, Side, KVDtype], float]:
        plans = {
            (index, side, dtype): self.plan_of({(index, side): dtype})
            for index, side in places
            for dtype in kept[side]
        }
        return self._means("alone", plans)

    def _means(self, what: str, plans: Mapping[Key, KVPlan]) -> dict[Key, float]:
        """Returns the mean KL of every plan over the measured windows."""
        keys = {_label(key): key for key in plans}
        names = list(keys)
        parts = []
        for start in range(0, len(names), AT_ONCE):
            some = {name: plans[keys[name]] for name in names[start : start + AT_ONCE]}
            parts += self._comparisons(f"{what}-{start}", some, self.lesson.measured)
        kl: dict[str, list[float]] = {}
        for arrays in run_parts(parts, self.kept, self.told).values():
            for name, one in unpack(arrays).items():
                if name:
                    kl.setdefault(name, []).append(float(one.prefill.kl.mean()))
        return {keys[name]: sum(values) / len(values) for name, values in kl.items()}

    def _comparisons(self, what: str, plans: Mapping[str, KVPlan], ids: Tensor) -> list[Part]:
        device = runner_of(self.llm).device
        most = windows_at_once(self.wide, plans.values(), ids.shape[1], device)
        return [
            comparison(self.llm, self.wide, name, plans, batch)
            for name, batch in batches(f"{what}-", ids, most)
        ]

    # -- verifying -----------------------------------------------------------------------------

    def _verified(self, options: Mapping[Place, Sequence[Option]], chosen: Assignment) -> Tuned:
        """Measures the policy on held-out text, without uniform formats."""
        plan = self._plan_of(chosen)
        assert plan.bytes_per_token == chosen.bytes, "the search counts what the plan stores"
        (policy,) = self._on_held_out(plan.fingerprint[:12], {"policy": plan})
        policy = replace(policy, predicted=chosen.kl)
        length = self.lesson.held_out.shape[1]
        return Tuned(options, chosen, plan, policy, (), length, self.rows)

    def beside_uniform(self, tuned: Tuned) -> Tuned:
        """Adds uniform formats of up to twice the policy's bytes, measured on the same text."""
        plans = {}
        most = 2 * tuned.policy.bytes_per_token
        for one in self.beside or whole_formats():
            ways = {str(one): None, **({f"{one}, wide rows": self.rows} if self.rows else {})}
            for name, rows in ways.items():
                with contextlib.suppress(ConfigError):
                    plan = plan_of_uniform(self.llm, one, rows)
                    if self.stored_bytes(plan) <= most:
                        plans[name] = plan
        if not plans:
            return tuned
        digest = hashlib.sha256(" ".join(plans).encode()).hexdigest()[:12]
        return replace(tuned, uniform=tuple(self._on_held_out(digest, plans)))

    def _on_held_out(self, label: str, plans: Mapping[str, KVPlan]) -> list[Verified]:
        parts = self._comparisons(f"verified-{label}", plans, self.lesson.held_out)
        found = [unpack(part) for part in run_parts(parts, self.kept, self.told).values()]
        return [
            Verified(
                name,
                self.stored_bytes(plan),
                16 * self.stored_bytes(plan) / plan.bytes_per_token_16bit,
                statistics_of(join([batch[name].prefill for batch in found])),
            )
            for name, plan in plans.items()
        ]

    def _plan_of(self, chosen: Assignment) -> KVPlan:
        return self.plan_of({place: option.dtype for place, option in chosen.chosen.items()})

    def plan_of(self, layers: Layers) -> KVPlan:
        """Returns the plan that stores these formats in these places, and the model dtype elsewhere."""
        asked = Asked(FormatRequest(Follow.MODEL, Follow.MODEL), "kvant tune")
        request = KVRequest(explicit=(asked,), format_defaults=False, wide=self.rows)
        for (index, side), dtype in layers.items():
            sides = (dtype, None) if side is Side.K else (None, dtype)
            request = request.merged(rules_for(str(index), *sides, asked_by="kvant tune"))
        return resolve_again(self.llm.planned, request)


def plan_of_uniform(llm: LLM, one: FormatRequest, rows: AskedWide | None = None) -> KVPlan:
    """Plans every layer in one format, without the format's protective defaults. rows: stored wide too."""
    request = KVRequest(explicit=(Asked(one, "kvant tune"),), format_defaults=False, wide=rows)
    return resolve_again(llm.planned, request)


def _candidates(side: Side) -> list[KVDtype]:
    """Returns formats that can store this side, without formats made for the other side."""
    found = {one.k if side is Side.K else one.v for one in whole_formats()}
    return [d for d in KVDtype if d in found or (side is Side.K and d.format.takes_rounding)]


def _label(key: tuple[int | Side | KVDtype, ...]) -> str:
    """Returns the name of a plan in the parts on disk, such as `3 k nvfp4`."""
    return " ".join(part.value if isinstance(part, Side) else str(part) for part in key)


def _up(value: float, digits: int = 2) -> float:
    """Rounds up, so that the way out that an error suggests works."""
    scale = 10.0**digits
    return math.ceil(value * scale) / scale
