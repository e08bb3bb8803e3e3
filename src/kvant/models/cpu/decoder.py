"""The forward of decoders on a CPU: one call of compiled code per step.

It runs the layers that `kvant.models.fused` found in a transformers module: attention, gated delta nets,
dense feed-forward layers and experts. What a step needs of Python is the embedding, the rotary frequencies
and a block of addresses; prompts of recurrent layers run in torch. Numbers between two operations are
float32, rounded where transformers' modules round if the model computes in bfloat16. A row's bits depend
neither on the rows beside it nor on the number of threads: batch-invariant as it is, but for recurrent
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from kvant.attention.base import StepCall
from kvant.attention.cpu.backend import CpuBackend, entries
from kvant.errors import EngineFault
from kvant.kernels.cpu.block import address
from kvant.kv.dtype import ComputeDtype
from kvant.kv.spec import KVPlan
from kvant.models.cpu.embedding import PackedEmbedding, WideEmbedding
from kvant.models.cpu.info import MOST_TAPS, NORM_STEP, refuse_shape
from kvant.models.cpu.layout import Embed, Norm, Product, StepFields
from kvant.models.cpu.linear import Linear, float_rows
from kvant.models.cpu.parts import Attention, Part, Recurrence, products, read_norm, read_part
from kvant.models.cpu.parts import refuse_experts as refuse_mixture
from kvant.models.cpu.record import Program, Recorder
from kvant.models.cpu.rounding import EIGHT_BITS, EXACT
from kvant.models.cpu.run import new_step, run_function
from kvant.models.cpu.weights import INT4, Code, PackedWeight, pack_narrow
from kvant.models.forward import ExpertBytes
from kvant.models.forward_info import ForwardChoice
from kvant.models.fused.decoder import FusedDecoder, fuse
from kvant.models.fused.feed_forward import Dense
from kvant.models.fused.layers import LatentLayer, Layer, MixerLayer
from kvant.models.fused.linear import Apart, NarrowProduct
from kvant.models.quantization import Quantization
from kvant.models.recurrent.hook import run_framed
from kvant.models.recurrent.mixers import GatedDeltaNet
from kvant.models.recurrent.packed import Packed
from kvant.weights.linear import NarrowEmbedding, NarrowLinear

_TORCH_ROWS = 32
"""Rows of a step from which on torch's products of bfloat16 numbers are the faster ones."""

_CODES: dict[Quantization | None, tuple[Code | None, Code | None]] = {
    None: (None, None),
    Quantization.INT8: (Code.INT8, Code.INT8),
    Quantization.INT4: (INT4, Code.INT8),
}
"""Codes of layers, and of the head, whose rounding changes the logits directly."""


def make(module: PreTrainedModel, plan: KVPlan, choice: ForwardChoice) -> CpuDecoder:
    """Builds the compiled forward of a loaded module.

    With quantization, removes the rounded weights from the module. Raises EngineFault if the module
    does not match the plan.
    """
    fused = fuse(module, plan, joins=choice.quantization is None)
    reason = _mismatch(fused, plan.compute_dtype)
    if reason is not None:
        raise EngineFault(f"the plan runs {type(module).__name__} as compiled code, but {reason}")
    made = CpuDecoder(fused, module, choice, plan.compute_dtype)
    if made.took_weights:
        _drop_products(module)
    if isinstance(made.embedding, PackedWeight):
        module.set_input_embeddings(PackedEmbedding(made.embedding))
    elif plan.compute_dtype is ComputeDtype.FLOAT32 and made.embedding.dtype is torch.bfloat16:
        table: Any = module.get_input_embeddings()
        module.set_input_embeddings(WideEmbedding.of(table))
    return made


def _mismatch(decoder: FusedDecoder, compute: ComputeDtype) -> str | None:
    """Returns why compiled code cannot run these layers (a fault of the plan), or None."""
    model = decoder.model
    allowed = {torch.float32, torch.bfloat16}
    if compute is ComputeDtype.BFLOAT16:
        allowed = {torch.bfloat16}
    if model.embedding.dtype not in allowed:
        return f"it computes in {compute.value}, with weights of {model.embedding.dtype}"
    linears = [model.head]
    for layer in model.layers:
        if isinstance(layer, LatentLayer):
            return "it has layers of latents"
        if isinstance(layer, Layer):
            if layer.qk_norms is not None and not layer.qk_norms.of_heads:
                return "its queries and keys are not normed by head"
            if (layer.qk_norms is not None or layer.gated) and layer.head_dim % NORM_STEP:
                return f"heads of {layer.head_dim} are normed in steps of {NORM_STEP}"
            linears += [layer.qkv, layer.output]
        else:
            reason = _refuse_mixer(layer)
            if reason is not None:
                return reason
        forward = layer.feed_forward
        if isinstance(forward, Dense):
            linears += [forward.up, forward.down]
            continue
        reason = refuse_mixture(forward)
        if reason is not None:
            return reason
        if forward.shared is not None:
            linears += [forward.shared.dense.up, forward.shared.dense.down]
        for weight in (forward.gate_up[0], forward.down[0]):
            reason = refuse_shape(weight.shape[1], weight.shape[2])
            if reason is not None:
                return reason
    return next((r for x in linears if (r := refuse_shape(x.rows, x.columns)) is not None), None)


