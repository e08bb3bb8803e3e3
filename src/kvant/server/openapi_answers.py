"""The schemas of answers, as JSON Schema."""

from __future__ import annotations

from typing import Any

_Schema = dict[str, Any]


def _object(optional: tuple[str, ...] = (), /, **properties: _Schema) -> _Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


def _or_null(schema: _Schema) -> _Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_STRING: _Schema = {"type": "string"}
_COUNT: _Schema = {"type": "integer", "minimum": 0}
_NUMBER: _Schema = {"type": "number"}
_REASON = _or_null(_STRING)
_STOP = {"anyOf": [_STRING, {"type": "integer"}, {"type": "null"}]}
_HEAD = {"id": _STRING, "created": _COUNT, "model": _STRING}
_LOGPROB = _object(token=_STRING, logprob=_NUMBER, bytes=_or_null(_list(_COUNT)))
_CHAT_LOGPROBS = _object(
    content=_list(
        {**_LOGPROB, "properties": {**_LOGPROB["properties"], "top_logprobs": _list(_LOGPROB)}}
    )
)
_LOGPROBS = _object(
    tokens=_list(_STRING),
    token_logprobs=_list(_or_null(_NUMBER)),
    top_logprobs=_or_null(_list({"anyOf": [{"type": "object"}, {"type": "null"}]})),
    text_offset=_list(_COUNT),
)

ANSWERS: dict[str, _Schema] = {
    "Any": {"type": "object"},
    "Error": _object(
        error=_object(
            message=_STRING, type=_STRING, param=_or_null(_STRING), code=_or_null(_STRING)
        )
    ),
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    "ChatCompletion": _object(
        **_HEAD,
        object={"const": "chat.completion"},
        choices=_list(
            _object(
                index=_COUNT,
                message=_object(role={"const": "assistant"}, content=_or_null(_STRING)),
                logprobs=_or_null(_CHAT_LOGPROBS),
                finish_reason=_REASON,
                stop_reason=_STOP,
            )
        ),
        usage=_ref("Usage"),
    ),
    "ChatCompletionChunk": _object(
        ("usage",),
        **_HEAD,
        object={"const": "chat.completion.chunk"},
        choices=_list(
            _object(
                index=_COUNT,
                delta={"type": "object"},
                logprobs=_or_null(_CHAT_LOGPROBS),
                finish_reason=_REASON,
            )
        ),
        usage=_or_null(_ref("Usage")),
    ),
    "Completion": _object(
        **_HEAD,
        object={"const": "text_completion"},
        choices=_list(
            _object(
                index=_COUNT,
                text=_STRING,
                logprobs=_or_null(_LOGPROBS),
                finish_reason=_REASON,
                stop_reason=_STOP,
            )
        ),
        usage=_ref("Usage"),
    ),
    "CompletionChunk": _object(
        ("usage",),
        **_HEAD,
        object={"const": "text_completion"},
        choices=_list(
            _object(index=_COUNT, text=_STRING, logprobs=_or_null(_LOGPROBS), finish_reason=_REASON)
        ),
        usage=_or_null(_ref("Usage")),
    ),
    "Model": _object(
        id=_STRING,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_STRING,
        root=_STRING,
        parent={"type": "null"},
        max_model_len=_COUNT,
        kv_cache=_object(
            stored_as=_STRING,
            bytes_per_token=_COUNT,
            capacity_tokens=_COUNT,
            page_size=_COUNT,
        ),
    ),
    "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Plan": _object(
        schema=_COUNT,
        model=_STRING,
        fingerprint=_STRING,
        page_size=_COUNT,
        target=_object(layers=_list({"type": "object"}), bytes_per_token=_COUNT),
    ),
    "Tokens": _object(
        ("token_strs",),
        count=_COUNT,
        max_model_len=_COUNT,
        tokens=_list(_COUNT),
        token_strs=_list(_or_null(_STRING)),
    ),
    "Text": _object(prompt=_STRING),
    "State": _object(status={"enum": ["starting", "ready", "restarting", "stopped", "draining"]}),
    "Version": _object(version=_STRING),
}
