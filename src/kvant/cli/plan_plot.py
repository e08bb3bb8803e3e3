"""Draws a plan: bytes per token of every layer, K below V, coloured by format."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import typer

from kvant.cli.output import writable
from kvant.errors import BadValue, NotServable, WayOut
from kvant.kv.dtype import KVDtype
from kvant.look import LIGHT, NUM_SERIES
from kvant.plan.plan import Plan

_SUFFIXES = (".svg", ".png")


def picture(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Returns `path`, or raises BadValue or NotServable if `plot_plan` cannot write it. For typer."""
    if writable(option, path) is None or path is None:
        return None
    if path.suffix.lower() not in _SUFFIXES:
        raise BadValue(f"--plot {path}: unknown kind of picture", why="use a name in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise NotServable(
            f"--plot {path}: matplotlib is not installed",
            why="plots need the optional package matplotlib",
            ways_out=(WayOut("install it: pip install 'kvant[plot]'"),),
        )
    return path


def plot_plan(plan: Plan, path: Path) -> None:
    """Writes an SVG or PNG. Needs the `plot` extra (matplotlib)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    layers = plan.target.kv.layers
    style: dict[Any, Any] = {
        "font.family": "sans-serif", "font.size": 9, "text.color": LIGHT["ink"],
        "axes.edgecolor": LIGHT["line"], "axes.labelcolor": LIGHT["soft"], "xtick.color": LIGHT["soft"],
        "ytick.color": LIGHT["soft"], "axes.spines.top": False, "axes.spines.right": False,
        "axes.axisbelow": True, "svg.fonttype": "none",
    }  # fmt: skip
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            figsize=(max(6.0, len(layers) * 0.16), 3.2), layout="constrained"
        )
        axes.grid(axis="y", color=LIGHT["line"], linewidth=0.8)
        colours: dict[KVDtype, str] = {}
        sizes: Counter[KVDtype] = Counter()
        for layer in layers:
            g, floor = layer.geometry, 0
            for choice, size in ((layer.k, g.head_dim_k), (layer.v, g.head_dim_v)):
                if choice is None:
                    continue
                height = g.num_kv_heads * choice.dtype.format.row_bytes(size)
                hue = colours.setdefault(choice.dtype, LIGHT[f"c{len(colours) % NUM_SERIES}"])
                axes.bar(
                    g.index, height, bottom=floor, width=0.82, color=hue, edgecolor=LIGHT["sheet"],
                    linewidth=0.6,
                )  # fmt: skip
                sizes[choice.dtype] += height
                floor += height
        axes.set_xlabel("layer")
        axes.set_ylabel("bytes per token (K below, V above)")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.margins(x=0.01)
        total = plan.target.kv.bytes_per_token
        title = f"{plan.target.local.name}: {total:,} bytes per token"
        axes.set_title(title, fontsize="medium", loc="left", fontweight="bold")
        shown = [Rectangle((0, 0), 1, 1, color=hue) for hue in colours.values()]
        names = [f"{dtype} {sizes[dtype]:,} B" for dtype in colours]
        if names:
            figure.legend(
                shown, names, loc="outside lower left", ncols=3, frameon=False, fontsize="small"
            )
        figure.savefig(path, dpi=160)
        pyplot.close(figure)
