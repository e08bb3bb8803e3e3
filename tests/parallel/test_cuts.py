"""Which part of each weight a rank holds."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from kvant.models.sharding.cuts import RULES, Cut, Cuts, Rule
from kvant.models.sharding.divide import RankFiles, cut_of
from kvant.models.sharding.narrow import cut_part
from kvant.models.sharding.shard import Shard
from kvant.weights.format import FP8_BLOCK, Dialect, Scheme
from tests.models import families, tiny
from tests.parallel.test_plan import plan

FAMILIES = [name for name in tiny.FAMILIES if tiny.FAMILIES[name].config and name in RULES]
SUMS = {Rule.INPUTS, Rule.MIXER_INPUTS, Rule.EXPERT_INPUTS, Rule.EXPERT_ROWS}
WHOLE_MATRICES = ("embed_tokens.weight", "mlp.gate.weight", "mlp.router.weight")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_hold_every_number_of_every_weight(name: str, size: int) -> None:
    """Each number once, or by as many ranks as share a KV head; only small things are whole."""
    heads = {"num_attention_heads": 4, "hidden_size": 384} if name == "phi3" else {}
    model, geometry = tiny.make(name, **heads), tiny.geometry(name, **heads)
    for path, parameter in model.named_parameters():
        cuts = [Cuts(geometry, Shard(rank, size)) for rank in range(size)]
        found = [cut.of(path, parameter.shape) for cut in cuts]
        if found[0] is None:
            assert parameter.ndim == 1 or path.endswith(WHOLE_MATRICES) or "bias" in path, path
            continue
        count = torch.zeros(parameter.shape)
        number = torch.arange(parameter.numel()).view(parameter.shape)
        for cut in found:
            assert cut is not None
            part = cut_of(number, cut)
            count.view(-1)[part.reshape(-1)] += 1
            assert cut.rule is Rule.VOCABULARY or part.numel() * size >= parameter.numel()
        repeats = count.unique().tolist()
        is_kv = found[0].rule in (Rule.KV_OUTPUTS, Rule.KV_HEADS_OF_A_NORM, Rule.QKV_OUTPUTS)
        assert repeats == [1.0] or (is_kv and max(repeats) <= size), path


def test_rows_of_q_meet_columns_of_o_and_halves_stay_pairs() -> None:
    geometry = tiny.geometry("llama")
    cuts = Cuts(geometry, Shard(1, 2))
    q = cuts.of("model.layers.0.self_attn.q_proj.weight", (64, 64))
    o = cuts.of("model.layers.0.self_attn.o_proj.weight", (64, 64))
    assert q is not None
    assert o is not None
    assert (q.dim, o.dim) == (-2, -1)
    assert q.ranges == o.ranges == ((32, 64),)
    packed = Cuts(tiny.geometry("phi3"), Shard(1, 2)).of(
        "model.layers.0.mlp.gate_up_proj.weight", (192, 192)
    )
    assert packed is not None
    assert packed.ranges == ((48, 96), (144, 192))


def test_the_table_agrees_with_transformers_plans() -> None:
    """Wherever these divide one matrix. Plans of whole modules, as of experts, name no dimension."""
    agreed: set[str] = set()
    for name, rules in RULES.items():
        if name not in CONFIG_MAPPING:
            continue  # the installed transformers is older than the family
        plan = getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None) or {}
        for key, kind in plan.items():
            found = re.fullmatch(r"layers\.\*\.(.+)", key)
            is_state = key.endswith("linear_attn.out_proj")  # its recurrence is whole there
            if "wise" not in kind or "local" in kind or found is None or is_state:
                continue
            inner = found[1].replace("*", "0")
            rule = next(
                rule
                for pattern, rule in rules.items()
                if re.fullmatch(pattern, f"{inner}.weight") or re.fullmatch(pattern, inner)
            )
            assert (rule in SUMS) == ("rowwise" in kind), (name, key, kind, rule)
            agreed.add(name)
    assert len(agreed) > 40


def test_towers_are_not_divided() -> None:
    cuts = Cuts(tiny.geometry("gemma3"), Shard(0, 2))
    assert cuts.rule_of("vision_tower.encoder.layers.0.self_attn.q_proj.weight") is None
    assert cuts.rule_of("model.layers.0.self_attn.q_norm.weight") is None


def test_a_rank_reads_its_part_of_the_files(tmp_path: Path) -> None:
    """Half of the layers' and the head's bytes; the embedding is whole."""
    path = tiny.build("llama", tmp_path)
    sizes = []
    for rank in range(2):
        with RankFiles(path, Cuts(tiny.geometry("llama"), Shard(rank, 2)).of) as files:
            parts = {name: part[...] for name, part in files.tensors.items()}
            assert {n: list(p.shape) for n, p in parts.items()} == {
                name: part.get_shape() for name, part in files.tensors.items()
            }
            sizes.append(
                sum(p.numel() for n, p in parts.items() if p.ndim > 1 and "embed" not in n)
            )
    said = json.loads((path / "config.json").read_text())
    whole = sum(
        p.numel()
        for n, p in tiny.make("llama").named_parameters()
        if p.ndim > 1 and "embed" not in n
    )
    assert said["num_hidden_layers"] == 4
    assert sizes == [whole // 2, whole // 2]


def test_scales_of_blocks_are_cut_with_their_blocks() -> None:
    scheme = Scheme(Dialect.FP8, FP8_BLOCK)
    whole = 512, 384
    rows = Cut(Rule.OUTPUTS, -2, ((256, 512),), 512)
    found = cut_part(scheme, "weight_scale_inv", (4, 3), whole, rows)
    assert found is not None
    assert (found.dim, found.ranges, found.width) == (-2, ((2, 4),), 4)
    columns = Cut(Rule.INPUTS, -1, ((0, 128), (256, 384)), 384)
    found = cut_part(scheme, "weight_scale_inv", (4, 3), whole, columns)
    assert found is not None
    assert (found.dim, found.ranges) == (-1, ((0, 1), (2, 3)))
    small = Cut(Rule.OUTPUTS, -2, ((64, 128),), 128)  # within one block
    found = cut_part(scheme, "weight_scale_inv", (1, 3), (128, 384), small)
    assert found is not None
    assert found.ranges == ((0, 1),)
    within = Cut(Rule.OUTPUTS, -2, ((64, 128),), 256)
    found = cut_part(scheme, "weight_scale_inv", (2, 3), (256, 384), within)
    assert found is not None
    assert found.ranges == ((0, 1),)


@pytest.mark.parametrize("name", ["bamba", "deepseek_v3", "lfm2", "mixtral", "qwen3_5_text"])
def test_a_rank_reads_its_slices_of_states_latents_and_experts(name: str, tmp_path: Path) -> None:
    """A rank reads half of all layers' bytes, and small things that every rank holds."""
    families.build(name, tmp_path)
    geometry = plan(tmp_path, 2).target.geometry
    read, whole = 0, 0
    for rank in range(2):
        with RankFiles(tmp_path, Cuts(geometry, Shard(rank, 2)).of) as files:
            for tensor, part in files.tensors.items():
                if ".layers." in tensor:
                    read += part[...].nbytes
                    whole += math.prod(part._source.get_shape()) * 4
    assert 0.5 < read / whole < 0.6
