"""Checks that requests of several endpoints share. Each raises ApiError for a value that is not served."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from kvant.sampling.sampling_params import EMBEDDING
from kvant.server.api_error import ApiError, bad_request, shown
from kvant.server.config import Limits
from kvant.server.generation import Facts, Generation

_SALT = re.compile(r"[A-Za-z0-9_-]+")


def at_most(value: int, most: int, name: str, unit: str = "") -> int:
    """Returns `value`. Raises ApiError 400 if it exceeds `most`. unit: what is counted, for the error."""
    if value > most:
        raise bad_request(f"{name}: {value} {unit}".strip() + f"; the limit is {most}", name)
    return value


def check_model(name: str | None, facts: Facts) -> None:
    """Raises ApiError 404 for a model that is not served; None means the served model."""
    if name is not None and name not in facts.names:
        raise ApiError(
            404,
            f"the model {shown(name)!r} is not served here; served are: {', '.join(facts.names)}",
            param="model",
            code="model_not_found",
        )


def check_tokens(tokens: Sequence[int], name: str, facts: Facts) -> None:
    """Raises ApiError 400 for a token id outside the vocabulary. name: the field, for the error."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < facts.vocab_size):
        return  # fast, because there may be millions and the event loop waits
    token = next(token for token in tokens if not 0 <= token < facts.vocab_size)
    raise bad_request(
        f"{name} contains token {shown(str(token))}; ids go from 0 to {facts.vocab_size - 1}", name
    )


def check_task(generation: Generation, facts: Facts) -> None:
    """Raises ApiError 400 if an embedding engine should generate, or a generating one should embed."""
    embeds = generation.sampling == EMBEDDING
    if facts.pooling is not None and not embeds:
        raise bad_request(
            "this server gives embeddings and generates nothing: use /v1/embeddings, or start it with "
            "--task generate",
            generation.source,
        )
    if facts.pooling is None and embeds and generation.source == "input":
        raise bad_request(
            "this server generates text and gives no embeddings: serve an embedding model, or start it "
            "with --task embed",
            "model",
        )


def check_length(count: int, generation: Generation, name: str, facts: Facts) -> None:
    """Raises ApiError 400 if a prompt of `count` tokens and its max_tokens exceed the context."""
    if not count:
        raise bad_request(f"{name} has no tokens: there is nothing to go on from", name)
    wanted = 1 if generation.max_tokens is None else generation.max_tokens
    if count + wanted > facts.max_model_len:
        raise too_long(count, wanted, name, facts)


def too_long(count: int, wanted: int, name: str, facts: Facts) -> ApiError:
    """Returns the error for a prompt of `count` tokens and `wanted` new ones that exceed the context."""
    return bad_request(
        f"a sequence may have {facts.max_model_len} tokens here; the prompt has {count} "
        f"and {wanted} new ones are asked for",
        name,
        code="context_length_exceeded",
    )


def check_prompt_logprobs(prompts: list[tuple[int, ...]], wanted: Generation, most: int) -> None:
    """Raises ApiError 400 if the prompts' log-probabilities would be more than `most` values."""
    each = wanted.sampling.prompt_logprobs
    if each is None:
        return
    copies = wanted.n if wanted.stream else 1
    count = sum(len(prompt) for prompt in prompts) * (each + 1) * copies
    if count > most:
        name = "logprobs" if wanted.prompt_logprobs is None else "prompt_logprobs"
        raise bad_request(
            f"{name} of the prompt would return {count} values; the limit is {most}", name
        )


def needed(given: msgspec.Struct, field: str, where: str) -> str:
    """Returns a field's text. Raises ApiError 400 if it is None. where: the path of `given` in the body."""
    value = getattr(given, field)
    if value is None:
        raise bad_request(f"{where}.{field}: this field is required", f"{where}.{field}")
    assert isinstance(value, str)
    return value


def read_salt(given: str | None, limits: Limits) -> str:
    """Returns the client's salt, or "". Raises ApiError 400 for other characters or if it is too long."""
    if given is None:
        return ""
    if not _SALT.fullmatch(given) or len(given) > limits.cache_salt_chars:
        raise bad_request(
            f"cache_salt has 1 to {limits.cache_salt_chars} characters of A-Z a-z 0-9 _ -",
            "cache_salt",
        )
    return given


def check_metadata(given: Mapping[str, str] | None, limits: Limits) -> None:
    """Raises ApiError 400 if metadata, which has no other effect, exceeds the limits."""
    at_most(len(given or ()), limits.metadata_entries, "metadata", "entries")
    for key, value in (given or {}).items():
        at_most(len(key), limits.metadata_key_chars, "metadata", "characters of a key")
        at_most(len(value), limits.metadata_value_chars, "metadata", "characters of a value")
