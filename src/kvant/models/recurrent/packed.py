"""Maps the sequences of a step to their tokens and to the pages of their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvant.attention.base import Step
from kvant.errors import EngineFault
from kvant.kernels.transfer import to_device
from kvant.kv.codecs import codec_for
from kvant.kv.state_pool import StateCache, draft_page


@dataclass(frozen=True, slots=True)
class Chunks:
    """The tokens of sequences with several tokens, cut into m chunks of `size` tokens.

    places: indices of these sequences, longest first. tokens: [m * size] int64, the token at each place of
    the chunks, T for padding. found: [tokens in chunks] int64, the places that are no padding; where: [tokens
    in chunks] int64, their tokens. counts, begins: number of chunks and first chunk, for each of `places`.
    bounds: [2, n] int64, first chunk and end of every sequence of the step. pieces: [2, m] int64, first token
    and number of tokens of every chunk.
    """

    size: int
    places: list[int]
    tokens: Tensor
    found: Tensor
    where: Tensor
    counts: list[int]
    begins: list[int]
    bounds: Tensor
    pieces: Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """The n sequences of a step with T tokens.

    rows: [n] int64, pages of the states. starts: [n] int32, number of tokens in a sequence's state; not
    positive for a new sequence and for padding. cu_seqlens: [n + 1] int32. lengths: number of tokens of each
    sequence, on the host; None if each has one, as in CUDA graphs of decodes. singly: run token after token,
    so that results depend neither on other sequences nor on how a prompt is cut.
    """

    step: Step
    rows: Tensor
    starts: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...] | None
    singly: bool = False

    @staticmethod
    def of(step: Step, pages: Tensor | None = None, *, singly: bool = False) -> Packed:
        """Returns the step's sequences. Raises EngineFault for a step without rows.

        pages: [rows] int64, the state page of each row (`StatePool.pages`); None if rows are page numbers.
        singly: as in the class.
        """
        if step.rows is None:
            raise EngineFault("a step without rows of states reached a recurrent layer")
        starts = step.lists.get("state starts")
        if starts is None:
            counts = step.cu_seqlens_q[1:] - step.cu_seqlens_q[:-1]
            starts = step.lists["state starts"] = step.seqlens_kv - counts
        rows = step.rows
        if pages is not None:
            found = step.lists.get("state pages")
            rows = step.lists["state pages"] = pages[rows] if found is None else found
        return Packed(step, rows, starts, step.cu_seqlens_q, step.lengths, singly)

    def turns(self, *, apart: bool) -> list[Turn] | None:
        """Divides a step with drafts into turns; returns None if all tokens may run at once.

        apart: whether each token of a sequence needs a separate turn.
        """
        if self.lengths is None or (self.step.draft_states is None and not apart):
            return None
        key = "turns", apart
        if key not in self.step.kept:
            places = self.step.draft_states or (-1,) * len(self.lengths)
            firsts = _singles(self) if apart else [_without_drafts(self, places)]
            self.step.kept[key] = firsts + _drafts(self, places)
        found: list[Turn] = self.step.kept[key]
        return found

    @property
    def owners(self) -> Tensor:
        """The sequence of each token, [T] int32."""
        found = self.step.lists.get("state owners")
        if found is None:
            if self.lengths is None:
                found = torch.arange(len(self.rows), dtype=torch.int32, device=self.rows.device)
            else:
                owners = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)
                found = to_device(torch.from_numpy(owners), self.rows.device)
            self.step.lists["state owners"] = found
        return found

    @property
    def singles(self) -> Tensor:
        """Sequences with one token, and their tokens: [2, k] int64."""
        assert self.lengths is not None
        found = self.step.lists.get("state singles")
        if found is None:
            places = [place for place, length in enumerate(self.lengths) if length == 1]
            firsts = np.cumsum([0, *self.lengths])[places]
            made = np.stack([np.array(places, np.int64), firsts.astype(np.int64)])
            found = to_device(torch.from_numpy(made), self.rows.device)
            self.step.lists["state singles"] = found
        return found

    def chunks(self, size: int) -> Chunks | None:
        """Returns chunks of the sequences with several tokens; None if there are none."""
        assert self.lengths is not None
        longer = [(n, place) for place, n in enumerate(self.lengths) if n > 1]
        if not longer:
            return None
        longer.sort(key=lambda one: -one[0])
        counts = [-(-n // size) for n, _ in longer]
        begins = [int(x) for x in np.cumsum([0, *counts[:-1]])]
        key = ("state chunks", size)
        made = self.step.lists.get(key)
        offsets = np.cumsum([0, *self.lengths])
        total = int(offsets[-1])
        in_chunks = sum(n for n, _ in longer)
        if made is None:
            tokens = np.full(sum(counts) * size, total, np.int64)
            found, where = [], []
            firsts = np.zeros(len(self.lengths), np.int64)
            for (n, place), begin in zip(longer, begins, strict=True):
                tokens[begin * size : begin * size + n] = np.arange(
                    offsets[place], offsets[place] + n
                )
                found.append(np.arange(begin * size, begin * size + n))
                where.append(np.arange(offsets[place], offsets[place] + n))
                firsts[place] = begin
            ends = firsts.copy()
            for (_, place), begin, count in zip(longer, begins, counts, strict=True):
                ends[place] = begin + count
            of_chunks = tokens[::size]
            held = (tokens.reshape(-1, size) < total).sum(1)
            flat = np.concatenate([tokens, *found, *where, firsts, ends, of_chunks, held])
            made = self.step.lists[key] = to_device(torch.from_numpy(flat), self.rows.device)
        n = len(self.lengths)
        m = sum(counts)
        tokens_, found_, where_, bounds, pieces = torch.split(
            made, [m * size, in_chunks, in_chunks, 2 * n, 2 * m]
        )
        return Chunks(
            size, [place for _, place in longer], tokens_, found_, where_, counts, begins,
            bounds.view(2, n), pieces.view(2, m),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of a step that run at once. First runs the step without drafts, at once or token by token; then
    the next draft of every sequence that has one.

    tokens: [k] int64, indices in T. packed: their sequences. before: [k] int64, pages from which drafts copy
    their initial states: the sequences' pages for first drafts, pages of `StateCache.drafts` for later ones.
    """

    tokens: Tensor
    packed: Packed
    before: Tensor | None = None
    is_first_draft: bool = False


