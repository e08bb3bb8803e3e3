"""The page at /: what it is allowed to do, and a real browser that talks through it."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Server, build_model

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

COUNTED = ("held", "idle", "usable")


def test_the_page_has_nothing_from_elsewhere_and_no_handlers(server: Server) -> None:
    answer = server.get("/")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = answer.body.decode()
    assert not re.search(r"https?://", text), "no other origin is named"
    assert not re.search(r"<[^>]+\s(on\w+|style)=", text), "the policy forbids them"
    assert "innerHTML" not in text, "text of a model is never markup"


def test_the_page_needs_no_key_and_the_numbers_do(guarded: Server) -> None:
    no_key = {"Authorization": ""}
    assert guarded.send("GET", "/", headers=no_key).status == 200
    assert guarded.send("GET", "/v1/kv/live", headers=no_key).status == 401
    assert guarded.get("/v1/kv/live").status == 200


def test_live_numbers_count_requests_and_pages(server: Server) -> None:
    before = server.get("/v1/kv/live").json
    prompt = "to be or not to be " * 4
    for _ in range(2):
        server.complete(prompt, max_tokens=5, ignore_eos=True)
    after = server.get("/v1/kv/live").json
    assert after["status"] == "ready"
    assert after["generated"] == before["generated"] + 10
    assert after["requests"][0]["new"] == 5
    assert after["requests"][0]["cached"] > 0
    assert after["pages"]["idle"] > 0
    assert after["pages"]["held"] == 0
    assert after["fraction"] is None
    (group,) = after["pages"]["groups"]
    assert group == {"kept": "every token", "shared": 0, **{k: after["pages"][k] for k in COUNTED}}
    with server.open_stream(max_tokens=2000) as stream:
        stream.readline()
        live = server.get("/v1/kv/live").json
        assert live["requests"][0]["cached"] is None
        assert live["pages"]["held"] > 0
        assert live["pages"]["groups"][0]["held"] == live["pages"]["held"]
    server.wait_idle(5)
    with server.open_stream(prompt=prompt, max_tokens=2000, n=2) as stream:
        stream.readline()
        ended = time.monotonic() + 10
        while not (live := server.get("/v1/kv/live").json)["pages"]["groups"][0]["shared"]:
            assert time.monotonic() < ended, live
    server.wait_idle(5)


# -- in a browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = build_model(tmp_path_factory.mktemp("paged"))
    rules = ("--kv-cache-dtype", "fp8_per_token_head", "--kv-cache-rule", "0:int8_per_token_head")
    with Server(model, ("--api-key", "sesame", *rules), key="sesame") as server:
        yield server


@pytest.fixture
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="pip install kvant[browser]")
    with api.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_talks_stops_and_sees_the_cache(
    locked: Server, browser: Any, theme: str, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme=theme)
    faults: list[str] = []
    page.on("pageerror", lambda fault: faults.append(str(fault)))
    page.on(
        "console",
        lambda said: faults.append(said.text) if "Content Security" in said.text else None,
    )
    page.goto(f"http://127.0.0.1:{locked.port}/")
    page.get_by_label("API key").fill("sesame")
    page.get_by_role("button", name="Use it").click()
    page.wait_for_selector("#layers div")
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert "fp8_per_token_head" in page.locator("#formats").inner_text()
    assert "int8_per_token_head" in page.locator("#formats").inner_text()

    page.locator("#parameters summary").click()
    page.locator("#temperature").fill("0")
    page.locator("#max_tokens").fill("24")
    for text in ("Hello", "And again?"):
        page.locator("#text").fill(text)
        page.get_by_role("button", name="Send").click()
        page.wait_for_selector("#send:not([disabled])")
    notes = page.locator(".message.assistant .notes").all_inner_texts()
    assert len(notes) == 2
    assert all(re.search(r"\d+ tokens · .*prompt tokens cached", note) for note in notes), notes
    assert not page.locator(".fault").count()
    shown = page.locator("#pages").inner_text()
    for word in ("every token", "used", "shared", "cached", "free"):
        assert word in shown
    page.wait_for_selector("#requests tr:nth-child(2)")

    page.locator("#max_tokens").fill("3500")
    page.locator("#text").fill("a long one")
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector(
        ".message.assistant:last-child:not(.waits)"
    )  # the page keeps no empty one
    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector("#send:not([disabled])")
    locked.wait_idle(5)

    page.locator("#max_tokens").fill("100000")
    page.locator("#text").fill("too long")
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector(".fault")
    assert "a sequence may have" in page.locator(".fault").inner_text()
    assert page.locator("#text").input_value() == "too long", "it can be mended and sent again"

    answer = "Some **bold** `a < b`:\n\n## A title\n```py\nx = '**no**'\n```\nEnd"
    shown = page.evaluate(
        """(answer) => {
          const [whole, parts] = [make("div"), make("div")];
          new Written(whole, false).push(answer);
          const written = new Written(parts, false);
          for (const piece of answer) written.push(piece);
          const shows = (box) => [...box.querySelectorAll("strong, code")].map((one) => one.textContent);
          return [shows(whole), shows(parts), whole.textContent === parts.textContent];
        }""",
        answer,
    )
    marked = ["bold", "a < b", "A title\n", "x = '**no**'\n"]
    assert shown == [marked, marked, True]
    said = page.locator(".message").count()
    page.reload()
    page.wait_for_selector(".message.assistant")
    assert page.locator(".message").count() == said - 2, "all but the one that failed"
    assert faults == []
    wanted = os.environ.get("PAGE_PICTURE")
    target = Path(wanted) / f"page-{theme}.png" if wanted else tmp_path / "page.png"
    page.screenshot(path=str(target))
    assert target.stat().st_size > 10_000
    page.set_viewport_size({"width": 420, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    page.close()
