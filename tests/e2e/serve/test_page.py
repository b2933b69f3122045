"""The page in headless Chromium, against a really served pair: what a reader sees, types and hears."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers import ONE_PROCESS, Server, serving, wait_until, write_config

from trtrun import LLM, SamplingParams

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: install the package chromium"),
]
PROMPT = "def main("
KEY = "the key of this test"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
SLOW = 120_000.0
"""Milliseconds that a text may take on a busy machine."""


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there no engine starts: one that is forked is back sooner than the page asks for it."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def server(pair: Path, hold: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "keys").write_text(KEY)
    config = write_config(
        folder / "serve.yaml",
        pair,
        ONE_PROCESS,
        scheduler={"max_batch_size": 4},
        kv_cache={"max_tokens": 8192},
        speculation={"pacing": "fixed"},  # every round drafts, however slow the machine is
        server={"api_key_file": str(folder / "keys"), "max_restarts": 10},
    )
    program = ["tests/e2e/serve/programs/held_engine.py"]
    with serving(config, program=program, environment={"HOLD": str(hold)}) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, server: Server) -> Iterator[Any]:
    """The page, with its key given; nothing may be logged as wrong or asked of another host."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(SLOW)
    playwright.expect.set_options(timeout=SLOW)
    problems: list[str] = []
    hosts: set[str] = set()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.goto(server.url + "/")
    key = page.get_by_label("This server wants an API key")
    key.fill(KEY)
    key.press("Enter")
    playwright.expect(page.locator("#state")).to_have_text("serving")
    playwright.expect(key).to_be_hidden()
    # Where the checkpoint has a chat template the page begins with chats.
    playwright.expect(page.get_by_label("Chat", exact=True)).to_be_checked()
    page.get_by_label("Completion").check(force=True)
    yield page
    page.close()
    # Refusals are logged by the browser itself.
    assert [text for text in problems if not text.startswith("Failed to load resource")] == []
    assert hosts == {server.url.split("/")[2]}


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """A page of the test's own."""
    with opened(browser, server) as page:
        yield page


@pytest.fixture(scope="module")
def looked_at(browser: Any, server: Server) -> Iterator[Any]:
    """A page for tests that only look at it."""
    with opened(browser, server) as page:
        yield page


def generate(page: Any, prompt: str, max_tokens: int = 48) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("Tokens, at most").fill(str(max_tokens))
    page.get_by_label("Prompt", exact=True).press("Control+Enter")
    playwright.expect(page.locator("#news")).to_have_text(re.compile(r"^Done: \d+ tokens"))


def tokens_of(page: Any) -> list[tuple[str, str]]:
    """The text and the origin of each token that is shown."""
    spans = page.locator("#text .token")
    return [(span.text_content(), span.get_attribute("class").split()[1]) for span in spans.all()]


def test_a_text_is_shown_by_how_its_tokens_came_and_compared(page: Any, llm: LLM) -> None:
    (completion,) = llm.generate([PROMPT], SamplingParams(max_tokens=48))[0].completions
    generate(page, PROMPT)
    tokens = tokens_of(page)
    assert "".join(text for text, _ in tokens) == completion.text
    assert len(tokens) == len(completion.token_ids)
    assert page.locator("#text").text_content() == PROMPT + completion.text
    origins = "".join(origin for _, origin in tokens)
    assert "a" in origins and set(origins) <= set("arbp")
    told = [int(count.text_content()) for count in page.locator("#legend b").all()]
    assert told == [origins.count(letter) for letter in "arbp"]
    rounds = len(re.findall("a*[rbp]|a+$", origins))
    assert page.locator("#round-count").text_content() == str(rounds)
    assert page.locator("#acceptance-length").text_content() == f"{len(tokens) / rounds:.2f}"
    plot = page.locator("#plot")
    assert plot.get_attribute("aria-label").startswith(f"{rounds} rounds, ")
    plot.focus()
    plot.press("ArrowRight")
    playwright.expect(page.locator("#round-hint")).to_have_text(re.compile("^Round 1: "))
    assert page.locator(".of-round").count() == len(re.findall("a*[rbp]|a+$", origins)[0])
    page.get_by_role("button", name="Decode plainly and compare").click()
    verdict = page.locator("#verdict .same")
    playwright.expect(verdict).to_have_text(f"The same text, token for token ({len(tokens)}).")
    playwright.expect(page.locator("#news")).to_contain_text("The same text, token for token")
    assert page.locator("#compare").text_content() == "Decode plainly again"
    page.locator("#prompt").press("Control+Enter")
    playwright.expect(page.locator("#compare")).to_have_text("Decode plainly and compare")
    playwright.expect(page.locator("#news")).to_have_text(re.compile("^Done"))
    assert float(page.locator("[data-run=speculative] b").text_content()) > 0


