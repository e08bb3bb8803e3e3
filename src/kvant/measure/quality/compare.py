"""Compares formats with the widest format at every position of the same windows of text.

All formats of a group read a window together, piece by piece, so no logits of a whole window are
kept. The last positions are read again one token at a time, to compare the decode path with the
baseline's decode path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvant.errors import BadValue, DoesNotFit, WayOut
from kvant.execution.recorder import Recorder
from kvant.kv.format import Side
from kvant.kv.spec import KVPlan
from kvant.measure.quality.kl_statistics import Baseline, Distances, join
from kvant.measure.teacher_forced import TextReader
from kvant.models.loaded import LoadedModel

POOL_BYTES = 1 << 30
LOGITS_BYTES = 64 << 20
MOST_CHUNK = 256
_GPU_POOL_BYTES, _GPU_LOGITS_BYTES = 4 << 30, 256 << 20
_COPIES = 8  # of logits: others, in wider dtypes, and activations
MOST_WINDOWS, _MOST_ON_GPU = 4, 16
"""Maximum numbers of windows that are read side by side on a CPU and on a GPU."""
_LEAST_RECORDED = 8  # decode steps, fewer than which take less time than recording one

Outside = Mapping[tuple[int, Side], Tensor]
OnProgress = Callable[[int], None]
"""Called with the number of tokens read."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One format over a batch of windows.

    prefill: one value for every position but the last of each window; positions: which these are, [values].
    decode: the last positions, read one token at a time. step_ms: milliseconds of these decode steps, each of
    one token of every window.
    """

    prefill: Distances
    positions: npt.NDArray[np.int64]
    decode: Distances
    step_ms: npt.NDArray[np.float64]


def compare_windows(
    model: LoadedModel,
    baseline: KVPlan,
    plans: Mapping[str, KVPlan],
    windows: Tensor,
    *,
    vocab_size: int,
    decode: int,
    on_progress: OnProgress,
    scales: Mapping[str, Outside] | None = None,
    recorder: Recorder | None = None,
) -> dict[str, Compared]:
    """Compares every plan with `baseline` over windows [count, context], int64.

    decode: number of last positions that are read again one token at a time. scales: tensors outside the
    pages, by the name of a plan; a missing name means the model's. recorder: records decode steps, which are
    launched one operation at a time without it. Raises BadValue for logits that are not
    finite. The result has one more entry, "": the baseline's decode path against its own prefill, which is
    the noise floor.
    """
    windows = windows.to(model.device)
    found: dict[str, Compared] = {}
    for group in _groups(baseline, plans, windows, _room(windows.device)):
        found |= _compare(
            model, baseline, group, windows, vocab_size, decode, on_progress, scales or {}, recorder
        )
    return found


def windows_at_once(
    baseline: KVPlan,
    plans: Iterable[KVPlan],
    context: int,
    *,
    vocab_size: int,
    device: torch.device,
    option: str = "--context",
) -> int:
    """Returns how many windows of `context` tokens are read side by side.

    On a GPU, as many as its free memory has room for with the baseline and the largest of `plans`. Raises
    DoesNotFit, with the longest context that fits, if that is none. option: that names `context`.
    """
    if device.type != "cuda":
        return MOST_WINDOWS
    plans, free = tuple(plans), _free(device)

    def taken(count: int, tokens: int) -> int:
        """Returns bytes of windows: the pools of two plans that are read together, and their logits."""
        largest = max(_pool_bytes(plan, count, tokens) for plan in plans)
        logits = min(_GPU_LOGITS_BYTES, 4 * vocab_size * MOST_CHUNK * count)
        return _pool_bytes(baseline, count, tokens) + largest + _COPIES * logits

    for count in range(_MOST_ON_GPU, 0, -1):
        if taken(count, context) <= free:
            return count
    step = 64
    each = max(1, taken(1, 2 * step) - taken(1, step))
    longest = step * ((free - taken(1, 0)) // each)
    raise DoesNotFit(
        f"a window of {context:,} tokens does not fit into the memory of {device}",
        why=f"it takes {taken(1, context) / 1e9:.1f} GB in two formats, and {free / 1e9:.1f} GB are free",
        ways_out=(
            *([WayOut("read shorter windows", (option, str(longest)))] if longest > 0 else ()),
            WayOut("read it on the CPU", ("--device", "cpu")),
        ),
    )


def kept_together(
    baseline: KVPlan, plans: Mapping[str, KVPlan], windows: Tensor, device: torch.device
) -> Iterator[dict[str, KVPlan]]:
    """Divides plans into groups to keep apart on disk, so that an interruption loses one of them at most.

    `compare_windows` reads the same groups, except where a GPU has less memory free now.
    """
    return _groups(
        baseline, plans, windows, POOL_BYTES if device.type != "cuda" else _GPU_POOL_BYTES
    )


def _groups(
    baseline: KVPlan, plans: Mapping[str, KVPlan], windows: Tensor, room: int
) -> Iterator[dict[str, KVPlan]]:
    """Groups as many plans as pools of `room` bytes hold, at least one."""
    group: dict[str, KVPlan] = {}
    used = first = _pool_bytes(baseline, *windows.shape)
    for name, plan in plans.items():
        size = _pool_bytes(plan, *windows.shape)
        if group and used + size > room:
            yield group
            group, used = {}, first
        group[name] = plan
        used += size
    yield group


def _room(device: torch.device) -> int:
    """Returns the bytes that all pools may take together."""
    if device.type != "cuda":
        return POOL_BYTES
    return max(POOL_BYTES, min(_GPU_POOL_BYTES, _free(device) // 4))


def _free(device: torch.device) -> int:
    """Returns bytes that new tensors can take, those included that torch keeps for them."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _pool_bytes(plan: KVPlan, count: int, context: int) -> int:
    """Returns the bytes of a reader of `count` windows: rows, wide rows, states and their copies."""
    wide = sum(s.wide_spec.bytes_per_token for s in plan.layers if s.wide_spec is not None)
    return count * ((plan.bytes_per_token + wide) * context + 2 * plan.bytes_per_sequence)


