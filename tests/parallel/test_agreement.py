"""Ranks hold the scales of their heads, and agree on one plan before they read weights."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvant.errors import EngineFault, RankLost
from kvant.kv.format import Side
from kvant.models import load
from kvant.models.sharding.shard import Shard
from kvant.parallel import rank_process, ranks, team
from kvant.parallel.agreement import plan_fingerprint
from kvant.parallel.messages import Failed, Start, encode, read_from_rank
from kvant.plan.config import config_of
from tests.models import tiny
from tests.models.tiny_quantized import build_quantized
from tests.parallel.test_equality import make, tokens
from tests.parallel.test_plan import plan
from tests.parallel.together import ThreadGroup, _Meeting

KV_HEADS, LAYERS = 2, 4


def scale(layer: int, side: str, head: int) -> float:
    """Returns a scale that differs by layer, side and head, by up to 40 times between heads."""
    return {"k": 0.04, "v": 0.02}[side] * 1.1**layer * (40.0, 1.0)[head]


@pytest.fixture
def per_head(tmp_path: Path) -> Path:
    """A tiny Llama with float8 KV scales for each of its two KV heads."""
    pytest.importorskip("compressed_tensors")
    return with_scales(tmp_path, scale)


def with_scales(directory: Path, scale: Callable[[int, str, int], float]) -> Path:
    path, _ = build_quantized(directory, weights=False)
    stored = load_file(path / "model.safetensors")
    for layer in range(LAYERS):
        for side in "kv":
            values = [scale(layer, side, head) for head in range(KV_HEADS)]
            name = f"model.layers.{layer}.self_attn.{side}_scale"
            stored[name] = torch.tensor(values).view(KV_HEADS, 1, 1)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"]["strategy"] = "attn_head"
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.case("A52")
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_the_scales_of_its_heads(size: int, per_head: Path) -> None:
    planned = plan(per_head, size)
    for rank in range(size):
        model = load.load_model(
            per_head, planned.target.kv, planned.target.geometry, planned.forward,
            device=torch.device("cpu"), group=ThreadGroup(Shard(rank, size), _Meeting(size)),
        )  # fmt: skip
        head = rank * KV_HEADS // size  # four ranks store each head twice
        for layer in range(LAYERS):
            for side in Side:
                found = model.scales[layer, side].tolist()
                assert found == pytest.approx([scale(layer, side.value, head)])


@pytest.mark.case("A52")
@pytest.mark.parametrize("size", [2, 4])
def test_scales_of_heads_give_the_tokens_of_one_rank(
    size: int, per_head: Path, tmp_path: Path
) -> None:
    many, one = make(per_head, size), make(per_head, 1)
    expected = tokens(one)
    assert tokens(many) == expected
    assert len(many.engine.runner.pool[0].k_scale) == 1  # type: ignore[attr-defined]
    turned = with_scales(tmp_path / "turned", lambda a, b, head: scale(a, b, 1 - head))
    assert tokens(make(turned, 1)) != expected, "tokens tell whose scales were used"


@pytest.mark.case("A53")
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8"}, {"page_size": 32},
        {"batch_invariant": True}, {"attention_backend": "reference"}, {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": "0"},
    ],
    ids=str,
)  # fmt: skip
def test_the_hash_tells_plans_apart(options: dict[str, Any], tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    base = {"dtype": "float32"}
    assert plan_fingerprint(plan(path, 2, **base)) != plan_fingerprint(
        plan(path, 2, **{**base, **options})
    )


@pytest.mark.case("A53")
def test_the_hash_is_that_of_ranks_and_not_of_memory(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    of_two = plan_fingerprint(plan(path, 2))
    assert of_two == plan_fingerprint(plan(path, 2, kv_cache_memory="3MiB"))
    assert of_two != plan_fingerprint(plan(path, 4))


@pytest.mark.case("A53")
def test_a_rank_compares_plans_before_it_reads_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.build("llama", tmp_path)
    options = {"tensor_parallel_size": 2, "device": "cpu", "dtype": "float32"}
    config = config_of(path, options)
    right = plan_fingerprint(plan(path, 2, dtype="float32"))
    read: list[Path] = []

    def load_model(path: Path, *_: object, **__: object) -> None:
        read.append(path)
        raise EngineFault("weights are read")

    monkeypatch.setattr(load, "load_model", load_model)
    for sent, says in (("0" * 32, "another plan"), (right, "weights are read")):
        ours, its = socket.socketpair()
        memory = os.memfd_create("steps")
        link = Connection(ours.detach())
        reduction.send_handle(link, memory, os.getpid())
        start = Start(config.settings, Shard(1, 2), sent, 8, 8, None, str(tmp_path), 1)
        link.send_bytes(encode(start))
        with pytest.raises(EngineFault, match=says):
            rank_process.serve_rank(Connection(its.detach()))
        said = read_from_rank(link.recv_bytes())
        assert isinstance(said, Failed)
        assert says in said.text
        assert bool(read) is (sent == right)
        os.close(memory)


@pytest.mark.case("A53")
def test_a_rank_that_finds_other_files_ends_the_start(
    per_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint changes between rank 0's plan and the others'."""
    begin = ranks.Ranks.start

    def start(self: ranks.Ranks, *given: Any) -> None:
        config = json.loads((per_head / "config.json").read_text())
        config["quantization_config"]["kv_cache_scheme"] = None
        (per_head / "config.json").write_text(json.dumps(config))
        begin(self, *given)

    monkeypatch.setattr(ranks.Ranks, "start", start)
    with pytest.raises(RankLost, match=r"rank 1 failed: .*made another plan"):
        make(per_head, 2)


@pytest.mark.case("A53")
def test_a_rank_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.build("llama", tmp_path)
    monkeypatch.setattr(team, "plan_fingerprint", lambda _: "forged")
    with pytest.raises(RankLost, match=r"rank 1 failed: .*made another plan"):
        make(path, 2)
