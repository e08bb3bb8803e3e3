"""One trained pair for all tests of the room."""

from __future__ import annotations

import pytest

from tests.speculative.pair import Pair, build_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))
