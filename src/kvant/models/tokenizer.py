"""Reads tokenizers through transformers, without torch."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG, COPY_AGAIN
from kvant.models.quiet import quiet_transformers


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer in the directory `path` with its chat template; runs no remote code."""
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False, local_files_only=True
            )
    except StrictDataclassError as fault:  # transformers reads config.json on its way
        raise BadCheckpoint(
            f"{path}: transformers cannot read config.json",
            why=str(fault),
            ways_out=(COMPARE_CONFIG,),
        ) from fault
    except Exception as fault:  # the tokenizers library raises plain Exception
        raise BadCheckpoint(
            f"{path} has no tokenizer that can be read",
            why=f"{type(fault).__name__}: {fault}",
            ways_out=(COPY_AGAIN,),
        ) from fault
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer
