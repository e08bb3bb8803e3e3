"""cuBLASLt's algorithms for a matrix product, through the library that torch has loaded.

torch lets the library choose one of them by its rules. Names and numbers are of its C interface.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

import torch
from torch import Tensor

_FLOAT32_SUMS = 68  # CUBLAS_COMPUTE_32F
_DTYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_TRANSPOSE_A = 3  # cublasLtMatmulDescAttributes_t
_MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
_MOST = 16  # it knows eight for the usual sizes

_CHANGES = ((4, c_uint32, 4), (5, c_uint32, 8), (8, ctypes.c_uint16, 9))
"""cublasLtMatmulAlgoConfigAttributes_t: order of tiles, custom option, shape of clusters; the type
of each, and below what values are tried."""

ALIGNMENT = 256
"""Bytes to which operands are aligned."""


class Algorithm(ctypes.Structure):
    """How a product is computed: opaque, for one version of the library."""

    _fields_ = (("data", c_uint64 * 8),)


class _Found(ctypes.Structure):
    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@functools.cache
def library() -> CublasLt | None:
    """That of torch for NVIDIA GPUs, which is in the process already; None for other torches."""
    if torch.version.cuda is None:
        return None
    return CublasLt(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"))


class CublasLt:
    """Products of x [rows, in] and weight [out, in], contiguous and aligned; float32 sums.

    None of its algorithms takes workspace.
    """

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._library = loaded
        self._handle = self._made("cublasLtCreate")
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._product = self._made(
            "cublasLtMatmulDescCreate", _FLOAT32_SUMS, _DTYPES[torch.float32]
        )
        yes = c_int32(1)
        self._set("cublasLtMatmulDescSetAttribute", self._product, _TRANSPOSE_A, yes)
        self._layouts: dict[tuple[torch.dtype, int, int], c_void_p] = {}

    def algorithms(self, rows: int, weight: Tensor) -> list[Algorithm]:
        """What the library proposes for so many rows, the best by its own rules first."""
        wanted = self._made("cublasLtMatmulPreferenceCreate")
        self._set("cublasLtMatmulPreferenceSetAttribute", wanted, _MAX_WORKSPACE, c_size_t(0))
        found, count = (_Found * _MOST)(), c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, *self._problem(rows, weight), wanted,
            c_int(_MOST), found, byref(count),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", wanted)
        return [_copied(one.algorithm) for one in found[: count.value] if one.state == 0]

    def neighbours(self, algorithm: Algorithm, rows: int, weight: Tensor) -> Iterator[Algorithm]:
        """Those that differ from it in one setting and can run."""
        for attribute, kind, end in _CHANGES:
            for value in range(end):
                made, setting, checked = _copied(algorithm), kind(value), _Found()
                if self._status(
                    "cublasLtMatmulAlgoConfigSetAttribute", byref(made), attribute,
                    byref(setting), c_size_t(ctypes.sizeof(setting)),
                ):  # fmt: skip
                    continue
                refused = self._status(
                    "cublasLtMatmulAlgoCheck", self._handle, *self._problem(rows, weight),
                    byref(made), byref(checked),
                )  # fmt: skip
                if not refused and not checked.workspace and bytes(made) != bytes(algorithm):
                    yield made

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor, algorithm: Algorithm) -> bool:
        """Write x @ weight.T into out [rows, out] on the current stream; False where it cannot."""
        product, *layouts = self._problem(len(x), weight)
        a, b, c, d = layouts
        to = c_void_p(out.data_ptr())
        return not self._status(
            "cublasLtMatmul", self._handle, product, byref(self._one),
            c_void_p(weight.data_ptr()), a, c_void_p(x.data_ptr()), b, byref(self._zero), to, c, to, d,
            byref(algorithm), c_void_p(), c_size_t(0),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )  # fmt: skip

    def _problem(self, rows: int, weight: Tensor) -> tuple[c_void_p, ...]:
        """The product and the layouts of its operands. The library's matrices are columns of rows."""
        out, into = weight.shape
        result = self._layout(weight.dtype, out, rows)
        operands = self._layout(weight.dtype, into, out), self._layout(weight.dtype, into, rows)
        return self._product, *operands, result, result

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        key = dtype, rows, columns
        if key not in self._layouts:
            self._layouts[key] = self._made(
                "cublasLtMatrixLayoutCreate", _DTYPES[dtype], c_uint64(rows), c_uint64(columns),
                c_int64(rows),
            )  # fmt: skip
        return self._layouts[key]

    def _made(self, function: str, *values: object) -> c_void_p:
        made = c_void_p()
        self._call(function, byref(made), *values)
        return made

    def _set(self, function: str, of: c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:  # type: ignore[type-arg]
        self._call(function, of, attribute, byref(value), c_size_t(ctypes.sizeof(value)))

    def _call(self, function: str, *values: object) -> None:
        if status := self._status(function, *values):
            raise RuntimeError(f"{function} of cuBLASLt says {status}")

    def _status(self, function: str, *values: object) -> int:
        return int(getattr(self._library, function)(*values))


def _copied(algorithm: Algorithm) -> Algorithm:
    return Algorithm.from_buffer_copy(algorithm)
