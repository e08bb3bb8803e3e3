"""Python imports this at the start of each process: between two signals it notes Kvant's files that run."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_found: set[str] = set()


def _note(frame: FrameType, event: str, arg: Any) -> None:
    _, is_kvant, path = frame.f_code.co_filename.partition("/src/kvant/")
    if is_kvant and event == "call":
        _found.add(path)


def _begin(number: int, frame: FrameType | None) -> None:
    threading.setprofile(_note)
    sys.setprofile(_note)


def _end(number: int, frame: FrameType | None) -> None:
    sys.setprofile(None)
    threading.setprofile(None)
    (Path(os.environ["RECORDED_FILES"]) / str(os.getpid())).write_text(json.dumps(sorted(_found)))


signal.signal(signal.SIGUSR1, _begin)
signal.signal(signal.SIGUSR2, _end)
