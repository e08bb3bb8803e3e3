"""A forward through transformers' modules in which no row's result depends on the rows beside it.

The mode intercepts every torch operation. Matrix products run in fixed tiles, elementwise functions on whole
vectors, and operations that are known to treat each row by itself run unchanged. Any other operation is
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvant.attention.base import AttentionBackend, AttentionParams, Step
from kvant.errors import NotServable, WayOut
from kvant.kv.pool import LayerCache
from kvant.models.invariant.linear import TiledLinear
from kvant.models.invariant.vectors import by_whole_vectors

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEPT = """
    view _unsafe_view reshape t transpose permute expand slice select split split_with_sizes unsqueeze
    squeeze unbind alias detach as_strided diagonal
    clone copy_ _to_copy cat stack repeat repeat_interleave index index_put_ index_select
    gather scatter scatter_ index_add index_add_ masked_fill masked_fill_ where embedding
    nonzero empty empty_like empty_strided new_empty zeros zeros_like new_zeros ones ones_like
    new_ones full full_like fill_ zero_ arange scalar_tensor lift_fresh lift_fresh_copy
    constant_pad_nd promote_types _local_scalar_dense
    add add_ sub sub_ rsub mul mul_ div div_ neg abs sign clamp clamp_ clamp_min clamp_max minimum
    maximum sqrt reciprocal relu floor_divide remainder floor round trunc
    eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not isnan
    histc cumsum bincount sort topk argmax max amax amin any all
    native_layer_norm
"""
_AS_THEY_ARE = frozenset(_KEPT.split())
"""Operations, without overloads, that are exact or compute each row independently of its neighbours.

Counts (histc, cumsum, bincount) are of integers here. index_add adds an expert's rows to their tokens,
one expert after another.
"""

_FUNCTIONS = "silu gelu sigmoid tanh exp exp2 expm1 log log1p cos sin erf rsqrt softplus pow"
_ELEMENTWISE = frozenset(_FUNCTIONS.split())

_SOFTMAX = frozenset(("_softmax", "_log_softmax"))


class RowByRow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active during a forward on a CPU. linear: holds the tiles and their proofs."""

    def __init__(self, linear: TiledLinear, module: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._linear = linear
        self._module = module
        self._own: dict[str, Callable[..., Tensor]] = {
            "mm": self._mm,
            "addmm": self._addmm,
            "bmm": self._bmm,
            "_grouped_mm": self._grouped_mm,
            "sum": self._sum,
            "mean": self._mean,
        }

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        options = dict(kwargs or {})
        if name in _AS_THEY_ARE:
            return func(*args, **options)
        if name in _ELEMENTWISE:
            places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
            if len(places) == 1:  # not always the first: a number to the power of a tensor
                before, after = args[: places[0]], args[places[0] + 1 :]
                return by_whole_vectors(
                    lambda x: func(*before, x, *after, **options), args[places[0]]
                )
        if name in _SOFTMAX and args[1] in (-1, args[0].ndim - 1):
            return func(*args, **options)
        own = self._own.get(name)
        if own is None:
            raise self._refusal(name)
        return own(*args, **options)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, operations run unchanged. The mode must be the innermost one."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _mm(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiplies the rows of a, [T, in], by b, [in, out]."""
        return self._linear(a, b.t())

    def _addmm(self, bias: Tensor, a: Tensor, b: Tensor, **factors: float) -> Tensor:
        if any(factor != 1 for factor in factors.values()) or bias.ndim != 1:
            raise self._refusal("addmm with factors")
        return self._linear(a, b.t(), bias)

    def _bmm(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiplies pair by pair: a library may choose by their number, which may be that of tokens."""
        if a.shape[2] == 1:
            return a * b  # no sum: exact
        return torch.stack([self._linear(x, y.t()) for x, y in zip(a, b, strict=True)])

    def _grouped_mm(
        self, a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, **others: object
    ) -> Tensor:
        """Multiplies a, [T, in], whose rows are sorted by expert, by b, [experts, in, out]."""
        if bias is not None or a.ndim != 2 or b.ndim != 3:
            raise self._refusal("_grouped_mm of other shapes")
        out = a.new_zeros(a.shape[0], b.shape[2])
        start = 0
        for expert, end in enumerate(offs.tolist()):
            if end > start:
                out[start:end] = self._linear(a[start:end], b[expert].t())
            start = end
        return out

    def _sum(
        self,
        x: Tensor,
        dims: Sequence[int] | int | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Sums over one dimension: torch sums rows separately along the last one.

        Along another dimension this adds one slice after the other.
        """
        given = [dims] if isinstance(dims, int) else list(dims or ())
        if len(given) != 1:
            raise self._refusal("sum over several dimensions")
        dim = given[0] % x.ndim
        if dim == x.ndim - 1 or not (dtype or x.dtype).is_floating_point:
            return torch.sum(x, dim, keepdim, dtype=dtype)
        total = reduce(torch.add, (part.to(dtype or x.dtype) for part in x.unbind(dim)))
        return total.unsqueeze(dim) if keepdim else total

    def _mean(
        self,
        x: Tensor,
        dims: Sequence[int] | int | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        last = (-1, x.ndim - 1)
        if dims in last or (isinstance(dims, (list, tuple)) and len(dims) == 1 and dims[0] in last):
            return torch.mean(x, -1, keepdim, dtype=dtype)
        total = self._sum(x, dims, keepdim, dtype=dtype)
        return total / (x.numel() // max(1, total.numel()))

    def _refusal(self, name: str) -> NotServable:
        return NotServable(
            f"--batch-invariant cannot be promised for {self._module}",
            why=f"it computes torch's {name}, of which it is not known that rows do not meet there",
            ways_out=(WayOut("run without --batch-invariant"),),
        )


class Paused:
    """A backend that runs outside the mode, because it is batch-invariant itself."""

    def __init__(self, backend: AttentionBackend, mode: RowByRow) -> None:
        self.name = backend.name
        self._backend = backend
        self._paused: Callable[[], AbstractContextManager[None]] = mode.paused

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        """Implements `AttentionBackend.write`: k, v [T, heads, head_dim]."""
        with self._paused():
            self._backend.write(cache, k, v, step)

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """Implements `AttentionBackend.attend`: q [T, heads, head_dim]."""
        with self._paused():
            return self._backend.attend(cache, q, step, params)
