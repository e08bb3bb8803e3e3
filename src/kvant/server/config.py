"""The configuration and limits of a server: options, built once at the edge, frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvant.errors import BadValue, WayOut
from kvant.kv.events import EventsConfig, parse_events
from kvant.plan.options import option, options_of
from kvant.sampling.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOPS,
)
from kvant.sampling.structured_outputs import MOST, FormLimits

_SERVER = "Server"
_limit = partial(option, panel="Limits")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client can ask for. A value is allowed, one more is refused.

    Sizes in bytes, times in seconds.
    """

    body_bytes: int = _limit(32 * 2**20, "Bytes of a request's body.", name="max_body_bytes", low=1)
    header_bytes: int = _limit(
        32 * 2**10, "Bytes of a request's header.", name="max_header_bytes", low=256
    )
    header_count: int = _limit(100, "Lines of a request's header.", name="max_header_count", low=1)
    header_seconds: float = _limit(
        10.0, "Seconds in which a request's header must arrive.", name="header_timeout", low=0.1
    )
    body_seconds: float = _limit(
        30.0, "Seconds in which a request's body must arrive.", name="body_timeout", low=0.1
    )
    keep_alive_seconds: int = _limit(
        5,
        "Seconds that a connection may wait for its next request.",
        name="keep_alive_timeout",
        low=1,
    )
    connections: int = _limit(1024, "Connections at once.", name="max_connections", low=1)
    prompts: int = _limit(256, "Prompts of one request.", name="max_prompts", low=1)
    n: int = _limit(MAX_N, "Answers to one prompt.", name="max_n", low=1, high=MAX_N)
    sequences: int = _limit(512, "Prompts times n of one request.", name="max_sequences", low=1)
    top_logprobs: int = _limit(
        MAX_LOGPROBS,
        "Log-probabilities at one token.",
        name="max_top_logprobs",
        low=0,
        high=MAX_LOGPROBS,
    )
    prompt_logprobs: int = _limit(
        2**19,
        "Log-probabilities of one request's prompts: their tokens times those reported for each.",
        name="max_prompt_logprobs",
        low=1,
    )
    logit_bias: int = _limit(
        MAX_LOGIT_BIAS, "Entries of logit_bias.", name="max_logit_bias", low=0, high=MAX_LOGIT_BIAS
    )
    bad_words: int = _limit(
        MAX_BAD_WORDS, "Texts of bad_words.", name="max_bad_words", low=0, high=MAX_BAD_WORDS
    )
    stops: int = _limit(MAX_STOPS, "Stop strings.", name="max_stops", low=0, high=MAX_STOPS)
    stop_chars: int = _limit(
        MAX_STOP_CHARS,
        "Characters of a stop string.",
        name="max_stop_chars",
        low=1,
        high=MAX_STOP_CHARS,
    )
    form_bytes: int = _limit(
        MOST.text_bytes,
        "Bytes of a schema, regex or grammar, or of all choices.",
        name="max_form_bytes",
        low=1,
        high=MOST.text_bytes,
    )
    schema_depth: int = _limit(
        MOST.depth, "Levels of a schema.", name="max_schema_depth", low=1, high=MOST.depth
    )
    schema_nodes: int = _limit(
        MOST.nodes, "Nodes of a schema.", name="max_schema_nodes", low=1, high=MOST.nodes
    )
    enum_values: int = _limit(
        MOST.enum, "Values of an enum, or choices.", name="max_enum_values", low=1, high=MOST.enum
    )
    schema_branches: int = _limit(
        MOST.branches,
        "Branches of one anyOf, oneOf or allOf.",
        name="max_schema_branches",
        low=1,
        high=MOST.branches,
    )
    metadata_entries: int = _limit(16, "Entries of metadata.", name="max_metadata_entries", low=0)
    metadata_key_chars: int = _limit(
        64, "Characters of a key of metadata.", name="max_metadata_key_chars", low=1
    )
    metadata_value_chars: int = _limit(
        512, "Characters of a value of metadata.", name="max_metadata_value_chars", low=0
    )
    cache_salt_chars: int = _limit(
        256, "Characters of a cache_salt.", name="max_cache_salt_chars", low=1
    )
    stored_responses: int = _limit(
        1000,
        "Responses kept for later requests; 0 keeps none.",
        name="max_stored_responses",
        low=0,
    )
    stored_bytes: int = _limit(
        64 * 2**20,
        "Bytes of kept responses with their conversations.",
        name="max_stored_bytes",
        low=1,
    )
    request_seconds: float = _limit(
        600.0, "Seconds for one request.", name="request_timeout", low=0.1
    )
    stream_buffer_bytes: int = _limit(
        2**20,
        "Bytes of text that wait for a client that reads slowly; more ends its request.",
        name="max_stream_buffer_bytes",
        low=2**12,  # with less, one piece could exceed it
    )
    template_seconds: float = _limit(
        2.0,
        "Seconds in which a conversation must be rendered by the chat template.",
        name="template_timeout",
        low=0.1,
    )
    ping_seconds: float = _limit(
        15.0,
        "Seconds of silence after which a stream says that it is alive.",
        name="ping_interval",
        low=0.1,
    )

    @property
    def form(self) -> FormLimits:
        """Limits of structured output."""
        return FormLimits(
            self.form_bytes,
            self.schema_depth,
            self.schema_nodes,
            self.enum_values,
            self.schema_branches,
        )


