"""Fetches files from the hub: retries and resumes broken transfers, with one progress report."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kvant.errors import ConfigError, WayOut
from kvant.models.local import Progress

ATTEMPTS = 3
# Few: huggingface_hub resumes a broken transfer, but an interrupted run loses its partial files.
# Each Xet transfer is parallel in itself.
_WORKERS = 2
_SPARE_BYTES = 16 << 20

_T = TypeVar("_T")


class Transfer:
    """Fetches files of one commit into huggingface_hub's cache.

    snapshots: the directory of the model's snapshots; the files appear in snapshots/<commit>.
    """

    def __init__(
        self, repo: str, commit: str, cache: Path, snapshots: Path, progress: Progress | None
    ) -> None:
        self._repo = repo
        self._commit = commit
        self._cache = cache
        self.snapshot = snapshots / commit
        self._meter = _Meter(f"Fetching {repo}", progress)

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Sets the files and bytes of all transfers. Raises ConfigError if the disk is too small."""
        missing = {n: size for n, size in sizes.items() if not (self.snapshot / n).is_file()}
        to_come = sum(missing.values())
        self._meter.expect(self._meter.done + to_come)
        here = next(path for path in (self._cache, *self._cache.parents) if path.exists())
        if to_come and shutil.disk_usage(here).free < to_come + _SPARE_BYTES:
            raise disk_full(self._cache, to_come)

    def run(self, names: list[str]) -> None:
        """Fetches the files that are not in the cache yet. Raises the first failure."""
        from huggingface_hub import hf_hub_download

        def one(name: str) -> None:
            bar: Any = self._meter.bar_class(name)
            retried(
                lambda: hf_hub_download(self._repo, name, revision=self._commit, tqdm_class=bar),
                again=is_passing,
            )

        with ThreadPoolExecutor(max_workers=_WORKERS) as pool:
            try:
                for _ in pool.map(one, names):
                    pass
            except BaseException:  # Ctrl-C too: the other transfers stop at their next piece
                self._meter.cancel()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def finish(self) -> None:
        self._meter.finish()


def retried(action: Callable[[], _T], again: Callable[[Exception], bool]) -> _T:
    """Runs `action`; retries up to `ATTEMPTS` times after failures for which `again` returns True."""
    for attempt in range(1, ATTEMPTS):
        try:
            return action()
        except Exception as error:
            if not again(error):
                raise
            time.sleep(attempt)
    return action()


def is_passing(error: Exception) -> bool:
    """Returns whether an error is temporary, such as one of the network or of an overloaded server."""
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return False
    status = http_status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    # It is httpx.HTTPError or httpx2.HTTPError, depending on the release of huggingface_hub.
    http_error = errors.HfHubHTTPError.__mro__[1]
    if isinstance(error, (http_error, errors.LocalEntryNotFoundError)):
        return True
    # huggingface_hub raises a bare OSError for a file of the wrong size. Those of the system have a number.
    return type(error) is OSError and error.errno is None


def http_status(error: Exception) -> int | None:
    """Returns the HTTP status of the response that caused the error, None if there was no response."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def disk_full(directory: Path, needed_bytes: int | None) -> ConfigError:
    needed = f"{needed_bytes / 2**20:.0f} MiB are still to come" if needed_bytes else "it is full"
    return ConfigError(
        f"not enough disk space in {directory}",
        why=needed,
        ways_out=[
            WayOut("free some space and run the same command again: finished files are kept"),
            WayOut("keep the hub's cache elsewhere: set HF_HOME to a directory"),
        ],
    )


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Hides huggingface_hub's own warnings (such as one per resumed transfer) in this context."""
    from huggingface_hub.utils import logging as hub_logging

    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)


class _CancelledError(Exception):
    """Raised in a transfer after another one failed, or after the user interrupted."""


class _Meter:
    """Adds up the bytes of all transfers for one progress callback."""

    def __init__(self, task: str, progress: Progress | None) -> None:
        self._task = task
        self._progress = progress
        self._lock = threading.Lock()
        self._total = 0
        self._shown = 0
        self._cancelled = False
        self._of_file: Counter[str] = Counter()

    @property
    def done(self) -> int:
        return self._of_file.total()

    def expect(self, total: int) -> None:
        with self._lock:
            self._total = total

    def bar_class(self, file: str) -> Callable[..., _Bar]:
        """Returns the class that huggingface_hub instantiates per attempt instead of a tqdm bar."""

        meter = self

        class Bar(_Bar):
            def __init__(self, **options: Any) -> None:
                super().__init__(meter, file, already=int(options.get("initial") or 0))

        return Bar

    def cancel(self) -> None:
        self._cancelled = True

    def finish(self) -> None:
        with self._lock:
            self._show(self._total)

    def start(self, file: str, already: int) -> None:
        """Starts an attempt, with `already` bytes present from earlier ones."""
        with self._lock:
            self._of_file[file] = already

    def add(self, file: str, nbytes: int) -> None:
        """Counts bytes that have arrived. Raises in the transferring thread after `cancel`."""
        if self._cancelled:
            raise _CancelledError
        with self._lock:
            self._of_file[file] += (
                nbytes  # nbytes is negative if a server sends all instead of resuming
            )
            self._show(min(self.done, self._total))

    def _show(self, done: int) -> None:
        if self._progress is not None and done > self._shown:
            self._shown = done
            self._progress(self._task, done, self._total)


class _Bar:
    """The part of a tqdm bar that huggingface_hub needs. It draws nothing and reports bytes to the meter.

    `update` counts bytes that reach the disk. `update_transfer` does nothing, so that bytes of Xet
    transfers are not counted twice.
    """

    total: float | None = None
    n = 0

    def __init__(self, meter: _Meter, file: str, already: int) -> None:
        self._meter = meter
        self._file = file
        meter.start(file, already)

    def update(self, n: float | None = 1) -> None:
        self._meter.add(self._file, int(n or 0))

    def update_transfer(self, n: float | None = 1) -> None: ...

    def set_postfix_str(self, *args: object, **kwargs: object) -> None: ...

    def set_transfer_postfix_str(self, *args: object, **kwargs: object) -> None: ...

    def refresh(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *args: object) -> None: ...
