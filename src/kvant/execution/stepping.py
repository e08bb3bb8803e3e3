"""One step: from a schedule to rows of logits, recorded where that can be, with the proposer's drafts."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, isfinite

from kvant.execution.batch import Batch, build_batch, num_scored
from kvant.execution.decodes import list_decodes, list_decodes_after
from kvant.execution.pieces import list_pieces
from kvant.execution.runner import Runner
from kvant.execution.sampler import Rows, token_logprobs
from kvant.execution.speculation import Speculation
from kvant.scheduling.request import Sequence
from kvant.scheduling.schedule import Chunk, Schedule
from kvant.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that was run.

    chunks: with their drafts. rows: of logits; first_rows: where each chunk's begin. broken: sequences
    whose prompt gave NaN. went_ahead: the step after it runs already, if it is its continuation.
    planned: the step after it, which was launched, if it runs pieces of prompts.
    """

    chunks: list[Chunk]
    rows: Rows
    first_rows: list[int]
    broken: list[Sequence]
    went_ahead: bool = False
    planned: Schedule | None = None


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
    finds_tokens = speculation is None and runner.finds_tokens
    recorded: Items[int] = ()
    if all(map(_is_decode, chunks[len(chunks) - schedule.num_prefills :])):
        recorded = runner.recorded(len(chunks))
    if num_drafts in recorded:
        ahead = (
            runner.looks_ahead
            and schedule.has_everyone
            and (speculation is None or speculation.goes_on())
        )
        return _run_recorded(
            runner, scheduler, chunks, num_drafts, ahead=ahead, may_plan=finds_tokens
        )
    is_asked = any([chunk.sequence.lacks_prompt_logprobs for chunk in chunks])
    if finds_tokens and not is_asked and _are_found_there(chunks, 0):
        return _run_pieces(runner, scheduler, schedule)
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
    runner: Runner,
    scheduler: Scheduler,
    chunks: list[Chunk],
    num_drafts: int,
    *,
    ahead: bool,
    may_plan: bool = False,
) -> Ran:
    """A step that is one launch, drafts and all.

    ahead: the next step is its continuation if nothing ends or arrives, so launch that too, if the
    device can find its tokens. may_plan: otherwise launch the one with the prompts that wait.
    """
    is_final = _are_found_there(chunks, num_drafts)
    ahead = ahead and is_final
    page_size = scheduler.limits.page_size
    logits = runner.run_decodes(
        list_decodes(
            chunks, scheduler.page_table, page_size, num_drafts, ahead=ahead, draws=is_final
        )
    )
    planned = None
    if is_final and not ahead and may_plan:
        planned = _run_behind(runner, scheduler, chunks)
    found = runner.read_decodes()
    if num_drafts:
        chunks = [
            chunk._replace(drafts=drafts)
            for chunk, drafts in zip(chunks, found.drafts, strict=True)
        ]
    wanted = [] if is_final else _rows_of(chunks, found.first_rows)
    rows = Rows(logits, wanted, found.known, is_final=is_final)
    return Ran(chunks, rows, found.first_rows, [], went_ahead=ahead, planned=planned)


def _run_pieces(runner: Runner, scheduler: Scheduler, schedule: Schedule) -> Ran:
    """A step with pieces of prompts whose tokens the device finds, and what is known to follow it."""
    chunks, page_size = schedule.chunks, scheduler.limits.page_size
    samples = [chunk.samples for chunk in chunks]
    following = None
    is_known = schedule.has_everyone and all(samples)
    if is_known and any(map(_goes_on, chunks)):
        following = list_decodes_after(chunks, scheduler.page_table, page_size)
    pieces = list_pieces(chunks, scheduler.page_table, page_size)
    logits = runner.run_pieces(pieces, following)
    planned = _run_behind(runner, scheduler, chunks) if following is None else None
    found = runner.read_decodes()
    of_those = iter(found.first_rows)
    first_rows = [next(of_those) if does else 0 for does in samples]
    rows = Rows(logits, [], found.known, is_final=True)
    ahead = following is not None
    return Ran(chunks, rows, first_rows, [], went_ahead=ahead, planned=planned)


def _run_behind(runner: Runner, scheduler: Scheduler, chunks: list[Chunk]) -> Schedule | None:
    """Launch the step behind one of these chunks, whose tokens nobody has read, if it runs prompts."""
    planned = scheduler.plan(chunks)
    if planned is None:
        return None
    if planned.pages_to_zero:
        runner.zero(planned.pages_to_zero)
    num_unknown = len(planned.chunks) - planned.num_prefills
    page_size = scheduler.limits.page_size
    runner.run_behind(
        list_pieces(planned.chunks, scheduler.page_table, page_size, num_unknown=num_unknown)
    )
    return planned


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


def _goes_on(chunk: Chunk) -> bool:
    """Whether the token behind it is not the last one that there may be."""
    return chunk.start + chunk.num_tokens + 1 < chunk.sequence.request.max_total_tokens


def _is_decode(chunk: Chunk) -> bool:
    return chunk.num_tokens == 1 and chunk.samples
