"""Compares Kvant's logits of a checkpoint with transformers' logits; exit code 1 beyond a bound.

    python -m benchmarks.compare_logits MODEL [--tokens 512] [--format F ..] [--out FILE]

Reference: transformers, with every product in float32 on the weights as stored. The error of a
computation is the distance of its logits from the reference's, over their length, for all positions together.
Bound: with its cache in the model dtype, Kvant's error is at most 1.5 times that of transformers in that
dtype. Narrower formats are listed too.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from kvant import LLM
from kvant.kv.names import parse_format
from kvant.kv.request import Asked, KVRequest
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.own_engine import runner_of
from kvant.measure.teacher_forced import text_logits
from kvant.plan.resolution import resolve_again

BOUND = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--format", action="append", default=[], help="beside the model dtype")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    config = json.loads((asked.model / "config.json").read_text())
    numbers = random.Random(0)
    ids = [numbers.randrange(config["vocab_size"]) for _ in range(asked.tokens)]
    exact, theirs = by_transformers(asked.model, ids, asked.device)
    rows = [_row("transformers", "-", theirs, exact, bounded=False)]
    del theirs
    for name, found in by_kvant(asked.model, ids, asked.format, asked.device, asked.chunk):
        rows.append(_row("kvant", name, found, exact, bounded=len(rows) == 1))
    allowed = BOUND * rows[0]["error"]
    for row in rows:
        print(json.dumps(row))
    print(f"allowed in the model dtype: {allowed:.2e}")
    if asked.out is not None:
        command = command_line("python -m benchmarks.compare_logits")
        facts = measurement_facts(command, ["torch", "transformers"])
        told = {**facts, "tokens": asked.tokens, "chunk": asked.chunk, "bound": BOUND, "rows": rows}
        asked.out.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(rows[1]["error"] > allowed)


def by_transformers(path: Path, ids: list[int], device: str) -> tuple[Tensor, Tensor]:
    """Returns logits of float32 products over the stored weights, and of the model in its own dtype."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(path), dtype="auto", attn_implementation="eager", local_files_only=True
    )
    model = model.to(device)
    tokens = torch.tensor([ids], device=device)
    with torch.no_grad():
        theirs = model(tokens).logits[0]
        _widen(model)
        exact = model(tokens).logits[0]
    assert exact.dtype is torch.float32
    del model
    gc.collect()
    return exact, theirs


def _widen(model: nn.Module) -> None:
    """Makes every product run in float32; a linear layer's weights are converted when they are used."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = _wide_product(module)  # type: ignore[method-assign]
        elif type(module) is nn.Embedding:
            module.register_forward_hook(lambda _module, _taken, out: out.float())
        else:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()


def _wide_product(linear: nn.Linear) -> Any:
    def forward(x: Tensor) -> Tensor:
        bias = None if linear.bias is None else linear.bias.float()
        return functional.linear(x, linear.weight.float(), bias)

    return forward


def by_kvant(path: Path, ids: list[int], formats: list[str], device: str, chunk: int) -> Any:
    """Yields (format, logits), first for the model dtype, then for each format."""
    llm = LLM(
        path,
        device=device,
        kv_cache_dtype="model",
        kv_cache_memory="1GiB",
        max_model_len=max(1024, len(ids)),
        max_num_seqs=4,
    )
    runner = runner_of(llm)
    for name in ["model", *formats]:
        asked = KVRequest(explicit=(Asked(parse_format(name, asked_by="--format"), "--format"),))
        plan = resolve_again(llm.planned, asked)
        first = plan.layers[0].k
        assert first is not None
        yield str(first.dtype), text_logits(runner.model, plan, ids, chunk=chunk)


def _row(
    engine: str, stored: str, found: Tensor, exact: Tensor, *, bounded: bool
) -> dict[str, Any]:
    error = float((found.float() - exact).norm() / exact.norm())
    same = float((found.argmax(-1) == exact.argmax(-1)).double().mean())
    return {
        "engine": engine,
        "stored": stored,
        "error": error,
        "same_likeliest": same,
        "bounded": bounded,
    }


if __name__ == "__main__":
    main()
