"""Models in `kvant eval` that keep recurrent states or latents: both are compared like keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvant.cli.eval import print_tables
from kvant.engine.llm import LLM
from kvant.errors import BadValue
from kvant.execution.runner import ModelRunner
from kvant.kv.dtype import KVDtype
from kvant.kv.geometry import StateKind
from kvant.kv.names import parse_format, parse_one
from kvant.measure.own_engine import plan_storing
from kvant.measure.quality import generation
from kvant.measure.quality.compare import compare_windows
from kvant.measure.quality.evaluate import Evaluation, Extent, choose_contenders, run_parts
from kvant.measure.quality.kept import Kept
from kvant.measure.quality.report import report
from kvant.measure.quality.texts import Text
from kvant.measure.teacher_forced import text_logits
from kvant.models.loaded import LoadedModel
from kvant.models.quiet import quiet_transformers
from tests.engine import tiny_chat
from tests.models import families

WIDE = parse_format("float32", asked_by="test")
INT8 = parse_format("int8_per_token_head", asked_by="test")
STATE = parse_one("int8_per_token_head", asked_by="test")
IDS = [3 + (7 * i + i * i) % 120 for i in range(600)]


@pytest.fixture(scope="module", params=["qwen3_5_text", "bamba"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("states") / request.param
    build_with_words(request.param, where)
    return where


def build_with_words(family: str, where: Path) -> None:
    families.build(family, where)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(128)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(where)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, dtype="float32", device="cpu", kv_cache_memory="1MiB", max_model_len=256)


def model_of(llm: LLM) -> LoadedModel:
    assert isinstance(llm.engine.runner, ModelRunner)
    return llm.engine.runner.model


def test_a_text_read_in_pieces_has_the_logits_of_transformers(llm: LLM, path: Path) -> None:
    with quiet_transformers(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype=torch.float32
        )
        expected = model(input_ids=torch.tensor([IDS[:90]])).logits[0]
    for chunk in (90, 23, 1):
        found = text_logits(model_of(llm), plan_storing(llm, WIDE), IDS[:90], chunk=chunk)
        assert float((found - expected).abs().max()) < 1e-3 * float(expected.abs().max())


def test_decoding_continues_from_the_states_before_it(llm: LLM) -> None:
    windows = torch.tensor(IDS[:192]).view(2, 96)
    found = compare_windows(
        model_of(llm),
        plan_storing(llm, WIDE),
        {"same": plan_storing(llm, WIDE), "int8": plan_storing(llm, WIDE, state=STATE)},
        windows, vocab_size=llm.engine.vocab_size, decode=60, on_progress=lambda _: None,
    )  # fmt: skip
    assert found[""].decode.kl.max() < 1e-5, "the baseline's two paths agree"
    assert found["same"].prefill.kl.max() < 1e-6
    assert found["same"].decode.kl.mean() < 1e-9
    # One piece ends before the decoded tokens; while they are decoded, states are rounded at each.
    assert found["int8"].prefill.kl[found["int8"].positions < 30].max() < 1e-6
    assert found["int8"].decode.kl.mean() > 1e-7


def test_states_are_contenders_alone_and_with_formats(llm: LLM) -> None:
    found = choose_contenders(llm, WIDE, [INT8], None, named=True, states=[STATE])
    assert list(found.formats) == [
        "int8_per_token_head",
        "state int8_per_token_head",
        "int8_per_token_head, state int8_per_token_head",
    ]
    stored = {}
    for name, plan in found.formats.items():
        states = {
            one.choice.dtype
            for x in plan.layers
            if (one := x.state(StateKind.RECURRENT)) is not None
        }
        keys = {layer.k.dtype for layer in plan.layers if layer.k is not None}
        stored[name] = (*keys, *states)
    narrow, wide = KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.FLOAT32
    assert list(stored.values()) == [(narrow, wide), (wide, narrow), (narrow, narrow)]
    alone = choose_contenders(llm, WIDE, [], None, named=True, states=[STATE])
    assert (list(alone.formats), alone.layers, alone.k_only) == (
        ["state int8_per_token_head"], {}, {},
    )  # fmt: skip


def test_an_evaluation_of_states_reports_their_bytes(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contenders = choose_contenders(llm, WIDE, [INT8], None, named=True, states=[STATE])
    extent = Extent((64,), 128, 8, 32, 32, 3, 5, ())
    evaluation = Evaluation(llm, contenders, Text("ids", "0", tuple(IDS)), extent)
    parts = run_parts(evaluation.parts(), Kept(tmp_path, {}), lambda *_: None)
    found = report(evaluation, parts)
    keys, state, both = found["formats"].values()
    assert state["bytes_per_token"] == found["baseline_bytes_per_token"]
    assert both["bytes_per_token"] == keys["bytes_per_token"] < state["bytes_per_token"]
    assert both["bytes_per_sequence"] == state["bytes_per_sequence"] < keys["bytes_per_sequence"]
    assert found["layers"]["index"] == [
        x.geometry.index for x in llm.plan.layers if x.geometry.has_kv
    ]
    assert "k_alone" in keys
    assert "k_alone" not in state
    assert min(one["decode"]["kld_mean"] for one in (keys, state, both)) > 1e-9
    assert all(one["generation"]["answers"] == 3 for one in (keys, state, both))

    monkeypatch.setenv("COLUMNS", "80")
    print_tables(found)
    shown = capsys.readouterr().out
    assert "\nint8_per_token_head  " in shown, "the name is whole"
    assert f"{both['bytes_per_sequence']:,}" in shown


def test_latents_are_compared_without_sides(tmp_path: Path) -> None:
    build_with_words("deepseek_v2", tmp_path)
    llm = LLM(tmp_path, dtype="float32", device="cpu", kv_cache_memory="1MiB", max_model_len=128)
    contenders = choose_contenders(llm, WIDE, [INT8], None, named=True)
    evaluation = Evaluation(
        llm, contenders, Text("ids", "0", tuple(IDS)), Extent((64,), 128, 8, 32, 32, 0, 0, ())
    )
    parts = run_parts(evaluation.parts(), Kept(tmp_path, {}), lambda *_: None)
    found = report(evaluation, parts)
    (one,) = found["formats"].values()
    assert one["kld_mean"] > 1e-9
    assert "k_alone" not in one
    assert len(found["layers"]["kld_mean"]) == len(llm.plan.layers)


def test_answers_of_several_sequences_have_states_of_their_own(llm: LLM) -> None:
    prompts = [IDS[:40], IDS[50:70], IDS[80:95]]
    plan = plan_storing(llm, WIDE)
    together = generation.answers_of(llm, plan, prompts, 12)
    assert together == [generation.answers_of(llm, plan, [one], 12)[0] for one in prompts]


def test_a_model_without_recurrent_states_is_refused(tmp_path: Path) -> None:
    dense = LLM(tiny_chat.build(tmp_path), dtype="float32", kv_cache_memory="1MiB")
    with pytest.raises(BadValue, match="keeps no recurrent state"):
        choose_contenders(dense, WIDE, [INT8], None, named=True, states=[STATE])
