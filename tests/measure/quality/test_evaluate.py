"""What `kvant eval` measures: the right plans, positions and paths, kept part by part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvant.engine.llm import LLM
from kvant.errors import BadValue, DoesNotFit, NotServable
from kvant.execution.runner import ModelRunner
from kvant.kv.names import FormatRequest, parse_format
from kvant.kv.spec import KVPlan
from kvant.measure import own_engine
from kvant.measure.fidelity import divergences
from kvant.measure.own_engine import plan_storing
from kvant.measure.quality import compare, evaluate, generation
from kvant.measure.quality import kept as on_disk
from kvant.measure.quality.compare import compare_windows, mean_by_position
from kvant.measure.quality.evaluate import (
    Evaluation,
    Extent,
    Part,
    choose_contenders,
    pack,
    run_parts,
    unpack,
)
from kvant.measure.quality.kept import Kept, measured_by
from kvant.measure.quality.report import report
from kvant.measure.quality.texts import LEAST_POSITIONS, check_length, read_text, windows
from kvant.measure.teacher_forced import text_logits
from kvant.models.loaded import LoadedModel
from kvant.sampling.sampling_params import SamplingParams
from tests.engine import tiny_chat
from tests.speculative.recorded import Again

WIDE = parse_format("float32", asked_by="test")
NARROW = parse_format("int4_per_token_head", asked_by="test")
WORDS = "The sea, the sea, the open sea; measure twice and cut once. "


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    torch.set_num_threads(1)
    path = tiny_chat.build(tmp_path_factory.mktemp("eval"))
    return LLM(path, dtype="float32", kv_cache_memory="1MiB")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(f"{i} {WORDS}" for i in range(200)))
    return path


def model_of(llm: LLM) -> LoadedModel:
    assert isinstance(llm.engine.runner, ModelRunner)
    return llm.engine.runner.model


def test_windows_are_compared_position_by_position_in_both_paths(llm: LLM, text: Path) -> None:
    context, decode = 48, 5
    ids = windows(read_text(text, llm), llm, context, 2 * context)[:2]
    wide, narrow = plan_storing(llm, WIDE), plan_storing(llm, NARROW)
    told: list[int] = []
    found = compare_windows(
        model_of(llm), wide, {"narrow": narrow}, ids, vocab_size=llm.engine.vocab_size, decode=decode,
        on_progress=told.append,
    )  # fmt: skip
    assert sum(told) == compare.contender_tokens(wide, {"narrow": narrow}, ids, decode)
    one = found["narrow"]
    for row in range(2):
        exact, other = (text_logits(model_of(llm), p, ids[row].tolist()) for p in (wide, narrow))
        expected = divergences(exact, other)[:-1].numpy()
        assert one.prefill.kl[row::2].shape == one.prefill.kl[1 - row :: 2].shape
        mine = np.array([one.prefill.kl[one.positions == at][row] for at in range(context - 1)])
        assert mine == pytest.approx(expected, abs=1e-6)
        decoded = one.decode.kl.reshape(decode, 2)[:, row]
        assert decoded == pytest.approx(expected[-decode:], abs=1e-6)
    assert one.prefill.kl.mean() > 1e-5
    assert found[""].decode.kl.max() < 1e-6, "the baseline's two paths agree"
    assert len(one.step_ms) == decode
    curve = mean_by_position([one], context, buckets=4)
    assert np.mean(curve) == pytest.approx(one.prefill.kl.mean(), rel=0.1)


def test_formats_that_do_not_fit_side_by_side_give_the_same_figures(
    llm: LLM, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = windows(read_text(text, llm), llm, 48, 48)[:1]
    formats = [parse_format(name, asked_by="test") for name in ("fp8", "int8_per_token_head")]
    plans = {str(one): plan_storing(llm, one) for one in formats}
    arguments = (model_of(llm), plan_storing(llm, WIDE), plans, ids)
    both = compare_windows(
        *arguments, vocab_size=llm.engine.vocab_size, decode=2, on_progress=lambda _: None
    )
    monkeypatch.setattr(compare, "POOL_BYTES", 1)
    monkeypatch.setattr(compare, "MOST_CHUNK", 7)
    told: list[int] = []
    apart = compare_windows(
        *arguments, vocab_size=llm.engine.vocab_size, decode=2, on_progress=told.append
    )
    assert sum(told) == compare.contender_tokens(*arguments[1:], 2), "the baseline is read twice"
    for name in plans:
        assert apart[name].prefill.kl == pytest.approx(both[name].prefill.kl, abs=1e-6)


def test_a_gpu_reads_as_many_windows_as_its_memory_has_room_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, narrow = plan_storing(llm, WIDE), plan_storing(llm, NARROW)
    each = (wide.bytes_per_token + narrow.bytes_per_token) * 256
    logits = compare._COPIES * 4 * compare.MOST_CHUNK * 100

    def at_once(free: int, context: int = 256, device: str = "cuda") -> int:
        monkeypatch.setattr(compare, "_free", lambda _: free)
        return compare.windows_at_once(
            wide, [narrow], context, vocab_size=100, device=torch.device(device)
        )

    assert at_once(100 * (each + logits)) == 16
    assert at_once(5 * (each + logits)) == 5
    assert at_once(6 * (each + logits) - 1) == 5
    assert at_once(each + logits) == 1
    assert at_once(0, device="cpu") == compare.MOST_WINDOWS
    with pytest.raises(DoesNotFit, match="256 tokens does not fit") as refused:
        at_once(each + logits - 1)
    shorter, on_cpu = (way.arguments for way in refused.value.ways_out)
    assert shorter[0] == "--context"
    assert at_once(each + logits - 1, int(shorter[1])) == 1
    assert on_cpu == ("--device", "cpu")
    with pytest.raises(DoesNotFit) as refused:
        at_once(logits)
    assert [way.arguments for way in refused.value.ways_out] == [on_cpu], "no window is that short"


def test_parts_of_another_division_are_not_taken_for_these(llm: LLM, text: Path) -> None:
    ids = windows(read_text(text, llm), llm, 48, 48 * 5)[:5]
    names = [{name for name, _ in evaluate.batches("a-", ids, most)} for most in (2, 3)]
    assert [len(some) for some in names] == [3, 2]
    assert not names[0] & names[1]
    assert torch.equal(torch.cat([batch for _, batch in evaluate.batches("a-", ids, 2)]), ids)


def test_figures_of_another_device_are_not_taken_for_these(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kept(tmp_path, measured_by(llm)).write("a", {"x": np.arange(3)})
    assert len(Kept(tmp_path, measured_by(llm))) == 1
    monkeypatch.setattr(on_disk, "runner_of", lambda _: SimpleNamespace(device="cuda:0"))
    assert len(Kept(tmp_path, measured_by(llm))) == 0


def test_recorded_decode_steps_give_the_same_figures(llm: LLM, text: Path) -> None:
    ids = windows(read_text(text, llm), llm, 48, 96)[:2]
    arguments = (model_of(llm), plan_storing(llm, WIDE), {"narrow": plan_storing(llm, NARROW)}, ids)
    options: dict[str, Any] = {
        "vocab_size": llm.engine.vocab_size,
        "decode": 20,
        "on_progress": lambda _: None,
    }
    plain, again = compare_windows(*arguments, **options), Again()
    recorded = compare_windows(*arguments, **options, recorder=again)
    assert again.num_runs == 2 * 20, "the baseline and the format"
    for name, one in plain.items():
        assert recorded[name].decode.kl == pytest.approx(one.decode.kl, abs=1e-7)
        assert recorded[name].decode.nll == pytest.approx(one.decode.nll, abs=1e-6)
    assert plain["narrow"].decode.kl.mean() > 1e-5


def test_answers_of_recorded_steps_are_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, prompts = plan_storing(llm, NARROW), [[5, 6, 7] * 9, [8, 9]]
    plain = generation.answers_of(llm, plan, prompts, 12)
    again = Again()
    monkeypatch.setattr(own_engine, "recorder_like", lambda runner: again)
    assert generation.answers_of(llm, plan, prompts, 12) == plain
    assert again.num_runs >= 10


def test_each_layer_and_each_side_is_narrow_alone(llm: LLM) -> None:
    found = choose_contenders(llm, WIDE, [NARROW], None, named=True)
    assert found.layered == "int4_per_token_head"
    for index, plan in found.layers.items():
        stored = [str(layer.k.dtype) for layer in plan.layers if layer.k is not None]
        assert [name == "int4_per_token_head" for name in stored] == [
            i == index for i in range(len(stored))
        ]
    ((k_plan,), (v_plan,)) = (found.k_only.values(), found.v_only.values())
    for plan, narrow, wide in ((k_plan, "k", "v"), (v_plan, "v", "k")):
        for layer in plan.layers:
            assert str(getattr(layer, narrow).dtype) == "int4_per_token_head"
            assert str(getattr(layer, wide).dtype) == "float32"


def test_a_baseline_that_nothing_is_narrower_than_is_refused(llm: LLM) -> None:
    with pytest.raises(BadValue, match="no format needs fewer bytes") as caught:
        choose_contenders(llm, NARROW, [WIDE], None, named=False)
    assert caught.value.ways_out[0].arguments == ("--baseline", "model")
    assert choose_contenders(
        llm, parse_format("model", asked_by="test"), [NARROW], None, named=False
    )


def test_logits_that_are_no_numbers_are_an_error_in_words(
    llm: LLM, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(compare.TextReader):
        def read(self, token_ids: torch.Tensor) -> torch.Tensor:
            logits = super().read(token_ids)
            logits[0, -1, 3] = torch.nan
            return logits

    monkeypatch.setattr(compare, "TextReader", Broken)
    ids = windows(read_text(text, llm), llm, 32, 32)[:1]
    with pytest.raises(BadValue, match=r"narrow: the logits of \d+ positions are NaN"):
        compare_windows(
            model_of(llm), plan_storing(llm, WIDE), {"narrow": plan_storing(llm, NARROW)}, ids,
            vocab_size=llm.engine.vocab_size, decode=2, on_progress=lambda _: None,
        )  # fmt: skip


def test_a_format_that_cannot_be_served_is_refused_if_it_was_named(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = evaluate.plan_storing

    def refuse(llm: LLM, stored: FormatRequest, **kept: Any) -> KVPlan:
        if "fp8_e5m2" in str(stored):
            raise NotServable("fp8_e5m2 is asked", why="this device has no kernel for it")
        return plan(llm, stored, **kept)

    monkeypatch.setattr(evaluate, "plan_storing", refuse)
    formats = [parse_format("fp8_e5m2", asked_by="test"), NARROW]
    with pytest.raises(NotServable):
        choose_contenders(llm, WIDE, formats, None, named=True)
    found = choose_contenders(llm, WIDE, formats, None, named=False)
    assert list(found.formats) == ["int4_per_token_head"]
    assert found.refused == {"fp8_e5m2": "this device has no kernel for it"}


def test_a_text_that_is_too_short_says_how_much_is_needed(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text(WORDS)
    text = read_text(path, llm)
    with pytest.raises(BadValue, match=r"short\.txt is too short for contexts of 512") as caught:
        check_length(text, (512,), 64)
    assert f"it has {len(text.token_ids)} tokens" in caught.value.why
    assert "needs 1024" in caught.value.why
    assert str(LEAST_POSITIONS) in caught.value.why


def test_json_lines_are_joined_and_other_files_are_refused(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"question": "a b", "answer": "c", "n": 3}\n\n"d"\n')
    assert list(read_text(path, llm).token_ids) == list(llm.encode("a b\nc\n\nd"))
    path.write_text('{"question": "a b"}\n{\n')
    with pytest.raises(BadValue, match="line 2 is not JSON"):
        read_text(path, llm)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(BadValue, match="cannot be read"):
        read_text(tmp_path / "bytes.txt", llm)


def test_an_interrupted_evaluation_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    ran: list[str] = []

    def part(name: str, *, fails: bool = False) -> Part:
        def run(on_progress: compare.OnProgress) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
            ran.append(name)
            if fails:
                raise KeyboardInterrupt
            on_progress(10)
            return {"x": np.arange(3)}

        return Part(name, 10, run)

    kept = Kept(tmp_path, {"text": 1})
    with pytest.raises(KeyboardInterrupt):
        run_parts([part("a"), part("b", fails=True)], kept, lambda *_: None)
    told: list[tuple[int, int]] = []
    again = Kept(tmp_path, {"text": 1})
    assert len(again) == 1
    found = run_parts([part("a"), part("b")], again, lambda *x: told.append(x))
    assert ran == ["a", "b", "b"]
    assert found["a"]["x"].tolist() == found["b"]["x"].tolist() == [0, 1, 2]
    assert told[-1] == (10, 10)
    assert len(Kept(tmp_path, {"text": 2})) == 0, "other inputs have parts of their own"


def test_formats_that_do_not_fit_side_by_side_are_kept_apart(
    llm: LLM, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an interruption in a long window loses a group, not all formats."""
    read = read_text(text, llm)
    extent = Extent((48,), 96, 4, 0, 0, 0, 0, ())
    formats = [parse_format(name, asked_by="test") for name in ("fp8", "int8_per_token_head")]
    chosen = choose_contenders(llm, WIDE, formats, None, named=True)
    reports = []
    for room, count in ((compare.POOL_BYTES, 1), (1, 2)):
        monkeypatch.setattr(compare, "POOL_BYTES", room)
        evaluation = Evaluation(llm, chosen, read, extent)
        parts = {part.name: part.run(lambda _: None) for part in evaluation.parts()}
        assert len(parts) == count * len({name.rpartition("-")[0] for name in parts})
        reports.append(report(evaluation, parts))
    assert reports[0]["noise_floor"]["positions"] == reports[1]["noise_floor"]["positions"]
    for one, other in zip(*(found["formats"].values() for found in reports), strict=True):
        assert one["kld_mean"] == pytest.approx(other["kld_mean"], rel=1e-3)
        assert one["positions"] == other["positions"]


