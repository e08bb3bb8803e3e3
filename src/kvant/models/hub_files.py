"""Chooses the files of a hub repository that a plan or a running model needs, each once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kvant.errors import BadCheckpoint, ModelNotFound, WayOut
from kvant.kv.checkpoint.safetensors_header import INDEX_NAME, SINGLE_NAME
from kvant.models.directory import CONFIG_NAME, PICKLE_SUFFIXES, indexed_files, missing_weights
from kvant.models.pooling import POOLING_NAME

_PLAN = (CONFIG_NAME, "generation_config.json", "hf_quant_config.json", INDEX_NAME)
_TEXTS = ("merges.txt", "vocab.txt", "mask_embedding.pt")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_LEFT_OVER_FROM_TRAINING = ("trainer_state.json", "training_args.json")


def plan_files(sizes: Mapping[str, int]) -> list[str]:
    """Returns the files that `kvant plan` reads. sizes: the repository's files and their bytes."""
    return [name for name in _PLAN if name in sizes]


def small_files(sizes: Mapping[str, int]) -> list[str]:
    """Returns configuration, tokenizer and chat template files of the repository's top directory."""
    return [name for name in sorted(sizes) if _is_small(name)]


def _is_small(name: str) -> bool:
    if name == POOLING_NAME:
        return True
    if "/" in name or name in _LEFT_OVER_FROM_TRAINING:
        return False
    if name.endswith(".index.json"):
        return name == INDEX_NAME  # other indexes list weights that Kvant does not fetch
    return name.endswith((".json", ".jinja", ".model", ".tiktoken")) or name in _TEXTS


def likely_weights(sizes: Mapping[str, int]) -> list[str]:
    """Returns the likely weight files by their names, before the index is read."""
    shards = [name for name in sizes if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)]
    return shards if INDEX_NAME in sizes else [name for name in (SINGLE_NAME,) if name in sizes]


def weights(repo: str, snapshot: Path, sizes: Mapping[str, int]) -> list[str]:
    """Returns the weight files that the fetched index names, else model.safetensors.

    Raises BadCheckpoint if the repository lacks some of them, or has only other weights.
    """
    if INDEX_NAME in sizes:
        files = indexed_files(snapshot / INDEX_NAME)
        missing = [file for file in files if file not in sizes]
        if missing:
            raise BadCheckpoint(
                f"the hub model {repo} is incomplete",
                why=f"its index names {missing[0]}, which is not in the repository",
                ways_out=[WayOut("choose another revision with --revision")],
            )
        return files
    if SINGLE_NAME in sizes:
        return [SINGLE_NAME]
    raise _without_safetensors(repo, sizes)


def suffices(snapshot: Path, with_weights: bool) -> bool:
    """Returns whether a cached snapshot has all files, so that the hub need not be asked."""
    if not (snapshot / CONFIG_NAME).is_file():
        return False
    if not with_weights:
        return True
    has_tokenizer = any((snapshot / name).is_file() for name in _TOKENIZERS)
    return has_tokenizer and not missing_weights(snapshot)


def require_config(repo: str, sizes: Mapping[str, int]) -> None:
    """Raises ModelNotFound if the repository has no config.json, and says what it has instead."""
    if CONFIG_NAME in sizes:
        return
    gguf = sorted(name for name in sizes if name.endswith(".gguf"))
    if gguf:
        raise ModelNotFound(
            f"the hub repository {repo} holds GGUF files and no {CONFIG_NAME}",
            why=f"it has {', '.join(gguf[:3])}{' ...' if len(gguf) > 3 else ''}",
            ways_out=[
                WayOut("download one of them and name the .gguf file"),
                WayOut("name the repository of the original model"),
            ],
        )
    raise ModelNotFound(
        f"the hub repository {repo} holds no model in transformers' format",
        why=f"it has no {CONFIG_NAME} in its top directory",
        ways_out=[WayOut("name a repository that has one")],
    )


def _without_safetensors(repo: str, sizes: Mapping[str, int]) -> BadCheckpoint:
    pickled = sorted(name for name in sizes if name.endswith(PICKLE_SUFFIXES))
    others = sorted(name for name in sizes if name.endswith(".safetensors"))
    if pickled:
        why = f"its weights are Python pickles ({pickled[0]}), which can run code when opened"
    elif others:
        why = f"it has {others[0]}, but neither {SINGLE_NAME} nor {INDEX_NAME}"
    else:
        why = "it has no .safetensors files"
    return BadCheckpoint(
        f"the hub model {repo} has no weights that Kvant loads",
        why=why,
        ways_out=[
            WayOut("look for a revision or repository of the model with safetensors weights"),
            WayOut("convert it once with transformers' save_pretrained and name the directory"),
        ],
    )
