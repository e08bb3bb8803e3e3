"""The CUDA kernel for decode steps of short contexts: when it serves, and what it computes on a GPU."""

from __future__ import annotations

import importlib.resources
import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.base import HeadNorm, HeadRotation
from kvant.attention.cuda import one_query
from kvant.attention.cuda.one_query import Shape
from kvant.attention.triton.backend import TritonBackend
from kvant.kernels.cuda import build
from kvant.kv.dtype import KVDtype
from tests.attention.triton import case

STORED = {torch.bfloat16: KVDtype.BFLOAT16, torch.float16: KVDtype.FLOAT16}
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 129, 300, 511, 640, 1024)


Pair = tuple[KVDtype, KVDtype]
PAIRS: list[Pair] = [
    *((dtype, dtype) for dtype in sorted(one_query.EIGHT, key=str)),
    (KVDtype.FP8_E4M3, KVDtype.INT8_PER_TOKEN_HEAD),
    (KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.FP8_E5M2),
]


def prepare(
    dtype: torch.dtype = torch.bfloat16, stored: Pair | None = None, **more: Any
) -> case.Case:
    asked: dict[str, Any] = {
        "heads": (8, 2),
        "head_dims": (128, 128),
        "sequences": tuple((length, 1) for length in LENGTHS),
        **more,
    }
    return case.prepare(*(stored or (STORED[dtype], STORED[dtype])), dtype=dtype, **asked)


@pytest.mark.parametrize("dtype", list(STORED), ids=str)
def test_numbers_in_16_and_8_bits_are_served_and_nothing_that_it_would_compute_wrongly(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def serves(**more: Any) -> bool:
        x = prepare(dtype, **more)
        return one_query.takes(x.cache, x.step) and one_query.serves(x.cache, dtype, x.params)

    assert not serves()  # there is no Hopper GPU here
    monkeypatch.setattr(build, "available", lambda otherwise: True)
    assert serves()
    assert serves(window=40, sinks=True)
    assert not serves(softcap=3.0)
    assert not serves(heads=(32, 2))
    assert not serves(head_dims=(128, 64))
    assert not serves(head_dims=(96, 96))
    assert not serves(sequences=((40, 2),))
    assert not serves(sequences=((one_query.LONGEST + 1, 1),))
    assert not serves(causal=False)
    few = tuple((length, 1) for length in LENGTHS if length <= one_query.LONGEST_EIGHT)
    for pair in PAIRS:
        assert serves(stored=pair, sequences=few)
        assert not serves(stored=pair)
    sides: dict[str, Any] = {"sequences": ((20, 1),) * 129, "stored": PAIRS[0]}  # of 2 KV heads
    assert not serves(**sides)
    assert serves(**sides, head_dims=(256, 256))
    assert serves(sequences=sides["sequences"])
    assert not serves(stored=(KVDtype.NVFP4, KVDtype.NVFP4))
    assert not serves(stored=(STORED[dtype], KVDtype.FP8_E4M3))
    assert not serves(stored=(KVDtype.FP8_E4M3, STORED[dtype]))
    other = next(name for name in STORED.values() if name is not STORED[dtype])
    assert not serves(stored=(other, other))


def test_only_a_backend_whose_bits_may_depend_on_the_batch_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "available", lambda otherwise: True)
    cache = prepare().cache
    short = TritonBackend().short_steps(cache, torch.bfloat16)
    assert short is not None
    assert short.tokens == one_query.LONGEST
    assert short.seqs == one_query.MOST_PAIRS // 2
    assert TritonBackend(batch_invariant=True).short_steps(cache, torch.bfloat16) is None


