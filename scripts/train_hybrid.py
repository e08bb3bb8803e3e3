#!/usr/bin/env python3
"""Train a small hybrid language model, for measurements that random weights cannot give.

    python -m scripts.train_hybrid gated_delta OUT --gsm8k FILE     # Qwen3.5's text model
    python -m scripts.train_hybrid mamba2 OUT --gsm8k FILE          # Bamba

`--device cuda` trains on a GPU; `--tokens` sets the tokens of a step, which a GPU takes more of.

transformers' modules learn Python's standard library and GSM8K's training problems, with a vocabulary of
1,024 pieces made from the same text. Windows have 512 tokens at first and 2,048 at the end. The time
steps of the recurrent layers start spread from 0.001 to 0.1, as Mamba's authors start them: transformers'
own start forgets within a few tokens. Seeds are fixed; another release of Python has another library.

OUT gets the checkpoint, held-out.txt (modules and problems that were not trained on; --test-gsm8k) and
training.json with the losses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sysconfig
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

VOCAB = 1024
END = "<|end|>"
WIDTH, LAYERS = 192, 6
TOKENS = 2048
"""Tokens of a step, unless told otherwise."""
PHASES = ((512, 0.85), (2048, 0.15))
"""Lengths of windows, and their shares of the steps."""
RATE, WARM_UP = 2e-3, 40
STEP_TIMES = (1e-3, 1e-1)
"""Range of the recurrent layers' first time steps."""
HELD_OUT = 20
"""Every 20th module is held out."""
_NOT_READ = {"test", "tests", "site-packages", "idlelib", "lib2to3", "ensurepip", "__pycache__"}

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def gated_delta() -> PreTrainedModel:
    """Qwen3.5's layers: two of three gated DeltaNet, with states of 128 x 128."""
    config = Qwen3_5TextConfig(
        **_COMMON, head_dim=64, full_attention_interval=3, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config)


def mamba2() -> PreTrainedModel:
    """Bamba's layers: two of three Mamba2, with states of 64 x 64."""
    config = BambaConfig(
        **_COMMON, attn_layer_indices=[2, 5], mamba_expand=2, mamba_n_heads=6, mamba_d_head=64,
        mamba_d_state=64, mamba_n_groups=1, mamba_chunk_size=32,
    )  # fmt: skip
    return BambaForCausalLM(config)


KINDS = {"gated_delta": gated_delta, "mamba2": mamba2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gsm8k", type=Path, required=True, help="JSON lines to train on")
    parser.add_argument("--test-gsm8k", type=Path, required=True, help="JSON lines to hold out")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="a multiple of 2048")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True)
    texts, held_out = read_texts(asked.gsm8k, asked.test_gsm8k)
    joined = END.join(texts)
    tokenizer = make_tokenizer(texts)
    ids = torch.tensor([i for one in tokenizer.encode_batch(texts) for i in (*one.ids, 0)])
    held = torch.tensor(tokenizer.encode(held_out).ids)
    torch.manual_seed(0)
    model = KINDS[asked.kind]()
    spread_time_steps(model)
    device = torch.device(asked.device)
    model.to(device)
    started = time.perf_counter()
    losses = train(model, ids, asked.steps, asked.tokens)
    seconds = time.perf_counter() - started
    found = {
        "kind": asked.kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": asked.steps,
        "tokens": asked.steps * asked.tokens,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "training_tokens": len(ids),
        "training_sha256": hashlib.sha256(joined.encode()).hexdigest(),
        "losses": losses,
        "held_out_loss": {str(n): held_out_loss(model, held, n) for n in (512, 2048, 4096)},
        "uniform_loss": math.log(VOCAB),
        "unigram_loss": unigram_loss(ids, held),
        "bytes_per_token": len(held_out.encode()) / len(held),
        "seconds": seconds,
        "python": sysconfig.get_python_version(),
        "transformers": version("transformers"),
        "torch": version("torch"),
    }
    model.save_pretrained(asked.out)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(asked.out)
    (asked.out / "held-out.txt").write_text(held_out, encoding="utf-8")
    (asked.out / "training.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "losses"}, indent=1))


def read_texts(gsm8k: Path, test: Path) -> tuple[list[str], str]:
    """Returns training texts in a fixed random order, and one held-out text of modules and problems."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in library.rglob("*.py") if not _NOT_READ & set(f.parts))
    modules = [f.read_text(encoding="utf-8", errors="ignore") for f in files]
    seen = [text for number, text in enumerate(modules) if number % HELD_OUT]
    problems = _problems(gsm8k)
    joined = ["\n\n".join(problems[at : at + 8]) for at in range(0, len(problems), 8)]
    texts = [text for text in (*seen, *joined) if text]
    random.Random(0).shuffle(texts)
    kept = [text for text in modules[::HELD_OUT] if 8_000 < len(text) < 60_000]
    random.Random(1).shuffle(kept)
    return texts, "\n\n".join((*kept[:12], *_problems(test)[:200]))


def _problems(path: Path) -> list[str]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [f"{one['question']}\n{one['answer']}" for one in lines]


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """Learns a byte-level vocabulary of `VOCAB` pieces from the texts; piece 0 ends a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet),
    )
    return made


def spread_time_steps(model: PreTrainedModel) -> None:
    """Sets dt_bias so that softplus(dt_bias) is log-uniform, and A uniform from 1 to 16.

    Mamba2's start: https://github.com/state-spaces/mamba, mamba_ssm/modules/mamba2.py.
    """
    low, high = map(math.log, STEP_TIMES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                steps = torch.empty_like(parameter).uniform_(low, high).exp()
                parameter.copy_(steps + torch.log(-torch.expm1(-steps)))
            elif name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(1, 16).log())


def train(model: PreTrainedModel, ids: Tensor, steps: int, tokens: int) -> list[float]:
    """Trains in place, `tokens` a step; returns the mean loss of every 20 steps, in nats per token."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    model.train()
    losses: list[float] = []
    means = []
    for number, length in enumerate(_lengths(steps)):
        warm = min(1.0, (number + 1) / WARM_UP)
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm * (0.05 + 0.475 * (1 + math.cos(math.pi * number / steps)))
        starts = torch.randint(len(ids) - length - 1, (tokens // length,))
        batch = torch.stack([ids[start : start + length] for start in starts.tolist()])
        batch = batch.to(model.device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (number + 1) % 20 == 0 or number + 1 == steps:
            means.append(sum(losses) / len(losses))
            print(f"step {number + 1} of {steps}: {means[-1]:.3f}", flush=True)
            losses.clear()
    model.eval()
    return means


def _lengths(steps: int) -> Iterator[int]:
    done = 0
    for place, (length, share) in enumerate(PHASES):
        until = steps if place == len(PHASES) - 1 else done + round(steps * share)
        yield from [length] * (until - done)
        done = until


def held_out_loss(model: PreTrainedModel, held: Tensor, length: int, windows: int = 2) -> float:
    """Returns the mean loss in nats of the last 256 tokens of windows of `length` tokens."""
    total = 0.0
    with torch.no_grad():
        for number in range(windows):
            start = number * (len(held) - length) // max(1, windows - 1)
            ids = held[start : start + length][None].to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, -257:-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, -256:]))
    return total / windows


def unigram_loss(ids: Tensor, held: Tensor) -> float:
    """Returns the held-out loss in nats of a model that knows only how frequent each token is."""
    counts = torch.bincount(ids, minlength=VOCAB).double() + 1
    return float(-(counts / counts.sum()).log()[held].mean())


if __name__ == "__main__":
    main()
