"""Time to store one token's keys and values, by format of the keys and head size.

    python -m benchmarks.encoders --out encoders.json

Rows are normal numbers in 8 KV heads, in bfloat16; values are in int4_per_token_head. On a CPU the figure is
processor time of one thread, the least of all rounds, so that other programs hardly count. On a GPU it is the
median time of a launch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from benchmarks.command import run_command
from kvant.attention.base import AttentionBackend, Step
from kvant.attention.cpu.backend import backend as cpu_backend
from kvant.cli.output import OutFile, write_json
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.pool import KVPool
from kvant.kv.spec import Choice, KVPlan, LayerSpec, Role, Scale, ScaleState, Source
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.gpu_time import time_us

FORMATS = (
    KVDtype.BFLOAT16, KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_FEEDBACK,
    KVDtype.INT4_SHORT, KVDtype.INT4_SHORT_FEEDBACK,
)  # fmt: skip
HEAD_SIZES = (64, 128)
KV_HEADS, PAGE = 8, 16


def encoders(
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of one call.")] = 256,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Calls, of which one counts.")
    ] = 40,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    out: OutFile = None,
) -> None:
    """Time the writers of keys in several formats."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for dtype in FORMATS:
        found[str(dtype)] = {
            str(head): _microseconds(dtype, head, tokens, rounds, torch.device(device))
            for head in HEAD_SIZES
        }
        print(str(dtype), found[str(dtype)])
    if out is not None:
        facts = measurement_facts(command_line("python -m benchmarks.encoders"), ["torch"])
        write_json(out, {"schema": 1, "tokens": tokens, "us_per_token": found, **facts})


def _microseconds(
    dtype: KVDtype, head: int, tokens: int, rounds: int, device: torch.device
) -> float:
    """Returns microseconds per token."""
    generator = torch.Generator().manual_seed(head)
    rows = torch.randn(2, tokens, KV_HEADS, head, generator=generator).to(torch.bfloat16)
    k, v = rows.to(device)
    scales = {}
    if dtype.format.takes_rounding:
        matrix = 0.1 * torch.randn(KV_HEADS, head, head, generator=generator)
        scales[0, Side.K] = matrix.triu(1).to(device)
    pool = KVPool(_plan(dtype, head), 1 + -(-tokens // PAGE), device=device, scales=scales)
    slots = torch.arange(PAGE, PAGE + tokens, device=device)
    none = torch.zeros(1, 1, dtype=torch.int32, device=device)
    step = Step(none[0], none[0], none, slots, slots, tokens, tokens)
    writer = _backend(device)

    def write() -> None:
        writer.write(pool[0], k, v, step)

    write()  # compiles
    if device.type == "cuda":
        return round(statistics.median(time_us(write, repeats=rounds)) / tokens, 4)
    return round(1e6 * min(_seconds_of_thread(write) for _ in range(rounds)) / tokens, 4)


def _plan(k: KVDtype, head: int) -> KVPlan:
    stored_k, stored_v = (
        Choice(dtype, Source.EXPLICIT, "bench", (), Scale(ScaleState.NONE))
        for dtype in (k, KVDtype.INT4_PER_TOKEN_HEAD)
    )
    geometry = LayerGeometry(0, "bench", Attention.FULL, 4 * KV_HEADS, KV_HEADS, head, head)
    spec = LayerSpec(geometry, stored_k, stored_v, None)
    return KVPlan(Role.TARGET, "bench", ComputeDtype.BFLOAT16, "bench", PAGE, (spec,))


def _backend(device: torch.device) -> AttentionBackend:
    if device.type == "cpu":
        return cpu_backend()
    from kvant.attention.triton.backend import backend

    return backend()


def _seconds_of_thread(call: Callable[[], None]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


if __name__ == "__main__":
    run_command(encoders)
