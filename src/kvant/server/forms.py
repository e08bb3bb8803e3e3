"""Reads the form that a request requires of its answer: a schema, regex, grammar or choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvant.errors import RequestError
from kvant.sampling.structured_outputs import StructuredOutputs
from kvant.server.api_error import as_api_error, bad_request
from kvant.server.config import Limits
from kvant.server.wire import GenerationBody, ResponseFormat, StructuredBody

_FORM_FIELDS = {
    "guided_json": "json",
    "json_schema": "json",  # llama.cpp, SGLang
    "guided_regex": "regex",
    "regex": "regex",  # SGLang
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",  # llama.cpp
    "ebnf": "grammar",  # SGLang
}


def read_form(body: GenerationBody, limits: Limits) -> StructuredOutputs | None:
    """Returns the form of the answer that the body requires, or None. Raises ApiError 400.

    It may be given in one way only and must be within the limits.
    """
    try:
        forms = list(_forms(body))
        if forms:
            forms[0].require_within(limits.form)
    except RequestError as fault:
        raise as_api_error(fault) from None
    if len(forms) > 1:
        names = " and ".join(form.asked_as for form in forms)
        raise bad_request(f"{names} ask for one form each: give one", forms[1].asked_as)
    return forms[0] if forms else None


def _forms(body: GenerationBody) -> Iterator[StructuredOutputs]:
    if body.response_format is not None:
        yield from _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        yield _of_structured_outputs(body.structured_outputs)
    for name, kind in _FORM_FIELDS.items():
        value = getattr(body, name)
        if value is not None:
            yield StructuredOutputs(**{kind: _schema(value, name)}, asked_as=name)


def _of_response_format(given: ResponseFormat) -> Iterator[StructuredOutputs]:
    name = "response_format"
    if given.json_schema is not None and given.type != "json_schema":
        raise bad_request(f"{name}: json_schema does not belong to type {given.type}", name)
    if given.schema is not None and given.type != "json_object":
        raise bad_request(f"{name}: schema belongs to type json_object", f"{name}.schema")
    if given.schema is not None:
        yield StructuredOutputs(json=_schema(given.schema, name), asked_as=name)
    elif given.type == "json_object":
        yield StructuredOutputs(json_object=True, asked_as=name)
    elif given.type == "json_schema":
        if given.json_schema is None:
            raise bad_request(f"{name}: type json_schema needs json_schema", f"{name}.json_schema")
        # `strict` is ignored: the schema is always enforced.
        yield StructuredOutputs(json=_schema(given.json_schema.schema, name), asked_as=name)


def _of_structured_outputs(given: StructuredBody) -> StructuredOutputs:
    name = "structured_outputs"
    return StructuredOutputs(
        json=_schema(given.json, name),
        json_object=bool(given.json_object),
        regex=given.regex,
        choice=None if given.choice is None else tuple(given.choice),
        grammar=given.grammar,
        asked_as=name,
    )


def _schema(value: Any, name: str) -> Any:
    """Returns a schema given as an object as text; any other value unchanged."""
    if not isinstance(value, dict):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise bad_request(f"{name}: the schema is not valid JSON", name) from None
