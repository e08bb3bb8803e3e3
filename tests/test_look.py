"""One look for the page at /, evaluations and pictures of plans: `kvant.look` has every colour."""

from __future__ import annotations

import re
from pathlib import Path

import kvant
from kvant.look import DARK, LIGHT, NUM_SERIES, counted, stylesheet
from kvant.server.live import page

SOURCE = Path(kvant.__file__).parent
DRAWN = ("server/page.html", "measure/quality/page.py", "cli/plan_plot.py")


def test_both_themes_have_every_colour_and_series_differ() -> None:
    assert LIGHT.keys() == DARK.keys()
    for palette in (LIGHT, DARK):
        assert len({palette[f"c{i}"] for i in range(NUM_SERIES)}) == NUM_SERIES
        assert all(re.fullmatch(r"#[0-9a-f]{6}", hue) for hue in palette.values())


def test_one_thing_is_singular() -> None:
    assert [counted(count, "page") for count in (0, 1, 1200)] == [
        "0 pages",
        "1 page",
        "1,200 pages",
    ]


def test_what_draws_has_no_colours_of_its_own() -> None:
    for name in DRAWN:
        text = (SOURCE / name).read_text()
        assert not re.search(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b", text), name
        for used in re.findall(r"var\(--([\w-]+)\)", text):
            assert used in LIGHT, f"{name}: {used}"


def test_the_page_has_the_style() -> None:
    data, headers = page()
    assert stylesheet().encode() in data
    assert "style-src 'sha256-" in headers["content-security-policy"]
