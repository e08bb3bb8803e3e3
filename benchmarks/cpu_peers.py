"""Whole steps on a CPU, Kvant compared with its peers: the same tokens and threads, in turns.

Each part is one run: the contestants take turns, `ROUNDS` times, on every case of the part. Weights of
equal width are compared. The KV cache is float32 unless a part says otherwise; in llama.cpp it is its
default, float16.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.engine_timing import Case
from benchmarks.peers.contest import Contestant, Row, kvant, take_turns
from benchmarks.peers.filled import engine_with
from benchmarks.peers.gguf_files import PeerWeights, demo_file
from benchmarks.peers.random_models import RandomModel, save_random
from benchmarks.peers.worker import Worker
from kvant.engine.llm import LLM
from kvant.errors import WayOut
from kvant.kv.dtype import KVDtype
from kvant.kv.names import FormatRequest
from kvant.models.demo import DEMO_NAME
from kvant.models.locate import locate
from kvant.models.quantization import Activations, Quantization

ROUNDS = 3
LONG = 4096
DECODE_CASES = (Case(True, 1, 128), Case(True, 8, 128))
SHORT_CASES = (*DECODE_CASES, Case(False, 1, 2048))
LONG_CASE = Case(True, 8, LONG)


class Peer(Enum):
    """A peer, by the name of its package."""

    TRANSFORMERS = "transformers"
    LLAMA_CPP = "llama-cpp"


class Part(Enum):
    """A comparison: the contestants and what they store."""

    FLOAT32 = "float32-weights"
    INT8 = "int8-weights"
    INT4 = "int4-weights"
    Q8_0 = "q8_0-weights"  # the same GGUF file
    Q4_0 = "q4_0-weights"
    CONTEXT = "long-context"
    EXPERTS = "experts-100m"  # random weights, a bfloat16 checkpoint
    HYBRID = "hybrid-100m"


_QUANTIZATION = {
    Part.INT8: Quantization.INT8.value,
    Part.INT4: Quantization.INT4.value,
}


_FILES = {Part.Q8_0: PeerWeights.Q8_0, Part.Q4_0: PeerWeights.Q4_0}
"""Parts in which every engine opens the same file."""

_PEER_WEIGHTS = {Part.INT8: PeerWeights.Q8_0, Part.INT4: PeerWeights.Q4_0, **_FILES}
_CASES = {Part.FLOAT32: SHORT_CASES, Part.CONTEXT: (LONG_CASE,)}
_RANDOM = {Part.EXPERTS: RandomModel.EXPERTS, Part.HYBRID: RandomModel.HYBRID}
"""Parts over random models, in transformers' default dtype and in float32."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers to run, with their number of threads. python: an interpreter with llama_cpp."""

    wanted: frozenset[Peer]
    threads: int
    python: Path


def measure_part(part: Part, peers: Peers) -> tuple[list[Row], dict[str, str]]:
    """Measures every case of a part; also returns versions of the peers.

    Raises ConfigError for a missing peer.
    """
    versions: dict[str, str] = {}
    rows: list[Row] = []
    with ExitStack() as stack:
        long = part is Part.CONTEXT
        if part in _RANDOM:
            contestants = list(_over_random(_RANDOM[part], peers, stack, versions))
        else:
            contestants = [*_peers_of(part, peers, stack, versions), *_kvant_of(part)]
        for case in _CASES.get(part, DECODE_CASES):
            repeats = (5 if long else 24) if case.decode else 1
            for row in take_turns(contestants, case, repeats=repeats, rounds=ROUNDS):
                sys.stderr.write(
                    f"{case}: {row.engine} {row.weights}, KV {row.kv}: "
                    f"{row.tokens_per_second:.1f} tokens/s\n"
                )
                rows.append(replace(row, part=part.value))
    return rows, versions


def table(rows: Sequence[Row]) -> str:
    """Formats medians over all rounds as Markdown."""
    lines = [
        "| what | engine | weights | KV | ms | best ms | tokens/s |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row.case} | {row.engine} | {row.weights} | {row.kv} | {row.median_ms:.1f} | "
            f"{row.best_ms:.1f} | {row.tokens_per_second:.1f} |"
        )
    return "\n".join(lines)


