"""scripts/random_checkpoint.py: what it writes is a checkpoint like any other."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvant import LLM, SamplingParams
from kvant.kv.dtype import KVDtype
from kvant.kv.spec import ScaleState
from kvant.models.fused.narrow_experts import NarrowExperts
from kvant.weights.codecs import decode
from tests.engine import tiny_chat
from tests.models import tiny
from tests.models.test_narrow_experts import TEXT, load_stored, logits
from tests.models.tiny_narrow_experts import MXFP4_LEFT, SIZES

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


def test_experts_in_mxfp4_are_read_alike_by_transformers_and_kvant(tmp_path: Path) -> None:
    source = tiny.build("gpt_oss", tmp_path / "source", **SIZES["gpt_oss"])
    config = json.loads((source / "config.json").read_text())
    declared = {"quant_method": "mxfp4", "modules_to_not_convert": MXFP4_LEFT}
    shape, out = tmp_path / "shape", tmp_path / "out"
    shape.mkdir()
    out.mkdir()
    (shape / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    size = script().write_weights(shape, out, fp8=False)
    tensors = load_file(out / "model-00001-of-00001.safetensors")
    assert size == sum(tensor.nbytes for tensor in tensors.values())
    blocks = tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"]
    assert blocks.shape == (config["num_local_experts"], 192, 2, 16)
    assert len(blocks.unique()) == 256

    theirs: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model = load_stored(out, "gpt_oss")
    for name, part in model._module.named_modules():
        if isinstance(part, NarrowExperts):
            numbers = theirs.get_parameter(f"{name}.down_proj").detach().float()
            assert 0.015 < float(numbers.std()) < 0.021
            for expert, exact in enumerate(numbers):
                assert torch.equal(decode(part.down.one(expert)), exact.T)
    with torch.no_grad():
        expected = torch.nn.Module.float(theirs)(torch.tensor([TEXT])).logits[0]
    assert (logits(model) - expected).abs().max() < 3e-5 * expected.abs().max()
