"""Command lines of llama-server and vLLM in Kvant's flags."""

from __future__ import annotations

import re
import shlex

import pytest

from kvant.cli.llama_flags import KV_TYPES, LLAMA_SERVER
from kvant.errors import BadValue
from kvant.kv.names import parse_one
from kvant.plan.speculative_config import parse_speculative_config
from tests.cli.command import kvant
from tests.cli.test_carried_over import translated

FREQUENT = """
    -m -hf -c -ngl -np -b -ub -t -tb -fa -ctk -ctv -n -a -s -md -ts -sm -mg -ot -ncmoe -cmoe -cb -to -v
    --host --port --api-key --jinja --temp --top-k --top-p --min-p --repeat-penalty --no-mmap --mlock
    --metrics --slots --embeddings --reranking --lora --mmproj --chat-template --chat-template-file
    --reasoning-format --reasoning-budget --no-webui --cache-reuse --no-context-shift --rope-scaling
    --slot-save-path --no-warmup --numa --alias --ctx-size --parallel --n-gpu-layers --flash-attn
"""


def line(text: str) -> list[str]:
    ran = kvant("serve", "--from-llama-server", text)
    assert ran.code == 0, ran.err
    return shlex.split(ran.out)


def test_a_usual_line_becomes_the_same_server() -> None:
    found = line(
        "./build/bin/llama-server -m /models/q.gguf -c 8192 -np 4 -ctk q8_0 -ctv q4_0 -ngl 99 -fa on "
        "--host 127.0.0.1 --port 8080 --alias coder --jinja -t 8 --no-mmap --metrics"
    )
    assert found == [
        "kvant", "serve", "/models/q.gguf", "--max-model-len", "8192", "--max-num-seqs", "4",
        "--host", "127.0.0.1", "--port", "8080", "--served-model-name", "coder",
        "--kv-cache-dtype", "int8_per_token_head/int4_per_token_head",
    ]  # fmt: skip
    shown = kvant(*found[1:], "--print-config")
    assert shown.code == 0, shown.err
    assert "max_num_seqs: 4" in shown.out


def test_what_has_no_effect_is_said_with_its_reason() -> None:
    ran = kvant("serve", "--from-llama-server", "llama-server -hf a/b:Q4_K_M -fa --mlock -ngl all")
    assert ran.out == "kvant serve a/b\n"
    assert len([x for x in ran.err.splitlines() if "has no effect" in x]) == 3


@pytest.mark.parametrize("flag", FREQUENT.split())
def test_every_frequent_flag_is_known(flag: str) -> None:
    assert flag in LLAMA_SERVER or flag in ("-ctk", "-ctv")


def test_each_flag_maps_has_no_effect_or_is_refused_with_a_reason() -> None:
    for flag, one in LLAMA_SERVER.items():
        assert bool(one.becomes) + bool(one.no_effect) + bool(one.refused) >= 1, flag
        if one.becomes and one.becomes != ("MODEL",):
            made = [*one.becomes, *(["1"] if one.takes_value else [])]
            assert translated("m", *made)[1:] == made, flag
        if one.refused:
            with pytest.raises(BadValue):
                translated_llama(flag, "strange" if one.takes_value else "")


def translated_llama(flag: str, value: str) -> list[object]:
    from kvant.cli.llama_flags import translate_llama_server

    refused: list[BadValue] = []
    found: list[object] = list(translate_llama_server([flag, *([value] if value else [])], refused))
    for fault in refused:
        raise fault
    return found


def test_all_refused_flags_are_named_at_once_and_the_rest_is_printed() -> None:
    line = "llama-server -m a/b --temp 0.2 -ctk q5_1 --no-such-flag 3 4 --port 80 --lora x"
    ran = kvant("serve", "--from-llama-server", line)
    assert ran.code == 2
    assert ran.out == "kvant serve a/b --port 80\n"
    assert "4 flags of this command line cannot be taken" in ran.err
    for flag in ("--temp 0.2", "-ctk q5_1", "--no-such-flag is not", "--lora x"):
        assert flag in ran.err


def test_formats_of_the_cache_have_names_here() -> None:
    for name in KV_TYPES.values():
        parse_one(name, asked_by="a test")
    with pytest.raises(BadValue, match="q5_1"):
        translated_llama("-ctk", "q5_1")


def test_lora_is_refused_by_name_with_a_way_out() -> None:
    for args in (("m", "--enable-lora"), ("m", "--lora-modules", "a=b")):
        with pytest.raises(BadValue) as fault:
            translated(*args)
        assert "merge" in str(fault.value)


def test_the_way_out_for_a_drafter_is_a_method_that_exists() -> None:
    ran = kvant("serve", "--from-llama-server", "llama-server -m smollm2 -md draft.gguf")
    assert ran.code != 0
    found = re.search(r"--speculative-config '(.+?)'", ran.err)
    assert found is not None, ran.err
    assert parse_speculative_config(found[1]).method.name == "ngram"


def test_a_line_of_vllm_is_printed_in_kvants_flags() -> None:
    ran = kvant(
        "serve", "--from-vllm", "VLLM_USE_V1=1 vllm serve a/b --max_model_len 4k --enforce-eager"
    )
    assert ran.out == "kvant serve a/b --max-model-len 4000\n"
    assert re.search("--enforce-eager has no effect", ran.err)
    for asked in (("--from-vllm", "vllm", "serve"), ("a/b", "--from-vllm", "vllm serve a/b")):
        wrong = kvant("serve", *asked)
        assert wrong.code == 2
        assert "nothing stands beside it" in wrong.err
