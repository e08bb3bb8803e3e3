"""Finds the shape of any model: reads it from the config of a family that Kvant lists, else probes it.

A probe makes transformers' model without its weights, which takes seconds, so its result is kept on disk.
A probed family is served only if its greedy tokens equalled transformers' when all families were
compared (`compared.json`, written by scripts/families.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvant
from kvant.errors import BadCheckpoint, NotServable, WayOut
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import Attention, LayerGeometry, ModelGeometry, StateGeometry, StateKind
from kvant.models.geometry.families import find_family, is_drafter, is_listed, name_of
from kvant.models.geometry.fields import Fields, shown
from kvant.models.geometry.mixtures import check_mixture
from kvant.models.geometry.read import read_geometry, refuse_absurd
from kvant.models.geometry.renaming import NameRules, Renaming
from kvant.models.import_cache import cache_root
from kvant.models.shape import ModelShape, ShapeSource

_COMPARED = Path(__file__).with_name("compared.json")


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape of the model of a config.json.

    Raises BadCheckpoint, naming field and value, for fields that are missing or invalid; NotServable
    for a model that needs techniques that Kvant lacks, or whose tokens differed from transformers'.
    """
    found = _read(config)
    for index, layer in enumerate(found.geometry.layers):
        if layer.num_q_heads and 1 in (layer.head_dim_k, layer.head_dim_v):
            raise BadCheckpoint(
                f"config.json: the {layer.num_q_heads} heads of layer {index} have one number each",
                why="a check of attention cannot tell errors from rounding in rows of one number",
                ways_out=(COMPARE_CONFIG,),
            )
    return found


def _read(config: Mapping[str, Any]) -> ModelShape:
    model_type = config.get("model_type") if isinstance(config, Mapping) else None
    if isinstance(config, Mapping):
        check_mixture(config)
        Fields(config).inside("quantization_config")  # raises for no object
    if not isinstance(model_type, str) or is_listed(model_type) or is_drafter(config):
        geometry = read_geometry(config)
        return ModelShape(geometry, ShapeSource.CONFIG, names=find_family(config).names)
    if model_type not in compared():
        raise _unknown(config)
    reason = compared()[model_type]
    if reason is not None:
        raise _refusal(config, reason)
    refuse_absurd(config)
    found = _kept(config)
    if found is None:
        from kvant.models.probe import probe

        probed = probe(config)
        found = ModelShape(
            probed.geometry,
            ShapeSource.PROBED,
            probed.num_weights,
            probed.parameters,
            probed.stored,
            probed.linear,
            probed.embeddings,
            probed.names,
        )
        _keep(config, found)
    return found


@cache
def compared() -> Mapping[str, str | None]:
    """Returns, by model_type, None for a family that equals transformers, else why it is not served."""
    families: dict[str, str | None] = json.loads(_COMPARED.read_text(encoding="utf-8"))["families"]
    return families


def _refusal(config: Mapping[str, Any], reason: str) -> NotServable:
    return NotServable(
        f"Kvant does not run {name_of(config)} (model_type {config['model_type']!r})",
        why=reason,
        ways_out=(WayOut("choose a model of another family: docs/models.md lists them"),),
    )


def _unknown(config: Mapping[str, Any]) -> BadCheckpoint:
    runs = (name for name, reason in compared().items() if reason is None)
    return BadCheckpoint(
        f"unknown model_type {shown(config['model_type'])} (architecture {name_of(config)})",
        why=f"Kvant has compared and runs: {', '.join(runs)}",
        ways_out=(WayOut("choose a model of a family that Kvant runs"),),
    )


@cache
def _maker() -> str:
    """Returns a digest of the code that makes probes' results: a changed file makes all of them again.

    Kvant's part is these two packages, whole: a list of a probe's files could lack one.
    """
    package = Path(kvant.__file__).parent
    digest = hashlib.sha256(version("transformers").encode())
    for source in sorted(
        path for room in ("kv", "models") for path in package.glob(f"{room}/**/*.py")
    ):
        digest.update(f"{source.relative_to(package)}\0".encode() + source.read_bytes())
    return digest.hexdigest()


def _file(config: Mapping[str, Any]) -> Path:
    said = json.dumps(config, sort_keys=True)
    return cache_root() / "probes" / f"{hashlib.sha256(said.encode()).hexdigest()}.json"


def _kept(config: Mapping[str, Any]) -> ModelShape | None:
    """Returns the result that this code stored for this config; None without one or if its file is broken."""
    try:
        body = json.loads(_file(config).read_text(encoding="utf-8"))
        if body["maker"] != _maker():
            return None
        said = body["geometry"]
        layers = tuple(
            LayerGeometry(
                **{
                    **layer,
                    "attention": Attention(layer["attention"]),
                    "states": tuple(
                        StateGeometry(StateKind(state["kind"]), tuple(state["shape"]))
                        for state in layer["states"]
                    ),
                }
            )
            for layer in said["layers"]
        )
        geometry = ModelGeometry(**{**said, "layers": layers, "dtype": ComputeDtype(said["dtype"])})
        parameters, stored = (
            tuple((str(name), tuple(shape)) for name, shape in body[key])
            for key in ("parameters", "stored")
        )
        linear, embeddings = (tuple(map(str, body[key])) for key in ("linear", "embeddings"))
        numbers, names = int(body["num_weights"]), None
        if body["names"] is not None:
            rules = (
                Renaming(
                    rule["pattern"], tuple(rule["targets"]), tuple(rule["begins"]), rule["joins"]
                )
                for rule in body["names"]["rules"]
            )
            names = NameRules(tuple(rules), body["names"]["base"])
        return ModelShape(
            geometry, ShapeSource.PROBED, numbers, parameters, stored, linear, embeddings, names
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(config: Mapping[str, Any], shape: ModelShape) -> None:
    """Stores a probe's result atomically. If it cannot be written, the next start probes again."""
    said = asdict(shape.geometry)
    said["dtype"] = shape.geometry.dtype.value
    for layer, geometry in zip(said["layers"], shape.geometry.layers, strict=True):
        layer["attention"] = geometry.attention.value
        layer["states"] = [
            {"kind": state.kind.value, "shape": state.shape} for state in geometry.states
        ]
    file = _file(config)
    partial = file.with_suffix(".partial")
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_text(
            json.dumps(
                {
                    "maker": _maker(),
                    "geometry": said,
                    "num_weights": shape.num_weights,
                    "parameters": shape.parameters,
                    "stored": shape.stored,
                    "linear": shape.linear,
                    "embeddings": shape.embeddings,
                    "names": None if shape.names is None else asdict(shape.names),
                }
            ),
            encoding="utf-8",
        )
        partial.replace(file)
