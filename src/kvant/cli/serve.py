"""`kvant serve`: a model over HTTP with OpenAI's API. Flags use vLLM's names where vLLM has them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import typer

from kvant.cli.configured import configured
from kvant.cli.streams import flush_stdout
from kvant.errors import NotServable, WayOut
from kvant.plan.config import ENGINE_OPTIONS, EngineOptions, engine_config
from kvant.plan.settings import Settings
from kvant.server.access import (
    check_host,
    check_keys,
    check_names,
    check_origins,
    read_keys,
    read_origins,
)
from kvant.server.config import EVENT_OPTIONS, ServerConfig
from kvant.server.parameters import read_template_values


def _server_config(settings: Settings) -> ServerConfig:
    """The configuration of the server. Raises BadValue for what no server may be."""
    config = settings.build(ServerConfig)
    config = replace(config, allowed_origins=read_origins(config.allowed_origins))
    if not config.served_names:
        config = replace(config, served_names=(_name_of(settings.build(EngineOptions).model),))
    if config.api_key_file is not None:
        keys = (*config.api_keys, *read_keys(Path(config.api_key_file)))
        config = replace(config, api_keys=keys)
    _ = config.events.parsed, config.own_template
    read_template_values(config.default_chat_template_kwargs)
    check_names(config.served_names)
    check_keys(config.api_keys)
    check_origins(config.allowed_origins)
    check_host(config.host, has_key=bool(config.api_keys), insecure=config.insecure_no_auth)
    return config


def _check(settings: Settings) -> None:
    engine_config(settings)
    _server_config(settings)


@configured(EngineOptions, ServerConfig, needs_model=True, check=_check)
def serve(settings: Settings) -> None:
    """Serve a model over HTTP with OpenAI's and Anthropic's APIs, and a page at /.

    Takes flags of `vllm serve` too. --from-vllm LINE and --from-llama-server LINE print a command line of
    these servers in Kvant's flags.
    """
    _require_packages()
    _say(f"kvant: starting {settings.build(EngineOptions).model}")  # imports and plans take seconds
    from kvant.server.serve import log_to_stderr
    from kvant.server.serve import serve as run

    config = _server_config(settings)
    log_to_stderr()
    code = run(settings.only((*ENGINE_OPTIONS, *EVENT_OPTIONS)), config, say=_say)
    if code:
        raise typer.Exit(code)


def _say(line: str) -> None:
    """Print a line to stdout. The server continues without a reader (`kvant serve M | grep -m 1 ready`)."""
    sys.stdout.write(line + "\n")
    flush_stdout()


def _name_of(model: str) -> str:
    """Return a directory's base name, and any other model's name as the user gave it."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def _require_packages() -> None:
    """Raise NotServable if a package is missing that only `serve` needs."""
    import importlib.util

    names = ("starlette", "uvicorn", "msgspec", "zmq", "prometheus_client")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise NotServable(
            f"kvant serve needs packages that are not installed: {', '.join(missing)}",
            ways_out=(WayOut("install them: pip install kvant"),),
        )
