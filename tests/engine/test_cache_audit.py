"""An idle engine notices scales that changed without a write, and no request reads them again."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvant.engine import cache_audit
from kvant.engine.driver import Driver
from kvant.engine.engine import Engine
from kvant.execution.runner import ModelRunner
from kvant.kv.format import ScalePlace
from kvant.kv.pool import KVPool
from kvant.kv.scale_audit import ScaleAudit
from kvant.sampling.sampling_params import SamplingParams
from tests.engine.equality import Bench, run
from tests.engine.test_equality import LONG, make
from tests.models import tiny

IN_PAGES = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4",
            "turboquant_4bit_nc")  # fmt: skip
PROMPT = LONG[:22]  # five full pages
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=6)


@pytest.fixture(scope="module", params=IN_PAGES)
def bench(path: Path, request: pytest.FixtureRequest) -> Bench:
    return make(path, request.param, "float64")


def pool_of(engine: Engine) -> KVPool:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner.pool


def scale_planes(pool: KVPool) -> list[Tensor]:
    found = []
    for spec in pool.plan.layers:
        cache = pool[spec.geometry.index]
        for choice, planes in ((spec.k, cache.k), (spec.v, cache.v)):
            if choice is not None and choice.dtype.format.scale_place is ScalePlace.PLANE:
                found.append(planes[1])
    return found


def flip(row: Tensor, bit: int) -> None:
    """One bit of one page's scales."""
    row.view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8


def num_cached(engine: Engine) -> int:
    return run(engine, [PROMPT], NUM_TOKENS)[0].num_cached_tokens


def test_a_flipped_bit_in_a_cached_scale_is_noticed_and_its_page_is_not_found_again(
    bench: Bench,
) -> None:
    (expected,) = bench.alone([PROMPT], NUM_TOKENS)
    chance = random.Random(39)
    engine = bench.engine(caching=True)
    planes = scale_planes(pool_of(engine))
    for _ in range(8):
        run(engine, [PROMPT], NUM_TOKENS)
        assert engine.audit_scales() == engine.audit_scales() == []
        assert num_cached(engine) == 20, "an audit that finds nothing takes nothing away"
        plane = chance.choice(planes)
        page = chance.choice(list(engine.scheduler.allocator.groups[0]._hash_of))
        flip(plane[page], chance.randrange(8 * plane[page].numel() * plane.element_size()))
        (found,) = engine.audit_scales()
        assert f"page {page} " in found
        assert engine.audit_scales() == []
        again = run(engine, [PROMPT], NUM_TOKENS)[0]
        assert again.num_cached_tokens == 0
        assert again.token_ids == expected
        assert num_cached(engine) == 20, "and the cache goes on"


def test_every_single_bit_of_a_pages_scales_counts(bench: Bench) -> None:
    engine = bench.engine(caching=True, num_pages=8)
    run(engine, [PROMPT[:9]], 1)
    pool = pool_of(engine)
    audit = ScaleAudit([pool])
    (before,) = audit.sums([2])
    for plane in scale_planes(pool)[:: len(pool.plan.layers)]:
        for bit in range(8 * plane[2].numel() * plane.element_size()):
            flip(plane[2], bit)
            assert audit.sums([2]) != [before]
            flip(plane[2], bit)
    assert audit.sums([2]) == [before]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_noticed_at_the_first_look(path: Path, wrong: float) -> None:
    engine = make(path, "int4_per_token_head", "float64").engine(caching=True)
    run(engine, [PROMPT], NUM_TOKENS)
    page = next(iter(engine.scheduler.allocator.groups[0]._hash_of))
    scale_planes(pool_of(engine))[3][page, 1, 0] = wrong
    assert engine.audit_scales() == [f"page {page} has a scale that is no number"]
    assert num_cached(engine) == 0


def test_nan_among_the_block_scales_of_nvfp4_is_no_number_either(path: Path) -> None:
    engine = make(path, "nvfp4", "float64").engine(caching=True)
    run(engine, [PROMPT], NUM_TOKENS)
    page = next(iter(engine.scheduler.allocator.groups[0]._hash_of))
    scale_planes(pool_of(engine))[0][page, 0, 0, 0] = 0xFF
    assert engine.audit_scales() == [f"page {page} has a scale that is no number"]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "nvfp4"])
