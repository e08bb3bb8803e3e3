"""Fp8 products on Hopper, held to the definition of their rounding: python -m pytest -m gpu here."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant import LLM, SamplingParams
from kvant.attention.cuda import fp8_prompts
from kvant.attention.long import list_long
from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.triton_fp8.backend import backend
from kvant.attention.triton_fp8.info import SERVED
from kvant.attention.verify import rounded
from kvant.attention.verify.trial import Trial, run_trial
from kvant.kv.dtype import ComputeDtype, KVDtype
from tests.attention import driver
from tests.attention.triton import case
from tests.models import tiny

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
E4M3, E5M2, PER_ROW = SERVED
PAIRS = list(itertools.product(SERVED, repeat=2))
FEW = ((40, 3), (33, 1))
STEPS = {
    "from the start": ((256, 256), (257, 257), (384, 384), (1000, 1000)),
    "behind 1": ((257, 256), (258, 257), (385, 384), (1001, 1000)),
    "behind a tile less 1": ((383, 256), (384, 257), (511, 384), (1127, 1000)),
    "behind a tile": ((384, 256), (385, 257), (512, 384), (1128, 1000)),
    "behind a tile and 1": ((385, 256), (386, 257), (513, 384), (1129, 1000)),
    "behind 5000": ((5256, 256), (5257, 257), (5384, 384)),
    "beside few": (*FEW, (600, 512), (5300, 300), (256, 256)),
}


def need(
    k: KVDtype = E4M3,
    v: KVDtype = PER_ROW,
    *,
    compute: ComputeDtype = ComputeDtype.BFLOAT16,
    page_size: int = 16,
    **layer: Any,
) -> Need:
    asked = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim_k": 128, **layer}
    facts = DeviceFacts(DeviceKind.CUDA, "sm_90")
    return Need(driver.layer(**asked), k, v, compute, page_size, facts)


def check(asked: Need, sequences: tuple[tuple[int, int], ...], seed: int = 0) -> None:
    outcome = run_trial(backend(), Trial(asked, sequences, rounds_long=True, seed=seed), GPU)
    assert outcome.wrong is None, outcome


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("k", "v"), PAIRS, ids=str)
def test_every_pair_of_formats_is_multiplied_as_it_is_stored(
    k: KVDtype, v: KVDtype, head_dim: int, causal: bool
) -> None:
    for compute in (ComputeDtype.BFLOAT16, ComputeDtype.FLOAT16):
        check(need(k, v, compute=compute, head_dim_k=head_dim, causal=causal), STEPS["beside few"])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("name", [E4M3, PER_ROW], ids=str)
@pytest.mark.parametrize("sequences", list(STEPS.values()), ids=list(STEPS))
def test_tiles_end_where_sequences_do(
    sequences: tuple[tuple[int, int], ...], name: KVDtype, causal: bool
) -> None:
    check(need(name, name, causal=causal), sequences)


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (7, 1), (14, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_query_heads_share_keys_in_any_number(head_dim: int, heads: tuple[int, int]) -> None:
    layer = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim_k": head_dim}
    check(need(**layer), STEPS["beside few"])


@pytest.mark.parametrize("page_size", [1, 8, 32, 128, 256])
def test_pages_of_any_size_are_read(page_size: int) -> None:
    check(need(page_size=page_size), STEPS["beside few"])


@pytest.mark.parametrize("seed", range(1, 9))
def test_other_numbers_hold_too(seed: int) -> None:
    check(need(PER_ROW, PER_ROW), ((600, 512), (900, 900)), seed)


def long_case(name: KVDtype, sequences: tuple[tuple[int, int], ...], **options: Any) -> case.Case:
    """Written, with its long sequences listed."""
    x = case.prepare(
        name, heads=(8, 2), head_dims=(128, 128), sequences=sequences, dtype=torch.bfloat16,
        device="cuda", **options,
    )  # fmt: skip
    lengths, new = (np.array(numbers) for numbers in zip(*sequences, strict=True))
    return replace(x, step=list_long(x.step, new, lengths))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("name", SERVED, ids=str)
def test_scores_and_values_may_grow_along_the_keys(name: KVDtype, causal: bool) -> None:
    """Maxima and value scales of the first tiles are far too small for the last ones."""
    x = long_case(name, ((1400, 1400), (900, 600)), causal=causal)
    growth = torch.logspace(-4, 2, 2000, base=2, device="cuda")[:, None, None].bfloat16()
    held = backend()
    held.write(x.cache, x.k * growth, x.v * growth, x.step)
    found = held.attend(x.cache, x.q, x.step, x.params).double()
    right, undecided = rounded.attend(x.cache, x.q, x.step, x.params)
    beyond = ((found - right).norm(dim=-1) - undecided).clamp(min=0)
    assert float((beyond / right.norm(dim=-1)).max()) < 1e-2


@pytest.mark.parametrize("name", SERVED, ids=str)
def test_padding_rows_are_not_written_and_a_repeated_step_gives_the_same_bits(
    name: KVDtype,
) -> None:
    x = long_case(name, ((40, 3), (700, 300), (300, 300)), padding=5)
    held = backend()
    held.write(x.cache, x.k, x.v, x.step)
    out = torch.full_like(x.q, torch.nan)
    fp8_prompts.attend_long(x.cache, x.q, out, x.step, x.params)
    assert out[:3].isnan().all()
    assert out[603:].isnan().all()
    assert out[3:603].isfinite().all()
    # queries as they lie in a product of q, k and v
    wide = torch.randn(len(x.q), 12 * 128, device="cuda", dtype=x.q.dtype)
    strided = wide[:, : 8 * 128].view(len(x.q), 8, 128).copy_(x.q)
    assert not strided.is_contiguous()
    found = held.attend(x.cache, strided, x.step, x.params)
    assert torch.equal(found[3:603], out[3:603])
    assert not found[603:].any()


@pytest.mark.parametrize("name", [E4M3, PER_ROW], ids=str)
def test_rows_beyond_int32_bytes_are_reached(name: KVDtype) -> None:
    x = long_case(name, ((900, 300), (512, 512)))
    held = backend()
    held.write(x.cache, x.k, x.v, x.step)
    skipped = 2**31 // (x.cache.page_size * 2 * 128) + 1
    cache = case.far_away(x.cache, skipped)
    moved = replace(x.step, page_table=x.step.page_table + skipped)
    near = held.attend(x.cache, x.q, x.step, x.params)
    assert torch.equal(held.attend(cache, x.q, moved, x.params), near)


def test_an_engine_takes_it_for_prompts_and_compiles_nothing_for_its_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.build("qwen3", tmp_path, head_dim=64, max_position_embeddings=4096)
    attend_long, given = fp8_prompts.attend_long, []

    def note(cache: Any, q: Any, out: Any, step: Any, params: Any) -> None:
        given.append([one.num_tokens for one in step.long])
        attend_long(cache, q, out, step, params)

    monkeypatch.setattr(fp8_prompts, "attend_long", note)
    llm = LLM(
        path, device="cuda", dtype="bfloat16", kv_cache_dtype="fp8_per_token_head", max_model_len=3000,
        attention_backend="triton_fp8", max_num_seqs=8, kv_cache_memory="64MiB",
    )  # fmt: skip
    assert any("four significant bits" in line for line in llm.warnings)
    compiled = fp8_prompts._kernels.cache_info().misses
    given.clear()
    prompts = [[5 + (7 * i + n) % 110 for i in range(n)] for n in (2500, 3, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found = llm.generate(prompts, params)
    assert [len(one.token_ids) for one in found] == [20] * 3
    assert any(2500 in lengths for lengths in given)
    assert fp8_prompts._kernels.cache_info().misses == compiled
    llm.engine.audit()
