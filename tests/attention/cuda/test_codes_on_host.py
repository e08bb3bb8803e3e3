"""The decoders of the CUDA kernel for many rows, compiled for this CPU, against the codecs."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvant.attention.cuda import many_rows
from kvant.kv.codecs import codec_for
from kvant.kv.codecs.rotation import unrotate
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Rotation

HOST = Path(__file__).parent / "host" / "codes_host.cpp"
SOURCES = Path(many_rows.__file__).parent
TILE, HEAD = many_rows.TILE, many_rows.HEAD


def _read(
    directory: Path, k: KVDtype, v: KVDtype, planes: list[list[Tensor]], head: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [TILE, HEAD] of one head as the kernel decodes them. planes: [TILE, heads, ..]."""
    heads = planes[0][0].shape[1]
    macros = {**many_rows._side_defines("K", k), **many_rows._side_defines("V", v), "HEADS": heads}
    names = [name for name in many_rows.sources(k, v) if name[:5] in ("codes", "forma")]
    text = "".join((SOURCES / name).read_text() for name in names)
    (directory / "codes.inc").write_text(text)
    library = directory / "codes.so"
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-I{directory}"]
    subprocess.run(["g++", *flags, *defines, str(HOST), "-o", str(library)], check=True)
    found = torch.empty(2, TILE, HEAD)
    kept, addresses = [], []
    for side in planes:
        codes = side[0][:, head].contiguous()
        scales = side[1].contiguous() if len(side) > 1 else torch.zeros(1)
        kept += [codes, scales]
        addresses += [codes.data_ptr(), scales.data_ptr()]
    run = ctypes.CDLL(str(library)).read_tile
    pointer = ctypes.c_void_p
    run.argtypes = [pointer, pointer, pointer, pointer, ctypes.c_int, pointer, pointer]
    run(*addresses, head, found[0].data_ptr(), found[1].data_ptr())
    del kept
    return found[0], found[1]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("k", "v", "heads", "head"),
    [
        (KVDtype.INT4_SHORT_FEEDBACK, KVDtype.INT4_SHORT, 8, 3),
        (KVDtype.INT4_SHORT, KVDtype.INT4_SHORT, 3, 1),
        (KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_SHORT, 3, 2),
        (KVDtype.INT4_FEEDBACK, KVDtype.INT4_PER_TOKEN_HEAD, 2, 1),
        (KVDtype.INT4_SHORT_FEEDBACK, KVDtype.NORMAL2, 8, 3),
        (KVDtype.NORMAL2, KVDtype.NORMAL2, 3, 1),
        (KVDtype.NVFP4, KVDtype.NVFP4, 2, 1),
        (KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.FP8_PER_TOKEN_HEAD, 2, 0),
        (KVDtype.FP8_E5M2, KVDtype.FP8_E4M3, 2, 1),
    ],
    ids=str,
)
def test_operands_are_the_stored_numbers(
    k: KVDtype, v: KVDtype, heads: int, head: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 3, TILE)[:, None, None]
    planes, expected = [], []
    for dtype in (k, v):
        codec = codec_for(many_rows._stored_as(dtype))
        scale = torch.ones(1) if dtype.format.takes_outside_scale else None
        rows = torch.randn(TILE, heads, HEAD) * (0.3 if scale is not None else sizes)
        if dtype.format.rotation is Rotation.HADAMARD:
            rows[5, head, 7] = math.nan
        encoded = [plane.contiguous() for plane in codec.encode(rows, scale)]
        planes.append(encoded)
        expected.append(codec.decode(encoded, scale, torch.float32)[:, head])
    for found, wanted, dtype in zip(
        _read(tmp_path, k, v, planes, head), expected, (k, v), strict=True
    ):
        rotated = dtype.format.rotation is Rotation.HADAMARD
        stored = unrotate(found.double()) if rotated else found.double()
        assert torch.equal(stored.isnan(), wanted.isnan())
        off = (stored - wanted).nan_to_num().abs().amax(-1)
        assert (off <= 2e-6 * wanted.nan_to_num().abs().amax(-1) + 1e-30).all()
