"""What crosses the socket is typed, and nothing else is taken from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvant.server
from kvant.engine.result import EngineStats
from kvant.sampling.logprobs import TokenLogprobs
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.structured_outputs import StructuredOutputs
from kvant.scheduling.request import FinishReason
from kvant.server.messages import (
    Cancel,
    Fault,
    Loading,
    Piece,
    Report,
    Stats,
    Submit,
    encode,
    read_from_engine,
    read_to_engine,
)
from kvant.speculative.counts import SpeculationStats

FORM = StructuredOutputs(choice=("a", "b"), asked_as="guided_choice")
TO_ENGINE = (
    Submit(1, (5, 6), SamplingParams(stop=("x",), seed=-(2**63)), "salt"),
    Submit(2, (5,), SamplingParams(logit_bias=((5, 1.5),), structured_outputs=FORM), ""),
    Cancel((1, 2)),
)
FROM_ENGINE = (
    Loading("weights", 1, 2, "B"),
    Fault("no", 2),
    Report(Stats()),
    Report(Stats(speculation=SpeculationStats(1, 7, 3, 4, (1, 1, 1), 2, False))),
    Report(
        Stats(1),
        (
            Piece(
                3,
                "é",
                (5,),
                (TokenLogprobs(5, -0.5, 1, ((5, -0.5),)),),
                (),
                FinishReason.STOP,
                "x",
                4,
            ),
        ),
    ),
)


def test_messages_arrive_as_they_were_sent() -> None:
    for message in TO_ENGINE:
        assert read_to_engine(encode(message)) == message
    for report in FROM_ENGINE:
        assert read_from_engine(encode(report)) == report


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "cancel", "ids": ["1"]},
        {"type": "cancel", "ids": [1.0]},
        {"type": "cancel", "ids": [True]},
        {"type": "cancel"},
        {"type": "cancel", "ids": [1], "more": 1},
        {"type": "reboot"},
        {"ids": [1]},
        [1],
        None,
    ],
)
def test_anything_else_is_refused(wrong: object) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_to_engine(msgspec.msgpack.encode(wrong))


@given(st.binary(max_size=200))
def test_bytes_are_refused_or_are_a_message(data: bytes) -> None:
    for read in (read_to_engine, read_from_engine):
        try:
            message = read(data)
        except msgspec.MsgspecError:
            continue
        assert read(encode(message)) == message


def test_stats_mirror_the_engines_own_fields() -> None:
    assert [f.name for f in msgspec.structs.fields(Stats)] == [
        f.name for f in dataclasses.fields(EngineStats)
    ]


def test_no_pickle_no_eval_and_no_tcp_anywhere_in_the_server() -> None:
    files = list(Path(kvant.server.__file__).parent.glob("*.py"))
    assert len(files) > 8
    for path in files:
        code = "\n".join(
            line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")
        )
        for word in ("import pickle", "recv_pyobj", "send_pyobj", "eval(", "exec(", "tcp://"):
            assert word not in code.replace("create_subprocess_exec(", ""), f"{word} in {path.name}"