def test_columns_end_together_and_lines_have_scales(page: Any) -> None:
    page.set_viewport_size({"width": 1440, "height": 1000})
    for max_tokens in (4, 400):
        generate(page, PROMPT, max_tokens)
        bottoms = page.evaluate(
            "() => [...document.querySelectorAll('main > .column')].map((column) =>"
            " column.lastElementChild.getBoundingClientRect().bottom)"
        )
        assert abs(bottoms[0] - bottoms[1]) <= 1
    for name in ("running", "waiting", "kv"):
        assert page.locator(f"#{name}-line text").count() == 2
        assert page.locator(f"#{name}-line").bounding_box()["width"] > 200


def test_sampling_speculation_and_draft_length_are_what_the_form_says(page: Any, server: Server) -> None:
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda sent: bodies.append(sent.post_data_json) if sent.method == "POST" else None)
    page.get_by_label("Temperature").fill("0.8")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Draft length").fill("2")
    generate(page, PROMPT, 24)
    page.get_by_role("switch", name="Speculation").uncheck()
    assert page.get_by_label("Draft length").is_disabled()
    drafted = tokens_of(page)
    page.locator("#go").click()
    playwright.expect(page.locator("#text .token:not(.p)")).to_have_count(0)
    playwright.expect(page.locator("#text .token")).to_have_count(len(drafted))
    assert [text for text, _ in tokens_of(page)] == [text for text, _ in drafted]
    common = {"temperature": 0.8, "seed": 7, "max_tokens": 24, "prompt": PROMPT, "return_token_origins": True}
    for body, draft_len in zip(bodies, (2, 0), strict=True):
        assert common.items() <= body.items() and body["draft_len"] == draft_len


def test_texts_are_never_html_and_refusals_are_told(page: Any) -> None:
    generate(page, "<img src=x onerror=alert(1)><b>&lt;", 8)
    assert page.locator("#text img, #text b").count() == 0
    assert page.locator("#text").text_content().startswith("<img src=x onerror=alert(1)><b>&lt;")
    page.get_by_label("Prompt", exact=True).fill("x " * 2000)
    page.locator("#go").click()
    playwright.expect(page.get_by_role("alert")).to_contain_text("tokens")
    generate(page, PROMPT, 8)
    playwright.expect(page.get_by_role("alert")).to_be_hidden()


def test_a_chat_a_stop_and_a_phone(page: Any, server: Server) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    for place, title in enumerate(("Prompt", "Text", "Speed", "Rounds")):  # what compares stands under the text
        playwright.expect(page.locator("main h2").nth(place)).to_have_text(title)
    for control in page.locator("main button, main input:visible, #theme").all():
        if control.get_attribute("type") not in ("radio", "checkbox"):  # their labels are what a finger meets
            assert control.bounding_box()["height"] >= 43.5, control
    for typed in page.locator("main textarea, main input[type=number]").all():
        assert typed.evaluate("(element) => parseFloat(getComputedStyle(element).fontSize)") >= 16
    page.get_by_label("Chat").check(force=True)
    generate(page, "write a loop", 16)
    assert page.locator(".prompt-echo").count() == 0 and tokens_of(page)
    page.get_by_label("Completion").check(force=True)
    page.get_by_label("Tokens, at most").fill("900")
    page.locator("#go").click()
    playwright.expect(page.locator("#text .token").first).to_be_visible()
    page.keyboard.press("Escape")
    playwright.expect(page.locator("#go")).to_be_enabled()
    assert page.locator("#compare").is_disabled(), "there is no whole text to compare with"
    server.wait_idle()


