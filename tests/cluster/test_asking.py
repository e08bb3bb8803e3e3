"""Where a request goes: prefixes, preferences, verdicts, and metrics of several replicas as one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvant.cluster.asking import BLOCK_BYTES, Affinity, Head, Verdict, prefix_keys, verdict
from kvant.cluster.merged import merged
from kvant.server.anthropic.write import error_body
from kvant.server.api_error import CODES, ApiError, overloaded, unavailable


def _talk(*texts: str, **more: object) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": t} for t in texts], **more}
    ).encode()


@given(st.text(max_size=600), st.text(max_size=600), st.text(max_size=600))
def test_turns_of_one_conversation_share_their_beginning(a: str, b: str, c: str) -> None:
    short, long = prefix_keys(_talk(a, b), None), prefix_keys(_talk(a, b, c), None)
    # The last block of the shorter one may hold its closing bracket.
    assert short[:-1] == long[: max(0, len(short) - 1)]
    assert len(set(long)) == len(long)


def test_other_beginnings_keys_and_salts_share_nothing() -> None:
    text = "x" * 3 * BLOCK_BYTES
    plain = {*prefix_keys(_talk(text), None)}
    assert len(plain) >= 3
    for other in (
        prefix_keys(_talk("y" + text), None),
        prefix_keys(_talk(text), "key"),
        prefix_keys(_talk(text, cache_salt="s"), None),
        prefix_keys(_talk(text, tools=[{"type": "function"}]), None),
    ):
        assert other
        assert not plain & {*other}
    # What is no part of the prompt makes no difference.
    assert {*prefix_keys(_talk(text, temperature=0.5, stream=True), None)} == plain


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"3", b'{"prompt":"a"}', b'{"prompt":null}'])
def test_what_is_no_conversation_has_no_keys(body: bytes) -> None:
    assert prefix_keys(body, None) == ()


def test_a_conversation_returns_to_its_replica_unless_that_is_much_busier() -> None:
    affinity = Affinity(ahead=2)
    assert affinity.prefer((1, 2)) is None
    affinity.begin("a", (1, 2, 3))
    affinity.begin("b", (1, 9))
    assert affinity.prefer((1, 2, 3, 4)) == "a"
    assert affinity.prefer((1, 7)) == "b"  # the last that saw this beginning
    assert affinity.prefer((8,)) is None
    for _ in range(2):
        affinity.begin("a", ())
    assert affinity.prefer((1, 2)) == "a"  # 3 to 1
    affinity.begin("a", ())
    assert affinity.prefer((1, 2)) is None  # 4 to 1
    affinity.end("a")
    assert affinity.prefer((1, 2)) == "a"
    affinity.forget("b")
    affinity.end("b")  # a request that was open at its end
    assert "b" not in {name for name, count in affinity.open.items() if count}


def test_what_was_seen_is_bounded_and_the_oldest_goes_first() -> None:
    affinity = Affinity(most=3)
    affinity.begin("a", (1, 2))
    affinity.begin("b", (3, 4))
    assert [affinity.prefer((key,)) for key in (1, 2, 3, 4)] == [None, "a", "b", "b"]


def _judged(fault: ApiError, status: int | None = None) -> Verdict:
    return verdict(Head(status or fault.status, ()), json.dumps(fault.body).encode())


def test_every_code_has_its_verdict() -> None:
    retried = {code for code, (status, _, _) in CODES.items()
               if _judged(ApiError(status, "m", code=code)) is Verdict.RETRY}  # fmt: skip
    assert retried == {
        "draining", "shutting_down", "engine_died", "engine_restarting", "engine_starting",
        "engine_stopped", "template_process",
    }  # fmt: skip
    around = {code for code, (status, _, _) in CODES.items()
              if _judged(ApiError(status, "m", code=code)) is Verdict.NEXT}  # fmt: skip
    assert around == {"server_full", "response_not_found", "session_not_found"}


def test_errors_without_codes_and_other_answers() -> None:
    def anthropic(fault: ApiError) -> Verdict:
        return verdict(Head(fault.status, ()), json.dumps(_plain(error_body(fault))).encode())

    assert anthropic(overloaded("m", retry_after=1)) is Verdict.NEXT
    assert anthropic(unavailable("m", code="engine_restarting")) is Verdict.RETRY
    assert anthropic(ApiError(404, "m", code="model_not_found")) is Verdict.PASS
    for body in (b"", b"text", b"[]", b'{"error":"text"}', b'{"error":null}'):
        assert verdict(Head(503, ()), body) is Verdict.PASS
    assert verdict(Head(200, ()), b'{"error":{"code":"engine_died"}}') is Verdict.PASS


def _plain(body: object) -> object:
    import msgspec

    return msgspec.to_builtins(body)


def test_metrics_of_replicas_become_one_valid_text() -> None:
    one = (
        "# HELP a_total Things.\n# TYPE a_total counter\na_total 1.0\na_total{of=\"x y\"} 2.0\n"
        "# HELP b Seconds.\n# TYPE b histogram\n"
        'b_bucket{le="1.0"} 1.0\nb_bucket{le="+Inf"} 1.0\nb_count 1.0\nb_sum 0.5\n'
    )  # fmt: skip
    text = merged({"r1": one, "r2": one.replace("1.0\n", "3.0\n")})
    assert text.count("# TYPE a_total counter") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {*families} == {"a", "b"}
    found = {(s.labels["replica"], s.labels.get("of")): s.value for s in families["a"].samples}
    assert found == {("r1", None): 1, ("r1", "x y"): 2, ("r2", None): 3, ("r2", "x y"): 2}
    assert merged({}) == ""
