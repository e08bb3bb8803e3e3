"""Builds the configuration of a server from settings: reads, completes and checks it once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvant.plan.config import EngineOptions
from kvant.plan.settings import Settings
from kvant.server.access import (
    check_host,
    check_keys,
    check_names,
    check_origins,
    read_keys,
    read_origins,
)
from kvant.server.config import ServerConfig
from kvant.server.parameters import read_template_values


def server_config(settings: Settings) -> ServerConfig:
    """Returns the server's configuration. Raises BadValue if an option cannot apply to a server."""
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


def _name_of(model: str) -> str:
    """Returns a directory's base name, or any other model's name as the user gave it."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
