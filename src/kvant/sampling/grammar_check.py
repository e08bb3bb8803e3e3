"""The process in which a grammar is compiled for the first time: `python -P -m kvant.sampling.grammar_check`.

A grammar a line, as a JSON string; for each a line with what is wrong with it, "" for nothing. It ends
with its standard input, and may be killed at any time.
"""

from __future__ import annotations

import json
import resource
import sys

from llguidance import LLMatcher, LLParserLimits

_MEMORY_BYTES = 2 * 2**30


def parser_limits() -> LLParserLimits:
    """What one grammar may take of time in a step and of memory; error texts without its state."""
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    limits = parser_limits()
    _say("")
    for line in sys.stdin:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            json.loads(line), None, limits=limits
        )
        _say(messages[0] if is_error else "")


def _say(text: str) -> None:
    print(json.dumps(text), flush=True)


if __name__ == "__main__":
    main()
