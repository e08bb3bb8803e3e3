"""An evaluation as one HTML page: tables and SVG plots, without scripts or external resources."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvant.look import NUM_SERIES, stylesheet

_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 20, 50
_STYLE = (
    stylesheet()
    + """
body { max-width: 66em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.25rem; letter-spacing: .01em; }
table { display: block; overflow-x: auto; white-space: nowrap; }
th, td { padding: .2em .45em; }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); }
figure { background: var(--sheet); border: 1px solid var(--line); border-radius: .6rem; }
figure { margin: 1.5em 0; padding: 1em; }
figcaption { color: var(--soft); font-size: .86rem; }
"""
)

Point = tuple[float, float]


def page(found: Mapping[str, Any]) -> str:
    """Returns the HTML page for a result of `report`."""
    formats = found["formats"]
    colours = dict(zip(formats, _cycle(len(formats)), strict=True))
    longest = str(found["contexts"][-1])
    title = f"KV cache formats of {found['model']} against {found['baseline']}"
    body = [f"<h1>{html.escape(title)}</h1>", _facts(found), _table(found)]
    body.append(
        _figure(
            _scatter(formats, found["pareto"], colours),
            f"Quality against bytes at {longest} tokens of context. The line joins the formats that no other "
            "beats (Pareto front). Lower and further left is better.",
        )
    )
    curves = {}
    for name, one in formats.items():
        by_position = one["contexts"][longest]["by_position"]
        width = int(longest) / len(by_position)
        curves[name] = [((i + 0.5) * width, kl) for i, kl in enumerate(by_position)]
    body.append(
        _figure(
            _lines(curves, colours, "position in the window, tokens"),
            "Mean KL divergence by position, over all positions of the window.",
        )
    )
    pairs = {
        name: (one["k_alone"], one["v_alone"]) for name, one in formats.items() if "k_alone" in one
    }
    if pairs:
        body.append(
            _figure(
                _bars(list(pairs), [[k, v] for k, v in pairs.values()], ["K alone", "V alone"]),
                "Mean KL divergence if keys alone, or values alone, are stored in the format.",
            )
        )
    if "layers" in found:
        layers = found["layers"]
        names = [str(i) for i in layers["index"]]
        body.append(
            _figure(
                _bars(names, [[kl] for kl in layers["kld_mean"]], [layers["format"]]),
                f"Mean KL divergence if one layer alone stores {html.escape(layers['format'])}.",
            )
        )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _cycle(count: int) -> list[str]:
    return [f"var(--c{i % NUM_SERIES})" for i in range(count)]


def _facts(found: Mapping[str, Any]) -> str:
    text, floor = found["text"], found["noise_floor"]
    lines = [
        f"Text: {text['name']}, {text['tokens']} tokens, SHA-256 {text['sha256'][:16]}.",
        f"Windows of {', '.join(map(str, found['contexts']))} tokens; the second half of each counts, as in "
        "llama.cpp's --kl-divergence.",
        f"Noise floor: the baseline's decode path is {floor['kld_mean']:.1e} nats from its own prefill.",
    ]
    if "command" in found:
        lines.append(f"{found['date']}, {found['device']}: {found['command']}")
    lines += [f"Not measured: {name}: {why}" for name, why in found["refused"].items()]
    return "<p>" + "<br>".join(html.escape(line) for line in lines) + "</p>"


def _table(found: Mapping[str, Any]) -> str:
    heads = ("format", "B/token", "bits", "mean KL", "±", "median", "99 %", "99.9 %", "max", "same top",
             "PPL ratio", "±", "decode KL")  # fmt: skip
    rows = []
    for name, one in found["formats"].items():
        cells = (
            name, f"{one['bytes_per_token']:,}", f"{one['bits_per_value']:.2f}",
            *(f"{one[key]:.5f}" for key in ("kld_mean", "kld_mean_error", "kld_median", "kld_p99",
                                            "kld_p999", "kld_max")),
            f"{one['same_top']:.2%}", f"{one['ppl_ratio']:.4f}", f"{one['ppl_ratio_error']:.4f}",
            f"{one['decode']['kld_mean']:.5f}",
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    return f"<table><tr>{head}</tr>\n" + "\n".join(rows) + "</table>"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


class _Axes:
    """A frame with a linear or logarithmic x axis and a logarithmic y axis."""

    def __init__(self, xs: Iterable[float], ys: Iterable[float], *, log_x: bool = False) -> None:
        xs, ys = list(xs), [y for y in ys if y > 0] or [1.0]
        self._log_x = log_x
        self._x0, self._x1 = (min(xs) / 1.1, max(xs) * 1.1) if log_x else (0.0, max(xs))
        self._low = math.floor(math.log10(min(ys)))
        self._high = max(math.ceil(math.log10(max(ys))), self._low + 1)

    def x(self, value: float) -> float:
        low, high = self._x0, self._x1
        if self._log_x:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Returns the vertical place of a value; 0 lies on the lower edge."""
        power = math.log10(value) if value > 0 else self._low
        share = (max(power, self._low) - self._low) / (self._high - self._low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def frame(self, label: str, ticks: Sequence[float]) -> list[str]:
        found = [
            f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}" fill="none" stroke="var(--soft)"/>'
        ]
        for power in range(self._low, self._high + 1):
            y = self.y(10.0**power)
            found.append(
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
                f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>'
            )
        for tick in ticks:
            found.append(
                f'<text x="{self.x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
                f"{tick:,.0f}</text>"
            )
        found.append(
            f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">'
            f'{html.escape(label)}</text><text x="14" y="{_HEIGHT / 2}" text-anchor="middle" '
            f'transform="rotate(-90 14 {_HEIGHT / 2})">mean KL, nats</text>'
        )
        return found


