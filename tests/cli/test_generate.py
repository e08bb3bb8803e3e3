"""`kvant generate`: answers on stdout, everything else on stderr, refusals before any weight."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from kvant import LLM, SamplingParams
from kvant.cli.generate import _refuse_models, generate
from kvant.errors import BadValue, ConfigError, DoesNotFit, NotServable, UnknownName
from tests.engine import tiny_chat

app = typer.Typer()
app.command()(generate)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, dtype="float32", kv_cache_memory="2MiB", max_model_len=128)


def run(path: Path, *arguments: str, stdin: str | None = None) -> Result:
    fixed = ["--model", str(path), "--dtype", "float32", "--kv-cache-memory", "2MiB"]
    return CliRunner().invoke(app, [*arguments, *fixed, "--max-model-len", "128"], input=stdin)


def expected(llm: LLM, prompt: str, **params: object) -> str:
    defaults = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
    return llm.generate(prompt, SamplingParams(**{**defaults, **params}))[0].text  # type: ignore[arg-type]


FLAGS = ("--max-tokens", "9", "--ignore-eos", "--temperature", "0")


def test_one_prompt_is_completed_and_nothing_else_is_on_stdout(path: Path, llm: LLM) -> None:
    result = run(path, "Hello", *FLAGS)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected(llm, "Hello") + "\n"


def test_an_engine_that_embeds_is_refused_with_ways_out(path: Path, tmp_path: Path) -> None:
    refused = run(path, "Hello", "--task", "embed").exception
    assert isinstance(refused, NotServable)
    assert refused.ways_out[0].arguments == ("--task", "generate")
    copy = tmp_path / "embeds"
    shutil.copytree(path, copy)
    kinds = [{"type": "sentence_transformers.models.Transformer"}]
    (copy / "modules.json").write_text(json.dumps(kinds))
    assert isinstance(run(copy, "Hello", *FLAGS).exception, NotServable)
    assert run(copy, "Hello", *FLAGS, *refused.ways_out[0].arguments).exit_code == 0


def test_a_model_in_the_place_of_a_prompt_is_refused_with_its_flag(path: Path) -> None:
    refused = run(path, str(path), "Hello", *FLAGS).exception
    assert isinstance(refused, BadValue)
    assert refused.what == f"kvant generate takes prompts, and {path} is a model"
    assert refused.ways_out[0].arguments == ("--model", str(path))


def test_a_prompt_that_only_ends_like_a_models_name_is_a_prompt(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path)
    _refuse_models(["", "What is a .gguf", "model.gguf"])
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadValue, match=r"model\.gguf is a model"):
        _refuse_models(["model.gguf"])
    with pytest.raises(BadValue, match="smollm2 is a model"):
        _refuse_models(["smollm2", "Hello"])


def test_several_prompts_are_answered_in_their_order(path: Path, llm: LLM) -> None:
    result = run(path, "Hello", "other", *FLAGS)
    assert result.stdout == "".join(
        f">>> {text}\n{expected(llm, text)}\n\n" for text in ("Hello", "other")
    )


def test_json_says_all_about_every_prompt(path: Path, llm: LLM) -> None:
    result = run(path, "Hello", "other", "--format", "json", *FLAGS)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["Hello", "other"]
    assert [row["text"] for row in rows] == [expected(llm, text) for text in ("Hello", "other")]
    assert rows[0]["finish_reason"] == "length"
    assert rows[0]["num_prompt_tokens"] == 5
    assert len(rows[0]["token_ids"]) == 9


def test_json_keeps_every_character_on_any_terminal(path: Path) -> None:
    arguments = ["Hello \N{GRINNING FACE}", "--format", "json", *FLAGS, "--model", str(path)]
    for encoding in ("latin-1", "utf-8"):
        result = CliRunner(charset=encoding).invoke(app, arguments)
        assert json.loads(result.stdout_bytes.decode(encoding))["prompt"] == arguments[0]


def test_a_dash_reads_the_prompt_from_stdin(path: Path, llm: LLM) -> None:
    for stdin, prompt in (("Hello", "Hello"), ("Hello\n", "Hello"), ("Hello\n\n", "Hello\n")):
        assert run(path, "-", *FLAGS, stdin=stdin).stdout == expected(llm, prompt) + "\n"


def test_chat_wraps_the_prompt_in_the_models_template(path: Path, llm: LLM) -> None:
    result = run(path, "Hello", "--chat", *FLAGS)
    ids = llm.encode_chat([{"role": "user", "content": "Hello"}])
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    assert result.stdout == llm.generate(ids, params)[0].text + "\n"
    assert result.stdout != run(path, "Hello", *FLAGS).stdout


def test_sampling_flags_are_honoured_and_a_seed_repeats_an_answer(path: Path, llm: LLM) -> None:
    flags = ("--temperature", "2", "--top-k", "40", "--seed", "7")
    first, again = (run(path, "Hello", *FLAGS, *flags).stdout for _ in range(2))
    assert first == again == expected(llm, "Hello", temperature=2, top_k=40, seed=7) + "\n"
    other = run(path, "Hello", *FLAGS, *flags[:-1], "8").stdout
    assert other != first


def test_the_models_sampling_values_apply_without_flags_and_are_printed(tmp_path: Path) -> None:
    other = tiny_chat.build(tmp_path)
    (other / "generation_config.json").write_text('{"temperature": 3.0, "top_k": 30}')
    llm = LLM(other, dtype="float32", kv_cache_memory="2MiB", max_model_len=128)
    length = ("--max-tokens", "9", "--ignore-eos", "--seed", "7")
    result = run(other, "Hello", *length)
    assert result.stdout == expected(llm, "Hello", temperature=3, top_k=30, seed=7) + "\n"
    assert "temperature 3, top_k 30" in result.stderr
    warmer = run(other, "Hello", *length, "--top-k", "0").stdout
    assert warmer == expected(llm, "Hello", temperature=3, seed=7) + "\n" != result.stdout
    assert (
        run(other, "Hello", *length, "--temperature", "0").stdout == expected(llm, "Hello") + "\n"
    )


def test_n_answers_are_printed_one_after_another(path: Path, llm: LLM) -> None:
    flags = ("--temperature", "1.5", "--seed", "7", "--n", "3")
    result = run(path, "Hello", *FLAGS, *flags, "--format", "json")
    texts = [json.loads(line)["text"] for line in result.stdout.splitlines()]
    assert texts == [expected(llm, "Hello", temperature=1.5, seed=7 + i) for i in range(3)]


def test_penalties_and_forms_are_honoured(path: Path, llm: LLM, tmp_path: Path) -> None:
    penalties = ("--presence-penalty", "1.5", "--repetition-penalty", "1.4")
    text = expected(llm, "Hello", presence_penalty=1.5, repetition_penalty=1.4)
    assert run(path, "Hello", *FLAGS, *penalties).stdout == text + "\n"
    assert text != expected(llm, "Hello")
    assert run(path, "Hello", "--choice", "yes", "--choice", "no").stdout in ("yes\n", "no\n")
    assert re.fullmatch(r"[ab]{4}\n", run(path, "Hello", "--regex", "[ab]{4}").stdout)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "null"}, "maxItems": 1}')
    found = run(path, "Hello", "--json-schema", f"@{schema}", "--temperature", "1", "--seed", "1")
    assert json.loads(found.stdout) in ([], [None])
    for wrong in (
        ("--regex", "a", "--json-object"),
        ("--json-schema", "@/nowhere/at/all"),
        ("--json-schema", "["),
        ("--regex", "(?=a)b"),
        ("--regex", "a", "--ignore-eos"),
        ("--n", "0"),
    ):
        fault = run(path, "Hello", *wrong).exception
        assert isinstance(fault, BadValue), wrong


def test_a_stop_string_ends_the_answer(path: Path, llm: LLM) -> None:
    whole = expected(llm, "Hello")
    stop = whole[3:5]
    assert run(path, "Hello", *FLAGS, "--stop", stop).stdout == whole[: whole.index(stop)] + "\n"


def test_warnings_of_the_plan_go_to_stderr(path: Path) -> None:
    result = run(path, "Hello", *FLAGS, "--kv-cache-dtype", "fp8")
    assert result.exit_code == 0
    assert "without calibrated scales" in " ".join(result.stderr.split())
    assert "calibrated" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "fault", "words"),
    [
        (["Hello", "--kv-cache-dtype", "fp9"], UnknownName, "fp9"),
        (["Hello", "--temperature", "-1"], BadValue, "temperature"),
        (["Hello", "--max-tokens", "0"], BadValue, "--max-tokens is 0"),
        (["Hello", "--calculate-kv-scales"], NotServable, "calculate"),
        (["Hello", "--tensor-parallel-size", "3"], NotServable, "one device"),
        (["Hello", "--kv-cache-memory", "900TiB"], DoesNotFit, "does not fit"),
        (["x" * 500], BadValue, "500 tokens"),
        ([""], BadValue, "empty"),
        (["Hello", "--device", "tpu"], UnknownName, "tpu"),
    ],
)
def test_what_cannot_be_is_the_users_to_mend(
    path: Path, arguments: list[str], fault: type[ConfigError], words: str
) -> None:
    result = CliRunner().invoke(
        app,
        ["--model", str(path), "--max-model-len", "128", "--kv-cache-memory", "2MiB", *arguments],
    )
    assert isinstance(result.exception, fault)
    assert result.exception.exit_code == 2
    assert words in str(result.exception)
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["Hello", "--max-tokens", "0"], ["Hello", ""]])
def test_what_no_model_could_answer_is_refused_before_one_is_sought(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["--model", "/nonexistent", *arguments])
    assert isinstance(result.exception, BadValue)


def test_refusals_import_no_torch() -> None:
    code = """
import sys
import kvant.cli.main
assert not {"numpy", "http.client"} & set(sys.modules), "every command would pay for them"
from typer.testing import CliRunner
import typer
from kvant.cli.generate import _refuse_models, generate
from kvant.cli.chat import chat
for command, prompt in ((generate, ["Hello"]), (chat, [])):
    app = typer.Typer()
    app.command()(command)
    for bad in (["--kv-cache-dtype", "fp9"], ["--temperature", "-1"]):
        assert CliRunner().invoke(app, [*prompt, *bad]).exception.exit_code == 2
    model = ["/nowhere"] if command is chat else ["Hello", "--model", "/nowhere"]
    assert CliRunner().invoke(app, model).exception.exit_code == 2
assert not {"torch", "transformers"} & set(sys.modules), "heavy imports"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
