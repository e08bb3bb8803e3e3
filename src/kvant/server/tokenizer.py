"""The tokenizer in the API process, where torch is not to be."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tokenizers import Tokenizer

from kvant.engine.tokenizing import Tokenizing
from kvant.errors import BadCheckpoint


def open_tokenizer(path: Path) -> Tokenizing | None:
    """The tokenizer and chat template of a model directory; None where it has no tokenizer files.

    transformers imports torch wherever it finds it, though tokenizers need none of it: while it is
    imported here torch cannot be found. BadCheckpoint where the files cannot be read.
    """
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    _import_transformers()
    from transformers import AutoTokenizer

    from kvant.models.quiet import quiet_transformers

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False, local_files_only=True
            )
    except (OSError, ValueError, KeyError) as fault:
        raise BadCheckpoint(f"{path} has no tokenizer that can be read", why=str(fault)) from fault
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise BadCheckpoint(
            f"{path} has a tokenizer that Kvant cannot stream",
            why=f"{type(tokenizer).__name__} is not built on the tokenizers library",
        )
    return Tokenizing(tokenizer, backend)


def _import_transformers() -> None:
    if "transformers" in sys.modules or "torch" in sys.modules:
        return
    # Threads of its own would have to survive the fork that starts the next engine.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import transformers  # noqa: F401
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]
