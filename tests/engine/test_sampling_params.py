"""Wrong parameters are refused at once, by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from kvant.errors import RequestError
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.structured_outputs import StructuredOutputs


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.0, 2.5, 100], [-0.1, math.nan, math.inf, 10**400, "1", True, None]),
        ("top_p", [0.01, 1, 1.0], [0.0, 1.01, -1, math.nan, None]),
        ("min_p", [0.0, 0.5, 1], [-0.1, 1.1, math.nan]),
        ("top_k", [-1, 0, 1, 10**6], [-2, 1.5, True, "5", 2**63]),
        ("max_tokens", [None, 0, 16, 10**9], [-1, 1.5, True]),
        ("min_tokens", [0, 16], [-1, 17, 2.0]),
        ("seed", [None, 0, -1, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 1.0, "a"]),
        ("logprobs", [None, 0, 20], [-1, 21, True]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21, True, 1.5]),
        ("n", [1, 128], [0, 129, True, 1.0]),
        ("presence_penalty", [-2, 0, 2.0], [-2.01, 2.01, math.nan, "1", True]),
        ("frequency_penalty", [-2, 0, 2.0], [-2.01, 2.01, math.inf, None]),
        ("repetition_penalty", [0.01, 1, 100], [0, 0.009, 100.1, -1, math.nan]),
        (
            "logit_bias",
            [{}, {5: 100, 6: -100.0}, ((5, 1.0),), [[5, 1]], {i: 0 for i in range(1024)}],
            [
                {5: 100.1},
                {"5": 1},
                {-1: 1},
                {5: math.nan},
                {True: 1},
                5,
                [5],
                {i: 0 for i in range(1025)},
            ],
        ),
        (
            "bad_words",
            [(), ["a"], ["b" * 256] * 256],
            ["a", [""], ["a"] * 257, ["b" * 257], [1], [b"a"]],
        ),
        ("allowed_token_ids", [None, [5], (5, 5)], [[], [-1], ["5"], 5, [True]]),
        ("structured_outputs", [None, StructuredOutputs(regex="a")], ["a", {"regex": "a"}]),
        ("ignore_eos", [True, False], [1, None, "yes"]),
        (
            "stop",
            ["a", (), ("a", "b" * 256), ["x"] * 16],
            ["", [""], ["x"] * 17, "b" * 257, [1], 5],
        ),
        ("stop_token_ids", [(), [1, 2]], [[-1], ["a"], 3, [True]]),
    ],
)
def test_each_field_takes_its_range_and_names_itself_otherwise(
    name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name, value


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=1)  # type: ignore[call-arg]


def test_the_parameters_of_a_request_cannot_be_changed() -> None:
    stops = ["a"]
    params = SamplingParams(stop=stops)
    stops.append("b")
    assert params.stop_strings == ("a",)
    assert SamplingParams(stop="a") == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0  # type: ignore[misc]
