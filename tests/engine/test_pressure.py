"""Strict JSON out of a full pool: every format crossed with what else touches cached pages.

Where engines gave broken JSON was a quantised cache with prefix hits in a pool that had no page left.
So here every cell fills its pool to the last page, answers are held to schemas, and each must be the
answer that the same request gets alone. Compute is float64, where rounding reaches no stored code. The
fifth thing to cross, recorded steps, are done again here instead of replayed; on a GPU they are CUDA graphs:
`test_pressure_on_gpu.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from kvant import LLM
from kvant.engine.engine import Engine
from kvant.engine.result import Result
from kvant.execution.runner import ModelRunner
from kvant.kv.names import FormatRequest, parse_format, whole_formats
from kvant.kv.pages import page_hash
from kvant.sampling.grammar import GrammarCompiler
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.structured_outputs import StructuredOutputs
from kvant.scheduling import row_table
from kvant.scheduling.request import FinishReason
from tests.engine import tiny_chat
from tests.engine.equality import Bench
from tests.engine.fakes import num_computed
from tests.speculative.recorded import record_here

FORMATS = whole_formats()
LAYOUTS = [
    parse_format(name, asked_by="test")
    for name in ("float32", "fp8_e4m3", "int8_per_token_head", "nvfp4", "turboquant_3bit_nc")
]
"""One format of each kind of page: native, a scale for all, scales in the row, for blocks, K unlike V."""
SMALL, LARGE = 4, 64
"""Tokens of a page: an answer needs many small ones, so that pools run dry, or at most one large one."""
MAX_TOKENS = 63
BLANKS = " \n\r\t"
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "num_speculative_tokens": 4, "adaptive": False}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(pattern="^[a-z]{2,8}$")
    age: int = Field(ge=0, le=99)


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    item: Literal["tea", "milk", "rice"]
    count: list[Annotated[int, Field(ge=0, le=99)]] = Field(min_length=1, max_length=2)
    paid: bool


SCHEMAS: tuple[type[BaseModel], ...] = (Person, Order)
EXAMPLES = ('{"name":"Bo","age":7}', '{"item":"tea","count":[2],"paid":false}')


@dataclass(frozen=True, slots=True)
class Cell:
    """What one run has beside its format."""

    prefix: bool
    chunked: bool
    preempted: bool
    drafting: bool

    def __str__(self) -> str:
        return "+".join(name for name in self.__slots__ if getattr(self, name)) or "none"


CELLS = [Cell(*on) for on in product((False, True), repeat=4)]
EVERYTHING = CELLS[-1]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, the schema of its answer by its place in SCHEMAS, and the seed of its sampling."""

    prompt: tuple[int, ...]
    schema: int
    seed: int


@dataclass(slots=True)
class Seen:
    """What was the case after any step of a run."""

    fullest: int = 0
    had_chunks: bool = False

    def look(self, engine: Engine) -> None:
        engine.audit()
        stats = engine.stats
        self.fullest = max(self.fullest, stats.num_held_pages + stats.num_idle_pages)
        self.had_chunks |= any(
            0 < num_computed(engine, s) < s.num_prompt_tokens for s in engine.scheduler.sequences()
        )


