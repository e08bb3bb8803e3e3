"""Incremental text from token ids: whole characters only, stop strings removed."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT_TOKENS = 8
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """One answer's text. Its pieces joined are the text of all its tokens, up to a stop string.

    prompt_token_ids: decoders that write a space before every word but the first must know that text
    precedes the answer. may_end: stop strings are to be found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        stops: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self.may_end = bool(stops)
        self._stops = StopStrings(stops, include=include_stop)
        self._context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._before = self._decode(self._context)
        if self._before.endswith(_BROKEN):
            # Half a character: the stream would repeat unfinished text, including the prompt.
            self._context, self._before = [], ""
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_decoded_chars = 0
        self._waits = False  # the last token ended within a character
        self.text = ""

    @property
    def stopped_by(self) -> str | None:
        """Returns the stop string that was found, or None."""
        return self._stops.found

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Return the text that this token makes visible, often none. may_stop: look for stop strings."""
        self._token_ids.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id)
        self._waits = piece is None
        if piece is None:
            return ""
        self._num_decoded_chars += len(piece)
        if self.may_end and may_stop:
            piece = self._stops.push(piece)
        self.text += piece
        return piece

    def finish(self) -> str:
        """End the text; return what was held back, and U+FFFD for an incomplete character."""
        if self.stopped_by is not None:
            return ""
        rest = ""
        if self._waits:
            whole = self._decode(self._context + self._token_ids)
            rest = self._stops.push(whole[len(self._before) + self._num_decoded_chars :])
        rest += self._stops.release()
        self.text += rest
        return rest

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StopStrings:
    """Finds the first complete stop string, and holds back text that may begin one.

    The cut of the text into pieces does not change the result. If two are complete at the same
    character, the one that begins earlier counts.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return the text that can be shown now: after a match, everything up to it, then nothing."""
        if self.found is not None:
            return ""
        text = self._held + text
        first = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=None,
        )
        if first is not None:
            end, at, self.found = first
            self._held = ""
            return text[: end if self._include else at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def release(self) -> str:
        """End the text; return what was held back."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
