"""The ways in which clients ask for a form: OpenAI's response_format, vLLM's two generations of names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvant.errors import RequestError
from kvant.sampling.structured_outputs import FormLimits, StructuredOutputs
from kvant.server.api_error import bad_request, of_request
from kvant.server.protocol import GenerationBody, ResponseFormat, StructuredBody
from kvant.server.unsupported import IN_STRUCTURED_OUTPUTS, refuse_unsupported


def read_structured(body: GenerationBody, limits: FormLimits) -> StructuredOutputs | None:
    """The form that the body asks for, checked for its size. ApiError 400 where it asks for two."""
    try:
        forms = list(_asked(body))
    except RequestError as fault:
        raise of_request(fault) from None
    if not forms:
        return None
    if len(forms) > 1:
        names = " and ".join(form.asked_as for form in forms)
        raise bad_request(f"{names} are ways to say one thing: give one", forms[1].asked_as)
    try:
        forms[0].require_within(limits)
    except RequestError as fault:
        raise of_request(fault) from None
    return forms[0]


def _asked(body: GenerationBody) -> Iterator[StructuredOutputs]:
    if body.response_format is not None:
        yield from _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        yield _of_structured_outputs(body.structured_outputs)
    if body.guided_json is not None:
        yield StructuredOutputs(json=_text(body.guided_json, "guided_json"), asked_as="guided_json")
    if body.guided_regex is not None:
        yield StructuredOutputs(regex=body.guided_regex, asked_as="guided_regex")
    if body.guided_choice is not None:
        yield StructuredOutputs(choice=tuple(body.guided_choice), asked_as="guided_choice")
    if body.guided_grammar is not None:
        yield StructuredOutputs(grammar=body.guided_grammar, asked_as="guided_grammar")


def _of_response_format(given: ResponseFormat) -> Iterator[StructuredOutputs]:
    name = "response_format"
    if given.json_schema is not None and given.type != "json_schema":
        raise bad_request(f"{name}: json_schema does not belong to type {given.type}", name)
    if given.type == "json_object":
        yield StructuredOutputs(json_object=True, asked_as=name)
    elif given.type == "json_schema":
        if given.json_schema is None:
            raise bad_request(f"{name}: type json_schema needs json_schema", f"{name}.json_schema")
        # Always strict: an answer that breaks its schema is of no use to anybody.
        yield StructuredOutputs(json=_text(given.json_schema.schema_, name), asked_as=name)


def _of_structured_outputs(given: StructuredBody) -> StructuredOutputs:
    name = "structured_outputs"
    unknown = refuse_unsupported(given.model_extra, IN_STRUCTURED_OUTPUTS, where=f"{name}.")
    if unknown:
        raise bad_request(f"{name} has no such form; known: {', '.join(_FORMS)}", name)
    return StructuredOutputs(
        json=None if given.json_ is None else _text(given.json_, name),
        json_object=bool(given.json_object),
        regex=given.regex,
        choice=None if given.choice is None else tuple(given.choice),
        grammar=given.grammar,
        asked_as=name,
    )


_FORMS = ("json", "json_object", "regex", "choice", "grammar")


def _text(schema: str | dict[str, Any], name: str) -> str:
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise bad_request(f"{name}: the schema holds a number that is none", name) from None
