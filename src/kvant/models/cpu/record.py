"""Records a forward: its operations over fixed memory, and the places where Python can step in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.attention.base import StepCall
from kvant.attention.cpu.backend import CpuBackend, scratch_bytes
from kvant.kernels.cpu.block import Block, address, block_of, float_bits
from kvant.kv.geometry import StateKind
from kvant.kv.pool import KVPool
from kvant.kv.state_pool import StatePool
from kvant.models.cpu.delta import conv_worker, delta_worker
from kvant.models.cpu.embedding import embedding_task
from kvant.models.cpu.experts import combine_worker, expert_worker, route_worker, sort_worker
from kvant.models.cpu.layout import (
    Combine,
    Convolve,
    Delta,
    ExpertProduct,
    Gate,
    GateHeads,
    Kind,
    Norm,
    Operation,
    Product,
    Rotate,
    Route,
    Sort,
)
from kvant.models.cpu.linear import Linear, chunk_of, float_rows, rounded_rows, rounding
from kvant.models.cpu.parts import (
    Attention,
    FeedForward,
    Mixture,
    Part,
    Products,
    Recurrence,
    RmsNorm,
)
from kvant.models.cpu.rows import gate_heads_worker, gate_worker, norm_worker, rotate_worker
from kvant.models.cpu.weights import Code, PackedWeight
from kvant.models.fused.routing import Scoring
from kvant.weights.codecs import same_order

_ALONE = 8
"""Maximum number of rows whose norms, rotations and gates run on one thread."""
_NEVER_ALONE = 0
_ALWAYS_ALONE = 1 << 40
_SMALL_BYTES = 1 << 16
"""Maximum number of bytes of a weight that one thread multiplies by few rows."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Places in the operations of one layer after which Python can compute instead.

    after_entry: after the first product and the rotation; entered: [tokens, ..], their results. after_mix:
    after attention or recurrence; mixed: [tokens, ..], its result. after_layer: at the end of the layer.
    """

    after_entry: int
    after_mix: int
    after_layer: int
    entered: Tensor
    mixed: Tensor


@dataclass(frozen=True, slots=True)
class Program:
    """All operations of a forward over fixed memory.

    embed: reads a narrow embedding, None for an unquantised one. pool: the pool of recorded attention, None
    if Python calls attention. states: the pool of recorded recurrences. group: of the pages of layers with
    attention. recurrences: blocks of recorded recurrences, and their fields for pages and starts. kept:
    objects whose addresses the operations hold.
    """

    residual: Tensor
    projected: Tensor
    cos: Tensor
    sin: Tensor
    embed: Block | None
    num_threads: int
    operations: Block
    stops: tuple[Stop, ...]
    last_norm: Block
    head: Block
    group: int
    pool: KVPool | None
    states: StatePool | None
    recurrences: tuple[tuple[Block, int, int], ...]
    kept: tuple[object, ...]

    @property
    def end(self) -> int:
        return len(self.operations) * 8 // Operation.END

    @property
    def num_tokens(self) -> int:
        return self.residual.shape[0]


class Recorder:
    """Records programs of one model. rounds: round to bfloat16 where transformers does."""

    def __init__(
        self,
        parts: Sequence[Part],
        last_norm: RmsNorm,
        head: Linear,
        embedding: Tensor | PackedWeight,
        *,
        rounds: bool,
    ) -> None:
        """embedding: [vocab_size, hidden_size], unquantised or packed."""
        self._parts, self._last_norm, self._head = parts, last_norm, head
        self._embedding, self._rounds = embedding, rounds

    def record(
        self, call: StepCall, tokens: int, pairs: int, group: int, *, is_ours: bool
    ) -> Program:
        """Records a program for steps of at most `tokens` tokens.

        pairs: rotated pairs of numbers per head. is_ours: attention is among the operations.
        """
        made = _Recording(
            self._parts, self._last_norm, self._head, self._embedding, call, tokens, rounds=self._rounds,
            is_ours=is_ours,
        )  # fmt: skip
        return made.program(pairs, group)


class _Recording:
    def __init__(
        self, parts: Sequence[Part], last_norm: RmsNorm, head: Linear, embedding: Tensor | PackedWeight,
        call: StepCall, tokens: int, *, rounds: bool, is_ours: bool,
    ) -> None:  # fmt: skip
        self.parts, self.last_norm, self.head_linear = parts, last_norm, head
        self.embedding, self.call, self.tokens = embedding, call, tokens
        self.rounds, self.is_ours = rounds, is_ours
        self.threads = torch.get_num_threads()
        self.made: list[tuple[Kind, int, int]] = []
        self.kept: list[object] = []
        self.recurrences: list[tuple[Block, int, int]] = []
        self._rooms: dict[tuple[str, int], Tensor] = {}
        linears = [head, *(linear for part in parts for linear in part.linears)]
        hidden = last_norm.weight.shape[0]
        self.residual, self.normed = self.room("residual", hidden), self.room("normed", hidden)
        self.projected = self.room("projected", hidden)
        widest = max(linear.weight.columns for linear in linears)
        self.rounded = None
        if any(linear.rounds for linear in linears):
            self.rounded = rounded_rows(tokens, widest, head.digits)
        self.scratch: Tensor | None = None
        room = max(linear.scratch_bytes(self.threads) for linear in linears)
        for part in parts:
            if isinstance(part.feed_forward, Mixture):
                for weight in (part.feed_forward.gate_up, part.feed_forward.down):
                    room = max(room, chunk_of(weight) * weight.shape[2] * 4)
        if room:
            self.scratch = torch.empty(self.threads, room, dtype=torch.uint8)
        self.attend_scratch = None
        if is_ours:
            needed = max(
                scratch_bytes(call.pool[i])
                for i, part in enumerate(parts)
                if isinstance(part.mix, Attention)
            )
            self.attend_scratch = torch.empty(self.threads, needed, dtype=torch.uint8)

    def room(self, name: str, columns: int, times: int = 1) -> Tensor:
        """Returns float32 [tokens * times, columns], shared by all layers that ask for this name."""
        key = name, columns * times
        if key not in self._rooms:
            self._rooms[key] = float_rows(self.tokens * times, columns)
        return self._rooms[key]

    def add(self, task: Block, *, alone: int, kind: Kind = Kind.TASK) -> Block:
        self.kept.append(task)
        self.made.append((kind, address(task), alone))
        return task

    def program(self, pairs: int, group: int) -> Program:
        embed = None
        if isinstance(self.embedding, PackedWeight):
            embed = self.add(embedding_task(self.embedding, self.residual), alone=_ALONE)
        cos, sin = self.room("cos", pairs), self.room("sin", pairs)
        stops = []
        self.norm(self.residual, self.parts[0].input_norm, adds=False)
        for index, part in enumerate(self.parts):
            mix = part.mix
            if isinstance(mix, Attention):
                entered, mixed, entry = self._attention(index, mix, cos, sin)
            else:
                entered, mixed, entry = self._recurrence(index, mix)
            after_mix = len(self.made)
            if isinstance(mix, Attention):
                self._gate_heads(mix, entered, mixed)
            output = mix.output if isinstance(mix, Attention) else mix.exit
            self.multiply(output, mixed, self.projected)
            self.norm(self.projected, part.post_norm, adds=True)
            if isinstance(part.feed_forward, FeedForward):
                self._dense(part.feed_forward, self.projected)
            else:
                self._mixture(part.feed_forward)
            if index + 1 < len(self.parts):
                self.norm(self.projected, self.parts[index + 1].input_norm, adds=True)
            stops.append(Stop(entry, after_mix, len(self.made), entered, mixed))
        last_norm = self.norm(self.projected, self.last_norm, adds=True, kind=Kind.LAST_TASK)
        (head,) = self.multiply(
            (self.head_linear,), self.normed, self.residual, kind=Kind.LAST_TASK
        )
        head[Product.OUT_STRIDE // 8] = 4 * self.head_linear.weight.rows
        operations = block_of(Operation, len(self.made))
        operations[:] = [number for operation in self.made for number in operation]
        return Program(
            self.residual, self.projected, cos, sin, embed, self.threads, operations, tuple(stops), last_norm,
            head, group, self.call.pool if self.is_ours else None, self.call.states, tuple(self.recurrences),
            (*self.kept, self._rooms, self.rounded, self.scratch, self.attend_scratch),
        )  # fmt: skip

    # -- operations ----------------------------------------------------------------------------

    def multiply(
        self, products: Products, x: Tensor, out: Tensor, *, kind: Kind = Kind.TASK
    ) -> list[Block]:
        """Records the products of x with adjacent results in out; returns their tasks."""
        start, found = 0, []
        before: PackedWeight | None = None  # its inputs are in `rounded`
        for linear in products:
            given: Tensor | None = self.rounded if linear.rounds else x
            assert given is not None
            weight = linear.weight
            if linear.rounds and (before is None or not same_order(before.order, weight.order)):
                task = rounding(x, given, weight.columns, linear.digits, weight.order)
                self.add(task, alone=_ALONE, kind=kind)
                before = weight
            place = out[:, start : start + linear.weight.rows]
            task = linear.task(given, place, self.threads, self.scratch, to_bf16=self.rounds)
            alone = _ALONE if linear.weight.num_bytes <= _SMALL_BYTES else _NEVER_ALONE
            found.append(self.add(task, alone=alone, kind=kind))
            start += linear.weight.rows
        return found

    def norm(self, x: Tensor, norm: RmsNorm, *, adds: bool, kind: Kind = Kind.TASK) -> Block:
        """Records the norm of x, or, if it adds, of x plus the residual sum."""
        made = block_of(Norm)
        made[Norm.WORKER // 8] = norm_worker()
        made[Norm.X // 8], made[Norm.OUT // 8] = x.data_ptr(), self.normed.data_ptr()
        made[Norm.RESIDUAL // 8] = self.residual.data_ptr() if adds else 0
        made[Norm.WEIGHT // 8], made[Norm.WIDTH // 8] = norm.weight.data_ptr(), norm.weight.shape[0]
        made[Norm.EPS // 8] = float_bits(norm.eps)
        self._set_rounding(made, Norm.ROUNDS, Norm.ROUNDS_FIRST, norm)
        self.kept.append(norm)
        return self.add(made, alone=_ALONE, kind=kind)

    def _set_rounding(self, made: Block, always: int, first: int, norm: RmsNorm | None) -> None:
        made[always // 8] = self.rounds
        made[first // 8] = self.rounds and norm is not None and norm.rounds_first

    def _attention(
        self, index: int, mix: Attention, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Returns the products' results, the output of attention, and the place before attention."""
        qkv = self.room("qkv", sum(linear.weight.rows for linear in mix.qkv))
        attended = self.room("mixed", mix.num_q_heads * mix.head_dim)
        self.multiply(mix.qkv, self.normed, qkv)
        made = block_of(Rotate)
        made[Rotate.WORKER // 8], made[Rotate.QKV // 8] = rotate_worker(), qkv.data_ptr()
        made[Rotate.STRIDE // 8], made[Rotate.Q_STRIDE // 8] = 4 * qkv.stride(0), 4 * mix.q_stride
        made[Rotate.Q_HEADS // 8], made[Rotate.KV_HEADS // 8] = mix.num_q_heads, mix.num_kv_heads
        made[Rotate.HEAD_DIM // 8], made[Rotate.HALF // 8] = mix.head_dim, cos.shape[1]
        made[Rotate.COS // 8], made[Rotate.SIN // 8] = cos.data_ptr(), sin.data_ptr()
        for field, norm in ((Rotate.Q_NORM, mix.q_norm), (Rotate.K_NORM, mix.k_norm)):
            made[field // 8] = 0 if norm is None else norm.weight.data_ptr()
        made[Rotate.EPS // 8] = 0 if mix.q_norm is None else float_bits(mix.q_norm.eps)
        self._set_rounding(made, Rotate.ROUNDS, Rotate.ROUNDS_FIRST, mix.q_norm)
        self.kept.append(mix)
        self.add(made, alone=_ALONE)
        entry = len(self.made)
        if self.attend_scratch is not None:
            backend = self.call.backends[index]
            assert isinstance(backend, CpuBackend)
            q, k, v = mix.heads(qkv)
            out = attended.view(-1, mix.num_q_heads, mix.head_dim)
            found = backend.record(
                self.call.pool[index], q, k, v, out, mix.params, self.attend_scratch
            )
            self.kept.append(found)
            self.made += [(Kind.WRITE, found.write, 0), (Kind.ATTEND, found.attend, 0)]
        return qkv, attended, entry

    def _gate_heads(self, mix: Attention, qkv: Tensor, attended: Tensor) -> None:
        if not mix.gated and not self.rounds:
            return
        made = block_of(GateHeads)
        made[GateHeads.WORKER // 8], made[GateHeads.X // 8] = (
            gate_heads_worker(),
            attended.data_ptr(),
        )
        made[GateHeads.HEADS // 8], made[GateHeads.HEAD_DIM // 8] = 1, attended.shape[1]
        if mix.gated:
            made[GateHeads.GATES // 8] = qkv.data_ptr() + 4 * mix.head_dim
            made[GateHeads.STRIDE // 8] = 4 * qkv.stride(0)
            made[GateHeads.HEADS // 8], made[GateHeads.HEAD_DIM // 8] = (
                mix.num_q_heads,
                mix.head_dim,
            )
            made[GateHeads.HEAD_STRIDE // 8] = 4 * mix.q_stride
        made[GateHeads.ROUNDS // 8] = self.rounds
        self.add(made, alone=_ALONE)

    def _recurrence(self, index: int, mix: Recurrence) -> tuple[Tensor, Tensor, int]:
        """Implements `_attention` for a recurrence, recorded if its states are plain numbers."""
        net, states = mix.net, self.call.states
        entered = self.room("entered", sum(net.sizes))
        mixed = self.room("mixed", net.heads * net.values)
        self.multiply(mix.entry, self.normed, entered)
        entry = len(self.made)
        assert states is not None, "the plan keeps states"
        conv = states.get(index, StateKind.CONV)
        state = states.get(index, StateKind.RECURRENT)
        natives = [one.spec.choice.dtype.format.is_native for one in (conv, state)]
        if not all(natives) or conv.numbers.dtype not in (torch.float32, torch.bfloat16):
            return entered, mixed, entry
        if state.numbers.dtype is not torch.float32 or not state.numbers[0].is_contiguous():
            return entered, mixed, entry
        channels, size = net.sizes[0], conv.numbers.element_size()
        convolved = self.room("convolved", channels)
        made = block_of(Convolve)
        made[Convolve.WORKER // 8], made[Convolve.CHANNELS // 8] = conv_worker(), channels
        made[Convolve.X // 8], made[Convolve.X_STRIDE // 8] = (
            entered.data_ptr(),
            4 * entered.stride(0),
        )
        made[Convolve.OUT // 8], made[Convolve.TAPS // 8] = convolved.data_ptr(), mix.conv.shape[0]
        made[Convolve.WEIGHT // 8], made[Convolve.STATE // 8] = (
            mix.conv.data_ptr(), conv.numbers.data_ptr(),
        )  # fmt: skip
        made[Convolve.PAGE_STRIDE // 8], made[Convolve.IS_16 // 8] = (
            conv.numbers.stride(0) * size,
            size == 2,
        )
        made[Convolve.ROUNDS // 8] = self.rounds
        self.add(made, alone=_NEVER_ALONE)
        self.recurrences.append((made, Convolve.PAGES // 8, Convolve.STARTS // 8))
        made = block_of(Delta)
        made[Delta.WORKER // 8], made[Delta.MIXED // 8] = delta_worker(), convolved.data_ptr()
        made[Delta.KEY_HEADS // 8], made[Delta.HEADS // 8] = net.key_heads, net.heads
        made[Delta.KEYS // 8], made[Delta.VALUES // 8] = net.keys, net.values
        made[Delta.STRIDE // 8] = 4 * entered.stride(0)
        place = entered.data_ptr() + 4 * channels
        for field, width in zip((Delta.Z, Delta.B, Delta.A), net.sizes[1:], strict=True):
            made[field // 8] = place
            place += 4 * width
        made[Delta.DECAY // 8], made[Delta.BIAS // 8] = mix.decay.data_ptr(), mix.bias.data_ptr()
        made[Delta.STRONGEST // 8] = float_bits(mix.strongest)
        made[Delta.STATE // 8] = state.numbers.data_ptr()
        made[Delta.PAGE_STRIDE // 8] = 4 * state.numbers.stride(0)
        made[Delta.NORM // 8], made[Delta.EPS // 8] = (
            mix.norm.weight.data_ptr(),
            float_bits(mix.norm.eps),
        )
        made[Delta.OUT // 8], made[Delta.ROUNDS // 8] = mixed.data_ptr(), self.rounds
        room = torch.empty(self.threads, 2 * net.keys + 2 * net.values, dtype=torch.float32)
        made[Delta.SCRATCH // 8], made[Delta.SCRATCH_STRIDE // 8] = (
            room.data_ptr(),
            4 * room.stride(0),
        )
        self.kept += [mix, conv, state, room]
        self.add(made, alone=_NEVER_ALONE)
        self.recurrences.append((made, Delta.PAGES // 8, Delta.STARTS // 8))
        return entered, mixed, entry

    def _dense(self, dense: FeedForward, out: Tensor) -> None:
        gate_up = self.room("gate_up", sum(linear.weight.rows for linear in dense.up))
        gated = self.room("gated", dense.down[0].weight.columns)
        self.multiply(dense.up, self.normed, gate_up)
        self._gate(gate_up, gated, 1)
        self.multiply(dense.down, gated, out)

    def _gate(self, gate_up: Tensor, gated: Tensor, times: int) -> None:
        made = block_of(Gate)
        made[Gate.WORKER // 8], made[Gate.WIDTH // 8] = gate_worker(), gated.shape[1]
        made[Gate.GATE_UP // 8], made[Gate.OUT // 8] = gate_up.data_ptr(), gated.data_ptr()
        made[Gate.TIMES // 8], made[Gate.ROUNDS // 8] = times, self.rounds
        self.add(made, alone=_ALONE)

    def _mixture(self, mixture: Mixture) -> None:
        routing, hidden = mixture.routing, self.normed.shape[1]
        experts, top_k, width = routing.num_experts, routing.top_k, mixture.down.shape[2]
        logits = self.room("router", experts)
        weights = self.room("shares", top_k)
        numbers = torch.empty(3 * self.tokens * top_k + 2 * experts + 2, dtype=torch.int64)
        sizes = [self.tokens * top_k] * 3 + [experts + 1] * 2
        ids, owners, places, starts, active = torch.split(numbers, sizes)
        gate_up = self.room("gate_up of pairs", 2 * width, top_k)
        gated = self.room("gated of pairs", width, top_k)
        results = self.room("results of pairs", hidden, top_k)
        self.kept += [mixture, numbers]
        self.multiply((mixture.router,), self.normed, logits)
        made = block_of(Route)
        made[Route.WORKER // 8], made[Route.LOGITS // 8] = route_worker(), logits.data_ptr()
        made[Route.EXPERTS // 8], made[Route.TOP_K // 8] = experts, top_k
        of_chosen = routing.scoring is Scoring.TOP_K_THEN_SOFTMAX
        rounded = self.rounds and (routing.rounded or of_chosen)
        made[Route.RENORMALISE // 8] = routing.renormalise or of_chosen
        made[Route.ROUNDS // 8] = rounded
        made[Route.IDS // 8], made[Route.WEIGHTS // 8] = ids.data_ptr(), weights.data_ptr()
        scores = torch.empty(self.threads, experts, dtype=torch.float32)
        made[Route.SCRATCH // 8] = scores.data_ptr()
        self.kept.append(scores)
        self.add(made, alone=_ALONE)
        made = block_of(Sort)
        made[Sort.WORKER // 8], made[Sort.IDS // 8] = sort_worker(), ids.data_ptr()
        made[Sort.EXPERTS // 8], made[Sort.TOP_K // 8] = experts, top_k
        made[Sort.STARTS // 8], made[Sort.ACTIVE // 8] = starts.data_ptr(), active.data_ptr()
        made[Sort.TOKENS // 8], made[Sort.PLACES // 8] = owners.data_ptr(), places.data_ptr()
        self.add(made, alone=_ALWAYS_ALONE)
        order = starts, active
        self._of_experts(mixture.gate_up, self.normed, gate_up, order, owners)
        self._gate(gate_up, gated, top_k)
        self._of_experts(mixture.down, gated, results, order, None)
        shared = 0
        if mixture.shared is not None:
            beside = self.room("shared", hidden)
            self._dense(mixture.shared, beside)
            shared = beside.data_ptr()
        made = block_of(Combine)
        made[Combine.WORKER // 8], made[Combine.RESULTS // 8] = combine_worker(), results.data_ptr()
        made[Combine.PLACES // 8], made[Combine.WEIGHTS // 8] = (
            places.data_ptr(),
            weights.data_ptr(),
        )
        made[Combine.TOP_K // 8], made[Combine.WIDTH // 8] = top_k, hidden
        made[Combine.OUT // 8], made[Combine.SHARED // 8] = self.projected.data_ptr(), shared
        gate = mixture.shared_gate
        made[Combine.GATE // 8] = 0 if gate is None else gate.data_ptr()
        made[Combine.X // 8], made[Combine.ROUNDS // 8] = self.normed.data_ptr(), self.rounds
        made[Combine.ROUNDS_TERMS // 8] = rounded
        self.add(made, alone=_ALONE)

    def _of_experts(
        self,
        weight: Tensor,
        x: Tensor,
        out: Tensor,
        order: tuple[Tensor, Tensor],
        index: Tensor | None,
    ) -> None:
        """Records products with experts' weights.

        index: rows of x by pair; None if x has one row per pair.
        """
        code = Code.BFLOAT16 if weight.dtype is torch.bfloat16 else Code.FLOAT32
        size = weight.element_size()
        made, entry = block_of(ExpertProduct), ExpertProduct
        made[entry.WORKER // 8] = expert_worker(code, indexed=index is not None)
        made[entry.WEIGHT // 8], made[entry.EXPERT_STRIDE // 8] = (
            weight.data_ptr(), weight.stride(0) * size,
        )  # fmt: skip
        made[entry.STRIDE // 8], made[entry.OUTPUTS // 8] = weight.stride(1) * size, weight.shape[1]
        made[entry.COLUMNS // 8], made[entry.CHUNK // 8] = (
            weight.shape[2], chunk_of(weight),
        )  # fmt: skip
        made[entry.X // 8], made[entry.X_STRIDE // 8] = x.data_ptr(), 4 * x.stride(0)
        made[entry.INDEX // 8] = 0 if index is None else index.data_ptr()
        made[entry.STARTS // 8], made[entry.ACTIVE // 8] = (one.data_ptr() for one in order)
        made[entry.OUT // 8], made[entry.OUT_STRIDE // 8] = out.data_ptr(), 4 * out.stride(0)
        made[entry.ROUNDS // 8] = self.rounds
        nothing = torch.zeros(16, dtype=torch.float32)
        made[entry.BIAS // 8] = nothing.data_ptr()
        self.kept.append(nothing)
        if self.scratch is not None and code is Code.BFLOAT16:
            made[entry.SCRATCH // 8] = self.scratch.data_ptr()
            made[entry.SCRATCH_STRIDE // 8] = self.scratch.stride(0)
        self.add(made, alone=_NEVER_ALONE)