def _svg(parts: Iterable[str], height: float = _HEIGHT) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">' + "".join(parts) + "</svg>"


def _scatter(
    formats: Mapping[str, Mapping[str, Any]], front: Sequence[str], colours: Mapping[str, str]
) -> str:
    points = {name: (one["bytes_per_token"], one["kld_mean"]) for name, one in formats.items()}
    axes = _Axes((x for x, _ in points.values()), (y for _, y in points.values()), log_x=True)
    parts = axes.frame("bytes of K and V per token", sorted({x for x, _ in points.values()})[::3])
    joined = " ".join(f"{axes.x(points[n][0]):.1f},{axes.y(points[n][1]):.1f}" for n in front)
    parts.append(f'<polyline points="{joined}" fill="none" stroke="var(--none)" stroke-width="2"/>')
    labels: list[tuple[float, float, float]] = []  # left, right and height of each label
    for name, (size, kl) in sorted(points.items(), key=lambda one: axes.y(one[1][1])):
        x, y = axes.x(size), axes.y(kl)
        end = x > _WIDTH * 0.7
        width, at = 7.0 * len(name), y + 4
        left = x - 9 - width if end else x + 9
        while any(left < b and a < left + width and abs(at - h) < 13 for a, b, h in labels):
            at += 1
        labels.append((left, left + width, at))
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colours[name]}"><title>{html.escape(name)}: '
            f"{size:,} bytes, {kl:.5f} nats</title></circle>"
            f'<text x="{x + (-9 if end else 9):.1f}" y="{at:.1f}" '
            f'text-anchor="{"end" if end else "start"}">{html.escape(name)}</text>'
        )
    return _svg(parts)


def _lines(curves: Mapping[str, Sequence[Point]], colours: Mapping[str, str], label: str) -> str:
    every = [point for points in curves.values() for point in points]
    axes = _Axes((x for x, _ in every), (y for _, y in every))
    most = max(x for x, _ in every)
    parts = axes.frame(label, [most * i / 4 for i in range(5)])
    height = _HEIGHT
    for index, (name, points) in enumerate(curves.items()):
        joined = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in points)
        row, column = divmod(index, 3)
        x, y = _LEFT + column * 215, _HEIGHT + 14 + 16 * row
        parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{colours[name]}" stroke-width="1.5">'
            f"<title>{html.escape(name)}</title></polyline>"
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colours[name]}"/>'
            f'<text x="{x + 14}" y="{y}">{html.escape(name)}</text>'
        )
        height = y + 8
    return _svg(parts, height)


def _bars(names: Sequence[str], values: Sequence[Sequence[float]], series: Sequence[str]) -> str:
    """Draws horizontal bars on a logarithmic axis, `series` of them for each name."""
    positive = [v for row in values for v in row if v > 0] or [1.0]
    low = math.floor(math.log10(min(positive)))
    high = max(math.ceil(math.log10(max(positive))), low + 1)
    left, each = 250, 14
    scale = (_WIDTH - left - 90) / (high - low)
    parts = []
    y = 24.0
    for index, name in enumerate(series):
        x = left + index * 160
        parts.append(
            f'<rect x="{x}" y="4" width="10" height="10" fill="var(--c{index % NUM_SERIES})"/>'
            f'<text x="{x + 14}" y="13">{html.escape(name)}</text>'
        )
    for name, row in zip(names, values, strict=True):
        middle = y + each * len(row) / 2 + 4
        parts.append(
            f'<text x="{left - 8}" y="{middle:.1f}" text-anchor="end">{html.escape(name)}</text>'
        )
        for index, value in enumerate(row):
            width = max(1.0, (math.log10(value) - low) * scale) if value > 0 else 1.0
            parts.append(
                f'<rect x="{left}" y="{y:.1f}" width="{width:.1f}" height="{each - 3}" '
                f'fill="var(--c{index % NUM_SERIES})"/><text x="{left + width + 5:.1f}" y="{y + 10:.1f}">'
                f"{value:.1e}</text>"
            )
            y += each
        y += 5
    return _svg(parts, y + 4)
