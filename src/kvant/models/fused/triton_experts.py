"""`ExpertKernels` for NVIDIA GPUs: chooses kernels and tiles for a layer of experts.

No launch depends on the router's choice, so CUDA graphs replay with any choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from kvant.kernels.triton.device import (
    has_ptx,
    has_tile_copies,
    launches_ahead,
    multiprocessors,
    shared_memory_of_a_program,
)
from kvant.models.fused import experts_kernels as kernels
from kvant.models.fused import resident_experts, rounded_experts
from kvant.models.fused.experts import Experts, GateOrder
from kvant.models.fused.resident_experts import Blocks, CopiedTile, CopiedTiles
from kvant.models.fused.routing import Routing, Scoring, route
from kvant.weights.choose import LISTED, few_serves, round_activations, warps_of_one
from kvant.weights.codecs import NarrowStack
from kvant.weights.cuda import few_rows as cuda
from kvant.weights.cuda.few_rows import Act, Beside, Kind, Pairs, Routed
from kvant.weights.format import MOST_DECODED, WHOLE
from kvant.weights.linear import MOST_EXACT
from kvant.weights.rounding import Rounding
from kvant.weights.triton.product import decoded_stack, layout

MOST_FEW = 256
"""Maximum number of tokens for products with weights as the first operand: memory is their bound.

Measured for 128 experts of 2048 x 768 on an H200: 373 us against 448 with 256 tokens, 599 against 404
with 512.
"""

_CHUNK = 128  # pairs that one program counts or places
_SUMMED = 8  # experts whose counts one program sums
_STREAM_TOKENS = 64  # width of a row of sums of squares in `few_rows_kernels`


@dataclass(frozen=True, slots=True)
class Choice:
    """A step's choice of experts. ids: int32 [T, top_k]. weights: float32 [T, top_k]."""

    ids: Tensor
    weights: Tensor

    @property
    def pairs(self) -> int:
        return self.ids.numel()


@dataclass(frozen=True, slots=True)
class Unscored:
    """Rows that the router has not multiplied. rows: [T, H], a residual sum times its norm's weight.

    router: [E, H], bias [E]. For routers that `TritonExperts.multiplies` accepts.
    """

    rows: Tensor
    router: tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class FewTile:
    """A tile of `few`.

    pairs: of one expert at a time. rows, depth: of the weight. stages: tiles in flight.
    """

    pairs: int
    rows: int = 64
    depth: int = 128
    stages: int = 4
    warps: int = 4


@dataclass(frozen=True, slots=True)
class ManyTile:
    """A tile of `many`. rows: of gates, and as many of ups. stages: tiles in flight."""

    pairs: int
    rows: int
    depth: int = 64
    stages: int = 3
    warps: int = 8


@dataclass(frozen=True, slots=True)
class OneTile:
    """A tile for a single row of x. rows: of the weight, per program. block: columns at a time."""

    rows: int
    block: int
    warps: int = 4


_UPS = (FewTile(16, 128, 128, 3, 4),)
_DOWNS = FewTile(16, 256, 64, 3, 8), *_UPS
"""Large tiles of `few` for unquantised weights of 16 bits, largest first."""

_LARGE_TILES = 160 << 10
"""Bytes of shared memory that a program with a large tile needs."""

_MOST_LARGE = 16
"""Maximum number of pairs at a time for large tiles."""

_STREAM_PARTS = 4
"""Programs that sum one token's results, so that few tokens occupy more multiprocessors."""

_FEWEST_PROGRAMS = 4
"""Minimum number of programs per multiprocessor, since programs take different times."""

_MOST_SINGLE = 2
"""Maximum number of tokens whose pairs are multiplied one by one, for narrow weights."""

_MOST_KEYS = 256
"""Maximum number of experts among which a program of a product chooses."""

_LARGEST_ROUTER, _ROUTER_DEPTH, _ROUTER_WARPS = 256 << 10, 128, 8
"""Maximum bytes of a router that every token's program multiplies, its columns at a time, and warps.

Measured for 32 experts of 2880 columns and 32 tokens on an H200: a layer takes 3.5 us less than with a
product before it. With 256 columns at a time, or with 4 warps, it takes longer.
"""

