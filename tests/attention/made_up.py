"""A format that Kvant does not have: what adding one takes, in a test's hands.

Declared as an entry of `kv/dtype.py` would be, with a codec module and one kernel file per backend put where
Python finds modules. Nothing else of Kvant knows it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from kvant.kv.codecs import int8_per_token_head
from kvant.kv.dtype import KVDtype
from kvant.kv.format import KVFormat

_INT8 = int8_per_token_head.RowScaledInt8Codec()


class _TwiceTheScale:
    """int8_per_token_head, but two scales as large are stored: value = code * scale / 2."""

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        codes, scales = _INT8.encode(x, scale)
        return codes, scales * 2

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        codes, scales = planes
        return _INT8.decode((codes, scales / 2), scale, dtype)


@dataclass(frozen=True)
class _Declared:
    """Stands for a member of `KVDtype`, which cannot get one more at run time."""

    format: KVFormat

    def __str__(self) -> str:
        return self.format.name


@contextmanager
def added(*, backend: str, kernels: Any) -> Iterator[KVDtype]:
    """The made-up format, with `kernels(declared)` as its file for one backend."""
    name = "made_up_format"
    declared = replace(KVDtype.INT8_PER_TOKEN_HEAD.format, name=name, codec=name, aliases=())
    files = {
        f"kvant.kv.codecs.{name}": SimpleNamespace(codec=lambda fmt: _TwiceTheScale()),
        f"kvant.attention.{backend}.formats.{name}": SimpleNamespace(kernels=kernels),
    }
    sys.modules.update(cast(dict[str, ModuleType], files))
    try:
        yield cast(KVDtype, _Declared(declared))
    finally:
        for file in files:
            del sys.modules[file]
