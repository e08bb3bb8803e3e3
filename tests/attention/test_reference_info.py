"""What the reference backend says it serves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.reference.info import INFO
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.geometry import Attention
from tests.attention.driver import layer


def need(**changes: Any) -> Need:
    base = Need(
        layer(), KVDtype.FLOAT32, KVDtype.FLOAT32, ComputeDtype.FLOAT32, 16,
        DeviceFacts(DeviceKind.CPU),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("kind", list(DeviceKind))
@pytest.mark.parametrize("dtype", list(KVDtype), ids=str)
def test_every_format_is_served_on_every_device(dtype: KVDtype, kind: DeviceKind) -> None:
    assert INFO.refuse(need(k=dtype, v=dtype, device=DeviceFacts(kind))) is None


def test_a_head_size_that_the_format_excludes_is_refused_for_k_and_for_v() -> None:
    for head_dims in ((24, 32), (32, 24)):
        narrow = layer(head_dim_k=head_dims[0], head_dim_v=head_dims[1])
        reason = INFO.refuse(need(layer=narrow, k=KVDtype.NVFP4, v=KVDtype.NVFP4))
        assert reason is not None
        assert "24" in reason


def test_latents_are_served() -> None:
    mla = dataclasses.replace(layer(), attention=Attention.MLA, num_kv_heads=1, head_dim_v=16)
    assert INFO.refuse(need(layer=mla, v=None)) is None


def test_query_heads_that_do_not_divide_are_refused() -> None:
    assert INFO.refuse(need(layer=layer(num_q_heads=5, num_kv_heads=2))) is not None
