"""Disks that are full or become read-only, and processes that are killed: real ones."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvant.errors import NotServable
from kvant.kv.offload import files as queues
from kvant.kv.offload.page_files import HEADER_BYTES
from kvant.sampling.sampling_params import SamplingParams
from tests.engine.fakes import answer, finish
from tests.engine.test_offload import NUM_TOKENS, PAGE, offloading, prompt, run

ROOT = Path(__file__).parents[2]
_MOUNT = "mount -t tmpfs -o size=128k kvant {0} && exec {1}"


def _can_mount(where: Path) -> bool:
    """Whether a process here may mount a small disk that ends with it."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(_in_namespace(where, "true"), capture_output=True, check=False)
    return tried.returncode == 0


def _in_namespace(where: Path, command: str) -> list[str]:
    sharing = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "-r"]
    return [*sharing, "sh", "-c", _MOUNT.format(where, command)]


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_a_disk_that_is_full_and_then_read_only_stops_no_request(tmp_path: Path) -> None:
    if not _can_mount(tmp_path):
        pytest.skip("no disk can be mounted here")
    command = f"{sys.executable} -m {__name__} small {tmp_path}"
    ran = subprocess.run(
        _in_namespace(tmp_path, command), cwd=ROOT, env=_environment(), capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["right"], "answers are the model's on a full disk and on one that is read-only"
    assert 8 <= found["stored"] <= 32, "as many files as there is room for"
    assert found["dropped"] > 0
    assert found["halves"] == 0
    assert found["stored later"] == found["stored"]
    assert found["restored"] > 0, "what was written is read from a disk that is read-only"
    assert "Read-only" in found["refused"]
    assert "No space" in ran.stderr or "Disk quota" in ran.stderr


@pytest.mark.slow
def test_a_process_that_is_killed_again_and_again_harms_no_other_one(tmp_path: Path) -> None:
    """Two servers on one directory with room for some pages; one of them dies in the middle of writing."""
    engine, _ = offloading(directory=tmp_path, budget=60 * (HEADER_BYTES + 8 * PAGE), host_pages=24)
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-m", __name__, "write", str(tmp_path)], cwd=ROOT, env=_environment(),
            stdout=subprocess.PIPE,
        ) as other:  # fmt: skip
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            for number in range(10):
                assert run(engine, [prompt(number)]) == [tuple(answer(prompt(number), NUM_TOKENS))]
            assert other.poll() is None, "it still wrote"
            other.kill()
    for number in range(10):
        assert run(engine, [prompt(number)]) == [tuple(answer(prompt(number), NUM_TOKENS))]
    stats = engine.stats.offload
    assert stats is not None
    assert stats.disk is not None
    assert stats.disk.bad == 0
    assert stats.disk.restored > 0
    assert engine.tiers is not None
    assert engine.tiers.files is not None
    assert engine.tiers.files.store.trim() is not None, "no lock outlives its process"


# -- what runs in the other processes ----------------------------------------------------------


def _small(where: Path) -> None:
    """An engine on a disk with room for some pages, which then cannot be written at all."""
    queues.PAUSE_SECONDS = 0.0
    engine, _ = offloading(directory=where)
    right = True
    for _ in range(2):
        for number in range(8):
            right &= run(engine, [prompt(number)]) == [tuple(answer(prompt(number), NUM_TOKENS))]
    stats = engine.stats.offload
    assert stats is not None
    assert stats.disk is not None
    found = {"stored": stats.disk.stored, "dropped": stats.disk.dropped}
    found["halves"] = len(list(where.rglob(".new-*")))
    subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
    assert engine.tiers is not None
    engine.scheduler.allocator.forget_all()
    engine.tiers._host.forget_all()
    for number in (0, 1, 20, 21):
        right &= run(engine, [prompt(number)]) == [tuple(answer(prompt(number), NUM_TOKENS))]
    stats = engine.stats.offload
    assert stats is not None
    assert stats.disk is not None
    found |= {"stored later": stats.disk.stored, "restored": stats.disk.restored}
    refused = ""
    try:
        offloading(directory=where)
    except NotServable as fault:
        refused = str(fault)
    sys.stdout.write(json.dumps({**found, "right": right, "refused": refused}) + "\n")


def _write(where: Path) -> None:
    """An engine that computes prompts, and writes their pages, until it is killed."""
    engine, _ = offloading(directory=where, budget=60 * (HEADER_BYTES + 8 * PAGE), host_pages=24)
    number = 0
    while True:
        params = SamplingParams(temperature=0, max_tokens=1)
        engine.submit(prompt(number % 10), params)
        finish(engine)
        end = time.monotonic() + 5
        while engine.is_moving and time.monotonic() < end:
            engine.move(0.01)
        number += 1
        if number == 10:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        engine.scheduler.allocator.forget_all()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        {"small": _small, "write": _write}[sys.argv[1]](Path(sys.argv[2]))
