"""Check a request before it is queued."""

from __future__ import annotations

from kvant.errors import RequestError
from kvant.sampling.sampling_params import SamplingParams


def check_request(
    prompt: tuple[int, ...],
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int,
    has_tokenizer: bool,
    has_forms: bool,
) -> None:
    """Raise RequestError, with numbers and the client's field name, if a request cannot be served."""
    if not prompt:
        raise RequestError("the prompt is empty: there is nothing to go on from", param="prompt")
    new = 0 if params.max_tokens == 0 else 1
    if len(prompt) + new > max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; with {new} new that is more than the "
            f"{max_model_len} tokens a sequence may have here (--max-model-len, and what the pool holds)",
            param="prompt",
        )
    for name, tokens in {"prompt": prompt, **params.token_ids}.items():
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"{name} holds {token!r}, which is no token id", param=name)
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} holds token {token}; ids go from 0 to {vocab_size - 1}", param=name
                )
    if params.stop_strings and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer, and this model has none", param="stop")
    form = params.structured_outputs
    if form is not None and not has_forms:
        raise RequestError(
            f"{form.asked_as} needs a tokenizer and an end-of-sequence token; this model lacks one",
            param=form.asked_as,
        )
    if params.n != 1:
        raise RequestError(f"n is {params.n}: this way there is one answer", param="n")
