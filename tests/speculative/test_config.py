"""--speculative-config: what it means, and what is refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvant.errors import BadValue, ConfigError, UnknownName
from kvant.plan.speculative_config import parse_speculative_config
from kvant.speculative.methods import DFLASH, NGRAM, Method

MINE = Method("mine", "tests.speculative.test_config", has_model=False, num_speculative_tokens=3)


def test_text_and_mapping_mean_the_same() -> None:
    body = {"method": "dflash", "model": "m", "num_speculative_tokens": 5, "kv_cache_dtype": "fp8"}
    asked = parse_speculative_config(body)
    assert asked == parse_speculative_config(json.dumps(body))
    assert (asked.method, asked.num_speculative_tokens, asked.adaptive) == (DFLASH, 5, True)
    assert asked.kv_cache_dtype is not None


def test_prompt_lookup_needs_no_model_and_has_defaults() -> None:
    asked = parse_speculative_config({"method": "ngram", "prompt_lookup_max": 6})
    assert asked.method is NGRAM
    assert asked.options == {"prompt_lookup_min": 2, "prompt_lookup_max": 6}


def test_a_method_outside_kvant_is_named_by_its_module() -> None:
    asked = parse_speculative_config({"method": "tests.speculative.test_config:MINE"})
    assert asked.method is MINE


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"method": "dflash", "model": "m", "revision": 5}, "a branch, tag or commit"),
        ([], "expected an object"),
        ({"model": "m"}, "name a method: dflash, ngram"),
        ({"method": "dflsh", "model": "m"}, "did you mean dflash"),
        ({"method": "dflash"}, "model is missing"),
        ({"method": "dflash", "model": "m", "num_draft": 1}, "num_speculative_tokens"),
        ({"method": "dflash", "model": "m", "num_speculative_tokens": 0}, "1 or more"),
        ({"method": "dflash", "model": "m", "num_speculative_tokens": True}, "1 or more"),
        ({"method": "dflash", "model": "m", "kv_cache_dtype": "fp9"}, "fp8"),
        ({"method": "dflash", "model": "m", "adaptive": "no"}, "true or false"),
        ({"method": "ngram", "model": "m"}, "unknown key 'model'"),
        ({"method": "ngram", "kv_cache_dtype": "fp8"}, "unknown key"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "more than"),
        ({"method": "no_such_module:M"}, "no_such_module"),
        ({"method": ".relative:M"}, "no method"),
        ({"method": "tests.speculative.test_config:NOTHING"}, "NOTHING"),
        ({"method": "tests.speculative.test_config:parse_speculative_config"}, "no method"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(body: Any, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_speculative_config(body)
    assert isinstance(refused.value, BadValue | UnknownName)
    assert why in str(refused.value)
    assert len(str(refused.value)) < 600
