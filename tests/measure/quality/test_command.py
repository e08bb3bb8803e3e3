"""`kvant eval` as a user runs it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvant.measure.quality import generation
from kvant.measure.quality.page import page
from kvant.measure.quality.report import pareto
from tests.cli.command import kvant
from tests.engine import tiny_chat
from tests.models import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.build(tmp_path_factory.mktemp("eval"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(f"{i}: the sea, the open sea, measured twice." for i in range(400)))
    return path


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]


def test_formats_are_compared_and_the_last_line_is_json(
    model: Path, text: Path, tmp_path: Path
) -> None:
    shown, out = tmp_path / "eval.html", tmp_path / "eval.json"
    cache = tmp_path / "cache"
    ran = kvant(
        "eval", model, "--dtype", "float32", "--device", "cpu", "--text", text, "--quick", "--context",
        "64", "--context", "128", "--kv-format", "bfloat16", "--kv-format", "int4_per_token_head",
        "--format", "json", "--html", shown, "--out", out,
        env={"KVANT_CACHE": str(cache)},
    )  # fmt: skip
    assert ran.code == 0, ran.err
    found = json.loads(ran.out.splitlines()[-1])
    assert found["schema"] == 1
    assert list(found["formats"]) == ["bfloat16", "int4_per_token_head"]
    half, narrow = found["formats"].values()
    for one in (half, narrow):
        assert {"kld_mean", "kld_p99", "same_top", "ppl_ratio", "bytes_per_token"} <= one.keys()
        assert list(one["contexts"]) == ["64", "128"]
        assert one["kld_mean"] == one["contexts"]["128"]["kld_mean"]
        assert one["kld_median"] <= one["kld_p99"] <= one["kld_p999"] <= one["kld_max"]
        assert one["decode"]["tokens_per_second"] > 0
        assert one["decode"]["kld_mean"] == pytest.approx(
            one["decode"]["prefill_kld_mean"], rel=0.05
        )
        assert len(one["contexts"]["128"]["by_position"]) == 32
    assert half["bytes_per_token"] > narrow["bytes_per_token"]
    assert 0 < half["kld_mean"] < narrow["kld_mean"]
    assert 0 < narrow["k_alone"] < 2 * narrow["kld_mean"]
    assert found["pareto"] == ["int4_per_token_head", "bfloat16"]
    assert found["layers"]["format"] == "int4_per_token_head"
    assert all(kl > 0 for kl in found["layers"]["kld_mean"])
    assert found["noise_floor"]["kld_mean"] < half["kld_mean"]
    assert json.loads(out.read_text()) == found
    assert not list(cache.glob("eval/*")), "parts are not kept once all is written"

    html = shown.read_text()
    assert html == page(found)
    tags = Tags()
    tags.feed(html)
    assert tags.seen["svg"] == 4
    assert "script" not in tags.seen
    assert tags.addresses == []
    for drawn in html.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + drawn.partition("</svg>")[0] + "</svg>")


def test_the_tables_fit_a_terminal_of_80_columns(model: Path, text: Path, tmp_path: Path) -> None:
    ran = kvant(
        "eval", model, "--dtype", "float32", "--device", "cpu", "--text", text, "--quick", "--context",
        "64", "--kv-format", "turboquant_k8v4", "--kv-format", "fp8_per_token_head",
        env={"KVANT_CACHE": str(tmp_path), "COLUMNS": "80"},
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "…" not in ran.out
    assert "noise floor" in ran.out


def test_a_context_beyond_the_models_positions_has_a_way_out(
    model: Path, text: Path, tmp_path: Path
) -> None:
    ran = kvant(
        "eval", model, "--text", text, "--context", "1000000", env={"KVANT_CACHE": str(tmp_path)}
    )
    assert ran.code == 2
    assert "longer than the model's positions reach" in ran.err
    assert "way out: take the longest context: --context" in ran.err
    assert "way out: give it more positions, such as with YaRN: --hf-overrides" in ran.err


def test_a_refused_format_has_a_way_out_in_the_commands_own_words(
    model: Path, text: Path, tmp_path: Path
) -> None:
    given = (
        "eval", model, "--dtype", "float32", "--device", "cpu", "--text", text, "--quick", "--context", "64",
    )  # fmt: skip
    env = {"KVANT_CACHE": str(tmp_path)}
    refused = kvant(*given, "--kv-format", "int4_feedback", env=env)
    assert refused.code == 2
    assert "kvant calibrate MODEL --save DIR" in refused.err
    assert "--kv-cache-dtype" not in refused.err, "another command's option"
    (way,) = (line for line in refused.err.splitlines() if "round without them" in line)
    option, name = way.split(": ")[-1].split()
    done = kvant(*given, option, name, env=env)
    assert done.code == 0, done.err


def test_overrides_give_a_model_more_positions(model: Path, text: Path, tmp_path: Path) -> None:
    longer = {
        "max_position_embeddings": 1040,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 260,
        },
    }
    ran = kvant(
        "eval", model, "--dtype", "float32", "--device", "cpu", "--text", text, "--quick", "--context",
        "1040", "--kv-format", "int4_per_token_head", "--hf-overrides", json.dumps(longer), "--format",
        "json", env={"KVANT_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert ran.code == 0, ran.err
    found = json.loads(ran.out.splitlines()[-1])
    assert found["contexts"] == [1040]
    assert found["formats"]["int4_per_token_head"]["kld_mean"] > 0


def test_a_model_whose_tokens_take_much_memory_is_measured(text: Path, tmp_path: Path) -> None:
    """256 tokens take more than 32 MiB, as those of many models with 8 billion weights do."""
    wide = tiny_chat.build(tmp_path, num_attention_heads=8, num_key_value_heads=8, head_dim=512)
    ran = kvant(
        "eval", wide, "--dtype", "float32", "--device", "cpu", "--text", text, "--quick", "--context", "64",
        "--kv-format", "bfloat16", env={"KVANT_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "bfloat16" in ran.out


@pytest.mark.parametrize("command", [["eval"], ["calibrate"], ["tune", "--budget", "4.5bits"]])
def test_a_model_without_a_tokenizer_is_refused_where_texts_are_read(
    tmp_path: Path, command: list[str]
) -> None:
    path = tiny.build("llama", tmp_path)
    ran = kvant(command[0], path, *command[1:], "--device", "cpu")
    assert ran.code == 2
    assert "this command reads text" in ran.err


def test_an_interrupted_run_says_what_is_kept_and_continues(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (
        "eval", model, "--dtype", "float32", "--device", "cpu", "--text", text, "--quick", "--context",
        "64", "--kv-format", "int4_per_token_head",
    )  # fmt: skip
    env = {"KVANT_CACHE": str(tmp_path)}

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(generation, "answers_of", interrupted)
        ran = kvant(*arguments, env=env)
    kept = list(tmp_path.glob("eval/*/*.npz"))
    assert ran.code == 130
    assert kept
    where = kept[0].parent
    said = f"interrupted; {len(kept)} parts are kept in {where}; the same command continues"
    assert said in ran.err
    again = kvant(*arguments, env=env)
    assert again.code == 0, again.err
    assert f"continuing with {len(kept)} parts" in again.err
    assert not where.exists()


def test_the_front_holds_what_nothing_else_beats() -> None:
    formats = {
        "a": {"bytes_per_token": 10, "kld_mean": 0.5},
        "b": {"bytes_per_token": 20, "kld_mean": 0.6},
        "c": {"bytes_per_token": 20, "kld_mean": 0.1},
        "d": {"bytes_per_token": 30, "kld_mean": 0.1},
        "e": {"bytes_per_token": 40, "kld_mean": 0.0},
    }
    assert pareto(formats) == ["a", "c", "e"]
