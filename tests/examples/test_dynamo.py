"""The example of a Dynamo backend, under Dynamo's own runtime and behind its frontend.

Dynamo wants an environment of its own that also has Kvant: `pip install kvant ai-dynamo uvloop`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvant import LLM, SamplingParams
from tests.server.harness import build_model

if importlib.util.find_spec("dynamo") is None:
    pytest.skip("ai-dynamo is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "examples" / "dynamo" / "kvant_worker.py"
SECONDS = 180.0
PROMPT = "one prompt whose beginning fills several pages of the cache, word by word by word"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def worker() -> Any:
    spec = importlib.util.spec_from_file_location("kvant_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kvant_worker"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


class Context:
    def __init__(self, id: str) -> None:
        self._id = id

    def id(self) -> str:
        return self._id


@dataclass
class Publisher:
    """What the worker publishes. parents: of stored hashes."""

    parents: dict[int, int | None] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def publish_stored(
        self, tokens: list[int], counts: list[int], hashes: list[int], parent: int | None = None
    ) -> None:
        assert counts == [len(tokens)]
        (digest,) = hashes
        self.parents[digest], self.tokens[digest] = parent, tokens

    def publish_removed(self, hashes: list[int]) -> None:
        for digest in hashes:
            del self.parents[digest]


def test_flags_are_options_and_parameters_are_read_or_refused(worker: Any) -> None:
    read = worker.read_options(["--max-num-seqs", "4", "--batch-invariant", "--seed", "7"])
    assert read == {"max_num_seqs": 4, "batch_invariant": True, "seed": 7}
    otherwise = SamplingParams(temperature=0.5, top_k=3)
    request = {
        "token_ids": [1],
        "sampling_options": {"temperature": 0.1, "top_k": None, "n": 1, "unknown": 2},
        "stop_conditions": {"max_tokens": 5, "stop": ["x"], "stop_token_ids_hidden": [9, 9]},
        "output_options": {"logprobs": 2},
    }
    found = worker.read_params(request, otherwise)
    assert (found.temperature, found.top_k, found.max_tokens) == (0.1, 3, 5)
    assert (found.stop, found.stop_token_ids, found.logprobs) == ((), (9,), 2)
    for wrong in ({"n": 2}, {"guided_decoding": {"json": {}}}, {"temperature": -1.0}):
        with pytest.raises(worker.RequestError):
            worker.read_params({"token_ids": [1], "sampling_options": wrong}, otherwise)
    with pytest.raises(worker.RequestError):
        worker.read_params({"token_ids": [1], "prefill_result": {"a": 1}}, otherwise)


def test_the_engine_answers_as_llm_does_publishes_its_pages_and_cancels(
    worker: Any, model: Path
) -> None:
    options = {"device": "cpu", "kv_cache_memory": "4MiB", "max_num_seqs": 1}
    prompt = list(range(5, 69))
    request = {
        "token_ids": prompt,
        "sampling_options": {"temperature": 0.0},
        "stop_conditions": {"max_tokens": 12, "ignore_eos": True},
        "output_options": {"logprobs": 2},
    }
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = LLM(str(model), **options).generate([prompt], params)[0].token_ids

    async def run() -> None:
        engine = worker.KvantEngine(str(model), "m", options)
        publisher = Publisher()
        try:
            config = await engine.start(1)
            assert config.llm is not None
            page = config.llm.kv_cache_block_size
            (source,) = await engine.kv_event_sources()
            source.on_ready(publisher)
            chunks = [chunk async for chunk in engine.generate(request, Context("a"))]
            assert tuple(t for chunk in chunks for t in chunk["token_ids"]) == expected
            assert [len(c.get("log_probs", ())) for c in chunks] == [
                len(c["token_ids"]) for c in chunks
            ]
            assert chunks[-1]["finish_reason"] == "length"
            again = [chunk async for chunk in engine.generate(request, Context("b"))]
            details = again[-1]["completion_usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] >= len(prompt) - page
            # One sequence runs at once: the second request waits for the end of the first.
            endless = {**request, "stop_conditions": {"max_tokens": 4000, "ignore_eos": True}}
            first = engine.generate(endless, Context("c"))
            await anext(first)
            await engine.abort(Context("c"))
            rest = [chunk async for chunk in first]
            assert rest[-1]["finish_reason"] == "cancelled"
            assert sum(len(chunk["token_ids"]) for chunk in rest) < 3000
        finally:
            await engine.cleanup()
            await engine.cleanup()
        chain = [digest for digest, parent in publisher.parents.items() if parent is None]
        assert len(chain) == 1
        told: list[int] = []
        while chain:
            told += publisher.tokens[chain[0]]
            chain = [one for one, parent in publisher.parents.items() if parent == chain[0]]
            chain = chain[:1]
        assert told[: len(prompt)] == prompt

    asyncio.run(run())


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def frontend(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of Dynamo's frontend with one worker."""
    directory = tmp_path_factory.mktemp("dynamo")
    loopback = (
        "DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST",
        "DYN_SYSTEM_HOST",
    )  # fmt: skip
    env = {
        **os.environ, **dict.fromkeys(loopback, "127.0.0.1"), "OMP_NUM_THREADS": "1",
        "DYN_FILE_KV": str(directory), "HOME": str(directory),
    }  # fmt: skip
    port = _free_port()
    commands = (
        ["-m", "dynamo.frontend", "--discovery-backend", "file", "--router-mode", "kv",
         "--http-host", "127.0.0.1", "--http-port", str(port)],
        [str(WORKER), str(model), "--served-model-name", "llama", "--discovery-backend", "file",
         "--device", "cpu", "--kv-cache-memory", "4MiB", "--max-num-seqs", "1"],
    )  # fmt: skip
    processes = []
    for number, command in enumerate(commands):
        with (directory / f"log{number}").open("wb") as log:
            processes.append(
                subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, env=env)
            )
    try:
        end = time.monotonic() + SECONDS
        while "llama" not in _send(port, "/v1/models")[1]:
            assert all(one.poll() is None for one in processes)
            assert time.monotonic() < end
            time.sleep(0.5)
        yield port
        processes[1].terminate()
        assert processes[1].wait(30) == 0
    finally:
        for one in processes:
            one.terminate()
            try:
                one.wait(10)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def _send(port: int, path: str, body: object = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(sent, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as fault:
        with fault:
            return fault.code, fault.read().decode()
    except OSError as fault:
        return 0, str(fault)


def test_requests_through_dynamos_frontend(frontend: int) -> None:
    body = {"model": "llama", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    status, first = _send(frontend, "/v1/completions", body)
    assert status == 200, first
    _, second = _send(frontend, "/v1/completions", body)
    answers = [json.loads(text) for text in (first, second)]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    talk = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4,
            "stream": True}  # fmt: skip
    status, stream = _send(frontend, "/v1/chat/completions", talk)
    assert (status, stream.rstrip().endswith("data: [DONE]")) == (200, True)
    status, refused = _send(frontend, "/v1/completions", {**body, "n": 2})
    assert status >= 400, refused
