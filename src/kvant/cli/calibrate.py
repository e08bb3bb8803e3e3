"""`kvant calibrate`: measures static scales of the KV cache on text, and writes them as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvant.cli.measuring import (
    DeviceOption,
    DtypeOption,
    ModelArgument,
    Restart,
    TextFile,
    kept_parts,
    measured_llm,
    progress,
)
from kvant.cli.output import Format, FormatOption, OutFile, figure_table, write_result
from kvant.plan.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from kvant.measure.calibration.calibrate import Calibration


def calibrate(
    model: ModelArgument = DEFAULT_MODEL,
    text: TextFile = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="DIR", help="Write the calibrated checkpoint here."),
    ] = None,
    context: Annotated[int, typer.Option("--context", min=64, help="Tokens of a window.")] = 512,
    tokens: Annotated[
        int, typer.Option("--tokens", min=64, help="Tokens to measure scales on, at most.")
    ] = 8192,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    restart: Restart = False,
    output: FormatOption = Format.TABLE,
    out: OutFile = None,
) -> None:
    """Find static fp8 scales of keys and values.

    Methods are compared on held-out text, and the best is kept. Scales come per tensor and per KV head
    from absmax, the 99.99th percentile, least squared error and least KL divergence. Matrices for
    int4_feedback come from the queries' second moments. --save writes a checkpoint with k_scale, v_scale
    and a kv_cache_scheme, which Kvant and readers of compressed-tensors load. The same command continues
    an interrupted calibration.
    """
    from kvant.engine.process import wait_without_spinning

    wait_without_spinning()  # before torch is imported
    from kvant.kv.checkpoint.json_file import read_json_object
    from kvant.kv.dtype import KVDtype
    from kvant.measure.calibration.calibrate import Calibrator, divide_text, report
    from kvant.measure.calibration.write import CONFIG_NAME, check_writable, write_checkpoint
    from kvant.measure.facts import command_line, measurement_facts
    from kvant.measure.quality.kept import measured_by
    from kvant.measure.quality.texts import read_text
    from kvant.models.locate import locate
    from kvant.models.stored import read_blocks

    llm = measured_llm(model, dtype, device)
    target = llm.planned.target
    source, config = target.local.path, target.config
    if save is not None:
        if read_blocks(config) is not None:  # other programs need numbers
            source = locate(model).path
            config = read_json_object(source / CONFIG_NAME)
        check_writable(save, config, target.checkpoint, source)
    lesson = divide_text(read_text(text, llm), llm, context, tokens)
    inputs = {
        "calibrate": 2,
        **measured_by(llm),
        "windows": [lesson.seen.tolist(), lesson.held_out.tolist()],
    }
    kept = kept_parts("calibrate", inputs, restart=restart)
    with progress(kept) as on_progress:
        found = Calibrator(llm, lesson, KVDtype.FP8_E4M3, kept).run(on_progress)
    body = {
        **report(found),
        "model": target.local.name,
        **measurement_facts(command_line("kvant"), ("torch", "transformers", "numpy")),
    }
    if save is not None:
        write_checkpoint(source, save, config, target.geometry, found.winner, found.matrices)
        body["saved"] = str(save)
    write_result(body, output, out, lambda: print_results(found, body))
    kept.forget()


def print_results(found: Calibration, body: dict[str, Any]) -> None:
    """Prints the compared scales. body: the report with the model's name, and where scales are saved."""
    from rich.console import Console

    from kvant.measure.calibration.calibrate import UNCALIBRATED

    console = Console()
    table = figure_table("scales", ("mean KL", "99 %", "same top"))
    for one in (*found.compared, *found.rounding):
        style = "bold" if one.name == found.winner.name else ""
        table.add_row(
            one.name,
            f"{one.kld_mean:.3e}±{one.kld_mean_error:.0e}",
            f"{one.kld_p99:.3e}",
            f"{one.same_top:.2%}",
            style=style,
        )
    console.print(table)
    console.print(
        f"[dim]fp8_e4m3 with these scales, and 4 bits, against {body['model']}'s own dtype on "
        f"{found.positions:,} positions that were held out; KL in nats; ±: standard error[/]"
    )
    if found.compared[0].name == UNCALIBRATED:
        console.print(
            "no scales lose less than 1.0 here: fp8_e4m3 needs no calibration on this text"
        )
    if "saved" in body:
        console.print(
            f"{found.winner.name} is written to {body['saved']}; kvant serve and kvant generate use its "
            "scales without a flag; --kv-cache-dtype int4_feedback uses its matrices",
            markup=False,
            soft_wrap=True,
        )
    else:
        console.print("[dim]nothing is written; --save DIR writes a checkpoint[/]")
