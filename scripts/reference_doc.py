"""Write docs/reference.md and docs/llms.txt from the server and the site's own tables; --check compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

from kvant.server.api_error import CODES
from kvant.server.app import ENDPOINTS
from kvant.server.metrics import Metrics

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
HEAD = """\
# Endpoints, metrics and errors

Written from the server's own tables. [server.md](server.md) explains them.
[parameters.md](parameters.md) has the parameters of requests.
"""


def reference() -> str:
    parts = [HEAD, "\n## Endpoints\n\n| method | path | what | key |\n|---|---|---|---|\n"]
    parts += [
        f"| {one.method} | `{one.path}` | {one.summary} | {'no' if one.is_open else 'yes'} |\n"
        for one in ENDPOINTS
    ]
    parts.append("\n## Metrics\n\nThose of the engine appear with its first report.\n")
    parts.append("\n| name | type | what |\n|---|---|---|\n")
    parts += [f"| `{name}` | {kind} | {text} |\n" for name, kind, text in sorted(metrics())]
    parts.append("\n## Error codes\n\n| `code` | status | meaning | way out |\n|---|---|---|---|\n")
    parts += [
        f"| `{code}` | {status} | {meaning} | {way_out} |\n"
        for code, (status, meaning, way_out) in sorted(CODES.items())
    ]
    return "".join(parts)


def metrics() -> list[tuple[str, str, str]]:
    """Returns name, type and text of every metric that a server has from its start."""
    text = Metrics("model").text().decode()
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    return [(name, kind, helps[name]) for name, kind in kinds if not name.endswith("_created")]


def llms() -> str:
    """Returns llms.txt (llmstxt.org): the pages of the site by kind, with their titles."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    parts = [f"# {site['site_name']}\n\n> {site['site_description']}\n"]
    for entry in site["nav"]:
        ((title, found),) = entry.items()
        pages = found if isinstance(found, list) else [{title: found}]
        parts.append(f"\n## {title}\n\n")
        for page in pages:
            ((name, path),) = page.items()
            parts.append(f"- [{name}]({path}): {title_of(DOCS / path)}\n")
    return "".join(parts)


def title_of(page: Path) -> str:
    return page.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")


def main(check: bool) -> int:
    wanted = {DOCS / "reference.md": reference()}
    if not check:
        (DOCS / "reference.md").write_text(reference(), encoding="utf-8")
    wanted[DOCS / "llms.txt"] = llms()
    if check:
        return int(
            any(not p.exists() or p.read_text(encoding="utf-8") != t for p, t in wanted.items())
        )
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
