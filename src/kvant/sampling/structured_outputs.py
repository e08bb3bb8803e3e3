"""The required form of an answer: a JSON schema, any JSON object, a regex, a choice, or a grammar.

Pure data whose size is checked on construction. `kvant.sampling.grammar` compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvant.errors import RequestError

_BRANCHING = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of compilation. seconds: compile time of one form, without waiting for others. cached_bytes:
    bytes of the source texts of cached forms. cached_forms: number of cached forms; a compiled schema of 150
    bytes takes 0.1 MiB.
    """

    seconds: float = 5.0
    cached_bytes: int = 4 * 2**20
    cached_forms: int = 512


@dataclass(frozen=True, slots=True)
class FormLimits:
    """Limits of one form. text_bytes: bytes of a schema, regex or grammar, or of all choices. depth, nodes:
    of a schema. enum: number of values of an enum, or of choices. branches: of one anyOf, oneOf or allOf.
    """

    text_bytes: int = 64 * 2**10
    depth: int = 32
    nodes: int = 2000
    enum: int = 2000
    branches: int = 64


MOST = FormLimits()
"""Limits that hold for every form, from HTTP or Python."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form of an answer, exactly one. Raises RequestError, naming `asked_as`, for none or several.

    json: a JSON schema, as a dict or as text; kept as text. json_object: any JSON object. regex: in
    the syntax of Rust's regex crate, matching the whole answer. choice: one of these texts. grammar:
    Lark as llguidance reads it, or GBNF. asked_as: the client's field name, for messages. with_thinking: the
    grammar describes the model's thinking too; any other form begins behind it.

    A form larger than `MOST`, or a schema with external references, is refused. JSON answers have at most 20
    blanks or newlines between tokens, so that an answer cannot consist of them forever.
    """

    json: str | Mapping[str, object] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    asked_as: str = field(default="structured_outputs", compare=False)
    with_thinking: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise self._wrong("json_object is True or False")
        given = [self.json, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(form is not None for form in given) != 1:
            raise self._wrong(
                "exactly one of json, json_object, regex, choice and grammar must be given"
            )
        if self.json is not None:
            object.__setattr__(self, "json", self._checked_schema(self.json, MOST))
        if self.choice is not None:
            object.__setattr__(self, "choice", self._checked_choice(self.choice, MOST))
        for text in (self.regex, self.grammar):
            if text is not None:
                self._check_text(text, MOST)

    def require_within(self, limits: FormLimits) -> None:
        """Raises RequestError if the form exceeds these limits, which may be narrower than `MOST`."""
        if limits == MOST:
            return
        if self.json is not None:
            self._checked_schema(self.json, limits)
        if self.choice is not None:
            self._checked_choice(self.choice, limits)
        for text in (self.regex, self.grammar):
            if text is not None:
                self._check_text(text, limits)

    @property
    def schema(self) -> str | None:
        """The JSON schema, as text, that json or json_object requires; None for other forms."""
        assert self.json is None or isinstance(self.json, str)
        return '{"type":"object"}' if self.json_object else self.json

    @property
    def num_bytes(self) -> int:
        """Bytes of the form's source texts."""
        texts = (self.schema, self.regex, self.grammar, *(self.choice or ()))
        return sum(len(text.encode()) for text in texts if text is not None)

    def _checked_schema(self, given: object, limits: FormLimits) -> str:
        if isinstance(given, str):
            self._check_text(given, limits)
            try:
                schema = json.loads(given)
            except (ValueError, RecursionError):
                raise self._wrong("the schema is not JSON") from None
        else:
            schema = given
        if not isinstance(schema, Mapping):
            raise self._wrong("the schema is not a JSON object")
        self._check_nodes(schema, limits)
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError):
            raise self._wrong("the schema is not a JSON object") from None
        self._check_text(text, limits)
        return text

    def _check_nodes(self, schema: Mapping[str, object], limits: FormLimits) -> None:
        count = 0
        for node, depth in _nodes(schema, limits.depth):
            count += 1
            if depth > limits.depth:
                raise self._wrong(f"the schema is nested more than {limits.depth} levels deep")
            if isinstance(node, Mapping):
                self._check_object(node, limits)
        if count > limits.nodes:
            raise self._wrong(f"the schema has {count} nodes, at most {limits.nodes} are allowed")

    def _check_object(self, node: Mapping[str, object], limits: FormLimits) -> None:
        choices = node.get("enum")
        if isinstance(choices, list | tuple) and len(choices) > limits.enum:
            raise self._wrong(
                f"an enum has {len(choices)} values, at most {limits.enum} are allowed"
            )
        for name in _BRANCHING:
            branches = node.get(name)
            if isinstance(branches, list | tuple) and len(branches) > limits.branches:
                raise self._wrong(
                    f"{name} has {len(branches)} branches, at most {limits.branches} are allowed"
                )
        reference = node.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise self._wrong("a $ref leads out of the schema; nothing is fetched")

    def _checked_choice(self, given: object, limits: FormLimits) -> tuple[str, ...]:
        if not isinstance(given, list | tuple) or not given:
            raise self._wrong("choice is a list of texts, at least one")
        if len(given) > limits.enum:
            raise self._wrong(f"{len(given)} choices, at most {limits.enum} are allowed")
        for text in given:
            if not isinstance(text, str) or not text:
                raise self._wrong("a choice is a text that is not empty")
            self._check_unicode(text)
        if sum(len(text.encode()) for text in given) > limits.text_bytes:
            raise self._wrong(f"the choices have more than {limits.text_bytes} bytes")
        return tuple(given)

    def _check_text(self, text: object, limits: FormLimits) -> None:
        if not isinstance(text, str) or not text:
            raise self._wrong("a schema, regex or grammar is a text that is not empty")
        self._check_unicode(text)
        if len(text.encode()) > limits.text_bytes:
            raise self._wrong(f"it has more than {limits.text_bytes} bytes")

    def _check_unicode(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self._wrong("it is not valid Unicode text") from None

    def _wrong(self, message: str) -> RequestError:
        return RequestError(f"{self.asked_as}: {message}", param=self.asked_as)


def _nodes(schema: object, most_levels: int) -> Iterator[tuple[object, int]]:
    """Yields a schema's nodes with their depth, down to one level below the allowed depth.

    Plain values of an enum are left out, because they have their own limit.
    """
    waiting = [(schema, 0)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        if depth > most_levels:
            continue
        if isinstance(node, Mapping):
            waiting += [
                (value, depth + 1)
                for name, value in node.items()
                if name != "enum" or any(isinstance(v, Mapping | list) for v in _listed(value))
            ]
        elif isinstance(node, list | tuple):
            waiting += [(value, depth + 1) for value in node]


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]
