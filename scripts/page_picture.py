"""Take the picture of the page at / that the README shows: `python scripts/page_picture.py URL FILE.png`.

Needs `pip install kvant[browser]` and Debian's chromium. Start the server on a quiet machine:

    kvant serve smollm2 --kv-cache-dtype fp8_per_token_head --kv-cache-rule 0,-1:int8_per_token_head \\
        --kv-cache-memory 256MiB
"""

from __future__ import annotations

import shutil
import sys

from playwright.sync_api import sync_playwright

QUESTIONS = ("Name three rivers of Europe.", "Which of them is the longest? One short sentence.")
LAST = "Write four lines about the sea."
"""Still being answered in the picture."""
WAIT_MS = 120_000


def main(url: str, out: str) -> None:
    with sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
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
        page.wait_for_timeout(2_000)
        page.screenshot(path=out)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
