"""The kernels read both forms of a layer with wide rows, under Triton's CPU interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.launching import Shape
from kvant.attention.triton import backend, both_decode
from kvant.attention.triton.backend import TritonBackend
from kvant.attention.triton.cut import NEVER_SPLIT
from kvant.kv.dtype import KVDtype
from kvant.kv.spec import WideRows
from tests.attention import driver
from tests.attention.triton import case

pytestmark = [
    pytest.mark.skipif(not case.INTERPRETED, reason="compiled here: the gpu tests cover this"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

INT4 = KVDtype.INT4_PER_TOKEN_HEAD
SPLIT = Shape(rows=16, tile=16, warps=1, stages=1, programs=8)
WHOLE = Shape(rows=16, tile=16, warps=1, stages=1, programs=1, least=NEVER_SPLIT)
DECODES = ((70, 1), (3, 1))
PROMPTS = ((45, 17),)


def rows(sink: int, recent: int, dtype: KVDtype = KVDtype.FLOAT16, sides: str = "kv") -> WideRows:
    k, v = (driver.choice(dtype) if side in sides else None for side in "kv")
    return WideRows(k, v, sink, recent)


def check(shape: Shape, *, invariant: bool = False, k: KVDtype = INT4, **options: Any) -> None:
    """Write by the backend, and compare with the definition over what was stored."""
    x = case.prepare(k, heads=(2, 1), **options)
    triton = TritonBackend(batch_invariant=invariant)
    triton.write(x.cache, x.k, x.v, x.step)
    with pytest.MonkeyPatch.context() as patch:
        for module in (backend, both_decode):
            patch.setattr(module, "shape_for", lambda *_, **__: shape)
        found = triton.attend(x.cache, x.q, x.step, x.params)
    assert case.error(found, x.expected()) < 2e-3


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("sink", "recent"), [(4, 20), (0, 1), (17, 30)])
@pytest.mark.parametrize("sequences", [DECODES, PROMPTS], ids=["decodes", "prompts"])
def test_every_query_reads_each_key_in_its_form(
    sequences: tuple[tuple[int, int], ...], sink: int, recent: int, invariant: bool
) -> None:
    shape = SPLIT if sequences is DECODES else WHOLE
    check(shape, invariant=invariant, sequences=sequences, wide=rows(sink, recent), padding=2)


@pytest.mark.parametrize(
    "options",
    [{"sinks": True}, {"softcap": 5.0}, {"k": KVDtype.TURBOQUANT_K3, "v": KVDtype.TURBOQUANT_V3},
     {"k": KVDtype.INT4_SHORT, "v": KVDtype.NORMAL2},
     {"k": KVDtype.NVFP4, "v": KVDtype.FP8_PER_TOKEN_HEAD}, {"page_size": 32}, {"page_size": 4}],
    ids=str,
)  # fmt: skip
def test_layers_have_what_others_have(options: dict[str, Any]) -> None:
    wide = KVDtype.INT8_PER_TOKEN_HEAD if "v" in options else KVDtype.FLOAT16
    check(WHOLE, sequences=DECODES, wide=rows(4, 20, wide), **options)


@pytest.mark.parametrize("sides", ["k", "v"])
@pytest.mark.parametrize("sequences", [DECODES, PROMPTS], ids=["decodes", "prompts"])
@pytest.mark.parametrize(
    "formats",
    [(INT4, KVDtype.INT4_SHORT), (KVDtype.FP8_E4M3, KVDtype.NORMAL2),
     (KVDtype.TURBOQUANT_K3, KVDtype.FP8_E4M3)],
    ids=lambda pair: f"{pair[0]}/{pair[1]}",
)  # fmt: skip
def test_one_side_alone_is_read_wide(
    formats: tuple[KVDtype, KVDtype], sequences: tuple[tuple[int, int], ...], sides: str
) -> None:
    for invariant in (False, True):
        check(
            SPLIT if sequences is DECODES else WHOLE, invariant=invariant, k=formats[0],
            v=formats[1], sequences=sequences, wide=rows(4, 20, sides=sides),
        )  # fmt: skip


@pytest.mark.parametrize("sides", ["k", "v"])
def test_one_wide_side_is_joined_by_another_launch_too(
    sides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.cut_with(monkeypatch, MOST_JOINED=0)
    check(SPLIT, sequences=((100, 1), (64, 1)), wide=rows(4, 20, sides=sides), v=INT4)


@pytest.mark.parametrize("sides", ["k", "v", "kv"])
def test_queries_are_rotated_once_for_both_forms(
    sides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned, rotate = [], both_decode.rotate
    monkeypatch.setattr(both_decode, "rotate", lambda *given: turned.append(0) or rotate(*given))
    check(SPLIT, sequences=DECODES, wide=rows(4, 20, sides=sides), v=INT4)
    assert len(turned) == 1


@pytest.mark.parametrize("bounds", [{"MOST_JOINED": 0}, {"FEWEST_JOINED": 1}, {"MOST_SCANNED": 0}])
def test_parts_are_joined_by_either_kernel(
    bounds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case.cut_with(monkeypatch, **bounds)
    check(SPLIT, sequences=((100, 1), (64, 1)), wide=rows(4, 20), sinks=True)


def test_wide_rows_of_few_sequences_are_read_by_several_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = []
    launch = both_decode.both_attention

    class Watched:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *given, **named: (
                shares.append(named["APART"]) or launch[grid](*given, **named)
            )

    monkeypatch.setattr(both_decode, "both_attention", Watched())
    monkeypatch.setattr(both_decode, "multiprocessors", lambda device: 1)
    for sequences in (DECODES[:1], DECODES, (*DECODES, (5, 1), (60, 1))):
        check(SPLIT, sequences=sequences, wide=rows(4, 20))
    assert shares == [4, 2, 1]


def test_rows_of_released_pages_change_nothing() -> None:
    """Between the first tokens and the latest, wide pages may hold NaN of other sequences."""
    x = case.prepare(INT4, heads=(2, 1), sequences=((130, 1),), wide=rows(4, 20))
    triton = TritonBackend()
    triton.write(x.cache, x.k, x.v, x.step)
    before = triton.attend(x.cache, x.q, x.step, x.params)
    assert x.cache.wide is not None
    for column in range(1, (130 - 20) // 16):
        page = int(x.step.page_table[0, column])
        x.cache.wide.k[0][page] = x.cache.wide.v[0][page] = float("nan")
    assert torch.equal(triton.attend(x.cache, x.q, x.step, x.params), before)
