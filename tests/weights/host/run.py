"""Compile CUDA kernels of few rows for this CPU with the macros of a launch, and run that launch."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvant.weights.codecs import NarrowWeight
from kvant.weights.cuda import few_rows, shared_rows, wide_rows
from kvant.weights.cuda.few_rows import Act, Beside, Kind, Warps
from kvant.weights.cuda.shared_rows import Shares
from kvant.weights.cuda.wide_rows import Blocks

HERE = Path(__file__).parent
SOURCES = Path(few_rows.__file__).parent


def multiply(
    directory: Path,
    x: Tensor,
    weight: NarrowWeight,
    bias: Tensor | None,
    cut: Warps,
    kind: Kind,
    beside: Beside,
    *,
    experts: int = 1,
) -> Tensor:
    """`few_rows.multiply` on this CPU."""
    call = few_rows.arranged(x, weight, bias, cut, kind, beside, experts=experts)
    macros = few_rows.defines(
        weight.format, weight.columns, call.tiles, x.dtype, cut, kind, bias=bias is not None
    )
    library = _compiled(directory, "few_rows", macros)
    _run(
        library,
        few_rows.ARGUMENTS,
        call.values,
        call.programs,
        few_rows.shared_bytes(macros),
        weight.tensors,
    )
    return call.out


def multiply_shared(
    directory: Path,
    x: Tensor,
    weight: NarrowWeight,
    bias: Tensor | None,
    cut: Shares,
    act: Act | None = None,
) -> Tensor:
    """`shared_rows.multiply` on this CPU."""
    arrived = torch.zeros(64, dtype=torch.int32)
    call = shared_rows.arranged(x, weight, bias, cut, act, arrived)
    macros = shared_rows.defines(
        weight.format, few_rows.token_tiles(len(x)), x.dtype, cut, act, bias=bias is not None
    )
    tensors = [weight.codes, weight.scales, x]
    tensors += [] if weight.zeros is None else [weight.zeros]
    library = _compiled(directory, "shared_rows", macros)
    shared = shared_rows.shared_bytes(macros)
    _run(library, shared_rows.ARGUMENTS, call.values, call.programs, shared, tensors)
    assert not arrived.any()
    return call.out


def multiply_wide(
    directory: Path,
    x: Tensor | Blocks,
    weight: NarrowWeight,
    bias: Tensor | None,
    cut: wide_rows.Cut,
    around: wide_rows.Around,
    beside: wide_rows.Beside,
) -> wide_rows.Found:
    """`wide_rows.multiply` on this CPU."""
    arrived = torch.zeros(64, dtype=torch.int32)
    call = wide_rows.arranged(x, weight, bias, cut, arrived, around, beside)
    data = wide_rows.data_of(x)
    macros = wide_rows.defines(
        weight.format, few_rows.token_tiles(len(x)), data.dtype, cut, around, bias=bias is not None
    )
    library = _compiled(directory, "wide_rows", macros)
    shared = wide_rows.shared_bytes(macros)
    tensors = [*weight.tensors, data]
    _run(library, wide_rows.ARGUMENTS, call.values, call.programs, shared, tensors)
    assert not arrived.any()
    return call.found


def _compiled(directory: Path, name: str, macros: Mapping[str, int | str]) -> Path:
    source, library = (
        directory / f"{name}.cu",
        directory / f"{name}{abs(hash(tuple(macros.items())))}.so",
    )
    source.write_text((SOURCES / "decode.cuh").read_text() + (SOURCES / f"{name}.cu").read_text())
    defines = [f"-D{key}={value}" for key, value in macros.items()]
    defines += [
        f'-DSOURCE="{source}"',
        *(f"-D{one.upper()}={int(name == one)}" for one in ("shared_rows", "wide_rows")),
    ]
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *defines]
    subprocess.run([*command, str(HERE / "few_rows_host.cpp"), "-o", str(library)], check=True)
    return library


def _run(
    library: Path,
    kinds: Sequence[type],
    given: Sequence[int | float],
    programs: tuple[int, int],
    shared: int,
    tensors: Sequence[Tensor],
) -> None:
    class Given(ctypes.Structure):
        _fields_ = [(f"a{place}", kind) for place, kind in enumerate(kinds)]

    values = [
        value or None if kind is ctypes.c_void_p else value
        for kind, value in zip(kinds, given, strict=True)
    ]
    ranges = np.array(
        [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors], dtype=np.int64
    )
    ctypes.CDLL(str(library)).run(
        ctypes.byref(Given(*values)), *programs, shared, ranges.ctypes.data_as(ctypes.c_void_p),
        len(tensors),
    )  # fmt: skip
