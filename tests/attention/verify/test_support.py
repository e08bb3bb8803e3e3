"""docs/support.md is what docs/support.json says, and that is what backends say of themselves today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.attention.select import BACKENDS, by_name_only
from kvant.attention.verify.cells import MASKS, QUERIES, need_of, refused, rows
from kvant.kv.dtype import ComputeDtype
from kvant.measure.support import (
    Device,
    Place,
    cells,
    dump,
    failures,
    recorded,
    recorded_weights,
    render,
)

DOCS = Path(__file__).parents[3] / "docs"
DOCUMENT: dict[str, Any] = json.loads((DOCS / "support.json").read_text(encoding="utf-8"))
RECORDED = [(run, info) for run in DOCUMENT["runs"] for info in BACKENDS]
HELP = "run `kvant verify --record docs/support.json` on that device"


def device_of(run: dict[str, Any]) -> Device:
    facts = {**run["device"], "kind": DeviceKind(run["device"]["kind"])}
    return Device(run["name"], DeviceFacts(**facts), ComputeDtype(run["compute"]))


def test_the_page_is_generated_from_the_recorded_runs() -> None:
    assert (DOCS / "support.md").read_text(encoding="utf-8") == render(DOCUMENT), HELP
    assert (DOCS / "support.json").read_text(encoding="utf-8") == dump(DOCUMENT)


@pytest.mark.parametrize(
    ("run", "info"), RECORDED, ids=[f"{run['name']} {info.name}" for run, info in RECORDED]
)
def test_a_cell_is_claimed_if_and_only_if_it_is_not_refused_today(
    run: dict[str, Any], info: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages of that machine need not be installed on this one."""
    package = f"{info.refuse.__module__}._refuse_package"
    monkeypatch.setattr(package, lambda *_: None, raising=False)
    device = device_of(run)
    formats = run["backends"].get(info.name, {"formats": {}})["formats"]
    said = dict(cells(formats))
    for row in rows():
        no = refused(info, row, device.facts, device.compute)
        for mask in MASKS:
            found = said.pop(Place(row.name, row.head_dim, str(mask)), None)
            if found is None:
                need = need_of(row, mask, device.facts, device.compute)
                assert mask in no or by_name_only(need, info), f"{row} was never verified: {HELP}"
            elif mask in no:
                assert found == no[mask], f"{row} {mask}: {HELP}"
            else:
                assert isinstance(found, list), f"{row} {mask} is served, but recorded as {found}"
                assert len(found) == len(QUERIES)
    assert not said, f"recorded, but no longer in the matrix: {HELP}"


@pytest.mark.parametrize(
    ("run", "info"), RECORDED, ids=[f"{run['name']} {info.name}" for run, info in RECORDED]
)
def test_no_served_cell_failed_where_it_was_recorded(run: dict[str, Any], info: Any) -> None:
    assert failures(run["backends"].get(info.name, {"formats": {}})["formats"]) == []


def test_a_new_record_of_a_backend_takes_the_place_of_its_old_one(tmp_path: Path) -> None:
    path = tmp_path / "support.json"
    first = DOCUMENT["runs"][0]
    name, other = list(first["backends"])[:2]
    path.write_text(dump({"schema": 1, "runs": [first]}), encoding="utf-8")
    new = {"facts": {"date": "tomorrow"}, "formats": first["backends"][name]["formats"]}
    found = recorded(path, device_of(first), {name: new})
    assert found["runs"][0]["backends"][name] == new
    assert found["runs"][0]["backends"][other] == first["backends"][other]
    assert len(found["runs"]) == 1


def test_the_page_names_the_kernels_of_products() -> None:
    used = ["few_rows.cu", "wide_rows.cu", "wide_rows.cu", "tiles in Triton", "decoded, then torch"]
    cells = [
        {"format": name, "way": "fastest", "rows": [1, 9, 64, 200, 512], "errors": [1e-3] * 5,
         "right": True, "kernels": used}
        for name in ("fp8_e4m3, a scale per output", "int8, a scale per output")
    ]  # fmt: skip
    here = Device("a GPU", DeviceFacts(DeviceKind.CUDA, "sm_90"), ComputeDtype.BFLOAT16)
    page = render(recorded_weights(Path("none"), here, {"commit": "abc"}, cells))
    shared = " ".join(page[page.index("Kernels, by rows") :].split())
    assert (
        "- 1: few_rows.cu, 9 to 64: wide_rows.cu, 200: tiles in Triton, 512: decoded, then torch. "
        "fp8_e4m3, a scale per output (fastest); int8, a scale per output (fastest)."
    ) in shared
