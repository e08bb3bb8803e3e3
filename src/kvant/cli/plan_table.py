"""Prints a plan as text: grouped layers, a bar of the memory, and the effect of every other format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvant.cli.expected_kl import conversions, expected_kl, risk
from kvant.cli.output import plain
from kvant.kv.geometry import spans
from kvant.kv.groups import LONGEST
from kvant.kv.memory import format_size, format_tokens
from kvant.kv.spec import Choice, KVPlan, LayerSpec, ScaleState, Source
from kvant.models.directory import has_tokenizer
from kvant.models.local import ModelSource
from kvant.models.shape import ShapeSource
from kvant.models.weight_audit import NUMBERS, WeightAudit
from kvant.plan.plan import KeptLayers, Plan, PlannedModel
from kvant.plan.resolution import what_if, what_if_weights

_BAR_WIDTH = 60
_DESCRIBED_FROM = 100  # columns; a narrower terminal has room for numbers only


def print_plan(
    plan: Plan, console: Console, *, command: Sequence[str] = (), tensors: bool = False
) -> None:
    """Prints the whole plan. command: the arguments after `kvant plan`, to print commands that run it.

    tensors: also print every stored tensor of target and drafter.
    """
    kv = plan.target.kv
    console.print(
        Text.assemble(
            ("plan ", "bold"),
            (plan.target.local.name, "bold cyan"),
            f"  computes in {kv.compute_dtype.value} ({kv.compute_because}), {_weights(plan)}"
            f"pages of {kv.page_size} tokens, fingerprint {kv.fingerprint[:12]}",
        ),
        soft_wrap=True,
    )
    _print_forward(plan, console, tensors=tensors)
    print_layers(plan.target, console)
    expected = expected_kl(kv, plan.target.geometry)
    if expected is not None:
        console.print(Text(expected), soft_wrap=True)
    for line in conversions(plan):
        console.print(Text(line), soft_wrap=True)
    if plan.draft is not None:
        console.print(Text(f"drafter {plan.draft.local.name}", style="bold"))
        print_layers(plan.draft, console)
        _print_tensors(plan.draft_audit, console, each=tensors)
    _print_division(plan, console)
    _print_memory(plan, console)
    _print_alternatives(plan, console)
    _print_weights(plan, console)
    danger = risk(kv, plan.target.geometry)
    for line in (*plan.warnings, *([danger] if danger else [])):
        console.print(Text(f"warning: {line}", style="yellow"), soft_wrap=True)
    if command and plan.can_run:
        line, local = " ".join(command), plan.target.local
        # A plan fetches no tokenizer for models of other sources.
        if local.source is not ModelSource.DIRECTORY or has_tokenizer(local.path):
            plain(console, f"chat with it:  kvant chat {line}")
        else:
            plain(console, "it has no tokenizer: serve it for prompts of token ids")
        plain(console, f"serve it:      kvant serve {line}")


def _print_forward(plan: Plan, console: Console, *, tensors: bool) -> None:
    """Prints which forward runs the model, its weights, and why each faster one does not."""
    forward = plan.forward
    if forward.name is None:
        return
    console.print(Text(f"forward: {forward.name}"), soft_wrap=True)
    if plan.target.narrow is not None:
        console.print(Text(f"weights: {plan.target.narrow}"), soft_wrap=True)
    _print_tensors(plan.audit, console, each=tensors)
    if forward.activations_because:
        console.print(Text(f"activations: {forward.activations_because}"), soft_wrap=True)
    if plan.target.shape_source is not ShapeSource.CONFIG:
        console.print(Text(f"geometry: {plan.target.shape_source.value}"), soft_wrap=True)
    for one in forward.refused:
        console.print(Text(f"  refused: {one.forward}: {one.reason}", style="dim"), soft_wrap=True)


def _print_tensors(audit: WeightAudit | None, console: Console, *, each: bool) -> None:
    """Prints what the stored tensors are for, if one of them is narrow or unused.

    each: also print every tensor with its dtype, shape and format.
    """
    if audit is None:
        if each:
            console.print(Text("tensors: there are no weight files here to look into"))
        return
    groups = audit.groups
    if each or any(set(group.roles) != {NUMBERS} for group in groups):
        for group in groups:
            console.print(Text(f"  {group.text}", style="dim"), soft_wrap=True)
    if audit.scales is not None:
        console.print(Text(f"  {audit.scales.text}", style="dim"), soft_wrap=True)
    for one in audit.tensors if each else ():
        shape = "-" if one.shape is None else " x ".join(map(str, one.shape)) or "1"
        line = f"{one.name}  {one.dtype or '-'} {shape}  {one.format}, {one.role}"
        console.print(Text(f"{line}: {one.state.value}, {one.because}"), soft_wrap=True)


def _weights(plan: Plan) -> str:
    asked, activations = plan.request.quantization, plan.forward.activations
    said = "" if asked is None else f"weights quantised to {asked.value}, "
    if plan.forward.matrices is not None:
        said += f"matrices kept in {plan.forward.matrices.value}, which is exact, "
    if activations is not None:
        said += f"activations rounded to {activations.value} in products, "
    return said


def print_layers(model: PlannedModel, console: Console) -> None:
    """Prints two lines per kind of layer: format and backend, then the source of the format and scales."""
    rows: list[tuple[str, ...]] = []
    for row, layers in _grouped(model.kv.layers):
        total = sum(layer.bytes_per_token for layer in layers)
        rows.append((spans(layer.geometry.index for layer in layers), *row, f"{total:,}"))
    titles = ("layers", "attention", "KV heads", "stored as", "backend", "B/token")
    widths = [max(len(line[i]) for line in (titles, *rows)) for i in range(len(titles))]
    _print_line(titles, widths, console, "bold")
    for row, (_, layers) in zip(rows, _grouped(model.kv.layers), strict=True):
        _print_line(row, widths, console)
        if layers[0].k is not None:
            reason = Text(_indent(widths) + _reason(layers[0]), style="dim")
            console.print(reason, soft_wrap=True)
        wide = layers[0].wide
        if wide is not None:
            line = f"wide: {wide}; {Source.EXPLICIT.value}: {wide.because}"
            console.print(Text(_indent(widths) + line, style="dim"), soft_wrap=True)
        for line in _of_states(layers):
            console.print(Text(_indent(widths) + line, style="dim"), soft_wrap=True)
    kv = model.kv
    console.print(Text(f"{kv.bytes_per_token:,} bytes per token in total{_beside_16bit(kv)}"))
    if kv.has_states:
        console.print(Text(f"{kv.bytes_per_sequence:,} bytes of states per running sequence"))


def _of_states(layers: Sequence[LayerSpec]) -> list[str]:
    """Returns lines about the states that equal layers keep for each sequence, and who chose the format."""
    return [
        f"{state.geometry.kind.value} state {' x '.join(map(str, state.geometry.shape))} in "
        f"{state.choice.dtype}, {len(layers) * state.bytes_per_sequence:,} B per sequence; "
        f"{state.choice.source.value}: {state.choice.because}"
        for state in layers[0].states
    ]


def _beside_16bit(kv: KVPlan) -> str:
    if kv.bytes_per_token in (0, kv.bytes_per_token_16bit):
        return ", as 16 bit" if kv.bytes_per_token else ""
    ratio = kv.bytes_per_token_16bit / kv.bytes_per_token
    size = f"{ratio:.2f}x smaller" if ratio > 1 else f"{1 / ratio:.2f}x larger"
    return f", {size} than 16 bit"


def _print_line(
    cells: Sequence[str], widths: Sequence[int], console: Console, style: str = ""
) -> None:
    *words, number = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    console.print(
        Text("  ".join((*words, number.strip().rjust(widths[-1]))), style=style), soft_wrap=True
    )


def _indent(widths: Sequence[int]) -> str:
    return " " * (widths[0] + 2)


def _grouped(layers: Sequence[LayerSpec]) -> list[tuple[tuple[str, ...], list[LayerSpec]]]:
    """Groups layers with equal cells and equal reasons. Returns the cells and the layers of each group."""
    groups: dict[tuple[str, ...], list[LayerSpec]] = {}
    for layer in layers:
        reason = "" if layer.k is None else _reason(layer)
        reason += "".join(f"{state.geometry.shape}{state.choice}" for state in layer.states)
        reason += str(layer.wide)
        groups.setdefault((*_cells(layer), reason), []).append(layer)
    return [(key[:-1], found) for key, found in groups.items()]


def _cells(layer: LayerSpec) -> tuple[str, str, str, str]:
    g = layer.geometry
    kind = g.attention.value if g.window is None else f"{g.attention.value} {g.window}"
    if not g.causal:
        kind += " non-causal"
    if layer.k is None:
        kind = "recurrent" if layer.states else kind
        return kind, "", "no KV" if g.shared_with is None else f"reads layer {g.shared_with}'s", ""
    alike = layer.v is None or g.head_dim_k == g.head_dim_v
    sizes = str(g.head_dim_k) if alike else f"{g.head_dim_k}/{g.head_dim_v}"
    stored = str(layer.k.dtype)
    if layer.v is not None and layer.v.dtype is not layer.k.dtype:
        stored += f" / {layer.v.dtype}"
    return kind, f"{g.num_kv_heads} x {sizes}", stored, layer.backend or ""


def _reason(layer: LayerSpec) -> str:
    """Returns the source of a layer's format, and the state of its scales if a side has any."""
    text = _both(layer, lambda choice: f"{choice.source.value}: {choice.because}")
    states = _both(layer, lambda choice: choice.scale.state.value)
    return text if states == ScaleState.NONE.value else f"{text}; scales {states}"


