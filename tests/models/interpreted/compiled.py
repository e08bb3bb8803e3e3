"""Run as a program without `TRITON_INTERPRET`: compiles the decoder's kernels for an H200, in bfloat16 and
with the widths of Qwen3-30B-A3B, gpt-oss-20b and Gemma-3-12B, on a machine without a GPU, and prints what
it compiled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kvant.models.fused import triton_experts
from kvant.models.fused.experts import Clamp, Experts, GateOrder
from kvant.models.fused.few_rows import FewRows
from kvant.models.fused.layers import Norm, QKNorms
from kvant.models.fused.recipe import Activation, NormKind, Pairing
from kvant.models.fused.routing import Routing, Scoring
from kvant.models.fused.triton_experts import TritonExperts, Unscored
from kvant.models.fused.triton_kernels import TritonKernels
from kvant.models.sharding.shard import Shard
from kvant.parallel.symmetric import MOST_ROWS, MOST_ROWS_OF_TWO, SymmetricSums
from kvant.parallel.triton_sums import added
from kvant.weights.codecs import TORCH_SCALE, NarrowStack, NarrowWeight, scale_shape
from kvant.weights.format import (
    FP8_BLOCK,
    FP8_CHANNEL,
    INT8_CHANNEL,
    MXFP4,
    WeightFormat,
    int4_groups,
)
from kvant.weights.rounding import Rounding
from kvant.weights.triton import product
from tests.engine.interpreted.compiled import H200, type_of

MOST_SHARED = 232448
"""Bytes of shared memory that a program may have on an H200."""


_compiled: set[object] = set()


def _compile(kernel: JITFunction[Any], *given: object, **options: Any) -> None:
    """In the place of a launch."""
    names = [parameter.name for parameter in kernel.params]
    arguments = dict(zip(names, given, strict=False))
    arguments |= {name: options.pop(name) for name in names if name in options}
    constant = {p.name for p in kernel.params if p.is_constexpr}
    constant |= {name for name, value in arguments.items() if value is None}
    types = {n: "constexpr" if n in constant else _type_of(arguments[n]) for n in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if types[name].startswith("*") or _is_aligned(arguments[name], types[name])
    }
    known = "num_warps", "num_stages", "launch_pdl", "maxnreg"
    asked = {name: options[name] for name in known if name in options}
    key = kernel.fn.__name__, *types.items(), *[(n, str(arguments[n])) for n in sorted(constant)]
    if (key, *asked.items()) in _compiled:
        return
    _compiled.add((key, *asked.items()))
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, types, {name: arguments[name] for name in constant}, aligned)
    made = triton.compile(source, target=H200, options=asked)
    shared = made.metadata.shared
    assert made.asm["cubin"]
    assert shared <= MOST_SHARED, (kernel.fn.__name__, shared)
    print(kernel.fn.__name__, shared, flush=True)


def _type_of(value: object) -> str:
    if isinstance(value, GluonDescriptor):
        kind = type_of(value.base).removeprefix("*")
        return f"tensordesc<{kind}[{','.join(map(str, value.block_shape))}],{value.layout!r}>"
    if isinstance(value, TensorDescriptor):
        kind = type_of(value.base).removeprefix("*")
        return f"tensordesc<{kind}[{','.join(map(str, value.block_shape))}]>"
    return type_of(value)


def _is_aligned(value: object, kind: str) -> bool:
    """Whether a launch tells the compiler that an argument is a multiple of 16."""
    return kind != "constexpr" and type(value) is int and value % 16 == 0


def _layer(
    routing: Routing, hidden: int, width: int, order: GateOrder, clamp: Clamp | None
) -> Experts:
    count = routing.num_experts

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def bias(*shape: int) -> torch.Tensor | None:
        return None if clamp is None else empty(*shape)

    return Experts(
        routing, (empty(count, hidden), bias(count)),
        (empty(count, 2 * width, hidden), bias(count, 2 * width)),
        (empty(count, hidden, width), bias(count, hidden)), order, clamp,
    )  # fmt: skip


def _between_products() -> None:
    """Norms, rotations and activations, and products of few rows, with Gemma 3's widths."""
    made = TritonKernels(torch.device("cpu"))
    made._ahead = {"AHEAD": True, "launch_pdl": True}

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    x, cos = empty(32, 3840), empty(32, 128)
    for kind in NormKind:
        norm = Norm(kind, x[0], None if kind.is_rms else x[0], 1e-6)
        made.norm(x, norm)
        made.add_norm(x, x, norm, before=norm, factor=0.5)
    made.add_norm(x, x, None)
    for rounding in (Rounding(), Rounding(group=128), Rounding(scale=empty(1).float())):
        made.add_norm_rounded(x, x, Norm(NormKind.RMS, x[0], None, 1e-6), rounding)
        made.gate_rounded(empty(32, 2 * 12288), Activation.SILU, rounding)
    head = Norm(NormKind.RMS_ONE, empty(256), None, 1e-6)
    qkv = empty(32, 32 * 256)
    for pairing in Pairing:
        made.rotate(qkv, cos, cos, 16, 8, QKNorms(head, head), pairing)
        both, angles = empty(32, 16 * 192 + 576), empty(32, 32)  # DeepSeek-V2-Lite's widths
        latent = Norm(NormKind.RMS, empty(512), None, 1e-6)
        q, row = both[:, : 16 * 192].view(32, 16, 192), both[:, 16 * 192 :]
        made.rotate_latent(q, row, latent, angles, angles.float(), pairing)
    whole = Norm(NormKind.RMS, empty(4096), None, 1e-6), Norm(NormKind.RMS, empty(2048), None, 1e-6)
    made.gate_heads(empty(32, 4096), qkv.view(32, 16, 2, 256)[:, :, 1])
    made.norm_whole(qkv, 4096, 2048, QKNorms(*whole, whole=True))
    few = FewRows(torch.device("cpu"), 1e-6)
    few._ahead, few._processors, few._shared_bytes = True, 132, MOST_SHARED
    few._overlaps = True
    for activation in Activation:
        made.gate(qkv, activation)
        made.activate(qkv, activation)
        for tokens in (1, 8, 64):
            few.ready(empty(tokens, 3840), empty(30720, 3840), None, gate=activation)
    for tokens in (1, 8, 64):
        few.ready(empty(tokens, 15360), empty(3840, 15360), empty(3840))
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        stream = few.embed(ids, empty(1000, 3840), x[0])
        few.normed(stream, empty(6144, 3840), None)
        few.normed(stream, empty(30720, 3840), None, gate=Activation.SILU)
        few.normed(stream, empty(1000, 3840), None, picked=ids[:1], dtype=torch.float32)
        for columns in (4096, 15360):
            few.added(empty(tokens, columns), empty(3840, columns), None, stream, x[0])
    few._overlaps = False
    few.normed(stream, empty(6144, 3840), None)


