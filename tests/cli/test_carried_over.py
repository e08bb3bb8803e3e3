"""Command lines of other programs, and friendlier spellings of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from kvant.cli.foreign_flags import VALUES, VLLM
from kvant.cli.main import app
from kvant.errors import BadValue
from tests.cli.command import Ran, kvant


def translated(*args: str, command: str = "serve") -> list[str]:
    found = get_command(app).commands[command]  # type: ignore[attr-defined]
    return list(found.translated(args))


def shown(ran: Ran) -> dict[str, object]:
    assert ran.code == 0, ran.err
    return dict(yaml.safe_load(ran.out))


def test_a_command_line_of_vllms_documents_starts_the_same_server() -> None:
    ran = kvant(
        "serve", "--model", "smollm2", "--max_model_len", "4k", "--max-num-seqs=1K",
        "--enforce-eager", "--enable-chunked-prefill", "--disable-log-requests",
        "--load-format", "safetensors", "--allowed-origins", '["*"]', "--trust-remote-code",
        "--gpu_memory_utilization", "0.8", "--max-num-batched-tokens", "auto", "--max-logprobs", "10",
        "--generation-config", "vllm", "--enable-log-requests", "--print-config",
    )  # fmt: skip
    values = shown(ran)
    assert values["model"] == "smollm2"
    assert values["max_model_len"] == 4000
    assert values["max_num_seqs"] == 1024
    assert values["load_format"] == "auto"
    assert values["gpu_memory_utilization"] == 0.8
    assert values["max_num_batched_tokens"] is None
    assert values["max_top_logprobs"] == 10
    assert values["generation_config"] == "none"
    assert values["log_requests"] is True
    told = [line for line in ran.err.splitlines() if "has no effect" in line]
    assert [line.split()[1] for line in told] == [
        "--enforce-eager", "--enable-chunked-prefill", "--disable-log-requests",
        "--load-format", "--trust-remote-code",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--max-model-len", "25.6k"], ["--max-model-len", "25600"]),
        (["--max-model-len", "2M"], ["--max-model-len", str(2 * 2**20)]),
        (["--max_model_len=8192"], ["--max-model-len", "8192"]),
        (["--max-model-len", "auto"], []),
        (["--port", "auto"], []),
        (["--tokenizer-mode", "deepseek_v4", "--tool-parser-plugin", "own.py"], []),
        (["--hf-overrides", '{"a": {"b": 1}}'], ["--hf-overrides", '{"a": {"b": 1}}']),
        (["-dp", "4", "-dpl", "2", "-dpb", "ray"], ["--ray", "--num-replicas", "4"]),
        (["--seed", "-5"], ["--seed", "-5"]),
        (["--kv_cache_dtype", "fp8_e5m2"], ["--kv-cache-dtype", "fp8_e5m2"]),
        (["--kv-cache-rule", "0-3:k=fp8_e5m2"], ["--kv-cache-rule", "0-3:k=fp8_e5m2"]),
        (["m", "--", "--strange"], ["m", "--", "--strange"]),
        (["-tp", "1"], ["-tp", "1"]),
        (["--no-strict", "--data-parallel-size", "1"], ["--no-strict"]),
        (["m", "-dp", "4"], ["m", "--ray", "--num-replicas", "4"]),
        (["--model=m"], ["m"]),
        (
            ["m", "--served-model-name", "a", "b", "--api-key", "k"],
            ["m", "--served-model-name", "a", "--served-model-name", "b", "--api-key", "k"],
        ),
        (["--served-model-name", "a", "m"], ["--served-model-name", "a", "m"]),
        (["m", "--cudagraph-capture-sizes", "1", "2", "4", "--port", "1"], ["m", "--port", "1"]),
        (["-dp=1", "-ep", "-O3", "-cc.mode=3", "-ac", "{}"], []),
        (["--no-enable-flashinfer-autotune", "--no-async-scheduling", "-tp=2"], ["-tp", "2"]),
        (["--compilation_config.pass_config.fuse=true", "--limit-mm-per-prompt.video", "0"], []),
        (
            [
                "--speculative-config.method",
                "ngram",
                "--speculative_config.num-speculative-tokens=3",
            ],
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
        ),
        (
            ["--spec-method", "ngram", "--spec-tokens=3", "--tensor-parallel", "1"],
            [
                "--tensor-parallel-size",
                "1",
                "--speculative-config",
                '{"method": "ngram", "num_speculative_tokens": 3}',
            ],
        ),
        (["--attention-backend", "FLASH_ATTN"], ["--attention-backend", "auto"]),
        (["--attention-backend", "TRITON_ATTN"], ["--attention-backend", "triton"]),
        (["-q", "awq", "--dtype", "half"], ["--dtype", "float16"]),
        (["--kv-cache-memory-bytes", "1073741824"], ["--kv-cache-memory", "1073741824"]),
        (
            ["--kv-offloading-size", "5", "--kv-offloading-backend", "native"],
            ["--kv-offload", "host:5GiB"],
        ),
        (
            [
                "--kv-events-config",
                '{"publisher": "zmq", "topic": "t", "endpoint": "tcp://*:7000"}',
            ],
            ["--kv-events", "tcp://*:7000,topic=t"],
        ),
        (
            [
                "--kv-transfer-config",
                '{"kv_connector": "OffloadingConnector", '
                '"kv_connector_extra_config": {"cpu_bytes_to_use": 9}}',
            ],
            ["--kv-offload", "host:9"],
        ),
        (["--runner=pooling", "--convert", "auto"], ["--task", "embed"]),
        (["--convert", "embed"], ["--task", "embed"]),
        (["--runner", "generate"], ["--task", "generate"]),
    ],
    ids=str,
)
def test_spellings_are_read(given: list[str], read: list[str]) -> None:
    assert translated(*given) == read


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--strange-flag"], ["has no option --strange-flag", "kvant serve --help"]),
        (["--strange-flag", "--strange", "--strange"], ["2 flags", "has no option --strange\n"]),
        (["--max-model-length", "5"], ["did you mean --max-model-len?"]),
        (["-pp", "2"], ["--pipeline-parallel-size 2", "--tensor-parallel-size"]),
        (["--convert=classify"], ["classify", "--task embed"]),
        (["--kv-transfer-config", '{"kv_connector": "Far"}'], ["other engines", "--kv-offload"]),
        (["--kv-events-config", "{"], ["is not JSON"]),
        (["--strange", "--nnodes", "2"], ["2 flags", "--strange", "--nnodes 2", "one machine"]),
    ],
    ids=str,
)
def test_what_is_not_served_has_a_reason_and_a_way_out(given: list[str], words: list[str]) -> None:
    with pytest.raises(BadValue) as refused:
        translated(*given)
    for word in (*words, *(() if "is not JSON" in words else ("way out",))):
        assert word in str(refused.value)


def test_every_foreign_flag_maps_has_no_effect_or_is_refused() -> None:
    ours = {
        flag
        for param in get_command(app).commands["serve"].params  # type: ignore[attr-defined]
        for flag in (*param.opts, *param.secondary_opts)
    }
    for flag, one in VLLM.items():
        assert flag not in ours, "it is Kvant's own"
        assert one.becomes or one.no_effect or one.refused
        assert set(one.becomes) <= ours
        assert not one.neutral or one.refused or one.becomes
        assert "_" not in flag
    assert set(VALUES) <= ours


def test_every_flag_of_vllms_documents_is_known() -> None:
    found = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    counted = json.loads((Path(__file__).parent / "vllm_flags.json").read_text())["flags"]
    assert len(counted) > 200
    for flag in counted:
        refused: list[BadValue] = []
        list(found.read([flag, "1"], refused))
        assert not [one for one in refused if "has no option" in str(one)], flag
    refused = []
    list(found.read(["--no-such-flag", "1"], refused))
    assert "has no option" in str(refused)


def test_a_line_of_vllm_is_translated_as_far_as_it_can_be() -> None:
    line = "VLLM_USE_V1=1 vllm serve m/one -tp 2 --port 9000 -pp 4 --pooler-config '{}' --enforce-eager"
    ran = kvant("serve", "--from-vllm", line)
    assert ran.code == 2
    assert ran.out == "kvant serve m/one -tp 2 --port 9000\n"
    for words in (
        "2 flags",
        "-size 4 is not served: a model is not divided by layers",
        "--pooler-config",
        "eager has no",
    ):
        assert words in ran.err
    ran = kvant("serve", "--from-vllm", "vllm serve m/one --max_model_len 4k")
    assert (ran.code, ran.out) == (0, "kvant serve m/one --max-model-len 4000\n")


@pytest.mark.parametrize(
    ("kind", "line", "out"),
    [
        (
            "vllm",
            "python -m vllm.entrypoints.openai.api_server --model a/b --port 80",
            "a/b --port 80",
        ),
        (
            "vllm",
            "docker run -p 1:2 vllm/vllm-openai:latest --model a/b --port 80",
            "a/b --port 80",
        ),
        ("vllm", "A=1 vllm serve vllm/x --port 80", "vllm/x --port 80"),
        ("vllm", "vllm serve vllm/x --port $PORT", "vllm/x --port '$PORT'"),
        ("llama-server", "./build/bin/llama-server -m x.gguf --port 80", "x.gguf --port 80"),
        ("llama-server", "docker run ghcr.io/ggml-org/llama.cpp:server -m x.gguf", "x.gguf"),
    ],
)
def test_what_starts_the_other_server_is_no_part_of_its_line(
    kind: str, line: str, out: str
) -> None:
    assert kvant("serve", f"--from-{kind}", line).out == f"kvant serve {out}\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-model-len", "5x"), "--max-model-len is 5x"),
        (("--port=",), "--port is empty"),
        (("--shutdown-timeout", "soon"), "it must be a number"),
    ],
)
def test_a_number_that_is_none_is_refused_with_its_flag(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(BadValue, match=words):
        translated(*flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--served-model-name",), "--served-model-name needs a value"),
        (("--api-key", "--port", "80"), "--port comes behind it"),
        (("--model",), "--model needs a value"),
        (("--data-parallel-size",), "--data-parallel-size needs a value"),
    ],
)
def test_a_flag_without_its_value_is_refused(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(BadValue, match=words):
        translated(*flags)


def test_a_value_may_begin_like_a_flag() -> None:
    given = ["--seed", "-1", "--stop", "--", "--stop", "--END"]
    assert translated(*given, command="generate") == given


@pytest.mark.parametrize("command", ["plan", "serve", "chat", "calibrate", "tune", "eval"])
@pytest.mark.parametrize(
    "given", [("X",), ("--model", "X"), ("--model=X",), ("-m", "X"), ("-m=X",)]
)
def test_every_command_that_takes_a_model_takes_its_flags(
    command: str, given: tuple[str, ...]
) -> None:
    assert translated(*given, command=command) == ["X"]


def test_a_command_without_a_model_has_no_such_flags() -> None:
    for flag in ("--model", "-m"):
        with pytest.raises(BadValue, match=f"kvant doctor has no option {flag}"):
            translated(flag, "X", command="doctor")


def test_measurements_of_speed_name_themselves_and_take_recorded_flags() -> None:
    ran = kvant("bench", "attention", "--nope")
    assert "kvant bench attention has no option --nope" in ran.err
    assert "kvant bench attention --help" in ran.err
    ran = kvant("bench", "throughput", "--format", "no-format", "-m", "smollm2")
    assert ran.code == 2
    assert "no-format" in ran.err


def test_other_commands_take_the_spellings_but_not_vllms_flags() -> None:
    assert translated("--max_model_len", "2k", command="chat") == ["--max-model-len", "2000"]
    with pytest.raises(BadValue, match="kvant chat has no option --enforce-eager"):
        translated("--enforce-eager", command="chat")


@pytest.mark.parametrize(
    "wrong",
    [
        ("serve",),
        ("serve", "m", "--host", "0.0.0.0"),
        ("serve", "m", "--allowed-origins", "app.example"),
        ("serve", "m", "--kv-cache-dtype", "fp7"),
        ("serve", "m", "--attention-backend", "strange"),
        ("generate", "x", "--kv-cache-dtype", "fp7"),
    ],
    ids=" ".join,
)
def test_print_config_refuses_what_a_start_refuses(wrong: tuple[str, ...]) -> None:
    started = kvant(*wrong)
    printed = kvant(*wrong, "--print-config")
    assert (started.code, printed.code) == (2, 2)
    assert printed.err == started.err
    assert printed.out == ""


def test_help_lists_the_flags_in_groups() -> None:
    ran = kvant("serve", "--help")
    titles = [line for line in ran.out.splitlines() if line and line[0] != " " and line[-1] == ":"]
    assert titles == [
        "Arguments:", "Options:", "KV cache:", "Engine:", "Server:", "Limits:", "Replicas:"
    ]  # fmt: skip