def _both(layer: LayerSpec, say: Callable[[Choice], str]) -> str:
    """Returns one text if K and V agree, else a text for each side."""
    assert layer.k is not None
    k = say(layer.k)
    if layer.v is None or say(layer.v) == k:
        return k
    return f"K {k}, V {say(layer.v)}"


def _print_division(plan: Plan, console: Console) -> None:
    """Prints that the following memory is one rank's, and what every rank holds whole."""
    division = plan.division
    if division is None:
        return
    whole = ""
    if division.whole_bytes is not None:
        whole = f", of {format_size(division.whole_bytes)} of weights"
    console.print(
        Text(
            f"each of {division.size} ranks{whole}: {plan.rank_kv.bytes_per_token:,} bytes per token",
            style="bold",
        ),
        soft_wrap=True,
    )
    for line in division.replicated:
        console.print(Text(f"  whole on every rank: {line}", style="dim"), soft_wrap=True)


def _print_memory(plan: Plan, console: Console) -> None:
    memory, weights = plan.memory, plan.target.weights
    if memory.kv_bytes is None:
        reason = weights.reason if weights.bytes is None else "give --memory to see what fits"
        console.print(Text(f"memory: {reason}"))
        return
    parts = [
        ("weights", memory.weights_bytes, "blue"),
        ("workspaces", memory.workspace_bytes, "yellow"),
        ("kept free", memory.reserve_bytes, "bright_black"),
        ("drafter", memory.draft_bytes, "magenta"),
        ("KV and states" if plan.target.kv.has_states else "KV", memory.kv_bytes, "green"),
    ]
    notes = {
        "weights": _weights_note(plan),
        "workspaces": _workspaces_note(plan),
    }
    shown = [(name, size, style) for name, size, style in parts if size]
    whole = memory.total_bytes if plan.kv_cache_bytes is None else None
    whole = max(whole or 0, sum(size for _, size, _ in shown)) or 1
    bar = Text()
    for _, size, style in shown:
        bar.append("█" * max(1, round(_BAR_WIDTH * size / whole)), style=style)
    console.print(bar)
    legend = [
        f"[{style}]{name}[/] {format_size(size)}{notes.get(name, '')}"
        for name, size, style in shown
    ]
    console.print("   ".join(legend), soft_wrap=True, highlight=False)
    capacity = memory.capacity_tokens or 0
    if plan.layout is None:
        line = f"room for {capacity:,} tokens"
    else:
        length = f"{capacity:,} tokens" if capacity < LONGEST else "any length"
        line = f"room for one sequence of {length}"
        for group in plan.groups:
            console.print(Text(f"  {_group_line(group)}", style="dim"), soft_wrap=True)
    if plan.target.kv.has_states:
        console.print(Text(f"  {_states_line(plan)}", style="dim"), soft_wrap=True)
    if plan.request.max_model_len or plan.request.expected_length or plan.layout is not None:
        line += f", {plan.num_sequences} sequences of {plan.expected_length}"
    console.print(Text(line, style="bold"))
    for tier in plan.tiers:
        text = f"  then {tier.name}: {format_size(tier.num_bytes)}, {tier.tokens:,} cached tokens"
        console.print(Text(text, style="dim"), soft_wrap=True)


