"""A chat template is a program of the checkpoint: its costs fall on its own request alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvant.errors import RequestError
from kvant.server.template import Render, Renderer
from tests.engine.tiny_chat import TEMPLATE

TALK = ({"role": "user", "content": "hello"},)
GOOD = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_DOUBLE = (
    "{% set x = namespace(s='ab') %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}"
)
BOMBS = {
    "endless loop": _LOOP,
    "number without end": "{{ 9 ** (9 ** 9) }}",
    "large range": "{% for i in range(1000000000) %}{% endfor %}",
    "doubling text": _DOUBLE + "{{ x.s }}",
    "large text": "{{ 'a' * 10 ** 12 }}",
    "walk to a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "walk to the system": "{{ messages.append.__globals__['os'].system('touch ' + path) }}",
    "import": "{% import 'os' as os %}{{ os.system('touch ' + path) }}",
    "five million characters": "{{ 'a' * 5000000 }}",
    "no template": "{% if %}",
    "its own refusal": "{{ raise_exception('no') }}",
}


def _run(work: Callable[[Renderer], Awaitable[Any]], seconds: float = 0.4) -> Any:
    async def all_of_it() -> Any:
        renderer = Renderer(seconds)
        renderer.start()
        try:
            return await work(renderer)
        finally:
            await renderer.stop()

    return asyncio.run(all_of_it())


def test_every_bomb_is_refused_in_time_and_the_next_conversation_is_written(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "mark"

    async def work(renderer: Renderer) -> dict[str, float]:
        took = {}
        assert await renderer.render(Render(TEMPLATE, tuple(TALK), {})) == GOOD
        for name, bomb in BOMBS.items():
            started = time.monotonic()
            with pytest.raises(RequestError) as refused:
                await renderer.render(Render(bomb, tuple(TALK), {"path": str(mark)}))
            took[name] = time.monotonic() - started
            assert refused.value.param == "messages"
            assert len(str(refused.value)) < 700
            assert await renderer.render(Render(TEMPLATE, tuple(TALK), {})) == GOOD
        return took

    took = _run(work)
    assert max(took.values()) < 0.4 + 0.5 + 0.6, took
    assert not mark.exists()


def test_the_limit_of_what_it_writes_holds_at_its_value_and_not_one_beyond() -> None:
    async def work(renderer: Renderer) -> None:
        most = 8 * len(str([*TALK])) + 2**20
        text = await renderer.render(Render("{{ 'a' * size }}", tuple(TALK), {"size": most}))
        assert len(text) == most
        with pytest.raises(RequestError, match=str(most + 1)):
            await renderer.render(Render("{{ 'a' * size }}", tuple(TALK), {"size": most + 1}))

    _run(work, 5.0)


def test_a_cancelled_rendering_leaves_no_answer_for_the_next_request() -> None:
    async def work(renderer: Renderer) -> None:
        slow = "{% for a in range(99999) %}{% endfor %}" * 3 + "slow"
        left = asyncio.create_task(renderer.render(Render(slow, tuple(TALK), {})))
        await asyncio.sleep(0.02)
        left.cancel()
        assert await renderer.render(Render(TEMPLATE, tuple(TALK), {})) == GOOD

    _run(work, 5.0)


def test_a_long_conversation_is_no_bomb() -> None:
    async def work(renderer: Renderer) -> None:
        talk = [{"role": "user", "content": "x" * 50_000}] * 100
        assert len(await renderer.render(Render(TEMPLATE, tuple(talk), {}))) > 5_000_000

    _run(work, 5.0)
