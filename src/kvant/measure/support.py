"""The support matrix as JSON (what was verified on which device), and its page. No torch.

    {"schema": 1, "runs": [{"name", "device", "compute", "backends": {B: {"facts", "formats"}},
                            "weights": {"facts", "cells"}}]}

`formats` maps format, head size and mask to one error for each of `QUERIES`. A failed cell is a text
instead. {"refused": reason} replaces a subtree with a single reason of refusal.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvant.attention.need import DeviceFacts
from kvant.attention.verify.cells import MASKS, QUERIES, WINDOW, Row, rows
from kvant.kv.dtype import ComputeDtype

SCHEMA = 1

_COUNTS = f"{', '.join(map(str, QUERIES[:-1]))} and {QUERIES[-1]}"
_TITLE = f"""\
# What is supported, as measured

`kvant verify --record docs/support.json` generates this page; do not edit it. A cell is one format, kind of
attention and head size. A backend serves a cell if it does not refuse it, and every such cell ran on the
device named.

- Storage starts full of NaN. The backend writes rows, including zeros, outliers and tiny numbers. Their bytes
  must equal those of the format's definition.
- Attention is compared with its float64 definition over the stored bytes, with {_COUNTS} queries per
  sequence. A window has {WINDOW} tokens.
- Numbers are the worst error of any output row relative to its length, over all head sizes and numbers of
  queries.
- An engine repeats this at start for the cells that it will use, in its model's shapes.
- `triton_fp8` rounds queries and probabilities of 512 queries by choice. Its definition includes that
  rounding, and its numbers exclude what ties of the rounding leave open."""
_SUMMARY = f"""\
Bytes are compared with the format's definition, and attention over them with its definition in float64.
Numbers are the worst error of any output row relative to its length, over {_COUNTS} queries per
sequence and all head sizes asked for. A window has {WINDOW} tokens."""
_COLUMNS = 116
_REFUSED = "refused"
_WEIGHTS = "kvant verify --weights --record docs/support.json"

Tree = dict[str, Any]
"""JSON, nested by format, head size and mask."""


@dataclass(frozen=True, slots=True)
class Device:
    """A verified device. name: as its maker calls it. compute: the dtype in which models compute there."""

    name: str
    facts: DeviceFacts
    compute: ComputeDtype

    def as_json(self) -> Tree:
        facts = {**asdict(self.facts), "kind": self.facts.kind.value}
        return {"name": self.name, "device": facts, "compute": self.compute.value}


def tree_of(answers: Iterable[tuple[Row, Mapping[str, Any]]]) -> Tree:
    """Returns rows as JSON.

    Each mask's name maps to a reason of refusal or to numbers; equal refusals join.
    """
    found: Tree = {}
    for row, masks in answers:
        of_format = found.setdefault(row.name, {})
        of_format[str(row.head_dim)] = _joined(
            {m: {_REFUSED: a} if isinstance(a, str) else a for m, a in masks.items()}
        )
    return {name: _joined(heads) for name, heads in found.items()}


def _joined(below: Tree) -> Tree:
    """Replaces a tree by one refusal if all its parts have the same refusal."""
    first = next(iter(below.values()))
    same = isinstance(first, dict) and _REFUSED in first
    return dict(first) if same and all(one == first for one in below.values()) else below


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a tree: format name, head size, mask name."""

    format: str
    head_dim: int
    mask: str


def cells(formats: Mapping[str, Any]) -> Iterator[tuple[Place, str | list[float | str]]]:
    """Yields every place of a recorded backend: the reason of its refusal, or its cells."""
    for name, of_format in formats.items():
        if _REFUSED in of_format:
            heads = {str(row.head_dim): of_format for row in rows() if row.name == name}
        else:
            heads = of_format
        for head_dim, of_head in heads.items():
            for mask in map(str, MASKS):
                at = of_head if _REFUSED in of_head else of_head[mask]
                found = at[_REFUSED] if isinstance(at, dict) else at
                yield Place(name, int(head_dim), mask), found


