"""The documentation as a site: it builds, is complete, and the commands that it shows are right."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from kvant.cli.main import app
from kvant.errors import BadValue
from kvant.server.api_error import CODES
from tests.cli.command import kvant
from tests.server.harness import RUN, Server

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def _nav(entries: list[object]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        assert isinstance(entry, dict)
        for value in entry.values():
            found += _nav(value) if isinstance(value, list) else [value]
    return found


def _pages() -> list[str]:
    return _nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def test_every_page_has_a_place_in_the_site_and_in_llms_txt() -> None:
    pages = _pages()
    assert len(pages) == len(set(pages))
    assert all((DOCS / page).is_file() for page in pages)
    written = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if "benchmarks" not in p.parts}
    assert written - {*pages} == set()
    text = (DOCS / "llms.txt").read_text()
    assert all(f"]({page})" in text for page in pages)


def test_the_reference_is_written_from_the_server() -> None:
    command = [sys.executable, ROOT / "scripts" / "reference_doc.py", "--check"]
    assert subprocess.run(command).returncode == 0, "run python scripts/reference_doc.py"


def test_every_code_of_an_error_is_explained() -> None:
    rooms = (ROOT / "src" / "kvant" / name for name in ("server", "cluster"))
    sources = "".join(p.read_text() for room in rooms for p in room.rglob("*.py"))
    found = set(re.findall(r'\bcode="([a-z_]+)"', sources))
    kinds = {"numerical_error", "engine_fault", "engine_died", "shutting_down"}
    states = {f"engine_{state}" for state in ("starting", "restarting", "stopped")}
    assert {*CODES} == found | kinds | states


def _commands() -> list[tuple[str, str]]:
    """Page and command of every line that runs kvant, with continued lines joined."""
    found = []
    for page in (ROOT / "README.md", *(DOCS / name for name in _pages())):
        for block in re.findall(r"```[a-z]*\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s#.*$", "", line).strip()
                if re.match(r"(\.venv/bin/)?kvant [a-z]", line) and ".." not in line:
                    found.append((page.name, line))
    return found


def test_the_commands_of_the_docs_have_flags_that_exist() -> None:
    commands = _commands()
    assert len(commands) > 20
    known = get_command(app).commands  # type: ignore[attr-defined]
    for page, line in commands:
        name, *arguments = shlex.split(line)[1:]
        if arguments and arguments[0].startswith("--from-"):
            assert kvant(name, *arguments).code == 0, line
            continue
        if "[" in line or "|" in arguments or name not in known or hasattr(known[name], "commands"):
            continue
        arguments = arguments[: arguments.index("|")] if "|" in arguments else arguments
        try:
            translated = getattr(known[name], "_translated", iter)(arguments)
            known[name].make_parser(_context(known[name])).parse_args(list(translated))
        except BadValue as fault:
            raise AssertionError(f"{page}: {line}: {fault}") from None


def _context(command: object) -> object:
    import typer

    return typer.Context(command, resilient_parsing=True)  # type: ignore[arg-type]


def test_the_quickstart_fits_on_a_screen() -> None:
    assert len((DOCS / "index.md").read_text().splitlines()) <= 50


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quickstart_runs(server_of_a_command: Callable[[str], Server]) -> None:
    page = (DOCS / "index.md").read_text()
    lines = [line for name, line in _commands() if name == "index.md"]
    *others, serve = lines
    assert [line.split()[1] for line in lines] == ["doctor", "chat", "plan", "serve"]
    said = {}
    for line in others:
        name, *arguments = shlex.split(line)[1:]
        done = _run(name, *arguments, text="Hello\n" if name == "chat" else "")
        assert done.returncode == 0, (line, done.stderr)
        said[name] = done.stdout
    assert "cpu" in said["doctor"]
    assert len(said["chat"].split()) > 1
    assert "fp8_per_token_head" in said["plan"]

    server = server_of_a_command(serve)
    (path, body) = re.findall(r"curl 127\.0\.0\.1:8000(\S+) .*?-d '(.*?)'", page, re.DOTALL)[0]
    answer = server.post(path, json.loads(body))
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"]
    assert server.get("/").status == 200

    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run((sys.executable, "-c", snippet), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stored = int(done.stdout.split()[-1])
    assert f"{stored:,} bytes per token" in said["plan"]


def _run(*arguments: str, text: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-c", RUN, *arguments)
    return subprocess.run(command, input=text, capture_output=True, text=True)


@pytest.fixture
def server_of_a_command() -> Iterator[Callable[[str], Server]]:
    """Starts the server of a line of the docs, on a free port and with little memory."""
    with ExitStack() as ends:

        def start(line: str) -> Server:
            model, *flags = shlex.split(line)[2:]
            server = Server(Path(model), (*flags, "--port", "0"), is_real=True)
            return ends.enter_context(server)

        yield start


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed (pip install kvant[docs])")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    front = (tmp_path / "index.html").read_text()
    assert "Quickstart" in front
    assert "fonts.googleapis" not in front, "nothing is fetched from elsewhere"
