"""Merges the metrics of several replicas into one text, with a label that names the replica."""

from __future__ import annotations

import re
from collections.abc import Mapping

_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.+)")


def merged(texts: Mapping[str, str]) -> str:
    """Merges metrics in Prometheus' text format, keeping samples of one metric together.

    texts: each replica's metrics, by its name.
    """
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if found := _COMMENT.match(line):
                family = found[1]
                known = comments.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif found := _SAMPLE.fullmatch(line):
                labels = f'replica="{replica}"' + (f",{found[2]}" if found[2] else "")
                samples.setdefault(family, []).append(f"{found[1]}{{{labels}}} {found[3]}")
    lines = [line for name in comments for line in (*comments[name], *samples.get(name, ()))]
    return "".join(line + "\n" for line in lines)
