"""Streamed text is the text of all the tokens, whole characters only, cut at the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvant.engine.text import StopStrings, TextStream

ALPHABET = "abc"


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By reading character by character: where the text ends, and why."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@settings(max_examples=400)
@given(
    text=st.text(ALPHABET, max_size=14),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(0, 4), max_size=8),
)
def test_stop_strings_are_found_wherever_the_text_is_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    watch = StopStrings(stops)
    shown = "".join(watch.push(piece) for piece in cut(text, sizes))
    shown += watch.release()
    found = first_stop(text, stops)
    assert watch.found == (None if found is None else found[1])
    assert shown == (text if found is None else text[: found[0]])


@given(
    text=st.text(ALPHABET, max_size=10), stops=st.lists(st.text(ALPHABET, min_size=1, max_size=3))
)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    shown = watch.push(text)
    if watch.found is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_stop_string_can_be_kept() -> None:
    watch = StopStrings(["END"], include=True)
    assert "".join(map(watch.push, ["to the E", "N", "D and on"])) == "to the END"
    assert watch.found == "END"
    assert watch.push("more") == ""


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """One token for each byte, some merges, and a special token (the last id)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    for pair in ("th", "he", "Ġa", "Ã©"):
        vocab[pair] = len(vocab)
    merges = [("t", "h"), ("h", "e"), ("Ġ", "a"), ("Ã", "©")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def stream(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool = True
) -> tuple[str, list[str]]:
    text = TextStream(tokenizer, prompt, skip_special_tokens=skip)
    pieces = [text.push(token) for token in ids]
    pieces.append(text.finish())
    return text.text, pieces


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_the_pieces_joined_are_the_text_of_all_tokens(
    byte_tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    tokens = st.integers(0, byte_tokenizer.get_vocab_size() - 1)
    ids = data.draw(st.lists(tokens, max_size=25))
    text, pieces = stream(byte_tokenizer, [], ids, skip=skip)
    assert text == "".join(pieces) == byte_tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200)
@given(st.text(max_size=12), st.text("the aé∞🦊", max_size=8))
def test_no_piece_ends_within_a_character(
    byte_tokenizer: Tokenizer, answer: str, prompt: str
) -> None:
    answer = answer.encode("utf-8", "ignore").decode()
    ids, before = byte_tokenizer.encode(answer).ids, byte_tokenizer.encode(prompt).ids
    text, pieces = stream(byte_tokenizer, before, ids)
    assert text == answer
    if "\ufffd" not in answer:
        assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == "", "everything was complete before the end"


def test_a_character_that_stays_incomplete_is_shown_as_such_at_the_end(
    byte_tokenizer: Tokenizer,
) -> None:
    ids = byte_tokenizer.encode("a🦊").ids[:-1]
    assert stream(byte_tokenizer, [], ids)[0] == "a\ufffd"


def test_a_prompt_that_ends_within_a_character_is_not_repeated(byte_tokenizer: Tokenizer) -> None:
    fox = byte_tokenizer.encode("🦊").ids
    text, _ = stream(byte_tokenizer, byte_tokenizer.encode("prompt ").ids + fox[:2], fox[2:])
    assert text.strip("\ufffd") == "", "a part of the prompt came out again"


def test_a_decoder_that_trims_the_first_space_sees_the_prompt() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([0, 1]) == "a b"
    assert stream(tokenizer, [0], [1, 0])[0] == " b a"
    assert stream(tokenizer, [], [1, 0])[0] == "b a"


def test_special_tokens_are_left_out_or_kept_as_asked(byte_tokenizer: Tokenizer) -> None:
    ids = [*byte_tokenizer.encode("a").ids, byte_tokenizer.get_vocab_size() - 1]
    assert stream(byte_tokenizer, [], ids)[0] == "a"
    assert stream(byte_tokenizer, [], ids, skip=False)[0] == "a<end>"


def test_text_held_back_for_a_stop_string_is_shown_when_the_answer_ends_otherwise(
    byte_tokenizer: Tokenizer,
) -> None:
    text = TextStream(byte_tokenizer, [], skip_special_tokens=True, stops=["the end"])
    pieces = [text.push(token) for token in byte_tokenizer.encode("so the e").ids]
    assert "".join(pieces) == "so "
    assert text.finish() == "the e"
    assert text.stopped_by is None
