"""`kvant plan` as a command: cost, exit codes, what it prints and where."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadValue
from kvant.kv.dtype import KVDtype
from kvant.kv.groups import LONGEST
from kvant.kv.names import known_names
from kvant.models.gguf_import import import_gguf
from kvant.plan.plan import PlanRequest
from kvant.plan.speculative_config import parse_speculative_config
from tests.acceptance.models import LLAMA, config, write_model
from tests.cli.command import in_turn, kvant, measured
from tests.models import tiny
from tests.models.tiny_gguf import write_gguf
from tests.planned import plan_of

LLAMA_70B = config(
    LLAMA,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_model(tmp_path / "plain", config())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with all of its weights."""
    return tiny.build("llama", tmp_path_factory.mktemp("whole"))


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    ran = measured("--help")
    assert ran.code == 0
    assert "plan" in ran.out
    assert ran.heavy == ()
    assert ran.cpu_s < 1.0


def test_no_other_format_is_offered_where_rules_decide_every_layer(
    plain: Path, tmp_path: Path
) -> None:
    some, policy = "if --kv-cache-dtype were", tmp_path / "policy.yaml"
    for layers, has_table in (("0", True), ("full", False)):
        policy.write_text(f'rules:\n  - {{layers: "{layers}", k: fp8, v: fp8}}\n')
        ran = kvant("plan", plain, "--kv-cache-policy", policy, "--kv-cache-memory", "64MiB")
        assert ran.code == 0, ran.err
        assert (some in ran.out) is has_table
        assert ("rules decide every layer" in ran.out) is not has_table


@pytest.mark.parametrize("group", [(), ("bench",)], ids=str)
def test_no_summary_of_a_command_is_cut(group: tuple[str, ...]) -> None:
    ran = kvant(*group, "--help")
    assert ran.code == 0
    _, found, summaries = ran.out.partition("Commands:")
    assert found
    assert "..." not in summaries


