"""Kvant's drafter drafts what the same drafter in plain torch drafts, with everything in float64."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvant.errors import BadCheckpoint
from kvant.speculative.base import Ask
from tests.models import tiny
from tests.speculative.pair import BLOCK, MASK, Pair
from tests.speculative.setting import (
    NUM_PAGES,
    FakeTarget,
    context,
    planned,
    proposer,
    rewrite,
)

MOST = BLOCK - 1


def fake_target(pair: Pair, dtype: torch.dtype = torch.float64) -> FakeTarget:
    embedding = pair.model.get_input_embeddings().weight.detach()
    return FakeTarget(embedding.to(dtype), pair.model.get_output_embeddings().weight.to(dtype))


def features(count: int, seed: int = 0) -> Tensor:
    """Hidden states of two taps with channels of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(count, 128, generator=generator, dtype=torch.float64)
    return wide * torch.logspace(-1, 2, 128, dtype=torch.float64)


@torch.no_grad()
def expected(
    pair: Pair, hidden: Tensor, last: int, *, embedding: Tensor, head: Tensor
) -> list[int]:
    """The recipes' drafter, which has no pages."""
    length = hidden.shape[0]
    block = embedding[torch.tensor([[last, *[MASK] * MOST]])]
    states = pair.drafter(
        block, pair.drafter.context(hidden[None]), torch.arange(length, length + BLOCK)[None],
        torch.arange(length)[None], None,
    )  # fmt: skip
    return (states[0, 1:] @ head.T).argmax(-1).tolist()


def copy_of(pair: Pair, path: Path, **changes: Any) -> Path:
    """The drafter's directory with changed fields of config.json."""
    path.mkdir()
    config = json.loads((pair.draft / "config.json").read_text())
    config.update(changes)
    rewrite(path, config)
    save_file(load_file(pair.draft / "model.safetensors"), path / "model.safetensors")
    return path


def add_tensors(path: Path, **tensors: Tensor) -> None:
    save_file({**load_file(path / "model.safetensors"), **tensors}, path / "model.safetensors")


def speculators_style(pair: Pair, path: Path, **changes: Any) -> Path:
    """The same network as a speculators checkpoint."""
    path.mkdir()
    config = json.loads((pair.draft / "config.json").read_text())
    inner = {k: v for k, v in config.items() if k not in ("dflash_config", "block_size")}
    rewrite(
        path,
        {
            "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash",
            "dtype": "bfloat16", "block_size": BLOCK, "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": [1, 3], "transformer_layer_config": inner, **changes,
        },
    )  # fmt: skip
    save_file(load_file(pair.draft / "model.safetensors"), path / "model.safetensors")
    return path


def test_dflash_drafts_as_in_plain_torch_for_any_pieces_of_the_context(pair: Pair) -> None:
    target = fake_target(pair)
    pages = [7, 3, 12, 5, 9, 1, 20, 8, 30, 2]
    hidden = features(30)
    wanted = expected(pair, hidden, 42, embedding=target.embedding, head=target.head)
    for pieces in ([30], [1] * 30, [13, 4, 13]):
        made = proposer(planned(pair.target, pair.draft), target)
        made.zero(pages)
        for end, size in zip(accumulate(pieces), pieces, strict=True):
            made.learn(*context(pages, end - size, hidden[end - size : end]))
        assert made.propose([Ask([0] * 30 + [42], [pages], MOST)]) == [wanted]


def test_several_sequences_are_drafted_at_once_each_from_its_own_context(pair: Pair) -> None:
    target = fake_target(pair)
    made = proposer(planned(pair.target, pair.draft), target)
    asks, wanted = [], []
    for number, length in enumerate((5, 29, 16, 1)):
        pages = list(range(1 + number * 9, 10 + number * 9))
        hidden = features(length, seed=number)
        made.learn(*context(pages, 0, hidden))
        asks.append(Ask([0] * length + [number + 3], [pages], MOST))
        wanted.append(
            expected(pair, hidden, number + 3, embedding=target.embedding, head=target.head)
        )
    assert len({tuple(drafts) for drafts in wanted}) > 1
    assert made.propose(asks) == wanted
    assert made.propose(asks[::-1]) == wanted[::-1]


