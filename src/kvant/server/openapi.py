"""/openapi.json: every endpoint, what it takes and everything it can answer.

Requests are described by the very models that read them, narrowed by what this server's limits and model
allow; so whatever fits the description is answered, unless two of its fields contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from kvant import __version__
from kvant.sampling.sampling_params import MAX_BAD_WORD_CHARS
from kvant.server.config import Limits
from kvant.server.openapi_answers import ANSWERS
from kvant.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from kvant.server.validate import Facts

_BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
_REF = "#/components/schemas/{model}"
_REASONS = {
    400: "The request is wrong; `param` names the field.",
    401: "No valid API key.",
    404: "No such model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    429: "The server is full; try again.",
    431: "The header is too large.",
    500: "The server failed on this request.",
    503: "Starting, draining or restarting; try again.",
}
_JSON = "application/json"


def document(limits: Limits, facts: Facts | None, *, has_keys: bool) -> dict[str, Any]:
    """The whole document. facts: None before the model is known; then its bounds are left out."""
    generates = (400, 404, 413, 429, 503)
    reads = (400, 404, 413, 503)
    paths: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "post": _operation(
                "Answer a conversation", _ok("ChatCompletion", events="ChatCompletionChunk"),
                generates, body="ChatBody",
            )
        },
        "/v1/completions": {
            "post": _operation(
                "Complete texts or token ids", _ok("Completion", events="CompletionChunk"),
                generates, body="CompletionBody",
            )
        },
        "/v1/models": {"get": _operation("What is served", _ok("ModelList"), (503,))},
        "/v1/models/{model}": {
            "get": _operation("One served model", _ok("Model"), (404, 503))
            | {
                "parameters": [
                    {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
                ]
            }
        },
        "/v1/kv/plan": {"get": _operation("The JSON of `kvant plan`", _ok("Plan"), (503,))},
        "/tokenize": {
            "post": _operation(
                "Token ids of a text or conversation", _ok("Tokens"), reads, body="TokenizeBody"
            )
        },
        "/detokenize": {
            "post": _operation("Text of token ids", _ok("Text"), reads, body="DetokenizeBody")
        },
        "/health": {
            "get": _operation("Whether the engine runs", _ok("State"), (), or_else={503: "State"})
        },
        "/ready": {
            "get": _operation("Whether requests are taken", _ok("State"), (), or_else={503: "State"})
        },
        "/metrics": {
            "get": _operation(
                "Prometheus metrics",
                {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}},
                (),
            )
        },
        "/version": {"get": _operation("The version", _ok("Version"), ())},
        "/openapi.json": {"get": _operation("This document", _ok("Any"), ())},
    }  # fmt: skip
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Kvant", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**ANSWERS, **_requests(limits, facts)}},
    }
    if has_keys:
        found["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
        found["security"] = [{"bearer": []}, {"key": []}]
        paths["/health"]["get"]["security"] = []
        for path, item in paths.items():
            for operation in item.values():
                if path != "/health":
                    operation["responses"]["401"] = _error(401)
    return found


def _operation(
    summary: str,
    ok: Mapping[str, Any],
    errors: Iterable[int],
    *,
    body: str | None = None,
    or_else: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    responses = {"200": ok}
    for status in (*errors, 431, 500, *((408,) if body else ())):
        responses[str(status)] = _error(status)
    for status, name in (or_else or {}).items():
        responses[str(status)] = {
            "description": "Not now.",
            "content": {_JSON: {"schema": _ref(name)}},
        }
    found: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        content = {_JSON: {"schema": _ref(body)}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _ok(name: str, *, events: str | None = None) -> dict[str, Any]:
    """An answer as JSON, and as a stream of server-sent events where `events` names what one carries."""
    content: dict[str, Any] = {_JSON: {"schema": _ref(name)}}
    if events is not None:
        data = {
            "type": "string",
            "contentMediaType": _JSON,
            "contentSchema": {"anyOf": [_ref(events), _ref("Error")]},
        }
        content["text/event-stream"] = {
            "schema": {
                "type": "object",
                "required": ["data"],
                "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
            }
        }
    return {"description": "The answer.", "content": content}


def _error(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": _REASONS[status],
        "content": {_JSON: {"schema": _ref("Error")}},
    }
    if status in (429, 503):
        seconds = {"type": "integer", "minimum": 1, "maximum": 60}
        found["headers"] = {"Retry-After": {"required": status == 429, "schema": seconds}}
    return found


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=name)}


# -- requests ----------------------------------------------------------------------------------


def _requests(limits: Limits, facts: Facts | None) -> dict[str, Any]:
    modes = [(body, "validation") for body in _BODIES]
    _, found = models_json_schema(modes, ref_template=_REF)  # type: ignore[arg-type]
    schemas: dict[str, Any] = found["$defs"]
    narrower = _narrower(limits, facts)
    for name, schema in schemas.items():
        schema.pop("description", None)
        for field, inner in schema.get("properties", {}).items():
            if field in narrower and not (name == "TokenizeBody" and field == "prompt"):
                _narrow(inner, narrower[field])
    schemas["TokenizeBody"] = _either(schemas["TokenizeBody"])
    return schemas


def _either(tokenize: dict[str, Any]) -> dict[str, Any]:
    """A text or a conversation, not both; special tokens can be asked for beside a text only."""
    forms = []
    for field, others in (
        ("prompt", {"messages": {"type": "null"}}),
        ("messages", {"prompt": {"type": "null"}, "add_special_tokens": {"enum": [False, None]}}),
    ):
        properties = {**tokenize["properties"], **others}
        (given,) = [form for form in properties[field]["anyOf"] if form.get("type") != "null"]
        form = {**tokenize, "properties": {**properties, field: given}, "required": [field]}
        forms.append(form)
    return {"anyOf": forms}


Keywords = Mapping[str, Mapping[str, Any]]
"""JSON type -> what is added to every schema of that type."""


def _narrower(limits: Limits, facts: Facts | None) -> dict[str, Keywords]:
    stop = {"minLength": 1, "maxLength": limits.stop_chars}
    logprobs = {"integer": {"maximum": limits.top_logprobs}}
    found: dict[str, Keywords] = {
        "n": {"integer": {"maximum": limits.n}},
        "best_of": {"integer": {"maximum": limits.n}},
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "prompt_logprobs": logprobs,
        "bad_words": {
            "string": {"minLength": 1, "maxLength": MAX_BAD_WORD_CHARS},
            "array": {"maxItems": limits.bad_words},
        },
        "guided_choice": {"string": {"minLength": 1}, "array": {"minItems": 1}},
        "stop": {"string": stop, "array": {"maxItems": limits.stops}},
        "cache_salt": {
            "string": {"pattern": "^[A-Za-z0-9_-]+$", "maxLength": limits.cache_salt_chars}
        },
        "messages": {"array": {"minItems": 1}},
        "metadata": {
            "object": {
                "maxProperties": limits.metadata_entries,
                "propertyNames": {"maxLength": limits.metadata_key_chars},
            },
            "string": {"maxLength": limits.metadata_value_chars},
        },
    }
    if facts is None:
        return found
    token = {"minimum": 0, "maximum": facts.vocab_size - 1}
    new = {"integer": {"maximum": facts.max_model_len - 1}}
    return {
        **found,
        "model": {"string": {"enum": list(facts.names)}},
        "max_tokens": new,
        "max_completion_tokens": new,
        "min_tokens": new,
        "stop_token_ids": {"integer": token},
        "allowed_token_ids": {"integer": token, "array": {"minItems": 1}},
        "logit_bias": {
            "object": {
                "maxProperties": limits.logit_bias,
                # Narrower than what is taken: every number of fewer digits is an id.
                "propertyNames": {"pattern": f"^[0-9]{{1,{len(str(facts.vocab_size)) - 1}}}$"},
            },
            "number": {"minimum": -100, "maximum": 100},
        },
        "tokens": {"integer": token},
        "prompt": {"integer": token, "string": {"minLength": 1}, "array": {"minItems": 1}},
    }


def _narrow(schema: dict[str, Any], keywords: Keywords) -> None:
    """Add keywords to a schema and to everything it is made of."""
    schema.update(keywords.get(schema.get("type", ""), {}))
    if "maximum" in schema:
        schema.pop("exclusiveMaximum", None)
    values = schema.get("additionalProperties")
    found = (schema.get("items"), values if isinstance(values, dict) else None)
    for inner in (*schema.get("anyOf", ()), *filter(None, found)):
        _narrow(inner, keywords)