@pytest.mark.parametrize("head", one_query.HEADS)
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_programs_fit_a_multiprocessor_and_divide_a_row(head: int, heads: int) -> None:
    static_and_system = 12 * 1024
    for seqs in range(1, one_query.MOST_PAIRS // heads + 1):
        for k in (KVDtype.BFLOAT16, *one_query.EIGHT):
            shape = one_query.shape_for(seqs, heads, head, k)
            assert one_query.shared_bytes(shape, head, k) + static_and_system <= 227 * 1024
            assert head % (4 * shape.cluster) == 0


TURN = one_query.Turn(1, 128, False, True, 1, 2)


@pytest.mark.parametrize(
    ("k", "v", "turn"),
    [(KVDtype.BFLOAT16, KVDtype.BFLOAT16, turn) for turn in (None, TURN)]
    + [(*pair, None) for pair in PAIRS],
    ids=str,
)
def test_every_source_is_in_the_package(
    k: KVDtype, v: KVDtype, turn: one_query.Turn | None
) -> None:
    package = importlib.resources.files("kvant.attention.cuda")
    names = one_query.sources(k, v, turn)
    text = "".join(package.joinpath(name).read_text() for name in names)
    assert text.count('extern "C" __global__') == 1
    for dtype in {k, v} & one_query.EIGHT:
        assert text.count(f"struct {dtype.format.name} :") == 1
    assert ("Angles angles_of(" in text) == (turn is not None)
    assert "#include" not in text


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100},
    "a window within a chunk": {"window": 5},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 128, "sinks": True, "heads": (64, 8), "head_dims": (64, 64)},
    "pages of 8": {"page_size": 8},
    "pages of 32": {"page_size": 32},
    "pages of 64": {"page_size": 64},
    "head size 64": {"head_dims": (64, 64)},
    "head size 256": {"head_dims": (256, 256), "heads": (4, 2)},
    "one head each": {"heads": (4, 4)},
    "groups of 3": {"heads": (9, 3)},
    "groups of 8": {"heads": (16, 2)},
    "one KV head": {"heads": (6, 1)},
    "padding": {"padding": 3},
    "one sequence": {"sequences": ((777, 1),)},
    "many sequences": {"sequences": tuple((37 * i % 400 + 1, 1) for i in range(150))},
}


def check(x: case.Case, shape: Shape | None = None) -> None:
    """The kernel alone against float64 over the stored bytes."""
    TritonBackend().write(x.cache, x.k, x.v, x.step)
    found = one_query.attend(x.cache, x.q, x.step, x.params, shape)
    bound = 5e-3 if x.q.dtype is torch.bfloat16 else 1e-3
    assert case.error(found, x.expected()) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(STORED), ids=str)
