"""The limits of a running engine, decided once by the plan."""

from __future__ import annotations

from dataclasses import dataclass

from kvant.attention.need import DeviceFacts, DeviceKind


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of an engine, in tokens unless stated otherwise.

    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens of one step, over all
    sequences. max_model_len: tokens of one sequence, prompt and answer. page_size: tokens of a page.
    prefix_caching: whether requests share pages with equal contents. max_prompt_logprobs: prompt tokens
    scored in one step; each takes a row of logits. prompt_stride: prompts are split at multiples of this
    number, in steps with room for one stride. short_piece: the size of pieces in which the end of a prompt
    behind a long context is computed beside answers; 0 computes it at once. state_slots: recurrent states
    kept for prompts with equal beginnings, at multiples of state_stride. draft_states: with recurrent layers,
    drafts of one step over all sequences; each draft has a state of its own.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    prefix_caching: bool = True
    max_prompt_logprobs: int = 256
    prompt_stride: int = 1
    short_piece: int = 0
    state_slots: int = 0
    state_stride: int = 4096
    draft_states: int = 0


def default_num_seqs(device: DeviceFacts) -> int:
    """Returns the default of max_num_seqs."""
    return 32 if device.kind is DeviceKind.CPU else 256


def default_num_batched_tokens(device: DeviceFacts, max_num_seqs: int) -> int:
    """Returns the default of max_num_batched_tokens.

    A CPU would take seconds for a step of more tokens. On a GPU there is room for a token of each sequence
    beside 8192 prompt tokens, so prompts are split at the same places in every step.
    """
    return 512 if device.kind is DeviceKind.CPU else 8192 + max_num_seqs
