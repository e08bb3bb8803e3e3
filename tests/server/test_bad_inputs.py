"""Every bad request is refused for itself, and the next good one never notices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.engine.tiny_chat import FILLING_VOCAB
from tests.server.bad_inputs import ANY, corpus
from tests.server.harness import MODEL_LEN, Server

CORPUS = corpus(FILLING_VOCAB, MODEL_LEN)


def test_the_corpus_is_as_wide_as_it_claims() -> None:
    assert len(CORPUS) >= 220
    families = Counter(bad.family for bad in CORPUS)
    assert len(families) >= 12
    assert min(families.values()) >= 5


@pytest.mark.parametrize("family", sorted({bad.family for bad in CORPUS}))
def test_bad_requests_are_refused_and_good_ones_go_on(server: Server, family: str) -> None:
    engine = server.engine_pid()
    golden = server.complete("abc", max_tokens=4).json["choices"]
    wrong = []
    for bad in (bad for bad in CORPUS if bad.family == family):
        answer = server.send(bad.method, bad.path, bad.body, bad.headers)
        error = answer.error
        named = bad.param in (ANY, error["param"]) or (error["param"] or "").startswith(
            (f"{bad.param}[", f"{bad.param}.")
        )
        if answer.status != bad.status or not named:
            wrong.append((bad.name, bad.path, answer.status, error))
        assert len(answer.body) < 2000, "the input is not repeated"
        assert server.complete("abc", max_tokens=4).json["choices"] == golden
    assert wrong == []
    assert server.engine_pid() == engine


def test_odd_but_good_requests_are_answered(server: Server) -> None:
    """The control: the corpus is refused for what it says, not for being odd."""
    for prompt in ("a\0b", "\u202eabc", "\u0301" * 20, "<|im_end|>", "\U0001f600" * 10):
        assert server.complete(prompt, max_tokens=2).status == 200
    neutral: dict[str, Any] = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop": None,
        "logit_bias": {}, "tools": [], "n": 1, "best_of": 1, "echo": False, "user": "x",
        "response_format": {"type": "text"}, "logprobs": None, "max_completion_tokens": 2,
        "bad_words": [], "allowed_token_ids": None, "structured_outputs": None, "guided_json": None,
        "max_tokens": 2, "min_tokens": 2, "top_k": -1, "seed": -(2**63), "temperature": 2,
    }  # fmt: skip
    assert server.complete("abc", **neutral).status == 200
    assert server.complete([3] * (MODEL_LEN - 1), max_tokens=1).status == 200
    assert server.complete("abc", stop=["x" * 256] * 16, max_tokens=1).status == 200
    assert server.complete("abc", cache_salt="x" * 256, max_tokens=1).status == 200
    assert server.complete("abc", logprobs=20, max_tokens=1).status == 200
