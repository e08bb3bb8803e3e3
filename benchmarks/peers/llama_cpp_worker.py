"""llama.cpp through its C interface. Runs in the peer's own Python, with only llama_cpp and numpy.

    PYTHON llama_cpp_worker.py MODEL.gguf THREADS KV_TYPE CONTEXT SEQUENCES

KV_TYPE: f32, f16 or q8_0. CONTEXT: tokens of one sequence at most.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from typing import Any

import llama_cpp as ll
import numpy as np

WARM_UP_STEPS = 3
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # ggml's numbers


class Model:
    """One model and a context of several sequences with separate caches."""

    def __init__(self, path: str, threads: int, kv_type: str, context: int, sequences: int) -> None:
        ll.llama_backend_init()
        self._model = ll.llama_load_model_from_file(path.encode(), ll.llama_model_default_params())
        asked = ll.llama_context_default_params()
        asked.n_ctx = context * sequences
        asked.n_seq_max = sequences
        asked.n_batch = 2048
        asked.n_threads = asked.n_threads_batch = threads
        asked.type_k = asked.type_v = KV_TYPES[kv_type]
        asked.kv_unified = False
        self._context = ll.llama_new_context_with_model(self._model, asked)
        if not self._context:
            raise SystemExit("llama.cpp made no context")
        self._memory = ll.llama_get_memory(self._context)
        self.vocab_size = ll.llama_n_vocab(ll.llama_model_get_vocab(self._model))
        self._filled: tuple[int, int, list[int]] | None = None

    def forget(self) -> None:
        ll.llama_memory_clear(self._memory, True)
        self._filled = None

    def fill(self, tokens: list[int], batch: int) -> list[int]:
        """Starts `batch` sequences with the same prompt, computed once; returns the token after each.

        Sequence 0's cache is copied to the others. A second call with the same length
        only removes the tokens that were decoded since.
        """
        if self._filled is None or self._filled[:2] != (len(tokens), batch):
            self.forget()
            newest = [self.prompt(tokens, 0)] * batch
            for sequence in range(1, batch):
                ll.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
            self._filled = (len(tokens), batch, newest)
        for sequence in range(batch):
            ll.llama_memory_seq_rm(self._memory, sequence, len(tokens), -1)
        return self._filled[2]

    def run(self, tokens: list[tuple[int, int, int]], wanted: list[int]) -> list[int]:
        """Runs one batch of (token, position, sequence).

        Returns the most likely tokens after places `wanted`.
        """
        batch = ll.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, (token, position, sequence) in enumerate(tokens):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence
            batch.logits[place] = 0
        for place in wanted:
            batch.logits[place] = 1
        if ll.llama_decode(self._context, batch) != 0:
            raise SystemExit("llama.cpp refused a batch")
        found = [int(self._logits(place).argmax()) for place in wanted]
        ll.llama_batch_free(batch)
        return found

    def _logits(self, place: int) -> Any:
        row = ll.llama_get_logits_ith(self._context, place)
        return np.ctypeslib.as_array(
            ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,)
        )

    def prompt(self, tokens: list[int], sequence: int) -> int:
        """Computes a prompt in batches of 2048; returns the token after it."""
        last = 0
        for start in range(0, len(tokens), 2048):
            part = tokens[start : start + 2048]
            packed = [(token, start + i, sequence) for i, token in enumerate(part)]
            last = self.run(packed, [len(part) - 1])[0]
        return last


def decode(model: Model, case: dict[str, Any]) -> list[float]:
    """Returns milliseconds of each step. filled: one prompt is computed once, and used for all sequences."""
    batch, context = case["batch"], case["context"]
    prompts = _prompts(model, case)
    if case["filled"]:
        newest = model.fill(prompts[0], batch)
    else:
        model.forget()
        newest = [model.prompt(prompt, sequence) for sequence, prompt in enumerate(prompts)]
    times = []
    for step in range(WARM_UP_STEPS + case["repeats"]):
        begin = time.perf_counter()
        packed = [(token, context + step, sequence) for sequence, token in enumerate(newest)]
        newest = model.run(packed, list(range(batch)))
        times.append(1000 * (time.perf_counter() - begin))
    return times[WARM_UP_STEPS:]


def prefill(model: Model, case: dict[str, Any]) -> list[float]:
    times = []
    for _ in range(case["repeats"]):
        prompts = _prompts(model, case)
        model.forget()
        begin = time.perf_counter()
        for sequence, prompt in enumerate(prompts):
            model.prompt(prompt, sequence)
        times.append(1000 * (time.perf_counter() - begin))
    return times


def _prompts(model: Model, case: dict[str, Any]) -> list[list[int]]:
    numbers = random.Random(case["seed"])
    size = model.vocab_size
    return [[numbers.randrange(size) for _ in range(case["context"])] for _ in range(case["batch"])]


def main() -> None:
    path, threads, kv_type, context, sequences = sys.argv[1:]
    ll.llama_log_set(_SILENT, None)
    model = Model(path, int(threads), kv_type, int(context), int(sequences))
    about = {
        "llama-cpp-python": ll.__version__,
        "llama.cpp": " ".join(ll.llama_print_system_info().decode().split()),
    }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps((decode if case["decode"] else prefill)(model, case)), flush=True)


_SILENT = ll.llama_log_callback(lambda _level, _text, _data: None)

if __name__ == "__main__":
    main()
