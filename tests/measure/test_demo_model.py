"""The demo model, whose matrices keep their blocks: beside transformers, and with its drafter."""

from __future__ import annotations

from kvant.engine.llm import LLM
from kvant.measure.beside_transformers import beside_transformers
from kvant.models.demo import DEMO_NAME
from kvant.sampling.sampling_params import SamplingParams


def test_transformers_reads_the_same_weights_as_numbers() -> None:
    llm = LLM(
        DEMO_NAME, dtype="float32", kv_cache_memory="16MiB", max_num_seqs=1, max_model_len=256
    )
    rows = beside_transformers(llm, (1,), context=8, steps=1, rounds=1)
    assert {row.engine: row.weights for row in rows} == {
        "transformers": "float32",
        "Kvant": "as stored",
    }


def test_drafts_of_its_drafter_are_accepted() -> None:
    llm = LLM(
        DEMO_NAME, kv_cache_memory="32MiB", max_num_seqs=1, max_model_len=256,
        speculative_config={"method": "dflash", "model": "smollm2-dflash"},
    )  # fmt: skip
    prompt = llm.encode_chat([{"role": "user", "content": "Tom has 3 boxes of 8 pens. How many?"}])
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24))
    assert llm.metrics()["spec_decode_mean_acceptance_length"] > 2
