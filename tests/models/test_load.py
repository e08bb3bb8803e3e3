"""Loading: what a loaded model gives, and what is refused before or at the first forward."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.attention.reference.backend import ReferenceBackend, backend
from kvant.errors import BadCheckpoint, DoesNotFit, EngineFault, NotServable
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.models.forward_info import ForwardInfo
from kvant.models.loaded import LoadedModel
from kvant.models.modules.info import INFO as MODULES
from kvant.models.quiet import quiet_transformers
from kvant.models.tokenizer import load_tokenizer
from kvant.plan.plan import PlanRequest
from tests.attention import driver
from tests.models import loading, tiny
from tests.planned import plan_of

CPU = torch.device("cpu")
TOKENS = [3, 17, 5, 90, 41, 8, 100, 21]
EXACT = ReferenceBackend(torch.float64)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("models"))


def load(
    path: Path,
    *,
    compute: ComputeDtype = ComputeDtype.FLOAT32,
    k: KVDtype = KVDtype.FLOAT32,
    only: ForwardInfo | None = None,
) -> LoadedModel:
    geometry = tiny.geometry(path.name)
    plan = driver.plan(geometry.layers, k, compute=compute)
    return loading.load(path, plan, geometry, only=only)


def step_of(model: LoadedModel, exact: bool = False) -> tuple[Tensor, Any, Tensor]:
    made = driver.Driver(driver.pool(model.plan, 4), EXACT if exact else backend())
    return made.call([(driver.Text(list(TOKENS)), len(TOKENS))])


def eager(path: Path, dtype: torch.dtype) -> Any:
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype)


def test_logits_are_given_for_the_asked_positions_only(llama: Path) -> None:
    model = load(llama)
    ids, call, _ = step_of(model)
    every = model.forward(ids, call, torch.arange(len(TOKENS)))
    some = model.forward(ids, call, torch.tensor([6, 2]))
    assert every.shape == (len(TOKENS), tiny.VOCAB)
    torch.testing.assert_close(some, every[[6, 2]], atol=1e-5, rtol=1e-5)
    assert not some.requires_grad


def test_logits_are_those_of_transformers_in_float64(llama: Path) -> None:
    """The model computes in float64; KV is stored as float32, so that rounding is what is left."""
    model = load(llama, compute=ComputeDtype.FLOAT64)
    ids, call, _ = step_of(model, exact=True)
    found = model.forward(ids, call, torch.arange(len(TOKENS)))
    assert found.dtype is torch.float64
    expected = eager(llama, torch.float64)(ids[None]).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_bfloat16_model_gives_float32_logits_near_the_float32_models(llama: Path) -> None:
    model = load(llama, compute=ComputeDtype.BFLOAT16, k=KVDtype.BFLOAT16)
    ids, call, _ = step_of(model)
    found = model.forward(ids, call, torch.arange(len(TOKENS)))
    assert found.dtype is torch.float32
    expected = eager(llama, torch.float32)(ids[None]).logits[0]
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert (found != expected).any()


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_hidden_states_are_what_the_named_layers_hand_on(name: str, tmp_path: Path) -> None:
    path = tiny.build(name, tmp_path)
    model = load(path)
    ids, call, last = step_of(model)
    plain = model.forward(ids, call, last)
    logits, hidden = model.forward_with_hidden(ids, call, last, [3, 0, 2])
    assert torch.equal(logits, plain)
    expected: dict[int, Tensor] = {}
    reference = eager(path, torch.float32)
    for index, layer in enumerate(reference.model.layers):
        layer.register_forward_hook(
            lambda _m, _i, out, index=index: expected.update(
                {index: out[0] if isinstance(out, tuple) else out}
            )
        )
    reference(ids[None])
    for index, found in zip([3, 0, 2], hidden, strict=True):
        torch.testing.assert_close(found, expected[index][0], atol=1e-4, rtol=1e-4)


def test_threads_that_run_at_once_get_their_own_hidden_states(tmp_path: Path) -> None:
    """As steps that are warmed up; only models without a decoder of Kvant's own have hooks."""
    model = load(tiny.build("gemma4", tmp_path))
    ids, call, last = step_of(model)
    _, expected = model.forward_with_hidden(ids, call, last, [0, 2])
    other_ids, other_call, _ = step_of(model)
    other_ids = other_ids.flip(0)
    _, other_expected = model.forward_with_hidden(other_ids, other_call, last, [0, 2])
    found: list[tuple[Tensor, ...]] = []

    def other() -> None:
        found.append(model.forward_with_hidden(other_ids, other_call, last, [0, 2])[1])

    def between(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(30)

    handle = model._module.model.layers[1].register_forward_hook(between)
    _, hidden = model.forward_with_hidden(ids, call, last, [0, 2])
    handle.remove()
    assert not torch.equal(expected[0], other_expected[0])
    for mine, right in zip((*hidden, *found[0]), (*expected, *other_expected), strict=True):
        assert torch.equal(mine, right)


def test_taps_are_gone_after_the_forward(llama: Path) -> None:
    model = load(llama, only=MODULES)
    ids, call, last = step_of(model)
    model.forward_with_hidden(ids, call, last, [1])
    assert all(not layer._forward_hooks for layer in model._module.model.layers)


def test_weights_are_frozen_and_in_evaluation_mode(llama: Path) -> None:
    module = load(llama)._module
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(("declared", "expected"), [(2, (2,)), ([2, 5], (2, 5)), (None, ())])
def test_eos_tokens_come_from_the_generation_config(
    declared: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    path = tiny.build("llama", tmp_path, eos_token_id=None)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    assert load(path).eos_token_ids == expected


def test_a_model_whose_attention_ignores_the_interface_is_a_fault_at_its_first_forward(
    llama: Path,
) -> None:
    model = load(llama, only=MODULES)

    class OwnAttention(nn.Module):
        def forward(self, hidden_states: Tensor, **others: object) -> tuple[Tensor, None]:
            return hidden_states, None

    model._module.model.layers[2].self_attn = OwnAttention()
    with pytest.raises(EngineFault, match=r"LlamaForCausalLM.*model\.layers\.2\.self_attn"):
        model.forward(*step_of(model))


def test_later_forwards_are_not_watched(llama: Path) -> None:
    model = load(llama, only=MODULES)  # the step then travels as a keyword, where it can be seen
    ids, call, last = step_of(model)
    seen: list[object] = []
    model._module.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(kwargs["kvant"]), with_kwargs=True
    )
    model.forward(ids, call, last)
    model.forward(ids, call, last)
    assert seen[0] is not call
    assert seen[1] is call


def test_missing_weights_are_an_error_and_not_random_numbers(llama: Path, tmp_path: Path) -> None:
    path = copy_of(llama, tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(path)


def test_weights_of_another_shape_are_refused(llama: Path, tmp_path: Path) -> None:
    path = copy_of(llama, tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(63)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((BadCheckpoint, NotServable), match=str(path)):
        load(path)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("compute", [ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16])
def test_a_weight_that_is_no_number_is_an_error_that_names_it(
    llama: Path, tmp_path: Path, wrong: float, compute: ComputeDtype
) -> None:
    path = copy_of(llama, tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][7, 5] = wrong
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"layers\.2\.mlp\.up_proj\.weight") as fault:
        load(path, compute=compute)
    assert str(path) in str(fault.value)


def test_unused_tensors_are_named(llama: Path, tmp_path: Path) -> None:
    path = copy_of(llama, tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert load(path).unused_tensors == ("model.layers.0.self_attn.k_scale",)


def test_pickled_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    path = copy_of(llama, tmp_path)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="safetensors"):
        load(path)


def test_code_that_comes_with_a_checkpoint_is_not_run(llama: Path, tmp_path: Path) -> None:
    path = copy_of(llama, tmp_path)
    change_config(path, model_type="mine", auto_map={"AutoConfig": "mine.Mine"})
    (path / "mine.py").write_text("raise SystemExit('this code ran')\n")
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        load(path)


def test_a_model_that_can_only_be_planned_is_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    geometry = dataclasses.replace(tiny.geometry("llama"), not_runnable="no recurrent state yet")
    with pytest.raises(NotServable, match="no recurrent state yet"):
        loading.load(tmp_path / "nothing", driver.plan(geometry.layers), geometry)


def test_a_directory_without_a_tokenizer_says_so(llama: Path) -> None:
    with pytest.raises(BadCheckpoint, match="tokenizer"):
        load_tokenizer(llama)


@pytest.mark.parametrize("where", ["_read_weights", "LoadedModel"])
def test_a_device_that_fills_up_while_weights_are_read_or_joined_is_too_small(
    llama: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fails(*given: object, **options: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(f"kvant.models.load.{where}", fails)
    with pytest.raises(DoesNotFit, match="tried to allocate"):
        load(llama)


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": "small"}, {"use_return_dict": False}, {"head_dim": [1]}],
    ids=str,
)
def test_a_config_that_transformers_cannot_read_is_the_checkpoints_fault(
    llama: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    path = copy_of(llama, tmp_path)
    change_config(path, **changes)
    with pytest.raises(BadCheckpoint, match=r"cannot read config\.json"):
        load(path)


def copy_of(path: Path, directory: Path) -> Path:
    new = directory / path.name
    new.mkdir()
    for file in path.iterdir():
        (new / file.name).write_bytes(file.read_bytes())
    return new


def change_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ({"eos_token_id": 5}, (5,)),
        ({"eos_token_id": [5, 7]}, (5, 7)),
        ({"eos_token_id": "x"}, (9,)),
        ({"eos_token_id": ["x"]}, (9,)),
        ({"eos_token_id": True}, (9,)),
        ({"eos_token_id": None}, (9,)),
        ({"eos_token_id": 5, "cache_implementation": "other", "max_new_tokens": -3}, (5,)),
        ([], (9,)),
        (None, (9,)),
    ],
)
def test_only_the_ends_of_a_text_are_read_from_generation_config(
    said: Any, ends: tuple[int, ...], tmp_path: Path
) -> None:
    path = tiny.build("llama", tmp_path, eos_token_id=9)
    (path / "generation_config.json").write_text(json.dumps(said))
    assert plan_of(PlanRequest(str(path), DeviceFacts(DeviceKind.CPU))).can_run
    geometry = tiny.geometry("llama")
    model = loading.load(path, driver.plan(geometry.layers), geometry)
    assert model.eos_token_ids == ends
