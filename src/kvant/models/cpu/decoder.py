"""The forward of plain dense decoders on a CPU in float32: one call of compiled code per step.

It runs the layers that `kvant.models.fused` found in a transformers module. What a step needs of
Python is the embedding, the rotary frequencies and a block of addresses. A row's bits depend neither
on the rows beside it nor on the number of threads: batch-invariant as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvant.attention.base import AttentionParams, StepCall
from kvant.attention.cpu.backend import CpuBackend, Recorded, entries, scratch_bytes
from kvant.errors import EngineFault
from kvant.kernels.cpu.block import Block, address, block_of, float_bits
from kvant.kv.pool import KVPool
from kvant.kv.spec import KVPlan
from kvant.models.cpu.embedding import PackedEmbedding, embedding_task
from kvant.models.cpu.info import NORM_STEP, refuse_shape
from kvant.models.cpu.layout import (
    Embed,
    Gate,
    Kind,
    Norm,
    Operation,
    Product,
    Rotate,
    StepFields,
)
from kvant.models.cpu.linear import Linear, float_rows, rounded_rows, rounding
from kvant.models.cpu.rounding import EIGHT_BITS, EXACT
from kvant.models.cpu.rows import gate_worker, norm_worker, rotate_worker
from kvant.models.cpu.run import new_step, run_function
from kvant.models.cpu.weights import INT4, Code, PackedWeight, pack, pack_narrow
from kvant.models.forward_info import ForwardChoice
from kvant.models.fused.decoder import FusedDecoder, fuse
from kvant.models.fused.feed_forward import Dense
from kvant.models.fused.layers import Layer
from kvant.models.fused.layers import Norm as LayerNorm
from kvant.models.fused.linear import Apart, DenseLinear, NarrowProduct
from kvant.models.fused.linear import Linear as AnyLinear
from kvant.models.quantization import Quantization
from kvant.weights.linear import NarrowEmbedding, NarrowLinear

_ALONE = 8
"""Maximum number of rows whose norms, rotations and gates run on one thread."""
_NEVER_ALONE = 0
_CODES = {
    None: (Code.FLOAT32, Code.FLOAT32),
    Quantization.INT8: (Code.INT8, Code.INT8),
    Quantization.INT4: (INT4, Code.INT8),
}
"""Codes of layers and of the head, whose rounding changes the logits directly."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A fused layer's products, and its weights that belong to no product."""

    input_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_norm: Tensor
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    params: AttentionParams
    qkv: _Products
    output: _Products
    gate_up: _Products
    down: _Products


