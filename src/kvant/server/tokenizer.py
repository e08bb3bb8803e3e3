"""The tokenizer in the API process, which must not import torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvant.engine import tokenizing


def open_tokenizer(path: Path) -> tokenizing.Tokenizing | None:
    """Like `kvant.engine.tokenizing.open_tokenizer`, without torch.

    transformers imports torch if it finds it, though tokenizers do not need it. So torch is hidden while
    transformers is imported here.
    """
    if not tokenizing.has_tokenizer(path):
        return None
    _import_transformers()
    return tokenizing.open_tokenizer(path)


def _import_transformers() -> None:
    if "transformers" in sys.modules or "torch" in sys.modules:
        return
    # Its threads would not survive the fork that starts the next engine.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import transformers  # noqa: F401
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]