@dataclass(frozen=True, slots=True)
class Restarts:
    """When a dead engine is started again: at most `most` times in `window_seconds`.

    engine_timeout: seconds without a heartbeat after which an engine counts as hung and is killed.
    """

    allowed: bool = option(
        True,
        "Start a dead engine again, three times in ten minutes by default.",
        name="restart",
        panel=_SERVER,
    )
    most: int = option(
        3, "Number of restarts before giving up.", name="max_restarts", low=0, panel=_SERVER
    )
    window_seconds: float = option(
        600.0, "Seconds in which restarts are counted.", name="restart_window", low=1, panel=_SERVER
    )
    first_pause_seconds: float = option(
        0.5,
        "Seconds before the first restart; each next one waits twice as long.",
        name="restart_pause",
        low=0,
        panel=_SERVER,
    )
    engine_timeout: float = option(
        60.0,
        "Seconds of silence after which an engine counts as hung.",
        low=1,
        panel=_SERVER,
    )


@dataclass(frozen=True, slots=True)
class EventOptions:
    """kv_events: where the engine process publishes what the prefix cache holds."""

    kv_events: str | None = option(
        None,
        "Publish cached pages for routers: ENDPOINT[,replay=ENDPOINT][,topic=TEXT].",
        metavar="ENDPOINT",
        unset="not published",
        panel=_SERVER,
    )

    @property
    def parsed(self) -> EventsConfig | None:
        """Raises BadValue."""
        if self.kv_events is None:
            return None
        return parse_events(self.kv_events, asked_by="--kv-events")


EVENT_OPTIONS = options_of(EventOptions)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """host and port to bind. served_names: the model's names for clients; the first is the one it
    answers with. api_keys: empty accepts every request. max_queued: sequences that may wait beside the
    running ones; None is four times max_num_seqs. max_queued_tokens: tokens of waiting prompts; None is
    what the engine computes in ten seconds. allowed_origins: origins of browser pages beside this machine's
    own; "*" is every page.
    """

    host: str = option("127.0.0.1", "Address to listen on.", panel=_SERVER)
    port: int = option(8000, "0: any free one.", low=0, high=65535, panel=_SERVER)
    served_names: tuple[str, ...] = option(
        (),
        "Name for clients, instead of the model's own; may be repeated, the first one answers.",
        name="served_model_name",
        panel=_SERVER,
    )
    api_keys: tuple[str, ...] = option(
        (),
        "Key that clients must send; may be repeated.",
        name="api_key",
        secret=True,
        panel=_SERVER,
    )
    api_key_file: str | None = option(
        None,
        "File with one key a line; lines with # are comments.",
        metavar="FILE",
        unset="none",
        panel=_SERVER,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Pages, beside this machine's own, that may use it in a browser; * for all; may be repeated.",
        metavar="ORIGIN",
        panel=_SERVER,
    )
    insecure_no_auth: bool = option(
        False, "Listen beyond this machine without a key.", panel=_SERVER
    )
    max_queued: int | None = option(
        None,
        "Sequences that may wait.",
        name="max_num_queued_reqs",
        low=0,
        unset="four times max_num_seqs",
        panel=_SERVER,
    )
    max_queued_tokens: int | None = option(
        None,
        "Prompt tokens that may wait.",
        name="max_num_queued_tokens",
        low=1,
        unset="what takes ten seconds, as measured",
        panel=_SERVER,
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests get after SIGTERM.", low=0, panel=_SERVER
    )
    generation_config: str = option(
        "auto",
        "Whether the model's own sampling defaults apply.",
        choices=("auto", "none"),
        metavar="auto|none",
        panel=_SERVER,
    )
    chat_template: str | None = option(
        None,
        "Jinja file that writes conversations.",
        metavar="FILE",
        unset="the checkpoint's",
        panel=_SERVER,
    )
    default_chat_template_kwargs: str | None = option(
        None,
        "Values for the chat template of requests that set none.",
        metavar="JSON",
        unset="none",
        panel=_SERVER,
    )
    log_requests: bool = option(
        False, "Print one line for each request, without its contents.", panel=_SERVER
    )
    limits: Limits = field(default_factory=Limits)
    restarts: Restarts = field(default_factory=Restarts)
    events: EventOptions = field(default_factory=EventOptions)

    @property
    def model_defaults(self) -> bool:
        return self.generation_config == "auto"

    @property
    def own_template(self) -> str | None:
        """The text of the file that --chat-template names. Raises BadValue."""
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise BadValue(
                f"--chat-template {self.chat_template} cannot be read",
                why=str(fault),
                ways_out=(WayOut("leave it out: the checkpoint's own template is used"),),
            ) from None


SERVER_OPTIONS = options_of(ServerConfig)