def _offsets(packed: Packed) -> list[int]:
    assert packed.lengths is not None
    found: list[int] = np.cumsum([0, *packed.lengths]).tolist()
    return found


def _sent(values: Sequence[int], packed: Packed, dtype: torch.dtype = torch.int64) -> Tensor:
    return to_device(torch.tensor(values, dtype=dtype), packed.rows.device)


def _part(
    packed: Packed, rows: Tensor, starts: Tensor, lengths: Sequence[int], *, singly: bool
) -> Packed:
    """Returns some sequences with some of their tokens, without drafts."""
    cu_seqlens = _sent([int(n) for n in np.cumsum([0, *lengths])], packed, torch.int32)
    kept = None if max(lengths) == 1 else tuple(lengths)
    step = replace(packed.step, cu_seqlens_q=cu_seqlens, lengths=kept, draft_states=None)
    return Packed(step, rows, starts, cu_seqlens, kept, singly)


def _without_drafts(packed: Packed, places: Sequence[int]) -> Turn:
    """Returns the turn without drafts. places: `Step.draft_states`."""
    assert packed.lengths is not None
    lengths = [1 if at >= 0 else n for n, at in zip(packed.lengths, places, strict=True)]
    firsts = zip(_offsets(packed)[:-1], lengths, strict=True)
    tokens = [token for at, n in firsts for token in range(at, at + n)]
    part = _part(packed, packed.rows, packed.starts, lengths, singly=packed.singly)
    return Turn(_sent(tokens, packed), part)


def _singles(packed: Packed) -> list[Turn]:
    """Returns turns with one token of every sequence each, up to its first draft."""
    assert packed.lengths is not None
    places = packed.step.draft_states or (-1,) * len(packed.lengths)
    lengths = [1 if at >= 0 else n for n, at in zip(packed.lengths, places, strict=True)]
    offsets, found = _offsets(packed), []
    for j in range(max(lengths)):
        some = [i for i, n in enumerate(lengths) if n > j]
        index = _sent(some, packed)
        rows, starts = packed.rows[index], packed.starts[index] + j
        part = _part(packed, rows, starts, [1] * len(some), singly=True)
        found.append(Turn(_sent([offsets[i] + j for i in some], packed), part))
    return found


