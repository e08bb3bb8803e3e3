"""Compares Kvant's figures of KL divergence with llama.cpp's, from the same logits.

    python -m benchmarks.llama_cpp_kl MODEL.gguf --llama-perplexity build/bin/llama-perplexity --out FILE

`llama-perplexity` reads a text with a KV cache in float32, then in each `--cache-type`, and prints what its
`--kl-divergence` finds. It also saves the log-probabilities of each run. `kvant.measure.quality` computes its
figures from these files.

A file holds 16 bits for each log-probability, and no exact values for tokens less likely than e^-16 times the
most likely one. llama.cpp's sum leaves these out. Kvant's sum counts all tokens; here it leaves them out too.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import typer

from benchmarks.command import run_command
from kvant.cli.output import OutFile, write_json
from kvant.errors import BadValue
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.quality.kl_statistics import Distances, distances, join, statistics_of

LEAST = -16.0
"""llama.cpp leaves tokens out of its sum whose baseline log-probability is at most this."""

_ABSENT = -1e4  # stands for minus infinity, which would turn 0 x infinity into NaN
_PRINTED = {
    "ppl": r"Mean PPL\(Q\) +: +(\S+)",
    "ppl_ratio": r"Mean PPL\(Q\)/PPL\(base\) +: +(\S+)",
    "ppl_ratio_error": r"Mean PPL\(Q\)/PPL\(base\) +: +\S+ ± +(\S+)",
    "kld_mean": r"Mean +KLD: +(\S+)",
    "kld_mean_error": r"Mean +KLD: +\S+ ± +(\S+)",
    "kld_max": r"Maximum KLD: +(\S+)",
    "kld_p999": r"99\.9% +KLD: +(\S+)",
    "kld_p99": r"99\.0% +KLD: +(\S+)",
    "kld_median": r"Median +KLD: +(\S+)",
    "same_top": r"Same top p: +(\S+)",
    "same_top_error": r"Same top p: +\S+ ± +(\S+)",
}
"""Texts after which llama.cpp prints a figure. The last two are percentages."""


@dataclass(frozen=True, slots=True)
class Window:
    """The second half of a window, as saved. next_ids: [positions] int64, the tokens that follow.
    log_probs: [positions, vocab_size] float32."""

    next_ids: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]


def read_saved(path: Path) -> Iterator[Window]:
    """Yields windows of a file that `llama-perplexity --kl-divergence-base` wrote.

    The file: "_logits_", n_ctx, n_vocab, n_chunk and all tokens in 32 bits each. Then one row for each of the
    positions n_ctx / 2 to n_ctx - 2: a step and a minimum in float32, and a 16-bit multiple of the step
    for each token, padded to an even number. Raises BadValue for another file.
    """
    with path.open("rb") as file:
        if file.read(8) != b"_logits_":
            raise BadValue(f"{path} holds no log-probabilities of llama-perplexity")
        context, vocab, count = np.fromfile(file, np.int32, 3).tolist()
        tokens = np.fromfile(file, np.int32, context * count).reshape(count, context)
        first, positions = context // 2, context - 1 - context // 2
        width = 4 + vocab + vocab % 2
        for window in tokens:
            rows = np.fromfile(file, np.uint16, positions * width).reshape(positions, width)
            step, least = rows[:, :4].copy().view(np.float32).T[:, :, None]
            found = rows[:, 4 : 4 + vocab].astype(np.float32) * step + least
            yield Window(window[first + 1 :].astype(np.int64), found)


def compare_saved(base: Path, other: Path) -> Distances:
    """Returns Kvant's distances of two files over the same text, for the tokens that llama.cpp sums."""
    parts = []
    for a, b in zip(read_saved(base), read_saved(other), strict=True):
        if not np.array_equal(a.next_ids, b.next_ids):
            raise BadValue(f"{base} and {other} hold different texts")
        p, q, left_out = _with_the_rest(a, b)
        ids = torch.from_numpy(a.next_ids)
        found = distances(torch.from_numpy(p), torch.from_numpy(q), ids)
        parts.append(replace(found, kl=found.kl - left_out))
    return join(parts)


