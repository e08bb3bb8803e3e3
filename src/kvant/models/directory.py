"""Checks a directory in transformers' format, and why Kvant would not load the model in it.

Reads only names, sizes, JSON and safetensors headers, but no weights.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvant.errors import BadCheckpoint, ConfigError, ModelNotFound, WayOut
from kvant.kv.checkpoint.json_file import COPY_AGAIN, read_json_object, refuse_lfs_pointer
from kvant.kv.checkpoint.safetensors_header import (
    INDEX_NAME,
    SINGLE_NAME,
    find_weight_files,
    is_indexed,
    read_header,
)
from kvant.models.geometry.families import is_drafter
from kvant.models.geometry.fields import shown, text_section

CONFIG_NAME = "config.json"
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json")
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
GENERATION_NAME = "generation_config.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

_ENDS = 64
_log = logging.getLogger(__name__)

# Families that were published with their own code (`auto_map`) before transformers had them. If
# `auto_map` names classes that transformers has today, those run instead.
_ADOPTED = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "mimo_v2_flash": "MiMoV2Flash",
    "phi3": "Phi3",
}


def require_config(directory: Path) -> dict[str, Any]:
    """Returns the parsed config.json. Raises ModelNotFound if it is missing, BadCheckpoint if broken."""
    if (directory / CONFIG_NAME).is_file():
        return read_json_object(directory / CONFIG_NAME)
    if (directory / "adapter_config.json").is_file():
        why = "it holds a PEFT adapter (adapter_config.json), which Kvant does not load"
        way = "merge the adapter into its base model and name the merged model"
    elif (directory / "params.json").is_file():
        why = "it holds a checkpoint in its maker's own format (params.json)"
        way = "name the same model in transformers' format: a directory with config.json"
    else:
        why = "it has no config.json"
        way = "name a directory in transformers' format, a .gguf file, or a hub id"
    raise ModelNotFound(f"{directory} is no model directory", why=why, ways_out=[WayOut(way)])


def obstacle(directory: Path) -> BadCheckpoint | None:
    """Returns why Kvant would not load the model in this directory, or None if no reason was found.

    Raises like `require_config`.
    """
    config = require_config(directory)
    found = remote_code(config, str(directory)) or _weights_obstacle(directory)
    return found or _tokenizer_obstacle(directory)


def remote_code(config: Mapping[str, Any], name: str) -> BadCheckpoint | None:
    """Returns the error of a checkpoint that needs its own Python code, or None for other checkpoints."""
    auto_map = config.get("auto_map")
    if not auto_map or is_drafter(config):  # a drafter's network is Kvant's own
        return None
    if isinstance(auto_map, dict) and _adopted(str(config.get("model_type")), auto_map):
        return None
    return BadCheckpoint(
        f"{name} brings its own Python code (auto_map in config.json), which Kvant never runs",
        why=f"model_type {config.get('model_type')!r} is computed by {auto_map}",
        ways_out=[
            WayOut("use a conversion of the model to an architecture that transformers has itself")
        ],
    )


def _adopted(model_type: str, auto_map: Mapping[str, Any]) -> bool:
    prefix = _ADOPTED.get(model_type)
    ours = {"AutoConfig": f"{prefix}Config", "AutoModelForCausalLM": f"{prefix}ForCausalLM"}
    theirs = {role: str(auto_map.get(role)).rpartition(".")[2] for role in ours}
    return prefix is not None and theirs == ours and "AutoTokenizer" not in auto_map


def other_weights(config: Mapping[str, Any], directory: Path) -> BadCheckpoint | None:
    """Returns the error of a config.json that names another weight file than Kvant reads, or None.

    transformers reads the named file. Ranks and narrow weights are read from files of the usual names.
    """
    sections = (section.get("transformers_weights") for section in (config, text_section(config)))
    named = next((name for name in sections if name is not None), None)
    usual = INDEX_NAME if is_indexed(directory) else SINGLE_NAME
    if named is None or named == usual:
        return None
    name = INDEX_NAME if str(named).endswith(".index.json") else SINGLE_NAME
    ways = [WayOut(f"in a copy of the model, replace {name} by {named}, and remove the key")]
    if (directory / usual).is_file():
        flag = ("--hf-overrides", '{"transformers_weights": null}')
        ways.append(WayOut(f"read {usual} instead", flag))
    return BadCheckpoint(
        f"config.json: transformers_weights is {shown(named)}",
        why=f"Kvant reads weights from {usual}",
        ways_out=ways,
    )


def as_obstacle(refusal: ConfigError) -> str:
    """Returns an error of loading as a text for a plan, which is possible in spite of it."""
    return f"can be planned, not loaded: {refusal.what} ({refusal.why}){refusal.ways}"


def missing_weights(directory: Path) -> list[str]:
    """Returns the missing weight files' names: of those in the index, or of model.safetensors if no index
    counts. Raises BadCheckpoint for a broken index."""
    files = indexed_files(directory / INDEX_NAME) if is_indexed(directory) else [SINGLE_NAME]
    return [file for file in files if not (directory / file).is_file()]


def indexed_files(index: Path) -> list[str]:
    """Returns the distinct files in a safetensors index. Raises BadCheckpoint if it is broken."""
    weight_map = read_json_object(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    files = sorted({str(name) for name in names})
    wrong = [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]
    if not files or wrong:
        raise BadCheckpoint(
            f"cannot use the index {index}",
            why=f"it points to {wrong[0]!r}" if wrong else "it has no weight_map",
            ways_out=[WayOut("fetch the file again from where the model came")],
        )
    return files


def _weights_obstacle(directory: Path) -> BadCheckpoint | None:
    try:
        missing = missing_weights(directory)
        if missing == [SINGLE_NAME]:
            return _no_safetensors(directory)
        if missing:
            return BadCheckpoint(
                f"{directory} lacks weight files",
                why=f"{INDEX_NAME} names {missing[0]}, which is not there ({len(missing)} in all)",
                ways_out=[WayOut("fetch the missing files from where the model came")],
            )
        for path in find_weight_files(directory).paths:
            read_header(path)
        if not (directory / SINGLE_NAME).is_file():
            _check_metadata(directory / INDEX_NAME)
    except BadCheckpoint as broken:
        return broken
    return None


def _check_metadata(index: Path) -> None:
    """Raises BadCheckpoint for an index without metadata, even if empty: transformers needs the section."""
    if not isinstance(read_json_object(index).get("metadata"), dict):
        raise BadCheckpoint(
            f"{index} has no metadata",
            why="transformers reads no index without this section",
            ways_out=[WayOut('add "metadata": {} to the file')],
        )


def has_tokenizer(directory: Path) -> bool:
    """Returns whether a model's directory has a tokenizer file."""
    names = (*TOKENIZER_NAMES, *_OTHER_TOKENIZERS)
    return any((directory / name).is_file() for name in names)


