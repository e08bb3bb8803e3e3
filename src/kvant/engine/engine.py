"""The engine's loop: takes requests and produces tokens and text, one step at a time.

    submit -> [schedule -> clear new pages -> launch | read the step before -> append, finish] -> ...

On a GPU one step is in flight: step N + 1 is launched before step N's tokens reach the host. If the
next step depends on something that the host computes, the step in flight is read first. A CPU always reads
it first.

The engine starts no thread: its owner calls `step` until no request is left. Any request can be cancelled
between two steps.
"""

from __future__ import annotations

import logging
import random
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Items

from tokenizers import Tokenizer

from kvant.engine.cache_audit import CacheAudit, saturation_warning
from kvant.engine.requests import Forms, Live, LiveRequests, TokenStream, check_request
from kvant.engine.result import EngineStats, Progress, Result
from kvant.engine.text import TextStream
from kvant.errors import EngineFault, RequestError
from kvant.execution.batch import Launched
from kvant.execution.runner import Runner
from kvant.execution.speculation import Speculation
from kvant.kv.events import PageLog
from kvant.kv.groups import ArenaLayout
from kvant.kv.offload.tiers import Tiers
from kvant.kv.pages import CacheIdentity, SharedPages, root_hash, shared_pages
from kvant.kv.saturation import Saturated
from kvant.kv.scale_audit import ScaleAudit
from kvant.plan.limits import Limits
from kvant.sampling.logit_rules import make_rules
from kvant.sampling.sampling_params import EMBEDDING, SamplingParams
from kvant.sampling.structured_outputs import CompileLimits
from kvant.sampling.thinking import thinking_marks
from kvant.scheduling.request import Request, Sequence
from kvant.scheduling.scheduler import Schedule, Scheduler

_COMPILE_LIMITS = CompileLimits()
SATURATION_STEPS = 512
"""Steps between two reads of the layers' counts of saturated values."""
WAIT_SECONDS = 0.005
"""The longest single wait, in seconds, for pages from other tiers while no request can run."""
_log = logging.getLogger(__name__)


