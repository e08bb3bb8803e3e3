"""Checks how a checkpoint's weights are quantised, and whether transformers can read them here. No torch.

transformers has a reader for each method, and most readers need another package. A checkpoint
whose weights cannot be read is refused while it is planned. Otherwise its codes would be used as
weights, or the start would fail after the download.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint, ConfigError, NotServable, WayOut
from kvant.kv.checkpoint.json_file import read_json_object

MODELOPT_FILE = "hf_quant_config.json"
COMPRESSED_TENSORS = ("compressed-tensors", "compressed_tensors")
MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_mixed")
PLAIN = WayOut("take the model's unquantised weights")
"""The way out for stored weights that cannot be read."""


@dataclass(frozen=True, slots=True)
class _Method:
    """A method's needs. packages: import names for its reader. on_cpu: whether it runs on a CPU."""

    packages: tuple[str, ...] = ()
    on_cpu: bool = True


METHODS: Mapping[str, _Method] = {
    "aqlm": _Method(("aqlm",)),
    "auto-round": _Method(("auto_round",)),
    "awq": _Method(("gptqmodel",)),
    "bitnet": _Method(),
    "bitsandbytes": _Method(("bitsandbytes",)),
    "compressed-tensors": _Method(("compressed_tensors",)),
    "eetq": _Method(("kernels",), on_cpu=False),
    "fbgemm_fp8": _Method(("fbgemm_gpu",), on_cpu=False),
    "fouroversix": _Method(("fouroversix",)),
    "fp8": _Method(),
    "fp_quant": _Method(("fp_quant",), on_cpu=False),
    "gptq": _Method(("optimum", "gptqmodel")),
    "higgs": _Method(("flute", "fast_hadamard_transform"), on_cpu=False),
    "hqq": _Method(("hqq",), on_cpu=False),
    "mxfp4": _Method(),
    "mxfp8": _Method(),
    "quanto": _Method(("optimum",)),
    "quark": _Method(("quark",)),
    "sinq": _Method(("sinq",)),
    "spqr": _Method(("spqr_quant",), on_cpu=False),
    "torchao": _Method(("torchao",)),
    "vptq": _Method(("vptq",), on_cpu=False),
}
"""The methods whose stored weights transformers reads, by `quant_method`."""


def declared_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns config.json's declaration of quantised weights, at its top or in its text model, or None."""
    for section in (config, config.get("text_config")):
        if not isinstance(section, Mapping):
            continue
        declared = section.get("quantization_config")
        if isinstance(declared, Mapping):
            return declared
        former = section.get("compression_config")  # compressed-tensors' former name
        if isinstance(former, Mapping):
            return with_method(former)
    return None


def with_method(former: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a `compression_config` as `quantization_config` would say it. Old ones hold it inside."""
    inner = former.get("quantization_config")
    declared = inner if isinstance(inner, Mapping) else former
    return {**declared, "quant_method": COMPRESSED_TENSORS[0]}


def with_declaration(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """Returns a config.json with a `quantization_config`, also where another place says it.

    Other places are compressed-tensors' former name, and ModelOpt's own file. Raises BadCheckpoint for a
    file that cannot be read.
    """
    if config.get("quantization_config") is not None:
        return config
    former = config.get("compression_config")
    if isinstance(former, Mapping):
        return {**config, "quantization_config": with_method(former)}
    path = directory / MODELOPT_FILE
    recipe = read_json_object(path).get("quantization") if path.is_file() else None
    if not isinstance(recipe, Mapping):
        return config
    return {**config, "quantization_config": {**recipe, "quant_method": MODELOPT[0]}}


def method_of(declared: Mapping[str, Any]) -> str:
    """Returns `quant_method`, or its value for bitsandbytes' older configs, which have flags; "" for none."""
    if declared.get("load_in_8bit") or declared.get("load_in_4bit"):
        return "bitsandbytes"
    return str(declared.get("quant_method") or "")


def is_modelopt(declared: Mapping[str, Any]) -> bool:
    return method_of(declared) in MODELOPT or "producer" in declared


def refuse_weights(
    config: Mapping[str, Any], directory: Path, device: DeviceFacts
) -> ConfigError | None:
    """Returns why the weights in `directory` cannot be read here and run on `device`; None if they can."""
    declared = declared_quantization(config)
    if declared is None:
        return _refuse_modelopt_file(directory)
    where = directory / "config.json"
    if is_modelopt(declared):
        return _refuse_modelopt(declared, where)
    name = method_of(declared)
    if name in COMPRESSED_TENSORS:
        name = COMPRESSED_TENSORS[0]
        if not declared.get("config_groups"):
            return None  # the weights are not quantised, and only transformers reads them
    method = METHODS.get(name)
    if method is None:
        return NotServable(
            f"{where}: weights are quantised by {name or 'no named method'}",
            why="transformers has no reader for such weights",
            ways_out=(PLAIN,),
        )
    if device.kind is DeviceKind.CPU and not method.on_cpu:
        return NotServable(
            f"{where}: weights are quantised by {name}, which runs on GPUs only",
            why="transformers has no products of such weights for a CPU",
            ways_out=(PLAIN,),
        )
    missing = [package for package in method.packages if not _is_installed(package)]
    if missing:
        return NotServable(
            f"{where}: weights are quantised by {name}, which needs a package that is not installed",
            why=f"transformers reads them with {' and '.join(missing)}",
            ways_out=(WayOut(f"install it: pip install {_distributions(missing)}"), PLAIN),
        )
    return None


def _distributions(packages: list[str]) -> str:
    """Returns the packages' names for pip."""
    return " ".join({"flute": "flute-kernel"}.get(p, p.replace("_", "-")) for p in packages)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _refuse_modelopt_file(directory: Path) -> ConfigError | None:
    """Returns the error for ModelOpt's own file, which may exist without an entry in config.json."""
    path = directory / MODELOPT_FILE
    if not path.is_file():
        return None
    try:
        declared = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        return BadCheckpoint(f"{path} cannot be read", why=str(fault))
    return _refuse_modelopt(declared, path) if isinstance(declared, dict) else None


def _refuse_modelopt(declared: Mapping[str, Any], path: Path) -> ConfigError | None:
    """Returns the error for weights quantised by ModelOpt; None if it quantised only the KV cache."""
    quantization = declared.get("quantization", declared)
    algorithm = quantization.get("quant_algo") if isinstance(quantization, Mapping) else None
    if not algorithm:
        return None
    return NotServable(
        f"{path}: weights are quantised by ModelOpt as {algorithm}",
        why="transformers has no reader for ModelOpt's weights",
        ways_out=(PLAIN,),
    )
