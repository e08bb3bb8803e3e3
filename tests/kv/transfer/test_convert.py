"""A converted page is what the codecs say: decoded by the one, encoded by the other."""

from __future__ import annotations

import json

import pytest
import torch

from kvant.kv.codecs import codec_for
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.identity import PageIdentity
from kvant.kv.offload.mover import HostRows, MemoryCopier, pieces_of
from kvant.kv.offload.moves import Key
from kvant.kv.pool import KVPool
from kvant.kv.spec import Choice, KVPlan, LayerSpec, Role, Scale, ScaleState, Source
from kvant.kv.transfer.convert import CodecConverter, groups_of
from kvant.kv.transfer.measured import MEASURED
from kvant.kv.transfer.messages import Part, Welcome
from kvant.kv.transfer.taker import IncompatiblePages

PAGE, HEADS, HEAD = 8, 2, 64
MINE = PageIdentity("w", "stored", "mine", "s", "r", "l", "none", "")
THEIRS = PageIdentity("w", "stored", "theirs", "t", "r", "m", "none", "")
FORMATS = (
    KVDtype.FLOAT32, KVDtype.BFLOAT16, KVDtype.FP8_E4M3, KVDtype.FP8_PER_TOKEN_HEAD,
    KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.NVFP4,
)  # fmt: skip


def pool_of(k: KVDtype, v: KVDtype, page_size: int = PAGE, layers: int = 2) -> KVPool:
    specs, scales = [], {}
    for index in range(layers):
        geometry = LayerGeometry(index, f"layer{index}", Attention.FULL, 4, HEADS, HEAD, HEAD)
        choices = [
            Choice(dtype, Source.EXPLICIT, "test", (), Scale(ScaleState.NONE)) for dtype in (k, v)
        ]
        specs.append(LayerSpec(geometry, choices[0], choices[1], "reference"))
        for side, dtype in ((Side.K, k), (Side.V, v)):
            if dtype.format.takes_outside_scale:
                scales[index, side] = torch.tensor([0.02 + 0.01 * index])
    plan = KVPlan(Role.TARGET, "test", ComputeDtype.FLOAT32, "test", page_size, tuple(specs))
    return KVPool(plan, 4, device=torch.device("cpu"), scales=scales)


def rows_of(pool: KVPool) -> HostRows:
    size = sum(piece.shape[1] for piece in pieces_of([pool])[0])
    return HostRows([size], 3, size, [1], pinned=False)


def welcome_of(pool: KVPool, rows: HostRows, identity: PageIdentity = THEIRS) -> Welcome:
    size = pool.plan.page_size
    return Welcome("i", identity.fields, b"", 0, size, groups_of([pool], rows))


def mine_of(pool: KVPool) -> list[Part]:
    return [Part(MINE.fields, b"", 0, groups_of([pool], rows_of(pool)))]


def converter_to(pool: KVPool, *formats: KVDtype) -> CodecConverter:
    groups = groups_of([pool], rows_of(pool))
    return CodecConverter([pool], groups, pool.plan.page_size, frozenset(formats))


