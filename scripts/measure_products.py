"""Matrix products as torch chooses them and as Kvant does: docs/benchmarks/throughput.md.

    python scripts/measure_products.py [--repeats 7] [--out FILE]

Those of a layer of Qwen3-8B's shape, weights and inputs from a normal distribution, in bfloat16. Both ways
run in turn. Prints microseconds of both, their ratio, and whether they give the same bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.measure.facts import measurement_facts
from kvant.measure.gpu_time import elapsed_us
from kvant.models.fused.cublas_lt import library
from kvant.models.fused.products import Products

PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
ROWS = (1024, 1930, 2048, 2290, 3072, 3860, 4096, 4580, 5120, 5780, 6144, 6880, 7168, 7710, 8192)
ROWS += (8256, 8320, 8448, 8704, 9170)


def measured(
    products: Products, name: str, x: Tensor, weight: Tensor, repeats: int
) -> dict[str, object]:
    ways = {
        "torch": lambda: F.linear(x, weight),
        "chosen": lambda: products(x, weight, None),
    }
    same = torch.equal(ways["torch"](), ways["chosen"]())
    inner = 1 + int(1e3 / elapsed_us(ways["torch"]))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            run()
            took = elapsed_us(lambda run=run: [run() for _ in range(inner)])  # type: ignore[misc]
            times[way].append(took / inner)
    row = {"product": name, "rows": len(x), "same_bits": same}
    return {**row, "torch_us": times["torch"], "chosen_us": times["chosen"]}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    weights = {name: torch.randn(size, **like) * 0.02 for name, size in PRODUCTS.items()}
    products = Products(library(), F.linear)
    torch.cuda.synchronize()
    began = time.perf_counter()
    products.measure(list(weights.values()), 8192)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    print(f"chosen in {seconds:.2f} s")
    found = []
    for rows in ROWS:
        for name, weight in weights.items():
            x = torch.randn(rows, weight.shape[1], **like)
            row = measured(products, name, x, weight, options.repeats)
            old, new = median(row["torch_us"]), median(row["chosen_us"])  # type: ignore[type-var]
            print(
                f"{name:8} {rows:6} {old:8.1f} {new:8.1f} {new / old:.3f} {row['same_bits']}",  # type: ignore[operator]
                flush=True,
            )
            found.append(row)
    if options.out is not None:
        command = " ".join(["python", *sys.argv])
        facts = measurement_facts(command, ["torch"])
        text = json.dumps({**facts, "seconds_of_choosing": seconds, "rows": found}, indent=1)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
