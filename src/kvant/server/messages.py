"""What the API process and the engine process say to each other: msgpack, strictly typed, never pickle.

The engine's process reads `ToEngine` and writes `FromEngine`; decoding refuses every unknown field
and every wrong type. Ids are the API process's own numbers and never repeat, restarts included.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.structured_outputs import StructuredOutputs
from kvant.scheduling.request import FinishReason


class Structured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kvant.sampling.structured_outputs.StructuredOutputs`, field by field."""

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    asked_as: str = "structured_outputs"

    def checked(self) -> StructuredOutputs:
        """RequestError, naming `asked_as`, for what is too large or no form at all."""
        return StructuredOutputs(**msgspec.structs.asdict(self))


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kvant.sampling.sampling_params.SamplingParams`, field by field."""

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    structured_outputs: Structured | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def params(self) -> SamplingParams:
        """Checked; RequestError names the field at fault."""
        fields = msgspec.structs.asdict(self)
        if self.structured_outputs is not None:
            fields["structured_outputs"] = self.structured_outputs.checked()
        return SamplingParams(**fields)


class Submit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="submit"):
    """One sequence to complete. salt: see `Engine.submit`."""

    id: int
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    salt: str


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cancel"):
    """End these, wherever they are; unknown ones are no fault."""

    ids: tuple[int, ...]


ToEngine = Submit | Cancel


class Loading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="loading"):
    """A download or conversion during start-up, in bytes."""

    task: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The engine takes requests. plan: the JSON of `kvant plan`. path: where the tokenizer lies."""

    model: str
    path: str
    revision: str | None
    plan: bytes
    stored_as: str
    bytes_per_token: int
    capacity_tokens: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    page_size: int
    notes: tuple[str, ...]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fault"):
    """The engine could not start: a message for the user, and the exit code that fits it."""

    message: str
    exit_code: int


class Logprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`kvant.scheduling.request.TokenLogprobs`, field by field."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Seconds of one sequence on the engine's clock: until it first ran, then until its first token,
    then until its end.
    """

    queue: float
    prefill: float
    decode: float


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a step added to one sequence.

    logprobs: of the piece's tokens, where they were asked. prompt_logprobs: with the first piece, where
    they were asked: of every token of the prompt but its first. The other fields are set with the last
    piece. num_cached_tokens: of the prompt.
    """

    id: int
    text: str
    num_tokens: int
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    times: Times | None = None


FailureKind = Literal["refused", "numerical_error", "engine_fault", "engine_died", "shutting_down"]


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The end of a sequence without a result. param: the field at fault where it was refused."""

    id: int
    kind: FailureKind
    message: str
    param: str | None = None


class Drafts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`kvant.speculative.counts.SpeculationStats`, field by field."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    num_plain_steps: int = 0
    pays: bool = True


class Stats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`kvant.engine.result.EngineStats`, field by field. saturated: (layer, values of K, of V)."""

    num_running: int = 0
    num_waiting: int = 0
    num_held_pages: int = 0
    num_idle_pages: int = 0
    num_usable_pages: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    speculation: Drafts | None = None
    saturated: tuple[tuple[str, int, int], ...] = ()


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="report"):
    """What happened since the last one. An empty report is the heartbeat of an idle engine.

    prompt_tokens_per_second: how fast prompts are computed; 0 where it is not known yet. num_audits:
    of pages, by this engine while it was idle; num_audit_faults: of them, those that found something.
    num_scale_audits, num_scale_faults: looks at the scales of cached pages, and what had changed.
    """

    stats: Stats
    pieces: tuple[Piece, ...] = ()
    failures: tuple[Failure, ...] = ()
    prompt_tokens_per_second: float = 0.0
    num_audits: int = 0
    num_audit_faults: int = 0
    num_scale_audits: int = 0
    num_scale_faults: int = 0


FromEngine = Loading | Ready | Fault | Report

_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, strict=True)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine, strict=True)
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def read_to_engine(data: bytes) -> ToEngine:
    """msgspec.ValidationError or DecodeError for anything that is not exactly such a message."""
    return _to_engine.decode(data)


def read_from_engine(data: bytes) -> FromEngine:
    """msgspec.ValidationError or DecodeError for anything that is not exactly such a message."""
    return _from_engine.decode(data)
