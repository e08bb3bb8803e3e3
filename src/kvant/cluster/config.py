"""The options of replicas under Ray, and their check. Does not import Ray."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass
from functools import partial

from kvant.errors import BadValue, NotServable, WayOut
from kvant.plan.options import option, options_of
from kvant.plan.settings import Settings

_ray = partial(option, panel="Replicas")


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options of replicas under Ray. most: the most replicas at the highest load; None never scales."""

    ray: bool = _ray(False, "Run replicas under Ray behind this address (extra: ray).")
    ray_address: str | None = _ray(
        None,
        "Address of the Ray cluster; local starts one here.",
        metavar="ADDRESS",
        unset="RAY_ADDRESS, else a cluster on this machine, else a new one",
    )
    count: int = _ray(1, "Replicas, or the fewest if they scale.", name="num_replicas", low=1)
    most: int | None = _ray(
        None, "Replicas at the highest load.", name="max_num_replicas", low=1, unset="num_replicas"
    )
    target: float = _ray(
        32.0,
        "Requests per replica at which more replicas are started.",
        name="target_ongoing_requests",
        low=0.1,
    )
    cpus: int = _ray(1, "CPU cores of one replica.", name="replica_cpus", low=1)


REPLICA_OPTIONS = options_of(ReplicaOptions)


def check_replicas(settings: Settings) -> ReplicaOptions:
    """Reads and checks the options. Raises BadValue if they clash, NotServable without the extra."""
    options = settings.build(ReplicaOptions)
    if not options.ray:
        for option in REPLICA_OPTIONS:
            given = settings.get(option.name)
            if given is not None and given.value not in (option.default, False):
                raise BadValue(
                    given.label(given.value),
                    why="it is for replicas under Ray",
                    ways_out=(WayOut("run them", ("--ray",)), WayOut("leave it out")),
                )
        return options
    if options.most is not None and options.most < options.count:
        raise BadValue(
            f"--max-num-replicas {options.most} is below --num-replicas {options.count}",
            ways_out=(WayOut("never scale", ("--max-num-replicas", str(options.count))),),
        )
    if (events := settings.get("kv_events")) is not None:
        raise BadValue(
            f"{events.label(events.value)} with --ray",
            why="every replica would publish at this one address",
            ways_out=(WayOut("start one server per replica, behind a router that reads events"),),
        )
    if (launcher := settings.get("rank_launcher")) is not None and launcher.value != "here":
        raise BadValue(
            f"{launcher.label(launcher.value)} with --ray",
            why="a replica starts its ranks itself, on one machine",
            ways_out=(WayOut("let each replica start its ranks", ("--rank-launcher", "here")),),
        )
    require_ray()
    return options


def require_ray() -> None:
    """Raises NotServable unless Ray and the packages that Ray Serve needs are installed."""
    if any(importlib.util.find_spec(name) is None for name in ("ray", "aiohttp", "fastapi")):
        raise NotServable(
            "replicas under Ray need the extra ray, which is not installed",
            ways_out=(
                WayOut("install it: pip install 'kvant[ray]'"),
                WayOut("start one server per replica behind vLLM's router (docs/how-to/deploy.md)"),
            ),
        )


def start_fault(told: str) -> str | None:
    """Returns the message of a `StartFault` in the text of a traceback, or None."""
    _, found, rest = told.rpartition("StartFault: ")
    if not found:
        return None
    first, *more = rest.splitlines()
    return "\n".join([first, *itertools.takewhile(lambda line: line.startswith("  "), more)])
