"""Converts text and conversations to token ids, and generated token ids to text as they arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvant.errors import BadCheckpoint, RequestError
from kvant.models.directory import has_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
"""{"role": "user" | "assistant" | "system", "content": text}"""


class TooManyTokens(RequestError):
    """A text has more tokens than allowed; `count` is their number."""

    def __init__(self, count: int, most: int, param: str) -> None:
        self.count = count
        super().__init__(f"the text has {count} tokens, at most {most} can be read", param=param)


class Tokenizing:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, backend: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.backend = backend

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence token, for models whose config names none."""
        found = self.tokenizer.eos_token_id
        return (found,) if isinstance(found, int) else ()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Returns token ids of a text, with the model's prefix (such as a BOS token).

        Raises TooManyTokens above `most`.
        """
        return self._ids(text, add_special_tokens, most, "prompt")

    def _ids(self, text: str, add_special_tokens: bool, most: int | None, param: str) -> list[int]:
        # As a batch of one: only then the library releases the interpreter lock.
        try:
            (found,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:  # tokenizers takes no lone surrogates
            raise RequestError("the text is not valid Unicode", param=param) from None
        if most is not None and len(found) > most:
            # Checked before `found.ids`: building a list of millions would block other threads.
            raise TooManyTokens(len(found), most, param)
        ids: list[int] = found.ids
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Returns token ids of a conversation in the model's template, up to the assistant's turn."""
        self.require_chat_template()
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (
            Exception
        ) as fault:  # a template is a program of the checkpoint and may raise anything
            raise RequestError(
                f"the chat template refuses this conversation: {fault}", param="messages"
            ) from fault
        assert isinstance(text, str)
        return self.encode_rendered(text)

    def encode_rendered(
        self, text: str, *, add_special_tokens: bool = False, most: int | None = None
    ) -> list[int]:
        """Returns token ids of a rendered template, which by default has its special tokens already.

        Raises TooManyTokens above `most`.
        """
        return self._ids(text, add_special_tokens, most, "messages")

    def require_chat_template(self) -> None:
        """Raises RequestError if the model has no chat template."""
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template: it completes texts, it does not converse",
                param="messages",
            )


def open_tokenizer(path: Path) -> Tokenizing | None:
    """Opens the tokenizer of the model directory `path`; None if it has no tokenizer files."""
    if not has_tokenizer(path):
        return None
    from kvant.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise BadCheckpoint(
            f"{path} has a tokenizer that Kvant cannot stream",
            why=f"{type(tokenizer).__name__} is not built on the tokenizers library",
        )
    # Tokenizer files often keep settings of the training. transformers sets both at every call.
    backend.no_truncation()
    backend.no_padding()
    return Tokenizing(tokenizer, backend)


# -- token ids to text ------------------------------------------------------------------------

_CONTEXT_TOKENS = 8
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes one answer token by token. Its joined pieces are the text of all tokens, up to a stop string.

    prompt_token_ids: decoders that write a space before every word but the first must know that text
    precedes the answer. may_end: there are stop strings to look for.
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
        """Returns the text that this token adds, often none yet. may_stop: look for stop strings."""
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
        """Ends the text. Returns the text held back so far, with U+FFFD for an incomplete character."""
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

    The result does not depend on how the text is cut into pieces. If two stop strings end at the same
    character, the one that begins earlier counts.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that can be shown now: after a match, everything up to it, then nothing."""
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
        """Ends the text. Returns the text held back so far."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