def _over_random(
    model: RandomModel, peers: Peers, stack: ExitStack, versions: dict[str, str]
) -> Iterator[Contestant]:
    """Compares transformers and Kvant, each in its default dtype and in float32."""
    path = save_random(model, Path(stack.enter_context(TemporaryDirectory())))
    for dtype in ("auto", "float32"):
        if Peer.TRANSFORMERS in peers.wanted:
            worker = stack.enter_context(_transformers(peers, path, dtype))
            yield _peer(worker, f"bfloat16, dtype {dtype}", dtype, False, versions)
        most = max(case.batch for case in DECODE_CASES)
        llm = LLM(
            str(path), dtype=dtype, max_num_seqs=most, kv_cache_memory="128MiB", max_model_len=512
        )
        compute = llm.plan.compute_dtype
        computed = "" if dtype == compute.value else f" ({compute.value})"
        yield kvant(llm.engine, f"bfloat16, dtype {dtype}{computed}", compute.kv_dtype)


def _kvant_of(part: Part) -> Iterator[Contestant]:
    if part is Part.CONTEXT:
        llm = _open(Part.FLOAT32)
        for stored in (
            KVDtype.FLOAT32,
            KVDtype.FP8_E4M3,
            KVDtype.INT8_PER_TOKEN_HEAD,
            KVDtype.INT4_PER_TOKEN_HEAD,
        ):
            yield _kvant(llm, part, stored, LONG_CASE)
        return
    yield _kvant(_open(part), part, KVDtype.FLOAT32, *SHORT_CASES)
    if part in _FILES:
        llm = _open(part, activations=Activations.INT8)
        yield _kvant(llm, part, KVDtype.FLOAT32, *SHORT_CASES, suffix=", activations int8")


def _open(part: Part, activations: Activations | None = None) -> LLM:
    return LLM(
        demo_file(_FILES[part]) if part in _FILES else DEMO_NAME,
        weight_activations=None if activations is None else activations.value,
        dtype="float32",
        kv_cache_dtype="float32",
        max_num_seqs=1,
        kv_cache_memory="64MiB",
        quantization=_QUANTIZATION.get(part),
    )


def _kvant(llm: LLM, part: Part, stored: KVDtype, *cases: Case, suffix: str = "") -> Contestant:
    context, batch = max(c.context for c in cases), max(c.batch for c in cases)
    filled = part is Part.CONTEXT
    engine = engine_with(
        llm, FormatRequest(stored, stored), batch=batch, context=context, filled=filled
    )
    return kvant(engine, _weights_name(part) + suffix, stored)


def _weights_name(part: Part) -> str:
    if part in _FILES:
        return _FILES[part].name
    return {Part.INT8: "int8", Part.INT4: "int4"}.get(part, "float32")


def _peers_of(
    part: Part, peers: Peers, stack: ExitStack, versions: dict[str, str]
) -> Iterator[Contestant]:
    filled = part is Part.CONTEXT
    if Peer.TRANSFORMERS in peers.wanted and part in (Part.FLOAT32, Part.CONTEXT):
        worker = stack.enter_context(_transformers(peers))
        yield _peer(worker, "float32", "float32", filled, versions)
    if Peer.LLAMA_CPP in peers.wanted:
        weights = _PEER_WEIGHTS.get(part, PeerWeights.F32)
        for kv in ("f16", "q8_0") if filled else ("f16",):
            worker = stack.enter_context(_llama_cpp(peers, weights, kv, filled=filled))
            yield _peer(worker, weights.name, kv, filled, versions)


def _peer(
    worker: Worker, weights: str, kv: str, filled: bool, versions: dict[str, str]
) -> Contestant:
    versions.update(worker.about)

    def time(case: Case, repeats: int) -> tuple[Sequence[float], None]:
        return worker.time(case, repeats=repeats, seed=0, filled=filled), None

    return Contestant(worker.name, weights, kv, time)


def _transformers(peers: Peers, path: Path | None = None, dtype: str = "float32") -> Worker:
    module = "benchmarks.peers.transformers_worker"
    path = locate(DEMO_NAME).path if path is None else path
    command = (sys.executable, "-m", module, str(path), str(peers.threads), dtype)
    return Worker("transformers", command, [WayOut("leave it out", ("--peers", "llama-cpp"))])


def _llama_cpp(peers: Peers, weights: PeerWeights, kv: str, *, filled: bool) -> Worker:
    context, batch = (LONG + 128, 8) if filled else (2048 + 128, 8)
    script = Path(__file__).parent / "peers" / "llama_cpp_worker.py"
    arguments = (demo_file(weights), peers.threads, kv, context, batch)
    command = (str(peers.python), str(script), *map(str, arguments))
    venv = Path("/tmp/llama-cpp")
    make = f"python3 -m venv {venv} && {venv}/bin/pip install llama-cpp-python"
    ways_out = [
        WayOut(
            f"build it beside Kvant, with a C++ compiler ({make}), and name its Python",
            ("--llama-cpp-python", str(venv / "bin" / "python")),
        ),
        WayOut("leave it out", ("--peers", "transformers")),
    ]
    return Worker("llama.cpp", command, ways_out)