def test_a_part_counts_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, seen = Kept(tmp_path, {}), []
    save = np.savez

    def killed(file: object, **arrays: object) -> None:
        save(file, **arrays)  # type: ignore[arg-type]
        seen.append(len(Kept(tmp_path, {})))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", killed)
    with pytest.raises(BadValue, match="cannot be written") as fault:
        kept.write("a", {"x": np.arange(3)})
    assert fault.value.why == "No space left on device"
    assert seen == [0], "as after kill -9 there"
    assert [one.name for one in kept.path.iterdir()] == ["inputs.json"]


def test_an_equal_run_that_ends_first_takes_nothing_from_this_one(tmp_path: Path) -> None:
    kept, other = Kept(tmp_path, {}), Kept(tmp_path, {})
    other.forget()
    kept.write("a", {"x": np.arange(3)})
    found = kept.read("a")
    assert found is not None
    assert found["x"].tolist() == [0, 1, 2]


def test_a_damaged_part_is_measured_again_and_reported(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {})
    kept.write("a", {"x": np.arange(1000)})
    path = kept.path / "a.npz"
    path.write_bytes(path.read_bytes()[:300])
    assert kept.read("a") is None
    assert "a.npz is damaged" in kept.note


def test_comparisons_are_kept_as_they_are(llm: LLM, text: Path, tmp_path: Path) -> None:
    ids = windows(read_text(text, llm), llm, 32, 32)[:1]
    found = compare_windows(
        model_of(llm), plan_storing(llm, WIDE), {"a/b": plan_storing(llm, NARROW)}, ids,
        vocab_size=llm.engine.vocab_size, decode=2, on_progress=lambda _: None,
    )  # fmt: skip
    kept = Kept(tmp_path, {})
    kept.write("part", pack(found))
    arrays = kept.read("part")
    assert arrays is not None
    back = unpack(arrays)
    assert list(back) == ["", "a/b"]
    assert back["a/b"].prefill.kl.tolist() == found["a/b"].prefill.kl.tolist()
    assert back["a/b"].decode.same_top.tolist() == found["a/b"].decode.same_top.tolist()


