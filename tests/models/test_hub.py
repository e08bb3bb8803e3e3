"""Models from a hub: what is fetched, what is kept, and what the user hears when it fails."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvant.models.hub import is_hub_id
from kvant.models.hub_transfer import _Meter
from tests.models.stub_hub import COMMIT, OLDER, StubHub, serve

REPO = "owner/model"
ROOT = Path(__file__).parents[2]


def safetensors(num_floats: int = 4096) -> bytes:
    entry = {"dtype": "F32", "shape": [num_floats], "data_offsets": [0, 4 * num_floats]}
    header = json.dumps({"w": entry}).encode()
    return struct.pack("<Q", len(header)) + header + os.urandom(4 * num_floats)


def model_files(**config: object) -> dict[str, bytes]:
    return {
        "config.json": json.dumps({"model_type": "llama", **config}).encode(),
        # All different: the cache keeps equal files once.
        "generation_config.json": b'{"is": "generation"}',
        "tokenizer.json": b'{"is": "tokenizer"}',
        "tokenizer_config.json": b'{"is": "tokenizer config"}',
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": safetensors(),
    }


NOT_NEEDED = {
    "README.md": b"#",
    "pytorch_model.bin": b"pickle" * 50,
    "pytorch_model.bin.index.json": b"{}",
    "consolidated.safetensors": b"twice" * 50,
    "model.gguf": b"GGUF",
    "onnx/model.onnx": b"onnx",
    "onnx/config.json": b"{}",
    "original/params.json": b"{}",
    "trainer_state.json": b"{}",
    "rust_model.ot": b"ot",
}

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Call `locate` in a fresh process against a stub hub and a cache of this test's own."""

    def run_locate(
        hub: StubHub, name: str = REPO, *, env: dict[str, str] | None = None, **options: object
    ) -> dict[str, Any]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        environment |= {
            "HF_HOME": str(tmp_path / "hf"),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "*",
            **(env or {}),
        }
        command = [sys.executable, "-m", "tests.models.hub_run", name, json.dumps(options)]
        done = subprocess.run(
            command,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        # Anything else on a stream would be a second progress bar or a stray warning.
        assert done.stderr == ""
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return run_locate


def unreachable() -> StubHub:
    return StubHub({}, url="http://127.0.0.1:9")  # the discard port: nothing listens


def test_only_the_files_a_model_needs_are_fetched(run: Run) -> None:
    files = model_files()
    with serve(StubHub({COMMIT: files | NOT_NEEDED})) as hub:
        found = run(hub)
    assert found["files"] == sorted(files)
    assert sorted(hub.fetched()) == sorted(files)
    assert found["revision"] == COMMIT
    assert found["source"] == "hub"
    assert Path(found["path"], "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_second_start_fetches_nothing(run: Run) -> None:
    with serve(StubHub({COMMIT: model_files()})) as hub:
        first = run(hub)
        hub.requests.clear()
        second = run(hub)
    assert hub.fetched() == []
    assert second["path"] == first["path"]


def test_of_sharded_weights_those_in_the_index_are_fetched(run: Run) -> None:
    files = model_files()
    del files["model.safetensors"]
    shards = {f"model-0000{i}-of-00002.safetensors": safetensors(8) for i in (1, 2)}
    index = {"metadata": {}, "weight_map": {f"w{i}": name for i, name in enumerate(shards)}}
    files |= {**shards, "model.safetensors.index.json": json.dumps(index).encode()}
    with serve(StubHub({COMMIT: files | NOT_NEEDED})) as hub:
        found = run(hub)
    assert found["files"] == sorted(files)


def test_a_plan_fetches_no_weights_and_imports_neither_torch_nor_transformers(run: Run) -> None:
    with serve(StubHub({COMMIT: model_files() | NOT_NEEDED})) as hub:
        found = run(hub, weights=False)
    assert found["files"] == ["config.json", "generation_config.json"]
    assert found["heavy"] == []


def test_all_transfers_together_have_one_progress_that_never_falls(run: Run) -> None:
    files = model_files()
    with serve(StubHub({COMMIT: files})) as hub:
        found = run(hub)
    tasks, done, totals = zip(*found["progress"], strict=True)
    assert set(tasks) == {f"Fetching {REPO}"}
    assert list(done) == sorted(set(done))
    assert set(totals) == {sum(map(len, files.values()))}
    assert done[-1] == totals[-1]


def test_bytes_that_a_new_attempt_sends_again_count_once() -> None:
    calls: list[tuple[str, int, int]] = []
    meter = _Meter("task", lambda *call: calls.append(call))
    meter.expect(100)
    bar = meter.bar_class("file")
    bar().update(60)
    bar(initial=40, total=100).update(30)  # 20 bytes had not reached the disk
    other = meter.bar_class("other")
    other(total=10).update(10)
    assert meter.done == 80
    assert calls == [("task", 60, 100), ("task", 70, 100), ("task", 80, 100)]


def test_a_broken_transfer_is_taken_up_where_it_broke(run: Run) -> None:
    # Larger than huggingface_hub's pieces of 10 MiB, which is the unit it takes up.
    files = model_files() | {"model.safetensors": safetensors(6 << 20)}
    with serve(StubHub({COMMIT: files}, breaks={"model.safetensors": 1})) as hub:
        found = run(hub)
    assert Path(found["path"], "model.safetensors").read_bytes() == files["model.safetensors"]
    assert hub.ranges("model.safetensors") == [None, f"bytes={10 << 20}-"]
    assert found["progress"][-1][1] == found["progress"][-1][2]


def test_a_server_that_stumbles_is_asked_again(run: Run) -> None:
    with serve(StubHub({COMMIT: model_files()}, fail_once={"model.safetensors": 503})) as hub:
        found = run(hub)
    assert "model.safetensors" in found["files"]


def test_a_transfer_that_keeps_breaking_ends_clearly_and_goes_on_later(run: Run) -> None:
    files = model_files()
    with serve(StubHub({COMMIT: files}, breaks={"model.safetensors": 1000})) as hub:
        failed = run(hub)
        assert failed["error"] == "ConfigError"
        assert failed["exit_code"] == 2
        assert "run the same command again" in failed["message"]
        hub.breaks.clear()
        hub.requests.clear()
        found = run(hub)
    assert set(hub.fetched()) == {"model.safetensors"}  # the small files had arrived
    assert Path(found["path"], "model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.parametrize("token", [None, "hf_wrong"])
def test_401_says_whether_a_token_is_set_and_never_shows_it(run: Run, token: str | None) -> None:
    with serve(StubHub({COMMIT: model_files()}, token="hf_right")) as hub:
        failed = run(hub, env={"HF_TOKEN": token} if token else None)
    assert failed["error"] == "ModelNotFound"
    assert failed["exit_code"] == 2
    assert "HTTP 401" in failed["message"]
    assert ("no token is set" in failed["message"]) == (token is None)
    assert "hf_wrong" not in failed["message"]


def test_hf_token_opens_a_private_model(run: Run) -> None:
    with serve(StubHub({COMMIT: model_files()}, token="hf_right")) as hub:
        found = run(hub, env={"HF_TOKEN": "hf_right"})
    assert found["revision"] == COMMIT


def test_a_gated_model_says_how_to_get_access(run: Run) -> None:
    with serve(StubHub({}, status=403, error_code="GatedRepo")) as hub:
        failed = run(hub)
    assert failed["error"] == "ModelNotFound"
    assert "gated" in failed["message"]
    assert "ask for access" in failed["message"]


def test_an_unknown_model_is_not_found(run: Run) -> None:
    with serve(StubHub({}, status=404, error_code="RepoNotFound")) as hub:
        failed = run(hub)
    assert failed["error"] == "ModelNotFound"
    assert failed["exit_code"] == 2
    assert REPO in failed["message"]
    assert f"the directory {REPO}" in failed["message"]


def test_an_unknown_revision_is_named(run: Run) -> None:
    with serve(StubHub({COMMIT: model_files()})) as hub:
        failed = run(hub, revision="v9")
    assert failed["error"] == "ModelNotFound"
    assert "'v9'" in failed["message"]


def test_a_pinned_revision_is_what_is_fetched(run: Run) -> None:
    old = model_files(note="old")
    with serve(
        StubHub({COMMIT: model_files(), OLDER: old}, refs={"main": COMMIT, "v1": OLDER})
    ) as hub:
        by_tag = run(hub, revision="v1")
        by_commit = run(hub, revision=OLDER)
    for found in (by_tag, by_commit):
        assert found["revision"] == OLDER
        assert Path(found["path"], "config.json").read_bytes() == old["config.json"]


def test_a_pinned_commit_in_the_cache_causes_no_traffic(run: Run) -> None:
    with serve(StubHub({COMMIT: model_files()})) as hub:
        run(hub)
        hub.requests.clear()
        run(hub, revision=COMMIT)
    assert hub.requests == []


@pytest.mark.parametrize("reason", ["HF_HUB_OFFLINE", "unreachable"])
def test_without_the_hub_the_cache_serves_and_says_so(run: Run, reason: str) -> None:
    with serve(StubHub({COMMIT: model_files()})) as hub:
        first = run(hub)
    env = {"HF_HUB_OFFLINE": "1"} if reason == "HF_HUB_OFFLINE" else {}
    found = run(unreachable(), env=env)
    assert found["path"] == first["path"]
    assert COMMIT in found["notes"][0]
    assert ("HF_HUB_OFFLINE is set" in found["notes"][0]) == (reason == "HF_HUB_OFFLINE")


def test_offline_without_a_cache_says_what_is_missing(run: Run) -> None:
    failed = run(unreachable(), env={"HF_HUB_OFFLINE": "1"})
    assert failed["error"] == "ModelNotFound"
    assert "HF_HUB_OFFLINE is set" in failed["message"]
    assert "nothing of it is in the cache" in failed["message"]


def test_offline_with_only_a_plans_files_plans_and_does_not_load(run: Run) -> None:
    with serve(StubHub({COMMIT: model_files()})) as hub:
        run(hub, weights=False)
    offline = {"HF_HUB_OFFLINE": "1"}
    assert run(unreachable(), env=offline, weights=False)["revision"] == COMMIT
    failed = run(unreachable(), env=offline)
    assert "the cache lacks model.safetensors" in failed["message"]


def test_remote_code_is_refused_before_any_weights_arrive(run: Run) -> None:
    files = model_files(auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})
    with serve(StubHub({COMMIT: files | {"modeling_x.py": b"print('ran')"}})) as hub:
        failed = run(hub)
        planned = run(hub, weights=False)
    assert failed["error"] == "BadCheckpoint"
    assert "auto_map" in failed["message"]
    assert not {"model.safetensors", "modeling_x.py"} & set(hub.fetched())
    assert "can be planned, not loaded" in planned["obstacles"][0]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "pytorch_model.bin"),
        ({"config.json": b"{}", "consolidated.safetensors": b"x"}, "consolidated.safetensors"),
        ({"model.Q4_K_M.gguf": b"x"}, "name the .gguf file"),
        ({"README.md": b"x"}, "no config.json"),
    ],
)
def test_a_repository_without_loadable_weights_is_refused_with_a_hint(
    run: Run, files: dict[str, bytes], expected: str
) -> None:
    with serve(StubHub({COMMIT: files})) as hub:
        failed = run(hub)
    assert failed["exit_code"] == 2
    assert expected in failed["message"]
    assert not {"pytorch_model.bin", "consolidated.safetensors"} & set(hub.fetched())


def test_an_index_that_points_elsewhere_is_refused(run: Run) -> None:
    index = json.dumps({"weight_map": {"w": "../../evil.safetensors"}}).encode()
    files = {"config.json": b"{}", "model.safetensors.index.json": index}
    with serve(StubHub({COMMIT: files})) as hub:
        failed = run(hub)
    assert failed["error"] == "BadCheckpoint"
    assert "evil.safetensors" in failed["message"]


def test_what_does_not_fit_on_the_disk_is_refused_before_it_is_fetched(
    run: Run,
) -> None:
    claimed = {"model.safetensors": 1 << 60}
    with serve(StubHub({COMMIT: model_files()}, claimed_sizes=claimed)) as hub:
        failed = run(hub)
    assert failed["error"] == "ConfigError"
    assert "not enough disk space" in failed["message"]
    assert "HF_HOME" in failed["message"]
    assert hub.fetched() == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-8B", True),
        ("a/b", True),
        ("smollm2", False),
        ("/abs/path", False),
        ("./rel/path", False),
        ("a/b/c", False),
        ("../b", False),
        ("a/b..c", False),
        ("a/", False),
        ("a/b\n", False),
    ],
)
def test_hub_ids_are_told_from_paths(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected
