"""Train a DFlash drafter for a transformers model, from the model's own answers.

    python recipes/train_dflash.py --target DIR_OR_GGUF --out DIR --mask-token-id 16 \\
        --prompts data/gsm8k/gsm8k_train.jsonl --templates data/prompts/chat_templates.json \\
        --eval gsm8k=data/gsm8k/gsm8k_test.jsonl:200 --eval chat=data/prompts/chat_heldout.jsonl

Stages: the target answers the prompts (kept in DIR/answers.npz, reused when it is there), the
drafter learns, the checkpoint is written to DIR/drafter, acceptance is measured on prompts it has
not seen.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dflash_blocks import (
    Rows,
    block_labels,
    block_mask,
    draft_states,
    embedding_and_head,
    pack_rows,
    sample_anchors,
    target_features,
)
from dflash_data import (
    Answer,
    Request,
    chat_tokens,
    expand_templates,
    generate_answers,
    load_answers,
    plan_requests,
    read_prompts,
    save_answers,
    vary_numbers,
)
from dflash_eval import NOTHING, Acceptance, greedy, replay, speculate
from dflash_loss import accepted, block_loss, chunk_gradient
from dflash_model import Drafter, DrafterConfig, evenly_spaced_layers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

ANSWERS, HELD_ANSWERS = "answers.npz", "held_answers.npz"
# What a step of the default size needs beside the kept features.
FREE_BYTES_FOR_TRAINING = 30 * 2**30


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how to train. ``limit_seconds`` bends the schedule so that it ends in time."""

    steps: int
    rows_per_step: int
    anchors_per_row: int
    optimizer: str
    learning_rate: float
    weight_decay: float
    alpha: float
    seed: int
    limit_seconds: float


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


# --- the target -----------------------------------------------------------------------------------