class Answerer:
    """Models of both page sizes, and what was asked of them alone."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.llms = {
            size: LLM(
                path, page_size=size, kv_cache_memory="2MiB", max_model_len=512,
                speculative_config=NGRAM, **options,
            )
            for size in (SMALL, LARGE)
        }  # fmt: skip
        llm = self.llms[SMALL]
        assert llm.engine.tokenizer is not None
        self.compiler = GrammarCompiler(
            llm.engine.tokenizer, llm.engine.vocab_size, sorted(llm.engine.eos_token_ids)
        )
        self.bias = {llm.encode(blank)[0]: -100.0 for blank in BLANKS}
        shared = "Answer in JSON, without blanks, in the form of the example. "
        prompts = [
            f"{shared}Example: {EXAMPLES[i % 2]} Now number {i:2}".ljust(126) for i in range(12)
        ]
        self.asked = [Asked(tuple(llm.encode(text)), i % 2, i) for i, text in enumerate(prompts)]
        self._alone: dict[FormatRequest, list[Result]] = {}

    def params(self, asked: Asked) -> SamplingParams:
        """Sampled, since a random model has one favourite answer to everything; seeded, so the same again."""
        form = StructuredOutputs(json=SCHEMAS[asked.schema].model_json_schema())
        return SamplingParams(
            temperature=1.0, seed=asked.seed, max_tokens=MAX_TOKENS, structured_outputs=form,
            logit_bias=self.bias,
        )  # fmt: skip

    def alone(self, wanted: FormatRequest, count: int) -> list[Result]:
        """The first `count` alone in a large pool: no hits, no chunks, no drafts, no other requests."""
        bench = Bench(self.llms[SMALL], wanted)
        found = self._alone.setdefault(wanted, [])
        for asked in self.asked[len(found) : count]:
            (result,) = self.run(bench.engine(answering=True, chunk=4096), [asked], Seen())
            assert result.num_cached_tokens == result.num_preemptions == 0
            found.append(result)
        return found[:count]

    def run(self, engine: Engine, asked: list[Asked], seen: Seen) -> list[Result]:
        engine._forms._compiler = self.compiler  # one for all engines: its process starts once
        numbers = [engine.submit(one.prompt, self.params(one)) for one in asked]
        results = {}
        while engine.has_work:
            for progress in engine.step():
                if progress.result is not None:
                    results[progress.number] = progress.result
            seen.look(engine)
        return [results[number] for number in numbers]

    def check(
        self, wanted: FormatRequest, cell: Cell, count: int = 12, *, recorded: bool = False
    ) -> int:
        """Runs `count` prompts of one combination, each twice. Returns the number of answers."""
        bench = Bench(self.llms[SMALL if cell.preempted else LARGE], wanted)
        pages = _pool(cell, count)
        engine = bench.engine(
            num_pages=1 + pages,
            chunk=64 if cell.chunked else 4096,
            caching=cell.prefix,
            max_model_len=256,
            drafting=cell.drafting,
            answering=True,
            recorded=recorded,
        )
        assert engine.runner.is_recorded == recorded
        asked, seen = self.asked[:count] * 2, Seen()
        results = self.run(engine, asked, seen)
        expected = self.alone(wanted, count) * 2
        for one, result, alone in zip(asked, results, expected, strict=True):
            assert result.finish_reason is FinishReason.STOP
            SCHEMAS[one.schema].model_validate_json(result.text)
            assert result.text == alone.text, "another answer than alone"
            assert result.token_ids == alone.token_ids
        self.assert_all_of_it_occurred(engine, cell, seen, results)
        return len(results)

    def assert_all_of_it_occurred(
        self, engine: Engine, cell: Cell, seen: Seen, results: list[Result]
    ) -> None:
        stats = engine.stats
        assert (stats.num_preemptions >= 1) == cell.preempted, "which is where not one page is left"
        assert cell.preempted or seen.fullest == stats.num_usable_pages, "a page had no contents"
        assert seen.had_chunks == cell.chunked
        cached = sum(result.num_cached_tokens > 0 for result in results)
        assert cached >= len(results) // 2 if cell.prefix else cached == 0
        speculation = stats.speculation
        assert (speculation is not None) == cell.drafting
        if speculation is not None:
            assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens


def _pool(cell: Cell, count: int) -> int:
    """Pages in which a cell fills its pool. The more sequences run at once, the fewer steps a cell takes."""
    if not cell.preempted:
        return 9  # large ones
    if cell.prefix:
        return 60 + 2 * count
    # A prompt takes 32 pages, and with its answer up to 39: half of them begin, and not all can end.
    return 36 * (count // 2)


@pytest.fixture(scope="module")
def answerer(tmp_path_factory: pytest.TempPathFactory) -> Answerer:
    return Answerer(tiny_chat.build(tmp_path_factory.mktemp("pressure")), dtype="float64")


@pytest.mark.parametrize("wanted", LAYOUTS, ids=str)
def test_json_out_of_a_full_pool_is_the_json_that_each_request_gets_alone(
    answerer: Answerer, wanted: FormatRequest
) -> None:
    assert answerer.check(wanted, EVERYTHING, 5) == 10


@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafting"])
def test_recorded_steps_give_the_same_json(
    answerer: Answerer, drafting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "capture", record_here)
    cell = replace(EVERYTHING, drafting=drafting)
    assert answerer.check(FORMATS[-1], cell, 5, recorded=True) == 10


@pytest.mark.slow
@pytest.mark.parametrize("wanted", FORMATS, ids=str)
def test_the_whole_cross_gives_300_answers_a_format_and_none_is_corrupted(
    answerer: Answerer, wanted: FormatRequest
) -> None:
    answers = sum(answerer.check(wanted, cell) for cell in CELLS)
    texts = {result.text for result in answerer.alone(wanted, 12)}
    print(f"{wanted}: {answers} answers in {len(CELLS)} cells, {len(texts)} texts, 0 corrupted")
    assert answers >= 300
    assert len(texts) >= 10, "these prompts cannot tell a mix-up"


def test_the_check_notices_pages_that_others_should_not_have_found(
    answerer: Answerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: pages that are found by the beginning of their tokens alone."""
    wanted = FORMATS[0]
    answerer.alone(wanted, 5)
    monkeypatch.setattr(
        row_table, "page_hash", lambda parent, tokens: page_hash(parent, tokens[: SMALL // 2])
    )
    with pytest.raises(AssertionError, match="another answer than alone"):
        answerer.check(wanted, EVERYTHING, 5)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", FORMATS, ids=str)
def test_cpu_kernels_in_batch_invariant_mode_corrupt_none_either(
    invariant: Answerer, wanted: FormatRequest
) -> None:
    assert {layer.backend for layer in Bench(invariant.llms[SMALL], wanted).plan.layers} == {"cpu"}
    for cell in CELLS:
        if cell.preempted:
            invariant.check(wanted, cell)


@pytest.fixture(scope="module")
def invariant(tmp_path_factory: pytest.TempPathFactory) -> Answerer:
    path = tiny_chat.build(tmp_path_factory.mktemp("invariant"), family="qwen3")  # heads of 32
    return Answerer(path, dtype="float32", batch_invariant=True, attention_backend="cpu")
