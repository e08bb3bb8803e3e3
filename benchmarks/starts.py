"""Compares starts of two commits: `kvant chat` from a new process to its first token, in turn.

python -m benchmarks.starts 48d4582 HEAD --pairs 6 --from-disk --out starts.json
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run_command
from kvant.cli.bench_startup import CHAT
from kvant.cli.output import OutFile, write_json
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.startup import until_first_text

CACHED, ON_DISK = "in the page cache", "on disk"


@dataclass(frozen=True, slots=True)
class Start:
    """One start. files: where files are before it. seconds: to the first text.

    cpu: seconds of all threads until the process has ended.
    """

    commit: str
    files: str
    seconds: float
    cpu: float


def main(
    old: Annotated[str, typer.Argument(help="A commit of this repository.")],
    new: Annotated[str, typer.Argument(help="Another commit.")],
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Pairs of starts per state.")] = 6,
    from_disk: Annotated[
        bool,
        typer.Option(
            "--from-disk", help="Also start with no file in the page cache: 2 GB of disk."
        ),
    ] = False,
    out: OutFile = None,
) -> None:
    """Compare starts of two commits."""
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="kvant-starts-") as place:
        packages = Path(sysconfig.get_paths()["purelib"])
        if from_disk:  # a copy, since other processes keep the packages in the page cache
            packages = shutil.copytree(packages, Path(place) / "packages", symlinks=True)
        trees = [_Tree(commit, Path(place) / commit, packages) for commit in (old, new)]
        for tree in trees:
            tree.start(CACHED)  # converts the model and compiles kernels
        for files in (CACHED, *((ON_DISK,) if from_disk else ())):
            for number in range(pairs):
                for tree in trees[:: 1 if number % 2 else -1]:
                    starts.append(tree.start(files))
                    print(starts[-1], flush=True)
    if out is not None:
        packages_used = ("torch", "transformers", "numba")
        facts = measurement_facts(command_line("python -m benchmarks.starts"), packages_used)
        write_json(out, {**facts, "starts": [asdict(start) for start in starts]})


class _Tree:
    """The sources of a commit, with a cache of their own, in `place`."""

    def __init__(self, commit: str, place: Path, packages: Path) -> None:
        self._commit, self._read = commit, (place, packages)
        command = ["git", "archive", "--format=tar", commit, "src"]
        found = subprocess.run(command, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(found)) as archive:
            archive.extractall(place, filter="data")
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{place / 'src'}{os.pathsep}{packages}",
            "KVANT_CACHE": str(place / "cache"),
        }

    def start(self, files: str) -> Start:
        if files == ON_DISK:
            for directory in self._read:
                _evict(directory)
        before = os.times()
        seconds = until_first_text(CHAT, self._environment)
        after = os.times()
        cpu = after.children_user + after.children_system
        cpu -= before.children_user + before.children_system
        return Start(self._commit, files, seconds, cpu)


def _evict(directory: Path) -> None:
    """Drops the files of a directory from the page cache, unless a process has mapped them."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    run_command(main)