_FEWEST_DECODED = 256
"""Minimum number of an expert's pairs, on average, for which narrow weights are decoded before products."""

_FIXED_TILE = ManyTile(64, 64)
_FIXED_NARROW = FewTile(64)


class TritonExperts:
    """Experts in float16, bfloat16 and float32.

    batch_invariant: a token's result does not depend on other tokens; all steps then use one tile.
    """

    def __init__(self, device: torch.device, *, batch_invariant: bool = False) -> None:
        self._invariant = batch_invariant
        ahead = launches_ahead(device)
        self._processors = multiprocessors(device)
        self._copies_tiles = has_tile_copies(device)
        self._shared_bytes = shared_memory_of_a_program(device)
        self._options: dict[str, Any] = {"AHEAD": ahead, **({"launch_pdl": True} if ahead else {})}

    def apply(self, x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
        """Implements `ExpertKernels.apply`: x [T, H], logits [T, E] -> [T, H]."""
        if x.shape[0] == 0:
            return torch.empty_like(x)
        return self._apply(x, self.choose(logits, experts), experts)

    def apply_chosen(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """Implements `ExpertKernels.apply_chosen`: x [T, H], ids and weights [T, top_k] -> [T, H]."""
        if x.shape[0] == 0:
            return torch.empty_like(x)
        choice = Choice(ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous())
        return self._apply(x.contiguous(), choice, experts)

    def _apply(self, x: Tensor, choice: Choice, experts: Experts) -> Tensor:
        if self._invariant and experts.is_narrow:
            return self.combine(self._sorted(x, choice, experts, _FIXED_NARROW), x)
        if self._invariant:
            return self.combine(self.many(x, choice, experts, (_FIXED_TILE, _FIXED_TILE)), x)
        if is_single(choice, experts, x.dtype):
            h = self.one_gate_up(x, choice, experts)
            return self.one_down(h, choice, experts)
        if self.rounds(x, experts):
            return self.combine(self.rounded(x, choice, experts), x)
        multiply = self.few if x.shape[0] <= MOST_FEW else self.many
        return self.combine(multiply(x, choice, experts), x)

    def rounds(self, x: Tensor, experts: Experts) -> bool:
        """Whether activations x [T, H] are rounded to 8-bit floats."""
        many = experts.rounds and x.shape[0] > MOST_EXACT and not self._invariant
        return many and self._copies_tiles and rounded_experts.serves(experts, x.dtype)

    def choose(self, logits: Tensor, experts: Experts) -> Choice:
        """Chooses the experts of every token by any kind of routing. logits: [T, E]."""
        if experts.routing.chooses_by_logits and experts.correction is None:
            return self.route(logits, experts.routing)[0]
        weights, ids = route(logits, experts.routing, experts.correction)
        return Choice(ids.to(torch.int32), weights.to(torch.float32))

    def begin(self, experts: Experts, dtype: torch.dtype, *, added: bool) -> None:
        """Starts compiling the CUDA kernels of narrow experts in other threads.

        added: sums go to the residual.
        """
        top_k = experts.routing.top_k
        alone, summed = _single_kinds(experts, _routed(experts, dtype) if added else None)
        summed = replace(summed, added=added)
        listed = replace(_gated(experts), pairs=Pairs.LISTED), Kind(pairs=Pairs.LISTED, share=True)
        ways = (experts.gate_up, alone, listed[0], 1), (experts.down, summed, listed[1], top_k)
        for (stack, bias), one, many, count in ways:
            if not isinstance(stack, NarrowStack):
                return
            fmt, (_, rows, columns) = stack.whole.format, stack.shape
            if not cuda.serves(fmt, rows, columns, dtype):
                return
            has_bias = bias is not None
            cut = warps_of_one(fmt, columns, weights=count)
            cuda.begin(fmt, columns, 1, dtype, cut, one, bias=has_bias)
            for tiles in (1, 2):
                cuda.begin(fmt, columns, tiles, dtype, LISTED, many, bias=has_bias)

    def route(
        self,
        logits: Tensor | Unscored,
        routing: Routing,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[Choice, Tensor | None]:
        """Chooses the experts of every token; normalises residual [T, H] too, if given.

        logits: [T, E], or what they are computed from, with the norm's scale of residual.
        """
        router: Tensor | None = None
        bias: Tensor | None = None
        if isinstance(logits, Unscored):
            assert residual is not None
            rows, (router, bias) = logits.rows, logits.router
        else:
            rows = logits
        tokens = rows.shape[0]
        ids = rows.new_empty(tokens, routing.top_k, dtype=torch.int32)
        weights = rows.new_empty(tokens, routing.top_k, dtype=torch.float32)
        normed = None if residual is None else torch.empty_like(residual)
        width = 1 if residual is None else residual.shape[1]
        kernels.route[(tokens,)](
            rows.contiguous(), router, bias, ids, weights, residual, norm_weight, normed, eps,
            routing.scale,
            E=routing.num_experts, E_PAD=_padded(routing.num_experts), TOP_K=routing.top_k,
            K_PAD=_padded(routing.top_k),
            SOFTMAX_FIRST=routing.scoring is Scoring.SOFTMAX_THEN_TOP_K,
            RENORMALISE=routing.renormalise, ROUNDED=routing.rounded and not routing.wide,
            WIDTH=width, PAD=triton.next_power_of_2(width), NORM=residual is not None,
            DEPTH=0 if router is None else _ROUTER_DEPTH, BIAS=bias is not None, **self._options,
            num_warps=(1 if width <= 2048 else 2) if router is None else _ROUTER_WARPS,
        )  # fmt: skip
        return Choice(ids, weights), normed

    def multiplies(self, router: Tensor) -> bool:
        """Whether `route` multiplies by a router [E, H]: each token's program reads the whole weight."""
        return router.nbytes <= _LARGEST_ROUTER

    def one_gate_up(
        self, x: Tensor, choice: Choice, experts: Experts, tile: OneTile | None = None
    ) -> Tensor:
        """Computes activated gates and ups pair by pair: x [T, H] -> [pairs, I]."""
        weight, bias = experts.gate_up
        if isinstance(weight, NarrowStack):
            beside = Beside(
                ids=choice.ids, top_k=experts.routing.top_k, **_clamped(experts)
            )  # fmt: skip
            return self._pairs(x, experts, _single_kinds(experts, None)[0], beside)
        width, columns = experts.width, weight.shape[2]
        tile = tile or OneTile(2, min(2048, triton.next_power_of_2(columns)))
        out = x.new_empty(choice.pairs, width)
        kernels.one_gate_up[(triton.cdiv(width, tile.rows), choice.pairs)](
            x, weight, bias, choice.ids, out, *_clamp(experts),
            TOP_K=experts.routing.top_k, COLUMNS=columns, WIDTH=width, ROWS=tile.rows,
            BLOCK=tile.block, ORDER=_order(experts), BIAS=bias is not None,
            CLAMP=experts.clamp is not None, **self._options,
            num_warps=tile.warps,
        )  # fmt: skip
        return out

    def one_down(
        self,
        h: Tensor,
        choice: Choice,
        experts: Experts,
        residual: Tensor | None = None,
        tile: OneTile | None = None,
    ) -> Tensor:
        """Computes weighted sums [T, H] of h [pairs, I] pair by pair; adds residual [T, H] if given."""
        weight, bias = experts.down
        if isinstance(weight, NarrowStack):
            beside = Beside(
                ids=choice.ids, shares=choice.weights, residual=residual, top_k=experts.routing.top_k
            )  # fmt: skip
            kind = replace(_single_kinds(experts, None)[1], added=residual is not None)
            return self._sum_of_pairs(h, experts, kind, beside)
        rows = weight.shape[1]
        width = int(triton.next_power_of_2(experts.width))
        # 22.3 us beside gate and up of 8 experts of 768 on an H200, where 4 rows and 256 columns took 23.6.
        tile = tile or (OneTile(2, width) if 256 < width <= 1024 else OneTile(4, min(256, width)))
        tokens = choice.ids.shape[0]
        out = h.new_empty(tokens, rows)
        kernels.one_down[(triton.cdiv(rows, tile.rows), tokens)](
            h, weight, bias, choice.ids, choice.weights, residual, out,
            TOP_K=experts.routing.top_k, N=rows, WIDTH=experts.width, ROWS=tile.rows,
            BLOCK=tile.block, BIAS=bias is not None, ADD=residual is not None, **self._options,
            num_warps=tile.warps,
        )  # fmt: skip
        return out

    def chooses_itself(self, tokens: int, experts: Experts, dtype: torch.dtype) -> bool:
        """Whether `alone` serves a step: its products choose the experts."""
        few = tokens <= _MOST_SINGLE and _reads(experts, dtype)
        return few and _routed(experts, dtype) is not None

    def alone(
        self, residual: Tensor, norm_weight: Tensor, eps: float, logits: Tensor, experts: Experts
    ) -> Tensor:
        """Adds a layer of experts to residual [T, H], whose RMS norm it reads; returns a new [T, H].

        `chooses_itself` must hold. logits: [T, E], in the dtype of residual. norm_weight: [H].
        """
        routing = experts.routing
        up, down = _single_kinds(experts, _routed(experts, residual.dtype))
        beside = Beside(
            logits=logits.contiguous(), factor=routing.scale, top_k=routing.top_k, norm_weight=norm_weight,
            eps=eps, residual=residual, **_clamped(experts),
        )  # fmt: skip
        h = self._pairs(residual, experts, up, beside)
        return self._sum_of_pairs(h, experts, replace(down, added=True), beside)

    def _pairs(self, x: Tensor, experts: Experts, kind: Kind, beside: Beside) -> Tensor:
        """Computes activated gates and ups of narrow weights pair by pair: x [T, H] -> [pairs, I]."""
        weight, bias = experts.gate_up
        assert isinstance(weight, NarrowStack)
        cut = warps_of_one(weight.whole.format, weight.shape[2])
        return cuda.multiply(x, weight.whole, bias, cut, kind, beside, experts=weight.count)

    def _sum_of_pairs(self, h: Tensor, experts: Experts, kind: Kind, beside: Beside) -> Tensor:
        """Computes the weighted sums [T, H] of h [pairs, I] and narrow weights."""
        weight, bias = experts.down
        assert isinstance(weight, NarrowStack)
        cut = warps_of_one(weight.whole.format, weight.shape[2], weights=experts.routing.top_k)
        return cuda.multiply(h, weight.whole, bias, cut, kind, beside, experts=weight.count)

    def few(
        self,
        x: Tensor,
        choice: Choice,
        experts: Experts,
        tiles: tuple[FewTile, FewTile] | None = None,
    ) -> Tensor:
        """Computes weighted results [pairs, H] of x [T, H], with weights as the first operand.

        tiles: for gate and up, and for down; None chooses them.
        """
        count, most = experts.routing.num_experts, choice.ids.shape[0]
        lists = choice.ids.new_empty(count, most)
        counts = choice.ids.new_empty(count)
        chunk = min(1024, max(32, triton.next_power_of_2(choice.pairs)))
        kernels.list_pairs[(count,)](
            choice.ids, lists, counts, choice.pairs, most, CHUNK=chunk, **self._options,
            num_warps=1 if chunk <= 256 else 4,
        )  # fmt: skip
        if tiles is None and most <= cuda.MOST_ROWS and _reads(experts, x.dtype):
            return self._listed(x, choice, experts, lists, counts)
        return self._few(
            x, choice, experts, lists, counts, tiles or self._few_tiles(x, choice, experts)
        )

    def _few_tiles(self, x: Tensor, choice: Choice, experts: Experts) -> tuple[FewTile, FewTile]:
        """Returns the tiles of gate and up, and of down: the largest whose programs fill the device.

        Measured for both products of 128 experts of 2048 x 768 on an H200: 261 us where tiles of 64 rows took
        295 with 32 tokens, 189 and 215 with 16, 285 and 311 with 64.
        """
        tile = _few_tile(choice, experts)
        fits = self._shared_bytes >= _LARGE_TILES and x.element_size() == 2
        if experts.is_narrow or tile.pairs > _MOST_LARGE or not fits:
            return tile, tile
        used = min(experts.routing.num_experts, choice.pairs)
        up = self._largest(_UPS, 2 * experts.width, used)
        down = self._largest(_DOWNS, x.shape[1], used)
        return (
            tile if up is None else replace(up, pairs=tile.pairs),
            tile if down is None else replace(down, pairs=tile.pairs),
        )

    def _largest(self, tiles: Sequence[FewTile], rows: int, experts: int) -> FewTile | None:
        """Returns the first tile that gives enough programs for weights of these rows and experts.

        None if none does.
        """
        enough = _FEWEST_PROGRAMS * self._processors
        return next((t for t in tiles if experts * triton.cdiv(rows, t.rows) >= enough), None)

    def _listed(
        self, x: Tensor, choice: Choice, experts: Experts, lists: Tensor, counts: Tensor
    ) -> Tensor:
        """Implements `few` for narrow weights with the CUDA kernel."""
        beside = Beside(
            ids=choice.ids, shares=choice.weights, lists=lists, counts=counts,
            top_k=experts.routing.top_k, **_clamped(experts),
        )  # fmt: skip
        found = x
        kinds = replace(_gated(experts), pairs=Pairs.LISTED), Kind(pairs=Pairs.LISTED, share=True)
        for (weight, bias), kind in zip((experts.gate_up, experts.down), kinds, strict=True):
            assert isinstance(weight, NarrowStack)
            found = cuda.multiply(
                found, weight.whole, bias, LISTED, kind, beside, experts=weight.count
            )
        return found

    def _few(
        self,
        x: Tensor,
        choice: Choice,
        experts: Experts,
        lists: Tensor,
        counts: Tensor,
        tiles: tuple[FewTile, FewTile],
        *,
        is_sorted: bool = False,
    ) -> Tensor:
        """Implements `few` for listed pairs. is_sorted: lists and counts come from `sort`."""
        h = x.new_empty(choice.pairs, experts.width)
        parts = x.new_empty(choice.pairs, x.shape[1])
        for kind, source, (weight, bias), out, tile in (
            (kernels.GATED.value, x, experts.gate_up, h, tiles[0]),
            (kernels.DOWN.value, h, experts.down, parts, tiles[1]),
        ):
            n, columns = weight.shape[1:]
            depth = min(tile.depth, max(16, triton.next_power_of_2(columns)))
            stored: tuple[Tensor | None, ...]
            if isinstance(weight, NarrowStack):
                depth = _narrow_depth(weight, tile.depth)
                stored = weight.whole.codes, weight.whole.scales, weight.whole.zeros
                where = layout(weight.whole, depth)
                del where["FACTOR"]
                where["PTX"] = _ptx(x)
            else:
                stored, where = (weight, None, None), _NUMBERS
            kernels.few[(triton.cdiv(n, tile.rows), weight.shape[0])](
                source, *stored, bias, lists, counts, choice.weights, out, *_clamp(experts),
                0 if is_sorted else lists.shape[1], **where,
                TOP_K=experts.routing.top_k, N=n, COLUMNS=columns, ROWS=tile.rows, DEPTH=depth,
                PAIRS=tile.pairs, STAGES=tile.stages, KIND=kind, ORDER=_order(experts),
                BIAS=bias is not None, CLAMP=experts.clamp is not None, PRECISION=_precision(x),
                SORTED=is_sorted, **self._options, num_warps=tile.warps,
            )  # fmt: skip
        return parts

    def _sorted(self, x: Tensor, choice: Choice, experts: Experts, tile: FewTile) -> Tensor:
        """Implements `many` for narrow weights.

        They stay the first operand, and are decoded once per tile.
        """
        order, ends = self.sort(choice, experts.routing)
        return self._few(x, choice, experts, order, ends, (tile, tile), is_sorted=True)

    def sort(self, choice: Choice, routing: Routing) -> tuple[Tensor, Tensor]:
        """Returns all pairs by expert, int32 [pairs], and the end of each expert's pairs, int32 [E]."""
        pairs, pad = choice.pairs, _padded(routing.num_experts)
        chunks = triton.cdiv(pairs, _CHUNK)
        partial = choice.ids.new_empty(chunks, pad)
        places = torch.empty_like(partial)
        order, ends = choice.ids.new_empty(pairs), choice.ids.new_empty(routing.num_experts)
        kernels.count_pairs[(chunks,)](
            choice.ids, partial, pairs, E_PAD=pad, CHUNK=_CHUNK, **self._options
        )
        totals = choice.ids.new_empty(pad)
        columns = min(_SUMMED, pad)
        kernels.sum_counts[(pad // columns,)](
            partial, places, totals, chunks, E_PAD=pad, EXPERTS=columns, STEP=128, num_warps=8,
            **self._options,
        )  # fmt: skip
        kernels.place_pairs[(chunks,)](
            choice.ids, places, totals, order, ends, pairs, E=routing.num_experts, E_PAD=pad,
            CHUNK=_CHUNK, num_warps=8, **self._options,
        )  # fmt: skip
        return order, ends

    def many(
        self,
        x: Tensor,
        choice: Choice,
        experts: Experts,
        tiles: tuple[ManyTile, ManyTile] | CopiedTiles | None = None,
    ) -> Tensor:
        """Computes weighted results [pairs, H] of x [T, H], which suits experts with many pairs.

        tiles: for gate and up, and for down; None chooses them.
        """
        if experts.is_narrow:
            if self._decodes(x, choice, experts):
                return self._decoded(x, choice, experts)
            return self._sorted(x, choice, experts, _narrow_tile(choice, experts))
        order, ends = self.sort(choice, experts.routing)
        if tiles is None and self._copies_tiles and resident_experts.serves(experts, x.dtype):
            tiles = _copied_tiles(choice, experts)
        if isinstance(tiles, CopiedTiles):
            listed = resident_experts.list_blocks(
                order, ends, experts.routing, tiles.pairs, self._processors, self._options
            )
            h = resident_experts.gate_up(x, experts, listed, tiles.up)
            return resident_experts.down(h, experts, listed, choice.weights, tiles.down)
        up, down = tiles or _many_tiles(choice, experts)
        count = experts.routing.num_experts
        h = x.new_empty(choice.pairs, experts.width)
        parts = x.new_empty(choice.pairs, x.shape[1])
        for kind, source, (weight, bias), out, tile in (
            (kernels.GATED.value, x, experts.gate_up, h, up),
            (kernels.DOWN.value, h, experts.down, parts, down),
        ):
            assert isinstance(weight, Tensor)
            n, columns = weight.shape[1:]
            blocks = choice.pairs // tile.pairs + min(count, choice.pairs)
            kernels.many[(blocks * triton.cdiv(out.shape[1], tile.rows),)](
                source, weight, bias, order, ends, choice.weights, out, *_clamp(experts),
                E=count, E_PAD=_padded(count), TOP_K=experts.routing.top_k, N=n, COLUMNS=columns,
                PAIRS=tile.pairs, ROWS=tile.rows,
                DEPTH=min(tile.depth, max(16, triton.next_power_of_2(columns))),
                STAGES=tile.stages, KIND=kind, ORDER=_order(experts), BIAS=bias is not None,
                CLAMP=experts.clamp is not None, PRECISION=_precision(x), **self._options,
            num_warps=tile.warps,
            )  # fmt: skip
        return parts

    def rounded(self, x: Tensor, choice: Choice, experts: Experts) -> Tensor:
        """Computes weighted results [pairs, H] of x [T, H], rounded here, in products of 8-bit floats."""
        rows = round_activations(x, Rounding(group=rounded_experts.BLOCK))
        order, ends = self.sort(choice, experts.routing)
        listed = resident_experts.list_blocks(
            order, ends, experts.routing, rounded_experts.PAIRS, self._processors, self._options
        )
        h = rounded_experts.gate_up(rows, experts, listed)
        return rounded_experts.down(h, experts, listed, choice.weights)

    def _decodes(self, x: Tensor, choice: Choice, experts: Experts) -> bool:
        """Whether each narrow weight is decoded once, not in every tile: experts have many pairs."""
        many = choice.pairs >= _FEWEST_DECODED * experts.routing.num_experts
        return many and self._copies_tiles and resident_experts.serves_decoded(experts, x.dtype)

    def _decoded(self, x: Tensor, choice: Choice, experts: Experts) -> Tensor:
        """Implements `many` for narrow weights, which are decoded some experts at a time."""
        tiles, (order, ends) = _copied_tiles(choice, experts), self.sort(choice, experts.routing)
        h = x.new_empty(choice.pairs, experts.width)
        parts = x.new_empty(choice.pairs, x.shape[1])

        def listed(first: int, count: int) -> Blocks:
            return resident_experts.list_blocks(
                order, ends[first : first + count], experts.routing, tiles.pairs, self._processors,
                self._options, first,
            )  # fmt: skip

        for first, weights in _in_parts(experts.gate_up[0], x.dtype):
            some, blocks = replace(experts, gate_up=(weights, None)), listed(first, len(weights))
            resident_experts.gate_up(x, some, blocks, tiles.up, h)
        for first, weights in _in_parts(experts.down[0], x.dtype):
            some, blocks = replace(experts, down=(weights, None)), listed(first, len(weights))
            resident_experts.down(h, some, blocks, choice.weights, tiles.down, parts)
        return parts

    def combine(self, parts: Tensor, like: Tensor) -> Tensor:
        """Sums weighted results [pairs, H] in the order of a token's experts; returns [T, H]."""
        tokens, width = like.shape
        out = torch.empty_like(like)
        self._combine(parts, out, None, None, None, None, tokens, width)
        return out

    def combine_stream(
        self, parts: Tensor, residual: Tensor, norm_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adds the sums of parts [pairs, H] to residual [T, H].

        Returns the result, the result times norm_weight [H], and its sums of squares, float32 [1, 64].
        """
        tokens, width = residual.shape
        assert tokens <= _STREAM_TOKENS
        out, weighted = torch.empty_like(residual), torch.empty_like(residual)
        parts_of_a_row = _STREAM_PARTS if width % (128 * _STREAM_PARTS) == 0 else 1
        squares = residual.new_empty(parts_of_a_row, _STREAM_TOKENS, dtype=torch.float32)
        self._combine(parts, out, residual, norm_weight, weighted, squares, tokens, width)
        return out, weighted, squares

    def _combine(
        self,
        parts: Tensor,
        out: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        weighted: Tensor | None,
        squares: Tensor | None,
        tokens: int,
        width: int,
    ) -> None:
        cut = 1 if squares is None else len(squares)
        pad = triton.next_power_of_2(triton.cdiv(width, cut))
        kernels.combine[(tokens, cut)](
            parts, out, residual, norm_weight, weighted, squares,
            TOP_K=parts.shape[0] // tokens, WIDTH=width, PAD=pad, STREAM=residual is not None,
            **self._options, num_warps=4 if pad <= 2048 else 8,
        )  # fmt: skip


def is_single(choice: Choice, experts: Experts, dtype: torch.dtype) -> bool:
    """Whether each pair is multiplied separately, the fastest way while few tokens share an expert.

    Measured for 128 experts of 2048 x 768 and 8 tokens on an H200: 138 us against 150. Narrow weights have
    a kernel for it where CUDA C++ runs.
    """
    if experts.is_narrow:
        return choice.ids.shape[0] <= _MOST_SINGLE and _reads(experts, dtype)
    return choice.ids.shape[0] == 1 or 2 * choice.pairs <= experts.routing.num_experts


def _single_kinds(experts: Experts, routed: Routed | None) -> tuple[Kind, Kind]:
    """Returns what programs of single pairs do: of gates and ups, and of the sums of down."""
    up = replace(_gated(experts), one=True, pairs=Pairs.ALONE, routed=routed)
    top_k = experts.routing.top_k
    if routed is not None:
        up = replace(up, norm=True)
    return up, Kind(one=True, pairs=Pairs.SUMMED, top_k=top_k, routed=routed)


def _routed(experts: Experts, dtype: torch.dtype) -> Routed | None:
    """Returns how products of narrow weights choose a layer's experts; None if they cannot."""
    routing = experts.routing
    plain = routing.chooses_by_logits and experts.correction is None and not routing.wide
    if not plain or routing.num_experts > _MOST_KEYS or experts.router[0].dtype != dtype:
        return None
    first = routing.scoring is Scoring.SOFTMAX_THEN_TOP_K
    return Routed(
        routing.num_experts, first, routing.renormalise or not first, rounded=routing.rounded
    )


def _in_parts(stack: Tensor | NarrowStack, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yields the first expert of each part of a narrow stack, and its weights, decoded."""
    assert isinstance(stack, NarrowStack)
    count, rows, columns = stack.shape
    step = max(1, MOST_DECODED // (rows * columns))
    for first in range(0, count, step):
        yield first, decoded_stack(stack, first, min(step, count - first), dtype)


def _padded(count: int) -> int:
    return max(2, int(triton.next_power_of_2(count)))


def _order(experts: Experts) -> int:
    found = kernels.HALVES if experts.order is GateOrder.HALVES else kernels.ALTERNATING
    return int(found.value)


def _clamp(experts: Experts) -> tuple[float, float]:
    clamp = experts.clamp
    return (0.0, 0.0) if clamp is None else (clamp.limit, clamp.alpha)


_NUMBERS = {
    "SCALE_N": 0, "SCALE_K": 0, "CODE": kernels.NUMBERS.value, "SHARE": 0, "SCALE": 0, "GROUP": 32,
    "BLOCK_ROWS": 1, "ZEROS": False, "PTX": False,
}  # fmt: skip
"""The arguments of kernels that describe unquantised weights."""


def _reads(experts: Experts, dtype: torch.dtype) -> bool:
    """Whether the CUDA kernel reads both narrow weights of a layer."""
    stacks = [weight for weight, _ in (experts.gate_up, experts.down)]
    return all(
        isinstance(one, NarrowStack)
        and few_serves(one.whole.format, one.shape[1], one.shape[2], dtype)
        for one in stacks
    )


def _gated(experts: Experts) -> Kind:
    act = Act.SILU if experts.clamp is None else Act.CLAMPED
    return Kind(gated=True, alternating=experts.order is GateOrder.ALTERNATING, act=act)


def _clamped(experts: Experts) -> dict[str, Any]:
    limit, alpha = _clamp(experts)
    return {"limit": limit, "alpha": alpha}


def _narrow_depth(weight: NarrowStack, most: int) -> int:
    """Returns the columns of a tile: at most `most`, a divisor of the row length, at least a group."""
    fmt, columns = weight.whole.format, weight.shape[2]
    least = 32 if fmt.columns == WHOLE else max(32, fmt.columns)
    depth = most
    while depth > least and columns % depth:
        depth //= 2
    return depth


def _narrow_tile(choice: Choice, experts: Experts) -> FewTile:
    """Returns the tile for experts with many pairs."""
    if choice.pairs <= 48 * experts.routing.num_experts:
        return FewTile(64, 128, stages=3, warps=8)
    return FewTile(128, 128, stages=3, warps=8)


def _ptx(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16) and has_ptx(x.device)


def _precision(x: Tensor) -> str:
    """Returns the precision of products: IEEE for float32, not TF32."""
    return "ieee" if x.dtype is torch.float32 else "tf32"


def _few_tile(choice: Choice, experts: Experts) -> FewTile:
    """Returns a tile for one and a half times the average number of pairs of an expert."""
    average = 1.5 * choice.pairs / experts.routing.num_experts
    return FewTile(min(64, max(16, int(triton.next_power_of_2(int(average))))))


def _many_tiles(choice: Choice, experts: Experts) -> tuple[ManyTile, ManyTile]:
    """Returns tiles of gate and up, and of down. Four stages gave 460 TFLOP/s on an H200, three 434."""
    if choice.pairs <= 96 * experts.routing.num_experts:
        return ManyTile(64, 128), ManyTile(64, 128, stages=4)
    return ManyTile(128, 128, stages=4), ManyTile(128, 256)


def _copied_tiles(choice: Choice, experts: Experts) -> CopiedTiles:
    """Returns tiles for weights that the tensor memory accelerator copies.

    Measured for 128 experts of 2048 x 768 on an H200, gate and up, and down: 204 and 104 us for 512 tokens,
    where `kernels.many` took 228 and 161; 841 and 395 us for 8,488, and 851 and 506.
    """
    if choice.pairs <= 96 * experts.routing.num_experts:
        up, down = (
            CopiedTile(128, stages=4, warps=4),
            CopiedTile(128, stages=4, warps=4, programs=2),
        )
        return CopiedTiles(64, up, down)
    return CopiedTiles(128, CopiedTile(128, stages=4, programs=0), CopiedTile(256))
