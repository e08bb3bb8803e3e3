"""Candidates for `few_rows.cu` over listed experts in mxfp4 on one GPU: today's bits, and their times.

    python -m benchmarks.expert_decode [--tokens 32] [--out FILE]

Each candidate changes the text of the engine's kernel. Experts are those of gpt-oss-20b, random, with random
choices; two copies of the weights take turns, so that no cache holds them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import MappingProxyType

import torch

from kvant.kernels.cuda import build
from kvant.measure.gpu_time import time_us
from kvant.weights.codecs import NarrowWeight
from kvant.weights.cuda import few_rows
from kvant.weights.cuda.few_rows import Act, Beside, Kind, Pairs, Warps
from kvant.weights.format import MXFP4

EXPERTS, TOP_K, WIDTH = 32, 4, 2880
CUTS = Warps(2, 2, 2), Warps(2, 4, 2), Warps(4, 4, 2)
_WARPS = 20
"""Warps per multiprocessor that a bound on registers asks for."""
Patch = Callable[[str], str]


def _swap(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"few_rows.cu has changed: {old}"
    return text.replace(old, new)


def apart(text: str) -> str:
    """Gives scales above 2 a loop of their own, so that other blocks take no instruction for them."""
    text = _swap(
        text,
        "template <int HIGH>\n__device__ __forceinline__ void decode",
        "template <int N>\nstruct Constant { static constexpr int value = N; };\n\n"
        "template <int HIGH, int MORE = 1>\n__device__ __forceinline__ void decode",
    )
    text = _swap(text, "    if (fine.more) {\n", "    if (MORE && fine.more) {\n")
    start = text.index("#pragma unroll\n            for (int q = 0; q < 4; q++) {  // half q % 2")
    end = text.index("#if PARTS\n            float share = 1.0f;", start)
    body = text[start:end]
    for high in (0, 1):
        body = _swap(body, f"decode<{high}>(word,", f"decode<{high}, decltype(with)::value>(word,")
    head = """            u32 rare = 0;
#if FINE
#pragma unroll
            for (int i = 0; i < RT; i++) rare |= fine[i][0].more | fine[i][1].more;
#endif
            auto products = [&](auto with) {
"""
    tail = """            };
            if (FINE && __any_sync(0xffffffffu, rare)) products(Constant<1>());
            else products(Constant<0>());
"""
    return text[:start] + head + body + tail + text[end:]


def together(text: str) -> str:
    """Moves sign and magnitude to their places by one masked product, in place of two shifts and an or."""
    start = text.index("    const u32 c = HIGH ? a << 8 : a << 12")
    end = text.index("    if (", start)
    lines = """    const u32 c = (a & (HIGH ? 0x00f000f0u : 0x000f000fu)) * (HIGH ? 0x104u : 0x1040u);
    const u32 d = (b & (HIGH ? 0x00f000f0u : 0x000f000fu)) * (HIGH ? 0x104u : 0x1040u);
    first = fma2(c & 0x81c081c0u, fine.scale, 0x80008000u);
    second = fma2(d & 0x81c081c0u, fine.scale, 0x80008000u);
"""
    return text[:start] + lines + text[end:]


def ahead(text: str) -> str:
    """Copies rows of x to shared memory with the codes, so that no block waits for the L2 cache."""
    text = _swap(
        text,
        "#define SLOT (UPPER_AT",
        "#define X_AT (UPPER_AT + (SIX ? 512 * RT : 0) + (ZEROS ? 16 * RT : 0))\n"
        "#define SLOT (NT * 2048 + UPPER_AT",
    )
    start = text.index(
        "#if !ONE\n#pragma unroll\n        for (int n = 0; n < NT; n++) {\n            const int at"
    )
    end = text.index("#endif\n", start) + len("#endif\n")
    tokens = text[start:end]
    text = _swap(text, tokens, "")
    each = "#pragma unroll\n    for (int s = 0; s < STAGES; s++) {\n"
    codes = "if (warp + s * WARPS < units) fetch(s, warp + s * WARPS);\n"
    rows = codes.replace("fetch(", "fetch_x(")
    find = tokens.removeprefix("#if !ONE\n").removesuffix("#endif\n")
    copies = f"""    auto find = [&](int first) {{
{find}    }};
    auto fetch_x = [&](int slot, int b) {{
        u8* to = ring + slot * SLOT + X_AT;
#pragma unroll
        for (int n = 0; n < NT; n++) {{
#pragma unroll
            for (int q = 0; q < 4; q++) {{
                const int offset = b * 128 + q / 2 * half + q % 2 * 8;
                const bool in = token[n] && (!RAGGED || column + offset < K);
                copy16(to + ((n * 4 + q) * 32 + lane) * 16, in ? token[n] + offset : x, in ? 16 : 0);
            }}
        }}
    }};
{each}        {codes}    }}
    find(0);
{each}        {rows}        commit();
    }}
"""
    text = _swap(text, f"{each}        {codes}        commit();\n    }}\n", "")
    place = "    float unscale = 1.0f;  // of a staged row\n"
    text = _swap(text, place, place + copies)
    text = _swap(
        text,
        f"                {codes}                commit();\n            }}\n",
        f"                {codes}            }}\n            find(first);\n#pragma unroll\n"
        f"            for (int s = 0; s < STAGES; s++) {{\n"
        f"                {rows}                commit();\n            }}\n",
    )
    text = _swap(
        text,
        "if (token[n] && (!RAGGED || column + offset < K)) v = *(const uint4*)(token[n] + offset);",
        "v = *(const uint4*)(from + X_AT + ((n * 4 + q) * 32 + lane) * 16);",
    )
    later = "if (unit + STAGES * WARPS < units) fetch(slot, unit + STAGES * WARPS);\n"
    return _swap(text, later, later + later.replace("fetch(", "fetch_x("))


CANDIDATES: Mapping[str, tuple[Patch, ...]] = MappingProxyType(
    {
        "engine": (),
        "apart": (apart,),
        "apart, together": (apart, together),
        "ahead": (ahead,),
        "apart, together, ahead": (apart, together, ahead),
    }
)
"""Changes of the engine's kernel, by name; the first has none."""