def test_a_block_that_was_rejected_leaves_nothing_behind(pair: Pair) -> None:
    target = fake_target(pair)
    pages = list(range(1, 12))
    hidden = features(20)
    made = proposer(planned(pair.target, pair.draft), target)
    made.learn(*context(pages, 0, hidden[:12]))
    made.propose([Ask([0] * 12 + [9], [pages], MOST)])  # its rows lie at 12 .. 16 now
    made.learn(*context(pages, 12, hidden[12:14]))
    again = made.propose([Ask([0] * 14 + [77], [pages], MOST)])
    wanted = expected(pair, hidden[:14], 77, embedding=target.embedding, head=target.head)
    assert again == [wanted]


def test_rows_of_rejected_drafts_leave_nothing_behind_once_their_places_are_known(
    pair: Pair,
) -> None:
    target = fake_target(pair)
    pages = list(range(1, 12))
    hidden, others = features(10), features(10, seed=1)
    one, other = (proposer(planned(pair.target, pair.draft), target) for _ in range(2))
    one.learn(*context(pages, 0, hidden))
    other.learn(*context(pages, 0, torch.cat([hidden[:7], others[7:]])))
    other.learn(*context(pages, 7, hidden[7:]))
    for layer in (0, 1):
        for mine, theirs in zip(one.pool[layer].k, other.pool[layer].k, strict=True):
            assert torch.equal(mine, theirs)


def test_fewer_drafts_make_a_smaller_block(pair: Pair) -> None:
    made = proposer(planned(pair.target, pair.draft), fake_target(pair))
    pages = [1, 2]
    made.learn(*context(pages, 0, features(6)))
    (drafts,) = made.propose([Ask([0] * 6 + [4], [pages], 1)])  # the pages end right behind it
    assert len(drafts) == 1


def test_a_speculators_checkpoint_counts_layers_from_the_embedding_on(
    pair: Pair, tmp_path: Path
) -> None:
    draft = planned(pair.target, speculators_style(pair, tmp_path / "s"))
    target = fake_target(pair)
    made = proposer(draft, target)
    assert made.taps == (0, 2)
    hidden = features(9)
    made.learn(*context([4, 5, 6, 7], 0, hidden))
    wanted = expected(pair, hidden, 8, embedding=target.embedding, head=target.head)
    assert made.propose([Ask([0] * 9 + [8], [[4, 5, 6, 7]], MOST)]) == [wanted]


def test_a_smaller_vocabulary_goes_through_d2t(pair: Pair, tmp_path: Path) -> None:
    path = speculators_style(pair, tmp_path / "s", draft_vocab_size=30)
    target = fake_target(pair)
    chosen = torch.arange(5, 125, 4)
    head = target.head[chosen].to(torch.bfloat16)
    t2d = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    add_tensors(path, **{"lm_head.weight": head, "d2t": chosen - torch.arange(30), "t2d": t2d})
    made = proposer(planned(pair.target, path), target)
    hidden = features(9)
    made.learn(*context([4, 5, 6, 7], 0, hidden))
    numbers = expected(pair, hidden, 8, embedding=target.embedding, head=head.double())
    (drafts,) = made.propose([Ask([0] * 9 + [8], [[4, 5, 6, 7]], MOST)])
    assert drafts == chosen[numbers].tolist()
    add_tensors(path, t2d=~t2d)
    with pytest.raises(BadCheckpoint, match="t2d and d2t"):
        proposer(planned(pair.target, path), target)
    add_tensors(path, t2d=t2d, d2t=chosen)
    with pytest.raises(BadCheckpoint, match="does not have"):
        proposer(planned(pair.target, path), target)


@pytest.mark.parametrize("as_pickle", [False, True])
def test_a_mask_embedding_of_its_own_is_used_at_masked_places(
    pair: Pair, tmp_path: Path, as_pickle: bool
) -> None:
    """One in a pickle, as MiMo has it, is refused; the way out makes a file that is read."""
    path = copy_of(pair, tmp_path / "m")
    mask = torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16()
    if as_pickle:
        torch.save({"mask_token_id": MASK, "embedding": mask[None]}, path / "mask_embedding.pt")
        with pytest.raises(BadCheckpoint, match=r"mask_embedding\.pt") as refused:
            planned(pair.target, path)
        command = str(refused.value.ways_out[0]).partition('python -c "')[2].rstrip('"')
        subprocess.run([sys.executable, "-c", command], check=True)
    else:
        add_tensors(path, mask_embedding=mask)
    target = fake_target(pair)
    made = proposer(planned(pair.target, path), target)
    hidden = features(9)
    made.learn(*context([4, 5, 6, 7], 0, hidden))
    changed = target.embedding.clone()
    changed[MASK] = mask.double()
    wanted = expected(pair, hidden, 8, embedding=changed, head=target.head)
    assert wanted != expected(pair, hidden, 8, embedding=target.embedding, head=target.head)
    assert made.propose([Ask([0] * 9 + [8], [[4, 5, 6, 7]], MOST)]) == [wanted]


