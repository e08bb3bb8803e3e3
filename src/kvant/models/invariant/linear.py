"""Matrix products in tiles of fixed numbers of rows.

A library chooses a kernel, and with it the order of sums, by the number of rows. So a product runs in tiles
with a fixed number of rows. A proof on this machine, for this weight's shape, showed that the tile gives
every row the same bits at any position and beside any rows. Rows that do not fill a tile are padded with
zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvant.errors import NotServable, WayOut

_TILES = {"cpu": (4, 8, 16, 32, 64, 128, 256), "cuda": (128, 256, 512, 1024, 2048)}
"""Numbers of rows to try. On a CPU the smallest costs hardly more than reading the weights. Larger ones
serve prompts, if they give the same bits as the smallest."""

_ALIGNMENT = 64
"""Bytes; libraries may treat the beginning of less aligned rows differently."""

_Key = tuple[object, ...]


class TiledLinear:
    """`torch.nn.functional.linear` whose rows do not depend on each other.

    Caches the proofs by device, dtype, shape and number of threads.
    """

    def __init__(self) -> None:
        self._base: dict[_Key, int] = {}
        self._proved: dict[tuple[_Key, int, int], bool] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x [.., in] times weight [out, in] plus bias [out]: [.., out].

        Raises NotServable like `prove`.
        """
        rows = x.reshape(-1, x.shape[-1])
        parts = []
        start = 0
        while start < len(rows):
            left = len(rows) - start
            size = self._tile(left, weight, bias)
            part = F.linear(_tile_of(rows[start : start + size], size), weight, bias)
            parts.append(part if size <= left else part[:left])
            start += size
        if not parts:
            return x.new_empty(*x.shape[:-1], weight.shape[0])
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(*x.shape[:-1], weight.shape[0])

    def prove(self, weight: Tensor, bias: Tensor | None = None) -> int:
        """Returns the smallest tile for weight [out, in]. Raises NotServable if no tile treats rows alike.

        Prefers a tile whose bits the next larger tile reproduces, so that prompts can use larger ones.
        """
        key = _key(weight, bias)
        if key not in self._base:
            sizes = _TILES[weight.device.type]
            weight, bias = _stand_in(weight, bias)
            alike = [size for size in sizes[:3] if _rows_are_alike(size, weight, bias)]
            if not alike:
                raise _refusal(weight)
            self._base[key] = next(
                (
                    size
                    for size in alike
                    if self._is_proved(sizes[sizes.index(size) + 1], size, weight, bias)
                ),
                alike[0],
            )
        return self._base[key]

    def _tile(self, left: int, weight: Tensor, bias: Tensor | None) -> int:
        """Returns the tile for the next of `left` rows: the largest one filled to three quarters."""
        base = self.prove(weight, bias)
        for size in reversed(_TILES[weight.device.type]):
            if base < size and 3 * size <= 4 * left and self._is_proved(size, base, weight, bias):
                return size
        return base

    def _is_proved(self, size: int, base: int, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether a tile of this size gives the same bits as tiles of `base` rows."""
        key = _key(weight, bias), size, base
        if key not in self._proved:
            weight, bias = _stand_in(weight, bias)
            x = _numbers(size, weight, seed=size)
            small = [F.linear(_tile_of(part, base), weight, bias) for part in torch.split(x, base)]
            self._proved[key] = torch.equal(F.linear(x, weight, bias), torch.cat(small)[:size])
        return self._proved[key]


def prove_all(linear: TiledLinear, module: nn.Module) -> None:
    """Proves a tile for every linear layer of a module. Raises NotServable like `TiledLinear.prove`."""
    for part in module.modules():
        if type(part) is nn.Linear:
            linear.prove(part.weight, part.bias)


def _rows_are_alike(size: int, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a row's result is the same at every position and beside other rows.

    Moving all rows by one position compares each position with the next, so all of them with each other.
    """
    x, others = _numbers(size, weight, seed=0), _numbers(size, weight, seed=1)
    first = F.linear(x, weight, bias)
    for shift in (1, size // 2 + 1):
        if not torch.equal(F.linear(x.roll(shift, 0), weight, bias), first.roll(shift, 0)):
            return False
    for place in (0, size // 2, size - 1):
        mixed = others.clone()
        mixed[place] = x[0]
        if not torch.equal(F.linear(mixed, weight, bias)[place], first[0]):
            return False
    return True


def _tile_of(rows: Tensor, size: int) -> Tensor:
    """Returns rows [n, columns], contiguous and aligned, padded with zeros to `size` rows."""
    if len(rows) < size:
        return F.pad(rows, (0, 0, 0, size - len(rows)))
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % _ALIGNMENT else rows


def _stand_in(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns a weight whose products reveal the order of sums: with `_numbers`, every term has its negative.

    Exact sums would be 0, so results consist of rounding errors alone. With other numbers a 16-bit result
    would hide nearly every difference between float32 sums.
    """
    half, order = weight.shape[1] // 2, _order(weight.shape[1])
    generator = torch.Generator(weight.device).manual_seed(2)
    numbers = torch.empty_like(weight[:, :half]).normal_(generator=generator)
    rest = torch.zeros_like(weight[:, 2 * half :])
    made = torch.empty_like(weight)
    made[:] = torch.cat((numbers, -numbers, rest), dim=1)[:, order.to(weight.device)]
    return made, None if bias is None else torch.zeros_like(bias)


def _numbers(rows: int, weight: Tensor, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = weight.shape[1]
    half = torch.randn(rows, columns // 2, generator=generator)
    rest = torch.zeros(rows, columns % 2)
    x = torch.cat((half, half, rest), dim=1)[:, _order(columns)]
    return x.to(device=weight.device, dtype=weight.dtype)


def _order(columns: int) -> Tensor:
    """Returns a fixed random order of columns, so that terms that cancel are not neighbours."""
    return torch.randperm(columns, generator=torch.Generator().manual_seed(3))


def _key(weight: Tensor, bias: Tensor | None) -> _Key:
    """Returns everything by which a library may choose a kernel, except the number of rows."""
    return (
        weight.device,
        weight.dtype,
        weight.shape,
        weight.stride(),
        weight.data_ptr() % _ALIGNMENT,
        bias is None,
        torch.get_num_threads(),
    )


def _refusal(weight: Tensor) -> NotServable:
    out, into = weight.shape
    return NotServable(
        "--batch-invariant cannot be promised here",
        why=f"torch's {weight.dtype} matrix product of {into} by {out} on {weight.device} gives a row "
        "other bits in another place, in tiles of every size that was tried",
        ways_out=(WayOut("run without --batch-invariant"),),
    )
