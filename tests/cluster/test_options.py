"""Options of replicas: what clashes, what the extra is for, and that nothing else needs it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from kvant.cluster import config as module
from kvant.cluster.config import REPLICA_OPTIONS, check_replicas, start_fault
from kvant.errors import BadValue, NotServable
from kvant.plan.config import ENGINE_OPTIONS
from kvant.plan.settings import Settings, read_settings
from kvant.server.config import SERVER_OPTIONS


def _settings(**given: object) -> Settings:
    known = (*ENGINE_OPTIONS, *SERVER_OPTIONS, *REPLICA_OPTIONS)
    return read_settings(known, given=given, by=lambda option: option.flag, environ={})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())


def test_options_of_replicas_need_ray_to_be_asked_for() -> None:
    assert not check_replicas(_settings()).ray
    assert not check_replicas(_settings(ray=False)).ray
    with pytest.raises(BadValue, match="--num-replicas 2"):
        check_replicas(_settings(num_replicas=2))


@pytest.mark.usefixtures("installed")
def test_options_that_clash_are_refused_with_a_way_out_that_works() -> None:
    given = {"ray": True, "num_replicas": 3}
    with pytest.raises(BadValue, match="--max-num-replicas 2 is below") as caught:
        check_replicas(_settings(**given, max_num_replicas=2))
    (flag, value) = caught.value.ways_out[0].arguments
    assert flag == "--max-num-replicas"
    assert check_replicas(_settings(**given, max_num_replicas=int(value))).most == 3
    with pytest.raises(BadValue, match="--rank-launcher torchrun with --ray"):
        check_replicas(_settings(ray=True, rank_launcher="torchrun"))
    with pytest.raises(BadValue, match="--kv-events"):
        check_replicas(_settings(ray=True, kv_events="tcp://127.0.0.1:5557"))


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(NotServable, match=r"pip install 'kvant\[ray\]'"):
        module.require_ray()
    with pytest.raises(NotServable, match="extra ray"):
        check_replicas(_settings(ray=True))


def test_serving_and_the_front_need_no_ray() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import kvant.cli.main, kvant.cli.serve, kvant.cluster.front, kvant.cluster.replica"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_reason_of_a_failed_start_is_taken_out_of_rays_traceback() -> None:
    message = "m is no model directory\n  why: it has no config.json\n  way out: name a directory"
    told = (
        f"ray::Replica()\n  File x, line 3\nkvant.server.supervisor.StartFault: {message}\nThe end."
    )
    assert start_fault(told) == message
    assert start_fault("ray::Replica()\nValueError: x") is None
    assert start_fault("") is None