def load_target(
    path: Path, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target in float32 from a transformers folder or a GGUF file, and its tokenizer."""
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = str(path.parent if where else path)
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    tokenizer = AutoTokenizer.from_pretrained(folder, **where)
    refuse_unknown_heads(target)
    return target.to(device).eval().requires_grad_(False), tokenizer


def bfloat16_copy(target: PreTrainedModel) -> PreTrainedModel:
    """The same model with bfloat16 weights; its buffers (rotary frequencies) stay as they are."""
    fast = copy.deepcopy(target)
    for weight in fast.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    return fast


def refuse_unknown_heads(target: Any) -> None:
    """The loss multiplies states by the lm_head and nothing else; refuse targets that do more."""
    config = target.config
    for field in (
        "final_logit_softcapping",
        "logit_scale",
        "logits_scaling",
        "embedding_multiplier",
    ):
        if getattr(config, field, None) not in (None, 1, 1.0):
            raise ValueError(
                f"the target scales its embeddings or logits ({field} = {getattr(config, field)}), "
                "which this recipe does not train through; use a target without it"
            )
    if config.model_type.startswith("gemma"):
        raise ValueError("Gemma targets scale their embeddings, which this recipe does not do")
    head = target.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(
            "the target's lm_head has a bias, which this recipe does not train through"
        )


def stop_tokens(target: PreTrainedModel) -> frozenset[int]:
    stop = target.generation_config.eos_token_id
    return frozenset([stop] if isinstance(stop, int) else stop or [])


def drafter_config(target: PreTrainedModel, args: argparse.Namespace) -> DrafterConfig:
    """A drafter as wide as the target; see the command line for what can be chosen."""
    config = target.config
    heads = config.num_attention_heads
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    if theta is None:
        raise ValueError("the target's config has no rope_theta; the drafter needs one")
    return DrafterConfig(
        hidden_size=config.hidden_size,
        intermediate_size=args.intermediate_size or config.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(theta),
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        block_size=args.block_size,
        mask_token_id=args.mask_token_id,
        target_layer_ids=args.target_layers
        or evenly_spaced_layers(config.num_hidden_layers, args.taps),
        num_target_layers=config.num_hidden_layers,
    )


def copy_final_norm(drafter: Drafter, target: PreTrainedModel) -> None:
    """Begin with the target's final norm, where it has one by that name: its lm_head expects it."""
    norm = getattr(target.base_model, "norm", None)
    weight = getattr(norm, "weight", None)
    if isinstance(weight, Tensor) and weight.shape == drafter.norm.weight.shape:
        drafter.norm.weight.data.copy_(weight)


# --- data -----------------------------------------------------------------------------------------


def make_answers(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> tuple[list[Answer], list[Answer]]:
    """Training answers and validation answers (greedy ones, to prompts kept out of training).

    With ``--extend`` the answers of that earlier run come first, its validation prompts stay out of
    training, and what it has answered greedily is not asked again.
    """
    rng = random.Random(args.seed)
    earlier: list[Answer] = []
    held_answers: list[Answer] = []
    if args.extend:
        earlier = load_answers(args.extend / ANSWERS)
        held_answers = load_answers(args.extend / HELD_ANSWERS)
    held = {prompt_of(answer) for answer in held_answers}
    known = {prompt_of(answer) for answer in earlier if answer.first_label == answer.prompt_length}

    longest = args.row_length - args.max_new_tokens
    files = [prompt for path in args.prompts for prompt in read_prompts(path)]
    written: list[str] = []
    if args.templates:
        written = expand_templates(args.templates, args.chat, args.word_problems, args.seed)
    requests: list[Request] = []
    for prompts, continued, varied in (
        (files, args.continued, args.varied),
        (written, args.continued_chat, 0),
    ):
        tokens = {prompt: chat_tokens(tokenizer, prompt) for prompt in prompts}
        usable = [prompt for prompt in prompts if len(tokens[prompt]) <= longest]
        if not args.extend:
            chosen = rng.sample(usable, min(args.validation, len(usable) // 10))
            held |= {tokens[prompt] for prompt in chosen}
        learnt = [prompt for prompt in usable if tokens[prompt] not in held]
        requests += plan_requests(
            [tokens[prompt] for prompt in learnt],
            continued, args.sampled, args.longest_start, args.max_new_tokens, rng,
        )  # fmt: skip
        for prompt in [vary_numbers(prompt, rng) for prompt in learnt for _ in range(varied)]:
            requests.append(Request(chat_tokens(tokenizer, prompt), 0))
    requests = [r for r in requests if r.sampled_tokens or r.prompt not in known]
    rng.shuffle(requests)
    asked = [] if args.extend else [Request(prompt, 0) for prompt in sorted(held)]
    say(f"{len(files)} prompts from files, {len(written)} written; {len(requests)} answers to make")
    began = time.monotonic()
    answers = generate_answers(
        target, [*asked, *requests], args.max_new_tokens, stop_tokens(target), args.temperature,
        args.batch, args.seed,
    )  # fmt: skip
    new = sum(len(answer.tokens) - answer.prompt_length for answer in answers)
    seconds = time.monotonic() - began
    say(f"{len(answers)} answers, {new} new tokens in {seconds:.0f} s ({new / seconds:.0f}/s)")
    return earlier + answers[len(asked) :], held_answers + answers[: len(asked)]


def prompt_of(answer: Answer) -> tuple[int, ...]:
    return tuple(answer.tokens[: answer.prompt_length].tolist())


# --- training -------------------------------------------------------------------------------------


class Features:
    """Features of rows: made once and kept where the device has room, else made at each use."""

    def __init__(
        self, target: PreTrainedModel, rows: Rows, layer_ids: tuple[int, ...], batch: int
    ) -> None:
        self.target, self.rows, self.layer_ids = target, rows, layer_ids
        self.kept: Tensor | None = None
        device = rows.tokens.device
        width = len(layer_ids) * target.config.hidden_size
        needed = rows.tokens.numel() * width * target.dtype.itemsize
        if device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
            if needed + FREE_BYTES_FOR_TRAINING > free:
                say(f"features need {needed / 2**30:.0f} GiB: made anew at every step")
                return
        self.kept = torch.empty(*rows.tokens.shape, width, dtype=target.dtype, device=device)
        for start in range(0, len(rows), batch):
            index = torch.arange(start, min(start + batch, len(rows)), device=device)
            self.kept[index] = target_features(target, rows.select(index), layer_ids)
        say(f"features of {rows.tokens.numel()} tokens kept ({needed / 2**30:.1f} GiB)")

    def of(self, index: Tensor) -> Tensor:
        if self.kept is not None:
            return self.kept[index]
        return target_features(self.target, self.rows.select(index), self.layer_ids).clone()

    def typical_size(self, rows: int = 64) -> Tensor:
        """Mean |value| per channel [width], over tokens that are neither padding nor first."""
        index = torch.arange(min(rows, len(self.rows)), device=self.rows.tokens.device)
        part = self.rows.select(index)
        real = (part.segments >= 0) & (part.positions > 0)
        return self.of(index)[real].abs().float().mean(0).clamp(min=1e-3)


class Trainer:
    """Holds what a step needs; ``train`` runs the plan and leaves the drafter trained."""

    def __init__(self, drafter: Drafter, target: PreTrainedModel, plan: TrainingPlan) -> None:
        self.drafter, self.plan = drafter, plan
        self.cuda = target.device.type == "cuda"
        self.dtype = target.dtype
        self.embedding, self.head = embedding_and_head(target)
        self.draft: Any = draft_states
        self.chunk_gradient: Any = chunk_gradient
        if self.cuda:
            self.draft = torch.compile(draft_states)
            self.chunk_gradient = torch.compile(chunk_gradient)

    def run_blocks(
        self, rows: Rows, features: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Loss and accepted drafts [N] of blocks at random anchors of ``rows``."""
        size = self.drafter.config.block_size
        anchors, real = sample_anchors(rows, self.plan.anchors_per_row, generator)
        labels, exists = block_labels(rows, anchors, real, size)
        mask = block_mask(rows, anchors, size, sparse=self.cuda)
        with torch.autocast(rows.tokens.device.type, self.dtype, enabled=self.cuda):
            states = self.draft(self.drafter, self.embedding, rows, features, anchors, mask)
        loss, hits = block_loss(
            states.flatten(0, 1), self.head, labels.flatten(0, 1), exists.flatten(0, 1),
            self.plan.alpha, gradient_of_chunk=self.chunk_gradient,
        )  # fmt: skip
        return loss, accepted(hits)[exists.flatten(0, 1).any(1)]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices and AdamW for the norms, or AdamW for all."""
        plan = self.plan
        matrices = [w for w in self.drafter.parameters() if w.ndim == 2]
        vectors = [w for w in self.drafter.parameters() if w.ndim == 1]
        rate, betas = plan.learning_rate, (0.9, 0.95)
        norms = torch.optim.AdamW(vectors, rate, betas, weight_decay=0.0, fused=self.cuda)
        if plan.optimizer == "adamw":
            decay = plan.weight_decay
            whole = torch.optim.AdamW(matrices, rate, betas, weight_decay=decay, fused=self.cuda)
            return [norms, whole]
        # Muon's update has about the size of AdamW's, so that both take the same learning rates.
        muon = torch.optim.Muon(matrices, rate, plan.weight_decay, adjust_lr_fn="match_rms_adamw")
        return [norms, muon]

    def train(self, train: Features, held: Features, log_every: int) -> list[dict[str, float]]:
        """Run the plan. Returns the log: loss and acceptance, in training and held out."""
        plan = self.plan
        device = train.rows.tokens.device
        generator = torch.Generator(device).manual_seed(plan.seed)
        optimizers = self.optimizers()
        per_step = min(plan.rows_per_step, len(train.rows))
        order = torch.empty(0, dtype=torch.long, device=device)
        log: list[dict[str, float]] = []
        seen: list[tuple[Tensor, Tensor]] = []
        warm_up = max(1, min(100, plan.steps // 10))
        began = time.monotonic()
        step, progress = 0, 0.0
        while progress < 1.0:
            elapsed = time.monotonic() - began
            progress = min(max(step / plan.steps, elapsed / plan.limit_seconds), 1.0)
            warm = min(1.0, (step + 1) / warm_up)
            scale = warm * 0.5 * (1 + math.cos(math.pi * progress))
            if len(order) < per_step:
                order = torch.randperm(len(train.rows), device=device, generator=generator)
            index, order = order[:per_step], order[per_step:]
            loss, run = self.run_blocks(train.rows.select(index), train.of(index), generator)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = plan.learning_rate * scale
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            seen.append((loss.detach(), run.float().mean()))
            step += 1
            if step % log_every == 0 or progress >= 1.0:
                log.append(self.entry(step, time.monotonic() - began, seen, held))
                seen = []
        return log

    def entry(
        self, step: int, seconds: float, seen: list[tuple[Tensor, Tensor]], held: Features
    ) -> dict[str, float]:
        loss = torch.stack([loss for loss, _ in seen]).mean().item()
        length = 1 + torch.stack([run for _, run in seen]).mean().item()
        held_loss, held_length = self.held_out(held)
        say(
            f"step {step} {seconds:.0f} s: loss {loss:.4f}, {length:.3f} tokens a block; "
            f"held out {held_loss:.4f}, {held_length:.3f}"
        )
        return {
            "step": step, "seconds": seconds, "loss": loss, "tokens_per_block": length,
            "held_loss": held_loss, "held_tokens_per_block": held_length,
        }  # fmt: skip

    @torch.no_grad()
    def held_out(self, held: Features) -> tuple[float, float]:
        """Loss and tokens a block at random anchors of held-out answers (always the same ones)."""
        device = held.rows.tokens.device
        generator = torch.Generator(device).manual_seed(0)
        losses, runs = [], []
        per_step = min(self.plan.rows_per_step, len(held.rows))
        for start in range(0, len(held.rows) - per_step + 1, per_step):
            index = torch.arange(start, start + per_step, device=device)
            loss, run = self.run_blocks(held.rows.select(index), held.of(index), generator)
            losses.append(loss)
            runs.append(run.float())
        return torch.stack(losses).mean().item(), 1 + torch.cat(runs).mean().item()


# --- evaluation -----------------------------------------------------------------------------------


def evaluate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Drafter,
    sets: list[tuple[str, list[str]]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Acceptance per set of prompts, against the target's greedy answers in the target's dtype."""
    stops = stop_tokens(target)
    report: dict[str, Any] = {}
    for name, prompts in sets:
        tokens = [chat_tokens(tokenizer, prompt) for prompt in prompts]
        requests = [Request(ids, 0) for ids in tokens]
        answers = generate_answers(
            target, requests, args.max_new_tokens, stops, 1.0, args.batch, args.seed
        )
        each = [replay(target, drafter, answer) for answer in answers]
        for ids in tokens[: args.check]:
            plain = greedy(target, ids, args.max_new_tokens, stops)
            reply, _ = speculate(target, drafter, ids, args.max_new_tokens, stops)
            if reply != plain:
                raise AssertionError(
                    f"drafts changed the answer to prompt {tokenizer.decode(list(ids))!r}"
                )
        report[name] = describe(each, prompts)
        total = report[name]
        say(
            f"{name}: {total['mean_acceptance_length']:.3f} tokens a step, {len(prompts)} prompts; "
            f"per position {total['acceptance_per_position']}"
        )
    return report


def describe(each: list[Acceptance], prompts: list[str]) -> dict[str, Any]:
    """The report on one set: the total, and the prompts where the drafter does worst and best."""
    total = sum(each, NOTHING)
    ranked = sorted(zip(each, prompts, strict=True), key=lambda pair: pair[0].mean_length)
    ranked = [pair for pair in ranked if pair[0].steps >= 8]
    return {
        "prompts": len(prompts),
        "steps": total.steps,
        "tokens": total.tokens,
        "mean_acceptance_length": round(total.mean_length, 4),
        "acceptance_per_position": [round(rate, 4) for rate in total.rates],
        "per_prompt": [round(a.mean_length, 3) for a in each],
        "worst": [[round(a.mean_length, 3), p] for a, p in ranked[:5]],
        "best": [[round(a.mean_length, 3), p] for a, p in ranked[-5:]],
    }


def read_eval_set(text: str) -> tuple[str, list[str]]:
    """``name=file`` or ``name=file:count`` -> the name and the (first count) prompts."""
    name, _, rest = text.partition("=")
    path, _, count = rest.partition(":")
    if not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=file or name=file:count")
    prompts = read_prompts(Path(path))
    return name, prompts[: int(count)] if count else prompts


def layer_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="transformers folder or .gguf file")
    add("--out", type=Path, required=True)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    data = parser.add_argument_group("data").add_argument
    data("--prompts", type=Path, action="append", default=[], help="JSON lines; may repeat")
    data("--templates", type=Path, help="topics and templates to write prompts from")
    data("--extend", type=Path, help="the OUT of an earlier run, whose answers are learnt from too")
    data("--chat", type=int, default=9000, help="prompts to write from chat templates")
    data("--word-problems", type=int, default=2500, help="prompts to write from word problems")
    data("--continued", type=int, default=2, help="answers with a sampled start, per file prompt")
    data("--continued-chat", type=int, default=1, help="the same, per written prompt")
    data("--varied", type=int, default=2, help="copies of each file prompt with other numbers")
    data("--longest-start", type=int, default=64, help="sampled tokens at the start, at most")
    data("--sampled", type=float, default=0.2, help="share of prompts answered by sampling alone")
    data("--temperature", type=float, default=0.8)
    data("--max-new-tokens", type=int, default=256)
    data("--validation", type=int, default=200, help="prompts of each kind kept out of training")
    data("--batch", type=int, default=4096, help="sequences generated at once")
    shape = parser.add_argument_group("drafter").add_argument
    shape("--block-size", type=int, default=8)
    shape("--layers", type=int, default=2)
    shape("--intermediate-size", type=int, help="default: the target's")
    shape("--taps", type=int, default=5, help="target layers to read, evenly spaced")
    shape("--target-layers", type=layer_list, help="or the layers themselves: 1,8,15")
    shape("--mask-token-id", type=int, required=True, help="a token that text does not contain")
    train = parser.add_argument_group("training").add_argument
    train("--steps", type=int, default=5100)
    train(
        "--limit-minutes", type=float, default=20.0, help="end training by then, fewer steps or not"
    )
    train("--row-length", type=int, default=1024)
    train("--rows-per-step", type=int, default=48)
    train("--anchors-per-row", type=int, default=256)
    train("--optimizer", choices=("muon", "adamw"), default="muon")
    train("--learning-rate", type=float, default=4e-3)
    train("--weight-decay", type=float, default=0.3)
    train("--alpha", type=float, default=0.5, help="smoothing of the loss weights (D-PACE)")
    train("--log-every", type=int, default=200)
    test = parser.add_argument_group("evaluation").add_argument
    test("--eval", type=read_eval_set, action="append", default=[], metavar="NAME=FILE[:COUNT]")
    test("--check", type=int, default=4, help="prompts a set on which real decoding is compared")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; returns the report that is also written to OUT/report.json."""
    args = parse(argv)
    device = torch.device(args.device)
    began = time.monotonic()
    torch.manual_seed(args.seed)
    target, tokenizer = load_target(args.target, device)
    config = drafter_config(target, args)
    # Answers and features come from a bfloat16 copy on a GPU; acceptance is measured with float32.
    fast = bfloat16_copy(target) if device.type == "cuda" else target

    answers_file, held_file = args.out / ANSWERS, args.out / HELD_ANSWERS
    if answers_file.exists() and held_file.exists():
        train_answers, held_answers = load_answers(answers_file), load_answers(held_file)
        say(f"{len(train_answers)} answers read from {answers_file}")
    else:
        train_answers, held_answers = make_answers(fast, tokenizer, args)
        save_answers(answers_file, train_answers)
        save_answers(held_file, held_answers)
    generated = time.monotonic()

    rows = pack_rows(train_answers, args.row_length).to(device)
    held_rows = pack_rows(held_answers, args.row_length).to(device)
    train = Features(fast, rows, config.target_layer_ids, args.rows_per_step)
    held = Features(fast, held_rows, config.target_layer_ids, args.rows_per_step)
    drafter = Drafter(config).to(device)
    drafter.fc.input_scale.copy_(train.typical_size())
    copy_final_norm(drafter, target)
    plan = TrainingPlan(
        args.steps, args.rows_per_step, args.anchors_per_row, args.optimizer, args.learning_rate,
        args.weight_decay, args.alpha, args.seed, args.limit_minutes * 60,
    )  # fmt: skip
    log = Trainer(drafter, fast, plan).train(train, held, args.log_every)
    trained = time.monotonic()
    drafter.save(args.out / "drafter")

    shipped = Drafter.load(args.out / "drafter").to(device)
    report = {
        "parameters": sum(w.numel() for w in shipped.parameters()),
        "answers": len(train_answers),
        "answer_tokens": sum(len(a.tokens) - a.prompt_length for a in train_answers),
        "rows": len(rows),
        "seconds": {
            "answers": round(generated - began),
            "training": round(trained - generated),
        },
        "log": log,
        "acceptance": evaluate(target, tokenizer, shipped, args.eval, args),
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    say(f"done in {time.monotonic() - began:.0f} s")
    return report


if __name__ == "__main__":
    main()
