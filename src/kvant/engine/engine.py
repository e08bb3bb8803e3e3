"""The loop: requests in, tokens and text out, one step at a time.

    submit -> [schedule -> zero new pages -> draft -> build the batch -> run -> sample -> append, finish]
           -> ...

Nothing here runs by itself: whoever holds the engine calls `step` until nothing is left. Between two
steps any request can be cancelled.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Sequence as Items

from tokenizers import Tokenizer

from kvant.engine.cache_audit import CacheAudit
from kvant.engine.forms import Forms
from kvant.engine.live import Live
from kvant.engine.live_requests import LiveRequests
from kvant.engine.request_check import check_request
from kvant.engine.result import EngineStats, Progress, Result
from kvant.engine.saturation import saturation_warning
from kvant.engine.steady import Steady
from kvant.engine.stream import TokenStream
from kvant.engine.text import TextStream
from kvant.errors import EngineFault
from kvant.execution.runner import Runner
from kvant.execution.speculation import Speculation
from kvant.execution.stepping import Ran, run_step
from kvant.kv.pages import CacheIdentity, PageAllocator, root_hash
from kvant.kv.saturation import Saturated
from kvant.kv.scale_audit import ScaleAudit
from kvant.plan.limits import Limits
from kvant.sampling.logit_rules import make_rules
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.structured_outputs import CompileLimits
from kvant.scheduling.request import Request, Sequence
from kvant.scheduling.schedule import Schedule
from kvant.scheduling.scheduler import Scheduler

_COMPILE_LIMITS = CompileLimits()
SATURATION_STEPS = 512
"""Steps between two looks at what layers could not hold, as each waits for the device."""
_log = logging.getLogger(__name__)


class Engine:
    """Runs requests on one model.

    num_pages: of the runner's pool, the scratch page counted. seed: of the seeds of requests that
    bring none; with it a run of the same requests in the same order can be repeated. scale_audit: of the
    runner's pool, for `audit_scales`. compile_limits: of structured output.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        num_pages: int,
        *,
        identity: CacheIdentity,
        vocab_size: int,
        eos_token_ids: Items[int] = (),
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        speculation: Speculation | None = None,
        scale_audit: ScaleAudit | None = None,
        compile_limits: CompileLimits = _COMPILE_LIMITS,
    ) -> None:
        self.runner = runner
        self.speculation = speculation
        self.limits = limits
        self.scheduler = Scheduler(limits, PageAllocator(num_pages))
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        # Those that can be drawn: a generation_config.json may name tokens beyond the logits, or -1.
        self.eos_token_ids = frozenset(t for t in eos_token_ids if 0 <= t < vocab_size)
        self._identity = identity
        self._random = random.Random(seed)
        self._cache_audit = None
        if scale_audit is not None:
            self._cache_audit = CacheAudit(self.scheduler.allocator, scale_audit)
        self._forms = Forms(tokenizer, vocab_size, self.eos_token_ids, compile_limits)
        self._live = LiveRequests(self.scheduler, self._forms)
        self._is_stepping = False
        self._dropped: list[int] = []  # while a step ran
        self._next_number = 0
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_preemptions = 0
        self._steady: Steady | None = None
        # The next step, which was launched; and `Scheduler.changes` then.
        self._planned: tuple[Schedule, int] | None = None
        # `Scheduler.changes` when the device was given the answers' next step already, if it was. A
        # prompt that has arrived since comes behind it either way; in one step with it, what runs would
        # be thrown away.
        self._ahead_since: int | None = None
        self._saturated: tuple[Saturated, ...] = ()

    @property
    def has_work(self) -> bool:
        return bool(self._live.by_number)

    @property
    def numbers(self) -> set[int]:
        """Of all requests that have not ended."""
        return set(self._live.by_number)

    @property
    def stats(self) -> EngineStats:
        allocator = self.scheduler.allocator
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=len(self._live.by_number) - self.scheduler.num_running,
            num_held_pages=allocator.num_held,
            num_idle_pages=allocator.num_idle,
            num_usable_pages=allocator.num_usable,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_preemptions=self._num_preemptions,
            speculation=None if self.speculation is None else self.speculation.stats,
            saturated=self._saturated,
            num_compiling=len(self._forms.numbers),
        )

    def submit(
        self, prompt_token_ids: Items[int], params: SamplingParams, *, salt: str = ""
    ) -> int:
        """Queue a request; returns its number. RequestError, with the numbers, if it cannot be served.

        params.n must be 1; see `submit_choices`. salt: only requests of the same salt share cached
        pages. Whether structured output compiles is found out beside the steps: if not, the request
        ends as `refused`.
        """
        prompt = tuple(prompt_token_ids)
        self._check(prompt, params)
        rules = make_rules(
            params, prompt, eos_token_ids=self.eos_token_ids, tokenizer=self.tokenizer
        )
        number = self._next_number
        self._next_number += 1
        # Drawn always: others' seeds do not depend on this one's.
        drawn = self._random.getrandbits(63)
        limit = self.limits.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        seed = drawn if params.seed is None else params.seed
        request = Request(number, prompt, params, seed, limit, salt)
        sequence = Sequence(request, list(prompt), [root_hash(self._identity, salt=salt)])
        sequence.rules = rules
        stop_tokens = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_tokens |= self.eos_token_ids
        live = Live(sequence, self._text_stream(request), stop_tokens)
        if params.structured_outputs is None:
            self.scheduler.add(sequence)
        else:
            self._forms.start(sequence)
        self._live.by_number[number] = live
        return number

    def submit_choices(
        self, prompt_token_ids: Items[int], params: SamplingParams, *, salt: str = ""
    ) -> list[int]:
        """Queue a request for n answers; the numbers of its choices, see `SamplingParams.choices`.

        The prompt's full pages are computed once and shared, where there is a prefix cache.
        """
        return [self.submit(prompt_token_ids, one, salt=salt) for one in params.choices()]

    def prepare_structured(self) -> None:
        """Read what structured output needs of the tokenizer now, not with the first such request."""
        self._forms.prepare()

    def cancel(self, number: int) -> Result | None:
        """End a request now; its pages are free at once. None if it has ended already."""
        return self._live.cancel(number)

    def step(self) -> list[Progress]:
        """Run once; what became of every request that got a token or ended, one piece for each token.

        If the forward fails its requests are cancelled, then the fault is raised: the engine itself
        stays sound.
        """
        try:
            self._is_stepping = True
            return self._step()
        finally:
            self._is_stepping = False
            while self._dropped:
                self.cancel(self._dropped.pop())

    def _step(self) -> list[Progress]:
        progress = self._queue_compiled()
        if self._steady is not None:
            if self._steady.goes_on:
                return progress + self._go_on(self._steady)
            self._end_steady()
        speculation, changes = self.speculation, self.scheduler.changes
        most = 0
        if speculation is not None:
            most = speculation.num_draft_tokens(self.scheduler.num_running)
        schedule = self._take_planned()
        if schedule is None:
            runs_already = self._ahead_since not in (None, changes)
            schedule = self.scheduler.schedule(most, answers_first=runs_already)
        launched = self.scheduler.changes
        self._ahead_since = None
        if not schedule.chunks:
            return progress
        self._num_preemptions += len(schedule.preempted)
        try:
            ran = run_step(self.runner, self.scheduler, speculation, schedule, most)
            self._ahead_since = launched if ran.went_ahead else None
            if ran.planned is not None:
                self._planned = ran.planned, self.scheduler.changes
            self._num_steps += 1
            self._num_computed_tokens += sum([c.num_tokens + len(c.drafts) for c in ran.chunks])
            if speculation is None:
                self._live.emit_all(ran, progress)
                if ran.went_ahead and changes == self.scheduler.changes:
                    self._steady = self._steady_of(ran)
            else:
                emitted = []
                for chunk, row in zip(ran.chunks, ran.first_rows, strict=True):
                    pieces = self._live.emit(chunk, ran, row)
                    progress += pieces
                    emitted.append([token for piece in pieces for token in piece.token_ids])
                speculation.note(ran.chunks, emitted)
        except BaseException:
            for chunk in schedule.chunks:
                self.cancel(chunk.sequence.number)
            raise
        self._look_at_saturation()
        return progress

    def _take_planned(self) -> Schedule | None:
        """The step that was launched already, if anybody in it is left."""
        if self._planned is None:
            return None
        (planned, changes), self._planned = self._planned, None
        as_planned = planned.has_everyone and changes == self.scheduler.changes
        has_everyone = as_planned or not self.scheduler.num_waiting
        schedule = planned.of_those_left(has_everyone=has_everyone)
        return schedule if schedule.chunks else None

    def _steady_of(self, ran: Ran) -> Steady | None:
        """Steps after this one, if nothing is known that would make them other than it was."""
        lives = [self._live.by_number[chunk.sequence.number] for chunk in ran.chunks]
        if len(lives) != self.scheduler.num_running or not all(live.is_simple for live in lives):
            return None
        return Steady(lives, self.scheduler)

    def _end_steady(self) -> None:
        if self._steady is not None:
            self._steady.settle()
            self._steady = None

    def _go_on(self, steady: Steady) -> list[Progress]:
        try:
            found = steady.run(self.runner)
            self._num_steps += 1
            self._num_computed_tokens += len(steady.sequences)
            tokens = steady.plain_tokens(found)
            if tokens is not None:
                progress = steady.take(tokens)
            else:
                self._steady, progress = None, []
                self._live.emit_all(steady.ran(found), progress)
        except BaseException:
            for sequence in steady.sequences:
                self.cancel(sequence.number)
            raise
        self._look_at_saturation()
        return progress

    def stream(self, number: int) -> TokenStream:
        """The progress of a request that was submitted and has not run yet. Others advance beside it."""
        live = self._live.by_number[number]
        stream = TokenStream(self.step, lambda: self._drop(number))
        live.stream, live.is_simple = weakref.ref(stream), False
        self._end_steady()
        return stream

    def _drop(self, number: int) -> None:
        """Cancel, but not within a step: Python may find at any moment that nobody has a stream."""
        if self._is_stepping:
            self._dropped.append(number)
        else:
            self.cancel(number)

    def audit(self) -> None:
        """Recompute all ownership of pages from scratch. EngineFault with every finding."""
        faults = self.scheduler.audit()
        if self.numbers - self._forms.numbers != {s.number for s in self.scheduler.sequences()}:
            faults.append("the engine's requests are not the scheduler's")
        if faults:
            raise EngineFault("the page audit found:\n  " + "\n  ".join(faults))

    def audit_scales(self) -> list[str]:
        """Look at the scales of some cached pages, the next ones at each call, a few milliseconds each.

        For times without work. What is wrong, in words; the prefix cache is empty then.
        """
        assert not self.has_work, "pages may be written"
        return [] if self._cache_audit is None else self._cache_audit.check()

    def refit(self, identity: CacheIdentity) -> None:
        """The runner has other weights and scales now; cached pages are of the old ones. identity: theirs."""
        assert not self.has_work, "pages are read"
        self.scheduler.allocator.forget_all()
        self._identity = identity
        if self._cache_audit is not None:
            self._cache_audit.accept()

    # -- requests ------------------------------------------------------------------------------

    def _check(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        check_request(
            prompt,
            params,
            max_model_len=self.limits.max_model_len,
            vocab_size=self.vocab_size,
            has_tokenizer=self.tokenizer is not None,
            has_forms=self._forms.can_be_asked,
        )

    def _text_stream(self, request: Request) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(
            self.tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=request.params.skip_special_tokens,
            stops=request.params.stop_strings,
            include_stop=request.params.include_stop_str_in_output,
        )

    # -- one step ------------------------------------------------------------------------------

    def _queue_compiled(self) -> list[Progress]:
        """Queue the requests whose forms have been compiled; those that were refused have ended."""
        ended = []
        for sequence, fault in self._forms.take(patiently=not self.scheduler.has_work):
            if fault is None:
                self.scheduler.add(sequence)
                continue
            live = self._live.by_number[sequence.number]
            ended.append(self._live.refuse(live, fault))
            live.tell(ended[-1])
        return ended

    def _look_at_saturation(self) -> None:
        """Now and then, and when nothing is left to do; a layer's first values are told."""
        if self._live.by_number and self._num_steps % SATURATION_STEPS:
            return
        known = {one.layer for one in self._saturated}
        self._saturated = self.runner.saturated()
        new = [one for one in self._saturated if one.layer not in known]
        if new:
            _log.warning("%s", saturation_warning(new))
