"""How soon `kvant chat` answers."""

from __future__ import annotations

import pytest

from kvant.cli.bench_startup import CHAT, PARTS
from kvant.measure.startup import Start, measure_starts, table


@pytest.mark.slow
def test_a_second_start_reaches_its_first_token_within_8_seconds() -> None:
    starts = list(measure_starts(CHAT, PARTS, 2, first=False))
    assert (
        min(start.seconds for start in starts) < 8
    )  # another process may have slowed the other one
    for start in starts:
        assert start.cache == "filled"
        assert sum(start.parts.values()) > 0


def test_the_table_has_every_start_and_the_medians_of_its_parts() -> None:
    starts = [
        Start("empty", 17.0, {}),
        *(Start("filled", seconds, {"Python": seconds / 100}) for seconds in (4.0, 5.0, 9.0)),
    ]
    lines = table(starts).splitlines()
    assert [line for line in lines if "filled |" in line] == [
        "| filled | 4.00 s |",
        "| filled | 5.00 s |",
        "| filled | 9.00 s |",
    ]
    assert lines[-1] == "| Python | 0.05 |"
