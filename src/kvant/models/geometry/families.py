"""Lists the families, and finds the family of a config.

To add a family, write one file that makes a `Family`, and add one line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvant.errors import BadCheckpoint, WayOut
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG
from kvant.kv.geometry import LayerGeometry
from kvant.models.geometry.declared import left_out
from kvant.models.geometry.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from kvant.models.geometry.family import Family
from kvant.models.geometry.fields import Fields, shown
from kvant.models.geometry.gemma2 import GEMMA2, GEMMA3, GEMMA3_TEXT
from kvant.models.geometry.gemma3n import GEMMA3N, GEMMA3N_TEXT
from kvant.models.geometry.gemma4 import (
    GEMMA4,
    GEMMA4_TEXT,
    GEMMA4_UNIFIED,
    GEMMA4_UNIFIED_TEXT,
)
from kvant.models.geometry.gpt_oss import GPT_OSS
from kvant.models.geometry.llama import LLAMA, MISTRAL, MIXTRAL, OLMO2, PHI3
from kvant.models.geometry.mimo import MIMO_V2, MIMO_V2_FLASH
from kvant.models.geometry.parameters import Weight
from kvant.models.geometry.qwen import QWEN2, QWEN3, QWEN3_MOE
from kvant.models.geometry.qwen_hybrid import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_NEXT,
)

FAMILIES: tuple[Family, ...] = (
    LLAMA, QWEN2, QWEN3, QWEN3_MOE, MISTRAL, MIXTRAL, PHI3, OLMO2, GPT_OSS,
    GEMMA2, GEMMA3_TEXT, GEMMA3, GEMMA3N_TEXT, GEMMA3N,
    GEMMA4_TEXT, GEMMA4, GEMMA4_UNIFIED_TEXT, GEMMA4_UNIFIED,
    DEEPSEEK_V2, DEEPSEEK_V3, MIMO_V2_FLASH, MIMO_V2,
    QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5, QWEN3_5_MOE_TEXT, QWEN3_5_MOE,
)  # fmt: skip

_BY_TYPE = {name: family for family in FAMILIES for name in family.model_types}


def find_family(config: Mapping[str, Any]) -> Family:
    """Finds a config's family by model_type, by which transformers also chooses its class.

    Raises BadCheckpoint if there is none: also for known models with a head that does not generate text,
    drafters, and configs without a model_type.
    """
    top = Fields(config)
    model_type, architectures = top.text("model_type"), top.words("architectures") or ()
    if is_drafter(config):
        raise BadCheckpoint(
            f"config.json: architecture {_named(architectures, model_type)} is a DFlash drafter",
            why="a drafter only proposes tokens for another model",
            ways_out=(
                WayOut("plan its target, and add --speculative-config '{\"model\": ..}' with it"),
            ),
        )
    if model_type is not None:
        family = _BY_TYPE.get(model_type)
        if family is not None and (not architectures or architectures[0] in family.architectures):
            return family
    elif architectures:
        raise _without_type(architectures)
    raise _unknown(architectures, model_type)


def name_of(config: Mapping[str, Any]) -> str:
    """Returns the model's name in messages: its architecture, else its model_type."""
    top = Fields(config)
    return (top.words("architectures") or (top.text("model_type") or "of no name",))[0]


def is_listed(model_type: str) -> bool:
    """Returns whether Kvant reads the shape of such models from the config alone."""
    return model_type in _BY_TYPE


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Returns whether a config describes a DFlash drafter, in either style."""
    return "dflash_config" in config or "speculators_model_type" in config


def text_fields(config: Mapping[str, Any], family: Family) -> Fields:
    """Returns the section of the config with the decoder's fields."""
    if not family.in_text_config:
        return Fields(config, defaults=family.defaults)
    text = Fields(config).inside("text_config", family.defaults)
    if text is None:
        raise Fields(config).bad("text_config", f"{family.title} keeps its decoder's fields there")
    return text


def decoder_weights(
    config: Mapping[str, Any], family: Family, layers: Sequence[LayerGeometry]
) -> Iterator[Weight]:
    """Yields the weights of the decoder's layers. What the config leaves out is as the class has it.

    Raises MissingField if the class does not say it, BadCheckpoint for invalid fields.
    """
    yield from family.weights(
        text_fields(config, family).completed(class_defaults(config, family)), tuple(layers)
    )


def class_defaults(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Returns what transformers' class of the decoder takes for the fields that the config leaves out."""
    fields = text_fields(config, family)
    said = Fields(config).text("model_type") or family.model_types[0]
    if family.in_text_config:
        said = fields.text("model_type") or f"{said}_text"
    return left_out(fields.names(), said)


def _without_type(architectures: tuple[str, ...]) -> BadCheckpoint:
    known = (
        name for f in FAMILIES if architectures[0] in f.architectures for name in f.model_types
    )
    name = next(known, None)
    way = COMPARE_CONFIG
    if name is not None:
        way = WayOut(f'add "model_type": "{name}" to config.json')
    return BadCheckpoint(
        "config.json: model_type is missing",
        why=f"transformers chooses its class by it; architectures is {shown(list(architectures))}",
        ways_out=(way,),
    )


def _unknown(architectures: tuple[str, ...], model_type: str | None) -> BadCheckpoint:
    known = ", ".join(f"{family.title} ({family.architectures[0]})" for family in FAMILIES)
    if not architectures and model_type is None:
        what = "config.json names neither architectures nor model_type"
    else:
        what = f"unknown model_type {shown(model_type)}"
        if architectures:
            what += f" (architecture {shown(architectures[0])})"
        if _BY_TYPE.get(model_type or "") is not None:
            what = f"unknown architecture {_named(architectures, model_type)}"
    return BadCheckpoint(
        what,
        why=f"Kvant knows the shape of: {known}",
        ways_out=(WayOut("choose a model of a family that Kvant knows"),),
    )


def _named(architectures: tuple[str, ...], model_type: str | None) -> str:
    name = shown(architectures[0]) if architectures else "of no name"
    return f"{name} (model_type {shown(model_type)})"