def test_answers_agree_up_to_their_first_difference() -> None:
    found = generation.agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]])
    assert (found.same, found.common, found.answers, found.tokens) == (7 / 8, 3.0, 2, 4)


def test_a_needle_lies_in_a_prompt_of_the_length_that_was_asked(llm: LLM, text: Path) -> None:
    ids = read_text(text, llm).token_ids
    wanted = generation.needles(llm, ids, 200)
    assert [len(needle.prompt) for needle in wanted] == [200, 200, 200]
    tokenizing = llm.tokenizing
    assert tokenizing is not None
    for needle in wanted:
        shown = tokenizing.backend.decode(needle.prompt)
        assert f"The secret number is {needle.number}." in shown
    assert generation.found_needles(llm, plan_storing(llm, WIDE), wanted) == 0, "a random model"


def test_a_drafters_acceptance_is_measured_in_each_format(llm: LLM, text: Path) -> None:
    contenders = choose_contenders(llm, WIDE, [NARROW], None, named=True)
    extent = evaluate.Extent((64,), 128, 0, 0, 0, 2, 12, ())
    drafter = '{"method":"ngram","num_speculative_tokens":3}'
    evaluation = evaluate.Evaluation(
        llm, contenders, read_text(text, llm), extent, drafter, "float32"
    )
    (part, *_) = evaluation.parts()
    assert part.name == "acceptance"
    found = part.run(lambda _: None)
    assert set(found) == {"", "int4_per_token_head"}
    assert all(1 <= float(length) <= 4 for length in found.values()), found
    prompts = generation.prompts_of(evaluation.text.token_ids, 2)
    alone = LLM(
        llm.model_path, dtype="float32", kv_cache_dtype="float32", kv_cache_memory="4MiB",
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )  # fmt: skip
    alone.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert float(found[""]) == alone.metrics()["spec_decode_mean_acceptance_length"]
