"""Takes the picture of the page at / that README shows: `python scripts/page_picture.py URL FILE.png`.

Needs `pip install kvant[browser]` and Debian's chromium. Start the server on a quiet machine:

    kvant serve smollm2 --kv-cache-dtype fp8_per_token_head --kv-cache-rule 0,-1:int8_per_token_head \\
        --kv-cache-memory 24MiB
"""

from __future__ import annotations

import json
import shutil
import sys

from playwright.sync_api import sync_playwright

QUESTIONS = ("Name three rivers of Europe.", "Which of them is the longest? One short sentence.")
LAST = "Write four lines about the sea."
"""The prompt whose answer is still running in the picture."""
SHARED = {
    "method": "POST",
    "headers": {"content-type": "application/json"},
    "body": json.dumps(
        {
            "messages": [{"role": "user", "content": "Tell me about rivers and seas. " * 30}],
            "n": 3,
            "max_tokens": 200,
            "seed": 1,
        }
    ),
}
WAIT_MS = 120_000


def main(url: str, out: str) -> None:
    with sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(url)
        page.wait_for_selector("#layers div")
        page.locator("#parameters summary").click()
        page.locator("#temperature").fill("0")
        page.locator("#max_tokens").fill("80")
        page.locator("#parameters summary").click()
        for text in QUESTIONS:
            page.locator("#text").fill(text)
            page.locator("#send").click()
            page.wait_for_selector("#send:not([disabled])", timeout=WAIT_MS)
        page.locator("#text").fill(LAST)
        page.locator("#send").click()
        # Two answers to one prompt, so that pages are shared.
        page.evaluate(f"void fetch('/v1/chat/completions', {json.dumps(SHARED)})")
        page.wait_for_timeout(3_500)
        page.screenshot(path=out)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
