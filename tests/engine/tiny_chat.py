"""A tiny random model with a tokenizer and a chat template: everything `generate` and `chat` need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import tiny

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
END = 2  # <|im_end|>, and the tiny models' eos_token_id
FILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
VOCAB = len(SPECIAL) + 256
FILLING_VOCAB = VOCAB + len(FILL)


def build(directory: Path, *, family: str = "llama", fills: bool = False, **changes: Any) -> Path:
    """Model, tokenizer and generation config below `directory`; returns the model's path."""
    path = tiny.build(family, directory, vocab_size=FILLING_VOCAB if fills else VOCAB, **changes)
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    vocab |= {c: 3 + i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fill = FILL if fills else ()
    vocab |= {token: len(vocab) + index for index, token in enumerate(fill)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *fill]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return path