def _states_line(plan: Plan) -> str:
    """Returns a line about the bytes of states, and how many are kept for later sequences."""
    limits, each = plan.limits, plan.target.kv.bytes_per_sequence
    text = f"states, {each:,} bytes per sequence: one for each that runs"
    if limits.state_slots:
        text += f"; up to {limits.state_slots} kept, every {limits.state_stride} tokens and where prompts end"
    return text


def _group_line(group: KeptLayers) -> str:
    drafts = f" and {len(group.draft_layers)} of the drafter" if group.draft_layers else ""
    count = f"{len(group.layers)} layer{'s' if len(group.layers) > 1 else ''}"
    size = f"{count}{drafts}, {group.bytes_per_token:,} bytes per token"
    if group.window is None or group.most_bytes is None:
        return f"{size}: every token is kept"
    if group.is_wide:
        first = f"the first {group.sink:,} and " if group.sink else ""
        return (
            f"wide rows of {size}: {first}the last {group.window:,} tokens are stored a second time, "
            f"at most {format_size(group.most_bytes)} per sequence"
        )
    return (
        f"{size}: the last {group.window:,} tokens are kept, "
        f"at most {format_size(group.most_bytes)} per sequence"
    )


def _workspaces_note(plan: Plan) -> str:
    if plan.workspaces is None:
        return ""
    parts = asdict(plan.workspaces).items()
    return f" ({', '.join(f'{name} {format_size(size)}' for name, size in parts)})"


