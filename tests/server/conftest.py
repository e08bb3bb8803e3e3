from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Server, build_model

CONNECTIONS = 40
DEFAULT = ("--kv-cache-dtype", "fp8_per_token_head", "--max-num-seqs", "8")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("served"), fills=True)


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    """One server with default limits for every test that does not change its life."""
    with Server(model, DEFAULT) as server:
        yield server


@pytest.fixture(scope="session")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys and limits small enough to reach."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# who may use it\n\nother\n")
    flags = (
        "--api-key", "sesame", "--api-key-file", str(keys),
        "--allowed-origins", "https://app.example", "--max-body-bytes", "2000",
        "--header-timeout", "1", "--body-timeout", "1", "--max-num-seqs", "2",
        "--max-num-queued-reqs", "1", "--request-timeout", "2", "--max-stored-responses", "2",
        "--max-connections", str(CONNECTIONS), "--keep-alive-timeout", "1", "--ping-interval", "0.3",
    )  # fmt: skip
    with Server(model, flags, key="sesame") as server:
        yield server


@pytest.fixture(scope="session")
def strict(model: Path) -> Iterator[Server]:
    """A server that runs one sequence, keeps no responses, has no files of pages, and logs requests."""
    flags = (
        "--log-requests", "--max-stored-responses", "0", "--kv-offload", "host:16MiB",
        "--max-num-seqs", "1", "--max-num-queued-tokens", "100",
    )  # fmt: skip
    with Server(model, flags) as server:
        yield server
