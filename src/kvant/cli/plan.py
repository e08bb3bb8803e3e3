"""`kvant plan`: shows the format of every layer, its source, and what fits. Loads no weights."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.cli.configured import configured
from kvant.cli.output import Format, FormatOption
from kvant.cli.plan_plot import picture, plot_plan
from kvant.errors import UnknownName
from kvant.plan.config import PlanOptions, plan_request
from kvant.plan.device import host_device
from kvant.plan.settings import Settings


@configured(PlanOptions, needs_model=True)
def plan(
    settings: Settings,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="Memory of the device, such as 80GiB."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", help="cpu, cuda, sm_80, sm_90, sm_100 or gfx942; need not be present."
        ),
    ] = "cpu",
    output: FormatOption = Format.TABLE,
    tensors: Annotated[
        bool,
        typer.Option(
            "--tensors", help="List every stored tensor: its format, and whether it is used."
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw the plan as .svg or .png.", callback=picture
        ),
    ] = None,
) -> None:
    """Show every layer's KV format and its source; loads no weights."""
    from kvant.kv.memory import parse_size
    from kvant.plan.planning import make_plan
    from kvant.plan.read_facts import read_facts
    from kvant.plan.scale_values import check_values

    request = replace(
        plan_request(settings, device_from(device)),
        memory_bytes=None if memory is None else parse_size(memory, asked_by="--memory"),
    )
    here = device == "cpu" and memory is None
    made = check_values(make_plan(request, read_facts(request, memory=here)))
    if output is Format.JSON:
        from kvant.plan.plan_json import plan_json

        json.dump(plan_json(made, tensors=tensors), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        from rich.console import Console

        from kvant.cli.plan_table import print_plan

        print_plan(made, Console(), command=_serve_arguments(sys.argv), tensors=tensors)
    if plot is not None:
        plot_plan(made, plot)


_DEVICES = {
    "cuda": DeviceFacts(DeviceKind.CUDA, "sm_90"),
    "sm_80": DeviceFacts(DeviceKind.CUDA, "sm_80"),
    "sm_90": DeviceFacts(DeviceKind.CUDA, "sm_90"),
    "sm_100": DeviceFacts(DeviceKind.CUDA, "sm_100"),
    "gfx942": DeviceFacts(DeviceKind.ROCM, "gfx942"),
}


def device_from(text: str) -> DeviceFacts:
    """Returns the device to plan for, which need not be present. Raises UnknownName."""
    if text == "cpu":
        return host_device("cpu")
    if text not in _DEVICES:
        raise UnknownName("device", text, ("cpu", *_DEVICES), asked_by="--device")
    return _DEVICES[text]


_PLAN_ONLY = ("--memory", "--device", "--format", "--plot")


def _serve_arguments(argv: list[str]) -> list[str]:
    """Returns the arguments of `kvant plan` without its own flags, quoted for a shell."""
    kept: list[str] = []
    words = iter(argv[argv.index("plan") + 1 :] if "plan" in argv else [])
    for word in words:
        if word in _PLAN_ONLY:
            next(words, None)
        elif word != "--tensors" and word.split("=", 1)[0] not in _PLAN_ONLY:
            kept.append(shlex.quote(word))
    return kept
