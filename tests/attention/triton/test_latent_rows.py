"""When the CUDA kernel for latents serves, and that a program of it fits."""

from __future__ import annotations

import importlib.resources

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.cuda import latent_rows
from kvant.kernels.cuda import build
from kvant.kv.dtype import KVDtype
from tests.attention.triton import case


def serves(
    dtype: KVDtype, head_dims: tuple[int, int] = (576, 512), compute: torch.dtype = torch.bfloat16
) -> bool:
    x = case.prepare(dtype, heads=(16, 1), head_dims=head_dims, latent=True, sequences=((3, 1),))
    return latent_rows.serves(x.cache, compute)


def test_latents_in_8_bits_are_served_and_nothing_that_it_would_compute_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "available", lambda otherwise: True)
    assert all(map(serves, latent_rows.SERVED))
    assert not serves(KVDtype.BFLOAT16)
    assert not serves(KVDtype.FP8_E4M3, head_dims=(320, 256))
    assert not serves(KVDtype.FP8_E4M3, compute=torch.float32)


def test_two_programs_fit_a_multiprocessor() -> None:
    multiprocessor, static_and_system = 228 * 1024, 2 * 1024
    program = latent_rows.shared_bytes(latent_rows.SHAPE) + static_and_system
    assert latent_rows.SHAPE.programs * program <= multiprocessor


def test_every_source_is_in_the_package() -> None:
    package = importlib.resources.files("kvant.attention.cuda")
    for dtype in latent_rows.SERVED:
        names = latent_rows.sources(dtype)
        text = "".join(package.joinpath(name).read_text() for name in names)
        assert text.count('extern "C" __global__') == 1
        assert text.count(f"struct {dtype.format.name} :") == 1