def failures(formats: Mapping[str, Any]) -> list[str]:
    """Returns one line for every failed cell."""
    return [
        f"{at.format}, head size {at.head_dim}, {at.mask}, {count} queries: {cell}"
        for at, found in cells(formats)
        if not isinstance(found, str)
        for count, cell in zip(QUERIES, found, strict=True)
        if isinstance(cell, str)
    ]


def missing_rows(formats: Mapping[str, Any]) -> list[Row]:
    """Returns rows of the matrix that the record lacks."""
    found = {(at.format, at.head_dim) for at, _ in cells(formats)}
    return [row for row in rows() if (row.name, row.head_dim) not in found]


def recorded(path: Path, device: Device, backends: Mapping[str, Tree]) -> Tree:
    """Returns the file's content with the results of these backends on this device replaced."""
    document: Tree = {"schema": SCHEMA, "runs": []}
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
    mine = device.as_json()
    for run in document["runs"]:
        if all(run[key] == value for key, value in mine.items()):
            run["backends"].update(backends)
            return document
    document["runs"].append({**mine, "backends": dict(backends)})
    return document


def recorded_weights(
    path: Path, device: Device, facts: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]
) -> Tree:
    """Returns the file's content with the products of narrow weights on this device replaced.

    cells: "format", "way", "rows", "errors" and "right" of each, on a GPU "kernels" too; see
    `kvant.weights.verify`.
    """
    document = recorded(path, device, {})
    mine = device.as_json()
    run = next(r for r in document["runs"] if all(r[key] == mine[key] for key in mine))
    run["weights"] = {"facts": dict(facts), "cells": [dict(cell) for cell in cells]}
    return document


def dump(document: Mapping[str, Any]) -> str:
    """Returns JSON with one line per format, so that a change of one format changes one line."""
    lines = [f'{{"schema": {document["schema"]}, "runs": [']
    for number, run in enumerate(document["runs"]):
        head = {key: value for key, value in run.items() if key != "backends"}
        lines.append(f'{json.dumps(head)[:-1]}, "backends": {{')
        for place, (backend, found) in enumerate(run["backends"].items()):
            lines.append(f' {json.dumps(backend)}: {{"facts": {json.dumps(found["facts"])},')
            lines.append('  "formats": {')
            entries = [
                f"   {json.dumps(name)}: {json.dumps(below)}"
                for name, below in found["formats"].items()
            ]
            lines.append(",\n".join(entries))
            lines.append("  }}" + ("," if place + 1 < len(run["backends"]) else ""))
        lines.append("}}" + ("," if number + 1 < len(document["runs"]) else ""))
    return "\n".join(lines) + "\n]}\n"


def render(document: Mapping[str, Any]) -> str:
    """Returns docs/support.md: everything recorded, and what is missing."""
    lines = [_TITLE]
    for run in document["runs"]:
        lines += _of_device(run, page=True)
    return "\n".join(lines) + "\n"


def summary(document: Mapping[str, Any]) -> str:
    """Returns the same tables for a part of the matrix."""
    lines = [_SUMMARY]
    for run in document["runs"]:
        lines += _of_device(run, page=False)
    return "\n".join(lines) + "\n"


def _of_device(run: Mapping[str, Any], *, page: bool) -> list[str]:
    lines = ["", f"## {run['name']}, computing in {run['compute']}"]
    for backend, found in run["backends"].items():
        facts = ", ".join(f"{key} {value}" for key, value in found["facts"].items())
        lines += ["", f"### Backend `{backend}`", ""]
        formats = found["formats"]
        reasons: list[str] = []
        whole = {json.dumps(below) for below in formats.values()}
        if len(whole) == 1 and _REFUSED in next(iter(formats.values())):
            lines += [f"Refuses everything: {next(iter(formats.values()))[_REFUSED]}.", ""]
        else:
            lines += [_wrapped(_head_sizes(formats)), ""]
            names = [str(mask) for mask in MASKS]
            lines += [f"| format | {' | '.join(names)} |", f"|{' --- |' * (len(names) + 1)}"]
            for name in formats:
                of_format = {name: formats[name]}
                texts = [_cell_text(of_format, mask, reasons) for mask in names]
                lines.append(f"| `{name}` | {' | '.join(texts)} |")
            lines.append("")
            lines += [
                f"{number}. {_wrapped(reason)}" for number, reason in enumerate(reasons, start=1)
            ]
            if reasons:
                lines.append("")
            failed = failures(formats)
            lines += [f"- FAILED: {line}" for line in failed]
            if failed:
                lines.append("")
        if page:
            missing = missing_rows(formats)
            sizes: dict[str, list[str]] = {}
            for row in missing:
                sizes.setdefault(row.name, []).append(str(row.head_dim))
            unverified = "; ".join(f"`{name}` at {', '.join(at)}" for name, at in sizes.items())
            lines += [_wrapped(f"Not verified yet: {unverified}."), ""] if missing else []
            lines.append(_wrapped(f"Recorded: {facts}."))
    if "weights" in run:
        lines += _of_weights(run["weights"])
    return lines


