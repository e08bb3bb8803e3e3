"""What the backend with fp8 products says of a need, without torch, triton or a device."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.select import rounded_layers, select
from kvant.attention.triton_fp8.info import INFO, SERVED, refuse
from kvant.kv.dtype import ComputeDtype, KVDtype
from tests.attention import driver

H200 = DeviceFacts(DeviceKind.CUDA, "sm_90")
FINE = Need(
    driver.layer(head_dim_k=128), KVDtype.FP8_E4M3, KVDtype.FP8_E4M3, ComputeDtype.BFLOAT16, 16, H200
)  # fmt: skip


@pytest.mark.parametrize(("k", "v"), list(itertools.product(SERVED, repeat=2)), ids=str)
def test_every_pair_of_8_bit_floats_is_served_on_hopper(k: KVDtype, v: KVDtype) -> None:
    for compute in (ComputeDtype.FLOAT16, ComputeDtype.BFLOAT16):
        for head_dim, group in itertools.product((64, 128), (1, 4, 7)):
            heads = {"num_q_heads": 2 * group, "num_kv_heads": 2}
            for causal in (True, False):
                layer = driver.layer(head_dim_k=head_dim, causal=causal, **heads)
                asked = replace(FINE, k=k, v=v, compute=compute, layer=layer)
                assert select(asked, only=INFO).backend == INFO.name


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (replace(FINE, device=DeviceFacts(DeviceKind.CPU)), "CPU"),
        (replace(FINE, device=DeviceFacts(DeviceKind.CUDA, "sm_89")), "sm_89"),
        (replace(FINE, device=DeviceFacts(DeviceKind.CUDA, "sm_100")), "sm_100"),
        (replace(FINE, device=DeviceFacts(DeviceKind.ROCM, "gfx942")), "gfx942"),
        (replace(FINE, k=KVDtype.BFLOAT16), "bfloat16"),
        (replace(FINE, v=KVDtype.INT8_PER_TOKEN_HEAD), "int8_per_token_head"),
        (replace(FINE, v=None), "latents"),
        (replace(FINE, compute=ComputeDtype.FLOAT32), "float32"),
        (replace(FINE, layer=driver.layer(head_dim_k=96)), "96"),
        (replace(FINE, layer=driver.layer(head_dim_k=256)), "256"),
        (replace(FINE, layer=driver.layer(head_dim_k=128, head_dim_v=64)), "128/64"),
        (replace(FINE, layer=driver.layer(head_dim_k=128, window=512)), "512"),
        (replace(FINE, layer=driver.layer(head_dim_k=128, softcap=30.0)), "30"),
        (replace(FINE, layer=driver.layer(head_dim_k=128, sinks=True)), "sinks"),
        (replace(FINE, page_size=24), "24"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_it_does_not_serve_is_refused_with_the_reason(asked: Need, says: str) -> None:
    assert says in (refuse(asked) or "")
    assert not select(asked, only=INFO).is_served


def test_unasked_it_is_never_chosen_and_the_reason_says_what_it_rounds() -> None:
    found = select(FINE)
    assert found.backend == "triton"
    (reason,) = (one.reason for one in found.rejected if one.backend == INFO.name)
    assert "four significant bits" in reason
    assert f"--attention-backend {INFO.name}" in reason


def test_in_batch_invariant_mode_it_is_refused_by_name_too() -> None:
    asked = replace(FINE, batch_invariant=True)
    found = select(asked, only=INFO)
    assert not found.is_served
    assert any("--batch-invariant" in one.reason for one in found.rejected)


def test_a_plan_says_which_layers_are_rounded_and_one_without_says_nothing() -> None:
    made = driver.plan([driver.layer(index=i) for i in range(3)], KVDtype.FP8_E4M3)
    assert rounded_layers(made) == ()
    layers = tuple(
        replace(layer, backend=INFO.name if layer.geometry.index else "triton")
        for layer in made.layers
    )
    (line,) = rounded_layers(replace(made, layers=layers))
    assert "2 of 3 layers" in line
    assert "four significant bits" in line
    assert "256" in line
