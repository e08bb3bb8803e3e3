"""Compiles the grammars of structured output with llguidance, in a thread beside the steps.

GrammarCompiler.start(form) -> Compiling    compiles in a thread, after a separate process has shown that
                                            the form compiles within its limits of time and memory
Compiling.result() -> Grammar               one request's own matcher
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from kvant.errors import RequestError
from kvant.sampling.grammar_check import Checked, parser_limits
from kvant.sampling.structured_outputs import CompileLimits, StructuredOutputs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LIMITS = CompileLimits()
_WORKER_START_SECONDS = 30.0
_MAX_MESSAGE = 300


def grammar_text(form: StructuredOutputs) -> str:
    """Returns a form in llguidance's syntax. A grammar is returned unchanged; `Checked` converts it."""
    if form.schema is not None:
        # A limit on blanks: without one a model could write blanks forever.
        return str(
            LLMatcher.grammar_from_json_schema(
                form.schema, overrides={"whitespace_pattern": r"[ \n\t\r]{0,20}"}
            )
        )
    if form.regex is not None:
        return str(LLMatcher.grammar_from_regex(form.regex))
    if form.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
        return str(LLMatcher.grammar_from_lark(f"start: {texts}"))
    assert form.grammar is not None
    return form.grammar


class Grammar:
    """The state of one answer in its grammar. asked_as: the client's field name, for messages."""

    def __init__(self, matcher: LLMatcher, asked_as: str) -> None:
        self._matcher = matcher
        self.asked_as = asked_as

    @property
    def is_complete(self) -> bool:
        """True if only an end-of-sequence token can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, vocab_size: int) -> Tensor:
        """Returns [vocab_size] bool, the tokens that may come next. RequestError if that costs too much."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.unpackbits(bits, count=vocab_size, bitorder="little")
        return torch.from_numpy(mask.view(np.bool_))

    def advance(self, token: int) -> None:
        """Appends a token to the answer. Raises RequestError if the form does not allow it here."""
        taken = self._matcher.try_consume_tokens([token])
        self._check()
        if not taken:
            raise RequestError(
                f"{self.asked_as} does not allow token {token} here", param=self.asked_as
            )

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"{self.asked_as}: the answer cannot go on: {_shown(self._matcher.get_error())}",
                param=self.asked_as,
            )


Compiling = Future[Grammar]


class GrammarCompiler:
    """Compiles forms for one tokenizer. vocab_size: the width of the logits, not the tokenizer's size.

    The thread and the process start with the first form and end with the compiler.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        limits: CompileLimits = _LIMITS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._limits = limits
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvant-grammar")
        self._workers: list[_Worker] = []  # one, or none
        self._matching: LLTokenizer | None = None
        self._unreadable = ""
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._cached_bytes = 0
        weakref.finalize(self, _end, self._pool, self._workers)

    def start(self, form: StructuredOutputs) -> Compiling:
        """Returns a future of the form's grammar. It raises RequestError, which names the client's field."""
        return self._pool.submit(self._compile, form)

    def prepare(self) -> str:
        """Reads the tokenizer now. Otherwise the first grammar does that, which delays other threads.

        Returns "", or the reason why llguidance cannot read it; then every form is refused.
        """
        if self._matching is None and not self._unreadable:
            # A tokenizer may have tokens beyond the logits (Gemma 3's image token): they are never drawn.
            largest = max(self._tokenizer.get_vocab().values(), default=0)
            try:
                self._matching = LLTokenizer(
                    self._tokenizer.to_str(),
                    n_vocab=max(self._vocab_size, largest + 1),
                    eos_token=self._eos,
                )
            except ValueError as fault:
                self._unreadable = f"llguidance cannot read this model's tokenizer: {fault}"
        return self._unreadable

    def _compile(self, form: StructuredOutputs) -> Grammar:
        matcher = self._compiled.get(form)
        if matcher is None:
            matcher = self._make(form)
            self._keep(form, matcher)
        else:
            self._compiled.move_to_end(form)
        return Grammar(matcher.deep_copy(), form.asked_as)

    def _make(self, form: StructuredOutputs) -> LLMatcher:
        try:
            text = grammar_text(form)
        except ValueError as fault:
            raise _refused(form, str(fault)) from None
        if self._workers and self._workers[0].has_ended:
            self._workers.clear()
        if not self._workers:
            self._workers.append(_Worker())
        checked = self._workers[0].check(text, self._limits.seconds)
        if not self._workers[0].alive:
            self._workers.clear()
        if checked.fault:
            raise _refused(form, checked.fault)
        if why := self.prepare():
            raise _refused(form, why)
        assert self._matching is not None
        matcher = LLMatcher(self._matching, checked.grammar, limits=parser_limits(), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(form, matcher.get_error())
        if matcher.is_stopped():
            raise _refused(form, "it allows nothing but an empty answer")
        return matcher

    def _keep(self, form: StructuredOutputs, matcher: LLMatcher) -> None:
        self._compiled[form] = matcher
        self._cached_bytes += form.num_bytes
        limits = self._limits
        while self._cached_bytes > limits.cached_bytes or len(self._compiled) > limits.cached_forms:
            oldest, _ = self._compiled.popitem(last=False)
            self._cached_bytes -= oldest.num_bytes


def _end(pool: ThreadPoolExecutor, workers: list[_Worker]) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.close()


class _Worker:
    """A process that compiles each grammar first. It can be killed if that takes too much time or memory."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvant.sampling.grammar_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._answers: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.alive = True
        if not self._answer(_WORKER_START_SECONDS):
            self.close()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def check(self, grammar: str, seconds: float) -> Checked:
        """Compiles a grammar in the process. Ends the process if it is too slow."""
        if not self.alive:
            return Checked("", "the process that compiles could not be started")
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(grammar) + "\n")
            self._process.stdin.flush()
            answer = self._answer(seconds)
        except (OSError, ValueError):  # the process ended: the pipe is broken or closed
            answer = ""
        if answer is None:
            self.close()
            return Checked("", f"compiling it took longer than {seconds:g} s")
        if not answer:
            self.close()
            return Checked("", "compiling it takes more than is allowed")
        return Checked(*json.loads(answer))

    def close(self) -> None:
        if self.alive:
            self.alive = False
            self._process.kill()
            self._process.wait()

    def _answer(self, seconds: float) -> str | None:
        """Returns the process's next line; "" after the process has ended; None on a timeout."""
        try:
            return self._answers.get(timeout=seconds)
        except Empty:
            return None

    def _read(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        with self._process.stdin, self._process.stdout:
            for line in self._process.stdout:
                self._answers.put(line)
            self._answers.put("")


def _refused(form: StructuredOutputs, why: str) -> RequestError:
    return RequestError(f"{form.asked_as} cannot be used: {_shown(why)}", param=form.asked_as)


def _shown(message: str) -> str:
    """Shortens llguidance's message to its beginning, which says what is wrong; it repeats the grammar."""
    line = " ".join(message.split())
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + ".."
