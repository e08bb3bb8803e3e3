"""Reads the values of scales that a plan uses, from local files. No weight is read, and no torch imported.

A start checks every value while it loads it. A plan reads what is small: scales of blocks, rows and
matrices, and orders of inputs, the smallest tensors first, up to `MOST_BYTES`. It says how many it left to
the start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from kvant.errors import BadCheckpoint, ConfigError, WayOut
from kvant.kv.checkpoint.safetensors_header import TensorEntry, read_headers
from kvant.kv.checkpoint.scales import read_scale_values
from kvant.models.stored import Stored, declared_weights
from kvant.models.weight_audit import ScalesRead, TensorState, TensorUse, WeightAudit
from kvant.plan.plan import Plan, PlannedModel
from kvant.weights.format import Scheme
from kvant.weights.parts import EXACT_INPUTS, Role, scale_fault

MOST_BYTES = 64 << 20
"""Bytes of scales that a plan reads: in float16, those of 4 billion weights in groups of 128."""

_SCALES = (Role.SCALES.value, Role.FACTORS.value, Role.INPUT_SCALES.value)

_ORDERS = Role.ORDER.value

_BITS: Mapping[str, tuple[str, int]] = {
    "F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80),
    "F8_E4M3": ("u1", 0x7F), "U8": ("u1", 0xFF),
}  # fmt: skip
"""How to read a dtype's bits as whole numbers, and the first that is no finite number above the sign's."""


def check_values(plan: Plan) -> Plan:
    """Returns the plan with faults of scales whose values no engine accepts: NaN, infinite, zero or negative.

    Reads local safetensors files, of KV scales all, of weights' scales at most `MOST_BYTES`.
    """
    target, draft = plan.target, plan.draft
    checked = replace(target, refusal=target.refusal or _kv_fault(target))
    if draft is not None:
        draft = replace(draft, refusal=draft.refusal or _kv_fault(draft))
    audit = None if plan.audit is None else _audit(plan.audit, target)
    return replace(plan, target=checked, draft=draft, audit=audit)


def _kv_fault(model: PlannedModel) -> ConfigError | None:
    try:
        read_scale_values(model.local.path, model.kv)
    except BadCheckpoint as fault:
        return fault
    return None


def _audit(audit: WeightAudit, target: PlannedModel) -> WeightAudit:
    wanted = {one.name: one for one in audit.tensors if _is_read(one)}
    if not wanted:
        return audit
    declared = declared_weights(target.config)
    entries = [
        (entry, header.path)
        for header in read_headers(target.local.path) or ()
        for name, entry in header.tensors.items()
        if name in wanted
    ]
    room, by_file = MOST_BYTES, defaultdict[Path, list[TensorEntry]](list)
    for entry, path in sorted(entries, key=lambda one: one[0].num_bytes):
        room -= entry.num_bytes
        if room < 0:
            break
        by_file[path].append(entry)
    found = {}
    for path, chosen in by_file.items():
        with path.open("rb") as file:
            for entry in sorted(chosen, key=lambda one: one.begin):
                one = wanted[entry.name]
                if one.role == _ORDERS:
                    assert isinstance(declared, Stored)
                    found[entry.name] = _order_fault(entry, file, declared.scheme(one.layer))
                else:
                    found[entry.name] = _fault(entry, file)
    uses = []
    for one in audit.tensors:
        fault = found.get(one.name)
        if fault is not None:
            one = replace(
                one, state=TensorState.WRONG, because=f"{fault.what}: {fault.why}", fault=fault
            )
        uses.append(one)
    return replace(
        audit, tensors=tuple(uses), scales=ScalesRead(len(found), len(wanted) - len(found))
    )


def _is_read(one: TensorUse) -> bool:
    # A tensor whose format is its dtype is left to transformers, which has rules of its own.
    is_used = one.state is TensorState.USED and one.format != one.dtype
    return is_used and (one.role == _ORDERS or (one.role in _SCALES and one.dtype in _BITS))


def _order_fault(entry: TensorEntry, file: BinaryIO, scheme: Scheme | None) -> BadCheckpoint | None:
    import numpy as np

    from kvant.weights.order import input_order

    assert scheme is not None
    file.seek(entry.begin)
    index = np.frombuffer(file.read(entry.num_bytes), dtype="<i4").astype(np.int64)
    try:
        input_order(entry.name, index, scheme)
    except BadCheckpoint as fault:
        return fault
    return None


def _fault(entry: TensorEntry, file: BinaryIO) -> BadCheckpoint | None:
    import numpy as np

    file.seek(entry.begin)
    data = file.read(entry.num_bytes)
    kind, limit = _BITS[entry.dtype]
    bits = np.frombuffer(data, dtype=kind)
    if entry.dtype == "U8":
        return scale_fault(entry.name, is_finite=not (bits == limit).any())
    sign = limit.bit_length()
    magnitude = bits & ((1 << sign) - 1)
    is_negative = bool(((bits >> sign) & (magnitude != 0)).any())
    small = entry.dtype == "F8_E4M3"
    ways: tuple[WayOut, ...] = (EXACT_INPUTS,) if "input" in entry.name else ()
    return scale_fault(
        entry.name,
        is_finite=not (magnitude >= limit).any(),
        is_positive=not is_negative and (small or not (magnitude == 0).any()),
        small=small,
        ways_out=ways,
    )