@pytest.mark.parametrize("into", FORMATS, ids=lambda dtype: dtype.format.name)
@pytest.mark.parametrize("of", FORMATS, ids=lambda dtype: dtype.format.name)
def test_a_page_becomes_what_both_codecs_say(of: KVDtype, into: KVDtype) -> None:
    other = KVDtype.BFLOAT16
    theirs, mine = pool_of(of, other), pool_of(other, into)
    x = torch.randn(2, 2, PAGE, HEADS, HEAD, generator=torch.Generator().manual_seed(7))
    for layer in range(2):
        cache = theirs[layer]
        for side, planes, scale, dtype in (
            (0, cache.k, cache.k_scale, of), (1, cache.v, cache.v_scale, other),
        ):  # fmt: skip
            for plane, new in zip(
                planes, codec_for(dtype).encode(x[layer, side], scale), strict=True
            ):
                plane[2] = new
    there, here = rows_of(theirs), rows_of(mine)
    MemoryCopier(pieces_of([theirs]), there).store(0, [2], [1])()
    converter = converter_to(mine, of, other)
    welcome = welcome_of(theirs, there)
    assert "KL divergence: not measured" in converter.check(mine_of(mine), welcome)
    converter.convert(welcome.groups, Key(0, b""), there.row(0, 1), here.row(0, 2))
    MemoryCopier(pieces_of([mine]), here).load(0, [3], [2])()
    for layer in range(2):
        source, target = theirs[layer], mine[layer]
        for read, read_scale, a, written, scale, b in (
            (source.k, source.k_scale, of, target.k, target.k_scale, other),
            (source.v, source.v_scale, other, target.v, target.v_scale, into),
        ):
            stored = [plane[2] for plane in read]
            decoded = codec_for(a).decode(stored, read_scale, torch.float32)
            expected = codec_for(b).encode(decoded, scale)
            for plane, want in zip(written, expected, strict=True):
                assert torch.equal(plane[3].view(torch.uint8), want.contiguous().view(torch.uint8))


def test_the_handshake_tells_the_measured_loss() -> None:
    """A stand-in has the fingerprint of the model that was measured."""
    (fingerprint, found), *_ = json.loads(MEASURED.read_text()).items()
    fp8, int8 = KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.INT8_PER_TOKEN_HEAD
    theirs, mine = pool_of(fp8, fp8), pool_of(int8, int8)
    groups = groups_of([mine], rows_of(mine))
    converter = CodecConverter([mine], groups, PAGE, frozenset({fp8}), fingerprint)
    said = converter.check(mine_of(mine), welcome_of(theirs, rows_of(theirs)))
    loss = found["kld_mean"]["fp8_per_token_head"]["int8_per_token_head"]
    assert f"of the conversion: {loss:.2g}, measured on {found['model']}" in said
    mixed = pool_of(int8, KVDtype.BFLOAT16)
    converter = CodecConverter([mixed], groups, PAGE, frozenset({fp8}), fingerprint)
    assert "KL divergence: not measured" in converter.check(
        mine_of(mixed), welcome_of(theirs, rows_of(theirs))
    )
    scaled = pool_of(KVDtype.FP8_E4M3, KVDtype.FP8_E4M3)
    converter = CodecConverter([scaled], groups, PAGE, frozenset({fp8}), fingerprint)
    assert "KL divergence: not measured" in converter.check(
        mine_of(scaled), welcome_of(theirs, rows_of(theirs))
    )


def test_what_no_conversion_changes_is_refused_by_its_name() -> None:
    mine, theirs = (pool_of(KVDtype.BFLOAT16, KVDtype.BFLOAT16) for _ in range(2))
    converter = converter_to(mine, KVDtype.BFLOAT16)
    rows = rows_of(theirs)
    for field in ("weights", "rotary", "draft"):
        other = PageIdentity(**{**THEIRS.fields, field: "other"})
        with pytest.raises(IncompatiblePages, match=f"{field} is other"):
            converter.check(mine_of(mine), welcome_of(theirs, rows, other))
    long = pool_of(KVDtype.BFLOAT16, KVDtype.BFLOAT16, page_size=16)
    with pytest.raises(IncompatiblePages, match="hold 16 tokens"):
        converter.check(mine_of(mine), welcome_of(long, rows_of(long)))
    deep = pool_of(KVDtype.BFLOAT16, KVDtype.BFLOAT16, layers=3)
    with pytest.raises(IncompatiblePages, match="other heads"):
        converter.check(mine_of(mine), welcome_of(deep, rows_of(deep)))
    fp8 = pool_of(KVDtype.FP8_E4M3, KVDtype.BFLOAT16)
    with pytest.raises(IncompatiblePages, match="fp8_e4m3 is not among the converted"):
        converter.check(mine_of(mine), welcome_of(fp8, rows_of(fp8)))
