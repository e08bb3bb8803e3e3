"""What a user asks of the KV cache, parsed once and frozen.

A `KVRequest` is built from text at the edge (flags, environment, policy file). Only
`kvant.kv.resolve` reads it. Grammar of a layer rule: `LAYERS:FORMAT`, where LAYERS is a comma list of

    3   -1          one layer, counted from the end if negative
    0-3   4-   -4--1  a range, both ends included
    re:PATTERN      layers whose attention module's name the pattern matches anywhere (takes the rest)
    sliding_window  full     a kind of attention
    linear_attention         layers that keep a recurrent or convolution state

and FORMAT is a format for both sides, `K/V`, or one side alone: `k=fp8`, `v=model`, or of a state:
`state=bf16` for the recurrent one, `conv=float32` for the inputs of a convolution.
A rule or skip that begins with `draft:` addresses the drafter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeVar

from kvant.errors import KV_FORMAT, BadValue, WayOut
from kvant.kv.dtype import PAIR_NAMES, Follow, KVDtype
from kvant.kv.geometry import Attention, LayerGeometry, ModelGeometry, StateKind, spans
from kvant.kv.names import FormatRequest, Request, SideRequests, parse_format, parse_one

_KINDS = {"sliding_window": Attention.SLIDING, "full": Attention.FULL}
_STATEFUL = "linear_attention"
_STATES = {"state": StateKind.RECURRENT, "conv": StateKind.CONV}
_SPAN = re.compile(r"(-?\d+)(?:(-)(-?\d+)?)?")
_DRAFT = "draft:"


class Specificity(IntEnum):
    """How closely a selector points at a layer; the closest rule wins."""

    KIND = 0
    PATTERN = 1
    RANGE = 2
    INDEX = 3


@dataclass(frozen=True, slots=True)
class Selector:
    """Which layers: exactly one of a span, a pattern, a kind, or those with states.

    first, last: a span's ends as written, negative counted from the end; last None is open.
    """

    text: str
    first: int | None = None
    last: int | None = None
    pattern: re.Pattern[str] | None = None
    kind: Attention | None = None
    has_states: bool = False

    def matches(self, layer: LayerGeometry, num_layers: int) -> bool:
        if self.pattern is not None:
            return self.pattern.search(layer.name) is not None
        if self.kind is not None:
            return layer.attention is self.kind
        if self.has_states:
            return bool(layer.states)
        first, last = self._span(num_layers)
        return first <= layer.index <= last

    def rank(self, num_layers: int) -> tuple[Specificity, int]:
        """Sort key: more specific is greater; among ranges the narrower one is."""
        if self.pattern is not None:
            return (Specificity.PATTERN, 0)
        if self.kind is not None or self.has_states:
            return (Specificity.KIND, 0)
        first, last = self._span(num_layers)
        kind = Specificity.INDEX if first == last else Specificity.RANGE
        return (kind, first - last)

    def _span(self, num_layers: int) -> tuple[int, int]:
        assert self.first is not None
        first = self.first + num_layers if self.first < 0 else self.first
        last = num_layers - 1 if self.last is None else self.last
        return first, last + num_layers if last < 0 else last


@dataclass(frozen=True, slots=True)
class LayerRule:
    """A format for some layers; a side or state that is None is decided by the next step."""

    selector: Selector
    k: Request | None
    v: Request | None
    asked_by: str
    state: Request | None = None
    conv: Request | None = None

    def of_state(self, kind: StateKind) -> Request | None:
        return self.state if kind is StateKind.RECURRENT else self.conv


@dataclass(frozen=True, slots=True)
class Skip:
    """Layers that store the model dtype."""

    selector: Selector
    asked_by: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A global format and who asked, such as "--kv-cache-dtype fp8"."""

    format: FormatRequest
    asked_by: str


@dataclass(frozen=True, slots=True)
class MadeFor:
    """The model that a policy was made for. fingerprint: `ModelGeometry.fingerprint`."""

    name: str
    fingerprint: str
    asked_by: str


@dataclass(frozen=True, slots=True)
class AskedState:
    """A global format of one kind of state and who asked, such as "--state-dtype bf16"."""

    kind: StateKind
    format: Request
    asked_by: str


@dataclass(frozen=True, slots=True)
class AskedWide:
    """Tokens whose rows are stored a second time, in a wide format: the first `sink` and the last `recent`.

    format: of these rows; a side that it does not name is read as the layer stores it. Layers whose own rows
    are not narrower keep one form.
    """

    sink: int
    recent: int
    format: SideRequests
    asked_by: str


