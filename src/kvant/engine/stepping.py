"""One step: from a schedule to rows of logits, recorded where that can be, with the proposer's drafts."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, isfinite

from kvant.engine.batch import Batch, build_batch, num_scored
from kvant.engine.decodes import list_decodes
from kvant.engine.request import Sequence
from kvant.engine.runner import Runner
from kvant.engine.sampler import Rows, token_logprobs
from kvant.engine.scheduler import Chunk, Schedule, Scheduler
from kvant.engine.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that was run.

    chunks: with their drafts. rows: of logits; first_rows: where each chunk's begin. broken: sequences
    whose prompt gave NaN. went_ahead: the step after it runs already, if it is its continuation.
    """

    chunks: list[Chunk]
    rows: Rows
    first_rows: list[int]
    broken: list[Sequence]
    went_ahead: bool = False


def run_step(
    runner: Runner,
    scheduler: Scheduler,
    speculation: Speculation | None,
    schedule: Schedule,
    num_drafts: int,
) -> Ran:
    """Clear new pages, draft up to `num_drafts` tokens behind each newest one, run the model."""
    chunks = schedule.chunks
    if schedule.pages_to_zero:
        runner.zero(schedule.pages_to_zero)
        if speculation is not None:
            speculation.zero(schedule.pages_to_zero)
    recorded: Items[int] = ()
    if all(map(_is_decode, chunks[len(chunks) - schedule.num_prefills :])):
        recorded = runner.recorded(len(chunks))
    if num_drafts in recorded:
        ahead = (
            runner.looks_ahead
            and schedule.has_everyone
            and (speculation is None or speculation.goes_on())
        )
        return _run_recorded(runner, scheduler, chunks, num_drafts, ahead=ahead)
    if speculation is not None:
        chunks = speculation.propose(chunks)
        if 0 in recorded and not any(chunk.drafts for chunk in chunks):
            return _run_recorded(runner, scheduler, chunks, 0, ahead=False)
    batch = build_batch(chunks, scheduler.page_table, scheduler.limits.page_size)
    logits = runner.run(batch)
    broken = _score(batch, logits) if batch.scored else []
    first_rows = [0, *accumulate(chunk.num_rows for chunk in chunks)][:-1]
    rows = Rows(logits[: len(batch.sampled)], _rows_of(chunks, first_rows))
    return Ran(chunks, rows, first_rows, broken)


def _run_recorded(
    runner: Runner, scheduler: Scheduler, chunks: list[Chunk], num_drafts: int, *, ahead: bool
) -> Ran:
    """A step that is one launch, drafts and all.

    ahead: the next step is its continuation if nothing ends or arrives, so launch that too, if the
    device can find its tokens.
    """
    is_final = _are_found_there(chunks, num_drafts)
    ahead = ahead and is_final
    page_size = scheduler.limits.page_size
    logits = runner.run_decodes(
        list_decodes(
            chunks, scheduler.page_table, page_size, num_drafts, ahead=ahead, draws=is_final
        )
    )
    found = runner.read_decodes()
    if num_drafts:
        chunks = [
            chunk._replace(drafts=drafts)
            for chunk, drafts in zip(chunks, found.drafts, strict=True)
        ]
    wanted = [] if is_final else _rows_of(chunks, found.first_rows)
    rows = Rows(logits, wanted, found.known, is_final=is_final)
    return Ran(chunks, rows, found.first_rows, [], went_ahead=ahead)


def _score(batch: Batch, logits: Tensor) -> list[Sequence]:
    """Note the log-probabilities of prompt tokens; those whose logits are no numbers."""
    broken = []
    begin = len(batch.sampled)
    for chunk in batch.scored:
        sequence, count = chunk.sequence, num_scored(chunk)
        rows = logits[begin : begin + count]
        begin += count
        if not bool(isfinite(rows.max(dim=-1).values).all()):
            broken.append(sequence)
            continue
        num_top = sequence.request.params.prompt_logprobs
        assert num_top is not None
        assert sequence.prompt_logprobs is not None
        followers = sequence.token_ids[chunk.start + 1 : chunk.start + 1 + count]
        # What a preempted sequence computes again takes the place of what it had.
        sequence.prompt_logprobs[chunk.start :] = token_logprobs(rows, followers, num_top)
    return broken


def _rows_of(chunks: list[Chunk], first_rows: list[int]) -> list[tuple[int, Sequence, int]]:
    """Every row that may be sampled, whose it is, and how many drafts stand before it."""
    return [
        (first + place, chunk.sequence, place)
        for chunk, first in zip(chunks, first_rows, strict=True)
        for place in range(chunk.num_rows)
    ]


def _are_found_there(chunks: list[Chunk], num_drafts: int) -> bool:
    """Whether the device finds every token by itself. Whether drafts stand it tells by the likeliest."""
    if num_drafts:
        return all([chunk.sequence.is_plain for chunk in chunks])
    return all([chunk.sequence.is_drawn_alone for chunk in chunks])


def _is_decode(chunk: Chunk) -> bool:
    return chunk.num_tokens == 1 and chunk.samples