def _tokenizer_obstacle(directory: Path) -> BadCheckpoint | None:
    """Returns the error of a tokenizer's file whose first and last bytes are not those of a JSON object."""
    for name in TOKENIZER_NAMES:
        path = directory / name
        if not path.is_file():
            continue
        with path.open("rb") as file:
            head = file.read(_ENDS)
            file.seek(max(0, os.path.getsize(path) - _ENDS))
            tail = file.read()
        try:
            refuse_lfs_pointer(head, path)
        except BadCheckpoint as fault:
            return fault
        if not (head.lstrip().startswith(b"{") and tail.rstrip().endswith(b"}")):
            return BadCheckpoint(
                f"{path} is no JSON object",
                why="it is cut off, or another file of this name",
                ways_out=(COPY_AGAIN,),
            )
    return None


def ends_of_text(directory: Path) -> list[int] | None:
    """Returns the tokens that generation_config.json names as ends of a text; None if it names none.

    A value of another kind is skipped with a warning, like the file's other values.
    """
    try:
        said = json.loads((directory / GENERATION_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    found = said.get("eos_token_id") if isinstance(said, dict) else None
    ids: list[Any] = found if isinstance(found, list) else [found]
    if found is not None and not all(type(one) is int for one in ids):
        _log.warning(
            "%s: eos_token_id is %r, no token; this value is ignored", GENERATION_NAME, found
        )
        return None
    return None if found is None else ids or None


def _no_safetensors(directory: Path) -> BadCheckpoint:
    names = sorted(file.name for file in directory.iterdir() if file.is_file())
    pickled = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    others = [name for name in names if name.endswith(".safetensors")]
    if pickled:
        why = f"its weights are Python pickles ({pickled[0]}), which can run code when opened"
        way = (
            'if you trust them, convert them once: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{directory}').save_pretrained('OUT')\" "
            "and copy the tokenizer's files to OUT"
        )
    elif others:
        why = f"it has {others[0]}, but neither {SINGLE_NAME} nor {INDEX_NAME}"
        way = "name the same model in transformers' format"
    else:
        why = "it has no .safetensors files"
        way = "fetch the weights; without them only `kvant plan` works"
    return BadCheckpoint(
        f"{directory} has no weights that Kvant loads", why=why, ways_out=[WayOut(way)]
    )


def gguf_files(directory: Path) -> list[Path]:
    """Returns the .gguf files in a directory, sorted by name."""
    return sorted(file for file in directory.iterdir() if file.suffix.lower() == ".gguf")
