"""Text and conversations to token ids; `kvant.engine.text` does the reverse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from kvant.errors import BadCheckpoint, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
"""{"role": "user" | "assistant" | "system", "content": text}"""

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "tekken.json",
)


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
        """The token that ends a text, for models whose own files name none."""
        found = self.tokenizer.eos_token_id
        return (found,) if isinstance(found, int) else ()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Return token ids of a text, with the model's prefix (such as a BOS token).

        Raises TooManyTokens above `most`.
        """
        return self._ids(text, add_special_tokens, most, "prompt")

    def _ids(self, text: str, add_special_tokens: bool, most: int | None, param: str) -> list[int]:
        # As a batch of one: only then the library releases the interpreter.
        try:
            (found,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:  # tokenizers takes no lone surrogates
            raise RequestError("the text is not valid Unicode", param=param) from None
        if most is not None and len(found) > most:
            # Before building a list of millions, which would block other threads.
            raise TooManyTokens(len(found), most, param)
        ids: list[int] = found.ids
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return token ids of a conversation in the model's template, up to the assistant's turn."""
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
        """Token ids of a rendered template. By default nothing is added to its own special tokens.

        Raises TooManyTokens above `most`.
        """
        return self._ids(text, add_special_tokens, most, "messages")

    def require_chat_template(self) -> None:
        """RequestError for a model that only completes texts."""
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template: it completes texts, it does not converse",
                param="messages",
            )


def has_tokenizer(path: Path) -> bool:
    """True if the model directory `path` has a tokenizer file."""
    return any((path / name).is_file() for name in _FILES)


def open_tokenizer(path: Path) -> Tokenizing | None:
    """Open the tokenizer of the model directory `path`; None if it has no tokenizer files."""
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
    # Files often keep the values of their training. transformers sets both at every call.
    backend.no_truncation()
    backend.no_padding()
    return Tokenizing(tokenizer, backend)
