"""A proposer that reads the target's own keys and values, as drafters do that share its cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvant.attention.backends import load_backends
from kvant.attention.base import AttentionParams, Step
from kvant.kv.codecs import codec_for
from kvant.speculative.base import Ask, Setting
from kvant.speculative.methods import Method

METHOD = Method("sharing", "tests.speculative.sharing", has_model=False, num_speculative_tokens=2)


class Sharing:
    """Attends over the target's first layer in its owner's format and drafts nothing useful.

    read: for each question how far what was attended is from the decoded rows, and the query's dtype.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, setting: Setting) -> None:
        self._pool = setting.pool
        self._backend = load_backends(setting.target.plan)[0]
        self.read: list[tuple[float, torch.dtype]] = []

    def zero(self, pages: Sequence[int]) -> None:
        """It owns none."""

    def learn(self, step: Step, hidden: tuple[Tensor, ...]) -> None:
        """What the target wrote is all it knows."""

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        for ask in asks:
            self._read(list(ask.pages), len(ask.token_ids) - 1)
        return [[ask.token_ids[-1]] * ask.num_tokens for ask in asks]

    def _read(self, pages: list[int], length: int) -> None:
        cache = self._pool[0]
        spec, g = cache.spec, cache.spec.geometry
        q = torch.ones(1, g.num_q_heads, g.head_dim_k, dtype=torch.float64)
        step = Step(
            torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32),
            torch.tensor([pages], dtype=torch.int32), torch.tensor([-1]), torch.tensor([length - 1]),
            1, length,
        )  # fmt: skip
        out = self._backend.attend(cache, q, step, AttentionParams(scale=0.0))
        rows = [plane[torch.tensor(pages)].flatten(0, 1)[:length] for plane in cache.v]
        assert spec.v is not None
        v = codec_for(spec.v.dtype).decode(rows, cache.v_scale, torch.float64)
        mean = v.mean(0).repeat_interleave(g.num_q_heads // g.num_kv_heads, dim=0)
        self.read.append((float((out[0] - mean).abs().max()), out.dtype))


def build(setting: Setting) -> Sharing:
    return Sharing(setting)
