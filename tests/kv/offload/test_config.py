"""What --kv-offload may say, and when pages are restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant.errors import BadValue
from kvant.kv.offload.config import parse_offload
from kvant.kv.offload.policy import BreakEven


def test_tiers_are_read() -> None:
    both = parse_offload("host:2GiB,disk:/var/a:b:10GB", asked_by="--kv-offload")
    assert both.host_bytes == 2 << 30
    assert both.disk is not None
    assert (both.disk.path, both.disk.num_bytes) == (Path("/var/a:b"), 10**10)
    assert parse_offload("host:1GiB", asked_by="x").disk is None


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", "disk:/a:1GiB", "host:1GiB,disk:/a", "host:1GiB,host:1GiB", "ram:1GiB",
     "host:many", "host:0"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadValue, match="--kv-offload"):
        parse_offload(text, asked_by="--kv-offload")


def test_restores_are_chosen_by_measured_rates() -> None:
    policy = BreakEven(least_tokens=64, latency=0.0, host_rate=1e9)
    assert not policy.pays(63, {"host": 1, "disk": 0}, 0), "too few tokens"
    assert policy.pays(64, {"host": 1 << 40, "disk": 1 << 40}, 0), "prompts were not measured yet"
    policy.note_prompts(1000, 1.0)
    assert policy.pays(1000, {"host": 900_000_000, "disk": 0}, 0)
    assert not policy.pays(1000, {"host": 1_100_000_000, "disk": 0}, 0)
    policy.note_copy("disk", 100, 1.0)  # the first measurement takes the place of what was declared
    assert policy.pays(1000, {"host": 0, "disk": 99}, 0)
    assert not policy.pays(1000, {"host": 0, "disk": 101}, 0)
    policy.note_copy("host", 10**10, 1.0)
    assert policy.pays(1000, {"host": 5 * 10**9, "disk": 0}, 0)
    assert policy.pays(1000, {"host": 0}, 1000), "30 us a page"
    policy.note_pages(10, 0.02)
    assert policy.pays(1000, {"host": 0}, 499)
    assert not policy.pays(1000, {"host": 0}, 501), "the engine's thread is slower than computing"
    policy.note_prompts(10, 1.0)
    assert policy.tokens_per_second == 1000, "steps with few tokens show no speed of prompts"
