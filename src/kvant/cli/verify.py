"""`kvant verify`: compares every backend and format on this device with a float64 definition."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.cli.measuring import DeviceOption, refuse_ignored
from kvant.cli.output import Format, FormatOption, writable
from kvant.cli.progress import work
from kvant.errors import BadValue, WayOut

if TYPE_CHECKING:
    from kvant.attention.need import DeviceFacts
    from kvant.kv.dtype import ComputeDtype


def verify(
    ctx: typer.Context,
    device: DeviceOption = "auto",
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="B", help="Only this backend; may be repeated."),
    ] = None,
    kv_cache_dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-cache-dtype", metavar="F", help="Only this format or pair K/V; may be repeated."
        ),
    ] = None,
    head_size: Annotated[
        list[int] | None,
        typer.Option(
            "--head-size", min=1, metavar="INT", help="Only this head size; may be repeated."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Dtype of queries, keys and values.")
    ] = "auto",
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Run kernels in batch-invariant mode.")
    ] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="Verify products with narrow weights, not attention.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Number of processes; default one per core.")
    ] = None,
    format: FormatOption = Format.TABLE,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FILE",
            help="Add the result to this JSON file, and write its page (.md) beside it.",
            callback=writable,
        ),
    ] = None,
) -> None:
    """Compare backends and formats here with a float64 definition.

    Covers causal and full attention, with and without a window, 1, 16 and 512 queries, six head sizes,
    and latents (MLA) of three. Exits with 1 if a combination fails. Refused combinations are shown with
    the reason.
    With --weights: products of 1 to 512 rows with every weight format, in every way that an engine uses.
    """
    from kvant.attention.select import BACKENDS, parse_backend
    from kvant.attention.verify.cells import usual_compute
    from kvant.kv.dtype import KVDtype
    from kvant.kv.names import parse_compute_dtype, parse_format
    from kvant.measure.facts import command_line, measurement_facts
    from kvant.measure.support import dump, failures, recorded, render, summary
    from kvant.measure.verify import Choice, device_here
    from kvant.measure.verify import verify as run
    from kvant.plan.device import host_device

    facts = host_device(device)
    compute = parse_compute_dtype(dtype, asked_by="--dtype") or usual_compute(facts)
    if weights:
        refuse_ignored(
            ctx,
            ("backend", "kv_cache_dtype", "head_size", "batch_invariant"),
            why="--weights verifies products, not attention",
        )
        _verify_weights(facts, compute, format, record)
        return
    named = [parse_backend(name, asked_by="--backend") for name in backend or ()]
    chosen = tuple(info for info in named if info is not None) or BACKENDS
    formats = []
    for name in kv_cache_dtype or ():
        asked = parse_format(name, asked_by="--kv-cache-dtype")
        if not isinstance(asked.k, KVDtype) or not isinstance(asked.v, KVDtype):
            raise BadValue(
                f"--kv-cache-dtype {name} depends on a model; name a format or a pair K/V"
            )
        formats.append((asked.k, asked.v))
    wanted = Choice(tuple(formats), tuple(head_size or ()))
    if record is not None and (formats or head_size or batch_invariant):
        raise BadValue(
            "--record takes the whole matrix of a backend",
            why="its page lists what was verified, so a part would look like all",
            ways_out=(
                WayOut("leave out --kv-cache-dtype, --head-size and --batch-invariant"),
                WayOut("print the result instead", ("--format", "json")),
            ),
        )
    here = device_here(facts, compute)
    with work("verifying", "rows") as on_progress:
        found = run(
            chosen,
            here,
            wanted,
            batch_invariant=batch_invariant,
            jobs=jobs or os.cpu_count() or 1,
            on_progress=on_progress,
        )
    made = measurement_facts(command_line("kvant"), ["torch"])
    trees = {name: {"facts": made, "formats": tree} for name, tree in found.items()}
    document = recorded(Path(os.devnull) / "none", here, trees)
    sys.stdout.write(dump(document) if format is Format.JSON else summary(document))
    if record is not None:
        kept = recorded(record, here, trees)
        record.write_text(dump(kept), encoding="utf-8")
        record.with_suffix(".md").write_text(render(kept), encoding="utf-8")
    failed = [f"{name}: {line}" for name, tree in found.items() for line in failures(tree)]
    for line in failed:
        sys.stderr.write(f"FAILED {line}\n")
    if failed:
        raise typer.Exit(1)


def _verify_weights(
    facts: DeviceFacts, compute: ComputeDtype, format: Format, record: Path | None
) -> None:
    """Prints and records the errors of products with narrow weights. Exits with 1 if one is wrong."""
    import json

    import torch

    from kvant.attention.need import DeviceKind
    from kvant.measure.facts import command_line, measurement_facts
    from kvant.measure.support import dump, recorded_weights, render
    from kvant.measure.verify import device_here
    from kvant.models.cpu.verify import verify_cpu_products
    from kvant.models.fused.verify import verify_experts
    from kvant.models.load import TORCH_COMPUTE
    from kvant.weights.verify import ROWS, verify_products

    if facts.kind is DeviceKind.CPU:
        cells = list(verify_cpu_products())
    else:
        where = torch.device("cuda"), TORCH_COMPUTE[compute]
        cells = [*verify_products(*where), *verify_experts(*where)]
    found = [
        {"format": cell.name, "way": cell.way, "rows": list(ROWS),
         "errors": [float(f"{error:.1e}") for error in cell.errors], "right": cell.is_right,
         **({"kernels": list(cell.kernels)} if cell.kernels else {})}
        for cell in cells
    ]  # fmt: skip
    if record is not None:
        made = measurement_facts(command_line("kvant"), ["torch"])
        kept = recorded_weights(record, device_here(facts, compute), made, found)
        record.write_text(dump(kept), encoding="utf-8")
        record.with_suffix(".md").write_text(render(kept), encoding="utf-8")
    if format is Format.JSON:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        sys.stdout.write(f"worst relative error of products of {', '.join(map(str, ROWS))} rows\n")
        for cell in cells:
            errors = "  ".join(f"{error:.1e}" for error in cell.errors)
            said = "" if cell.is_right else "  WRONG"
            sys.stdout.write(f"{cell.name:48} {cell.way:32} {errors}{said}\n")
    wrong = [cell for cell in cells if not cell.is_right]
    for cell in wrong:
        sys.stderr.write(f"FAILED {cell.name}, {cell.way}\n")
    if wrong:
        raise typer.Exit(1)
