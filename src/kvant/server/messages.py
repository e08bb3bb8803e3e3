"""Messages between the API process and the engine process: msgpack, strictly typed, never pickle.

The engine process reads `ToEngine` and writes `FromEngine`. Decoding refuses wrong types. The API process
numbers sequences by ids, which never repeat, even after a restart of the engine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvant.kv.offload.stats import OffloadStats
from kvant.kv.pages import GroupPages
from kvant.models.pooling import Pooling
from kvant.sampling.logprobs import TokenLogprobs
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import FinishReason
from kvant.speculative.counts import SpeculationStats


class Submit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="submit"):
    """One sequence to complete. salt: see `Engine.submit`."""

    id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: str


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cancel"):
    """Ends these sequences; unknown ids are ignored."""

    ids: tuple[int, ...]


ToEngine = Submit | Cancel


class Loading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="loading"):
    """Progress of a download, conversion or other task of the start; see `models.local.Progress`. total: 0
    for a phase of unknown length.
    """

    task: str
    done: int
    total: int
    unit: str

    @property
    def fraction(self) -> float | None:
        return min(1.0, self.done / self.total) if self.total else None


class PageStore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's page files. identity: fields of `PageIdentity`, which determine the files' names.

    windows: the window of each group of pages. budget: bytes. others: identities of other ranks' files.
    """

    directory: str
    identity: dict[str, str]
    windows: tuple[int | None, ...]
    budget: int
    others: tuple[dict[str, str], ...] = ()


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """Says that the engine accepts requests. plan: the JSON of `kvant plan`. path: the model's directory,
    for the tokenizer. pool_bytes: of pages, on all ranks. pooling: how an embedding engine makes a vector;
    None for an engine that generates.
    """

    model: str
    path: str
    revision: str | None
    plan: bytes
    stored_as: str
    bytes_per_token: int
    capacity_tokens: int
    pool_bytes: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    page_size: int
    fingerprint: str
    notes: tuple[str, ...]
    page_store: PageStore | None = None
    pooling: Pooling | None = None


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fault"):
    """Says that the engine could not start. message: for the user. exit_code: of the server."""

    message: str
    exit_code: int


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Seconds of one sequence on the engine's clock: waiting, computing the prompt, generating."""

    queue: float
    prefill: float
    decode: float


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one step added to one sequence.

    logprobs: of these tokens, if requested. prompt_logprobs: of every prompt token but the first, in the
    first piece, if requested. Only the last piece has the other fields. num_cached_tokens: prompt tokens from
    the prefix cache. hidden: see `Result`.
    """

    id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    times: Times | None = None
    hidden: bytes | None = None


FailureKind = Literal["refused", "numerical_error", "engine_fault", "engine_died", "shutting_down"]


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A sequence ended without a result. param: the wrong field, if the request was refused."""

    id: int
    kind: FailureKind
    message: str
    param: str | None = None


class Stats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The fields of `kvant.engine.result.EngineStats`. saturated: (layer, count of K, count of V)."""

    num_running: int = 0
    num_waiting: int = 0
    num_held_pages: int = 0
    num_idle_pages: int = 0
    num_usable_pages: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    speculation: SpeculationStats | None = None
    saturated: tuple[tuple[str, int, int], ...] = ()
    num_compiling: int = 0
    offload: OffloadStats | None = None
    groups: tuple[GroupPages, ...] = ()


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="report"):
    """Events since the last report, and the engine's counters. An idle engine's heartbeat has no events.

    The counters are those of `kvant.engine.driver.Driver`.
    """

    stats: Stats
    pieces: tuple[Piece, ...] = ()
    failures: tuple[Failure, ...] = ()
    prompt_tokens_per_second: float = 0.0
    num_tokens: int = 0
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
    """Decodes a message. Raises msgspec.ValidationError or DecodeError for any other data."""
    return _to_engine.decode(data)


def read_from_engine(data: bytes) -> FromEngine:
    """Decodes a message. Raises msgspec.ValidationError or DecodeError for any other data."""
    return _from_engine.decode(data)