@dataclass(frozen=True, slots=True)
class WideRule:
    """Wide rows of some layers; wide None: none. It counts instead of `KVRequest.wide`."""

    selector: Selector
    wide: AskedWide | None
    asked_by: str

    @property
    def rows(self) -> tuple[int, int, SideRequests] | None:
        """What equally close rules must agree on."""
        wide = self.wide
        return None if wide is None else (wide.sink, wide.recent, wide.format)


@dataclass(frozen=True, slots=True)
class KVRequest:
    """Everything asked about one model's KV cache.

    explicit: global formats, strongest first; the first counts, the others stay visible.
    inherited: for a drafter, the target's explicit global format, which may be downgraded.
    strict: a checkpoint's wish that cannot be served is an error, not a downgrade.
    missing_scales_as_one: use 1.0 if the checkpoint promised scales and has none.
    format_defaults: formats may keep layers at a model's ends wide (`KVFormat.wide_ends`).
    made_for: models that policies among the sources were made for; another model is refused.
    states: global formats of states, strongest first. wide: tokens that are stored wide too, or None.
    wide_rules: the same for some layers.
    """

    explicit: tuple[Asked, ...] = ()
    rules: tuple[LayerRule, ...] = ()
    skips: tuple[Skip, ...] = ()
    inherited: Asked | None = None
    strict: bool = False
    missing_scales_as_one: bool = False
    format_defaults: bool = True
    made_for: tuple[MadeFor, ...] = ()
    states: tuple[AskedState, ...] = ()
    wide: AskedWide | None = None
    wide_rules: tuple[WideRule, ...] = ()

    def merged(self, weaker: KVRequest) -> KVRequest:
        """Returns this request with a weaker source's added (flag over environment over file)."""
        return replace(
            self,
            explicit=self.explicit + weaker.explicit,
            rules=self.rules + weaker.rules,
            skips=self.skips + weaker.skips,
            strict=self.strict or weaker.strict,
            missing_scales_as_one=self.missing_scales_as_one or weaker.missing_scales_as_one,
            format_defaults=self.format_defaults and weaker.format_defaults,
            made_for=self.made_for + weaker.made_for,
            states=self.states + weaker.states,
            wide=self.wide or weaker.wide,
            wide_rules=self.wide_rules + weaker.wide_rules,
        )

    @property
    def every_wide(self) -> tuple[AskedWide, ...]:
        """All requests for wide rows, of the model first and then of some layers."""
        asked = (self.wide, *(rule.wide for rule in self.wide_rules))
        return tuple(one for one in asked if one is not None)

    def wide_of(self, layer: LayerGeometry, num_layers: int) -> AskedWide | None:
        """Returns what is asked of a layer's wide rows. Raises BadValue if equally close rules disagree."""
        rule = closest(self.wide_rules, layer, num_layers, lambda rule: rule.rows, "wide rows")
        return self.wide if rule is None else rule.wide

    def state_rule(
        self, layer: LayerGeometry, kind: StateKind, num_layers: int
    ) -> LayerRule | None:
        """Returns the closest rule for a layer's state. Raises BadValue if equally close ones disagree."""
        return closest(
            [rule for rule in self.rules if rule.of_state(kind) is not None],
            layer,
            num_layers,
            lambda rule: rule.of_state(kind),
            f"the {kind.value} state",
        )


_Rule = TypeVar("_Rule", LayerRule, WideRule)


@dataclass(frozen=True, slots=True)
class Requests:
    """What one command line asks of the target and of the drafter."""

    target: KVRequest = field(default_factory=KVRequest)
    draft: KVRequest = field(default_factory=KVRequest)

    def merged(self, weaker: Requests) -> Requests:
        return Requests(self.target.merged(weaker.target), self.draft.merged(weaker.draft))

    def for_draft(self) -> KVRequest:
        """Returns the drafter's request: its own, with the target's explicit global format to inherit.

        The target's skips and rules do not apply: they name its layers.
        """
        inherited = self.target.explicit[0] if self.target.explicit else None
        return replace(
            self.draft,
            inherited=inherited,
            strict=self.target.strict,
            missing_scales_as_one=self.target.missing_scales_as_one,
            format_defaults=self.target.format_defaults,
        )


NOTHING_ASKED = Requests()


def parse_selectors(text: str, *, asked_by: str) -> tuple[Selector, ...]:
    """A comma list of selectors; `re:` takes the rest of the text."""
    text = text.strip()
    if text.startswith("re:"):
        return (_parse_pattern(text, asked_by),)
    head, found, rest = text.partition(",")
    first = (_parse_plain(head.strip(), asked_by),)
    return first + parse_selectors(rest, asked_by=asked_by) if found else first


