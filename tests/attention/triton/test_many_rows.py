"""When the kernel for many rows serves, and into how many programs it cuts a step."""

from __future__ import annotations

import importlib.resources
import itertools
import logging
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.cuda import many_rows
from kvant.kernels.cuda import build
from kvant.kv.dtype import KVDtype
from tests.attention.triton import case

QUANTISED = (KVDtype.FP8_E4M3, KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.NVFP4)


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    build.available.cache_clear()
    yield
    build.available.cache_clear()
    build.unavailable.cache_clear()


def _serves(k: KVDtype, v: KVDtype, **kwargs: object) -> bool:
    x = case.prepare(k, v, **{"head_dims": (128, 128), **kwargs})  # type: ignore[arg-type]
    return many_rows.serves(x.cache, torch.bfloat16, x.params)


def test_every_pair_of_quantised_formats_is_served_and_nothing_that_it_would_compute_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "unavailable", lambda: None)
    assert all(_serves(k, v) for k in QUANTISED for v in QUANTISED)
    assert not _serves(KVDtype.BFLOAT16, KVDtype.FP8_E4M3)
    assert not _serves(KVDtype.FP8_E4M3, KVDtype.FLOAT16)
    assert not _serves(KVDtype.FP8_E4M3, KVDtype.FP8_E4M3, softcap=3.0)
    assert not _serves(KVDtype.FP8_E4M3, KVDtype.FP8_E4M3, head_dims=(64, 64))


def test_without_the_compiler_the_general_kernel_serves_and_the_reason_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no module named {name}")

    build.unavailable.cache_clear()
    monkeypatch.setattr(build, "is_hopper", lambda: True)
    monkeypatch.setattr(build, "import_module", missing)
    with caplog.at_level(logging.WARNING):
        assert not any(_serves(KVDtype.FP8_E4M3, KVDtype.FP8_E4M3) for _ in range(3))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cuda.bindings" in caplog.text


def test_two_programs_with_three_tiles_or_more_fit_a_multiprocessor_in_every_pair_of_formats() -> (
    None
):
    multiprocessor, static_and_system = 228 * 1024, 4 * 1024 + 1024
    assert len(many_rows.SERVED) == 11
    for k, v in itertools.product(many_rows.SERVED, repeat=2):
        stages = many_rows.shape_for(k, v).stages
        program = many_rows.shared_bytes(k, v) + static_and_system
        assert stages >= 3, (k, v)
        assert many_rows.PROGRAMS * program <= multiprocessor, (k, v)


def test_every_source_is_in_the_package() -> None:
    package = importlib.resources.files("kvant.attention.cuda")
    for dtype in many_rows.SERVED:
        names = many_rows.sources(dtype, dtype)
        text = "".join(package.joinpath(name).read_text() for name in names)
        assert text.count('extern "C" __global__') == 1
        struct = many_rows._side_defines("K", dtype)["FORMAT_K"]
        assert text.count(f"struct {struct} :") == 1
        assert "#include" not in text
