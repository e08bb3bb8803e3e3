"""Converts a GGUF vocabulary to tokenizer.json, tokenizer_config.json and chat_template.jinja.

Byte-level BPE vocabularies are built here with the tokenizers library, in well under a second.
SentencePiece vocabularies are converted once by transformers. The file has only a name of the text
splitter (`tokenizer.ggml.pre`). An unknown name is refused, because a wrong splitter would give the
model tokens that it was not trained on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kvant.errors import BadCheckpoint, WayOut
from kvant.models.gguf_header import GGUFHeader, malformed

# tokenizer.ggml.token_type, llama.cpp's `llama_token_type`
_CONTROL = 3
_USER_DEFINED = 4

# The patterns of the published tokenizer.json files of the families.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitter:
    """How text is split. split: pattern that cuts text into words, None for GPT-2's. ignore_merges: a word
    that is itself a token is not split. adds_bos: the default for a file that does not declare it."""

    split: str | None = None
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_LLAMA3 = _Splitter(split=_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)
_SPLITTERS = {
    "gpt-2": _Splitter(),
    # SmolLM's own tokenizer also splits off single digits. transformers' reader of GGUF does not, and Kvant
    # does as transformers. The results differ if several spaces precede a digit.
    "smollm": _Splitter(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Splitter(split=_QWEN2_SPLIT, nfc=True),
}


def tokenizer_files(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the contents of the tokenizer's files by name. config: the model's config.json.

    Raises BadCheckpoint if the vocabulary cannot be imported.
    """
    vocabulary = _vocabulary(header)
    if vocabulary.kind == "gpt2":
        splitter = _splitter(header)
        tokenizer = _byte_level(header, vocabulary, splitter)
        adds_bos = splitter.adds_bos
    elif vocabulary.kind == "llama":
        tokenizer = _sentencepiece(header)
        adds_bos = True  # llama.cpp's default for a SentencePiece file
    else:
        raise _unknown(header, f"vocabulary kind {vocabulary.kind!r}", ("gpt2", "llama"))

    named = _special_names(header, vocabulary)
    adds_bos = _flag(header, "tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in named
    adds_eos = _flag(header, "tokenizer.ggml.add_eos_token", False) and "eos_token" in named
    tokenizer.post_processor = _frame(
        tokenizer,
        [named["bos_token"]] if adds_bos else [],
        [named["eos_token"]] if adds_eos else [],
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        **named,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files["chat_template.jinja"] = template
    return files


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """A file's tokens. kind: "gpt2" (byte-level BPE) or "llama" (SentencePiece). types: may be empty."""

    kind: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]


def _vocabulary(header: GGUFHeader) -> _Vocabulary:
    kind = header.metadata.get("tokenizer.ggml.model")
    tokens = _strings(header, "tokenizer.ggml.tokens")
    if not isinstance(kind, str):
        raise malformed(header.path, "it does not name its vocabulary (tokenizer.ggml.model)")
    if len(set(tokens)) != len(tokens):
        (twice, _), *_ = Counter(tokens).most_common(1)
        raise malformed(header.path, f"token {twice!r} is in the vocabulary twice")
    raw = header.metadata.get("tokenizer.ggml.token_type", ())
    types = tuple(item for item in raw if isinstance(item, int)) if isinstance(raw, tuple) else ()
    if len(types) not in (0, len(tokens)):
        raise malformed(header.path, f"it has {len(types)} token types for {len(tokens)} tokens")
    return _Vocabulary(kind, tokens, types)


def _splitter(header: GGUFHeader) -> _Splitter:
    name = header.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _SPLITTERS:
        raise _unknown(header, f"text splitter (tokenizer.ggml.pre) {name!r}", tuple(_SPLITTERS))
    return _SPLITTERS[name]


def _byte_level(header: GGUFHeader, vocabulary: _Vocabulary, splitter: _Splitter) -> Tokenizer:
    pairs = [merge.split(" ") for merge in _strings(header, "tokenizer.ggml.merges")]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise malformed(header.path, f"merge {' '.join(wrong)!r} is no pair of tokens")
    try:
        bpe = models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=[(left, right) for left, right in pairs],
            ignore_merges=splitter.ignore_merges,
        )
    except (
        Exception
    ) as error:  # tokenizers raises plain Exception, as for a merge of unknown tokens
        raise malformed(header.path, f"its vocabulary and merges disagree: {error}") from error
    tokenizer = Tokenizer(bpe)
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    if splitter.split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        words = pre_tokenizers.Split(Regex(splitter.split), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, header, vocabulary)
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, header: GGUFHeader, vocabulary: _Vocabulary) -> None:
    """Adds control tokens as special ones, which text leaves out, and user-defined tokens as unsplit ones."""
    control = [
        t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=False) if kind == _CONTROL
    ]
    if not vocabulary.types:
        control = list(dict.fromkeys(_special_names(header, vocabulary).values()))
    defined = [
        t
        for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=False)
        if kind == _USER_DEFINED
    ]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in defined])


def _sentencepiece(header: GGUFHeader) -> Tokenizer:
    # Imported here because transformers takes seconds, and byte-level vocabularies do not need it.
    from transformers import AutoTokenizer

    path = header.path.resolve()
    try:
        loaded = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        backend = loaded.backend_tokenizer
    except Exception as error:  # report any exception of transformers as a fault of the file
        raise malformed(header.path, f"transformers cannot read its vocabulary: {error}") from error
    assert isinstance(backend, Tokenizer)
    return backend


def _special_names(header: GGUFHeader, vocabulary: _Vocabulary) -> dict[str, str]:
    names = {}
    for role, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        index = header.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(index, int) and 0 <= index < len(vocabulary.tokens):
            names[role] = vocabulary.tokens[index]
    return names


def _frame(
    tokenizer: Tokenizer, before: list[str], after: list[str]
) -> processors.TemplateProcessing:
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(before + after)]
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[
            *before,
            "$A",
            *after,
            *(f"{t}:1" for t in before),
            "$B:1",
            *(f"{t}:1" for t in after),
        ],
        special_tokens=special,
    )


def _strings(header: GGUFHeader, key: str) -> tuple[str, ...]:
    raw = header.metadata.get(key)
    items = tuple(item for item in raw if isinstance(item, str)) if isinstance(raw, tuple) else ()
    if not isinstance(raw, tuple) or len(items) != len(raw) or not items:
        raise malformed(header.path, f"metadata {key!r} is no list of texts")
    return items


def _flag(header: GGUFHeader, key: str, default: bool) -> bool:
    value = header.metadata.get(key, default)
    if not isinstance(value, bool):
        raise malformed(header.path, f"metadata {key!r} is {value!r}, not true or false")
    return value


def _unknown(header: GGUFHeader, what: str, known: tuple[str, ...]) -> BadCheckpoint:
    return BadCheckpoint(
        f"Kvant cannot import the tokenizer of {header.path}",
        why=f"it has the {what}; Kvant knows {', '.join(known)}",
        ways_out=[
            WayOut("use the model's original checkpoint (safetensors): a directory or hub id")
        ],
    )