def _weights_note(plan: Plan) -> str:
    source = plan.target.weights.source
    return "" if source is None else f" ({source.value})"


def _print_alternatives(plan: Plan, console: Console) -> None:
    others = what_if(plan)
    if not others:
        console.print("[dim]rules decide every layer: --kv-cache-dtype changes nothing here[/]")
        return
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    rules = plan.request.requests.target
    kept = "\n(rules and skips kept)" if rules.rules or rules.skips else ""
    given = plan.memory.num_pages and plan.memory.num_pages * plan.page_bytes
    capacity = f"tokens in {format_size(given)}" if given else "capacity"
    described = console.width >= _DESCRIBED_FROM
    reasons: dict[str, list[str]] = {}
    table.add_column(f"if --kv-cache-dtype were{kept}", no_wrap=described)
    for title in ("B/token", "tokens a GiB", capacity, "vs 16 bit"):
        table.add_column(title, justify="right", no_wrap=described)
    if described:
        table.add_column(style="dim")
    for other in others:
        what = [Text(other.format.format.summary, no_wrap=True, overflow="ellipsis")][:described]
        if other.bytes_per_token is None or other.refused is not None:
            table.add_row(str(other.format), "-", "-", "-", "refused", *what)
            if other.refused is not None:
                reasons.setdefault(other.refused, []).append(str(other.format))
            continue
        table.add_row(
            str(other.format),
            f"{other.bytes_per_token:,}",
            f"{2**30 // other.bytes_per_token:,}" if other.bytes_per_token else "-",
            "-" if other.capacity_tokens is None else format_tokens(other.capacity_tokens),
            "-" if other.ratio_to_16bit is None else f"{other.ratio_to_16bit:.2f}x",
            *what,
        )
    console.print(table)
    for reason, names in reasons.items():
        console.print(Text(f"refused: {', '.join(names)}: {reason}", style="dim"), soft_wrap=True)


def _print_weights(plan: Plan, console: Console) -> None:
    """Prints how many tokens fit, by the format of the weights and of the KV cache."""
    columns, rows = what_if_weights(plan)
    if not rows:
        return
    title = "tokens that fit, by --quantization and --kv-cache-dtype"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("weights", justify="right", no_wrap=True)
    for dtype in columns:
        table.add_column(str(dtype), justify="right", no_wrap=True)
    for row in rows:
        chosen = "none" if row.asked is None else row.asked.value
        counts = ["-" if not tokens else format_tokens(tokens) for tokens in row.tokens]
        table.add_row(chosen, format_size(row.weights_bytes), *counts)
    console.print(table)