def _sums_of_ranks() -> None:
    """Sums of 2 and 8 ranks, alone and with the residual and the norm behind them."""
    for size in (2, 8):
        sums = SymmetricSums.__new__(SymmetricSums)
        sums.width, sums.dtype, sums._shard = 4096, torch.bfloat16, Shard(0, size)
        sums._most_rows = MOST_ROWS_OF_TWO if size == 2 else MOST_ROWS
        sums._flag_bytes = 4 * size * sums._most_rows
        sums._epochs = sums._broken = torch.empty(1, dtype=torch.int32, device="meta")
        sums._peers = torch.empty(size, dtype=torch.int64, device="meta")
        sums._launches_ahead = True
        for rows in (1, 3):
            x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
            sums.sum(x)
            sums.sum_add_norm(x, x, x[0], 1e-6)
        added(torch.empty(size, 3, 4096, dtype=torch.bfloat16, device="meta"))


def _narrow(layer: Experts, formats: tuple[WeightFormat, WeightFormat]) -> Experts:
    """The same layer with weights in these formats."""

    def stack(weight: Tensor | NarrowStack, fmt: WeightFormat) -> NarrowStack:
        count, rows, columns = weight.shape
        scales = scale_shape(fmt, count * rows, columns)
        codes = torch.empty(
            count * rows, columns * fmt.code.bits // 8, dtype=torch.uint8, device="meta"
        )
        stored = torch.empty(scales, dtype=TORCH_SCALE[fmt.scale], device="meta")
        zeros = None
        if fmt.zero_points:
            zeros = torch.empty(scales, dtype=torch.uint8, device="meta")
        return NarrowStack(NarrowWeight(fmt, count * rows, columns, codes, stored, zeros), count)

    return replace(
        layer,
        gate_up=(stack(layer.gate_up[0], formats[0]), layer.gate_up[1]),
        down=(stack(layer.down[0], formats[1]), layer.down[1]),
    )


