"""/openapi.json, generated from the table of routes and the types of `kvant.server.wire`.

The server's limits and its model narrow the types. A request that fits the document is served, unless two of
its fields contradict each other.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvant import __version__
from kvant.sampling.sampling_params import MAX_BAD_WORD_CHARS, PARAMS
from kvant.server.config import Limits
from kvant.server.parameters import INSIDE, Inside, Table
from kvant.server.requests import Facts
from kvant.server.unserved import objects_within

if TYPE_CHECKING:
    from kvant.server.answers import Endpoint

_REF = "#/components/schemas/{name}"
_REASONS = {
    400: "The request is wrong; `param` names the field.",
    401: "No valid API key.",
    403: "A web page of another origin.",
    404: "No such model.",
    408: "The request did not arrive in time.",
    409: "It belongs to another engine.",
    413: "The body is too large.",
    429: "The server is full; try again.",
    431: "The header is too large.",
    500: "The server failed on this request.",
    503: "Starting, draining or restarting; try again.",
}
_JSON = "application/json"
_EMPTY_PROMPTS = ("TokenizeBody", "InfillBody")
"""Body types whose prompt may be empty."""


def document(
    endpoints: Iterable[Endpoint], limits: Limits, facts: Facts | None, *, has_keys: bool
) -> dict[str, Any]:
    """Returns the document. facts: None before the model is known; the model's bounds are missing then."""
    paths: dict[str, dict[str, Any]] = {}
    types: list[type] = []
    tables: dict[str, Table] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, has_keys=has_keys)
        item = paths.setdefault(endpoint.path, {})
        item[endpoint.method.lower()] = operation
        if names := re.findall(r"{(\w+)}", endpoint.path):
            item["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        if endpoint.body is not None:
            tables[endpoint.body.__name__] = endpoint.parameters
        types += filter(None, (endpoint.body, endpoint.answer, endpoint.event, endpoint.fault[0]))
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Kvant", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(types, tables, limits, facts)},
    }
    if has_keys:
        found["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
        found["security"] = [{"bearer": []}, {"key": []}]
    return found


def _operation(endpoint: Endpoint, *, has_keys: bool) -> dict[str, Any]:
    statuses = {*endpoint.errors, 431, 500, 401 if has_keys else 403}
    if endpoint.body is not None:
        statuses.add(408)
    if endpoint.is_open:
        statuses.discard(401)
    responses = {"200": _ok(endpoint)}
    name = endpoint.fault[0].__name__
    responses |= {str(status): _error(status, name) for status in sorted(statuses)}
    if endpoint.not_now:
        responses["503"] = {**_ok(endpoint), "description": "Not now."}
    found: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.body is not None:
        content = {_JSON: {"schema": _ref(endpoint.body.__name__)}}
        found["requestBody"] = {"required": True, "content": content}
    if has_keys and endpoint.is_open:
        found["security"] = []
    return found


def _ok(endpoint: Endpoint) -> dict[str, Any]:
    """Returns the success response: JSON or text, and server-sent events if the endpoint has a stream."""
    if endpoint.answer is None:
        text = {endpoint.text: {"schema": {"type": "string"}}}
        return {"description": "The answer.", "content": text}
    schema: dict[str, Any] = _ref(endpoint.answer.__name__)
    if endpoint.is_list:
        schema = {"type": "array", "items": schema}
    content: dict[str, Any] = {_JSON: {"schema": schema}}
    if endpoint.event is not None:
        data = {
            "type": "string",
            "contentMediaType": _JSON,
            "contentSchema": {
                "anyOf": [_ref(endpoint.event.__name__), _ref(endpoint.fault[0].__name__)]
            },
        }
        content["text/event-stream"] = {
            "schema": {
                "type": "object",
                "required": ["data"],
                "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
            }
        }
    return {"description": "The answer.", "content": content}


def _error(status: int, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": _REASONS[status],
        "content": {_JSON: {"schema": _ref(name)}},
    }
    if status in (429, 503):
        seconds = {"type": "integer", "minimum": 1, "maximum": 60}
        found["headers"] = {"Retry-After": {"required": status == 429, "schema": seconds}}
    return found


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


# -- schemas -----------------------------------------------------------------------------------


def _schemas(
    types: list[type], tables: Mapping[str, Table], limits: Limits, facts: Facts | None
) -> dict[str, Any]:
    """Returns all schemas. tables: by body.

    A body allows its own fields and fields without effect. So does an object in it, unless it is sent back as
    a server gave it, or may have fields that are refused by their values.
    """
    _, found = msgspec.json.schema_components(types, ref_template=_REF)
    schemas = copy.deepcopy(found)  # parts of it are the types' own
    bodies = {name: schema for name, schema in schemas.items() if name.endswith("Body")}
    inner = {
        one.__name__ for kind in types if kind.__name__ in tables for one in objects_within(kind)
    }
    narrower = _narrower(limits, facts)
    for name, schema in schemas.items():
        schema.pop("description", None)
        schema.pop("title", None)
        inside = INSIDE.get(name, Inside())
        if name in inner and not (inside.is_history or inside.refused or inside.types):
            _close(schema, inside.no_effect)
        if name not in bodies:
            continue
        for field, value in schema["properties"].items():
            value.pop("default", None)
            keywords = narrower.get(f"{name}.{field}", narrower.get(field))
            if keywords is not None and not (name in _EMPTY_PROMPTS and field == "prompt"):
                _narrow(value, keywords)
        if name in tables:
            _close(schema, tables[name].no_effect)
    schemas["TokenizeBody"] = _either(schemas["TokenizeBody"])
    return schemas


def _close(schema: dict[str, Any], no_effect: Iterable[str]) -> None:
    """Allows an object's own fields, and fields without effect, alone."""
    schema["properties"] |= {field: {} for field in no_effect}
    schema["additionalProperties"] = False


def _either(tokenize: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of /tokenize's body: either a prompt or messages, not both."""
    forms = []
    for field, others in (
        ("prompt", {"messages": {"type": "null"}}),
        ("messages", {"prompt": {"type": "null"}}),
    ):
        properties = {**tokenize["properties"], **others}
        (given,) = [form for form in properties[field]["anyOf"] if form.get("type") != "null"]
        form = {**tokenize, "properties": {**properties, field: given}, "required": [field]}
        forms.append(form)
    return {"anyOf": forms}


Keywords = Mapping[str, Mapping[str, Any]]
"""JSON type -> keywords that are added to every schema of that type."""


def _narrower(limits: Limits, facts: Facts | None) -> dict[str, Keywords]:
    stop = {"minLength": 1, "maxLength": limits.stop_chars}
    logprobs = {"integer": {"maximum": limits.top_logprobs}}
    found: dict[str, Keywords] = {
        "n": {"integer": {"maximum": limits.n}},
        "best_of": {"integer": {"maximum": limits.n}},
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "prompt_logprobs": logprobs,
        "bad_words": {"string": {"minLength": 1, "maxLength": MAX_BAD_WORD_CHARS}},
        "guided_choice": {"string": {"minLength": 1}, "array": {"minItems": 1}},
        "stop": {"string": stop},
        "stop_sequences": {"string": stop, "array": {"maxItems": limits.stop}},
        "input": {"array": {"minItems": 1}},
        "cache_salt": {
            "string": {"pattern": "^[A-Za-z0-9_-]+$", "maxLength": limits.cache_salt_chars}
        },
        "messages": {"array": {"minItems": 1}},
        "request_id": {"string": {"pattern": "^[!-~]{1,128}$"}},
        "metadata": {
            "object": {
                "maxProperties": limits.metadata_entries,
                "propertyNames": {"maxLength": limits.metadata_key_chars},
            },
            "string": {"maxLength": limits.metadata_value_chars},
        },
    }
    if facts is None:
        return _with_declared(found, limits, None)
    token = {"minimum": 0, "maximum": facts.vocab_size - 1}
    new = {"integer": {"maximum": facts.max_model_len - 1}}
    found = {
        **found,
        "model": {"string": {"enum": list(facts.names)}},
        "max_tokens": new,
        "max_completion_tokens": new,
        "max_output_tokens": new,
        "n_predict": {"integer": {"maximum": facts.max_model_len - 1, "not": {"const": 0}}},
        "InfillBody.n_predict": new,
        "min_tokens": new,
        "allowed_token_ids": {"array": {"minItems": 1}},
        "tokens": {"integer": token},
        "prompt": {"integer": token, "string": {"minLength": 1}, "array": {"minItems": 1}},
    }
    return _with_declared(found, limits, token)


def _with_declared(
    narrower: Mapping[str, Keywords], limits: Limits, token: Mapping[str, int] | None
) -> dict[str, Keywords]:
    """Adds what sampling parameters declare: the number of items, and token ids. token: their bounds."""
    found: dict[str, Keywords] = dict(narrower)
    for name, param in PARAMS.items():
        own: dict[str, dict[str, Any]] = {"array": {}, "object": {}}
        if param.items:
            most = limits.items_of(name)
            own = {"array": {"maxItems": most}, "object": {"maxProperties": most}}
        if param.is_tokens and token is not None:
            own["integer"] = dict(token)
            # Narrower than what the server accepts: all numbers with fewer digits are token ids.
            digits = len(str(token["maximum"] + 1)) - 1
            own["object"]["propertyNames"] = {"pattern": f"^[0-9]{{1,{digits}}}$"}
            own["number"] = {"minimum": param.low, "maximum": param.high}
        stated = found.get(name, {})
        found[name] = {
            kind: {**stated.get(kind, {}), **own.get(kind, {})} for kind in {*stated, *own}
        }
    return found


def _narrow(schema: dict[str, Any], keywords: Keywords) -> None:
    """Adds keywords to a schema and its parts, in place."""
    schema.update(keywords.get(schema.get("type", ""), {}))
    if "maximum" in schema:
        schema.pop("exclusiveMaximum", None)
    values = schema.get("additionalProperties")
    found = (schema.get("items"), values if isinstance(values, dict) else None)
    for inner in (*schema.get("anyOf", ()), *filter(None, found)):
        _narrow(inner, keywords)