def parse_skips(text: str, *, asked_by: str) -> Requests:
    """A skip list; entries after a leading `draft:` address the drafter."""
    text, draft = _strip_draft(text)
    skips = tuple(Skip(s, asked_by) for s in parse_selectors(text, asked_by=asked_by))
    request = KVRequest(skips=skips)
    return Requests(draft=request) if draft else Requests(target=request)


def parse_rule(text: str, *, asked_by: str) -> Requests:
    """`LAYERS:FORMAT`, see the top of this file."""
    body, draft = _strip_draft(text)
    layers, colon, wanted = body.rpartition(":")
    if not colon or not layers or not wanted:
        raise BadValue(
            f"{asked_by}: {text!r} is no layer rule",
            why="a rule is LAYERS:FORMAT, such as 0-3:bf16",
        )
    sides = _parse_sides(wanted, asked_by)
    selectors = parse_selectors(layers, asked_by=asked_by)
    request = KVRequest(
        rules=tuple(LayerRule(selector, asked_by=asked_by, **sides) for selector in selectors)
    )
    return Requests(draft=request) if draft else Requests(target=request)


def rules_for(layers: str, k: Request | None, v: Request | None, *, asked_by: str) -> KVRequest:
    """The same formats for every selector of a comma list."""
    selectors = parse_selectors(layers, asked_by=asked_by)
    return KVRequest(rules=tuple(LayerRule(s, k, v, asked_by) for s in selectors))


def _strip_draft(text: str) -> tuple[str, bool]:
    text = text.strip()
    return (text[len(_DRAFT) :], True) if text.startswith(_DRAFT) else (text, False)


def _parse_sides(text: str, asked_by: str) -> dict[str, Request | None]:
    """Formats by the field of `LayerRule`."""
    sides: dict[str, Request | None] = {"k": None, "v": None}
    if "=" not in text:
        both = parse_format(text, asked_by=asked_by)
        return {"k": both.k, "v": both.v}
    named = set()
    for part in text.split(","):
        side, _, name = part.partition("=")
        side = side.strip().lower()
        if side not in (*sides, *_STATES) or side in named:
            raise BadValue(
                f"{asked_by}: {text!r} names no sides",
                why="sides are k=FORMAT, v=FORMAT or both, state=FORMAT and conv=FORMAT",
            )
        named.add(side)
        sides[side] = parse_one(name, asked_by=asked_by)
    return sides


def closest(
    rules: Sequence[_Rule],
    layer: LayerGeometry,
    num_layers: int,
    wanted: Callable[[_Rule], object],
    what: str,
) -> _Rule | None:
    """Returns the most specific rule for a layer. Raises BadValue if two equally close ones disagree.

    wanted: what a rule asks for. what: the stored thing, for the message.
    """
    found = [rule for rule in rules if rule.selector.matches(layer, num_layers)]
    if not found:
        return None
    best = max(rule.selector.rank(num_layers) for rule in found)
    nearest = [rule for rule in found if rule.selector.rank(num_layers) == best]
    a = nearest[0]
    b = next((rule for rule in nearest if wanted(rule) != wanted(a)), None)
    if b is not None:
        raise BadValue(
            f"two rules decide {what} of layer {layer.index} and disagree",
            why=f"{a.asked_by}: {a.selector.text} and {b.asked_by}: {b.selector.text} are equally close",
            ways_out=(WayOut("give the layer a rule of its own, by index"),),
        )
    return a


def _parse_pattern(text: str, asked_by: str) -> Selector:
    try:
        return Selector(text, pattern=re.compile(text[len("re:") :]))
    except re.error as fault:
        raise BadValue(f"{asked_by}: {text!r} is no regular expression", why=str(fault)) from None


def _parse_plain(text: str, asked_by: str) -> Selector:
    if text in _KINDS:
        return Selector(text, kind=_KINDS[text])
    if text == _STATEFUL:
        return Selector(text, has_states=True)
    span = _SPAN.fullmatch(text)
    if span is None:
        raise BadValue(
            f"{asked_by}: {text!r} selects no layers",
            why=f"use an index, a range such as 0-3, re:PATTERN, or one of "
            f"{', '.join((*_KINDS, _STATEFUL))}",
        )
    first, dash, last = span.groups()
    if dash is None:
        return Selector(text, first=int(first), last=int(first))
    return Selector(text, first=int(first), last=None if last is None else int(last))