def _rounded_experts(made: TritonExperts, qwen: Experts) -> None:
    narrow = replace(_narrow(qwen, (FP8_BLOCK, FP8_BLOCK)), rounds=True)
    for tokens in (65, 512, 8192):
        x = torch.empty(tokens, qwen.down[0].shape[1], dtype=torch.bfloat16, device="meta")
        logits = torch.empty(tokens, qwen.routing.num_experts, dtype=torch.bfloat16, device="meta")
        made.apply(x, logits, narrow)


def _dense_blocks() -> None:
    weight = NarrowWeight(
        FP8_BLOCK, 5120, 2048, torch.empty(5120, 2048, dtype=torch.uint8, device="meta"),
        torch.empty(40, 16, device="meta"),
    )  # fmt: skip
    for tokens in (70, 8192):
        codes = torch.empty(tokens, 2048, dtype=torch.float8_e4m3fn, device="meta")
        out = torch.empty(tokens, 5120, dtype=torch.bfloat16, device="meta")
        product.of_copied_blocks(codes, torch.empty(tokens, 16, device="meta"), weight, out)


def _narrow_experts(made: TritonExperts, qwen: Experts, gpt_oss: Experts) -> None:
    integers = int4_groups(64, zero_points=True)
    for layer, formats, numbers in (
        (qwen, (FP8_BLOCK, FP8_BLOCK), (8, 8192)), (qwen, (INT8_CHANNEL, int4_groups(128)), (1024,)),
        (gpt_oss, (MXFP4, MXFP4), (8, 8192)), (gpt_oss, (integers, FP8_CHANNEL), (1024,)),
    ):  # fmt: skip
        hidden, count = layer.down[0].shape[1], layer.routing.num_experts
        narrow = _narrow(layer, formats)
        for tokens in numbers:
            x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
            logits = torch.empty(tokens, count, dtype=torch.bfloat16, device="meta")
            made.apply(x, logits, narrow)


if __name__ == "__main__":
    triton_experts._ptx = lambda x: True
    JITFunction.run = _compile  # type: ignore[method-assign,assignment]
    _between_products()
    _sums_of_ranks()
    made = TritonExperts(torch.device("cpu"))
    made._options = {"AHEAD": True, "launch_pdl": True}
    made._processors, made._shared_bytes, made._copies_tiles = 132, MOST_SHARED, True
    gpt_oss = Routing(32, 4, Scoring.TOP_K_THEN_SOFTMAX, rounded=True)
    layers = (
        _layer(Routing(128, 8, rounded=True), 2048, 768, GateOrder.HALVES, None),
        _layer(gpt_oss, 2880, 2880, GateOrder.ALTERNATING, Clamp(7.0, 1.702)),
    )
    _narrow_experts(made, *layers)
    _rounded_experts(made, layers[0])
    product.multiprocessors = lambda device: 132  # type: ignore[attr-defined]
    _dense_blocks()
    for layer in layers:
        hidden, count = layer.down[0].shape[1], layer.routing.num_experts
        for tokens in (1, 8, 32, 1024, 8192):
            x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
            logits = torch.empty(tokens, count, dtype=torch.bfloat16, device="meta")
            made.apply(x, logits, layer)
        x = x[:64]
        if made.multiplies(layer.router[0]):
            made.route(Unscored(x, layer.router), layer.routing, x, x[0], 1e-6)
        choice, _ = made.route(logits[:64], layer.routing, x, x[0], 1e-6)
        made.one_down(x.new_empty(choice.pairs, layer.width), choice, layer, x)
        made.combine_stream(x.new_empty(choice.pairs, hidden), x, x[0])
