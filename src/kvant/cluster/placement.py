"""Ray Serve's deployment of replicas in placement groups, their router, and a whole application.

serve run kvant.cluster.placement:application model=smollm2 num_replicas=2
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvant.cluster.asking import Ask, Asked, Part, ReplicaLost
from kvant.cluster.config import REPLICA_OPTIONS, ReplicaOptions
from kvant.cluster.front import Front
from kvant.cluster.replica import Replica
from kvant.plan.config import ENGINE_OPTIONS, EngineOptions, engine_config
from kvant.plan.options import Kind, Option
from kvant.plan.settings import Given, Settings, read_settings
from kvant.server.config import EVENT_OPTIONS, SERVER_OPTIONS, ServerConfig
from kvant.server.read_config import server_config
from kvant.server.serve import log_to_stderr

DEPLOYMENT = "KvantReplica"
_OPTIONS = (*ENGINE_OPTIONS, *SERVER_OPTIONS, *REPLICA_OPTIONS)
_CHECK_SECONDS = 2.0
_ANSWER_SECONDS = 10.0
_MOST_REQUESTS = 100_000
"""High enough that Serve never queues: a replica itself refuses requests that it has no room for."""
_STARTS = 3
"""Tries to start a deployment's replicas before it counts as failed."""
_QUIET = {"log_level": "WARNING", "enable_access_log": False}


class PreferenceRouter(RequestRouter):  # type: ignore[misc]
    """Orders replicas for a request: the preferred one, then the others, then replicas to avoid."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        asked = pending_request.args[0] if pending_request and pending_request.args else None
        if not isinstance(asked, Asked):
            return [candidate_replicas]
        ranks: list[list[RunningReplica]] = [[], [], []]
        for one in candidate_replicas:
            name = one.replica_id.unique_id
            ranks[0 if name == asked.prefer else 2 if name in asked.avoid else 1].append(one)
        for rank in ranks:
            random.shuffle(rank)  # Serve takes the first of replicas that are equally busy
        return ranks


class RayReplica:
    """A `Replica` as an actor of Ray Serve."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Settings, config: ServerConfig
    ) -> None:
        log_to_stderr()
        name = serve.get_replica_context().replica_id.unique_id
        self._replica = Replica(settings, config, name)
        await self._replica.start()

    async def ask(self, asked: Asked) -> AsyncGenerator[Part, None]:
        async for part in self._replica.ask(asked):
            yield part

    async def check_health(self) -> None:
        self._replica.check()


def replicas(
    settings: Settings, config: ServerConfig, options: ReplicaOptions
) -> serve.Application:
    """Returns the deployment of replicas. Each has a placement group of one bundle, so on one machine.

    Reads the cluster's resources: if it has GPUs, replicas without a --device use GPUs.
    """
    engine = settings.build(EngineOptions)
    device = engine.device
    if device == "auto":
        device = "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
        settings = Settings({**settings.given, "device": (Given(device, "--ray"),)})
    bundle: dict[str, float] = {"CPU": options.cpus}
    if device.startswith("cuda"):
        bundle["GPU"] = engine.tensor_parallel_size
    most = options.count if options.most is None else options.most
    scaling: dict[str, Any] = {"num_replicas": options.count}
    if most > options.count:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=options.count,
                max_replicas=most,
                target_ongoing_requests=options.target,
            )
        }
    deployed = serve.deployment(
        RayReplica,
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": bundle.get("GPU", 0)},
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=_MOST_REQUESTS,
        health_check_period_s=_CHECK_SECONDS,
        health_check_timeout_s=_ANSWER_SECONDS,
        graceful_shutdown_wait_loop_s=_CHECK_SECONDS / 4,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        logging_config=_QUIET,
        max_constructor_retry_count=_STARTS,
        request_router_config=RequestRouterConfig(request_router_class=PreferenceRouter),
        **scaling,
    )
    # Replicas do not listen on a port. The front checks hosts, origins and sizes; both check API keys.
    inside = replace(config, host="127.0.0.1", allowed_origins=("*",))
    return deployed.bind(settings.only((*ENGINE_OPTIONS, *EVENT_OPTIONS)), inside)


def asker(handle: DeploymentHandle[Any]) -> Ask:
    """Returns a function that asks replicas through a deployment's handle and its router."""
    streaming = handle.options(stream=True)

    async def ask(asked: Asked) -> AsyncGenerator[Part, None]:
        response = streaming.ask.remote(asked)
        is_over = False
        try:
            async for part in response:
                yield part
            is_over = True
        except (RayError, RayServeException) as fault:
            is_over = True
            raise ReplicaLost(str(fault).splitlines()[0]) from None
        finally:
            if not is_over:
                response.cancel()

    return ask


def application(args: dict[str, Any]) -> serve.Application:
    """Builds an application for `serve run`, `serve build` and Serve's configuration files.

    Its replicas stand behind Serve's own HTTP proxies. args: options by name, as in Kvant's YAML files.
    Raises ConfigError.
    """
    settings = read_settings(
        _OPTIONS,
        given={name: _typed(name, value) for name, value in args.items()},
        by=lambda option: f"{option.name}=",
        environ=os.environ,
    )
    engine_config(settings)
    config = server_config(settings)
    options = settings.build(ReplicaOptions)

    def front() -> Any:
        return Front(config, asker(serve.get_deployment_handle(DEPLOYMENT)), options.count).app

    class KvantFront:
        def __init__(self, replicas: DeploymentHandle[Any]) -> None:
            """Takes the replicas' handle only so that Serve deploys them with the front."""

    deployed: Any = serve.deployment(
        serve.ingress(front)(KvantFront),
        name="KvantFront",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MOST_REQUESTS,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        logging_config=_QUIET,
    )
    return deployed.bind(replicas(settings, config, options))


def _typed(name: str, value: Any) -> Any:
    """Converts a command line's text to the type of its option."""
    option: Option | None = next((one for one in _OPTIONS if name in one.names), None)
    if option is None or not isinstance(value, str) or option.kind in (Kind.TEXT, Kind.SIZE):
        return value
    return option.read_text(value, f"{name}=")
