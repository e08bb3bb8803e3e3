"""/v1/embeddings over HTTP, through OpenAI's own client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from transformers import AutoModel

from tests.server.harness import Server, build_model

EMBED = "/v1/embeddings"
TEXTS = ["hello", "a longer text about the sea", "x"]


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = build_model(tmp_path_factory.mktemp("embedding"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "is_matryoshka": True}))
    flags = ("--runner", "pooling", "--dtype", "float32", "--max-num-seqs", "4")
    with Server(path, flags) as server:
        yield server


def expected(path: Path, tokens: list[int]) -> Any:
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(torch.tensor([tokens])).last_hidden_state[0, -1].numpy()
    return hidden / np.linalg.norm(hidden)


def test_openais_client_gets_the_vectors_of_transformers(embedding: Server) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{embedding.port}/v1", api_key="x", max_retries=0)
    with client:
        model = client.models.list().data[0].id
        # The client asks for base64 unless it is told otherwise.
        texts = client.embeddings.create(model=model, input=TEXTS)
        tokens = [embedding.post("/tokenize", {"prompt": text}).json["tokens"] for text in TEXTS]
        ids = client.embeddings.create(model=model, input=tokens, encoding_format="float")
        one = client.embeddings.create(model=model, input=tokens[1], encoding_format="float")
        short = client.embeddings.create(model=model, input=TEXTS[1], dimensions=8)
    for index, (text, by_id) in enumerate(zip(texts.data, ids.data, strict=True)):
        assert text.index == by_id.index == index
        np.testing.assert_allclose(text.embedding, by_id.embedding, atol=1e-5)
        np.testing.assert_allclose(
            text.embedding, expected(embedding.model, tokens[index]), atol=1e-4
        )
    np.testing.assert_allclose(one.data[0].embedding, ids.data[1].embedding, atol=1e-5)
    whole = np.array(one.data[0].embedding[:8])
    np.testing.assert_allclose(short.data[0].embedding, whole / np.linalg.norm(whole), atol=1e-5)
    count = sum(map(len, tokens))
    assert texts.usage.prompt_tokens == texts.usage.total_tokens == count


def test_more_inputs_than_places_are_answered_in_order(embedding: Server) -> None:
    texts = [f"{number} {'a' * (number % 7)}" for number in range(60)]
    answer = embedding.post(EMBED, {"input": texts})
    assert answer.status == 200, answer.body
    found = answer.json["data"]
    assert [one["index"] for one in found] == list(range(60))
    (alone,) = embedding.post(EMBED, {"input": texts[41]}).json["data"]
    np.testing.assert_allclose(found[41]["embedding"], alone["embedding"], atol=1e-5)
    load = embedding.send("GET", "/load").json
    assert load["server_load"] == 0


def test_formats_and_lengths(embedding: Server) -> None:
    plain = embedding.post(EMBED, {"input": "hi", "normalize": False}).json["data"][0]["embedding"]
    text = embedding.post(EMBED, {"input": "hi", "encoding_format": "base64"}).json["data"][0]
    unit = np.frombuffer(base64.b64decode(text["embedding"]), "<f4")
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-5)
    assert np.linalg.norm(plain) != pytest.approx(1, abs=1e-2)
    np.testing.assert_allclose(unit, plain / np.linalg.norm(plain), atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [3] * 5000}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 4096}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"input": "a", "temperature": 1}, "temperature"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_its_field(
    embedding: Server, body: dict[str, Any], param: str
) -> None:
    answer = embedding.post(EMBED, body)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param


def test_a_server_that_embeds_generates_nothing(embedding: Server) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
    ):
        answer = embedding.post(path, body)
        assert answer.status == 400, path
        assert "/v1/embeddings" in answer.error["message"]
    tokens = embedding.post("/tokenize", {"prompt": "hi"})
    assert tokens.status == 200


def test_a_server_that_generates_names_the_way_to_embed(server: Server) -> None:
    answer = server.post(EMBED, {"input": "hi"})
    assert answer.status == 400
    assert "--task embed" in answer.error["message"]
