"""Measures a server under load as its clients see it, in an open loop: arrivals ignore its speed.

Requests arrive at random moments (a Poisson process of a given rate), whether or not others have been
answered. Each has different random tokens, and all ask for the same number of tokens. Times count from the
moment a request was due, so a late client makes the server look worse, never better.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from kvant.errors import NotServable, WayOut
from kvant.measure.http_stream import Cut, Refused, Target, fetch, stream

AUDIT_SECONDS = 3.0
"""Seconds to wait until an idle server has audited its pages."""


@dataclass(frozen=True, slots=True)
class Load:
    """rate: requests per second, over `seconds`. input, output: tokens. vocabulary: prompt ids are below
    it, but not in the lowest tenth, which often has special tokens and single bytes.

    aborts: share of clients that disconnect, at a random token of the answer.
    """

    rate: float
    seconds: float
    input: int
    output: int
    aborts: float = 0.0
    vocabulary: int = 32000


@dataclass(slots=True)
class _Seen:
    """One client's record. first, last: seconds after it was due. gaps: seconds between events."""

    outcome: str = "failed"
    first: float | None = None
    last: float = 0.0
    late: float = 0.0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    why: str = ""

    @property
    def seconds_a_token(self) -> float:
        """Seconds per token after the first one."""
        return 0.0 if self.first is None else (self.last - self.first) / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of times in seconds."""

    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Round:
    """Results of one load. ttft: due to first token. itl: event to event (an event may have several tokens).

    tpot: first to last token divided by the tokens between, per answer, to compare servers that send
    several tokens per event. e2e: due to last token. Both cover complete answers; aborted ones count
    in ttft and itl until they end. seconds: until the last client left. late: maximum delay of the
    load generator. server: increase of the server's own metrics, if it has Kvant's.
    """

    load: Load
    requests: int
    outcomes: dict[str, int]
    seconds: float
    output_tokens: int
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    late: float
    failures: tuple[str, ...]
    server: dict[str, float]

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


async def model_of(target: Target) -> str:
    """Returns the first model that a server lists.

    Raises NotServable without an answer or for an unexpected one.
    """
    try:
        found: dict[str, Any] = json.loads(await fetch(target, "/v1/models"))
        return str(found["data"][0]["id"])
    except (Refused, Cut, OSError, ValueError, LookupError, TypeError) as fault:
        raise NotServable(
            f"{target.authority} names no model",
            why=f"GET {target.base}/v1/models: {fault or type(fault).__name__}",
            ways_out=(WayOut("start the server, or name the model with --model"),),
        ) from None


async def warm_up(
    target: Target, model: str | None, load: Load, requests: int, *, seed: int
) -> None:
    """Sends `requests` requests like the load's, one after another; ignores their outcome."""
    model = model or await model_of(target)
    for number in range(requests):
        numbers = random.Random(f"{seed} warm-up {number}")
        await _client(target, model, replace(load, aborts=0.0), time.perf_counter(), numbers)


async def run(target: Target, model: str | None, load: Load, *, seed: int | str) -> Round:
    """Offers the load, waits for every answer, and asks the server for its counters.

    model: None for the first model that the server lists.
    """
    model = model or await model_of(target)
    numbers = random.Random(seed)
    dues = _arrivals(load, numbers)
    before = await _metrics(target)
    start = time.perf_counter()
    clients = [
        _client(target, model, load, start + due, random.Random(numbers.getrandbits(64)))
        for due in dues
    ]
    seen = await asyncio.gather(*clients)
    seconds = time.perf_counter() - start
    after = await _audited(target, before)
    outcomes = {name: sum(one.outcome == name for one in seen) for name in OUTCOMES}
    return Round(
        load=load,
        requests=len(seen),
        outcomes=outcomes,
        seconds=seconds,
        output_tokens=sum(one.tokens for one in seen),
        ttft=_percentiles([one.first for one in seen if one.first is not None]),
        itl=_percentiles([gap for one in seen for gap in one.gaps]),
        tpot=_percentiles([one.seconds_a_token for one in seen if one.outcome == "completed"]),
        e2e=_percentiles([one.last for one in seen if one.outcome == "completed"]),
        late=max((one.late for one in seen), default=0.0),
        failures=tuple(sorted({one.why for one in seen if one.why}))[:5],
        server={name: after[name] - before.get(name, 0.0) for name in sorted(after)},
    )