@pytest.mark.parametrize("variant", list(VARIANTS.values()), ids=list(VARIANTS))
def test_every_kind_of_attention_matches_the_reference(
    variant: dict[str, Any], dtype: torch.dtype
) -> None:
    x = prepare(dtype, **variant, device="cuda")
    assert one_query.serves(x.cache, dtype, x.params)
    check(x)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "v"), PAIRS, ids=str)
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"window": 100, "sinks": True},
        {"page_size": 32, "per_head_scales": True},
        {"head_dims": (64, 64), "heads": (16, 2)},
        {"head_dims": (256, 256), "heads": (6, 2)},
        {"sequences": ((5000, 1), (3, 1))},
    ],
    ids=str,
)
def test_codes_of_8_bits_match_the_reference(
    variant: dict[str, Any], k: KVDtype, v: KVDtype
) -> None:
    for dtype in STORED:
        check(prepare(dtype, (k, v), **variant, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAIRS, ids=str)
def test_scores_and_values_may_grow_along_the_keys(name: Pair) -> None:
    """Maxima and value scales of the first keys are far too small for the last ones."""
    x = prepare(stored=name, sequences=((600, 600),), device="cuda")
    growth = torch.logspace(-4, 2, 600, base=2, device="cuda")[:, None, None].bfloat16()
    assert x.v is not None
    TritonBackend().write(x.cache, x.k * growth, x.v * growth, x.step)
    last = case.one_token(x)
    found = one_query.attend(last.cache, last.q, last.step, last.params)
    assert case.error(found, last.expected()) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("head", one_query.HEADS)
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("warps", [2, 4, 8])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_every_shape_matches_the_reference(
    cluster: int, warps: int, stages: int, head: int
) -> None:
    shape = Shape(cluster, warps, stages)
    if one_query.shared_bytes(shape, head) > 200 * 1024:
        pytest.skip("a program does not fit")
    check(prepare(head_dims=(head, head), device="cuda"), shape)


@pytest.mark.gpu
def test_longer_contexts_than_it_is_used_for_are_right_too() -> None:
    check(prepare(sequences=((5000, 1), (3, 1), (2049, 1)), device="cuda"))


@pytest.mark.gpu
def test_numbers_that_are_not_finite_reach_their_sequence_alone() -> None:
    x = prepare(sequences=((40, 1), (40, 1), (1, 1)), device="cuda")
    x.k[1] = math.nan
    TritonBackend().write(x.cache, x.k, x.v, x.step)
    found = one_query.attend(x.cache, x.q, x.step, x.params)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.gpu
def test_recorded_layers_read_the_newest_rows() -> None:
    """Each layer is written and read behind the other, by launches that start early."""
    layers = [prepare(device="cuda", seed=seed) for seed in range(6)]
    backend = TritonBackend()

    def run() -> list[torch.Tensor]:
        outs = []
        for x in layers:
            backend.write(x.cache, x.k, x.v, x.step)
            outs.append(one_query.attend(x.cache, x.q, x.step, x.params))
        return outs

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for _ in range(20):
        for x in layers:
            assert x.v is not None
            x.q.normal_()
            x.k.normal_()
            x.v.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for x, out in zip(layers, outs, strict=True):
            assert case.error(out, x.expected()) < 5e-3


TURNS: dict[str, dict[str, Any]] = {
    "as in Qwen3": {"norm": HeadNorm.ROUNDED},
    "as in Llama": {"norm": None, "by_position": True},
    "as in Gemma 3": {"norm": HeadNorm.ONE, "head": 256, "heads": (4, 2), "window": 100},
    "as in Qwen3.5": {"norm": HeadNorm.ONE, "head": 256, "rotary": 64, "gated": True},
    "as in gpt-oss": {"norm": None, "head": 64, "heads": (16, 2), "sinks": True, "wide": True},
    "neighbours": {"norm": HeadNorm.WIDE, "neighbours": True},
    "neighbours and a part of a head": {
        "norm": None,
        "neighbours": True,
        "rotary": 32,
        "wide": True,
    },
    "no rotation": {"norm": HeadNorm.WIDE, "rotary": 0},
    "angles of the step": {"norm": HeadNorm.ROUNDED, "by_position": False},
}


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("turn", list(TURNS.values()), ids=list(TURNS))
def test_heads_are_turned_and_stored_as_by_the_other_launches(
    turn: dict[str, Any], cluster: int
) -> None:
    dtype = torch.bfloat16
    asked: dict[str, Any] = {
        "norm": None,
        "head": 128,
        "by_position": True,
        "gated": False,
        "wide": False,
    } | turn
    head, norm, gated = asked["head"], asked["norm"], asked["gated"]
    given: dict[str, Any] = {
        "head_dims": (head, head), "heads": asked.get("heads", (8, 2)), "device": "cuda",
        "window": asked.get("window"), "sinks": asked.get("sinks", False),
    }  # fmt: skip
    torch.manual_seed(0)
    x, again = (prepare(dtype, **given) for _ in range(2))
    assert x.v is not None
    half = asked.get("rotary", head) // 2
    angles = torch.arange(1100, device="cuda")[:, None] * torch.rand(half, device="cuda")
    if not asked["by_position"]:
        angles = angles[x.step.positions]
    kind = torch.float32 if asked["wide"] else dtype
    weights = [(torch.rand(head, device="cuda") + 0.5).to(dtype) for _ in range(2)]
    q_weight, k_weight = (None, None) if norm is None else weights
    rotation = HeadRotation(
        angles.cos().to(kind), angles.sin().to(kind), asked["by_position"], q_weight, k_weight, 1e-6,
        norm=norm or HeadNorm.ROUNDED, neighbours=asked.get("neighbours", False), gated=gated,
    )  # fmt: skip
    q = torch.stack([x.q, torch.full_like(x.q, torch.nan)], 2) if gated else x.q
    qkv = torch.cat([part.flatten(1) for part in (q, x.k, x.v)], dim=1)
    turned = TritonBackend().write_rotated(x.cache, qkv, rotation, x.step)
    assert one_query.rotates(qkv, rotation, again.cache, again.step)
    shape = Shape(cluster, 4, 2)
    found = one_query.attend_rotated(again.cache, qkv, rotation, again.step, again.params, shape)
    for a, b in zip((*x.cache.k, *x.cache.v), (*again.cache.k, *again.cache.v), strict=True):
        differs = a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)
        # Sums in another order may move a number to its neighbour.
        assert differs.sum() <= 0.02 * qkv.numel()
        # NaN, in what nothing has written, counts as equal.
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2, equal_nan=True)
    expected = case.EXACT.attend(again.cache, turned.double(), again.step, again.params)
    assert case.error(found, expected) < 5e-3