class Engine:
    """Runs requests on one model.

    num_pages: superblocks of the runner's arena, including those of scratch pages. layout: how the arena is
    divided; None makes every superblock one page of all layers. seed: seeds requests without a seed of their
    own, so that equal requests in equal order give equal tokens. scale_audit: checks the runner's pools in
    `audit_scales`. compile_limits: limits on grammars of structured output. offload: builds the tiers behind
    the engine's pages. embeds: the runner returns hidden states, so every request must be `EMBEDDING`.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        num_pages: int,
        *,
        layout: ArenaLayout | None = None,
        identity: CacheIdentity,
        vocab_size: int,
        eos_token_ids: Items[int] = (),
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        speculation: Speculation | None = None,
        scale_audit: ScaleAudit | None = None,
        compile_limits: CompileLimits = _COMPILE_LIMITS,
        offload: Callable[[SharedPages], Tiers] | None = None,
        embeds: bool = False,
    ) -> None:
        self.embeds = embeds
        self.runner = runner
        self.speculation = speculation
        self.limits = limits
        pages = shared_pages(num_pages, layout)
        self.tiers = None if offload is None else offload(pages)
        self.scheduler = Scheduler(limits, pages, self.tiers)
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        # A generation_config.json may name tokens beyond the logits, or -1.
        self.eos_token_ids = frozenset(t for t in eos_token_ids if 0 <= t < vocab_size)
        self._identity = identity
        self._random = random.Random(seed)
        self._cache_audit = None
        if scale_audit is not None:
            self._cache_audit = CacheAudit(self.scheduler.allocator, scale_audit)
        self._marks = None if tokenizer is None else thinking_marks(tokenizer, vocab_size)
        # A step in flight and the next one may each bring a token and all drafts before the host reads them.
        self._ahead = 2 * (1 + (0 if speculation is None else speculation.num_speculative_tokens))
        self._forms = Forms(tokenizer, vocab_size, self.eos_token_ids, compile_limits, self._marks)
        self._live = LiveRequests(self.scheduler, self._forms, embeds=embeds)
        self._is_stepping = False
        self._dropped: list[int] = []  # requests whose stream was dropped while a step ran
        self._next_number = 0
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_preemptions = 0
        # The step that was launched and not read, and `time.perf_counter` when it was launched.
        self._in_flight: tuple[Launched, float] | None = None
        self._saturated: tuple[Saturated, ...] = ()
        self._counting: Callable[[], tuple[Saturated, ...]] | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._live.by_number)

    @property
    def numbers(self) -> set[int]:
        """Numbers of all requests that have not ended."""
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
            offload=None if self.tiers is None else self.tiers.stats,
            groups=allocator.by_group,
        )

    def submit(
        self, prompt_token_ids: Items[int], params: SamplingParams, *, salt: str = ""
    ) -> int:
        """Queues a request and returns its number. Raises RequestError if it cannot be served.

        params.n must be 1; see `submit_choices`. salt: only requests of the same salt share cached
        pages. Structured output compiles beside the steps; if that fails, the request ends as `refused`.
        """
        prompt = tuple(prompt_token_ids)
        self._check(prompt, params)
        rules = None
        if params.changes_logits or params.thinking_token_budget is not None:
            rules = make_rules(
                params,
                prompt,
                eos_token_ids=self.eos_token_ids,
                tokenizer=self.tokenizer,
                marks=self._marks,
                ahead=self._ahead,
            )
        number = self._next_number
        self._next_number += 1
        # Always drawn, so that the seeds of other requests do not depend on this one's.
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
        """Queues a request for n answers and returns their numbers, see `SamplingParams.choices`.

        With a prefix cache the prompt's full pages are computed once and shared.
        """
        return [self.submit(prompt_token_ids, one, salt=salt) for one in params.choices()]

    def prepare_structured(self) -> None:
        """Prepares the tokenizer for structured output now instead of with the first such request."""
        self._forms.prepare()

    def cancel(self, number: int) -> Result | None:
        """Ends a request now; its pages are free at once. Returns None if it has ended already."""
        return self._live.cancel(number)

    def step(self) -> list[Progress]:
        """Runs one step. Returns a `Progress` for each token that a request got, and for each that ended.

        If the forward fails, its requests are cancelled and the exception is raised; the engine itself
        stays usable.
        """
        try:
            self._is_stepping = True
            return self._step()
        finally:
            self._is_stepping = False
            while self._dropped:
                self.cancel(self._dropped.pop())

    def tell(self, log: PageLog) -> None:
        """Starts to write to `log` which pages the device and host memory hold."""
        self.scheduler.allocator.log = log
        if self.tiers is not None:
            self.tiers.set_log(log)

    @property
    def is_moving(self) -> bool:
        """True while pages are being copied between tiers. `move` and `step` finish copies that arrived."""
        return self.tiers is not None and self.tiers.is_moving

    def move(self, seconds: float) -> None:
        """Finishes copies of pages between tiers that arrived; if none did, waits up to `seconds` for one."""
        assert self.tiers is not None, "there are no tiers"
        if self.tiers.is_moving:
            self.tiers.wait(seconds)

    def _step(self) -> list[Progress]:
        progress = self._queue_compiled()
        computed, started = self._num_computed_tokens, time.perf_counter()
        try:
            self._run_step(progress)
        except BaseException:
            # Steps that were scheduled but not committed are lost.
            self._in_flight = None
            for number in self.scheduler.abandon():
                self.cancel(number)
            raise
        if self.tiers is not None:
            self.tiers.policy.note_prompts(
                self._num_computed_tokens - computed, time.perf_counter() - started
            )
        self._look_at_saturation()
        return progress

    def _run_step(self, progress: list[Progress]) -> None:
        """Launches the next step, then commits the one before. Appends to `progress`."""
        num_drafts = 0
        if self.speculation is not None:
            num_drafts = self.speculation.num_draft_tokens(self.scheduler.num_running)
            if not self._runs_ahead(num_drafts):
                self._commit(progress)
        schedule = self.scheduler.schedule(num_drafts)
        if schedule is None:  # pages are short, and the step in flight may free some
            self._commit(progress)
            schedule = self.scheduler.schedule(num_drafts)
            assert schedule is not None
        launched_at = time.perf_counter()
        launched = self._launch(schedule) if schedule.sequences else None
        if launched is None and self._in_flight is None and self.tiers is not None:
            self.move(WAIT_SECONDS)  # every request waits for pages
        self._commit(progress)
        if launched is not None:
            self._in_flight = launched, launched_at
            if not launched.is_final:
                self._commit(progress)
        if not self._live.by_number and self._in_flight is not None:
            self._in_flight = None  # no request is left to receive its tokens
            self.scheduler.abandon()

    def _runs_ahead(self, num_drafts: int) -> bool:
        """Returns whether the device can draft the next step before the step in flight is read."""
        is_recorded = num_drafts in self.runner.num_drafts(self.scheduler.num_running)
        return is_recorded and not self.scheduler.may_run_prompts

    def _launch(self, schedule: Schedule) -> Launched:
        """Clears new pages, proposes drafts if the host must, and launches the model."""
        speculation, drafts = self.speculation, None
        self._num_preemptions += len(schedule.preempted)
        if any(schedule.pages_to_zero):
            self.runner.zero(schedule.pages_to_zero)
            if speculation is not None:
                speculation.zero(schedule.pages_to_zero[0])
        if speculation is not None and schedule.max_drafts is not None:
            recorded = self.runner.num_drafts(len(schedule.sequences))
            if schedule.num_prefills or schedule.num_drafts not in recorded:
                drafts = speculation.propose(schedule)
        return self.runner.launch(schedule, self.scheduler.table, drafts)

    def _commit(self, progress: list[Progress]) -> None:
        """Reads the step in flight, if there is one, and appends its requests' progress to `progress`."""
        if self._in_flight is None:
            return
        (launched, launched_at), self._in_flight = self._in_flight, None
        schedule = launched.schedule
        pieces, outcome, emitted = self._live.commit(launched)
        progress += pieces
        self._num_steps += 1
        self._num_computed_tokens += schedule.num_tokens
        if outcome.drafts is not None:
            self._num_computed_tokens += sum(len(drafts) for drafts in outcome.drafts)
        if self.speculation is not None:
            found = emitted or [[token] for token in outcome.tokens]
            self.speculation.note(schedule, outcome.drafts, found, launched_at)

    def stream(self, number: int) -> TokenStream:
        """Returns an iterator over a submitted request's progress. Reading it advances other requests too."""
        live = self._live.by_number[number]
        stream = TokenStream(self.step, lambda: self._drop(number))
        live.stream, live.is_simple = weakref.ref(stream), False
        self._live.note_stream()
        return stream

    def _drop(self, number: int) -> None:
        """Cancels a request after the current step, since Python may collect its stream at any moment."""
        if self._is_stepping:
            self._dropped.append(number)
        else:
            self.cancel(number)

    def audit(self) -> None:
        """Checks the ownership of all pages. Raises EngineFault with every inconsistency found."""
        faults = self.scheduler.audit()
        if self.numbers - self._forms.numbers != {s.number for s in self.scheduler.sequences()}:
            faults.append("the engine's requests are not the scheduler's")
        if faults:
            raise EngineFault("the page audit found:\n  " + "\n  ".join(faults))

    def audit_scales(self) -> list[str]:
        """Checks the scales of the next few cached pages, which takes a few milliseconds.

        May be called only while no request runs. Returns one sentence per fault; any fault empties the
        prefix cache.
        """
        assert not self.has_work, "pages may be written"
        found = [] if self._cache_audit is None else self._cache_audit.check()
        if found and self.tiers is not None:
            self.tiers.forget_all()
        return found

    def refit(self, identity: CacheIdentity) -> None:
        """Drops all cached pages after the runner's weights changed. identity: of pages from now on."""
        assert not self.has_work, "pages are read"
        self.scheduler.allocator.forget_all()
        if self.tiers is not None:
            self.tiers.forget_all()
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
            has_thinking=self._marks is not None,
        )
        if params.max_tokens == 0 and params.prompt_logprobs is None and not self.embeds:
            raise RequestError("max_tokens is 0; it must be at least 1", param="max_tokens")
        if self.embeds and params != EMBEDDING:
            raise RequestError(
                "this engine gives embeddings and generates nothing; `task` generate makes one that does",
                param="prompt",
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
        """Queues requests whose grammar is compiled. Ends and returns requests whose grammar was refused."""
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
        """Warns once per layer about saturated values, every SATURATION_STEPS steps and when work ends.

        Between steps, counts are read one step after they were asked for: no step waits for them.
        """
        counting, self._counting = self._counting, None
        found = None if counting is None else counting()
        if not self._live.by_number:
            found = self.runner.count_saturated()()
        elif found is None and not self._num_steps % SATURATION_STEPS:
            self._counting = self.runner.count_saturated()
        if found is None:
            return
        known = {one.layer for one in self._saturated}
        self._saturated = found
        new = [one for one in self._saturated if one.layer not in known]
        if new:
            _log.warning("%s", saturation_warning(new))