def _drafts(packed: Packed, places: Sequence[int]) -> list[Turn]:
    """Returns turns with one draft of every sequence each. places: `Step.draft_states`."""
    assert packed.lengths is not None
    offsets, found = _offsets(packed), []
    most = max((n for n, at in zip(packed.lengths, places, strict=True) if at >= 0), default=0)
    for j in range(1, most):
        some = [i for i, at in enumerate(places) if at >= 0 and packed.lengths[i] > j]
        rows = _sent([draft_page(places[i] + j - 1) for i in some], packed)
        before = packed.rows[_sent(some, packed)] if j == 1 else rows - 1
        starts = torch.ones(len(some), dtype=torch.int32, device=rows.device)
        part = _part(packed, rows, starts, [1] * len(some), singly=packed.singly)
        tokens = _sent([offsets[i] + j for i in some], packed)
        found.append(Turn(tokens, part, before, is_first_draft=j == 1))
    return found


def in_turns(
    run: Callable[[Sequence[Tensor], StateCache, Packed], Tensor],
    inputs: Sequence[Tensor],
    cache: StateCache,
    packed: Packed,
) -> Tensor:
    """Returns run(inputs, cache, packed), a tensor [T, ..]; divides a step with drafts into turns.

    inputs: [T, ..] each. Drafts run one after the other, as without speculation. Each draft leaves its state
    in `cache.drafts`; the sequence's own state remains the one before the drafts. Other tokens run one after
    the other too if `packed.singly` is set and no kernel does so itself.
    """
    turns = packed.turns(apart=packed.singly and not takes_kernels(inputs[0], cache))
    if turns is None:
        return run(inputs, cache, packed)
    out: Tensor | None = None
    for turn in turns:
        stored = cache
        if turn.before is not None:
            assert cache.drafts is not None
            stored = cache.drafts
            begin = cache if turn.is_first_draft else stored
            for to, plane in zip(stored.planes, begin.planes, strict=True):
                to[turn.packed.rows] = plane[turn.before]
        part = run([x[turn.tokens] for x in inputs], stored, turn.packed)
        if out is None:
            out = part.new_empty(len(inputs[0]), *part.shape[1:])
        out[turn.tokens] = part
    assert out is not None
    return out


def read_state(
    cache: StateCache, packed: Packed, places: Sequence[int] | Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns a copy in `dtype` of states [n, *shape]; zeros for new sequences. places: None for all."""
    rows, starts = packed.rows, packed.starts
    if places is not None:
        index = _index(places, rows.device)
        rows, starts = rows[index], starts[index]
    shape = cache.spec.geometry.shape
    stored = tuple(plane[rows] for plane in cache.planes)
    codec = codec_for(cache.spec.choice.dtype)
    found = codec.decode(stored, None, torch.float32).to(dtype)
    return found.masked_fill_((starts <= 0).view(-1, *(1,) * len(shape)), 0.0)


def write_state(
    cache: StateCache, packed: Packed, places: Sequence[int] | Tensor | None, value: Tensor
) -> None:
    """Stores states [n, *shape], of any floating dtype. places: the sequences, None for all."""
    rows = packed.rows
    if places is not None:
        rows = rows[_index(places, rows.device)]
    codes = codec_for(cache.spec.choice.dtype).encode(value, None)
    for plane, code in zip(cache.planes, codes, strict=True):
        plane[rows] = code


def takes_kernels(x: Tensor, cache: StateCache) -> bool:
    """Returns whether Triton's kernels run on x [..] and these states, whose rows must fill 16-bit words."""
    fills = cache.spec.choice.dtype.format.is_native or cache.spec.geometry.shape[-1] % 2 == 0
    return x.device.type != "cpu" and x.dtype is not torch.float64 and fills


def _index(places: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    return places if isinstance(places, Tensor) else torch.tensor(places, device=device)
