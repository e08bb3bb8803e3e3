"""Linear layers and embeddings with narrow weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvant.weights.codecs import (
    TORCH_SCALE,
    NarrowWeight,
    decode,
    pick_rows,
    round_by,
    round_groups,
    round_rows,
    scale_shape,
)
from kvant.weights.format import WHOLE, WeightFormat
from kvant.weights.rounding import RoundedRows, Rounding, Rows

MOST_EXACT = 64
"""Maximum number of rows whose activations are never rounded: reading weights takes most of their time."""


def multiply(
    x: Rows,
    weight: NarrowWeight,
    bias: Tensor | None,
    *,
    alike: bool = False,
    rounds: bool = False,
    input_scale: Tensor | None = None,
    fast_sums: bool = False,
) -> Tensor:
    """Returns x [T, columns] times a weight, plus bias [rows] or None: [T, rows] in x's dtype.

    alike: on a GPU, use one kernel for any T, so that no row's result depends on other rows. No such kernel
    reads rounded activations, so `rounds` excludes it. rounds: round x as `rounded_numbers` does if T is more
    than `MOST_EXACT`. input_scale: float32 [1] for all of x; None computes scales from x. fast_sums: of
    rounded x on a GPU; see `RoundedRows`.
    On a GPU, kernels read the codes, and x may be rounded already as `rounding_of` says. Elsewhere the weight
    is decoded for each product, which is slow.
    """
    assert not (alike and (rounds or isinstance(x, RoundedRows))), "alike products do not round"
    if weight.device.type == "cuda":
        from kvant.weights import choose

        if not isinstance(x, RoundedRows):
            rounding = (
                None
                if not rounds
                else rounding_of(weight, len(x), input_scale, fast_sums=fast_sums)
            )
            if rounding is None:
                return (choose.multiply_alike if alike else choose.multiply)(x, weight, bias)
            x = choose.round_activations(x, rounding)
        return choose.multiply_rounded(x, weight, bias)
    assert not isinstance(x, RoundedRows)
    if rounds and len(x) > MOST_EXACT:
        x = rounded_numbers(x, weight.format, input_scale).to(x.dtype)
    return F.linear(x, decode(weight, x.dtype), bias)


def rounding_of(
    weight: NarrowWeight, tokens: int, input_scale: Tensor | None = None, *, fast_sums: bool = False
) -> Rounding | None:
    """Returns how a GPU rounds activations of `tokens` rows for this weight.

    input_scale: float32 [1], or None. fast_sums: see `RoundedRows`. Returns None for few rows, which are
    never rounded, and if no kernel reads rounded activations.
    """
    if tokens <= MOST_EXACT or weight.device.type != "cuda":
        return None
    from kvant.weights import choose

    if not choose.takes_rounded(weight):
        return None
    by_groups = input_scale is None and weight.format.rows > 1 and weight.format.columns != WHOLE
    return Rounding(weight.format.columns if by_groups else 0, input_scale, fast_sums)


def rounded_numbers(x: Tensor, fmt: WeightFormat, input_scale: Tensor | None = None) -> Tensor:
    """Returns x [T, columns] as rounded for products with weights of this format, in float32.

    input_scale: float32 [1], for all numbers. None computes scales: one per row, or, for weights in blocks,
    one per as many columns of a row as a block has.
    """
    if input_scale is not None:
        codes, scales = round_by(x, input_scale), input_scale
    elif fmt.rows > 1 and fmt.columns != WHOLE:
        codes, scales = round_groups(x, fmt.columns)
        scales = scales.repeat_interleave(fmt.columns, 1)
    else:
        codes, scales = round_rows(x)
    return codes.view(torch.float8_e4m3fn).to(torch.float32) * scales


class NarrowLinear(nn.Module):
    """Replaces `nn.Linear`: the same product, with a weight in a narrow format.

    Its tensors start on the meta device, and a loader sets them. weight: codes. weight_scale,
    weight_zeros, weight_factor, weight_offsets, weight_factors, weight_order: see `NarrowWeight`; None if the
    weight has none. rounds, input_scale, fast_sums: see `multiply`.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_zeros: Tensor | None
    weight_factor: Tensor | None
    weight_offsets: Tensor | None
    weight_factors: Tensor | None
    weight_order: Tensor | None
    input_scale: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        fmt: WeightFormat,
        rows: int,
        columns: int,
        bias: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.rounds = self.fast_sums = False
        self.format, self.out_features, self.in_features = fmt, rows, columns
        for name, tensor in awaited_tensors("weight", fmt, rows, columns).items():
            setattr(self, name, tensor)
        self.weight_order = None
        self.input_scale = None
        self.bias = None if bias is None else _awaited((rows,), bias)

    @property
    def narrow(self) -> NarrowWeight:
        """The weight as products take it."""
        return NarrowWeight(
            self.format, self.out_features, self.in_features,
            self.weight, self.weight_scale, self.weight_zeros, self.weight_factor,
            self.weight_offsets, self.weight_factors, self.weight_order,
        )  # fmt: skip

    def put(
        self, weight: NarrowWeight, bias: Tensor | None = None, input_scale: Tensor | None = None
    ) -> None:
        """Sets a weight of the declared shape, and a bias [out_features] or None.

        input_scale: one number, of any float dtype and shape; None keeps the current one.
        """
        assert weight.shape == (self.out_features, self.in_features)
        self.format = weight.format
        for name, tensor in named_tensors("weight", weight).items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        if input_scale is not None:
            wide = input_scale.to(torch.float32).reshape(1)
            self.input_scale = nn.Parameter(wide, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the product [.., out_features] of x [.., in_features], in the dtype of x."""
        rows = x.reshape(-1, self.in_features)
        return self.product(rows, alike=False).view(*x.shape[:-1], self.out_features)

    def product(self, x: Tensor, *, alike: bool) -> Tensor:
        """Multiplies x [T, in_features]: returns [T, out_features] in its dtype. alike: as in `multiply`."""
        return multiply(
            x, self.narrow, self.bias, alike=alike, rounds=self.rounds, input_scale=self.input_scale,
            fast_sums=self.fast_sums,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.format.summary}"


class NarrowEmbedding(nn.Module):
    """Replaces `nn.Embedding`: rows of a weight in a narrow format, returned in `dtype`.

    The weight is that of a linear layer, which a tied head shares.
    """

    def __init__(self, weight: NarrowLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = weight, dtype

    @property
    def narrow(self) -> NarrowWeight:
        """The weight as products take it."""
        return self.linear.narrow

    @property
    def weight(self) -> Tensor:
        """An empty tensor [0, in_features], for code that reads an embedding's dtype and device."""
        codes = self.linear.weight
        return torch.empty(0, self.linear.in_features, dtype=self.dtype, device=codes.device)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns embeddings [.., in_features] of ids [..] int64."""
        if ids.is_cuda:
            found = numbers_of_rows(self.narrow, ids.reshape(-1), self.dtype)
            return found.view(*ids.shape, -1)
        rows, places = torch.unique(ids, return_inverse=True)
        return numbers_of_rows(self.narrow, rows, self.dtype)[places]


def numbers_of_rows(weight: NarrowWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Decodes rows [n] of a weight in groups of inputs; returns [n, columns] in this dtype."""
    if rows.is_cuda:
        from kvant.weights.triton.product import rows_decoded

        return rows_decoded(weight, rows, dtype)
    return decode(pick_rows(weight, rows), dtype)


def named_tensors(name: str, weight: NarrowWeight) -> dict[str, Tensor]:
    """Returns the tensors of a weight [rows, columns] under the names that narrow modules give them."""
    parts = {
        "": weight.codes, "_scale": weight.scales, "_zeros": weight.zeros,
        "_factor": weight.global_scale, "_offsets": weight.offsets, "_factors": weight.factors,
        "_order": weight.order,
    }  # fmt: skip
    return {name + end: tensor for end, tensor in parts.items() if tensor is not None}


def awaited_tensors(
    name: str, fmt: WeightFormat, rows: int, columns: int
) -> dict[str, nn.Parameter | None]:
    """Returns tensors on the meta device by the names of `named_tensors`; None if the format has none."""
    codes, scales = (rows, columns * fmt.code.bits // 8), scale_shape(fmt, rows, columns)
    factors = None
    if fmt.superblock:
        shape = (2 if fmt.offsets else 1, columns // fmt.superblock, rows)
        factors = _awaited(shape, torch.float16)
    return {
        name: _awaited(codes, torch.uint8),
        f"{name}_scale": _awaited(scales, TORCH_SCALE[fmt.scale]),
        f"{name}_zeros": _awaited(scales, torch.uint8) if fmt.zero_points else None,
        f"{name}_factor": _awaited((1,), torch.float32) if fmt.global_scale else None,
        f"{name}_offsets": _awaited(scales, TORCH_SCALE[fmt.scale]) if fmt.offsets else None,
        f"{name}_factors": factors,
    }


def _awaited(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
