"""Compile `few_rows.cu` for this CPU with the macros of a launch, and run that launch."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from kvant.weights.codecs import NarrowWeight
from kvant.weights.cuda import few_rows
from kvant.weights.cuda.few_rows import ARGUMENTS, Beside, Kind, Warps

HERE = Path(__file__).parent
SOURCE = Path(few_rows.__file__).with_name("few_rows.cu")


class _Given(ctypes.Structure):
    _fields_ = [(f"a{place}", kind) for place, kind in enumerate(ARGUMENTS)]


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
    library = directory / f"few_rows_{abs(hash(tuple(macros.items())))}.so"
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        f'-DSOURCE="{SOURCE}"',
        *defines,
    ]
    subprocess.run([*command, str(HERE / "few_rows_host.cpp"), "-o", str(library)], check=True)
    tensors = [weight.codes, weight.scales, *([] if weight.zeros is None else [weight.zeros])]
    _run(library, call, few_rows.shared_bytes(macros), tensors)
    return call.out


def _run(library: Path, call: few_rows.Call, shared: int, tensors: Sequence[Tensor]) -> None:
    values = [
        value or None if kind is ctypes.c_void_p else value
        for kind, value in zip(ARGUMENTS, call.values, strict=True)
    ]
    ranges = np.array(
        [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors], dtype=np.int64
    )
    run = ctypes.CDLL(str(library)).run
    across, down = call.programs
    run(
        ctypes.byref(_Given(*values)), across, down, shared,
        ranges.ctypes.data_as(ctypes.c_void_p), len(tensors),
    )  # fmt: skip
