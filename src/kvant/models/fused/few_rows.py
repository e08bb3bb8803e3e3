"""Steps of few tokens on an NVIDIA GPU: four matrix products per layer, with only attention between them.

See `few_rows_kernels`. bfloat16 only: rows are multiplied by a norm's weight before they are normalised,
which could overflow float16. The norm's scale is applied to float32 sums, while transformers rounds the
normalised row to bfloat16 first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvant.kernels.triton.device import launches_ahead, multiprocessors, shared_memory_of_a_program
from kvant.models.fused import few_rows_kernels as kernels
from kvant.models.fused.few_rows_info import MOST_SPLIT, MOST_TOKENS, ROWS
from kvant.models.fused.recipe import Activation
from kvant.models.fused.triton_kernels import ACTIVATIONS
from kvant.weights.cuda.few_rows import token_tiles
from kvant.weights.cuda.wide_rows import Blocks, data_of

_DEPTH, _DEEP = 128, 256
"""Columns of a weight's tile: usual, and if a multiprocessor runs one program only."""

_MOST_BESIDE = 4
"""Maximum number of programs that run on a multiprocessor at once; if there are more, three run."""

_SPLIT_IF_FEWER = 8
"""A product's columns are split if this many times its stripes would not fill the device."""


class Cut(NamedTuple):
    """How a product is cut.

    split: parts of a stripe's columns. stages: tiles in flight. depth: columns of a tile.
    """

    split: int
    stages: int
    depth: int = _DEPTH


@dataclass(frozen=True, slots=True)
class Stream:
    """The state between layers: the residual sum [T, width], and the inputs of the next norm.

    norm_weight: [width]. weighted: [T, width], residual * norm_weight, in blocks if its reader takes them.
    squares: float32 [stripes, 64], sums of squares. Both are None for a single token: the kernel that reads
    the sum computes them.
    """

    residual: Tensor
    norm_weight: Tensor
    weighted: Tensor | Blocks | None = None
    squares: Tensor | None = None


