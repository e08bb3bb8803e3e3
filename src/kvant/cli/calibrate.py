"""`kvant calibrate`: measure static scales of the KV cache on text, and write them as a checkpoint."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvant.cli.out_file import OutFile, write_json
from kvant.cli.share_done import ShareDone
from kvant.plan.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from kvant.measure.calibration.calibrate import Calibration


class Format(Enum):
    TABLE = "table"
    JSON = "json"


def calibrate(
    model: Annotated[
        str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2.")
    ] = DEFAULT_MODEL,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text in UTF-8 or JSON lines. Default: Python's manual.",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="DIR", help="Write the calibrated checkpoint here."),
    ] = None,
    context: Annotated[int, typer.Option("--context", min=64, help="Tokens of a window.")] = 512,
    tokens: Annotated[
        int, typer.Option("--tokens", min=64, help="Tokens to measure scales on, at most.")
    ] = 8192,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="D", help="Dtype to compute in.")
    ] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard an interrupted calibration and start again.")
    ] = False,
    output: Annotated[
        Format, typer.Option("--format", help="Format of the output.")
    ] = Format.TABLE,
    out: OutFile = None,
) -> None:
    """Find static fp8 scales of keys and values, compare methods on held-out text, keep the best.

    Scales come per tensor and per KV head from absmax, the 99.99th percentile, least squared error and least
    KL divergence. Matrices for int4_feedback come from the queries' second moments. --save writes a
    checkpoint with k_scale, v_scale and a kv_cache_scheme, which Kvant and readers of compressed-tensors
    load. The same command continues an interrupted calibration.
    """
    from kvant.engine.process import wait_without_spinning

    wait_without_spinning()  # before torch is imported
    from kvant.engine.llm import LLM
    from kvant.kv.dtype import KVDtype
    from kvant.measure.calibration.calibrate import Calibrator, divide_text, report
    from kvant.measure.calibration.write import check_writable, write_checkpoint
    from kvant.measure.facts import command_line, measurement_facts
    from kvant.measure.quality.kept import Kept
    from kvant.measure.quality.texts import read_text
    from kvant.models.import_cache import cache_root

    llm = LLM(
        model,
        dtype=dtype,
        device=device,
        kv_cache_dtype="model",
        kv_cache_memory="32MiB",
        max_model_len=256,
        max_num_seqs=1,
    )
    target = llm.planned.target
    if save is not None:
        check_writable(save, target.config, target.checkpoint, target.local.path)
    lesson = divide_text(read_text(text, llm), llm, context, tokens)
    inputs = {
        "calibrate": 2,
        "files": model_files(llm.model_path),
        "plan": llm.plan.fingerprint,
        "windows": [lesson.seen.tolist(), lesson.held_out.tolist()],
    }
    kept = Kept(cache_root() / "calibrate", inputs)
    if restart:
        kept.forget()
        kept = Kept(cache_root() / "calibrate", inputs)
    elif len(kept):
        sys.stderr.write(f"continuing with {len(kept)} parts from an earlier run: {kept.path}\n")
    progress = ShareDone()
    found = Calibrator(llm, lesson, KVDtype.FP8_E4M3, kept).run(progress.tell)
    progress.end()
    if kept.note:
        sys.stderr.write(f"{kept.note}\n")
    body = {
        **report(found),
        "model": target.local.name,
        **measurement_facts(command_line("kvant"), ("torch", "transformers", "numpy")),
    }
    if save is not None:
        write_checkpoint(
            target.local.path, save, target.config, target.geometry, found.winner, found.matrices
        )
        body["saved"] = str(save)
    if out is not None:
        write_json(out, body)
    if output is Format.JSON:
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        _print(found, body)
    kept.forget()


def model_files(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a model's files, which change if the model does."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def _print(found: Calibration, body: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("scales", no_wrap=True)
    for title in ("mean KL", "99 %", "same top"):
        table.add_column(title, justify="right", no_wrap=True)
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
    if "saved" in body:
        console.print(
            f"{found.winner.name} is written to {body['saved']}; kvant serve and kvant generate use its "
            "scales without a flag; --kv-cache-dtype int4_feedback uses its matrices",
            markup=False,
            soft_wrap=True,
        )
    else:
        console.print("[dim]nothing is written; --save DIR writes a checkpoint[/]")
