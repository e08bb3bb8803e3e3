"""The options and limits of a server, read once at the start and then frozen."""

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

_server = partial(option, panel="Server")
_limit = partial(option, panel="Limits")
_most = partial(_limit, prefix="max_")


@dataclass(frozen=True, slots=True)
class Limits:
    """Inclusive limits on one client's requests. Sizes are in bytes, times in seconds."""

    body_bytes: int = _most(32 * 2**20, "Bytes of a request's body.", low=1)
    header_bytes: int = _most(32 * 2**10, "Bytes of a request's header.", low=256)
    header_count: int = _most(100, "Lines of a request's header.", low=1)
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
    connections: int = _most(1024, "Connections at once.", low=1)
    prompts: int = _most(256, "Prompts of one request.", low=1)
    n: int = _most(MAX_N, "Answers to one prompt.", low=1, high=MAX_N)
    sequences: int = _most(512, "Prompts times n of one request.", low=1)
    top_logprobs: int = _most(
        MAX_LOGPROBS, "Log-probabilities at one token.", low=0, high=MAX_LOGPROBS
    )
    prompt_logprobs: int = _most(
        2**19,
        "Log-probabilities of one request's prompts: their tokens times those reported for each.",
        low=1,
    )
    logit_bias: int = _most(MAX_LOGIT_BIAS, "Entries of logit_bias.", low=0, high=MAX_LOGIT_BIAS)
    bad_words: int = _most(MAX_BAD_WORDS, "Texts of bad_words.", low=0, high=MAX_BAD_WORDS)
    stop: int = _most(MAX_STOPS, "Stop strings.", name="stops", low=0, high=MAX_STOPS)
    stop_chars: int = _most(
        MAX_STOP_CHARS, "Characters of a stop string.", low=1, high=MAX_STOP_CHARS
    )
    form_bytes: int = _most(
        MOST.text_bytes,
        "Bytes of a schema, regex or grammar, or of all choices.",
        low=1,
        high=MOST.text_bytes,
    )
    schema_depth: int = _most(MOST.depth, "Levels of a schema.", low=1, high=MOST.depth)
    schema_nodes: int = _most(MOST.nodes, "Nodes of a schema.", low=1, high=MOST.nodes)
    enum_values: int = _most(MOST.enum, "Values of an enum, or choices.", low=1, high=MOST.enum)
    schema_branches: int = _most(
        MOST.branches, "Branches of one anyOf, oneOf or allOf.", low=1, high=MOST.branches
    )
    metadata_entries: int = _most(16, "Entries of metadata.", low=0)
    metadata_key_chars: int = _most(64, "Characters of a key of metadata.", low=1)
    metadata_value_chars: int = _most(512, "Characters of a value of metadata.", low=0)
    cache_salt_chars: int = _most(256, "Characters of a cache_salt.", low=1)
    stored_responses: int = _most(1000, "Responses kept for later requests; 0 keeps none.", low=0)
    stored_bytes: int = _most(
        64 * 2**20, "Bytes of kept responses with their conversations.", low=1
    )
    request_seconds: float = _limit(
        600.0, "Seconds for one request.", name="request_timeout", low=0.1
    )
    stream_buffer_bytes: int = _most(
        2**20,
        "Bytes of text that wait for a client that reads slowly; more ends its request.",
        low=2**12,  # one piece alone could exceed a smaller limit
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

    def items_of(self, parameter: str) -> int:
        """Returns the most items of a sampling parameter whose declaration names them (`Param.items`)."""
        most: int = getattr(self, parameter)
        return most

    @property
    def form(self) -> FormLimits:
        """The limits of structured output."""
        return FormLimits(
            self.form_bytes,
            self.schema_depth,
            self.schema_nodes,
            self.enum_values,
            self.schema_branches,
        )


@dataclass(frozen=True, slots=True)
class Restarts:
    """The rules for restarting a dead engine: at most `most` times within `window_seconds`.

    engine_timeout: seconds without a heartbeat after which an engine counts as hung and is killed.
    """

    allowed: bool = _server(
        True, "Start a dead engine again, three times in ten minutes by default.", name="restart"
    )
    most: int = _server(3, "Number of restarts before giving up.", name="max_restarts", low=0)
    window_seconds: float = _server(
        600.0, "Seconds in which restarts are counted.", name="restart_window", low=1
    )
    first_pause_seconds: float = _server(
        0.5,
        "Seconds before the first restart; each next one waits twice as long.",
        name="restart_pause",
        low=0,
    )
    engine_timeout: float = _server(
        60.0, "Seconds of silence after which an engine counts as hung.", low=1
    )


@dataclass(frozen=True, slots=True)
class EventOptions:
    """Options of KV events. kv_events: where the engine process publishes changes of the prefix cache."""

    kv_events: str | None = _server(
        None,
        "Publish cached pages for routers: ENDPOINT[,replay=ENDPOINT][,topic=TEXT].",
        metavar="ENDPOINT",
        unset="not published",
    )

    @property
    def parsed(self) -> EventsConfig | None:
        """The parsed option, or None. Raises BadValue."""
        if self.kv_events is None:
            return None
        return parse_events(self.kv_events, asked_by="--kv-events")


EVENT_OPTIONS = options_of(EventOptions)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A server's configuration. host, port: the address to bind. served_names: the model's names for
    clients; answers have the first one. api_keys: an empty tuple accepts every request. max_queued: sequences
    that may wait beside the running ones; None is four times max_num_seqs. max_queued_tokens: prompt tokens
    that may wait; None is what the engine computes in ten seconds. allowed_origins: origins of web pages
    beside this machine's own; "*" allows every page.
    """

    host: str = _server("127.0.0.1", "Address to listen on.")
    port: int = _server(8000, "0: any free one.", low=0, high=65535)
    served_names: tuple[str, ...] = _server(
        (),
        "Name for clients, instead of the model's own; may be repeated, the first one answers.",
        name="served_model_name",
    )
    api_keys: tuple[str, ...] = _server(
        (), "Key that clients must send; may be repeated.", name="api_key", secret=True
    )
    api_key_file: str | None = _server(
        None,
        "File with one key a line; lines with # are comments.",
        metavar="FILE",
        unset="none",
    )
    allowed_origins: tuple[str, ...] = _server(
        (),
        "Pages, beside this machine's own, that may use it in a browser; * for all; may be repeated.",
        metavar="ORIGIN",
    )
    insecure_no_auth: bool = _server(False, "Listen beyond this machine without a key.")
    max_queued: int | None = _server(
        None,
        "Sequences that may wait.",
        name="max_num_queued_reqs",
        low=0,
        unset="four times max_num_seqs",
    )
    max_queued_tokens: int | None = _server(
        None,
        "Prompt tokens that may wait.",
        name="max_num_queued_tokens",
        low=1,
        unset="what takes ten seconds, as measured",
    )
    shutdown_timeout: float = _server(
        30.0, "Seconds that running requests get after SIGTERM.", low=0
    )
    generation_config: str = _server(
        "auto",
        "Whether the model's own sampling defaults apply.",
        choices=("auto", "none"),
        metavar="auto|none",
    )
    chat_template: str | None = _server(
        None, "Jinja file that writes conversations.", metavar="FILE", unset="the checkpoint's"
    )
    default_chat_template_kwargs: str | None = _server(
        None,
        "Values for the chat template of requests that set none.",
        metavar="JSON",
        unset="none",
    )
    log_requests: bool = _server(False, "Print one line for each request, without its contents.")
    limits: Limits = field(default_factory=Limits)
    restarts: Restarts = field(default_factory=Restarts)
    events: EventOptions = field(default_factory=EventOptions)

    @property
    def model_defaults(self) -> bool:
        return self.generation_config == "auto"

    @property
    def own_template(self) -> str | None:
        """The text of the file given by --chat-template, or None. Raises BadValue."""
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
