"""scripts/random_checkpoint.py: what it writes is a checkpoint like any other."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from kvant import LLM, SamplingParams
from kvant.kv.dtype import KVDtype
from kvant.kv.spec import ScaleState
from tests.engine import tiny_chat

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "random_checkpoint.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("random_checkpoint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("fp8", [False, True])
def test_a_random_checkpoint_is_served_like_any_other(fp8: bool, tmp_path: Path) -> None:
    source = tiny_chat.build(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    known = config["vocab_size"]
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(config | {"vocab_size": known + 41}))
    out = tmp_path / "out"
    out.mkdir()
    made = script()
    made.SHARD_BYTES = 2**16
    size = made.write_weights(shape, out, fp8=fp8)
    made.write_tokenizer(source, out)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert size < sum(file.stat().st_size for file in files)

    llm = LLM(out, max_model_len=64, device="cpu")
    k = llm.plan.layers[0].k
    assert k is not None
    assert (k.dtype is KVDtype.FP8_E4M3) == fp8
    assert (k.scale.state is ScaleState.FOUND) == fp8
    last = known + 40
    params = SamplingParams(max_tokens=2, allowed_token_ids=[last], ignore_eos=True)
    assert llm.generate([[1, 2, 3]], params)[0].text == f" w{last} w{last}"