def _refuse_mixer(layer: MixerLayer) -> str | None:
    mixer = layer.mixer
    if not isinstance(mixer, GatedDeltaNet) or not mixer.is_joinable:
        return f"it has {type(mixer).__name__} in another form"
    conv = mixer.module.conv1d
    if conv.bias is not None or not 2 <= conv.weight.shape[-1] <= MOST_TAPS:
        return "its convolutions have biases or another number of inputs"
    if mixer.keys % NORM_STEP or mixer.values % NORM_STEP:
        return f"its heads' keys and values are taken in steps of {NORM_STEP}"
    return None


def _drop_products(module: PreTrainedModel) -> None:
    """Frees the memory of weights that were packed, except a wide tied head, which is the embedding."""
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
    is to drop its own. embedding: [vocab_size, hidden_size], float32 or bfloat16, or narrow; a tied head is
    the same object. Computing in bfloat16, steps of more than _TORCH_ROWS rows run through the fused forward
    in torch, unless results are to be batch-invariant.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        module: PreTrainedModel,
        choice: ForwardChoice,
        compute: ComputeDtype = ComputeDtype.FLOAT32,
    ) -> None:
        assert _mismatch(decoder, compute) is None
        code, head = _CODES[choice.quantization]
        digits = EXACT if choice.activations is None else EIGHT_BITS
        model = decoder.model
        self._fused = decoder
        self._rounds = compute is ComputeDtype.BFLOAT16
        self._like = torch.empty(0, dtype=torch.bfloat16 if self._rounds else torch.float32)
        self._uses_torch = self._rounds and not choice.batch_invariant
        self._moved_bytes = sum(
            layer.mixer.join()
            for layer in model.layers
            if isinstance(layer, MixerLayer) and isinstance(layer.mixer, GatedDeltaNet)
        )
        self._parts: tuple[Part, ...] = tuple(
            read_part(layer, code, digits) for layer in model.layers
        )
        (self._head,) = products(model.head, head, digits)
        self.embedding: Tensor | PackedWeight = model.embedding
        self.took_weights = choice.quantization is not None or choice.stored is not None
        if self.took_weights:  # else the weights that were packed would stay in memory
            decoder.model = replace(model, layers=(), head=Apart(()))
        table: Any = module.get_input_embeddings()
        if isinstance(table, NarrowEmbedding):
            tied = isinstance(model.head, NarrowProduct) and _are_one(model.head, table)
            self.embedding = self._head.weight if tied else pack_narrow(table.narrow)
        self._recorder = Recorder(
            self._parts, read_norm(model.norm), self._head, self.embedding, rounds=self._rounds
        )
        self._program: Program | None = None
        self._entry = run_function().call
        self._compiled_seconds = 0.0
        self._step, self._team = new_step()
        step = self._step
        write, write_worker, attend, attend_worker = entries()
        step[StepFields.WRITE // 8], step[StepFields.WRITE_WORKER // 8] = write, write_worker
        step[StepFields.ATTEND // 8], step[StepFields.ATTEND_WORKER // 8] = attend, attend_worker

    @property
    def extra_bytes(self) -> int:
        """Bytes of weights that the module does not have."""
        found = self.own_weight_bytes
        if isinstance(self.embedding, PackedWeight) and self.embedding is not self._head.weight:
            found += self.embedding.num_bytes
        return found

    @property
    def own_weight_bytes(self) -> int:
        """Bytes of matrices that the module does not have, or not in this form."""
        found = self._moved_bytes
        table = self.embedding.data_ptr() if isinstance(self.embedding, Tensor) else None
        for linear in self._linears:
            # A wide tied head is the embedding, which the module keeps.
            is_table = linear.weight.codes.data_ptr() == table
            if linear.rounds or (self.took_weights and not is_table):
                found += linear.num_bytes
        return found

    @property
    def expert_bytes(self) -> tuple[ExpertBytes, ...]:
        return self._fused.expert_bytes

    @property
    def compiled_seconds(self) -> float | None:
        """Seconds in compiled code so far. The rest of a step is spent in Python."""
        return self._compiled_seconds

    @property
    def _linears(self) -> list[Linear]:
        return [*(linear for part in self._parts for linear in part.linears), self._head]

    def score(self, hidden: Tensor) -> Tensor:
        """Applies the head: [n, hidden_size], normed -> [n, vocab_size], float32."""
        return self._head(hidden.to(torch.float32), to_bf16=self._rounds)

    def run(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns logits [len(logits_index), vocab_size] and outputs of `layers`, each [T, hidden_size]."""
        tokens, chosen, step_of = input_ids.shape[0], logits_index.shape[0], call.step
        if self._uses_torch and tokens > _TORCH_ROWS:
            return self._fused.run(input_ids, call, logits_index, layers)
        (turns,) = self._fused.turns(step_of, self._like)
        cos, sin = turns.of(step_of)
        program = self._program_for(call, max(tokens, chosen), cos.shape[1])
        at = step_of.of(program.group)
        kept = self._set_recurrences(program, call)
        if program.embed is not None:
            input_ids = input_ids.contiguous()
            program.embed[Embed.IDS // 8] = input_ids.data_ptr()
        elif isinstance(self.embedding, Tensor):
            program.residual[:tokens] = F.embedding(input_ids, self.embedding)
        program.cos[:tokens], program.sin[:tokens] = cos, sin
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
        taps = self._go(program, call, tokens, layers, singly=kept is not None)
        del kept
        return logits, tuple(taps[layer] for layer in layers)

    def _set_recurrences(self, program: Program, call: StepCall) -> Packed | None:
        """Point recorded recurrences at the sequences of a step with one token each.

        Returns what they read, to be kept while they run; None where they run in torch.
        """
        if not program.recurrences or call.step.lengths is not None or call.states is None:
            return None
        packed = Packed.of(call.step, call.states.pages, singly=call.states.singly)
        if not (packed.rows.is_contiguous() and packed.starts.is_contiguous()):
            return None
        for block, pages, starts in program.recurrences:
            block[pages], block[starts] = packed.rows.data_ptr(), packed.starts.data_ptr()
        return packed

    def _go(
        self, program: Program, call: StepCall, tokens: int, layers: Sequence[int], *, singly: bool
    ) -> dict[int, Tensor]:
        """Runs all operations, with stops for Python's part; returns the outputs of `layers`."""
        step, operations = address(self._step), address(program.operations)
        done, dtype = 0, self._like.dtype
        taps: dict[int, Tensor] = {}
        for index, part in enumerate(self._parts):
            stop, mix = program.stops[index], part.mix
            if isinstance(mix, Recurrence):
                if not singly:
                    self._run(step, operations, done, stop.after_entry)
                    given = stop.entered[:tokens].to(dtype)
                    stop.mixed[:tokens] = run_framed(mix.net, given, call, index)
                    done = stop.after_mix
            elif program.pool is None or call.pool[index].saturation is not None:
                done = self._run(step, operations, done, stop.after_entry)
                q, k, v = mix.heads(stop.entered[:tokens])
                cache, at = call.pool[index], call.step_of(index)
                if program.pool is None:
                    q, k, v = (x.to(dtype) for x in (q, k, v))
                    call.backends[index].write(cache, k, v, at)
                    out = call.backends[index].attend(cache, q, at, mix.params)
                    stop.mixed[:tokens] = out.reshape(tokens, -1)
                elif cache.saturation is not None:
                    cache.saturation.sample((k, v), (cache.k_scale, cache.v_scale), at.slot_mapping)
            if index in layers:
                done = self._run(step, operations, done, stop.after_layer)
                found = program.residual[:tokens].clone()
                if index + 1 == len(self._parts):
                    found += program.projected[:tokens]
                taps[index] = found.to(dtype)
        self._run(step, operations, done, program.end)
        return taps

    def _run(self, step: int, operations: int, first: int, end: int) -> int:
        begin = perf_counter()
        done = self._entry(step, operations, first, end)
        self._compiled_seconds += perf_counter() - begin
        return done

    def _program_for(self, call: StepCall, rows: int, pairs: int) -> Program:
        """Returns the program for `rows` rows; builds it if there is none."""
        attends = [i for i, part in enumerate(self._parts) if isinstance(part.mix, Attention)]
        groups = {call.pool.group_of(index) for index in attends}
        is_ours = all(isinstance(call.backends[index], CpuBackend) for index in attends)
        is_ours = is_ours and len(groups) == 1  # compiled code knows one page table
        is_ours = is_ours and not call.pool.plan.has_wide_rows  # and one form of a row
        found = self._program
        if (
            found is None
            or found.num_tokens < rows
            or found.num_threads != torch.get_num_threads()
            or found.pool is not (call.pool if is_ours else None)
            or found.states is not call.states
        ):
            room = rows if found is None else max(rows, found.num_tokens)
            self._program = found = None  # free its memory before allocating the next one's
            group = groups.pop() if len(groups) == 1 else 0
            found = self._program = self._recorder.record(call, room, pairs, group, is_ours=is_ours)
        return found


def _are_one(head: NarrowProduct, table: NarrowEmbedding) -> bool:
    return head.weight.codes.data_ptr() == table.narrow.codes.data_ptr()