def check_request(request: KVRequest, geometry: ModelGeometry) -> None:
    """Raises BadValue for selectors that match nothing, pairs where K and V are one, and a foreign policy."""
    for policy in request.made_for:
        if policy.fingerprint != geometry.fingerprint:
            raise BadValue(
                f"{policy.asked_by}: this policy was made for another model, {policy.name}",
                why=f"that model's fingerprint is {policy.fingerprint}, this one's is "
                f"{geometry.fingerprint}",
                ways_out=(WayOut("make a policy for this model with kvant tune"),),
            )
    _refuse_empty_selectors(request, geometry)
    _refuse_pairs_on_latents(request, geometry)


def _refuse_empty_selectors(request: KVRequest, geometry: ModelGeometry) -> None:
    """Raises BadValue for a selector that reaches no layer with KV of its own."""
    num_layers = len(geometry.layers)
    _refuse_states_of_none(request, geometry)
    rules = [r for r in request.rules if r.k is not None or r.v is not None]
    asked: list[tuple[Selector, str]] = [(r.selector, r.asked_by) for r in rules]
    asked += [(s.selector, s.asked_by) for s in request.skips]
    asked += [(r.selector, r.asked_by) for r in request.wide_rules]
    for selector, asked_by in asked:
        hit = [layer for layer in geometry.layers if selector.matches(layer, num_layers)]
        if any(layer.has_kv for layer in hit):
            continue
        shared = next((layer for layer in hit if layer.shared_with is not None), None)
        if shared is not None:
            why = f"layer {shared.index} keeps no KV: it reads layer {shared.shared_with}'s"
            ways = (WayOut(f"address the owner, layer {shared.shared_with}"),)
        else:
            why = "it keeps no KV" if hit else "it matches no layer"
            ways = (WayOut("address one of the layers listed"),)
        raise BadValue(
            f"{asked_by}: {selector.text!r} selects nothing that is stored",
            why=f"{why}; {_list_layers(geometry)}",
            ways_out=ways,
        )


def _refuse_states_of_none(request: KVRequest, geometry: ModelGeometry) -> None:
    """Raises BadValue for a format of states that no layer, or no layer of a rule, keeps."""
    num_layers = len(geometry.layers)

    def keep(kind: StateKind, layers: Iterable[LayerGeometry]) -> bool:
        return any(state.kind is kind for layer in layers for state in layer.states)

    kept = {state.kind.value for layer in geometry.layers for state in layer.states}
    has = "no layer of it has a recurrence or a convolution"
    if kept:
        has = f"its layers keep {' and '.join(kept)} states alone"
    for one in request.states:
        if not keep(one.kind, geometry.layers):
            raise BadValue(
                f"{one.asked_by}: {geometry.architecture} keeps no {one.kind.value} state",
                why=has,
                ways_out=(WayOut("leave the option out"),),
            )
    for rule in request.rules:
        hit = [layer for layer in geometry.layers if rule.selector.matches(layer, num_layers)]
        for kind in StateKind:
            if rule.of_state(kind) is not None and not keep(kind, hit):
                raise BadValue(
                    f"{rule.asked_by}: {rule.selector.text!r} selects no layer with a {kind.value} state",
                    why=_list_layers(geometry),
                    ways_out=(WayOut("address one of the layers listed"),),
                )


def _list_layers(geometry: ModelGeometry) -> str:
    kinds: dict[str, list[int]] = {}
    for layer in geometry.layers:
        kind = "sliding_window" if layer.attention is Attention.SLIDING else layer.attention.value
        if layer.states and not layer.has_kv:
            kind = _STATEFUL
        kinds.setdefault(kind, []).append(layer.index)
    listed = "; ".join(f"{kind}: {spans(indices)}" for kind, indices in kinds.items())
    return f"layers of this model: {listed}; names like {geometry.layers[0].name!r}"


def _refuse_pairs_on_latents(request: KVRequest, geometry: ModelGeometry) -> None:
    if not any(layer.attention is Attention.MLA for layer in geometry.layers):
        return
    asked: list[tuple[Request | None, Request | None, str]]
    asked = [(a.format.k, a.format.v, a.asked_by) for a in request.explicit[:1]]
    asked += [(rule.k, rule.v, rule.asked_by) for rule in request.rules if rule.k or rule.v]
    for k, v, asked_by in asked:
        if k is not v:
            one = str(k or v or Follow.MODEL)
            if one in PAIR_NAMES:  # its keys have a form that stands for no values
                one = str(KVDtype.FP8_PER_TOKEN_HEAD)
            raise BadValue(
                f"{asked_by}: K and V cannot differ in {geometry.architecture}",
                why="its attention keeps one latent instead of keys and values",
                ways_out=(WayOut("name one format", (KV_FORMAT, one)),),
            )
