"""`kvant serve`: serves a model over HTTP with OpenAI's API. Flags have vLLM's names where vLLM has them."""

from __future__ import annotations

import os
import sys

import typer

from kvant.cli.configured import configured
from kvant.cli.streams import flush_stdout
from kvant.cluster.config import ReplicaOptions, check_replicas
from kvant.errors import NotServable, WayOut
from kvant.plan.config import ENGINE_OPTIONS, EngineOptions, engine_config
from kvant.plan.settings import Settings
from kvant.server.config import EVENT_OPTIONS, ServerConfig


def _check(settings: Settings) -> None:
    from kvant.server.read_config import server_config

    engine_config(settings)
    server_config(settings)
    check_replicas(settings)


@configured(EngineOptions, ServerConfig, ReplicaOptions, needs_model=True, check=_check)
def serve(settings: Settings) -> None:
    """Serve a model with OpenAI's and Anthropic's APIs and a page.

    The page is at /. Takes flags of `vllm serve` too. --from-vllm LINE and --from-llama-server LINE print
    a command line of these servers in Kvant's flags.
    """
    _require_packages()
    replicas = check_replicas(settings)
    options = settings.build(EngineOptions)
    if options.rank_launcher == "torchrun":
        from kvant.parallel.launched import join, read_launch

        launch = read_launch(os.environ, options.tensor_parallel_size)
        if launch.rank > 0:
            raise typer.Exit(join(launch))
    _say(f"kvant: starting {options.model}")  # imports and plans take seconds
    from kvant.server.read_config import server_config
    from kvant.server.serve import log_to_stderr
    from kvant.server.serve import serve as run

    config = server_config(settings)
    log_to_stderr()
    if replicas.ray:
        from kvant.cluster.serve import serve_replicas

        engine_config(settings)  # refuse settings here that every replica would refuse
        code = serve_replicas(settings, config, replicas, say=_say)
    else:
        code = run(settings.only((*ENGINE_OPTIONS, *EVENT_OPTIONS)), config, say=_say)
    if code:
        raise typer.Exit(code)


def _say(line: str) -> None:
    """Prints a line to stdout. The server continues without a reader (`kvant serve M | grep -m 1 ready`)."""
    sys.stdout.write(line + "\n")
    flush_stdout()


def _require_packages() -> None:
    """Raises NotServable if a package that only `serve` needs is missing."""
    import importlib.util

    names = ("starlette", "uvicorn", "msgspec", "zmq", "prometheus_client")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise NotServable(
            f"kvant serve needs packages that are not installed: {', '.join(missing)}",
            ways_out=(WayOut("install them: pip install kvant"),),
        )
