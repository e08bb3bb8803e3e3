"""How Kvant's output looks: colours and type of pages and pictures, and numbers of things in words."""

from __future__ import annotations

from collections.abc import Mapping

LIGHT: Mapping[str, str] = {
    "ground": "#f6f6f4", "sheet": "#ffffff", "ink": "#1c1d1f", "soft": "#63666b", "line": "#e0e0dc",
    "accent": "#0a6c74", "on-accent": "#ffffff", "bad": "#a4262c", "mine": "#e8f1f1", "none": "#d5d5d0",
    "c0": "#0a6c74", "c1": "#c2702a", "c2": "#6a5acd", "c3": "#3c8a4e", "c4": "#b23a6b", "c5": "#8a7a22",
    "c6": "#2f6fb3", "c7": "#d0453b", "c8": "#5b8f8a", "c9": "#93582a", "c10": "#8d80d8", "c11": "#79b04c",
    "c12": "#d277a2", "c13": "#7a7d83",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "ground": "#131416", "sheet": "#1b1d20", "ink": "#e8e8e6", "soft": "#9a9ea5", "line": "#2c2f33",
    "accent": "#4fb3ba", "on-accent": "#0d1314", "bad": "#f08a8f", "mine": "#1f2c2e", "none": "#34373b",
    "c0": "#4fb3ba", "c1": "#e09a58", "c2": "#9d92f0", "c3": "#74bd85", "c4": "#e27ba5", "c5": "#c7b65a",
    "c6": "#6fa8e0", "c7": "#ee7f76", "c8": "#8fc2bd", "c9": "#c08a5c", "c10": "#bdb4f5", "c11": "#a7d67e",
    "c12": "#efa9c8", "c13": "#a8abb1",
}  # fmt: skip
NUM_SERIES = 14
"""Colours for formats and curves: c0 to c13."""

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'


def counted(count: int, thing: str) -> str:
    """Returns a number of things in words: "1 page", "2 pages"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def variables(palette: Mapping[str, str]) -> str:
    """The palette as properties of a stylesheet."""
    scheme = "dark" if palette is DARK else "light"
    lines = [f"color-scheme: {scheme};", *(f"--{name}: {hue};" for name, hue in palette.items())]
    return " ".join(lines)


def stylesheet() -> str:
    """What pages share: colours by theme, type, tables and quiet text."""
    return f"""\
:root {{ {variables(LIGHT)} }}
:root[data-theme="dark"] {{ {variables(DARK)} }}
@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {variables(DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{ background: var(--ground); color: var(--ink); font: 15px/1.5 {FONT}; }}
.soft {{ color: var(--soft); font-size: .86rem; }}
table {{ border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }}
th {{ text-align: right; font-weight: 400; color: var(--soft); padding: .1rem .3rem; }}
td {{ text-align: right; padding: .16rem .3rem; border-top: 1px solid var(--line); }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
"""
