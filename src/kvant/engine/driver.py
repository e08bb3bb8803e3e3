"""Steps one engine for many requesters: the loop of `kvant.AsyncLLM` and of the server's engine process.

A failing request or a failing step ends neither the loop nor the other requests. One thread must call all
methods; the caller delivers the events that they return to the requesters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvant.errors import EngineFault, RankLost, RequestError

if TYPE_CHECKING:
    from kvant.engine.engine import Engine
    from kvant.engine.result import Progress, Result
    from kvant.sampling.sampling_params import SamplingParams

MOST_FAILED_STEPS = 3
"""This many failed steps in a row mean that the engine or its device is broken, not a request."""

IDLE_SECONDS = 1.0
"""An engine that has been idle for this long audits its pages, and then some scales at every interval."""

MOVE_SECONDS = 0.005
"""The longest wait of an idle engine for copies of pages between tiers; it may delay an arriving request."""

PROMPT_STEP_TOKENS = 64
"""Steps with fewer tokens are mostly decoding and do not show how fast prompts are computed."""

_MOST_SHOWN = 20
_log = logging.getLogger(__name__)
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(slots=True, eq=False)
class Job(Generic[_Key]):
    """One request. key: the requester's own name for it.

    submitted, started, first: `time.monotonic` at submission, first step and first token; 0.0 before that.
    """

    key: _Key
    submitted: float
    started: float = 0.0
    first: float = 0.0


Event = tuple[Job[_Key], "Progress | RequestError | EngineFault"]
"""Progress of a request, or the error that ended it."""


class Driver(Generic[_Key]):
    """Runs one engine for many requesters: submits and cancels their requests, and steps.

    prompt_tokens_per_second: smoothed speed of steps with prompts, 0.0 until one was measured.
    num_tokens: prompt tokens computed plus tokens generated, over all steps.
    num_audits, num_scale_audits: audits while idle. num_audit_faults, num_scale_faults: their findings.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prompt_tokens_per_second = 0.0
        self.num_tokens = 0
        self.num_audits = self.num_audit_faults = 0
        self.num_scale_audits = self.num_scale_faults = 0
        self._jobs: dict[int, Job[_Key]] = {}  # by the engine's number
        self._numbers: dict[_Key, int] = {}  # by key
        self._queued: set[int] = set()  # numbers of jobs that have not run yet
        self._ended: list[Event[_Key]] = []  # since the last step
        self._failed_in_a_row = 0
        self._audited = True
        self._last_work = self._last_scales = 0.0

    @property
    def has_work(self) -> bool:
        """True if `step` has something to run or to return."""
        return self.engine.has_work or bool(self._ended) or self.engine.is_moving

    @property
    def keys(self) -> list[_Key]:
        """Keys of all requests that have not ended."""
        return list(self._numbers)

    def submit(
        self, key: _Key, prompt: Sequence[int], params: SamplingParams, salt: str = ""
    ) -> None:
        """Queues a request. A refusal is returned by the next `step`, as this request's event."""
        if key in self._numbers:
            raise EngineFault(f"request {key} was submitted twice")
        job = Job(key, time.monotonic())
        try:
            number = self.engine.submit(prompt, params, salt=salt)
        except RequestError as fault:
            self._ended.append((job, fault))
        except Exception as fault:
            _log.exception("a request could not be submitted")
            self._ended.append((job, EngineFault(f"the engine failed on this request: {fault!r}")))
        else:
            self._jobs[number] = job
            self._numbers[key] = number
            self._queued.add(number)

    def cancel(self, key: _Key) -> Result | None:
        """Ends a request and returns its result so far; None if it has ended or was never submitted."""
        number = self._numbers.get(key)
        if number is None:
            return None
        self._forget(number)
        return self.engine.cancel(number)

    def step(self) -> list[Event[_Key]]:
        """Runs one step, or audits an idle engine; returns the events since the last call.

        A step that fails ends the requests that took part. Raises EngineFault if the engine cannot go on:
        its pages are inconsistent, a rank was lost, or MOST_FAILED_STEPS steps failed in a row.
        """
        events: list[Event[_Key]] = []
        if self.engine.has_work:
            self._audited, self._last_work = False, time.monotonic()
            try:
                self._step(events)
                self._failed_in_a_row = 0
            except RankLost:
                raise
            except Exception:
                self._survive()
        elif self.engine.is_moving:
            self.engine.move(MOVE_SECONDS)
        else:
            self.engine.runner.check()
            self._audit()
        if self._ended:
            events += self.take_ended()
        return events

    def take_ended(self) -> list[Event[_Key]]:
        """Returns the errors that no step has returned yet, for example when `step` raised."""
        ended, self._ended = self._ended, []
        return ended

    def _step(self, events: list[Event[_Key]]) -> None:
        before = self.engine.stats.num_computed_tokens
        started = time.monotonic()
        done = self.engine.step()
        ended = time.monotonic()
        computed = self.engine.stats.num_computed_tokens - before
        self.num_tokens += computed
        if computed >= PROMPT_STEP_TOKENS:
            speed = computed / max(ended - started, 1e-9)
            known = self.prompt_tokens_per_second
            self.prompt_tokens_per_second += (0.2 if known else 1.0) * (speed - known)
        if self._queued:
            self._note_started(done, started)
        jobs = self._jobs
        for progress in done:
            job = jobs.get(progress.number)
            if job is None:
                continue
            if not job.first:
                job.first = ended
                # The step that ends a prompt also generates a token.
                self.num_tokens += bool(progress.token_ids)
            event: Event[_Key] = (job, progress)
            if progress.result is not None:
                self._forget(progress.number)
                if progress.result.error is not None:
                    event = (job, progress.result.error)
            events.append(event)

    def _note_started(self, done: Sequence[Progress], started: float) -> None:
        scheduler = self.engine.scheduler
        running = (s.number for s in scheduler.sequences()[: scheduler.num_running])
        ran = self._queued.intersection((*running, *(progress.number for progress in done)))
        self._queued -= ran
        for number in ran:
            self._jobs[number].started = started

    def _survive(self) -> None:
        """Ends the jobs of a failed step, whose requests the engine has cancelled. Call in the handler."""
        self._failed_in_a_row += 1
        _log.exception("a step failed")
        left = self.engine.numbers
        for number in [number for number in self._jobs if number not in left]:
            fault = EngineFault("the step that ran this request failed")
            self._ended.append((self._forget(number), fault))
        self.engine.audit()
        if self._failed_in_a_row >= MOST_FAILED_STEPS:
            raise EngineFault(f"{MOST_FAILED_STEPS} steps failed one after another")

    def _forget(self, number: int) -> Job[_Key]:
        self._queued.discard(number)
        job = self._jobs.pop(number)
        del self._numbers[job.key]
        return job

    # -- while idle ----------------------------------------------------------------------------

    def _audit(self) -> None:
        """Audits pages once after work, then scales at every interval; takes milliseconds."""
        now = time.monotonic()
        if now - self._last_work <= IDLE_SECONDS:
            return
        if not self._audited:
            self._audited = True
            self.num_audits += 1
            try:
                self.engine.audit()
            except EngineFault:
                self.num_audit_faults += 1
                _log.exception("the audit of an idle engine failed")
        elif now - self._last_scales > IDLE_SECONDS:
            self._last_scales = now
            self.num_scale_audits += 1
            found = self.engine.audit_scales()
            self.num_scale_faults += len(found)
            if found:
                _log.error(
                    "scales changed without being written; the prefix cache was emptied. If this "
                    "happens again, the memory of this device is faulty:\n  %s",
                    "\n  ".join(found[:_MOST_SHOWN]),
                )