OUTCOMES = ("completed", "aborted", "refused", "failed")
_COUNTERS = ("kvant:page_audits_total", "kvant:page_audit_faults_total",
             "kvant:num_preemptions_total", "kvant:requests_aborted_total",
             "kvant:kv_saturated_values_total")  # fmt: skip
_HELD = "kvant:pages_held"


def _arrivals(load: Load, numbers: random.Random) -> list[float]:
    """Returns moments of arrival, in seconds after the start."""
    found: list[float] = []
    at = numbers.expovariate(load.rate)
    while at < load.seconds:
        found.append(at)
        at += numbers.expovariate(load.rate)
    return found


async def _client(
    target: Target, model: str, load: Load, due: float, numbers: random.Random
) -> _Seen:
    prompt = [numbers.randrange(load.vocabulary // 10, load.vocabulary) for _ in range(load.input)]
    leaves_after = numbers.randrange(load.output) if numbers.random() < load.aborts else None
    patience = numbers.random()
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    seen = _Seen(late=time.perf_counter() - due)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        if leaves_after == 0:  # before any event has come
            async with asyncio.timeout(patience):
                await _read(target, body, due, None, seen)
        else:
            await _read(target, body, due, leaves_after, seen)
    except TimeoutError:
        seen.outcome = "aborted"
    except Refused as refused:
        seen.outcome = "refused" if refused.status in (429, 503) else "failed"
        seen.why = "" if seen.outcome == "refused" else str(refused)[:200]
    except (Cut, OSError, ValueError) as fault:
        seen.why = f"{type(fault).__name__}: {fault}"
    return seen


async def _read(
    target: Target, body: dict[str, Any], due: float, leaves_after: int | None, seen: _Seen
) -> None:
    """Records events until the answer ends or `leaves_after` events have come."""
    events, usage = 0, None
    async with aclosing(stream(target, "/v1/completions", body)) as answer:
        async for event in answer:
            said: dict[str, Any] = json.loads(event.data)
            if "error" in said:
                raise Cut(str(said["error"])[:200])
            usage = said.get("usage") or usage
            if not said.get("choices"):
                continue
            events += 1
            at = event.at - due
            if seen.first is None:
                seen.first = at
            else:
                seen.gaps.append(at - seen.last)
            seen.last, seen.tokens = at, events
            if events == leaves_after:
                seen.outcome = "aborted"
                return
    if usage is None:
        raise Cut("the stream ended without usage")
    seen.tokens = int(usage["completion_tokens"])
    if seen.tokens != body["max_tokens"]:
        raise Cut(f"{seen.tokens} tokens came, {body['max_tokens']} were asked")
    seen.outcome = "completed"


async def _metrics(target: Target) -> dict[str, float]:
    """Returns the relevant counters by name; empty for servers without them."""
    try:
        text = await fetch(target, "/metrics")
    except (Refused, Cut, OSError):
        return {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in _COUNTERS or name == _HELD:
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


async def _audited(target: Target, before: dict[str, float]) -> dict[str, float]:
    """Returns the counters after the idle server has audited its pages."""
    after = await _metrics(target)
    ends = time.perf_counter() + AUDIT_SECONDS
    audits = _COUNTERS[0]
    while (
        after and after.get(audits, 0.0) <= before.get(audits, 0.0) and time.perf_counter() < ends
    ):
        await asyncio.sleep(0.2)
        after = await _metrics(target)
    return after


def _percentiles(values: list[float]) -> Percentiles | None:
    if not values:
        return None
    values = sorted(values)

    def at(share: float) -> float:
        return values[min(len(values) - 1, int(share * len(values)))]

    return Percentiles(at(0.5), at(0.9), at(0.99), values[-1])
