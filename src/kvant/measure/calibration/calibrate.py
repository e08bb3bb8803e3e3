"""One calibration: read a text, make candidates, compare them on held-out text, keep the best.

Finished parts are kept on disk (`kvant.measure.quality.kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.backends import load_backends
from kvant.engine.llm import LLM
from kvant.errors import KV_FORMAT, BadValue, WayOut
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.kv.names import FormatRequest, parse_format
from kvant.kv.spec import KVPlan
from kvant.measure.calibration.feedback import feedback_matrices
from kvant.measure.calibration.scales import Candidate, candidates, check_seen
from kvant.measure.calibration.seen import (
    SeeingBackend,
    Seen,
    add_packed,
    nothing_seen,
    pack,
)
from kvant.measure.own_engine import plan_storing, runner_of
from kvant.measure.quality.compare import MOST_WINDOWS, OnProgress, Outside
from kvant.measure.quality.evaluate import Part, comparison, run_parts, unpack
from kvant.measure.quality.kept import Arrays, Kept
from kvant.measure.quality.kl_statistics import join, statistics_of
from kvant.measure.quality.texts import Text, windows
from kvant.measure.teacher_forced import TextReader
from kvant.models.loaded import LoadedModel

CHUNK = 256
UNCALIBRATED = "uncalibrated"
_FED, _PLAIN = KVDtype.INT4_FEEDBACK, KVDtype.INT4_PER_TOKEN_HEAD
LEAST_HELD_OUT = 2000
"""Minimum number of positions on which candidates are compared."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """The text in windows [n, context] int64. seen: for measuring scales. held_out: for comparing them."""

    seen: Tensor
    held_out: Tensor

    @property
    def context(self) -> int:
        return self.seen.shape[1]


def divide_text(text: Text, llm: LLM, context: int, tokens: int) -> Lesson:
    """Returns windows for calibration, with at most `tokens` tokens, and later windows for comparison.

    Raises BadValue, with the number of tokens needed, if the text is too short.
    """
    judges = -(-LEAST_HELD_OUT // (context - 1))
    have, least = len(text.token_ids), (judges + judges) * context
    if have < least:
        raise BadValue(
            f"the text {text.name} is too short to calibrate on",
            why=f"it has {have} tokens; {least} are needed: half to measure, and {LEAST_HELD_OUT} "
            "positions at least to compare on",
            ways_out=(WayOut("give a longer text", ("--text", "FILE")),),
        )
    cut = windows(text, llm, context, have)
    measured = max(judges, min(len(cut) - judges, tokens // context))
    return Lesson(cut[:measured], cut[measured : measured + judges])


@dataclass(frozen=True, slots=True)
class Compared:
    """A candidate's distances on held-out text. name: of the candidate, or `UNCALIBRATED`."""

    name: str
    kld_mean: float
    kld_mean_error: float
    kld_p99: float
    same_top: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result. winner: the candidate with the least mean KL divergence. compared: all, best first.

    matrices: for rounding keys with feedback, by layer index; empty if head sizes do not allow 4 bits.
    rounding: distances of int4_feedback and of int4_per_token_head on the same positions.
    """

    seen: Seen
    winner: Candidate
    compared: tuple[Compared, ...]
    matrices: Mapping[int, Tensor]
    rounding: tuple[Compared, ...]
    positions: int


class Calibrator:
    """Runs one calibration. llm: the model; its plan stores the model dtype. lesson: the text.

    Raises BadValue if no layer stores both keys and values.
    """

    def __init__(self, llm: LLM, lesson: Lesson, fmt: KVDtype, kept: Kept) -> None:
        runner = runner_of(llm)
        self._llm = llm
        self._model: LoadedModel = runner.model
        self._lesson = lesson
        self._wide = plan_storing(llm, parse_format("model", asked_by="kvant calibrate"))
        if not nothing_seen(self._wide):
            raise BadValue(
                f"no layer of {llm.planned.target.local.name} stores keys and values",
                why="scales are measured for both sides, and a latent (MLA) has none",
                ways_out=(
                    WayOut(
                        "choose a format that carries its own scales",
                        (KV_FORMAT, str(KVDtype.FP8_PER_TOKEN_HEAD)),
                    ),
                ),
            )
        self._narrow = plan_storing(llm, FormatRequest(fmt, fmt))
        self._kept = kept

    def run(self, on_progress: Callable[[int, int], None]) -> Calibration:
        """Measures scales, and compares them on held-out text.

        on_progress: called with the number of tokens done, and of all tokens. Raises BadValue if no scale can
        be made from the text.
        """
        seen = self.look(on_progress)
        names = {spec.geometry.index: spec.geometry.name for spec in self._wide.layers}
        check_seen(seen, names)
        made = candidates(seen)
        plans: dict[str, KVPlan] = dict.fromkeys(
            (UNCALIBRATED, *(c.name for c in made)), self._narrow
        )
        scales: dict[str, Outside] = {UNCALIBRATED: {}, **{c.name: c.scales for c in made}}
        matrices = self._matrices(seen)
        if matrices:
            plain = plan_storing(self._llm, FormatRequest(_PLAIN, _PLAIN))
            plans |= {str(_PLAIN): plain, str(_FED): with_feedback(plain)}
            scales[str(_PLAIN)] = {}
            scales[str(_FED)] = {(index, Side.K): matrix for index, matrix in matrices.items()}
        every = self._compare(plans, scales, on_progress)
        rounding = tuple(one for one in every if one.name in (str(_FED), str(_PLAIN)))
        found = [one for one in every if one not in rounding]
        best = min((one for one in found if one.name != UNCALIBRATED), key=lambda one: one.kld_mean)
        winner = next(one for one in made if one.name == best.name)
        ordered = tuple(sorted(found, key=lambda one: one.kld_mean))
        positions = self._lesson.held_out[:, 1:].numel()
        return Calibration(seen, winner, ordered, matrices, rounding, positions)

    def _matrices(self, seen: Seen) -> dict[int, Tensor]:
        """Returns feedback matrices, if keys and values of every layer can be stored in 4 bits.

        Else nothing.
        """
        narrow = _FED.format
        sizes = {
            size
            for spec in self._wide.layers
            if spec.k is not None
            for size in (spec.geometry.head_dim_k, spec.geometry.head_dim_v)
        }
        if any(narrow.refuse_head_dim(size) for size in sizes):
            return {}
        return feedback_matrices(seen)

    def look(self, on_progress: Callable[[int, int], None]) -> Seen:
        """Reads the calibration windows with the KV cache in the model dtype; returns their statistics."""
        batches = torch.split(self._lesson.seen, MOST_WINDOWS)
        longest = self._llm.planned.target.geometry.max_model_len or self._lesson.context
        room = max(0, longest - self._lesson.context)
        parts = [
            Part(
                f"seen-{number}",
                batch.numel(),
                # Moments of rotated heads depend on positions, so batches begin at different ones.
                partial(self._look, batch, room * number // max(1, len(batches) - 1)),
            )
            for number, batch in enumerate(batches)
        ]
        found = run_parts(parts, self._kept, on_progress)
        seen = nothing_seen(self._wide)
        add_packed(seen, found.values())
        return seen

    def _look(self, batch: Tensor, first_position: int, on_progress: OnProgress) -> Arrays:
        seen = nothing_seen(self._wide)
        backends = load_backends(self._wide, batch_invariant=self._model.batch_invariant)
        reader = TextReader(
            self._model,
            self._wide,
            len(batch),
            batch.shape[1],
            backends=tuple(SeeingBackend(inner, seen) for inner in backends),
            first_position=first_position,
        )
        for ids in torch.split(batch.to(self._model.device), CHUNK, dim=1):
            reader.fill(ids)
            on_progress(ids.numel())
        return pack(seen)

    def _compare(
        self,
        plans: Mapping[str, KVPlan],
        scales: Mapping[str, Outside],
        on_progress: Callable[[int, int], None],
    ) -> list[Compared]:
        parts = [
            comparison(self._llm, self._wide, f"compared-{number}", plans, batch, scales=scales)
            for number, batch in enumerate(torch.split(self._lesson.held_out, MOST_WINDOWS))
        ]
        arrays = run_parts(parts, self._kept, on_progress)
        batches = [unpack(one) for one in arrays.values()]
        found = []
        for name in plans:
            whole = statistics_of(join([one[name].prefill for one in batches]))
            found.append(
                Compared(name, whole.kld_mean, whole.kld_mean_error, whole.kld_p99, whole.same_top)
            )
        return found


def with_feedback(plain: KVPlan) -> KVPlan:
    """Returns a plan whose keys are rounded with matrices that the checkpoint does not have yet."""
    layers = []
    for spec in plain.layers:
        if spec.k is not None:
            spec = replace(spec, k=replace(spec.k, dtype=_FED))
        layers.append(spec)
    return replace(plain, layers=tuple(layers))


def report(found: Calibration) -> dict[str, Any]:
    """Returns schema 1 of `kvant calibrate --format json`, without files and facts."""
    values = [value for tensor in found.winner.scales.values() for value in tensor.tolist()]
    return {
        "schema": 1,
        "winner": found.winner.name,
        "positions": found.positions,
        "compared": {one.name: _entry(one) for one in found.compared},
        "rounding": {one.name: _entry(one) for one in found.rounding},
        "scales": {"least": float(np.min(values)), "most": float(np.max(values))},
    }


def _entry(one: Compared) -> dict[str, float]:
    entry = asdict(one)
    del entry["name"]
    return entry