class FewRows:
    """Products for up to `MOST_TOKENS` tokens. Owns scratch memory, so one step runs at a time.

    Programs that share a stripe exchange partial sums in that memory.
    """

    most_tokens = MOST_TOKENS

    def __init__(
        self, device: torch.device, eps: float, *, one: bool = False, overlaps: bool = False
    ) -> None:
        """one: norms multiply by 1 + weight. overlaps: products of several tokens that do what lies between
        them may start while the previous kernel runs. They would take multiprocessors from a product of a
        large weight.
        """
        self._eps, self._one = eps, int(one)
        self._shared_bytes = shared_memory_of_a_program(device)
        self._processors = multiprocessors(device)
        self._ahead = launches_ahead(device)
        self._overlaps = overlaps and self._ahead
        # Allocated at their final size: CUDA graphs keep their addresses.
        stripes = self._processors
        self._arrived = torch.zeros(stripes, dtype=torch.int32, device=device)
        room = stripes * MOST_SPLIT * ROWS * MOST_TOKENS
        self._partial = torch.empty(room, dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the scratch memory."""
        owned = (self._arrived, self._partial)
        return sum(part.numel() * part.element_size() for part in owned)

    def embed(
        self, ids: Tensor, embedding: Tensor, norm_weight: Tensor, *, blocks: bool = False
    ) -> Stream:
        """Returns the stream of embeddings.

        ids: [T] int64. embedding: [vocab_size, width]. norm_weight: [width]. blocks: whether `weighted` is
        `Blocks`; if so, the dtype is bfloat16.
        """
        tokens, width = ids.shape[0], embedding.shape[1]
        if tokens == 1:
            return Stream(embedding.index_select(0, ids), norm_weight)
        residual = embedding.new_empty(tokens, width)
        return self._weigh(residual, norm_weight, ids, embedding, blocks=blocks)

    def weigh(self, residual: Tensor, norm_weight: Tensor, *, blocks: bool = False) -> Stream:
        """Returns the stream of a complete residual sum [T, width].

        norm_weight: [width], of the next norm. blocks: as in `embed`.
        """
        if residual.shape[0] == 1:
            return Stream(residual, norm_weight)
        return self._weigh(residual, norm_weight, None, None, blocks=blocks)

    def _weigh(
        self,
        residual: Tensor,
        norm_weight: Tensor,
        ids: Tensor | None,
        embedding: Tensor | None,
        *,
        blocks: bool,
    ) -> Stream:
        tokens, width = residual.shape
        weighted: Tensor | Blocks = (
            Blocks.empty(tokens, width, residual.device) if blocks else torch.empty_like(residual)
        )
        squares = residual.new_empty(1, MOST_TOKENS, dtype=torch.float32)
        kernels.embed[(tokens,)](
            ids, embedding, norm_weight, residual, data_of(weighted), squares,
            WIDTH=width, PAD=triton.next_power_of_2(width), GATHER=ids is not None,
            TILES=token_tiles(tokens) if blocks else 0, ONE=self._one, AHEAD=self._ahead,
            num_warps=8 if width > 2048 else 4,
            **({"launch_pdl": True} if self._ahead else {}),
        )  # fmt: skip
        return Stream(residual, norm_weight, weighted, squares)

    def normed(
        self,
        stream: Stream,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gate: Activation | None = None,
        picked: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Returns the product [n, rows] of the normalised residual sum. weight: [rows, width]; bias: [rows].

        gate: activation of gates and ups; the result is then gate(gates) * ups, [n, rows / 2]. picked: [n]
        int64, the wanted rows, up to `MOST_TOKENS`; None for all. dtype: of the result, whose values are
        bfloat16 numbers.
        """
        tokens = stream.residual.shape[0] if picked is None else picked.shape[0]
        rows = weight.shape[0]
        out = weight.new_empty(tokens, rows // 2 if gate else rows, dtype=dtype)
        if tokens == 0:
            return out
        kind = kernels.GATED if gate else kernels.SCALED
        self._launch(kind.value, stream, None, weight, bias, picked, out, None, gate)
        return out

    def ready(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gate: Activation | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Returns the product of x [T, in], already normalised. weight, bias, gate, dtype: as in `normed`."""
        x = x.contiguous()
        tokens, (rows, columns) = x.shape[0], weight.shape
        out = weight.new_empty(tokens, rows // 2 if gate else rows, dtype=dtype)
        if tokens == 0:
            return out
        kind = (kernels.GATED if gate else kernels.SCALED).value
        act = ACTIVATIONS[gate or Activation.SILU]
        if tokens == 1:
            block = min(2048 if columns <= 4096 else 4096, int(triton.next_power_of_2(columns)))
            kernels.ready_row[(triton.cdiv(out.shape[1], 2),)](
                x, weight, bias, out, rows, COLUMNS=columns, ROWS=2, BLOCK=block,
                GATED=gate is not None, BIAS=bias is not None, ACTIVATION=act, AHEAD=self._ahead,
                num_warps=4, **({"launch_pdl": True} if self._ahead else {}),
            )  # fmt: skip
            return out
        cut = self._cut(kind, tokens, weight, ready=True)
        kernels.product[(triton.cdiv(rows, ROWS), cut.split)](
            x, weight, bias, None, None, 0, self._eps, None, None, out, None, None,
            self._partial, self._arrived, tokens, rows,
            COLUMNS=columns, TOKENS=_padded(tokens), ROWS=ROWS, DEPTH=cut.depth, SPLIT=cut.split,
            STAGES=cut.stages, KIND=kind, BIAS=bias is not None, PICKED=False,
            EVEN=rows % ROWS == 0 and columns % (cut.depth * cut.split) == 0, ACTIVATION=act, READY=True,
            ONE=0, AHEAD=self._ahead, launch_pdl=self._ahead, num_warps=4,
        )  # fmt: skip
        return out

    def added(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stream: Stream, norm_weight: Tensor
    ) -> Stream:
        """Adds the product of x [T, in] to the stream; returns it with the inputs of the next norm.

        weight: [width, in]. bias: [width] or None. norm_weight: [width].
        """
        residual = torch.empty_like(stream.residual)
        if stream.weighted is None:
            after = Stream(residual, norm_weight)
        else:
            stripes = triton.cdiv(weight.shape[0], ROWS)
            squares = residual.new_empty(stripes, MOST_TOKENS, dtype=torch.float32)
            after = Stream(residual, norm_weight, torch.empty_like(residual), squares)
        self._launch(kernels.ADDED.value, stream, x, weight, bias, None, residual, after)
        return after

    def _launch(
        self,
        kind: int,
        before: Stream,
        x: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        picked: Tensor | None,
        out: Tensor,
        after: Stream | None,
        gate: Activation | None = None,
    ) -> None:
        n, columns = weight.shape
        tokens = out.shape[0]
        act = ACTIVATIONS[gate or Activation.SILU]
        if before.weighted is None:
            assert tokens == 1
            self._one_row(
                kind, before.residual if x is None else x, before.norm_weight, weight, bias,
                before.residual, out, picked, act,
            )  # fmt: skip
            return
        squares = before.squares
        assert squares is not None
        rows = before.weighted if x is None else x
        assert isinstance(rows, Tensor), "these products read rows"
        cut = self._cut(kind, tokens, weight)
        stored = before if after is None else after
        kernels.product[(triton.cdiv(n, ROWS), cut.split)](
            rows, weight, bias, picked, squares, squares.shape[0],
            self._eps, before.residual, stored.norm_weight, out, stored.weighted, stored.squares,
            self._partial, self._arrived, tokens, n,
            COLUMNS=columns, TOKENS=_padded(tokens), ROWS=ROWS, DEPTH=cut.depth, SPLIT=cut.split,
            STAGES=cut.stages, KIND=kind, BIAS=bias is not None, PICKED=picked is not None,
            EVEN=n % ROWS == 0 and columns % (cut.depth * cut.split) == 0, ACTIVATION=act, READY=False,
            ONE=self._one, AHEAD=self._overlaps, launch_pdl=self._overlaps, num_warps=4,
        )  # fmt: skip

    def _one_row(
        self,
        kind: int,
        x: Tensor,
        norm_weight: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        picked: Tensor | None,
        activation: int,
    ) -> None:
        n, columns = weight.shape
        short = kind == kernels.ADDED.value and columns <= 4096
        kernels.one_row[(n // 2,)](
            x, norm_weight, weight, bias, residual, out, picked, self._eps, n,
            COLUMNS=columns, BLOCK=min(2048 if short else 4096, triton.next_power_of_2(columns)),
            KIND=kind, BIAS=bias is not None, PICKED=picked is not None, ACTIVATION=activation,
            ONE=self._one, AHEAD=self._ahead, num_warps=4 if short or columns <= 2048 else 8,
            launch_pdl=self._ahead,
        )  # fmt: skip

    def _cut(self, kind: int, tokens: int, weight: Tensor, *, ready: bool = False) -> Cut:
        """Returns the cut whose stripes fill the device, with as many tiles in flight as shared memory holds.

        With more stripes than multiprocessors, up to four programs share a multiprocessor if all can run
        at once. Measured on an H200 with 32 rows: 480 stripes of 3840 columns took 58 us with four programs
        and two tiles in flight each, 63 with three and three; 128 stripes 17.8 us with tiles of 256 columns,
        18.6 with 128. With 64 rows the 480 stripes took 62 us with three tiles in flight, 83 with two.
        """
        n, columns = weight.shape
        stripes = triton.cdiv(n, ROWS)
        split = 1
        splits = kind == kernels.ADDED.value or (ready and kind == kernels.SCALED.value)
        if kind == kernels.SCALED.value:
            splits |= stripes * _SPLIT_IF_FEWER <= self._processors
        if splits and stripes <= self._processors:
            split = min(MOST_SPLIT, triton.cdiv(columns, _DEPTH))
            while split > 1 and stripes * split > 1.1 * self._processors:
                split //= 2
            split = max(split, 2) if kind == kernels.ADDED.value and columns > _DEPTH else split
        beside = triton.cdiv(stripes * split, self._processors)
        if beside > _MOST_BESIDE:
            beside = 3
        rows = _padded(tokens)
        deep = beside == 1 and rows <= 32 and columns % (_DEEP * split) == 0
        depth = _DEEP if deep else _DEPTH
        tile_bytes = 2 * depth * (ROWS + rows)
        stages = max(3 if rows > 32 else 2, min(4, self._shared_bytes // beside // tile_bytes))
        return Cut(split, stages, depth)


def _padded(tokens: int) -> int:
    """Returns the number of tokens in a tile: `tokens` rounded up to a size of matrix instructions."""
    return max(16, int(triton.next_power_of_2(tokens)))
