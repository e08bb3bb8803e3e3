"""What --kv-transfer and --kv-transfer-convert may say."""

from __future__ import annotations

import pytest

from kvant.errors import BadValue
from kvant.kv.dtype import KVDtype
from kvant.kv.transfer.config import Address, parse_transfer


def test_engines_are_read() -> None:
    found = parse_transfer(
        "give:0.0.0.0:5700, take:[::1]:5701,take:prefill-2:5700", "fp8_per_token_head,nvfp4/bf16",
        asked_by="--kv-transfer",
    )  # fmt: skip
    assert found.give == Address("0.0.0.0", 5700)
    assert found.take == (Address("::1", 5701), Address("prefill-2", 5700))
    assert found.take[0].endpoint == "tcp://[::1]:5701"
    assert found.convert == {KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.NVFP4, KVDtype.BFLOAT16}


@pytest.mark.parametrize(
    "text",
    ["", "take", "take:5700", "take:host:", "take:host:x", "take:host:0", "take:host:70000",
     "lend:host:5700", "give:a:1,give:b:2", "take:a:1,take:a:1", "give::5700"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadValue, match="--kv-transfer"):
        parse_transfer(text, None, asked_by="--kv-transfer")


def test_only_what_is_taken_is_converted_and_only_from_named_formats() -> None:
    with pytest.raises(BadValue, match="nothing to convert"):
        parse_transfer("give:a:1", "fp8_e4m3", asked_by="--kv-transfer")
    with pytest.raises(BadValue, match="names no stored format"):
        parse_transfer("take:a:1", "auto", asked_by="--kv-transfer")
