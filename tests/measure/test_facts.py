"""What is kept beside a measurement."""

from __future__ import annotations

import shlex
import sys

import pytest

from kvant.measure.facts import command_line


def test_a_command_is_kept_as_a_shell_takes_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["--case", "1 x 8192", "--speculative-config", '{"method": "ngram"}']
    monkeypatch.setattr(sys, "argv", ["elsewhere/kvant", *typed])
    assert shlex.split(command_line("kvant")) == ["kvant", *typed]
    assert command_line("python -m it", ["a b"]) == "python -m it 'a b'"


def test_a_command_without_arguments_ends_with_its_name() -> None:
    assert command_line("kvant demo", []) == "kvant demo"
