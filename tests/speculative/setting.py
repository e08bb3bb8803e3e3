"""A planned drafter and a fake target, without an engine: for tests of the network alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvant.attention.base import Step
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.kv.names import parse_compute_dtype
from kvant.kv.pool import KVPool
from kvant.models.loaded import LoadedModel
from kvant.plan.plan import PlanRequest
from kvant.plan.speculative_config import parse_speculative_config
from kvant.speculative.base import PlannedDraft, Setting
from kvant.speculative.dflash.proposer import DFlashProposer, build
from tests.planned import plan_of

PAGE = 4
NUM_PAGES = 40


@dataclass(frozen=True, slots=True)
class FakeTarget:
    """Embedding and head of a target, which is all that a drafter calls. group: no ranks share it."""

    embedding: Tensor
    head: Tensor
    group: None = None

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embedding[input_ids]

    def score(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.head.dtype) @ self.head.T


def planned(
    target: Path, draft: Path, *, dtype: str = "float64", kv: str | None = None
) -> PlannedDraft:
    asked: dict[str, Any] = {"method": "dflash", "model": str(draft)}
    if kv is not None:
        asked["kv_cache_dtype"] = kv
    plan = plan_of(
        PlanRequest(
            str(target), DeviceFacts(DeviceKind.CPU), page_size=PAGE,
            dtype=parse_compute_dtype(dtype, asked_by="test"),
            speculative=parse_speculative_config(asked),
        ),
        weights=True,
    )  # fmt: skip
    plan.check_files()
    if plan.draft is not None and plan.draft.refusal is not None:
        raise plan.draft.refusal
    assert plan.draft is not None
    assert plan.draft_facts is not None
    found = plan.draft
    return PlannedDraft(found.local.path, found.config, found.geometry, plan.draft_facts, found.kv)


def proposer(draft: PlannedDraft, target: FakeTarget) -> DFlashProposer:
    loaded = cast(LoadedModel, target)
    most = draft.facts.block_size - 1
    pages = KVPool(draft.kv, NUM_PAGES, device=torch.device("cpu"), scales={})
    made = build(Setting(loaded, pages, most, 256, draft, {}))
    assert isinstance(made, DFlashProposer)
    return made


def context(pages: Sequence[int], start: int, hidden: Tensor) -> tuple[Step, tuple[Tensor, ...]]:
    """A step in which the target ran tokens from `start` on. hidden: [T, taps * hidden_size]."""
    count = hidden.shape[0]
    positions = torch.arange(start, start + count)
    table = torch.tensor(pages)
    slots = table[positions // PAGE] * PAGE + positions % PAGE
    step = Step(
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        seqlens_kv=torch.tensor([start + count], dtype=torch.int32),
        page_table=table[None].int(), slot_mapping=slots, positions=positions,
        max_seqlen_q=count, max_seqlen_kv=start + count,
    )  # fmt: skip
    return step, tuple(hidden.chunk(2, dim=-1))


def rewrite(directory: Path, config: Mapping[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
