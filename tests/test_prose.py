"""Plain English in docs and sources, docs that fit 120 columns, and links that work.

`prose_allowance.json` says how many findings each file may still have. A file that is not in it may have
none. `python -m tests.test_prose` lowers the counts to what is found; it never raises one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWANCE = Path(__file__).parent / "prose_allowance.json"
PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in ("docs", "benchmarks", "src") for page in (ROOT / folder).rglob("*.md")),
]
SOURCES = [
    path
    for folder in ("src/kvant", "benchmarks", "scripts", "recipes")
    for kind in ("*.py", "*.cu", "*.cuh")
    for path in (ROOT / folder).rglob(kind)
]
COLUMNS = 120

_VAGUE = re.compile(
    r"\b(?:those that|whoever|whatever|nobody|somebody|anybody|everybody|so many)\b", re.IGNORECASE
)
_FRONTED = re.compile(r"\bOf\b")  # a capital: the sentence begins with it
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def phrases(text: str) -> int:
    """Number of phrases that hide the subject of a sentence."""
    return len(_VAGUE.findall(text)) + len(_FRONTED.findall(text))


def long_lines(text: str) -> int:
    """Number of lines that are too long. A row of a table has to be one line."""
    return sum(len(line) > COLUMNS and not line.startswith("|") for line in text.splitlines())


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page whose file or heading does not exist."""
    found = []
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text("utf-8"))):
            found.append(target)
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def findings(count: Callable[[str], int], files: list[Path]) -> dict[str, int]:
    """Files with findings, by name."""
    counted = {relative(path): count(path.read_text(encoding="utf-8")) for path in sorted(files)}
    return {name: number for name, number in counted.items() if number}


RULES: dict[str, tuple[Callable[[str], int], list[Path]]] = {
    "phrases": (phrases, [*PAGES, *SOURCES]),
    "long_lines": (long_lines, PAGES),
}


@pytest.mark.parametrize("rule", RULES)
def test_no_file_has_more_findings_than_it_is_allowed(rule: str) -> None:
    allowed = json.loads(ALLOWANCE.read_text(encoding="utf-8"))[rule]
    worse = {
        name: f"{number}, allowed {allowed.get(name, 0)}"
        for name, number in findings(*RULES[rule]).items()
        if number > allowed.get(name, 0)
    }
    assert worse == {}


def test_a_phrase_a_long_line_and_a_dead_link_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f"# One page\n\nOf all, nobody: [a](#one-page), [b](#two), [c](none.md)\n{'x' * 121}\n"
    )
    assert phrases(page.read_text()) == 2
    assert long_lines(page.read_text()) == 1
    assert broken_links(page) == ["#two", "none.md"]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def lower() -> None:
    """Write the allowance anew: the smaller of what is allowed and what is found."""
    old = json.loads(ALLOWANCE.read_text(encoding="utf-8")) if ALLOWANCE.exists() else {}
    new = {}
    for rule, how in RULES.items():
        now = findings(*how)
        allowed = old.get(rule, now)
        new[rule] = {
            name: min(number, allowed[name]) for name, number in now.items() if name in allowed
        }
    ALLOWANCE.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    lower()
