"""The torch definition writes the same bytes and reads the same numbers on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from tests.kv.codecs.comparison import same_bytes, same_values
from tests.strategies import HEAD_DIMS, finite_row

every_format = pytest.mark.parametrize("dtype", KVDtype, ids=str)


def hard_rows(head_dim: int) -> Tensor:
    """Rows [n, 2, head_dim] of every kind and magnitude, one with NaN and one with infinities."""
    kinds = ("normal", "bits", "constant", "outlier", "subnormal", "huge", "sparse")
    rows = [
        torch.from_numpy(finite_row(kind, head_dim, seed, exponent))
        for kind in kinds
        for seed, exponent in enumerate(range(-149, 128, 9))
    ]
    x = torch.stack(rows)
    broken = torch.randn(2 + len(rows) % 2, head_dim, generator=torch.Generator().manual_seed(0))
    broken[0, 3] = math.nan
    broken[1, 3:5] = torch.tensor([math.inf, -math.inf])
    return torch.cat((x, broken)).view(-1, 2, head_dim)


@pytest.mark.gpu
@pytest.mark.case("A46")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@every_format
def test_bytes_and_values_equal_the_cpu_s(dtype: KVDtype, head_dim: int) -> None:
    codec, x = codec_for(dtype), hard_rows(head_dim)
    for scale in (torch.tensor([0.37]), torch.tensor([1e-3, 700.0])):
        outside = scale if dtype.format.takes_outside_scale else None
        planes = codec.encode(x, outside)
        on_gpu = None if outside is None else outside.cuda()
        gpu_planes = codec.encode(x.cuda(), on_gpu)
        if dtype.format.codec != "native":  # those keep whatever NaN payload the device makes
            assert same_bytes(planes, [p.cpu() for p in gpu_planes])
        for wanted in (torch.float32, torch.bfloat16, torch.float16):
            here = codec.decode(planes, outside, wanted)
            there = codec.decode(gpu_planes, on_gpu, wanted).cpu()
            assert same_values(here, there)


@pytest.mark.gpu
@every_format
def test_encode_and_decode_run_inside_a_cuda_graph(dtype: KVDtype) -> None:
    codec = codec_for(dtype)
    scale = torch.tensor([0.5]).cuda() if dtype.format.takes_outside_scale else None
    x = torch.randn(8, 2, 64).cuda()
    codec.decode(codec.encode(x, scale), scale, torch.float32)  # builds the tables
    graph, decoded = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        decoded.copy_(codec.decode(codec.encode(x, scale), scale, torch.float32))
    x.copy_(torch.randn(8, 2, 64))
    graph.replay()
    expected = codec.decode(codec.encode(x, scale), scale, torch.float32)
    assert same_values(decoded.cpu(), expected.cpu())
