"""Benchmarks give Kvant and its peers the same work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.engine_timing import Case, time_engine
from benchmarks.peers import transformers_worker
from benchmarks.peers.filled import FilledRunner, engine_with
from benchmarks.peers.gguf_files import PeerWeights, convert
from benchmarks.peers.worker import Worker
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from kvant.engine.llm import LLM
from kvant.errors import ConfigError, WayOut
from kvant.execution.runner import ModelRunner
from kvant.kv.dtype import KVDtype
from kvant.kv.names import FormatRequest
from tests.engine import tiny_chat
from tests.models import tiny, tiny_gguf

OTHER = WayOut("install it: pip install it")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    torch.set_num_threads(1)
    path = tiny_chat.build(tmp_path_factory.mktemp("peers"))
    return LLM(path, dtype="float32", kv_cache_memory="1MiB")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([sys.executable, "-c", "import no_such_peer"], "No module named 'no_such_peer'"),
        (["/no/such/python"], "No such file"),
    ],
)
def test_a_peer_that_is_not_there_says_how_to_get_it(command: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Worker("a peer", command, [OTHER])
    assert says in str(caught.value)
    assert str(OTHER) in str(caught.value)


def test_a_worker_answers_each_case_with_its_milliseconds() -> None:
    answers = (
        "import sys, json; print(json.dumps({'peer': '1'}), flush=True)\n"
        "for line in sys.stdin: c = json.loads(line); print([c['batch'], c['seed']], flush=True)"
    )
    with Worker("a peer", [sys.executable, "-c", answers], []) as worker:
        assert worker.about == {"peer": "1"}
        for batch in (1, 8):
            case = Case(True, batch, 4)
            assert worker.time(case, repeats=2, seed=5, filled=False) == [batch, 5]


def test_a_peer_that_dies_is_an_error_with_its_last_words() -> None:
    dies = "import sys; print('{}', flush=True); sys.stdin.readline(); sys.exit('out of luck')"
    with (
        pytest.raises(ConfigError, match="out of luck"),
        Worker("a peer", [sys.executable, "-c", dies], []) as worker,
    ):
        worker.time(Case(True, 1, 4), repeats=1, seed=0, filled=False)


@pytest.mark.parametrize("stored", [KVDtype.FLOAT32, KVDtype.INT8_PER_TOKEN_HEAD], ids=str)
def test_a_filled_cache_holds_a_computed_prompts_bytes_in_every_page(
    llm: LLM, stored: KVDtype
) -> None:
    engine = engine_with(llm, FormatRequest(stored, stored), batch=3, context=600, filled=True)
    runner = engine.runner
    assert isinstance(runner, FilledRunner)
    inner = runner._inner
    assert isinstance(inner, ModelRunner)
    for plane in inner.pool.planes():
        assert all(page.ne(0).any() for page in plane[1:])
    case = Case(True, 3, 600)
    (timing,) = time_engine(engine, [case], repeats=4)
    assert timing.tokens == 3
    assert len(timing.milliseconds) == 4


@pytest.mark.parametrize("filled", [False, True])
def test_transformers_times_each_step_of_generate(filled: bool) -> None:
    model = tiny.make("llama")
    case = {"batch": 2, "context": 9, "repeats": 3, "seed": 0, "filled": filled}
    assert len(transformers_worker.decode(model, case)) == 3
    assert len(transformers_worker.prefill(model, case)) == 3


@pytest.mark.parametrize("weights", PeerWeights, ids=lambda w: w.name)
def test_llama_cpp_gets_the_numbers_that_kvant_imports(
    tmp_path: Path, weights: PeerWeights
) -> None:
    source = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", types={})
    convert(source, tmp_path / "peer.gguf", weights)
    found = {t.name: t for t in GGUFReader(tmp_path / "peer.gguf").tensors}
    before = GGUFReader(source)
    assert len(found) == len(before.tensors)
    kind = weights.value[0]
    for tensor in before.tensors:
        wide = dequantize(tensor.data, tensor.tensor_type)
        wanted = kind if wide.ndim > 1 else GGMLQuantizationType.F32
        if weights is PeerWeights.Q4_0 and tensor.name in ("token_embd.weight", "output.weight"):
            wanted = GGMLQuantizationType.Q8_0
        assert found[tensor.name].tensor_type is wanted
        assert found[tensor.name].data.tobytes() == quantize(wide, wanted).tobytes()
    fields = {name: field.contents() for name, field in before.fields.items()}
    made = {name: f.contents() for name, f in GGUFReader(tmp_path / "peer.gguf").fields.items()}
    for name in ("tokenizer.ggml.tokens", "llama.block_count", "llama.rope.freq_base"):
        assert json.dumps(fields[name]) == json.dumps(made[name])
