"""A real model in two processes over NIXL: prefill in one, decode in the other."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvant import LLM, SamplingParams
from kvant.errors import NotServable
from kvant.kv.offload.policy import BreakEven
from kvant.kv.transfer.config import Address
from tests.kv.transfer.engines import free_address
from tests.models import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no NIXL"),
]
ROOT = Path(__file__).parents[3]
PROMPTS = [[(11 * i + 5 * i * i + n) % 120 + 3 for i in range(n)] for n in (200, 77, 130)]
STORED = "fp8_per_token_head"


def opened(path: Path, dtype: str, **options: object) -> LLM:
    given = {
        "dtype": "float32", "page_size": 8, "kv_cache_memory": "16MiB", "max_model_len": 512,
        "kv_offload": "host:16MiB", "kv_cache_dtype": dtype, "batch_invariant": True,
        "attention_backend": "reference", **options,
    }  # fmt: skip
    llm = LLM(path, **given)  # type: ignore[arg-type]
    assert llm.engine.tiers is not None
    llm.engine.tiers.policy = BreakEven(8, latency=-1e9)
    return llm


def texts(llm: LLM, num_tokens: int = 12) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    found = [list(llm.generate([prompt], params)[0].token_ids) for prompt in PROMPTS]
    end = time.monotonic() + 20
    while llm.engine.is_moving:
        llm.engine.move(0.01)
        assert time.monotonic() < end
    llm.engine.audit()
    return found


def test_tokens_are_those_of_a_single_engine_and_pages_are_converted_if_asked(
    tmp_path: Path,
) -> None:
    path, address = tiny.build("llama", tmp_path), free_address()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(path), str(address.port)], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as giving:  # fmt: skip
        assert giving.stdout is not None
        assert giving.stdout.readline() == b"ready\n"
        take = f"take:{address}"
        decode = opened(path, STORED, kv_transfer=take)
        assert texts(decode) == texts(opened(path, STORED))
        assert decode.engine.stats.num_computed_tokens <= len(PROMPTS) * (8 + 12)
        with pytest.raises(NotServable, match=f"its formats are {STORED}, here they are int4"):
            opened(path, "int4_per_token_head", kv_transfer=take)
        narrow = opened(path, "int4_per_token_head", kv_transfer=take, kv_transfer_convert=STORED)
        texts(narrow)
        assert narrow.engine.stats.num_computed_tokens <= len(PROMPTS) * (8 + 12)
        stats = narrow.engine.stats.offload
        assert stats is not None
        assert stats.peer is not None
        assert stats.peer.restored == sum((len(p) - 1) // 8 for p in PROMPTS)
        assert stats.peer.bad == 0
        giving.kill()


def _main() -> None:
    path, port = Path(sys.argv[1]), int(sys.argv[2])
    llm = opened(path, STORED, kv_transfer=f"give:{Address('127.0.0.1', port)}")
    texts(llm, 1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    _main()
