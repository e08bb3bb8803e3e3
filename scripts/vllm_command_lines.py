"""Count how many `vllm serve` command lines of vLLM's documents and recipes `kvant serve` takes.

    git clone --depth 1 --branch v0.33.0 https://github.com/vllm-project/vllm
    git clone https://github.com/vllm-project/recipes && git -C recipes checkout 8959cf6
    python scripts/vllm_command_lines.py recipes vllm/recipes vllm/docs vllm/examples

A line counts once, in the first folder that has it. Its flags and their values are read as `kvant serve`
reads them; whether the model exists, fits and starts is another question. --flags writes each flag's count
as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from typer.main import get_command

from kvant.cli.main import app
from kvant.errors import BadValue

_START = re.compile(r"vllm serve\b")
_CONTINUES = re.compile(r"\\\s*$")
_ENDS = re.compile(r"&{1,2}|\|{1,2}|;|`|[012&]?>{1,2}.*")
_PLACEHOLDER = re.compile(r"[/$<{]")
_MOST_QUOTED_LINES = 25
_MOST_LONE_WORDS = 6


def texts(folder: Path) -> Iterator[str]:
    """The texts of a folder's files that have such a line; of notebooks, their cells."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or ".git" in path.relative_to(folder).parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if "vllm serve" not in text:
            continue
        if path.suffix == ".ipynb":
            with contextlib.suppress(ValueError, KeyError):
                text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        yield text


def written(text: str) -> Iterator[tuple[str, str]]:
    """What stands before a command in its line, and the command with its continued lines joined."""
    rest = iter(text.split("\n"))
    for line in rest:
        if not (found := _START.search(line)):
            continue
        before, command = line[: found.start()], line[found.start() :]
        quoted = 0
        while True:
            is_open = (command.count("'") - command.count("\\'")) % 2 and "'" not in before
            if not _CONTINUES.search(command) and not (is_open and quoted < _MOST_QUOTED_LINES):
                break
            quoted += not _CONTINUES.search(command)
            more = next(rest, None)
            if more is None:
                break
            command = f"{_CONTINUES.sub('', command)} {more.strip()}"
        yield before, command


def arguments(before: str, command: str) -> tuple[str, ...]:
    """The words behind `vllm serve`, up to the end of the command; nothing for prose."""
    quote = before.rstrip()[-1:]
    if quote in ("`", '"', "'") and before.endswith(quote) and not before.endswith("```"):
        command = command.split(quote)[0]
    try:
        words = shlex.split(command, comments=True)[2:]
    except ValueError:
        return ()
    found: list[str] = []
    for word in words:
        if _ENDS.fullmatch(word):
            break
        if word.strip() and word != "...":
            found.append(word.rstrip("`;"))
        if word.endswith(("`", ";")):
            break
    if not found:
        return ()
    is_named = found[0].startswith("-") or bool(_PLACEHOLDER.search(found[0]))
    lone = [b for a, b in pairwise(found) if a[:1] != "-" and b[:1] != "-"]
    if not is_named and not (len(found) > 1 and found[1].startswith("-")):
        return ()
    if not found[0].startswith("-") and len(lone) > _MOST_LONE_WORDS:
        return ()
    return tuple(found)


def refusals(words: tuple[str, ...]) -> list[str]:
    """Why `kvant serve` does not take these arguments."""
    serve: Any = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    refused: list[BadValue] = []
    with contextlib.redirect_stderr(io.StringIO()):
        list(serve.read(words, refused))
    return [str(one) for one in refused]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--flags", type=Path, help="write each flag's count to this file")
    given = parser.parse_args()
    seen: set[tuple[str, ...]] = set()
    total: Counter[str] = Counter()
    flags: Counter[str] = Counter()
    for folder in given.folders:
        counts: Counter[str] = Counter()
        for text in texts(folder):
            for before, command in written(text):
                words = arguments(before, command)
                if not words or words in seen:
                    continue
                seen.add(words)
                why = refusals(words)
                counts["lines"] += 1
                counts["taken"] += not why
                counts["with an unknown flag"] += any("has no option" in one for one in why)
                flags.update(
                    {w.split("=")[0].replace("_", "-") for w in words if w.startswith("--")}
                )
        print(f"{folder}: {dict(counts)}")
        total += counts
    print(f"all: {dict(total)}, refused with a reason: {total['lines'] - total['taken']}")
    if given.flags is not None:
        given.flags.write_text(
            json.dumps(dict(flags.most_common()), indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
