"""`kvant serve`: the model over HTTP, in OpenAI's way. Flags have vLLM's names where it has them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvant.cli import options
from kvant.cli.refused import refuse_calculated_scales, refuse_tensor_parallel
from kvant.errors import BadValue, NotServable, WayOut

SERVER_PANEL = "Server"
ENV_API_KEY = "KVANT_API_KEY"


def serve(
    model: Annotated[str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2.")],
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            help="Name for clients; may be repeated, the first one answers.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on.", rich_help_panel=SERVER_PANEL)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, help="0: any free one.", rich_help_panel=SERVER_PANEL
        ),
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help=f"Key that clients must send; may be repeated.  [env: {ENV_API_KEY}]",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            help="File with one key a line; lines with # are comments.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origins",
            metavar="ORIGIN",
            help="Pages, beside this machine's own, that may use it in a browser; * for all; "
            "may be repeated.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    insecure_no_auth: Annotated[
        bool,
        typer.Option(
            "--insecure-no-auth",
            help="Listen beyond this machine without a key.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", min=1, help="Tokens of one sequence.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", min=1, help="Sequences in one step.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", min=1, help="Tokens in one step.")
    ] = None,
    max_num_queued_reqs: Annotated[
        int | None,
        typer.Option(
            "--max-num-queued-reqs",
            min=0,
            help="Sequences that may wait; four times --max-num-seqs without.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-queued-tokens",
            min=1,
            help="Prompt tokens that may wait; without, what takes ten seconds as measured.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching")
    ] = True,
    request_timeout: Annotated[
        float,
        typer.Option(
            "--request-timeout",
            min=0.1,
            help="Seconds for one request.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = 600.0,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            "--shutdown-timeout",
            min=0,
            help="Seconds that running requests get after SIGTERM.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = 30.0,
    engine_timeout: Annotated[
        float,
        typer.Option(
            "--engine-timeout",
            min=1,
            help="Seconds of silence after which an engine counts as hung.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = 60.0,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart/--no-restart",
            help="Start a dead engine again, three times in ten minutes.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = True,
    max_body_bytes: Annotated[
        int,
        typer.Option("--max-body-bytes", min=1, help="Of a request.", rich_help_panel=SERVER_PANEL),
    ] = 32 * 2**20,
    header_timeout: Annotated[
        float,
        typer.Option(
            "--header-timeout",
            min=0.1,
            help="Seconds in which a request's header must arrive.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = 10.0,
    body_timeout: Annotated[
        float,
        typer.Option(
            "--body-timeout",
            min=0.1,
            help="Seconds in which a request's body must arrive.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = 30.0,
    generation_config: Annotated[
        str,
        typer.Option(
            "--generation-config",
            metavar="auto|none",
            help="Whether the model's own sampling defaults apply.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = "auto",
    dtype: options.Dtype = "auto",
    kv_cache_dtype: options.KVCacheDtype = None,
    skip_layers: options.SkipLayers = None,
    rules: options.Rules = None,
    policy: options.Policy = None,
    missing_scales: options.MissingScales = "error",
    strict: options.Strict = False,
    page_size: options.PageSize = 16,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-memory",
            metavar="SIZE",
            help="Give the pages exactly this much.",
            rich_help_panel=options.KV_PANEL,
        ),
    ] = None,
    attention_backend: options.Backend = "auto",
    batch_invariant: options.BatchInvariant = False,
    speculative_config: options.Speculative = None,
    revision: options.Revision = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of the seeds of requests without one.")
    ] = None,
    calculate_kv_scales: options.CalculateScales = False,
    tensor_parallel_size: options.TensorParallel = 1,
) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    refuse_calculated_scales(calculate_kv_scales)
    refuse_tensor_parallel(tensor_parallel_size)
    if generation_config not in ("auto", "none"):
        raise BadValue(f"--generation-config {generation_config}", why="it is auto or none")
    _require_packages()
    from kvant.server.access import check_host, check_keys, check_origins, read_keys
    from kvant.server.arguments import EngineArguments
    from kvant.server.config import Limits, Restarts, ServerConfig
    from kvant.server.serve import log_to_stderr
    from kvant.server.serve import serve as run

    keys = tuple(api_key or ())
    if not keys and (from_env := os.environ.get(ENV_API_KEY)):
        keys = (from_env,)
    if api_key_file is not None:
        keys += read_keys(api_key_file)
    check_keys(keys)
    origins = tuple(allowed_origins or ())
    check_origins(origins)
    check_host(host, has_key=bool(keys), insecure=insecure_no_auth)
    arguments = EngineArguments(
        model=model,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        skip_layers=tuple(skip_layers or ()),
        rules=tuple(rules or ()),
        policy=None if policy is None else str(policy),
        missing_scales=missing_scales,
        strict=strict,
        page_size=page_size,
        attention_backend=attention_backend,
        batch_invariant=batch_invariant,
        speculative_config=speculative_config,
        revision=revision,
        device=device,
        kv_cache_memory=kv_cache_memory,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=enable_prefix_caching,
        seed=seed,
    )
    config = ServerConfig(
        host=host,
        port=port,
        served_names=tuple(served_model_name or (_name_of(model),)),
        api_keys=keys,
        max_queued=max_num_queued_reqs,
        max_queued_tokens=max_num_queued_tokens,
        allowed_origins=origins,
        shutdown_timeout=shutdown_timeout,
        model_defaults=generation_config == "auto",
        limits=Limits(
            body_bytes=max_body_bytes,
            header_seconds=header_timeout,
            body_seconds=body_timeout,
            request_seconds=request_timeout,
        ),
        restarts=Restarts(allowed=restart, engine_timeout=engine_timeout),
    )
    log_to_stderr()
    code = run(arguments, config, say=_say)
    if code:
        raise typer.Exit(code)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _name_of(model: str) -> str:
    """A directory's own name; every other model is called what the user called it."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def _require_packages() -> None:
    """`plan`, `generate` and `bench` work without these; `serve` does not."""
    import importlib.util

    names = ("fastapi", "uvicorn", "msgspec", "zmq", "prometheus_client", "pydantic")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise NotServable(
            f"kvant serve needs packages that are not installed: {', '.join(missing)}",
            ways_out=(WayOut("install them: pip install kvant"),),
        )