def test_a_70b_config_is_planned_in_little_time_and_memory(tmp_path: Path) -> None:
    model = write_model(tmp_path / "70b", LLAMA_70B)
    ran = measured(
        "plan", model, "--kv-cache-dtype", "fp8", "--memory", "160GB", "--device", "sm_90",
        "--attention-backend", "reference",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.heavy == ()
    assert ran.cpu_s < 3
    assert ran.peak_mib < 300
    assert "fp8_e4m3" in ran.out


def test_the_estimate_of_a_70b_model_is_the_published_size(tmp_path: Path) -> None:
    model = write_model(tmp_path / "70b", LLAMA_70B)
    body = json.loads(kvant("plan", model, "--format", "json").out)
    assert body["memory"]["weights_source"] == "estimated"
    assert body["memory"]["weights_bytes"] == pytest.approx(2 * 70.55e9, rel=0.02)


def test_json_has_the_documented_keys_and_nothing_else_on_stdout(plain: Path) -> None:
    ran = kvant("plan", plain, "--format", "json", "--memory", "1GiB")
    body = json.loads(ran.out)
    documented = (Path(__file__).parents[2] / "docs" / "plan-json.md").read_text()
    for key in body:
        assert f"`{key}" in documented
    for part in (body["target"]["layers"][0], body["target"]["layers"][0]["k"], body["memory"]):
        for key in part:
            assert key in documented, key
    assert body["schema"] == 1


def test_every_format_that_can_be_asked_for_is_compared_and_said_to_be_what_it_is(
    plain: Path,
) -> None:
    wide, narrow = (
        kvant("plan", plain, "--memory", "1GiB", env={"COLUMNS": width}).out
        for width in ("160", "80")
    )
    for dtype in KVDtype:
        summary = re.escape(dtype.format.summary)
        named = dtype.format.name in known_names() and not dtype.format.takes_rounding
        assert bool(re.search(rf"^{dtype} .*[0-9]x +{summary} *$", wide, re.MULTILINE)) == named
        assert bool(re.search(rf"^{dtype} .*[0-9]x *$", narrow, re.MULTILINE)) == named


def test_no_title_of_the_alternatives_is_cut_where_rules_are_kept(plain: Path) -> None:
    asked = ("plan", plain, "--memory", "1GiB", "--kv-cache-dtype-skip-layers", "0")
    for width in ("80", "100", "160"):
        table = kvant(*asked, env={"COLUMNS": width}).out
        titles = table[table.index("if --kv-cache-dtype were") :].splitlines()[:2]
        assert titles[1].startswith("(rules and skips kept)")
        assert re.search(r"B/token +tokens a GiB +tokens in .* +vs 16 bit", titles[1])


def test_the_plan_shows_what_fits_by_the_formats_of_weights_and_cache(tmp_path: Path) -> None:
    """An 8B model on a card of 24 GB holds 200,000 tokens with 4 bits for both."""
    shape = Path(__file__).parents[1] / "configs" / "qwen3-8b.json"
    model = write_model(tmp_path / "8b", json.loads(shape.read_text()))
    asked = ("plan", model, "--device", "sm_90", "--memory", "24GB")
    table = kvant(*asked, env={"COLUMNS": "100"}).out
    lines = table[table.index("tokens that fit, by") :].splitlines()[1:]
    assert lines[0].split() == ["weights", "bfloat16", "fp8_e4m3", "int4_per_token_head"]
    rows = {line.split()[0]: line.split()[3:] for line in lines[1:6]}
    assert list(rows) == ["none", "fp8", "fp8_dynamic", "int8", "int4"]
    tokens = {name: [int(n.replace(",", "")) for n in found] for name, found in rows.items()}
    assert tokens["int4"][2] >= 200_000
    for found in tokens.values():
        assert found == sorted(found)
    chosen = kvant(*asked, "--quantization", "int4", env={"COLUMNS": "100"}).out
    assert f"room for {tokens['int4'][0]:,} tokens" in chosen


def test_a_model_of_windows_alone_has_room_for_any_length(tmp_path: Path) -> None:
    shape = Path(__file__).parents[1] / "configs" / "mistral-7b-v0.1.json"
    model = write_model(tmp_path / "7b", json.loads(shape.read_text()))
    ran = kvant("plan", model, "--device", "sm_90", "--memory", "80GB", "--expected-length", "9k")
    assert ran.code == 0, ran.err
    assert re.search(r"^room for one sequence of any length, \d+ sequences of 9000$", ran.out, re.M)
    assert re.search(r"^bfloat16 +131,072 +8,192 +any ", ran.out, re.M)
    assert str(LONGEST) not in ran.out.replace(",", "")


def test_a_model_that_does_not_fit_is_still_a_plan(tmp_path: Path) -> None:
    model = write_model(tmp_path / "70b", LLAMA_70B)
    ran = kvant("plan", model, "--memory", "80GiB", "--format", "json")
    assert ran.code == 0
    body = json.loads(ran.out)
    assert body["memory"]["capacity_tokens"] == 0
    assert any("missing" in line for line in body["warnings"])


REFUSED = (
    (("--kv-cache-dtype", "fp9"), "did you mean"),
    (("--kv-cache-dtype", "int8"), "did you mean int8_per_token_head?"),
    (("--kv-cache-dtype", "int4"), "did you mean int4_per_token_head or"),
    (("--kv-cache-dtype", "TurboQuant"), "did you mean turboquant_k8"),
    (("--kv-cache-dtype", "fp8/"), "no KV cache format"),
    (("--device", "sm_12"), "sm_90"),
    (("--memory", "lots"), "--memory"),
    (("--attention-backend", "magic"), "reference"),
    (("--speculative-config", "{"), "not JSON"),
    (("--kv-cache-policy", "/nowhere.yaml"), "/nowhere.yaml"),
    (("--calculate-kv-scales",), "fp8_per_token_head"),
    (("--tensor-parallel-size", "3"), "one device"),
    (("--max-model-len", "1000000"), "4096"),
    (("--kv-missing-scales", "zero"), "error"),
    (("--dtype", "int8"), "bfloat16"),
    (("--plot", "plan.pdf"), ".svg"),
    (("--nonsense",), "--nonsense"),
    (("--page-size", "0"), "page-size"),
)


def test_what_the_user_can_mend_ends_with_2_a_message_and_no_torch(plain: Path) -> None:
    found = in_turn([(("plan", plain, *arguments), {}) for arguments, _ in REFUSED])
    for (arguments, says), ran in zip(REFUSED, found, strict=True):
        assert ran.code == 2, arguments
        assert says in ran.err
        assert "Traceback" not in ran.err
        assert ran.out == ""
        assert ran.heavy == [], arguments


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{", '{"a": NaN', "\x00", '{"model_type": "new"}']
)
def test_a_directory_that_is_no_model_ends_with_2(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    ran = kvant("plan", tmp_path)
    assert ran.code == 2
    assert ran.err.startswith("kvant: error:")
    assert "Traceback" not in ran.err


def test_a_gguf_file_is_planned_alike_before_and_after_it_is_converted(tmp_path: Path) -> None:
    """A GGUF file has no scales: the plan checks everything without weight files, and warns of nothing."""
    file, cache = write_gguf(tmp_path / "m.gguf"), {"KVANT_CACHE": str(tmp_path / "cache")}
    asked = ("plan", file, "--kv-cache-dtype", "fp8", "--memory", "1GiB", "--format", "json")
    before = kvant(*asked, env=cache).out
    assert json.loads(before)["target"]["layers"][0]["k"]["scale"]["state"] == "uncalibrated"
    assert "not checked" not in before
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KVANT_CACHE", cache["KVANT_CACHE"])
        import_gguf(file)
    assert kvant(*asked, env=cache).out == before


def test_an_unknown_architecture_names_itself_and_the_known_ones(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", config(architectures=["NewForCausalLM"], model_type="new"))
    ran = kvant("plan", model)
    assert ran.code == 2
    assert "NewForCausalLM" in ran.err
    assert "llama" in ran.err.lower()


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_plot_is_a_picture(plain: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"plan.{suffix}"
    ran = kvant("plan", plain, "--kv-cache-dtype", "fp8/nvfp4", "--plot", picture)
    assert ran.code == 0, ran.err
    start = picture.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start


def test_the_table_says_who_decided_and_the_lines_that_run_it(whole: Path) -> None:
    ran = kvant("plan", whole, "--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0",
                "--memory", "1GiB", "--dtype", "bfloat16")  # fmt: skip
    assert "skip: --kv-cache-dtype-skip-layers 0" in ran.out
    assert "explicit: --kv-cache-dtype fp8" in ran.out
    command = "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 --dtype bfloat16"
    assert f"kvant serve {whole} {command}" in ran.out.replace("'", "")


def test_what_cannot_run_is_planned_without_lines_that_run_it(plain: Path, whole: Path) -> None:
    for ran in (kvant("plan", plain), kvant("plan", whole, "--kv-cache-memory", "1KiB")):
        assert ran.code == 0
        assert "warning: " in ran.out
        assert "kvant serve" not in ran.out


@pytest.mark.parametrize(
    ("format", "says"),
    [
        ("float32", "2.00x larger than 16 bit"),
        ("bfloat16", "in total, as 16 bit"),
        ("fp8", "2.00x smaller than 16 bit"),
    ],
)
def test_what_is_larger_than_16_bit_is_not_called_smaller(
    plain: Path, format: str, says: str
) -> None:
    ran = kvant("plan", plain, "--kv-cache-dtype", format, "--kv-cache-memory", "8MiB")
    assert says in ran.out
    assert "tokens in 8.00 MiB" in ran.out  # all formats are compared in the same bytes


def test_what_a_user_should_hear_is_no_obstacle(whole: Path) -> None:
    made = plan_of(PlanRequest(str(whole), DeviceFacts(DeviceKind.CPU), memory_bytes=2**30))
    local = replace(made.target.local, notes=("the hub was not asked",))
    told = replace(made, target=replace(made.target, local=local))
    assert "the hub was not asked" in told.warnings
    assert told.can_run
    assert not replace(
        told, target=replace(told.target, local=replace(local, obstacles=("it has no weights",)))
    ).can_run


@pytest.mark.parametrize("tokens", [1, 4])
def test_drafts_that_no_step_holds_are_refused_with_a_step_that_does(
    tmp_path: Path, tokens: int
) -> None:
    whole = write_model(tmp_path / "whole", config(), tensors={"a.weight": (1.0,)})
    drafts = parse_speculative_config({"method": "ngram", "num_speculative_tokens": 4})
    asked = PlanRequest(
        str(whole), DeviceFacts(DeviceKind.CPU), speculative=drafts, max_num_batched_tokens=tokens
    )
    with pytest.raises(BadValue, match="more than a step holds") as refused:
        plan_of(asked)
    larger, fewer = refused.value.ways_out
    assert larger.arguments == ("--max-num-batched-tokens", "5")
    assert ("fewer" in fewer.text) == (tokens > 1)  # none is no number of drafts
    plan_of(replace(asked, max_num_batched_tokens=5))


def test_the_command_line_of_an_engine_can_be_planned(plain: Path) -> None:
    """Options that decide how much memory pages get are the plan's own."""
    one = json.loads(
        kvant("plan", plain, "--max-model-len", "64", "--max-num-seqs", "1", "--format", "json").out
    )
    four = json.loads(
        kvant(
            "plan", plain, "--max-model-len", "64", "--max-num-seqs", "4",
            "--max-num-batched-tokens", "32", "--no-enable-prefix-caching", "--format", "json",
        ).out
    )  # fmt: skip
    assert (one["memory"]["capacity_tokens"], four["memory"]["capacity_tokens"]) == (64, 256)


def test_a_bound_is_shown_with_all_its_digits(plain: Path) -> None:
    ran = kvant("plan", plain, "--kv-recent-tokens", "-1")
    assert ran.code == 2
    assert "from 0 to 1048576" in ran.err


def test_the_table_says_why_it_refuses_a_format(plain: Path) -> None:
    lines = kvant("plan", plain).out.splitlines()
    refused = [line.split()[0] for line in lines if line.split()[1:5] == ["-", "-", "-", "refused"]]
    assert refused == ["int4_feedback", "int4_short_feedback"]
    (told,) = (line for line in lines if line.startswith("refused: "))
    assert told.startswith(f"refused: {', '.join(refused)}: ")
    assert told.endswith(" which kvant calibrate writes")


def test_an_option_of_servers_is_said_to_be_one(plain: Path) -> None:
    ran = kvant("plan", plain, "--port", "1")
    assert ran.code == 2
    assert "kvant plan has no option --port; kvant serve has it" in ran.err
