"""Runs `locate` once in a process of its own, since huggingface_hub reads the environment at import.

Arguments: the name, then a JSON object of keyword arguments. Prints a JSON object: the model or the
error, the calls of the progress callback, and which heavy modules were imported.
"""

from __future__ import annotations

import json
import sys
import time

from kvant.errors import KvantError
from kvant.models.locate import locate


def main() -> None:
    time.sleep = lambda seconds: None  # retries need no pause here
    name, options = sys.argv[1], json.loads(sys.argv[2])
    progress: list[tuple[str, int, int]] = []
    answer: dict[str, object] = {}
    try:
        model = locate(name, progress=lambda *call: progress.append(call), **options)
        answer["path"] = str(model.path)
        answer["revision"] = model.revision
        answer["source"] = model.source.value
        answer["notes"] = model.notes
        answer["obstacles"] = model.obstacles
        answer["files"] = sorted(file.name for file in model.path.iterdir())
    except KvantError as error:
        answer["error"] = type(error).__name__
        answer["exit_code"] = error.exit_code
        answer["message"] = str(error)
    answer["progress"] = progress
    answer["heavy"] = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
