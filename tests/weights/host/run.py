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
from kvant.weights.cuda import few_rows, shared_rows
from kvant.weights.cuda.few_rows import Act, Beside, Kind, Warps
from kvant.weights.cuda.shared_rows import Laid, Shares

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
    laid = lay(x, weight) if cut.laid else None
    call = shared_rows.arranged(x, weight, bias, cut, act, arrived, laid)
    macros = shared_rows.defines(
        weight.format, few_rows.token_tiles(len(x)), x.dtype, cut, act, bias=bias is not None
    )
    given = x if laid is None else laid.numbers
    tensors = [weight.codes, weight.scales, given]
    tensors += [] if weight.zeros is None else [weight.zeros]
    library = _compiled(directory, "shared_rows", macros)
    shared = shared_rows.shared_bytes(macros)
    _run(library, shared_rows.ARGUMENTS, call.values, call.programs, shared, tensors)
    assert not arrived.any()
    return call.out


def lay(x: Tensor, weight: NarrowWeight) -> Laid:
    """`lay_rows` in torch."""
    tokens = len(x)
    most = x.float().abs().amax(1)
    scale = torch.exp2(14 - torch.floor(torch.log2(most)))
    numbers = (x.float() * scale[:, None]).half()
    if weight.format.code.bits == 4:
        numbers = numbers.view(tokens, -1, 4)[..., [0, 2, 1, 3]].reshape(tokens, -1)
    # A lane's 16 neighbours: steps of an instruction, halves of a step, numbers of a register.
    ordered = numbers.view(tokens, -1, 4, 4, 2, 2).permute(0, 1, 3, 4, 2, 5)
    rows = ordered.reshape(tokens, -1, 64).contiguous()
    pieces = rows.view(torch.uint8).view(tokens, -1, 8, 16)
    room = 8 * few_rows.token_tiles(tokens)
    image = torch.zeros(pieces.shape[1], room, 8, 16, dtype=torch.uint8)
    for token in range(tokens):
        image[:, token, torch.arange(8) ^ token % 8] = pieces[token]
    return Laid(image.view(-1), 1 / scale)


def _compiled(directory: Path, name: str, macros: Mapping[str, int | str]) -> Path:
    source, library = (
        directory / f"{name}.cu",
        directory / f"{name}{abs(hash(tuple(macros.items())))}.so",
    )
    source.write_text((SOURCES / "decode.cuh").read_text() + (SOURCES / f"{name}.cu").read_text())
    defines = [f"-D{key}={value}" for key, value in macros.items()]
    defines += [f'-DSOURCE="{source}"', f"-DSHARED_ROWS={int(name == 'shared_rows')}"]
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