def source(name: str) -> str:
    """Returns the kernel's text with the changes of a candidate."""
    folder = Path(few_rows.__file__).parent
    text = "".join((folder / part).read_text() for part in ("decode.cuh", "few_rows.cu"))
    for patch in CANDIDATES[name]:
        text = patch(text)
    return text


def shared_bytes(name: str, macros: Mapping[str, int | str]) -> int:
    """Returns the bytes of shared memory of a program of a candidate."""
    rows = 0
    if ahead in CANDIDATES[name]:
        rows = 2048 * int(macros["NT"]) * int(macros["WARPS"]) * int(macros["STAGES"])
    return few_rows.shared_bytes(macros) + rows


@dataclass(frozen=True, slots=True)
class Product:
    """One of the two products. weights: copies that take turns. x: [rows, WIDTH]. bias: [experts, rows]."""

    kind: Kind
    weights: tuple[NarrowWeight, ...]
    x: torch.Tensor
    bias: torch.Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    with TemporaryDirectory() as folder:
        for row in measure(asked.tokens, Path(folder)):
            print(row, flush=True)
            rows.append(row)
    if asked.out is not None:
        found = {"device": torch.cuda.get_device_name(), "tokens": asked.tokens, "rows": rows}
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


def measure(tokens: int, folder: Path) -> Iterator[dict[str, object]]:
    """Yields a row for every product, candidate, cut and bound on registers. folder: for kernels' texts."""
    package = "kvant.weights.cuda"
    beside = choices(tokens)
    tiles = few_rows.token_tiles(min(tokens, max(8, 2 * tokens * TOP_K // EXPERTS)))
    made = products(tokens)
    jobs = []
    for label, name, cut in product(made, CANDIDATES, CUTS):
        kind = made[label].kind
        macros = few_rows.defines(MXFP4, 0, tiles, torch.bfloat16, cut, kind, bias=True)
        for programs in (0, _WARPS // cut.warps):
            text = folder / f"{name} {programs}.cu"
            text.write_text(bounded(source(name), programs))
            build.begin(package, [str(text)], macros)
            jobs.append((label, name, cut, programs, str(text), macros))
    first: dict[tuple[str, int], torch.Tensor] = {}
    for label, name, cut, programs, path, macros in jobs:
        one, size = made[label], shared_bytes(name, macros)
        kernel = build.build(package, [path], "few_rows", macros, size, few_rows.ARGUMENTS)
        calls = [
            few_rows.arranged(one.x, weight, one.bias, cut, one.kind, beside, experts=EXPERTS)
            for weight in one.weights
        ]
        run = partial(_launch, kernel, calls, 32 * cut.warps)
        us = median(time_us(run, repeats=7)) / len(calls)
        expected = first.setdefault((label, cut.warps), calls[0].out)
        yield {
            "product": label, "candidate": name, "cut": [cut.tiles, cut.warps, cut.ahead],
            "programs": programs, "us": us, "same bits": torch.equal(expected, calls[0].out),
        }  # fmt: skip


def _launch(kernel: build.Kernel, calls: Sequence[few_rows.Call], threads: int) -> None:
    for call in calls:
        kernel.launch(call.programs, threads, call.values, ahead=True)


def bounded(text: str, programs: int) -> str:
    """Returns a kernel of which at least `programs` fit into a multiprocessor's registers; 0 for no bound."""
    old = "__launch_bounds__(THREADS)\nfew_rows"
    return _swap(text, old, old.replace(")", f", {programs})")) if programs else text


def choices(tokens: int) -> Beside:
    """Returns random choices of experts for some tokens, as the router and `list_pairs` write them."""
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, -1).indices.to(torch.int32)
    lists = ids.new_zeros(EXPERTS, tokens)
    counts = ids.new_zeros(EXPERTS)
    for expert in range(EXPERTS):
        pairs = (ids.flatten() == expert).nonzero().flatten()
        counts[expert] = len(pairs)
        lists[expert, : len(pairs)] = pairs
    shares = torch.rand(tokens, TOP_K, device="cuda")
    return Beside(
        ids=ids, shares=shares, lists=lists, counts=counts, limit=7.0, alpha=1.702, top_k=TOP_K
    )


def products(tokens: int) -> dict[str, Product]:
    """Returns gate and up, and down, with random weights on the GPU."""
    up = Kind(gated=True, alternating=True, act=Act.CLAMPED, pairs=Pairs.LISTED)
    down = Kind(pairs=Pairs.LISTED, share=True)
    found = {}
    for label, kind, rows, inputs in (
        ("gate_up", up, 2 * WIDTH, tokens),
        ("down", down, WIDTH, tokens * TOP_K),
    ):
        x = torch.randn(inputs, WIDTH, device="cuda").to(torch.bfloat16)
        bias = torch.randn(EXPERTS, rows, device="cuda").to(torch.bfloat16)
        found[label] = Product(kind, (_random(rows), _random(rows)), x, bias)
    return found


def _random(rows: int) -> NarrowWeight:
    whole = EXPERTS * rows
    codes = torch.randint(0, 256, (whole, WIDTH // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(118, 122, (WIDTH // 32, whole), dtype=torch.uint8, device="cuda")
    return NarrowWeight(MXFP4, whole, WIDTH, codes, scales)


if __name__ == "__main__":
    main()
