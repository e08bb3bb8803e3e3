"""The text of an evaluation: from a file, or the manual that Python includes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvant.engine.llm import LLM
from kvant.errors import BadValue, WayOut

LEAST_POSITIONS = 500
"""Minimum number of evaluated positions: with fewer, under five values would decide the 99th percentile."""


@dataclass(frozen=True, slots=True)
class Text:
    """A tokenized text.

    name: its source. sha256: of its UTF-8 bytes. token_ids: with the tokenizer's additions.
    """

    name: str
    sha256: str
    token_ids: tuple[int, ...]


def read_text(path: Path | None, llm: LLM) -> Text:
    """Reads and tokenizes a text.

    path: plain text in UTF-8, or JSON lines, whose string values are joined. None: the manual of the Python
    language that every Python includes (`pydoc_data.topics`); it differs between versions of Python.
    Raises BadValue for a file that cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics

        name, text = "pydoc_data.topics", "\n\n".join(topics[key] for key in sorted(topics))
    else:
        name = path.name
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            why = fault.strerror if isinstance(fault, OSError) else "it is not text in UTF-8"
            raise BadValue(f"--text {path} cannot be read", why=str(why)) from None
        if path.suffix == ".jsonl":
            text = _joined(text, path)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return Text(name, digest, tuple(llm.encode(text)))


def _joined(text: str, path: Path) -> str:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError:
            raise BadValue(f"--text {path}: line {number} is not JSON") from None
        values = body.values() if isinstance(body, dict) else [body]
        found.append("\n".join(value for value in values if isinstance(value, str)))
    return "\n\n".join(found)


def evaluated(context: int) -> range:
    """Returns the evaluated positions of a window, as in llama.cpp: its second half without the last."""
    return range(context // 2, context - 1)


def num_windows(context: int, tokens: int) -> int:
    """Returns how many windows of `context` tokens give `tokens` tokens, and at least LEAST_POSITIONS."""
    least = -(-LEAST_POSITIONS // len(evaluated(context)))
    return max(least, tokens // context)


def check_length(text: Text, contexts: Sequence[int], tokens: int) -> None:
    """Raises BadValue, with the number of tokens needed, if a text is too short for any of these contexts."""
    have = len(text.token_ids)
    for context in contexts:
        least = num_windows(context, 0) * context
        if have >= least:
            continue
        fitting = [c for c in contexts if num_windows(c, 0) * c <= have]
        ways_out = [WayOut("give a longer text", ("--text", "FILE"))]
        if fitting:
            ways_out.append(WayOut("measure shorter contexts", ("--context", str(max(fitting)))))
        raise BadValue(
            f"the text {text.name} is too short for contexts of {context} tokens",
            why=f"it has {have} tokens; a stable figure needs {least}: {LEAST_POSITIONS} evaluated "
            "positions at least, in whole windows",
            ways_out=tuple(ways_out),
        )


def windows(text: Text, llm: LLM, context: int, tokens: int, begin: int = 0) -> Tensor:
    """Returns consecutive windows of the text, [num_windows, context], int64.

    begin: token index of the first window. If the tokenizer begins texts with a special token, each window
    begins with it, as in llama.cpp.
    """
    wanted = num_windows(context, tokens)
    token_ids = text.token_ids[begin:]
    count = min(wanted, len(token_ids) // context)
    found = torch.tensor(token_ids[: count * context]).view(count, context)
    tokenizing = llm.tokenizing
    assert tokenizing is not None
    bos = tokenizing.tokenizer.bos_token_id
    begins_with_it = text.token_ids[:1] == (bos,) and tokenizing.encode("a")[0] == bos
    if begins_with_it:
        found[:, 0] = bos
    return found
