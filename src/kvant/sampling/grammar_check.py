"""The process that compiles each grammar for the first time: `python -P -m kvant.sampling.grammar_check`.

Each line of standard input is a grammar as a JSON string. Each answer is a line with a JSON list of two
strings: the grammar in llguidance's syntax, and the error or "". A grammar in GBNF (llama.cpp, SGLang) is
converted. The process ends with its standard input and may be killed at any time.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

_MEMORY_BYTES = 2 * 2**30


class Checked(NamedTuple):
    """A grammar in llguidance's syntax. fault: why it is refused; empty if it compiles."""

    grammar: str
    fault: str


def parser_limits() -> LLParserLimits:
    """Returns the limit on a grammar's lexer states, which bounds its time per step and its memory."""
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    limits = parser_limits()
    _say(Checked("", ""))
    for line in sys.stdin:
        _say(_checked(json.loads(line), limits))


def _checked(grammar: str, limits: LLParserLimits) -> Checked:
    if not grammar.startswith("{") and not is_lark_syntax(grammar):  # JSON is llguidance's own form
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as fault:  # the converter raises bare exceptions
            return Checked("", f"it is neither Lark nor GBNF: {fault}")
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits)
    return Checked(grammar, messages[0] if is_error else "")


def _say(checked: Checked) -> None:
    print(json.dumps(checked), flush=True)


if __name__ == "__main__":
    main()
