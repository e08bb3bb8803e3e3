"""A plan as a picture: bytes per token of every layer, K below V, coloured by format."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import typer

from kvant.cli.output import writable
from kvant.errors import BadValue, NotServable, WayOut
from kvant.kv.dtype import KVDtype
from kvant.plan.plan import Plan

_SUFFIXES = (".svg", ".png")


def picture(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Check the path, for typer. Raises BadValue or NotServable if `plot_plan` cannot write it."""
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
    """Write an SVG or PNG. Needs the `plot` extra (matplotlib)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = plan.target.kv.layers
    figure, axes = pyplot.subplots(
        figsize=(max(6.0, len(layers) * 0.16), 3.2), layout="constrained"
    )
    palette = dict(zip(KVDtype, pyplot.get_cmap("tab20").colors, strict=False))  # type: ignore[attr-defined]
    named: set[KVDtype] = set()
    for layer in layers:
        g, floor = layer.geometry, 0
        for side, choice, size in (("K", layer.k, g.head_dim_k), ("V", layer.v, g.head_dim_v)):
            if choice is None:
                continue
            height = g.num_kv_heads * choice.dtype.format.row_bytes(size)
            label = None if choice.dtype in named else str(choice.dtype)
            named.add(choice.dtype)
            axes.bar(
                g.index,
                height,
                bottom=floor,
                color=palette[choice.dtype],
                alpha=1.0 if side == "K" else 0.7,
                label=label,
            )
            floor += height
    axes.set_xlabel("layer")
    axes.set_ylabel("bytes per token (K below, V above)")
    total = plan.target.kv.bytes_per_token
    axes.set_title(f"{plan.target.local.name}: {total:,} bytes per token", fontsize="medium")
    if named:
        axes.legend(fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)
