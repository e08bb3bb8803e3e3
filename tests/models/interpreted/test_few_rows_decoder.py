"""The forward with products for few tokens gives the fused forward's logits for any step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.reference.backend import backend
from kvant.kv.dtype import ComputeDtype
from kvant.models.fused import few_rows_decoder
from kvant.models.fused.decoder import fuse
from kvant.models.fused.feed_forward import Dense
from kvant.models.fused.few_rows_decoder import FewRowsDecoder
from kvant.models.fused.layers import Layer
from kvant.models.fused.linear import DenseLinear, Linear, NarrowProduct
from kvant.models.geometry import read_geometry
from kvant.models.modules.info import INFO as MODULES
from kvant.models.recurrent import delta_layer, mixers
from kvant.weights.codecs import NarrowWeight, decode, encode
from kvant.weights.cuda.few_rows import Beside as Operands
from kvant.weights.cuda.few_rows import Kind
from kvant.weights.cuda.wide_rows import Around, Beside, Blocks, Found
from kvant.weights.format import FP8_CHANNEL, INT8_CHANNEL, WeightFormat
from tests.attention import driver
from tests.models import families, loading, tiny
from tests.weights.blocks import in_blocks, in_rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests of the engine compare on a GPU")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_logits_and_hidden_states_are_those_of_the_fused_forward(
    tokens: int, family: str, tmp_path: Path
) -> None:
    path = tiny.build(family, tmp_path, num_hidden_layers=4, vocab_size=tiny.VOCAB)
    geometry = tiny.geometry(family)
    model = loading.load(path, driver.plan(geometry.layers), geometry, only=MODULES)
    fused = fuse(model._module, model.plan)
    few = FewRowsDecoder(fused)
    text = [3 + i % 90 for i in range(tokens)]
    found = []
    with torch.no_grad():
        for forward in (fused, few):
            made = driver.Driver(driver.pool(model.plan, 8), backend())
            ids, call, last = made.call([(driver.Text(text), tokens)])
            found.append(forward.run(ids, call, last, [1, 3]))
    (expected, taps), (logits, others) = found
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(others, taps, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def _multiplied(
    x: torch.Tensor | Blocks,
    weight: NarrowWeight,
    bias: torch.Tensor | None,
    around: Around,
    beside: Beside,
) -> Found:
    """The definition of `choose.multiply_wide`, with sums of squares in three stripes."""
    assert bias is None
    assert around.takes_blocks is isinstance(x, Blocks)
    rows = in_rows(x) if isinstance(x, Blocks) else x
    dtype = rows.dtype
    out = rows.double() @ decode(weight, torch.float64).T
    if around.norm:
        assert beside.squares is not None
        total = beside.squares.double().sum(0)[: len(x)] / rows.shape[1]
        out *= torch.rsqrt(total + beside.eps)[:, None]
    if around.act is not None:
        gate, up = out.chunk(2, -1)
        out = torch.nn.functional.silu(gate) * up
    if not around.added:
        return Found(in_blocks(out.to(dtype)) if around.makes_blocks else out.to(dtype))
    assert beside.residual is not None
    assert beside.norm_weight is not None
    out += beside.residual
    squares = torch.full((3, 64), torch.nan)
    squares[:, : len(x)] = out.square().sum(1).float() / 3
    weighted = (out * beside.norm_weight).to(dtype)
    return Found(out.to(dtype), in_blocks(weighted) if around.makes_blocks else weighted, squares)


def _one_row(
    x: torch.Tensor, weight: NarrowWeight, bias: None, cut: object, kind: Kind, beside: Operands,
    **out: None,
) -> torch.Tensor:  # fmt: skip
    """The definition of `few_rows.multiply` for a single row."""
    row = x.double()
    if kind.norm:
        assert beside.norm_weight is not None
        row = row * torch.rsqrt(row.square().mean() + beside.eps) * beside.norm_weight
    found = row @ decode(weight, torch.float64).T
    if kind.gated:
        gate, up = found.chunk(2, -1)
        found = torch.nn.functional.silu(gate) * up
    if kind.added:
        assert beside.residual is not None
        found = found + beside.residual
    return found.to(x.dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests of the engine compare on a GPU")
@pytest.mark.parametrize("tokens", [1, 7, 20])
@pytest.mark.parametrize("narrow_head", [False, True])
@pytest.mark.parametrize(
    ("fmt", "dtype", "bound"),
    [(INT8_CHANNEL, ComputeDtype.FLOAT32, 1e-4), (FP8_CHANNEL, ComputeDtype.BFLOAT16, 2e-2)],
    ids=["rows", "blocks"],
)
def test_norms_are_folded_between_narrow_weights(
    narrow_head: bool,
    tokens: int,
    fmt: WeightFormat,
    dtype: ComputeDtype,
    bound: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    path = tiny.build("qwen3", tmp_path, num_hidden_layers=2, vocab_size=tiny.VOCAB, **sizes)
    geometry = tiny.geometry("qwen3", **sizes)
    plan = driver.plan(geometry.layers, compute=dtype)
    model = loading.load(path, plan, geometry, only=MODULES)
    fused = fuse(model._module, model.plan)

    def narrow(linear: Linear) -> Linear:
        assert isinstance(linear, DenseLinear)
        return NarrowProduct(encode(linear.weight.detach(), fmt), linear.bias)

    layers: list[Layer] = []
    for layer in fused.model.layers:
        assert isinstance(layer, Layer)
        forward = layer.feed_forward
        assert isinstance(forward, Dense)
        forward = replace(forward, up=narrow(forward.up), down=narrow(forward.down))
        qkv, output = narrow(layer.qkv), narrow(layer.output)
        layers.append(replace(layer, qkv=qkv, output=output, feed_forward=forward))
    head = narrow(fused.model.head) if narrow_head else fused.model.head
    fused.model = replace(fused.model, layers=tuple(layers), head=head)
    heads: list[int] = []
    in_blocks: list[bool] = []

    def several(x: torch.Tensor | Blocks, *given: Any) -> Found:
        in_blocks.append(isinstance(x, Blocks))
        return _multiplied(x, *given)

    def one_row(x: torch.Tensor, weight: NarrowWeight, *given: Any, **options: Any) -> torch.Tensor:
        heads.append(weight.rows)
        return _one_row(x, weight, *given, **options)

    monkeypatch.setattr(few_rows_decoder.cuda, "multiply", one_row)
    monkeypatch.setattr(few_rows_decoder, "few_serves", lambda *_: True)
    monkeypatch.setattr(few_rows_decoder, "begin", lambda *_, **__: None)
    monkeypatch.setattr(few_rows_decoder, "multiply_wide", several)
    few = FewRowsDecoder(fused)
    assert few._folds_narrow
    assert not few._folds
    found = []
    with torch.no_grad():
        for forward in (fused, few):
            made = driver.Driver(driver.pool(model.plan, 8), backend())
            text = driver.Text([3 + i for i in range(tokens)])
            ids, call, last = made.call([(text, tokens)])
            found.append(forward.run(ids, call, last, [0]))
    assert len(heads) == (4 * len(layers) + narrow_head if tokens == 1 else 0)
    # Attention's results, which the second of four products reads, are always rows.
    assert sum(in_blocks) == (3 * len(layers) if fmt == FP8_CHANNEL and tokens > 16 else 0)
    (right, right_taps), (logits, taps) = found
    for mine, expected in ((logits, right), (taps[0], right_taps[0])):
        error = (mine.double() - expected.double()).norm() / expected.double().norm()
        assert error < bound


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests of the engine compare on a GPU")
def test_a_hybrid_decodes_as_its_fused_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = families.build("qwen3_5_text", tmp_path)
    geometry = read_geometry(config)
    model = loading.load(tmp_path, driver.plan(geometry.layers), geometry, only=MODULES)
    fused = fuse(model._module, model.plan)
    few = FewRowsDecoder(fused)
    assert few._folds
    launched: list[int] = []
    run = delta_layer.delta_layer

    def watched(*given: Any, **options: Any) -> torch.Tensor:
        launched.append(len(given[0]))
        return run(*given, **options)

    found: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for place, forward in enumerate((fused, few)):
            if place:
                monkeypatch.setattr(delta_layer, "delta_layer", watched)
                monkeypatch.setattr(mixers, "takes_kernels", lambda x, cache: True)
            made = driver.Driver(driver.pool(model.plan, 20), backend())
            texts = [driver.Text([3 + (n * i) % 90 for i in range(n + 6)]) for n in (9, 2, 30)]
            lengths = [
                [(text, len(text.tokens) - 5) for text in texts],
                *[[(t, 1) for t in texts]] * 3,
            ]
            for work in (*lengths, [(texts[1], 1)]):
                ids, call, last = made.call(work)
                runs = forward if max(n for _, n in work) == 1 else fused
                found[place].append(runs.run(ids, call, last, [1, 2])[0])
    linear = sum(bool(layer.states) for layer in geometry.layers)
    assert launched == [3] * 3 * linear + [1] * linear
    for logits, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
