"""Requests with structured output wait here while their grammar is compiled beside the steps."""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from kvant.errors import RequestError
from kvant.sampling.logit_rules import make_rules
from kvant.sampling.structured_outputs import CompileLimits
from kvant.scheduling.request import Sequence

if TYPE_CHECKING:
    from kvant.sampling.grammar import Compiling, GrammarCompiler

_WAIT_SECONDS = 0.02
_log = logging.getLogger(__name__)


class Forms:
    """Compiles grammars. Without a tokenizer and an end-of-sequence token none can be requested."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Collection[int],
        limits: CompileLimits,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._limits = limits
        self._compiler: GrammarCompiler | None = None
        self._waiting: dict[int, tuple[Sequence, Compiling]] = {}  # by the request's number

    @property
    def can_be_asked(self) -> bool:
        return self._tokenizer is not None and bool(self._eos)

    @property
    def numbers(self) -> set[int]:
        """Numbers of the requests that wait."""
        return set(self._waiting)

    def prepare(self) -> None:
        """Prepare the tokenizer now instead of with the first such request."""
        if self.can_be_asked:
            self._compiling().prepare()

    def start(self, sequence: Sequence) -> None:
        """Start to compile the grammar of a sequence's request."""
        form = sequence.request.params.structured_outputs
        assert form is not None
        self._waiting[sequence.number] = sequence, self._compiling().start(form)

    def take(self, *, patiently: bool) -> list[tuple[Sequence, RequestError | None]]:
        """Returns sequences whose grammar was compiled, which now have their rules, each with None, and
        sequences whose grammar was refused, with the reason; the caller ends these.

        patiently: wait a moment for the first one.
        """
        if not self._waiting:
            return []
        if patiently:
            futures = [compiling for _, compiling in self._waiting.values()]
            wait(futures, timeout=_WAIT_SECONDS, return_when=FIRST_COMPLETED)
        taken = []
        for sequence, compiling in tuple(self._waiting.values()):
            if compiling.done():
                fault = self._give_rules(sequence, compiling)
                taken.append((sequence, fault))
                if fault is None:
                    del self._waiting[sequence.number]
        return taken

    def cancel(self, number: int) -> bool:
        """Stop waiting for a request's grammar. Returns whether it waited."""
        found = self._waiting.pop(number, None)
        if found is None:
            return False
        found[1].cancel()
        return True

    def _give_rules(self, sequence: Sequence, compiling: Compiling) -> RequestError | None:
        request = sequence.request
        form = request.params.structured_outputs
        assert form is not None
        try:
            sequence.rules = make_rules(
                request.params,
                request.prompt_token_ids,
                eos_token_ids=self._eos,
                tokenizer=self._tokenizer,
                grammar=compiling.result(),
            )
        except RequestError as fault:
            return fault
        except Exception:
            _log.exception("%s of request %d failed to compile", form.asked_as, request.number)
            return RequestError(f"{form.asked_as} cannot be used", param=form.asked_as)
        return None

    def _compiling(self) -> GrammarCompiler:
        if self._compiler is None:
            # Imported late: its library takes time to import, and timings do not need it.
            from kvant.sampling.grammar import GrammarCompiler

            assert self._tokenizer is not None
            self._compiler = GrammarCompiler(
                self._tokenizer, self._vocab_size, self._eos, limits=self._limits
            )
        return self._compiler
