"""`python -m benchmarks.expert_decode`: its candidates give the engine's bits, here on this CPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from benchmarks import expert_decode
from benchmarks.expert_decode import CANDIDATES, bounded, shared_bytes, source

from kvant.weights.codecs import NarrowWeight
from kvant.weights.cuda import few_rows
from kvant.weights.cuda.few_rows import Act, Beside, Kind, Pairs, Warps
from kvant.weights.format import MXFP4
from tests.weights.host.run import run_text

NAMES = [name for name in CANDIDATES if name != "engine"]
UP = Kind(gated=True, alternating=True, act=Act.CLAMPED, pairs=Pairs.LISTED)
DOWN = Kind(pairs=Pairs.LISTED, share=True)


def found(name: str, directory: Path, kind: Kind, scales: tuple[int, int]) -> torch.Tensor:
    """The product of 12 tokens that all have chosen experts 0 and 2 of 3; scales: exponents from and to."""
    torch.manual_seed(0)
    tokens, columns, count, rows = 12, 352, 3, 128
    ids = torch.tensor([[0, 2]] * tokens, dtype=torch.int32)
    lists = torch.zeros(count, tokens, dtype=torch.int32)
    lists[0], lists[2] = torch.arange(tokens) * 2, torch.arange(tokens) * 2 + 1
    beside = Beside(
        ids=ids, shares=torch.rand(tokens, 2), lists=lists,
        counts=torch.tensor([tokens, 0, tokens], dtype=torch.int32),
        limit=7.0, alpha=1.702, top_k=2,
    )  # fmt: skip
    codes = torch.randint(0, 256, (count * rows, columns // 2), dtype=torch.uint8)
    powers = torch.randint(*scales, (columns // 32, count * rows), dtype=torch.uint8)
    weight = NarrowWeight(MXFP4, count * rows, columns, codes, powers)
    x = torch.randn(tokens if kind.gated else 2 * tokens, columns).to(torch.bfloat16)
    cut = Warps(2, 2, 2)
    call = few_rows.arranged(x, weight, None, cut, kind, beside, experts=count)
    macros = few_rows.defines(MXFP4, columns, call.tiles, x.dtype, cut, kind)
    size = shared_bytes(name, macros)
    tensors = (*weight.tensors, x)
    run_text(directory, source(name), macros, call.values, call.programs, size, tensors)
    return call.out


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("scales", [(119, 122), (110, 140)], ids=["usual", "large"])
@pytest.mark.parametrize("kind", [UP, DOWN], ids=["gate and up", "down"])
def test_candidates_give_the_bits_of_the_engines_kernel(
    kind: Kind, scales: tuple[int, int], tmp_path: Path
) -> None:
    expected = found("engine", tmp_path, kind, scales)
    assert expected.isfinite().all()
    for name in NAMES:
        assert torch.equal(found(name, tmp_path, kind, scales), expected), name


def test_every_candidate_changes_the_kernel_and_takes_a_bound() -> None:
    texts = {name: source(name) for name in CANDIDATES}
    assert len(set(texts.values())) == len(CANDIDATES)
    for text in texts.values():
        assert "__launch_bounds__(THREADS, 10)\nfew_rows" in bounded(text, 10)
    with pytest.raises(AssertionError, match="has changed"):
        expert_decode.ahead("")