_Products = tuple[Linear, ...]
"""Products of one input, whose outputs lie beside each other; several where formats differ."""


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Float32 [tokens, ..]. rounded: what products with narrow weights read, uint8 [tokens, ..]."""

    residual: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    projected: Tensor
    gate_up: Tensor
    gated: Tensor
    cos: Tensor
    sin: Tensor
    rounded: Tensor


@dataclass(frozen=True, slots=True)
class _Program:
    """All operations of a forward over fixed memory.

    after_rotate, after_layer: how many operations come up to there, by layer. embed: reads the narrow
    embedding, None for one of numbers. pool: whose attention is among the operations, None where Python
    calls it. kept: what operations hold addresses of.
    """

    buffers: _Buffers
    embed: Block | None
    num_threads: int
    operations: Block
    after_rotate: tuple[int, ...]
    after_layer: tuple[int, ...]
    last_norm: Block
    head: Block
    pool: KVPool | None
    kept: tuple[object, ...]

    @property
    def end(self) -> int:
        return len(self.operations) * 8 // Operation.END

    @property
    def num_tokens(self) -> int:
        return self.buffers.residual.shape[0]


def make(module: PreTrainedModel, plan: KVPlan, choice: ForwardChoice) -> CpuDecoder:
    """Build the compiled forward of a loaded module.

    With quantization, the module loses the weights that were rounded. EngineFault if the module
    does not match the plan.
    """
    fused = fuse(module, plan)
    reason = _mismatch(fused)
    if reason is not None:
        raise EngineFault(f"the plan runs {type(module).__name__} as compiled code, but {reason}")
    made = CpuDecoder(fused, module, choice)
    if made.took_weights:
        _drop_products(module)
    if isinstance(made.embedding, PackedWeight):
        module.set_input_embeddings(PackedEmbedding(made.embedding))
    return made


def _mismatch(decoder: FusedDecoder) -> str | None:
    """Return why compiled code cannot run these layers (a fault of the plan), or None."""
    model = decoder.model
    if model.embedding.dtype is not torch.float32:
        return f"it computes in float32, not in {model.embedding.dtype}"
    for layer in model.layers:
        if not isinstance(layer, Layer):
            return "it has layers that carry states"
        if layer.qk_norms is not None and layer.head_dim % NORM_STEP:
            return f"heads of {layer.head_dim} are normed in steps of {NORM_STEP}"
        forward = layer.feed_forward
        if not isinstance(forward, Dense):
            return "it has layers of experts"
        for linear in (layer.qkv, layer.output, forward.up, forward.down):
            reason = refuse_shape(linear.rows, linear.columns)
            if reason is not None:
                return reason
    return refuse_shape(model.head.rows, model.head.columns)


def _drop_products(module: PreTrainedModel) -> None:
    """Free the memory of weights that were packed; a tied head of numbers remains as the embedding."""
    embedding: Any = module.get_input_embeddings()
    for part in module.modules():
        is_narrow = isinstance(part, (NarrowLinear, NarrowEmbedding))
        if is_narrow or (type(part) is nn.Linear and part.weight is not embedding.weight):
            for parameter in part.parameters(recurse=False):
                parameter.data = parameter.data.new_empty(0)


class CpuDecoder:
    """The compiled forward.

    Products read the module's weights themselves where they are numbers and stay so; else the weights
    in tiles, rounded as choice.quantization says, or as they are stored; took_weights says that the module
    is to drop its own. embedding: [vocab_size, hidden_size] float32, or narrow; a tied head is the same
    object.
    """

    def __init__(
        self, decoder: FusedDecoder, module: PreTrainedModel, choice: ForwardChoice
    ) -> None:
        assert _mismatch(decoder) is None
        layers, head = _CODES[choice.quantization]
        digits = EXACT if choice.activations is None else EIGHT_BITS
        model = decoder.model
        self._turns = decoder.turns
        self._norm_weight, self._eps = _weight(model.norm), model.norm.eps
        self._hidden = self._norm_weight.shape[0]
        self._layers = tuple(
            _layer(layer, layers, digits) for layer in model.layers if isinstance(layer, Layer)
        )
        (self._head,) = _linears(model.head, head, digits)
        self.embedding: Tensor | PackedWeight = model.embedding
        self.took_weights = choice.quantization is not None or choice.stored is not None
        table: Any = module.get_input_embeddings()
        if isinstance(table, NarrowEmbedding):
            tied = isinstance(model.head, NarrowProduct) and _are_one(model.head, table)
            self.embedding = self._head.weight if tied else pack_narrow(table.narrow)
        self._program: _Program | None = None
        self._entry = run_function().call
        self._compiled_seconds = 0.0
        self._step, self._team = new_step()
        step = self._step
        write, write_worker, attend, attend_worker = entries()
        step[StepFields.WRITE // 8], step[StepFields.WRITE_WORKER // 8] = write, write_worker
        step[StepFields.ATTEND // 8], step[StepFields.ATTEND_WORKER // 8] = attend, attend_worker

    @property
    def extra_bytes(self) -> int:
        """Bytes of weights that the module does not hold."""
        found = 0
        table = self.embedding.data_ptr() if isinstance(self.embedding, Tensor) else None
        for linear in self._linears:
            # Numbers of a tied head are the embedding, which the module keeps.
            is_table = linear.weight.codes.data_ptr() == table
            if linear.rounds or (self.took_weights and not is_table):
                found += linear.num_bytes
        if isinstance(self.embedding, PackedWeight) and self.embedding is not self._head.weight:
            found += self.embedding.num_bytes
        return found

    @property
    def compiled_seconds(self) -> float | None:
        """Spent in compiled code so far; Python has the rest of a step."""
        return self._compiled_seconds

    @property
    def _linears(self) -> list[Linear]:
        found = [p for one in self._layers for p in (one.qkv, one.output, one.gate_up, one.down)]
        return [*(linear for products in found for linear in products), self._head]

    def score(self, hidden: Tensor) -> Tensor:
        """Apply the head: [n, hidden_size], normed, float32 -> [n, vocab_size]."""
        return self._head(hidden)

    def run(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return logits [len(logits_index), vocab_size] and outputs of `layers`, each [T, hidden_size]."""
        tokens, chosen, at = input_ids.shape[0], logits_index.shape[0], call.step
        program = self._program_for(call, max(tokens, chosen))
        buffers = program.buffers
        if program.embed is not None:
            input_ids = input_ids.contiguous()
            program.embed[Embed.IDS // 8] = input_ids.data_ptr()
        elif isinstance(self.embedding, Tensor):
            torch.index_select(self.embedding, 0, input_ids, out=buffers.residual[:tokens])
        (turns,) = self._turns(at)
        buffers.cos[:tokens], buffers.sin[:tokens] = turns.of(at)
        logits = float_rows(chosen, self._head.weight.rows)
        index, slots = logits_index.contiguous(), at.slot_mapping.contiguous()
        table = at.page_table if at.page_table.stride(-1) == 1 else at.page_table.contiguous()
        program.last_norm[Norm.INDEX // 8] = index.data_ptr()
        program.head[Product.OUT // 8] = logits.data_ptr()
        step = self._step
        step[StepFields.TOKENS // 8], step[StepFields.CHOSEN // 8] = tokens, chosen
        step[StepFields.THREADS // 8] = program.num_threads
        step[StepFields.NUM_SEQS // 8] = at.seqlens_kv.shape[0]
        step[StepFields.CU_SEQLENS_Q // 8] = at.cu_seqlens_q.data_ptr()
        step[StepFields.SEQLENS_KV // 8] = at.seqlens_kv.data_ptr()
        step[StepFields.PAGE_TABLE // 8] = table.data_ptr()
        step[StepFields.PAGE_TABLE_STRIDE // 8] = table.stride(0)
        step[StepFields.SLOTS // 8] = slots.data_ptr()
        step[StepFields.CAUSAL // 8] = at.causal
        taps = self._go(program, call, tokens, layers)
        return logits, tuple(taps[layer] for layer in layers)

    def _go(
        self, program: _Program, call: StepCall, tokens: int, layers: Sequence[int]
    ) -> dict[int, Tensor]:
        """Run all operations, with stops for Python's part; return the outputs of `layers`."""
        step, operations = address(self._step), address(program.operations)
        buffers, done = program.buffers, 0
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            cache = call.pool[index]
            if program.pool is None or cache.saturation is not None:
                done = self._run(step, operations, done, program.after_rotate[index])
                q, k, v = _heads(layer, buffers.qkv[:tokens])
                if program.pool is None:
                    backend = call.backends[index]
                    at = call.step_of(index)
                    backend.write(cache, k, v, at)
                    out = backend.attend(cache, q, at, layer.params)
                    buffers.attended[:tokens] = out.reshape(tokens, -1)
                elif cache.saturation is not None:
                    scales = cache.k_scale, cache.v_scale
                    cache.saturation.sample((k, v), scales, call.step_of(index).slot_mapping)
            if index in layers:
                done = self._run(step, operations, done, program.after_layer[index])
                taps[index] = buffers.residual[:tokens].clone()
                if index + 1 == len(self._layers):
                    taps[index] += buffers.projected[:tokens]
        self._run(step, operations, done, program.end)
        return taps

    def _run(self, step: int, operations: int, first: int, end: int) -> int:
        begin = perf_counter()
        done = self._entry(step, operations, first, end)
        self._compiled_seconds += perf_counter() - begin
        return done

    # -- programs ------------------------------------------------------------------------------

    def _program_for(self, call: StepCall, rows: int) -> _Program:
        """Return the program for `rows` rows; build it if there is none."""
        is_ours = all(isinstance(backend, CpuBackend) for backend in call.backends)
        is_ours = is_ours and not call.step.others  # compiled code knows one page table
        is_ours = is_ours and not call.pool.plan.has_wide_rows  # and one form of a row
        found = self._program
        if (
            found is None
            or found.num_tokens < rows
            or found.num_threads != torch.get_num_threads()
            or found.pool is not (call.pool if is_ours else None)
        ):
            room = rows if found is None else max(rows, found.num_tokens)
            self._program = found = None  # free its memory before allocating the next one's
            found = self._program = self._make(call, room, is_ours=is_ours)
        return found

    def _make(self, call: StepCall, tokens: int, *, is_ours: bool) -> _Program:
        buffers = self._buffers(tokens)
        scratch = None
        if is_ours:
            needed = max(scratch_bytes(call.pool[i]) for i in range(len(self._layers)))
            scratch = torch.empty(torch.get_num_threads(), needed, dtype=torch.uint8)
        made: list[tuple[Kind, int, int]] = []
        kept: list[object] = []
        after_rotate, after_layer = [], []

        def add(task: Block, *, alone: int, kind: Kind = Kind.TASK) -> None:
            kept.append(task)
            made.append((kind, address(task), alone))

        b = buffers
        threads = torch.get_num_threads()
        embed = None
        if isinstance(self.embedding, PackedWeight):
            embed = embedding_task(self.embedding, b.residual)
            add(embed, alone=_ALONE)

        def multiply(
            products: _Products, x: Tensor, out: Tensor, *, kind: Kind = Kind.TASK
        ) -> list[Block]:
            """Products of x, beside each other in out; their tasks."""
            first, start, found = products[0], 0, []
            if any(linear.rounds for linear in products):
                columns = first.weight.columns
                add(rounding(x, b.rounded, columns, first.digits), alone=_ALONE, kind=kind)
            for linear in products:
                given = b.rounded if linear.rounds else x
                task = linear.task(given, out[:, start : start + linear.weight.rows], threads)
                add(task, alone=_NEVER_ALONE, kind=kind)
                found.append(task)
                start += linear.weight.rows
            return found

        norms = [layer.input_norm for layer in self._layers] + [self._norm_weight]
        add(self._norm(b, b.residual, norms[0], adds=False), alone=_ALONE)
        for index, layer in enumerate(self._layers):
            multiply(layer.qkv, b.normed, b.qkv)
            add(self._rotate(b, layer), alone=_ALONE)
            after_rotate.append(len(made))
            if scratch is not None:
                found = self._record(call, index, b, scratch)
                kept.append(found)
                made += [(Kind.WRITE, found.write, 0), (Kind.ATTEND, found.attend, 0)]
            multiply(layer.output, b.attended, b.projected)
            add(self._norm(b, b.projected, layer.post_norm, adds=True), alone=_ALONE)
            multiply(layer.gate_up, b.normed, b.gate_up)
            add(_gate(b), alone=_ALONE)
            multiply(layer.down, b.gated, b.projected)
            if index + 1 < len(self._layers):
                add(self._norm(b, b.projected, norms[index + 1], adds=True), alone=_ALONE)
            after_layer.append(len(made))
        last_norm = self._norm(b, b.projected, norms[-1], adds=True)
        add(last_norm, alone=_ALONE, kind=Kind.LAST_TASK)
        (head,) = multiply((self._head,), b.normed, b.residual, kind=Kind.LAST_TASK)
        head[Product.OUT_STRIDE // 8] = 4 * self._head.weight.rows
        operations = block_of(Operation, len(made))
        operations[:] = [number for operation in made for number in operation]
        return _Program(
            buffers, embed, threads, operations, tuple(after_rotate), tuple(after_layer), last_norm, head,
            call.pool if is_ours else None, tuple(kept),
        )  # fmt: skip

    def _buffers(self, tokens: int) -> _Buffers:
        layer, hidden = self._layers[0], self._hidden
        half = layer.head_dim // 2
        widest = max(linear.weight.columns for linear in self._linears)
        return _Buffers(
            residual=float_rows(tokens, hidden),
            normed=float_rows(tokens, hidden),
            qkv=float_rows(tokens, _rows(layer.qkv)),
            attended=float_rows(tokens, layer.output[0].weight.columns),
            projected=float_rows(tokens, hidden),
            gate_up=float_rows(tokens, _rows(layer.gate_up)),
            gated=float_rows(tokens, layer.down[0].weight.columns),
            cos=float_rows(tokens, half),
            sin=float_rows(tokens, half),
            rounded=rounded_rows(tokens, widest, self._head.digits),
        )

    def _norm(self, b: _Buffers, x: Tensor, weight: Tensor, *, adds: bool) -> Block:
        """The norm of x, or of x and the sum so far."""
        made = block_of(Norm)
        made[Norm.WORKER // 8] = norm_worker()
        made[Norm.X // 8], made[Norm.OUT // 8] = x.data_ptr(), b.normed.data_ptr()
        made[Norm.RESIDUAL // 8] = b.residual.data_ptr() if adds else 0
        made[Norm.WEIGHT // 8], made[Norm.WIDTH // 8] = weight.data_ptr(), weight.shape[0]
        made[Norm.EPS // 8] = float_bits(self._eps)
        return made

    def _rotate(self, b: _Buffers, layer: _Layer) -> Block:
        made = block_of(Rotate)
        made[Rotate.WORKER // 8], made[Rotate.QKV // 8] = rotate_worker(), b.qkv.data_ptr()
        made[Rotate.Q_HEADS // 8], made[Rotate.KV_HEADS // 8] = (
            layer.num_q_heads,
            layer.num_kv_heads,
        )
        made[Rotate.HEAD_DIM // 8] = layer.head_dim
        made[Rotate.COS // 8], made[Rotate.SIN // 8] = b.cos.data_ptr(), b.sin.data_ptr()
        for field, weight in ((Rotate.Q_NORM, layer.q_norm), (Rotate.K_NORM, layer.k_norm)):
            made[field // 8] = 0 if weight is None else weight.data_ptr()
        made[Rotate.EPS // 8] = float_bits(self._eps)
        return made

    def _record(self, call: StepCall, index: int, b: _Buffers, scratch: Tensor) -> Recorded:
        layer, backend = self._layers[index], call.backends[index]
        assert isinstance(backend, CpuBackend)
        q, k, v = _heads(layer, b.qkv)
        out = b.attended.view(-1, layer.num_q_heads, layer.head_dim)
        return backend.record(call.pool[index], q, k, v, out, layer.params, scratch)


def _layer(layer: Layer, code: Code, digits: int) -> _Layer:
    forward, norms = layer.feed_forward, layer.qk_norms
    assert isinstance(forward, Dense), "see `_mismatch`"
    products = (
        _linears(given, code, digits)
        for given in (layer.qkv, layer.output, forward.up, forward.down)
    )
    return _Layer(
        _weight(layer.attn_in), None if norms is None else _weight(norms.q),
        None if norms is None else _weight(norms.k), _weight(layer.ffn_in), layer.num_q_heads,
        layer.num_kv_heads, layer.head_dim, layer.params, *products,
    )  # fmt: skip


def _linears(given: AnyLinear, code: Code, digits: int) -> _Products:
    """A product's weights in tiles: numbers rounded as `code`, narrow weights as they are."""
    if isinstance(given, Apart):
        return tuple(linear for part in given.parts for linear in _linears(part, code, digits))
    if isinstance(given, NarrowProduct):
        return (Linear(pack_narrow(given.weight), given.bias, digits),)
    assert isinstance(given, DenseLinear)
    return (Linear(pack(given.weight.detach(), code), given.bias, digits),)


def _rows(products: _Products) -> int:
    return sum(linear.weight.rows for linear in products)


def _are_one(head: NarrowProduct, table: NarrowEmbedding) -> bool:
    return head.weight.codes.data_ptr() == table.narrow.codes.data_ptr()


def _weight(norm: LayerNorm | None) -> Tensor:
    """A plain norm's weight."""
    assert norm is not None
    assert norm.weight is not None
    return norm.weight


def _heads(layer: _Layer, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [T, heads, head_dim] as they lie in qkv [T, ..]."""
    q, kv = layer.num_q_heads, layer.num_kv_heads
    heads = qkv.view(qkv.shape[0], q + 2 * kv, layer.head_dim)
    return heads[:, :q], heads[:, q : q + kv], heads[:, q + kv :]


def _gate(b: _Buffers) -> Block:
    made = block_of(Gate)
    made[Gate.WORKER // 8], made[Gate.WIDTH // 8] = gate_worker(), b.gated.shape[1]
    made[Gate.GATE_UP // 8], made[Gate.OUT // 8] = b.gate_up.data_ptr(), b.gated.data_ptr()
    return made