def _of_weights(found: Mapping[str, Any]) -> list[str]:
    """Returns lines for products with narrow weights: the worst error per format, way and number of rows."""
    rows = found["cells"][0]["rows"]
    lines = ["", "### Products with narrow weights", ""]
    lines.append(
        _wrapped(
            "Errors of results relative to their length, against float64 products of the decoded bytes (and "
            f"of rounded activations, where they are), by rows of activations. `{_WEIGHTS}` records them."
        )
    )
    lines += [
        "",
        f"| format | way | {' | '.join(map(str, rows))} |",
        f"|{' --- |' * (len(rows) + 2)}",
    ]
    for cell in found["cells"]:
        errors = " | ".join(f"{error:.1e}" for error in cell["errors"])
        said = "" if cell["right"] else " FAILED"
        lines.append(f"| {cell['format']} | {cell['way']}{said} | {errors} |")
    by_kernels: dict[str, list[str]] = {}
    for cell in found["cells"]:
        if "kernels" in cell:
            used = ", ".join(f"{count}: {name}" for count, name in _runs(rows, cell["kernels"]))
            by_kernels.setdefault(used, []).append(f"{cell['format']} ({cell['way']})")
    if by_kernels:
        lines += ["", "Kernels, by rows of activations:", ""]
        lines += [_wrapped(f"- {used}. {'; '.join(names)}.") for used, names in by_kernels.items()]
    facts = ", ".join(f"{key} {value}" for key, value in found["facts"].items())
    return [*lines, "", _wrapped(f"Recorded: {facts}.")]


def _runs(rows: Sequence[int], kernels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields numbers of rows, such as "9 to 64", and the kernel that they share."""
    start = 0
    for place, name in enumerate(kernels):
        if place + 1 == len(kernels) or kernels[place + 1] != name:
            last = "" if start == place else f" to {rows[place]}"
            yield f"{rows[start]}{last}", name
            start = place + 1


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


def _head_sizes(formats: Mapping[str, Any]) -> str:
    """Returns the verified head sizes; mixed pairs have fewer."""
    found: dict[str, list[str]] = {}
    for name, of_format in formats.items():
        if _REFUSED not in of_format:
            found.setdefault(", ".join(of_format), []).append(name)
    groups = sorted(found.items(), key=lambda group: -len(group[1]))
    texts = [f"Head sizes {groups[0][0]}"]
    texts += [
        f"{sizes} for {', '.join(f'`{name}`' for name in names)}" for sizes, names in groups[1:]
    ]
    return "; ".join(texts) + "."


def _cell_text(of_format: Mapping[str, Any], mask: str, reasons: list[str]) -> str:
    """Returns the worst error, and the refused head sizes with reasons."""
    worst, served, failed = 0.0, False, False
    no: dict[int, list[int]] = {}
    for at, found in cells(of_format):
        if at.mask != mask:
            continue
        if isinstance(found, str):
            if found not in reasons:
                reasons.append(found)
            no.setdefault(reasons.index(found) + 1, []).append(at.head_dim)
            continue
        served = True
        failed |= any(isinstance(cell, str) for cell in found)
        worst = max([worst, *(cell for cell in found if not isinstance(cell, str))])
    if not served:
        return f"no ({', '.join(map(str, no))})"
    text = "FAILED" if failed else f"{worst:.1e}"
    for number, head_dims in no.items():
        text += f"; not {', '.join(map(str, head_dims))} ({number})"
    return text
