"""What rounding the head costs beside rounding the layers: KL divergence from the float32 model.

    python -m benchmarks.head_quality --out docs/benchmarks/cpu-head-quality.json

transformers' modules multiply by the decoded numbers of each format, as a GPU does. The publisher rounded the
demo model to Q4_1 before.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.command import run_command
from benchmarks.weight_quality import kl_and_same_top
from kvant.cli.output import OutFile, write_json
from kvant.engine.llm import LLM
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.quality.texts import read_text
from kvant.models.demo import DEMO_NAME
from kvant.models.locate import locate
from kvant.models.narrow import chosen_layers
from kvant.models.quantization import Quantization
from kvant.weights.codecs import decode, encode
from kvant.weights.format import FP8_CHANNEL, INT8_CHANNEL

METHODS = Quantization.FP8, Quantization.INT8, Quantization.INT4
HEADS = FP8_CHANNEL, INT8_CHANNEL


@dataclass(frozen=True, slots=True)
class Row:
    """quantization: of the layers, None for none. head: format of the head, None for float32.

    mean_kl: in nats, over positions. same_top: share of positions with the same most likely token.
    """

    quantization: str | None
    head: str | None
    mean_kl: float
    same_top: float


def head_quality(
    tokens: Annotated[int, typer.Option("--tokens", min=32, help="Length of the text.")] = 1024,
    out: OutFile = None,
) -> None:
    """Measure every method with and without a rounded head, on one text."""
    path = locate(DEMO_NAME, weights=True).path
    text = read_text(None, LLM(DEMO_NAME, device="cpu", kv_cache_memory="64MiB", max_model_len=256))
    ids = torch.tensor([text.token_ids[:tokens]])
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train(False)
    rows = []
    for row in measure(model, ids):
        sys.stdout.write(
            f"{row.quantization!s:6} head {row.head!s:28} {row.mean_kl:.6f} {row.same_top:.2%}\n"
        )
        sys.stdout.flush()
        rows.append(row)
    if out is not None:
        made = measurement_facts(
            command_line("python -m benchmarks.head_quality"), ("torch", "transformers")
        )
        facts = {"text": text.name, "sha256": text.sha256, "tokens": ids.shape[1]}
        write_json(out, {**made, **facts, "rows": [asdict(row) for row in rows]})


def measure(model: PreTrainedModel, ids: Tensor) -> Iterator[Row]:
    """Yields every method, with and without a rounded head. ids: [1, T] int64. The model is not changed."""
    expected = _logits(model, ids)
    head, *_ = chosen_layers(model, METHODS[0])
    for method in (None, *METHODS):
        layers = {} if method is None else chosen_layers(model, method, head=False)
        for fmt in HEADS if method is None else (None, *HEADS):
            made: Any = copy.deepcopy(model)
            own = made.get_submodule(head)
            own.weight = torch.nn.Parameter(own.weight.detach().clone())  # apart from the embedding
            with torch.no_grad():
                for name, chosen in (layers if fmt is None else {**layers, head: fmt}).items():
                    weight = made.get_submodule(name).weight
                    weight.copy_(decode(encode(weight, chosen)))
            found = _logits(made, ids)
            yield Row(
                None if method is None else method.value,
                None if fmt is None else fmt.summary,
                *kl_and_same_top(found, expected),
            )


def _logits(model: Any, ids: Tensor) -> Tensor:
    """Returns log-probabilities [T, vocab_size]."""
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits[0], -1)


if __name__ == "__main__":
    run_command(head_quality)