@torch.no_grad()
def by_hand(
    pair: Pair, hidden: Tensor, last: int, target: FakeTarget, *, window: int, causal: bool,
    sinks: Tensor | None = None,
) -> list[int]:  # fmt: skip
    """The recipes' drafter with a mask of a window and an order, and sinks as one more logit."""
    length = hidden.shape[0]
    query = torch.arange(length, length + BLOCK)[:, None]
    key = torch.arange(length + BLOCK)
    seen = key > query - window
    seen &= key <= query if causal else key < query + window
    block = target.embedding[torch.tensor([[last, *[MASK] * MOST]])]
    positions = torch.arange(length, length + BLOCK)[None]
    saved = F.scaled_dot_product_attention

    def with_sinks(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~attn_mask, -torch.inf)
        extra = torch.zeros_like(scores[..., :1]) - torch.inf
        if sinks is not None:
            extra = sinks.double()[None, :, None, None].expand_as(extra)
        return torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ v

    F.scaled_dot_product_attention = with_sinks
    try:
        states = pair.drafter(
            block, pair.drafter.context(hidden[None]), positions,
            torch.arange(length)[None], seen[None, None],
        )  # fmt: skip
    finally:
        F.scaled_dot_product_attention = saved
    return (states[0, 1:] @ target.head.T).argmax(-1).tolist()


WINDOW = 6
_SLIDING = ["sliding_attention"] * 2


@pytest.mark.parametrize("causal", [False, True])
def test_windows_and_order_are_those_of_the_config(
    pair: Pair, tmp_path: Path, causal: bool
) -> None:
    """Sliding layers are causal in the block, unless the config says otherwise."""
    changes: dict[str, Any] = {"layer_types": _SLIDING, "sliding_window": WINDOW}
    if not causal:
        changes["is_causal"] = False
    draft = planned(pair.target, copy_of(pair, tmp_path / "w", **changes))
    assert [layer.causal for layer in draft.geometry.layers] == [causal] * 2
    target, hidden, pages = fake_target(pair), features(25), list(range(1, 10))
    made = proposer(draft, target)
    made.learn(*context(pages, 0, hidden))
    wanted = by_hand(pair, hidden, 6, target, window=WINDOW, causal=causal)
    assert wanted != by_hand(pair, hidden, 6, target, window=WINDOW, causal=not causal)
    assert made.propose([Ask([0] * 25 + [6], [pages], MOST)]) == [wanted]


def test_a_drafter_of_mimos_kind_has_sinks_and_windows_that_look_both_ways(
    pair: Pair, tmp_path: Path
) -> None:
    config = json.loads((pair.draft / "config.json").read_text())
    inside = {**config["dflash_config"], "use_swa": True, "swa_window_size": WINDOW,
              "attention_sink_bias": True}  # fmt: skip
    path = copy_of(pair, tmp_path / "mimo", dflash_config=inside)
    sinks = torch.tensor([2.0, -1.0, 4.0, 0.5], dtype=torch.bfloat16)
    names = [f"layers.{i}.self_attn.attention_sink_bias" for i in range(2)]
    with pytest.raises(BadCheckpoint, match="attention_sink_bias"):
        planned(pair.target, path)
    add_tensors(path, **{name: sinks.clone() for name in names})
    target, hidden, pages = fake_target(pair), features(25), list(range(1, 10))
    made = proposer(planned(pair.target, path), target)
    made.learn(*context(pages, 0, hidden))
    wanted = by_hand(pair, hidden, 6, target, window=WINDOW, causal=False, sinks=sinks)
    assert wanted != by_hand(pair, hidden, 6, target, window=WINDOW, causal=False)
    assert made.propose([Ask([0] * 25 + [6], [pages], MOST)]) == [wanted]


def test_in_float16_large_hidden_states_do_not_overflow(pair: Pair) -> None:
    target = fake_target(pair, torch.float16)
    made = proposer(planned(pair.target, pair.draft, dtype="float16"), target)
    hidden = features(12)
    hidden[0, :] = 30_000.0
    made.learn(*context(list(range(1, NUM_PAGES)), 0, hidden.half()))
    for layer in (0, 1):
        for plane in (*made.pool[layer].k, *made.pool[layer].v):
            assert torch.isfinite(plane).all()
