"""A picture of the page of a running `trtrun serve`, after it has written a text and compared it with plain decoding.

    python scripts/dev/page_screenshot.py http://127.0.0.1:8000/ docs/page.png
    python scripts/dev/page_screenshot.py URL phone.png --size 390x844 --scheme dark --whole

It needs Chromium and the Python package playwright, which are no part of trtrun.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from typing import Any

PROMPT = 'def parse_header(line):\n    """Split a header into its name and value.'
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
         "--disable-component-update"]  # fmt: skip
MILLISECONDS = 300_000.0


def main() -> None:
    """Read the command line and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("picture", help="PNG file to write")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", default="0")
    parser.add_argument("--seed", default="")
    parser.add_argument("--size", default="1280x800", help="of the window")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--whole", action="store_true", help="the whole page, beyond the window")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium: install the package chromium")
    from playwright.sync_api import expect, sync_playwright

    width, height = map(int, arguments.size.split("x"))
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=arguments.scheme)
        page.set_default_timeout(MILLISECONDS)
        expect.set_options(timeout=MILLISECONDS)
        page.goto(arguments.url)
        expect(page.locator("#state")).to_have_text("serving")
        write(page, arguments)
        page.screenshot(path=arguments.picture, full_page=arguments.whole)
        print(page.inner_text(".speeds").replace("\n", " "), "|", page.inner_text("#verdict").replace("\n", " "))
        browser.close()


def write(page: Any, arguments: argparse.Namespace) -> None:
    """Have a text written twice, and wait for the verdict."""
    from playwright.sync_api import expect

    page.get_by_label("Completion").check(force=True)
    page.fill("#prompt", arguments.prompt)
    page.fill("#max-tokens", str(arguments.max_tokens))
    page.fill("#seed", arguments.seed)
    page.locator("#temperature").fill(arguments.temperature)
    page.click("#go")
    expect(page.locator("#news")).to_have_text(re.compile("^Done"))
    page.click("#compare")
    expect(page.locator("#verdict")).to_have_text(re.compile("token for token|differ"))
    page.mouse.move(0, 0)
    page.locator("h1").click()


if __name__ == "__main__":
    main()
