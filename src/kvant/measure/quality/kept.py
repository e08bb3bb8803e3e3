"""Keeps parts of a measurement on disk, so that an interrupted one continues where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvant import __version__
from kvant.engine.llm import LLM
from kvant.errors import BadValue
from kvant.measure.own_engine import runner_of

Arrays = Mapping[str, npt.NDArray[Any]]


def model_files(path: Path) -> list[tuple[str, int, int]]:
    """Returns names, sizes and times of a model's files, which change if the model does."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def measured_by(llm: LLM) -> dict[str, object]:
    """Returns what figures depend on beside text and formats: version, files of the model, device, plan.

    Also how environment variables and options change the model, where they do.
    """
    request, forward = llm.planned.request, llm.planned.forward
    changes = {
        "overrides": request.overrides,
        "quantization": forward.quantization,
        "activations": forward.activations,
    }
    return {
        **{name: str(change) for name, change in changes.items() if change is not None},
        "kvant": __version__,
        "files": model_files(llm.model_path),
        "device": str(runner_of(llm).device),
        "plan": llm.plan.fingerprint,
        "backends": [spec.backend for spec in llm.plan.layers],
    }


class Kept:
    """A directory of parts that belong to one set of inputs.

    inputs: everything on which the figures depend; another model, text, format or option gets another
    directory. note: why an existing part could not be used; empty if all could.
    """

    def __init__(self, root: Path, inputs: Mapping[str, object]) -> None:
        text = json.dumps(inputs, sort_keys=True, default=str)
        self.path = root / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.note = ""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "inputs.json").write_text(text, encoding="utf-8")
        except OSError as fault:
            raise self._unwritable(fault) from None

    def _unwritable(self, fault: OSError) -> BadValue:
        return BadValue(
            f"{self.path} cannot be written, where parts of the measurement are kept",
            why=fault.strerror or str(fault),
        )

    def __len__(self) -> int:
        """Number of parts in the directory."""
        return len(list(self.path.glob("*.npz")))

    def read(self, name: str) -> dict[str, npt.NDArray[Any]] | None:
        """Returns a part; None if it is missing or damaged."""
        path = self.path / f"{name}.npz"
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
                return dict(found)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as fault:
            self.note = f"{path} is damaged and is measured again: {fault}"
            return None

    def write(self, name: str, arrays: Arrays) -> None:
        """Stores a part; an interruption leaves the whole part or nothing.

        Raises BadValue if it cannot be written, such as to a full disk.
        """
        partial = self.path / f".{name}.{os.getpid()}.partial"
        try:
            self.path.mkdir(parents=True, exist_ok=True)  # an equal run that ended first removed it
            with partial.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            partial.replace(self.path / f"{name}.npz")
        except OSError as fault:
            partial.unlink(missing_ok=True)
            raise self._unwritable(fault) from None

    def forget(self) -> None:
        """Removes all parts."""
        shutil.rmtree(self.path, ignore_errors=True)