def _compare(
    model: LoadedModel,
    baseline: KVPlan,
    plans: Mapping[str, KVPlan],
    windows: Tensor,
    vocab_size: int,
    decode: int,
    on_progress: OnProgress,
    scales: Mapping[str, Outside],
    recorder: Recorder | None,
) -> dict[str, Compared]:
    count, context = windows.shape
    own = TextReader(model, baseline, count, context)
    readers = {
        name: TextReader(model, plan, count, context, scales=scales.get(name))
        for name, plan in plans.items()
    }
    logits_bytes = _GPU_LOGITS_BYTES if windows.is_cuda else LOGITS_BYTES
    chunk = max(1, min(MOST_CHUNK, logits_bytes // 4 // vocab_size // count))
    parts: dict[str, list[Distances]] = {name: [] for name in plans}
    positions = []
    first = context - 1 - decode  # the first decoded position
    tail: list[Tensor] = []
    cuts = (
        [*range(0, first, chunk), *range(first, context, chunk)]
        if decode
        else [*range(0, context, chunk)]
    )
    for start, end in pairwise([*cuts, context]):
        if start == first:
            for reader in (own, *readers.values()):
                reader.mark()
        ids = windows[:, start:end]
        num = min(ids.shape[1], context - 1 - start)
        following = windows[:, start + 1 : start + 1 + num].reshape(-1)
        logits = own.read(ids)[:, :num]
        judge = Baseline(logits.flatten(0, 1), following)
        tail.append(logits[:, max(0, first - start) :].clone())
        on_progress(ids.numel())
        for name, reader in readers.items():
            read = reader.read(ids)[:, :num].flatten(0, 1)
            parts[name].append(judge.distances(read))
            on_progress(ids.numel())
        positions.append(np.tile(np.arange(start, start + num), count))
    prefilled = torch.cat(tail, dim=1)
    decoded: dict[str, list[Distances]] = {name: [] for name in ("", *plans)}
    times: dict[str, list[float]] = {name: [] for name in ("", *plans)}
    for reader in (own, *readers.values()):
        reader.rewind()
        if recorder is not None and decode >= _LEAST_RECORDED:
            reader.record(recorder)
    for place in range(decode):
        at = first + place
        ids, following = windows[:, at : at + 1], windows[:, at + 1]
        logits = _timed(own, ids, times[""])
        judge = Baseline(logits, following)
        decoded[""].append(Baseline(prefilled[:, place], following).distances(logits))
        for name, reader in readers.items():
            decoded[name].append(judge.distances(_timed(reader, ids, times[name])))
        on_progress(ids.numel() * (1 + len(readers)))
    where = np.concatenate(positions)
    floor = join(decoded[""])
    found = {"": Compared(floor, where[:0], floor, np.array(times[""]))}
    for name in plans:
        _check_finite(name, parts[name] + decoded[name])
        found[name] = Compared(join(parts[name]), where, join(decoded[name]), np.array(times[name]))
    return found


def _check_finite(name: str, parts: Sequence[Distances]) -> None:
    bad = sum(int((~np.isfinite(part.kl)).sum()) for part in parts)
    if bad:
        raise BadValue(
            f"{name}: the logits of {bad} positions are NaN or infinite, or the baseline's are",
            why="a KL divergence from them says nothing",
            ways_out=(WayOut("compute in a wider dtype", ("--dtype", "float32")),),
        )


def _timed(reader: TextReader, ids: Tensor, times: list[float]) -> Tensor:
    """Reads one token of each window; returns logits [windows, vocab_size]."""
    begin = time.perf_counter()
    logits = reader.read(ids)[:, 0]
    if logits.device.type == "cuda":
        torch.cuda.synchronize()
    times.append(1000 * (time.perf_counter() - begin))
    return logits


def contender_tokens(
    baseline: KVPlan, plans: Mapping[str, KVPlan], windows: Tensor, decode: int
) -> int:
    """Returns the tokens that `compare_windows` reads of windows [n, context], the baseline once per group.

    On a GPU, groups depend on its free memory, which may change until then.
    """
    num_groups = sum(1 for _ in _groups(baseline, plans, windows, _room(windows.device)))
    return (len(plans) + num_groups) * (windows.numel() + decode * windows.shape[0])


def mean_by_position(found: Sequence[Compared], context: int, buckets: int = 32) -> list[float]:
    """Returns mean KL divergences in equal stretches of a window, from first to last position."""
    kl = np.concatenate([one.prefill.kl for one in found])
    where = np.concatenate([one.positions for one in found]) * buckets // context
    sums = np.bincount(where, weights=kl, minlength=buckets)
    counts = np.bincount(where, minlength=buckets)
    return [float(total / max(count, 1)) for total, count in zip(sums, counts, strict=True)]
