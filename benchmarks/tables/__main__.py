"""Write the performance tables of README and docs from the committed JSON; --check only compares.

A table stands between two lines; do not edit it by hand:

    <!-- table: NAME -->
    <!-- end -->

NAME is a function in benchmarks/tables/*.py, under @table("NAME", "file.json", ..): it gets what those files
under docs/benchmarks/ hold, in that order, and returns the lines of cells, the head first.
A table without JSON, such as a log of attempts, stands under `<!-- by hand: WHY -->`.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path

from benchmarks.tables import TABLES, markdown

ROOT = Path(__file__).resolve().parents[2]
BEGIN = re.compile(r"^<!-- table: (\S+) -->$")
END = "<!-- end -->"


def documents(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def written(text: str, data: Path) -> str:
    """Returns the document with new tables."""
    lines: list[str] = []
    inside = ""
    for line in text.splitlines():
        begins = BEGIN.match(line)
        if begins and not inside:
            inside = begins[1]
            if inside not in TABLES:
                raise SystemExit(f"no table {inside}: there are {', '.join(sorted(TABLES))}")
            lines += [line, *markdown(inside, data)]
        elif line == END and inside:
            inside = ""
            lines.append(line)
        elif begins or line == END:
            raise SystemExit(f"{line} stands where it cannot")
        elif not inside:
            lines.append(line)
    if inside:
        raise SystemExit(f"table {inside} has no {END}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    options = parser.parse_args()
    data = options.root / "docs" / "benchmarks"
    stale = False
    for path in documents(options.root):
        old = path.read_text(encoding="utf-8")
        new = written(old, data)
        if old == new:
            continue
        stale = True
        if options.check:
            names = (str(path), "what the JSON gives")
            sys.stdout.write(
                "\n".join(
                    difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm="")
                )
            )
        else:
            path.write_text(new, encoding="utf-8")
    if stale and options.check:
        sys.stdout.write("\ntables are stale: run python -m benchmarks.tables\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
