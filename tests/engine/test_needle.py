"""Batch-invariant mode, bit by bit: a request among any others, at any place, in every format."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvant import LLM
from kvant.engine.engine import Engine
from kvant.engine.result import Result
from kvant.kv.names import FormatRequest, parse_format, whole_formats
from kvant.models.cpu import info
from kvant.sampling.sampling_params import SamplingParams
from tests.engine.equality import Bench
from tests.models import tiny

NEEDLE = [(7 * j * j + 3 * j) % 125 + 3 for j in range(21)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
INT8 = parse_format("int8_per_token_head", asked_by="test")


def load(path: Path, *, mode: bool) -> LLM:
    return LLM(
        path, dtype="float32", batch_invariant=mode, attention_backend="cpu", page_size=4,
        kv_cache_memory="1MiB", max_model_len=128,
    )  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32, which all formats take, and matrices wide enough that their products round."""
    return tiny.build(
        "qwen3", tmp_path_factory.mktemp("model"), hidden_size=512, intermediate_size=1024,
        initializer_range=0.05, num_hidden_layers=2, layer_types=["full_attention"] * 2,
        max_window_layers=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def in_mode(path: Path) -> LLM:
    return load(path, mode=True)


def answer(engine: Engine, prompts: list[list[int]], place: int) -> Result:
    """What the request at this place gets; all come at once."""
    numbers = [engine.submit(prompt, PARAMS) for prompt in prompts]
    found: list[Result] = []
    while engine.has_work:
        for piece in engine.step():
            if piece.number == numbers[place] and piece.result is not None:
                found.append(piece.result)
    (result,) = found
    return result


def num_different(llm: LLM, wanted: FormatRequest, trials: int) -> int:
    """The number of batches, among `trials` of 2 to 64 requests, that change a token or a log-probability."""
    bench = Bench(llm, wanted)
    alone = answer(bench.engine(), [NEEDLE], 0)
    assert alone.logprobs is not None
    assert len(alone.logprobs) == 4
    chance = random.Random(22)
    different = 0
    for trial in range(trials):
        count = chance.randrange(1, 64)
        prompts = [
            [chance.randrange(3, 128) for _ in range(chance.randrange(1, 40))] for _ in range(count)
        ]
        place = chance.randrange(count + 1)
        prompts.insert(place, NEEDLE)
        engine = bench.engine(num_pages=800, seqs=64, chunk=chance.choice((32, 256, 4096)))
        found = answer(engine, prompts, place)
        different += (found.token_ids, found.logprobs) != (alone.token_ids, alone.logprobs)
        if trial == 0:
            engine.audit()
    return different


def test_a_needle_gets_the_same_bits_at_any_place_of_any_batch(in_mode: LLM) -> None:
    assert num_different(in_mode, INT8, 10) == 0


def test_with_torchs_products_it_does_not(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same trials, with sums in the order that is fastest for the number of rows."""
    monkeypatch.setattr(
        info, "refuse_host", lambda device: "the control has to run without kernels"
    )
    assert num_different(load(path, mode=False), INT8, 10) > 0


@pytest.mark.slow
@pytest.mark.parametrize("wanted", whole_formats(), ids=str)
def test_200_batches_leave_a_needle_its_bits_in_every_format(
    in_mode: LLM, wanted: FormatRequest
) -> None:
    assert num_different(in_mode, wanted, 200) == 0