def test_a_text_goes_on_behind_a_lost_engine(page: Any, server: Server, hold: Path, llm: LLM) -> None:
    (completion,) = llm.generate([PROMPT], SamplingParams(max_tokens=200))[0].completions
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_label("Tokens, at most").fill("200")
    page.locator("#go").click()
    playwright.expect(page.locator("#text .token").nth(8)).to_be_attached()
    hold.touch()
    os.kill(server.engine(), signal.SIGKILL)
    playwright.expect(page.locator("#state")).to_have_text("the engine is starting")
    playwright.expect(page.locator("#ranks li.starting")).to_have_count(3)
    hold.unlink()
    playwright.expect(page.locator("#news")).to_have_text(re.compile(r"^Done: \d+ tokens"))
    assert page.locator("#text").text_content() == PROMPT + completion.text
    playwright.expect(page.locator("#version")).to_contain_text("restarts of the engine: 1")
    # The pause is no speed of either way.
    page.locator("#compare").click()
    playwright.expect(page.locator("#verdict")).to_have_text("The same text, token for token (200).")
    playwright.expect(page.locator("[data-run=speculative] .first")).to_contain_text("started again meanwhile")


def show_or_hide(page: Any, is_visible: bool) -> None:
    """Let the page believe that its tab is in front of others, or behind them."""
    state = "visible" if is_visible else "hidden"
    page.evaluate(
        """(state) => {
          Object.defineProperty(document, "visibilityState", { configurable: true, get: () => state });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        state,
    )


def lose_engine(server: Server, hold: Path) -> None:
    hold.touch()
    os.kill(server.engine(), signal.SIGKILL)
    wait_until(lambda: server.get("/health").status_code == 503 or None, "the loss of the engine")
    hold.unlink()


def test_a_hidden_page_knows_which_of_its_texts_an_engine_was_lost_in(page: Any, server: Server, hold: Path) -> None:
    """It does not ask how the server stands while nobody looks."""
    show_or_hide(page, False)
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_label("Tokens, at most").fill("200")
    page.locator("#go").click()
    playwright.expect(page.locator("#text .token").nth(8)).to_be_attached()
    lose_engine(server, hold)
    playwright.expect(page.locator("#news")).to_have_text(re.compile(r"^Done: \d+ tokens"))
    first = page.locator("[data-run=speculative] .first")
    playwright.expect(first).to_contain_text("started again meanwhile")
    page.locator("#compare").click()
    playwright.expect(page.locator("#verdict")).to_have_text("The same text, token for token (200).")
    # The next loss is before the next text, and none of its business.
    lose_engine(server, hold)
    wait_until(lambda: server.get("/health").is_success or None, "an engine")
    show_or_hide(page, True)
    page.locator("#go").click()
    playwright.expect(page.locator("#news")).to_have_text(re.compile(r"^Done: \d+ tokens"))
    playwright.expect(first).to_have_text(re.compile(r"in all$"))
    page.locator("#compare").click()
    playwright.expect(page.locator("#verdict")).to_have_text(
        re.compile(
            r"^(?:[\d.]+ times as fast|\d+ % (?:faster|slower)|As fast as plain decoding)"
            r"The same text, token for token \(200\)\.$"
        )
    )


def test_the_form_follows_a_server_that_comes_back_with_other_limits(page: Any) -> None:
    page.get_by_label("Chat").check(force=True)

    def answer(route: Any) -> None:
        status = route.fetch().json()
        status["speculation"]["draft_len"], status["chat"] = 2, False
        route.fulfill(json=status)

    page.route("**/status", answer)
    playwright.expect(page.get_by_label("Draft length")).to_have_attribute("max", "2")
    playwright.expect(page.get_by_label("Chat")).to_be_disabled()
    playwright.expect(page.get_by_text("No chat template in this checkpoint")).to_be_visible()
    playwright.expect(page.get_by_label("Completion")).to_be_checked()
    generate(page, PROMPT, 8)
    page.unroute_all(behavior="wait")  # else a page that is closed takes the answer from one that is just on its way


TELL_RATIOS = """async () => {
  const { SpeedView, Run } = await import(new URL("page/speeds.js", document.baseURI));
  const run = (seconds) => Object.assign(new Run(), {
    first: 1, last: 1 + 1000 * seconds, numFirst: 1, tokens: [1, 2, 3], isWhole: true,
  });
  return [1 / 3, 1, 1.004, 1 / 0.94, 0.8].map((seconds) => {
    const view = new SpeedView(document.querySelector(".speeds"), document.createElement("p"));
    view.set("plain", run(1));
    view.set("speculative", run(seconds));
    return view.verdict.querySelector("b").textContent;
  });
}"""


def test_a_ratio_is_told_as_what_it_is(looked_at: Any) -> None:
    told = looked_at.evaluate(TELL_RATIOS)
    same = "As fast as plain decoding"
    assert told == ["3.00 times as fast", same, same, "6 % slower", "25 % faster"]


READ_LINES = """async () => {
  const { Line } = await import(new URL("page/engine.js", document.baseURI));
  const svg = document.querySelector("#running-line");
  return [1, 3, 7, 0].map((number) => {
    new Line(svg).add(number, 8);
    const [area, path] = svg.querySelectorAll("path");
    const y = Number(path.getAttribute("d").split(",")[1]);
    const top = svg.querySelector("text").textContent;
    return [top, (Number(top) * (svg.clientHeight - 1.5 - y)) / (svg.clientHeight - 3)];
  });
}"""


def test_a_count_stands_where_its_lines_scale_says(looked_at: Any) -> None:
    tops, numbers = zip(*looked_at.evaluate(READ_LINES), strict=True)
    assert tops == ("2", "4", "8", "8") and numbers == pytest.approx((1, 3, 7, 0), abs=0.1)


def test_ranks_and_schemes(looked_at: Any) -> None:
    ranks = looked_at.locator("#ranks")
    for role in ("orchestrator", "draft", "target"):
        playwright.expect(ranks.get_by_label(f"{role} ranks")).to_contain_text("cpu:0")
    for role in ("draft", "target"):
        playwright.expect(ranks.get_by_label(f"{role} ranks")).to_contain_text(f"model {role}")
    playwright.expect(looked_at.locator("#running")).to_have_text("0 of 4")
    playwright.expect(looked_at.locator("#kv")).to_have_text("0.0 %")
    grounds = []
    for _ in range(3):
        grounds.append(looked_at.evaluate("() => getComputedStyle(document.body).backgroundColor"))
        looked_at.locator("#theme").click()
    assert len(set(grounds)) == 2


def test_a_server_that_is_gone_is_shown_as_gone(looked_at: Any) -> None:
    playwright.expect(looked_at.locator("#running")).to_have_text("0 of 4")
    looked_at.route("**/status", lambda route: route.abort())
    playwright.expect(looked_at.locator("#state")).to_have_text("no answer")
    for number in ("#running", "#waiting", "#kv"):
        playwright.expect(looked_at.locator(number)).to_have_text("–")
    playwright.expect(looked_at.locator("#ranks li.unknown")).to_have_count(3)
    looked_at.unroute("**/status")
    playwright.expect(looked_at.locator("#running")).to_have_text("0 of 4")
    playwright.expect(looked_at.locator("#ranks li.up")).to_have_count(3)


def test_a_draft_tree_is_shown_as_one(looked_at: Any) -> None:
    def answer(route: Any) -> None:
        status = route.fetch().json()
        status["speculation"] |= {"method": "medusa", "draft_nodes": 6, "draft_parents": [-1, -1, 0, 1, 1, 3]}
        route.fulfill(json=status)

    playwright.expect(looked_at.locator("#method")).to_have_text("a draft model, up to 4 draft tokens a round")
    looked_at.route("**/status", answer)
    said = "Medusa heads, trees of up to 6 draft tokens a round, 4 deep"
    playwright.expect(looked_at.locator("#method")).to_have_text(said)
    tree = looked_at.get_by_role("img", name="A draft: a tree of 6 tokens, 2, 3, 1 by depth")
    playwright.expect(tree.locator("circle:not(.root)")).to_have_count(6)
    ends = tree.locator("line").evaluate_all(
        "lines => lines.map((line) => ['x1', 'y1', 'x2', 'y2'].map((name) => +line.getAttribute(name)))"
    )
    places = [(x, y) for _, _, x, y in ends]
    assert [ends[node][:2] for node in (2, 3, 4, 5)] == [list(places[parent]) for parent in (0, 1, 1, 3)]
    assert len(set(places)) == 6 and [y for _, y in places] == [27, 27, 49, 49, 49, 71]
    looked_at.unroute_all(behavior="wait")