def _with_the_rest(
    a: Window, b: Window
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Adds a token to the log-probabilities of both, with the probability of all left-out tokens.

    Without it, Kvant's softmax would spread that probability over the others. The third result is what this
    token adds to the KL divergence of each position. It is mostly rounding error, and llama.cpp leaves it
    out.
    """
    counted = a.log_probs > LEAST
    np.put_along_axis(counted, a.next_ids[:, None], True, axis=1)
    sides, rests = [], []
    for one in (a, b):
        kept = np.where(counted, one.log_probs, _ABSENT)
        share = np.exp(kept.astype(np.float64)).sum(1, keepdims=True)
        rest = np.log(np.maximum(1 - share, 1e-12))
        sides.append(np.concatenate([kept, rest.astype(np.float32)], axis=1))
        rests.append(rest[:, 0])
    return sides[0], sides[1], np.exp(rests[0]) * (rests[0] - rests[1])


def printed_figures(log: str) -> dict[str, float]:
    """Returns what llama.cpp printed, by the names of `Statistics`.

    Raises BadValue if a figure is missing.
    """
    found = {}
    for name, pattern in _PRINTED.items():
        match = re.search(pattern, log)
        if match is None:
            raise BadValue(f"llama-perplexity printed no {name}", why=log[-500:])
        found[name] = float(match[1]) / (100 if name.startswith("same_top") else 1)
    return found


def llama_cpp_kl(
    model: Annotated[Path, typer.Argument(help="A GGUF file.")],
    program: Annotated[
        Path, typer.Option("--llama-perplexity", metavar="FILE", help="The program of llama.cpp.")
    ] = Path("llama-perplexity"),
    types: Annotated[
        list[str] | None,
        typer.Option("--cache-type", metavar="T", help="llama.cpp's type of K and V; may repeat."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Default: Python's manual.")
    ] = None,
    context: Annotated[int, typer.Option("--context", min=64)] = 512,
    chunks: Annotated[int, typer.Option("--chunks", min=1)] = 8,
    threads: Annotated[int, typer.Option("--threads", min=1)] = 2,
    out: OutFile = None,
) -> None:
    """Compare Kvant's definitions of quality with llama.cpp's own figures."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        if text is None:
            from pydoc_data.topics import topics

            text = where / "manual.txt"
            text.write_text("\n\n".join(topics[key] for key in sorted(topics)), encoding="utf-8")
        base, other = where / "base", where / "other"

        def run(stored: str, saved: Path, *more: str) -> str:
            size, windows = str(context), str(chunks)
            told = ("-m", str(model), "-f", str(text), "-c", size, "-b", size, "--chunks", windows,
                    "-t", str(threads), "-fa", "on", "-ctk", stored, "-ctv", stored,
                    "--kl-divergence-base", str(saved), *more)  # fmt: skip
            done = subprocess.run([str(program), *told], capture_output=True, text=True)
            if done.returncode:
                raise BadValue(f"{program} failed on {stored}", why=done.stderr[-500:])
            return done.stdout + done.stderr

        run("f32", base)
        rows = []
        for stored in types or ("q8_0", "q4_0"):
            theirs = printed_figures(run(stored, base, "--kl-divergence"))
            run(stored, other)
            own = asdict(statistics_of(compare_saved(base, other)))
            rows.append({"cache_type": stored, "llama_cpp": theirs, "kvant": own})
            sys.stderr.write(f"{stored}: {theirs['kld_mean']:.6f} {own['kld_mean']:.6f}\n")
    version = subprocess.run([str(program), "--version"], capture_output=True, text=True)
    named = re.search(r"version: (.+)", version.stdout + version.stderr)
    body = {
        "schema": 1, "model": model.name, "context": context, "chunks": chunks, "rows": rows,
        "llama_cpp": None if named is None else named[1],
        **measurement_facts(command_line("python -m benchmarks.llama_cpp_kl"), ("torch", "numpy")),
    }  # fmt: skip
    if out is not None:
        write_json(out, body)


if __name__ == "__main__":
    run_command(llama_cpp_kl)
