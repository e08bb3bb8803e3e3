"""Flags of `vllm serve` that `kvant serve` has not: each maps, has no effect, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvant.errors import WayOut


@dataclass(frozen=True, slots=True)
class Foreign:
    """One flag of another program.

    takes_value: it is followed by a value. becomes: flags that replace it, before its value. no_effect:
    why it changes nothing. refused: why it cannot be served; neutral values pass. way_out: for a refusal.
    """

    takes_value: bool = False
    becomes: tuple[str, ...] = ()
    no_effect: str = ""
    refused: str = ""
    neutral: tuple[str, ...] = ()
    way_out: WayOut | None = None


_TEXT_ONLY = "the server takes text only"
_ONE_DEVICE = "one device serves so far"
_FAMILY = "the chat template tells how the model writes reasoning and tool calls"
_LOG = "a line for each request is printed with --log-requests only"
_MERGE = WayOut("merge the adapter into the weights first (peft: merge_and_unload)")

VLLM: Mapping[str, Foreign] = {
    # No effect on answers
    "--enforce-eager": Foreign(no_effect="CUDA graphs change no answer; Kvant decides where it uses them"),
    "--enable-chunked-prefill": Foreign(no_effect="prompts are always computed in chunks"),
    "--no-enable-chunked-prefill": Foreign(no_effect="prompts are always computed in chunks"),
    "--disable-log-requests": Foreign(no_effect=_LOG),
    "--no-enable-log-requests": Foreign(no_effect=_LOG),
    "--max-log-len": Foreign(True, no_effect=_LOG),
    "--disable-log-stats": Foreign(no_effect="statistics are at /metrics"),
    "--disable-uvicorn-access-log": Foreign(no_effect=_LOG),
    "--uvicorn-log-level": Foreign(True, no_effect=_LOG),
    "--trust-remote-code": Foreign(no_effect="Kvant never runs code of a checkpoint"),
    "--async-scheduling": Foreign(no_effect="steps are always scheduled ahead"),
    "--no-async-scheduling": Foreign(no_effect="steps are always scheduled ahead"),
    "--compilation-config": Foreign(True, no_effect="Kvant compiles nothing of a model"),
    "-O": Foreign(True, no_effect="Kvant compiles nothing of a model"),
    "--cudagraph-capture-sizes": Foreign(True, no_effect="Kvant chooses the sizes of its graphs"),
    "--max-seq-len-to-capture": Foreign(True, no_effect="Kvant chooses the sizes of its graphs"),
    "--swap-space": Foreign(True, no_effect="a preempted sequence is computed again"),
    "--tokenizer-mode": Foreign(
        True, no_effect="the tokenizers library is always used", refused="no other tokenizer is offered",
        neutral=("auto", "hf", "fast", "mistral", "slow"),
    ),
    "--distributed-executor-backend": Foreign(True, no_effect=_ONE_DEVICE),
    "--limit-mm-per-prompt": Foreign(True, no_effect=_TEXT_ONLY),
    "--mm-processor-kwargs": Foreign(True, no_effect=_TEXT_ONLY),
    "--mm-processor-cache-gb": Foreign(True, no_effect=_TEXT_ONLY),
    "--mm-encoder-tp-mode": Foreign(True, no_effect=_TEXT_ONLY),
    "--allowed-local-media-path": Foreign(True, no_effect=_TEXT_ONLY),
    "--enable-prompt-tokens-details": Foreign(no_effect="usage always has the details"),
    "--enable-tokenizer-info-endpoint": Foreign(no_effect="/tokenizer_info is always there"),
    "--enable-request-id-headers": Foreign(no_effect="X-Request-Id is always returned"),
    "--enable-force-include-usage": Foreign(
        refused="usage is sent to streams that ask for it",
        way_out=WayOut('ask for it: "stream_options": {"include_usage": true}'),
    ),
    # Another name
    "--enable-log-requests": Foreign(becomes=("--log-requests",)),
    "--max-logprobs": Foreign(True, becomes=("--max-top-logprobs",)),
    "--chat-template-content-format": Foreign(
        True, no_effect="text parts are joined", refused="text parts are joined into one text",
        neutral=("auto", "string"),
    ),
    # Refused
    "--enable-expert-parallel": Foreign(refused=_ONE_DEVICE),
    "--data-parallel-size": Foreign(
        True, no_effect="one engine serves", refused=_ONE_DEVICE, neutral=("1",),
        way_out=WayOut("start one server on each device, behind a router"),
    ),
    "--pipeline-parallel-size": Foreign(
        True, no_effect="one engine serves", refused=_ONE_DEVICE, neutral=("1",)
    ),
    "--kv-transfer-config": Foreign(True, refused="KV cache pages are not sent anywhere"),
    "--hf-overrides": Foreign(
        True, refused="a checkpoint's config.json is taken as it is", neutral=("{}",),
        way_out=WayOut("change the value in a copy of the model's config.json"),
    ),
    "--chat-template": Foreign(
        True, refused="conversations use the checkpoint's own template",
        way_out=WayOut("put the template into chat_template.jinja of the model's directory"),
    ),
    "--enable-auto-tool-choice": Foreign(no_effect=_FAMILY),
    "--tool-call-parser": Foreign(True, no_effect=_FAMILY),
    "--reasoning-parser": Foreign(True, no_effect=_FAMILY),
    "--tokenizer": Foreign(
        True, refused="the tokenizer is the checkpoint's own",
        way_out=WayOut("put the tokenizer's files into the model's directory"),
    ),
    "--enable-lora": Foreign(refused="LoRA adapters are not offered", way_out=_MERGE),
    "--lora-modules": Foreign(True, refused="LoRA adapters are not offered", way_out=_MERGE),
    "--max-loras": Foreign(True, refused="LoRA adapters are not offered", way_out=_MERGE),
    "--max-lora-rank": Foreign(True, refused="LoRA adapters are not offered", way_out=_MERGE),
    "--ssl-keyfile": Foreign(True, refused="there is no TLS", way_out=WayOut("put a proxy in front")),
    "--ssl-certfile": Foreign(True, refused="there is no TLS", way_out=WayOut("put a proxy in front")),
    "--root-path": Foreign(True, refused="paths begin at /", way_out=WayOut("strip it in the proxy")),
    "--cpu-offload-gb": Foreign(True, refused="weights are not offloaded", neutral=("0",)),
}  # fmt: skip

VALUES: Mapping[str, Mapping[str, str]] = {
    "--load-format": {"safetensors": "auto", "hf": "auto"},
    "--generation-config": {"vllm": "none"},
}
"""Flags that both programs have: values of the other one, and what they are called here."""
