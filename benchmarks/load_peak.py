"""Measures the peak memory of loading a model whose weights are rounded on a CPU.

python -m benchmarks.load_peak --loads 3 --out load-peak.json
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import tempfile
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Annotated

import typer

from benchmarks.command import run_command
from kvant.cli.output import OutFile, write_json
from kvant.measure.facts import command_line, measurement_facts

_SHAPE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 8192, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512,
}  # fmt: skip
_LAYERS = 24
_PAGES = 8 << 20


def main(
    loads: Annotated[int, typer.Option("--loads", min=1, help="Loads of each format.")] = 3,
    out: OutFile = None,
) -> None:
    """Measure memory while weights are rounded: a Llama of 382 million random bfloat16 weights."""
    found = []
    spawn = multiprocessing.get_context("spawn")
    # Every load has a process of its own, so that none finds memory that another left.
    with (
        tempfile.TemporaryDirectory(prefix="kvant-peak-") as place,
        spawn.Pool(1, maxtasksperchild=1) as pool,
    ):
        for layers in (1, _LAYERS):
            pool.apply(_save, (Path(place) / str(layers), layers))
        for _ in range(loads):
            for name in ("int4", "int8"):
                found.append(pool.apply(_load, (Path(place), name)))
                print(found[-1], flush=True)
    if out is not None:
        packages = ("torch", "transformers", "numba")
        facts = measurement_facts(command_line("python -m benchmarks.load_peak"), packages)
        write_json(out, {**facts, "loads": found})


def _save(path: Path, layers: int) -> None:
    import torch
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=layers, **_SHAPE)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def _load(place: Path, name: str) -> dict[str, object]:
    """Returns bytes beyond those of the process after it has loaded a model of one layer.

    anonymous: of memory that no file backs; else the resident memory, with mapped weights. weights: bytes of
    weights by the plan. The engine's pages have _PAGES bytes beside them.
    """
    import torch

    from kvant import LLM

    def engine(layers: int) -> LLM:
        return LLM(
            str(place / str(layers)), quantization=name, dtype="float32", max_model_len=64,
            kv_cache_memory=f"{_PAGES >> 20}MiB",
        )  # fmt: skip

    engine(1)  # imports, compiles, and is freed
    gc.collect()
    # Else the load would reuse freed memory, which is counted as before it.
    ctypes.CDLL(None).malloc_trim(0)
    before, peak, ended = _resident(), _resident(), Event()

    def watch() -> None:
        while not ended.wait(0.002):
            for kind, size in _resident().items():
                peak[kind] = max(peak[kind], size)

    watcher = Thread(target=watch)
    watcher.start()
    begin = perf_counter()
    try:
        llm = engine(_LAYERS)
        seconds = perf_counter() - begin
    finally:
        ended.set()
        watcher.join()
    gc.collect()
    after = _resident()
    return {
        "quantization": name,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "weights": llm.planned.weights_bytes,
        "pages": _PAGES,
        "before": before,
        "peak": {kind: peak[kind] - before[kind] for kind in before},
        "after": {kind: after[kind] - before[kind] for kind in before},
    }


def _resident() -> dict[str, int]:
    """Returns this process's resident bytes, and the anonymous ones among them."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    status = dict(line.split(":", 1) for line in lines)
    wanted = {"anonymous": "RssAnon", "resident": "VmRSS"}
    return {kind: int(status[key].split()[0]) * 1024 for kind, key in wanted.items()}


if __name__ == "__main__":
    run_command(main)
