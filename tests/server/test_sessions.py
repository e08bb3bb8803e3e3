"""Sessions survive the server, and what follows them is what would have followed without a break."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.harness import Server

TALK = [{"role": "user", "content": "Tell me of the sea and of ships. " * 6}]
MORE = [
    *TALK,
    {"role": "assistant", "content": "The sea is wide."},
    {"role": "user", "content": "And of storms?"},
]


def flags(directory: Path, *more: str) -> tuple[str, ...]:
    offload = f"host:16MiB,disk:{directory}:64MiB"
    return ("--kv-offload", offload, "--batch-invariant", "--page-size", "8", *more)


def answer(server: Server, messages: list[dict[str, str]]) -> tuple[str, int]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, "logprobs": True}
    got = server.post("/v1/chat/completions", body)
    assert got.status == 200, got.body
    usage = got.json["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return json.dumps(got.json["choices"]), cached


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_session_survives_a_restart_bit_for_bit(ranks: int, model: Path, tmp_path: Path) -> None:
    given = ("-tp", str(ranks))
    with Server(model, flags(tmp_path, *given)) as server:
        answer(server, TALK)
        expected, _ = answer(server, MORE)
        saved = server.post("/v1/kv/sessions/ships", {"messages": MORE})
        assert saved.status == 200, saved.body
        card = saved.json
        assert card["saved_tokens"] == card["num_tokens"] // 8 * 8
        assert server.post("/v1/kv/sessions/boats", {"messages": TALK}).status == 200
        assert server.get("/v1/kv/sessions/none").error["code"] == "session_not_found"
        assert server.get("/v1/kv/sessions/..%2f..%2fx").status in (400, 404)
    with Server(model, flags(tmp_path, *given)) as server:
        listed = server.get("/v1/kv/sessions").json["data"]
        assert sorted(one["id"] for one in listed) == ["boats", "ships"]
        restored = server.get("/v1/kv/sessions/ships")
        assert restored.json["messages"] == MORE
        found, cached = answer(server, restored.json["messages"])
        assert found == expected
        assert cached >= card["saved_tokens"] - 8
        assert server.send("DELETE", "/v1/kv/sessions/ships").json["deleted"] is True
        assert [one["id"] for one in server.get("/v1/kv/sessions").json["data"]] == ["boats"]
        kept = (tmp_path / "sessions").rename(tmp_path / "kept")
        (tmp_path / "sessions").write_text("no directory")  # as a disk that cannot be written
        fault = server.post("/v1/kv/sessions/rafts", {"messages": TALK})
        assert (fault.status, fault.error["code"]) == (503, "sessions_unwritable")
        assert server.get("/health").status == 200
        assert answer(server, restored.json["messages"])[0] == expected
        (tmp_path / "sessions").unlink()
        kept.rename(tmp_path / "sessions")
    with Server(model, flags(tmp_path, *given, "--kv-cache-dtype", "fp8_per_token_head")) as server:
        fault = server.get("/v1/kv/sessions/boats")
        assert fault.status == 409
        assert fault.error["code"] == "session_foreign"
        assert "formats is" in fault.error["message"]


def test_without_files_there_are_no_sessions(strict: Server) -> None:
    for method, path in (("GET", "/v1/kv/sessions"), ("DELETE", "/v1/kv/sessions/a")):
        assert strict.send(method, path).error["code"] == "sessions_off"
