"""What an engine is asked to be: made once at the edge, frozen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.engine.planning import PlanRequest
from kvant.errors import BadValue, UnknownName
from kvant.kv.names import parse_format
from kvant.kv.policy import read_policy
from kvant.kv.request import Asked, KVRequest, Requests, parse_rule, parse_skips

ENV_KV_CACHE_DTYPE = "KVANT_KV_CACHE_DTYPE"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """plan: the model, its device and its KV cache. The rest: how requests share one step.

    seed: of the seeds of requests without one; None draws it. random_weights: load no weights, for
    timings of a model of which only the configuration is there.
    """

    plan: PlanRequest
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool = True
    seed: int | None = None
    random_weights: bool = False


def make_config(
    plan: PlanRequest,
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    prefix_caching: bool = True,
    seed: int | None = None,
) -> EngineConfig:
    """A checked configuration; what is None becomes the device's default."""
    for name, value in (
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
    ):
        if value is not None and value < 1:
            raise BadValue(f"{name} is {value}", why="it must be 1 or more")
    seqs, tokens = default_step(plan.device)
    return EngineConfig(
        plan,
        seqs if max_num_seqs is None else max_num_seqs,
        tokens if max_num_batched_tokens is None else max_num_batched_tokens,
        prefix_caching,
        seed,
    )


def default_step(device: DeviceFacts) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens). A CPU step of more tokens would take seconds."""
    return (32, 512) if device.kind is DeviceKind.CPU else (256, 8192)


def kv_requests(
    *,
    kv_cache_dtype: str | None,
    skip_layers: Iterable[str],
    rules: Iterable[str],
    policy: Path | None,
    missing_scales: str,
    strict: bool,
    label: Callable[[str, object], str],
) -> Requests:
    """What was asked of the KV cache: arguments over environment over policy file.

    label: how an argument's name and value read to whoever gave it, for plans and error messages.
    """
    if missing_scales not in ("error", "one"):
        by = label("kv_missing_scales", missing_scales)
        raise UnknownName("value", missing_scales, ("error", "one"), asked_by=by)
    asked: tuple[Asked, ...] = ()
    if kv_cache_dtype is not None:
        asked = (_asked(kv_cache_dtype, label("kv_cache_dtype", kv_cache_dtype)),)
    found = Requests(
        target=KVRequest(
            explicit=asked, strict=strict, missing_scales_as_one=missing_scales == "one"
        )
    )
    for text in skip_layers:
        by = label("kv_cache_dtype_skip_layers", text)
        found = found.merged(parse_skips(text, asked_by=by))
    for text in rules:
        found = found.merged(parse_rule(text, asked_by=label("kv_cache_rules", text)))
    if (from_env := os.environ.get(ENV_KV_CACHE_DTYPE)) is not None:
        by = f"{ENV_KV_CACHE_DTYPE} {from_env}"
        weaker = Requests(target=KVRequest(explicit=(_asked(from_env, by),)))
        found = found.merged(weaker)
    return found if policy is None else found.merged(read_policy(policy))


_FLAGS = {"kv_cache_rules": "--kv-cache-rule"}


def flag_and_value(name: str, value: object) -> str:
    """An argument as it reads on a command line: the `label` of `kv_requests` for commands."""
    return f"{_FLAGS.get(name, '--' + name.replace('_', '-'))} {value}"


def _asked(text: str, by: str) -> Asked:
    return Asked(parse_format(text, asked_by=by), by)
