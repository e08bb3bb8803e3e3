"""What a server is asked to be, and every limit it keeps. Made once at the edge, frozen."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvant.engine.sampling_params import MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOPS


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client can ask for. A value is allowed, one more is refused.

    Sizes in bytes, times in seconds. sequences: prompts times n of one request.
    stream_buffer_bytes: text that waits for a client that reads slowly; more ends its request.
    """

    body_bytes: int = 32 * 2**20
    header_bytes: int = 32 * 2**10
    header_count: int = 100
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    keep_alive_seconds: int = 5
    connections: int = 1024
    prompts: int = 256
    n: int = 128
    sequences: int = 512
    top_logprobs: int = MAX_LOGPROBS
    stops: int = MAX_STOPS
    stop_chars: int = MAX_STOP_CHARS
    cache_salt_chars: int = 256
    request_seconds: float = 600.0
    stream_buffer_bytes: int = 2**20
    template_seconds: float = 2.0
    ping_seconds: float = 15.0


@dataclass(frozen=True, slots=True)
class Restarts:
    """When a dead engine is started again: at most `most` times in `window_seconds`.

    engine_timeout: seconds without a heartbeat after which an engine counts as hung and is killed.
    """

    allowed: bool = True
    most: int = 3
    window_seconds: float = 600.0
    first_pause_seconds: float = 0.5
    engine_timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """host and port to bind, port 0 for any free one. served_names: the model's names for clients; the
    first is the one it answers with. api_keys: empty lets everybody in. max_queued: sequences that may
    wait beside those that run; None is four times max_num_seqs. max_queued_tokens: of prompts that wait;
    None is what is computed in ten seconds. allowed_origins: of pages in browsers, beside this machine's
    own; "*" is every page.
    """

    host: str
    port: int
    served_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_queued: int | None = None
    max_queued_tokens: int | None = None
    allowed_origins: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    model_defaults: bool = True
    limits: Limits = field(default_factory=Limits)
    restarts: Restarts = field(default_factory=Restarts)