def test_a_scale_outside_the_pages_is_put_back_and_what_was_cached_is_forgotten(
    path: Path, kv_cache_dtype: str
) -> None:
    bench = make(path, kv_cache_dtype, "float64")
    (expected,) = bench.alone([PROMPT], NUM_TOKENS)
    engine = bench.engine(caching=True)
    cache = pool_of(engine)[1]
    assert cache.k_scale is not None
    run(engine, [PROMPT], NUM_TOKENS)
    for wrong in (float("nan"), 2.0 * float(cache.k_scale)):
        cache.k_scale.fill_(wrong)
        (found,) = engine.audit_scales()
        assert "the K scale of layer 1" in found
        again = run(engine, [PROMPT], NUM_TOKENS)[0]
        assert (again.num_cached_tokens, again.token_ids) == (0, expected)


def test_pages_that_get_new_owners_are_no_finding(bench: Bench) -> None:
    """The control: everything in the pool is written again and again, in order."""
    engine = bench.engine(caching=True, num_pages=33)
    for start in range(0, 90, 9):
        run(engine, [LONG[start : start + 60]], NUM_TOKENS)
        assert engine.audit_scales() == []


def test_a_page_that_is_written_again_with_the_same_tokens_is_no_finding(path: Path) -> None:
    """Beside other requests the same tokens may come out with other roundings."""
    engine = make(path, "int8_per_token_head", "float64").engine(caching=True)
    allocator, audit = engine.scheduler.allocator.groups[0], engine.audit_scales
    plane = scale_planes(pool_of(engine))[0]
    for scale in (1.0, 1.5):
        taken = allocator.allocate(allocator.num_available)  # evicts all cached pages
        assert taken is not None
        plane[1] = scale
        assert allocator.remember(1, b"the same tokens")
        allocator.release(taken)
        assert audit() == []
    plane[1] = 1.0
    assert len(audit()) == 1, "the control: this time there was no write"


def test_one_look_costs_a_slice_and_all_pages_have_their_turn(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(path, "int8_per_token_head", "float64")
    size = ScaleAudit([pool_of(bench.engine())]).page_bytes
    assert size == 6 * 2 * bench.plan.page_size * 2 * 4  # layers, sides, tokens, heads, float32
    monkeypatch.setattr(cache_audit, "SLICE_BYTES", 3 * size)
    engine = bench.engine(caching=True)
    run(engine, [LONG[:90]], NUM_TOKENS)
    known = engine.scheduler.allocator.groups[0]._hash_of
    looks = -(-len(known) // 3)
    assert looks > 5
    for _ in range(2 * looks):
        assert engine.audit_scales() == []
    flip(scale_planes(pool_of(engine))[0][max(known)], 5)
    found = [engine.audit_scales() for _ in range(looks + 1)]
    assert sum(map(len, found)) == 1


def test_formats_without_scales_have_nothing_to_look_at(path: Path) -> None:
    engine = make(path, "bfloat16", "float64").engine(caching=True)
    run(engine, [PROMPT], NUM_TOKENS)
    assert engine.audit_scales() == []
    assert num_cached(engine) == 20


def test_an_idle_server_counts_and_logs_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvant.engine.driver.IDLE_SECONDS", 0.0)
    engine = make(path, "int8_per_token_head", "float64").engine(caching=True)
    driver = Driver[int](engine)
    driver.submit(1, PROMPT, SamplingParams(temperature=0.0, max_tokens=2))

    def idle() -> int:
        while engine.has_work:
            driver.step()
        for _ in range(3):
            driver.step()
        return driver.num_scale_faults

    assert idle() == 0
    assert driver.num_scale_audits > 0
    flip(scale_planes(pool_of(engine))[0][1], 30)
    with caplog.at_level(logging.ERROR):
        assert idle() == 1
    assert "page 1 has other scales" in caplog.text
    assert engine.stats.num_idle_pages == 0
