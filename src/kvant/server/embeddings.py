"""/v1/embeddings: each input runs as a prompt, and the answer is its last hidden state."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from kvant.sampling.sampling_params import EMBEDDING
from kvant.server import wire
from kvant.server.answers import Call, as_json, unless_disconnected
from kvant.server.api_error import ApiError, bad_request
from kvant.server.config import Limits
from kvant.server.parameters import EMBEDDINGS
from kvant.server.requests import (
    Facts,
    Generation,
    check_model,
    check_task,
    parse,
    read_prompts,
    read_salt,
    renamed,
)
from kvant.server.unserved import refuse_unserved

MOST_INPUTS = 2048
"""Most inputs of one request, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A parsed request for embeddings. generation: runs its inputs as prompts."""

    generation: Generation
    body: wire.EmbeddingBody


async def embed(call: Call) -> Response:
    """Answers /v1/embeddings."""
    service = call.service
    limits = service.config.limits
    wanted = await call.read(lambda data: read_embedding(data, limits, service.require()))
    return await unless_disconnected(call.receive, _answer(call, wanted))


def read_embedding(data: bytes, limits: Limits, facts: Facts) -> Wanted:
    """Parses and checks a body of /v1/embeddings. Raises ApiError."""
    body, raw = parse(data, wire.EmbeddingBody)
    refuse_unserved(raw, wire.EmbeddingBody, EMBEDDINGS)
    check_model(body.model, facts)
    try:
        prompts = read_prompts(body.input, replace(limits, prompts=MOST_INPUTS), facts)
    except ApiError as fault:
        raise renamed(fault, {"prompt": "input"}) from None
    found = Generation(
        prompts=prompts, conversation=None, sampling=EMBEDDING, stream=False, include_usage=False,
        continuous_usage=False, salt=read_salt(body.cache_salt, limits), max_tokens=0, echo=False,
        prompt_logprobs=None, special_tokens=body.add_special_tokens, token_ids=False,
        tokens_as_ids=False, request_id=body.request_id, source="input",
    )  # fmt: skip
    check_task(found, facts)
    assert facts.pooling is not None
    if body.dimensions is not None and not facts.pooling.allows(body.dimensions):
        raise bad_request(facts.pooling.refusal(body.dimensions), "dimensions")
    return Wanted(found, body)


async def _answer(call: Call, wanted: Wanted) -> Response:
    service, generation, body = call.service, wanted.generation, wanted.body
    # Run the inputs in parts, so that a request takes at most half of the places.
    size = max(1, service.admission.capacity // 2)
    hidden: list[bytes] = []
    num_tokens = 0
    for begin in range(0, len(generation.prompts), size):
        part = replace(generation, prompts=generation.prompts[begin : begin + size])
        running = await service.open(part, key=call.key, counted=call.counted)
        try:
            async for _ in service.events(running):
                pass
        finally:
            service.close(running)
        num_tokens += running.num_prompt_tokens
        for sequence in running.sequences.values():
            assert sequence.ended is not None
            assert sequence.ended.hidden is not None
            hidden.append(sequence.ended.hidden)
    pooling = service.require().pooling
    assert pooling is not None

    def written() -> Response:
        normalize = body.normalize is not False
        vectors = [pooling.vector(one, body.dimensions, normalize=normalize) for one in hidden]
        as_text = body.encoding_format == "base64"
        return as_json(
            wire.EmbeddingList(
                data=[
                    wire.Embedding(index, _shown(one, as_text)) for index, one in enumerate(vectors)
                ],
                model=service.config.served_names[0],
                usage=wire.EmbeddingUsage(num_tokens, num_tokens),
            )
        )

    return await asyncio.to_thread(written)  # an answer may have millions of numbers


def _shown(vector: NDArray[np.float32], as_text: bool) -> list[float] | str:
    if as_text:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    found: list[float] = vector.tolist()
    return found
