"""Fetches models from the Hugging Face hub, but only files that its cache lacks.

Cache layout, transfers and resume are huggingface_hub's, with its environment: HF_TOKEN, HF_HOME,
HF_ENDPOINT, HF_HUB_OFFLINE. Kvant adds the choice of files, their order (small files first, so
that a model is refused before gigabytes arrive) and the wording of errors.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvant.errors import ConfigError, ModelNotFound, WayOut
from kvant.kv.checkpoint.json_file import read_json_object
from kvant.models import hub_files
from kvant.models.directory import CONFIG_NAME, as_obstacle, missing_weights, remote_code
from kvant.models.hub_transfer import (
    ATTEMPTS,
    Transfer,
    disk_full,
    http_status,
    is_passing,
    quiet_hub,
    retried,
)
from kvant.models.local import LocalModel, ModelSource, Progress

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(name: str) -> bool:
    """Returns whether `name` has the form owner/model."""
    if _HUB_ID.fullmatch(name) is None or ".." in name or "--" in name:
        return False
    return not name.endswith((".", "-", ".git"))


def fetch(
    repo: str, *, revision: str | None, weights: bool, progress: Progress | None
) -> LocalModel:
    """Returns the snapshot of the hub model `repo`; weights=False fetches only files for a plan.

    revision: branch, tag or full commit hash, None for the default branch. A commit that is
    complete in the cache causes no traffic. If the hub cannot be reached (or offline), a complete
    cached snapshot is returned with a note.

    Raises ModelNotFound (no such model or revision, no access, or offline and not in the cache),
    BadCheckpoint (no files that Kvant loads) or ConfigError (transfer broken, disk full).
    """
    asked = _Asked(repo, revision)
    if revision is not None and _COMMIT.fullmatch(revision):
        cached = asked.cached_snapshot()
        if cached is not None and hub_files.suffices(cached, weights):
            return _checked(asked.found(cached), weights)
    with quiet_hub():
        return _checked(_fetch(asked, weights, progress), weights)


def _fetch(asked: _Asked, weights: bool, progress: Progress | None) -> LocalModel:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        info = retried(
            lambda: HfApi().model_info(asked.repo, revision=asked.revision, files_metadata=True),
            again=is_passing,
        )
    except OfflineModeIsEnabled:
        return asked.without_hub(weights, "HF_HUB_OFFLINE is set")
    except Exception as error:
        if is_passing(error):
            return asked.without_hub(weights, f"the hub did not answer ({_short(error)})")
        raise asked.refusal(error) from error
    sizes = {item.rfilename: int(item.size or 0) for item in info.siblings or ()}
    transfer = Transfer(asked.repo, str(info.sha), asked.cache, asked.snapshots, progress)
    try:
        _download(asked.repo, transfer, sizes, weights)
    except ConfigError:
        raise
    except Exception as error:
        raise asked.refusal(error) from error
    asked.remember(str(info.sha))
    return asked.found(transfer.snapshot)


def _download(repo: str, transfer: Transfer, sizes: Mapping[str, int], weights: bool) -> None:
    hub_files.require_config(repo, sizes)
    small = hub_files.small_files(sizes) if weights else hub_files.plan_files(sizes)
    large = hub_files.likely_weights(sizes) if weights else []
    transfer.expect({name: sizes[name] for name in [*small, *large]})
    transfer.run(small)
    if weights:
        refusal = remote_code(read_json_object(transfer.snapshot / CONFIG_NAME), repo)
        if refusal is not None:
            raise refusal
        large = hub_files.weights(repo, transfer.snapshot, sizes)
        transfer.expect({name: sizes[name] for name in large})
        transfer.run(large)
    transfer.finish()


def _checked(model: LocalModel, weights: bool) -> LocalModel:
    """Raises for a cached snapshot what fetching it would raise; else returns it."""
    refusal = remote_code(read_json_object(model.path / CONFIG_NAME), model.name)
    if refusal is None:
        return model
    if weights:
        raise refusal
    return replace(model, obstacles=(as_obstacle(refusal),))


class _Asked:
    """One request for a revision of a model, with access to huggingface_hub's cache of it.

    Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """

    def __init__(self, repo: str, revision: str | None) -> None:
        from huggingface_hub import constants

        self.repo = repo
        self.revision = revision
        self.cache = Path(constants.HF_HUB_CACHE)
        self._store = self.cache / f"models--{repo.replace('/', '--')}"
        self.snapshots = self._store / "snapshots"
        self._ref = self._store / "refs" / (revision or "main")

    def cached_snapshot(self) -> Path | None:
        """Returns the cached snapshot of the revision, which may be incomplete."""
        commit = self.revision or "main"
        if _COMMIT.fullmatch(commit) is None:
            if not self._ref.is_file():
                return None
            commit = self._ref.read_text(encoding="utf-8").strip()
        snapshot = self.snapshots / commit
        return snapshot if snapshot.is_dir() else None

    def remember(self, commit: str) -> None:
        """Stores the commit of the branch or tag for offline starts, as huggingface_hub does."""
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return
        self._ref.parent.mkdir(parents=True, exist_ok=True)
        draft = self._ref.with_name(f"{self._ref.name}.{threading.get_native_id()}.draft")
        draft.write_text(commit, encoding="utf-8")
        draft.replace(self._ref)

    def found(self, snapshot: Path, *notes: str) -> LocalModel:
        return LocalModel(
            path=snapshot,
            name=self.repo,
            revision=snapshot.name,
            source=ModelSource.HUB,
            notes=notes,
        )

    def without_hub(self, weights: bool, reason: str) -> LocalModel:
        """Returns the cached model if the hub cannot be reached. Raises if it is not complete."""
        snapshot = self.cached_snapshot()
        if snapshot is None or not (snapshot / CONFIG_NAME).is_file():
            missing = "nothing of it is in the cache"
        elif weights and missing_weights(snapshot):
            missing = f"the cache lacks {', '.join(missing_weights(snapshot)[:3])}"
        else:
            return self.found(snapshot, f"{reason}: using the cached commit {snapshot.name}")
        at = f" at revision {self.revision}" if self.revision else ""
        raise ModelNotFound(
            f"cannot get the hub model {self.repo}{at}",
            why=f"{reason}, and {missing}",
            tried=[f"the directory {self.repo}", f"the cache {self.cache}"],
            ways_out=[
                WayOut("fetch it once with the hub in reach and HF_HUB_OFFLINE unset"),
                WayOut("point HF_HOME to a cache that has it"),
                WayOut("name a directory or a .gguf file on this machine"),
            ],
        )

    def refusal(self, error: Exception) -> ConfigError:
        """Translates an error of the hub or of a transfer."""
        from huggingface_hub import constants, errors

        where = f"{self.repo} (at {constants.ENDPOINT})"
        status = http_status(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return disk_full(self.cache, None)
        if isinstance(error, errors.GatedRepoError):
            return ModelNotFound(
                f"no access to the hub model {where}",
                why=f"it is gated, its owner must grant access; {_token_state()}",
                ways_out=[
                    WayOut("ask for access on the model's page, then set HF_TOKEN to your token")
                ],
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return ModelNotFound(
                f"the hub model {where} has no revision {self.revision or 'main'!r}",
                ways_out=[WayOut("leave --revision out, or name a branch, tag or commit hash")],
            )
        unknown = status in (401, 403, 404) and not isinstance(error, errors.EntryNotFoundError)
        if unknown:
            return ModelNotFound(
                f"no hub model {where}, or no access to it (HTTP {status})",
                why="the hub answers alike for a model that does not exist and for a private one; "
                + _token_state(),
                tried=[f"the directory {self.repo}", f"the hub model {self.repo}"],
                ways_out=[
                    WayOut("check the spelling: owner/model"),
                    WayOut("for a private or gated model set HF_TOKEN to a token that may read it"),
                ],
            )
        return ConfigError(
            f"fetching the hub model {where} failed",
            why=_short(error),
            tried=[f"up to {ATTEMPTS} times, taking up transfers where they broke"],
            ways_out=[WayOut("run the same command again: finished files are kept")],
        )


def _token_state() -> str:
    from huggingface_hub import get_token

    return "a token is set" if get_token() else "no token is set (HF_TOKEN)"


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no details'}"[:300]
