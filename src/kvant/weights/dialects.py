"""How the tensors of each dialect (`kvant.weights.parts`) are checked and read as `NarrowWeight`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvant.errors import BadCheckpoint, WayOut
from kvant.weights.blocks import read_blocks
from kvant.weights.codecs import NarrowStack, NarrowWeight, pack_nibbles
from kvant.weights.format import WHOLE, Code, Dialect, Scale, Scheme, WeightFormat, block_type
from kvant.weights.order import input_order
from kvant.weights.parts import scale_fault

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of each of eight neighbouring outputs."""

_SCALE_OF = {
    torch.float32: Scale.FLOAT32, torch.float16: Scale.FLOAT16, torch.bfloat16: Scale.BFLOAT16,
}  # fmt: skip


def read_experts(
    name: str, scheme: Scheme, count: int, rows: int, columns: int, tensors: Mapping[str, Tensor]
) -> NarrowStack:
    """Reads the experts' weights from tensors that `expert_parts` describes. Every number keeps its value.

    tensors: blocks, uint8 [count, rows, groups, 16], and scales, uint8 [count, rows, groups]. Raises
    BadCheckpoint for scales that are NaN.
    """
    fmt, blocks, scales = scheme.format, tensors["blocks"], tensors["scales"]
    check_scales(f"{name}_scales", scales)
    codes = torch.empty(count * rows, columns // 2, dtype=torch.uint8, device=blocks.device)
    for expert, packed in enumerate(blocks.view(count, rows, columns // 2)):
        wide = torch.stack((packed & 15, packed >> 4), -1).view(rows, columns)
        codes[expert * rows : (expert + 1) * rows] = pack_nibbles(wide, fmt.columns)
    by_group = scales.view(count * rows, -1).t().contiguous()
    return NarrowStack(NarrowWeight(fmt, count * rows, columns, codes, by_group), count)


def check_scales(name: str, scales: Tensor, ways_out: tuple[WayOut, ...] = ()) -> None:
    """Raises BadCheckpoint for scales [..] that are NaN, infinite, zero or negative.

    uint8: exponents, of which 255 is NaN. e4m3: zero is a scale, to which small ones of nvfp4 are rounded.
    """
    if scales.dtype is torch.uint8:
        fault = scale_fault(name, is_finite=not bool((scales == 255).any()), ways_out=ways_out)
    else:
        small, numbers = scales.dtype is torch.float8_e4m3fn, scales.to(torch.float32)
        fault = scale_fault(
            name,
            is_finite=bool(torch.isfinite(numbers).all()),
            is_positive=not bool((numbers < 0 if small else numbers <= 0).any()),
            small=small,
            ways_out=ways_out,
        )
    if fault is not None:
        raise fault


def read_order(name: str, index: Tensor, scheme: Scheme) -> Tensor | None:
    """Returns `input_order` of an index of groups [K]: int32 [K] on its device, or None.

    Raises BadCheckpoint like it.
    """
    found = input_order(name, index.to("cpu", torch.int64).numpy(), scheme)
    return None if found is None else torch.from_numpy(found).to(index.device, torch.int32)


def read(
    name: str, scheme: Scheme, rows: int, columns: int, tensors: Mapping[str, Tensor]
) -> NarrowWeight:
    """Reads the weight [rows, columns] of the layer `name`. Every number keeps its value.

    tensors: by the names of `parts_of`, with its shapes and dtypes. `decode` of the result equals the
    dialect's own dequantisation. Raises BadCheckpoint for 8-bit floats that are NaN.
    """
    fmt, dialect = scheme.format, scheme.dialect
    if dialect is Dialect.GGUF:
        return read_blocks(block_type(fmt), tensors["weight"], columns)
    if dialect in (Dialect.FP8, Dialect.FLOAT_QUANTIZED, Dialect.MODELOPT_FP8):
        codes = tensors["weight"].view(torch.uint8)
        if bool(((codes & 0x7F) == 0x7F).any()):
            raise BadCheckpoint(f"{name}.weight holds NaN", why="a code of its 8-bit floats is NaN")
        scales = tensors["weight_scale_inv" if dialect is Dialect.FP8 else "weight_scale"]
        return _wide_scales(fmt, rows, columns, codes, scales)
    if dialect is Dialect.INT_QUANTIZED:
        zeros = None
        if fmt.zero_points:
            zeros = tensors["weight_zero_point"].view(torch.uint8) ^ 0x80
        codes = tensors["weight"].view(torch.uint8)
        return _eight_bits(fmt, rows, columns, codes, tensors["weight_scale"], zeros)
    if dialect in (Dialect.NVFP4_PACK, Dialect.MXFP4_PACK, Dialect.MODELOPT_NVFP4):
        packed = tensors["weight" if dialect is Dialect.MODELOPT_NVFP4 else "weight_packed"]
        codes = torch.stack((packed & 15, packed >> 4), -1).view(rows, columns)
        factor = None
        if dialect is Dialect.NVFP4_PACK:
            factor = 1.0 / tensors["weight_global_scale"].to(torch.float32).view(1)
        elif dialect is Dialect.MODELOPT_NVFP4:
            factor = tensors["weight_scale_2"].to(torch.float32).view(1)
        scales = tensors["weight_scale"].view(torch.uint8).t().contiguous()
        return NarrowWeight(
            fmt, rows, columns, pack_nibbles(codes, fmt.columns), scales, None, factor
        )
    order = None
    if scheme.reordered:
        index = "weight_g_idx" if dialect is Dialect.PACK_QUANTIZED else "g_idx"
        order = read_order(f"{name}.{index}", tensors[index], scheme)
    if dialect is Dialect.PACK_QUANTIZED:
        return _packed(scheme, rows, columns, tensors, order)
    words = tensors["qweight"]
    zeros = None
    if dialect is Dialect.AWQ:
        codes = _unpack(words, 4, _AWQ_ORDER).t()
        if fmt.zero_points:
            zeros = _unpack(tensors["qzeros"], 4, _AWQ_ORDER)
    else:
        codes = _unpack(words.t(), 4)
        zeros = _unpack(tensors["qzeros"], 4)
        if dialect is Dialect.GPTQ:
            zeros = zeros + 1
    scales = tensors["scales"].contiguous()
    made = replace(fmt, scale=_SCALE_OF[scales.dtype])
    codes = pack_nibbles(_sorted(codes, order).contiguous(), fmt.columns)
    zeros = None if zeros is None else zeros.contiguous()
    return NarrowWeight(made, rows, columns, codes, scales, zeros, order=order)


def _sorted(codes: Tensor, order: Tensor | None) -> Tensor:
    """Returns codes [rows, columns] with the columns in this order."""
    return codes if order is None else codes.index_select(1, order)


def _wide_scales(
    fmt: WeightFormat, rows: int, columns: int, codes: Tensor, scales: Tensor
) -> NarrowWeight:
    wide = scales.to(torch.float32)
    if fmt.columns == WHOLE:
        wide = wide.reshape(-1)
    return NarrowWeight(fmt, rows, columns, codes.contiguous(), wide.contiguous())


def _packed(
    scheme: Scheme,
    rows: int,
    columns: int,
    tensors: Mapping[str, Tensor],
    order: Tensor | None,
) -> NarrowWeight:
    """Reads compressed-tensors' integers: a stream of bits with code + 2^(bits - 1), lowest bits first."""
    fmt, bits, scales = scheme.format, scheme.bits, tensors["weight_scale"]
    codes = _sorted(_unpack_stream(tensors["weight_packed"], bits, columns), order)
    zeros = None
    if fmt.zero_points:
        zeros = _unpack_stream(tensors["weight_zero_point"].t(), bits, rows).t()
    if fmt.code is Code.INT8:
        above = 128 - (1 << (bits - 1))
        zeros = None if zeros is None else zeros + above
        return _eight_bits(fmt, rows, columns, (codes + above) ^ 0x80, scales, zeros, order)
    made = replace(fmt, scale=_SCALE_OF[scales.dtype])
    packed = pack_nibbles(codes, fmt.columns)
    zeros = None if zeros is None else zeros.t().contiguous()
    return NarrowWeight(made, rows, columns, packed, scales.t().contiguous(), zeros, order=order)


def _eight_bits(
    fmt: WeightFormat,
    rows: int,
    columns: int,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None = None,
) -> NarrowWeight:
    """Reads integers of up to 8 bits: codes, uint8 [rows, columns], in two's complement.

    zeros: zero point + 128, uint8 in the shape of the scales, or None.
    """
    if fmt.columns == WHOLE:
        made = replace(fmt, scale=Scale.FLOAT32)
        weight = _wide_scales(made, rows, columns, codes, scales)
        return replace(weight, zeros=None if zeros is None else zeros.reshape(-1))
    made = replace(fmt, scale=_SCALE_OF[scales.dtype])
    zeros = None if zeros is None else zeros.t().contiguous()
    grouped = scales.t().contiguous()
    return NarrowWeight(made, rows, columns, codes.contiguous(), grouped, zeros, order=order)


def _unpack_stream(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks int32 [n, m], streams of codes of 2 to 8 bits, to uint8 [n, count]."""
    if 32 % bits == 0:
        return _unpack(words, bits)[:, :count]
    first = torch.arange(count, device=words.device) * bits
    word, place = first // 32, first % 32
    next_word = (word + 1).clamp(max=words.shape[1] - 1)
    wide = words.to(torch.int64) & 0xFFFFFFFF
    both = wide[:, word] | (wide[:, next_word] << 32)
    return ((both >> place) & ((1 << bits) - 1)).to(torch.uint8)


def _unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpacks int32 [n, m], 32 / bits codes each, to uint8 [n, m * 32 / bits]. order: positions in a word."""
    count = 32 // bits
    places = torch.tensor(order or tuple(range(count)), device=words.device, dtype=torch.int32)
    found = (words[..., None] >> (places * bits)) & ((1 << bits) - 1)
    return found.to(torch.uint8).reshape(words.shape[0], -1)
