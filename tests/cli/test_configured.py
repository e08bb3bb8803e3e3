"""Commands and their configuration: what `--print-config` shows, and what every entrance shares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvant.cli.configured import ALL_OPTIONS
from kvant.plan.config import ENGINE_OPTIONS, LLMOptions
from tests.acceptance.models import config, write_model
from tests.cli.command import Ran, in_turn, kvant, measured

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvant.yaml"
    path.write_text(
        "model: smollm2\nmax_num_seqs: 4\nport: 9000\napi_key: [first-secret, second-secret]\n"
        "kv_cache_dtype_skip_layers: [0, -1]\nspeculative_config: {method: dflash, model: x}\n"
    )
    return path


def shown(ran: Ran) -> dict[str, object]:
    assert ran.code == 0, ran.err
    return dict(yaml.safe_load(ran.out))


def test_every_value_is_shown_with_who_said_it_and_nothing_is_started(file: Path) -> None:
    ran = measured(
        "serve", "--config", file, "--max-num-seqs", "16", "--print-config",
        env={"KVANT_MAX_NUM_SEQS": "8", "KVANT_ENGINE_TIMEOUT": "5"},
    )  # fmt: skip
    assert ran.heavy == ()
    values = shown(ran)
    assert values["max_num_seqs"] == 16
    assert values["engine_timeout"] == 5.0
    assert set(values) == {o.name for o in ALL_OPTIONS if not o.hidden} - {"api_key"}
    lines = {line.split(":")[0].lstrip("# "): line for line in ran.out.splitlines()}
    assert lines["max_num_seqs"].endswith(
        f"# --max-num-seqs; over KVANT_MAX_NUM_SEQS 8; over {file}:2 4"
    )
    assert lines["engine_timeout"].endswith("# KVANT_ENGINE_TIMEOUT")
    assert lines["page_size"].endswith("# default")
    assert lines["max_model_len"].endswith("# default: the model's, or what fits")
    assert "2 not shown" in lines["api_key"]
    assert "secret" not in ran.out


def test_what_is_shown_is_a_file_that_says_the_same(file: Path, tmp_path: Path) -> None:
    first = kvant("serve", "--config", file, "--print-config")
    again = tmp_path / "again.yaml"
    again.write_text(first.out)
    second = shown(kvant("serve", "--config", again, "--print-config"))
    assert second.pop("api_key") == []  # keys were not shown
    assert second == shown(first)


def test_the_file_can_be_named_by_a_variable_and_serves_every_command(file: Path) -> None:
    for command in (("chat",), ("generate", "x"), ("plan",)):
        values = shown(kvant(*command, "--print-config", env={"KVANT_CONFIG": str(file)}))
        assert values["kv_cache_dtype_skip_layers"] == ["0", "-1"]
        assert "port" not in values


def test_a_plan_follows_file_and_variables_and_names_them(tmp_path: Path) -> None:
    model = write_model(tmp_path / "plain", config())
    path = tmp_path / "kvant.yaml"
    path.write_text(f"model: {model}\nkv_cache_dtype: int8_per_token_head\npage_size: 8\n")
    ran = kvant("plan", "--config", path, "--format", "json", env={"KVANT_STRICT": "1"})
    assert ran.code == 0, ran.err
    assert '"page_size": 8' in ran.out
    assert f"{path}:2: kv_cache_dtype int8_per_token_head" in ran.out


SENSELESS: tuple[tuple[tuple[str, ...], dict[str, str], str], ...] = (
    (("serve", "x", "--max-num-seqs", "0"), {}, "--max-num-seqs is 0"),
    (("serve", "x", "--generation-config", "other"), {}, "--generation-config"),
    (("serve", "x"), {"KVANT_MAX_N": "many"}, "KVANT_MAX_N is 'many'"),
    (("chat",), {"KVANT_MAX_MODEL_LENGTH": "1"}, "did you mean KVANT_MAX_MODEL_LEN"),
    (("serve", "x", "--served-model-name", ""), {}, "--served-model-name is empty"),
    (("serve", "x", "--allowed-origins", "x"), {}, "--allowed-origins '*'"),
    (("serve",), {}, "no model is named"),
    (("plan",), {}, "no model is named"),
    (("generate", "x", "--config", "/nowhere.yaml"), {}, "/nowhere.yaml cannot be read"),
    (
        ("plan", "x"),
        {"KVANT_SPECULATIVE_CONFIG": '{"method":"eagle"}'},
        "(asked by KVANT_SPECULATIVE_CONFIG)",
    ),
    (("serve", "x", "-tp", "0"), {}, "--tensor-parallel-size is 0"),
    (("plan", "x", "--calculate-kv-scales"), {}, "--calculate-kv-scales"),
)


def test_what_makes_no_sense_ends_with_one_block_before_anything_heavy() -> None:
    found = in_turn([(arguments, env) for arguments, env, _ in SENSELESS])
    for (arguments, _, says), ran in zip(SENSELESS, found, strict=True):
        assert ran.code == 2, arguments
        assert says in ran.err
        assert "Traceback" not in ran.err
        assert ran.heavy == [], arguments


def test_help_keeps_no_indentation_of_the_source() -> None:
    for command in ("generate", "chat", "bench throughput"):
        said = kvant(*command.split(), "--help", env={"COLUMNS": "400"}).out
        assert "  Every option is also" in said
        paragraphs = said.partition("Options:")[0].partition("Arguments:")[0].splitlines()[1:]
        assert all("    " not in line.strip() for line in paragraphs), paragraphs


def test_a_switch_that_a_file_turned_on_can_be_turned_off(tmp_path: Path) -> None:
    path = tmp_path / "kvant.yaml"
    path.write_text("strict: true\nenable_prefix_caching: false\n")
    values = shown(
        kvant("chat", "--config", path, "--no-strict", "--enable-prefix-caching", "--print-config")
    )
    assert (values["strict"], values["enable_prefix_caching"]) == (False, True)


def test_every_option_has_a_name_of_its_own_and_words_that_explain_it() -> None:
    names = [name for option in ALL_OPTIONS for name in option.names]
    flags = [flag for option in ALL_OPTIONS for flag in option.flags]
    assert len(set(names)) == len(names)
    assert len(set(flags)) == len(flags)
    assert all(option.help for option in ALL_OPTIONS)
    # None as a default means nothing by itself.
    assert [o.name for o in ALL_OPTIONS if o.default is None and not o.unset] == []


def test_python_knows_every_option_of_an_engine() -> None:
    hidden = {option.name for option in ENGINE_OPTIONS if option.hidden}
    names = {name for option in ENGINE_OPTIONS for name in option.names} - hidden
    assert set(LLMOptions.__annotations__) | {"model"} == names


def test_the_document_lists_the_options_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "configuration_doc.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
