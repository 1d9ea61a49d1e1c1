"""The demo's voice bot, driven in a real browser: connect, be greeted, type, be answered, hang up."""

import contextlib
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from test_serve_page import CHROMIUM
from waiting import PATIENCE_S, free_port, until

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "qwen_megakernel" / "pipecat" / "bot_page.html"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync "
    "--disable-component-update --autoplay-policy=no-user-gesture-required"
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture
def bot_url(tmp_path):
    """The bot of `demo_pipeline.py --bot`, served by a process of its own."""
    port = free_port()
    command = [sys.executable, str(ROOT / "demo_pipeline.py"), "--bot", "--device", "cpu", "--port", str(port)]
    with open(tmp_path / "bot.log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
    url = f"http://localhost:{port}"

    def answers() -> bool:
        assert server.poll() is None, (tmp_path / "bot.log").read_text()
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/status", timeout=PATIENCE_S).close()
            return True
        return False

    try:
        until(answers)
        yield url
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) in (0, 130), (tmp_path / "bot.log").read_text()
        told = (tmp_path / "bot.log").read_text()
        assert not re.search(r"DEBUG|ERROR|Timeout|transceiver|GET /", told), told
        lines = re.findall(r"(?m)^[\d:]{8} \w+ +(.*) first audio \d", told)
        assert lines[:2] == ["(no text)", '"Count to three."'], told
        assert "no sound" not in told
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """The page by itself: what a bot would tell it is said by the test, through the page's own functions."""
    page, problems = browser.new_page(viewport={"width": 760, "height": 620}), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(PAGE.as_uri())
    yield page
    assert not problems
    page.close()


@needs_chromium
def test_a_page_before_the_first_word_says_what_to_do(page):
    """And no figure that is not known."""
    assert "Press Connect" in page.inner_text("#talk")
    assert page.inner_text("#figures").split() == ["spoken", "0.0", "s"]
    page.evaluate("""receive({ type: "bot-tts-text", data: { text: "Hello!" } })""")
    assert page.inner_text("#talk").strip() == "Hello!"


@needs_chromium
def test_a_late_last_word_stays_in_its_sentence(page):
    """It comes while the user's text is on its way to the bot."""
    page.evaluate("""
        const word = (text) => receive({ type: "bot-tts-text", data: { text } });
        receive({ type: "bot-llm-started" });
        ["Five,", "six,"].forEach(word);
        asks("Stop!");
        word("seven.");
        receive({ type: "bot-llm-started" });
        word("Yes.");
    """)
    assert page.locator("#talk p").all_inner_texts() == ["Five, six, seven.", "Stop!", "Yes."]


@needs_chromium
def test_a_long_word_stays_in_its_bubble(page):
    page.evaluate("""() => { asks("x".repeat(400)); say("y".repeat(400), "bot"); }""")
    for bubble in page.locator("#talk p").all():
        assert bubble.evaluate("(bubble) => bubble.scrollWidth <= bubble.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


LISTEN = """
    let sounds = true;
    performance.now = () => 1000;
    context = { get state() { return sounds ? "running" : "suspended"; }, close() {} };
    Object.defineProperty($("audio"), "paused", { get: () => !sounds });
    const tell = (type) => receive({ type });
    const [loudly, quietly] = [0.5, 0].map((peak) => (ms) => hear(peak, performance.now() + ms));
"""


@needs_chromium
@pytest.mark.parametrize(
    "happens, heard",
    [
        ("quietly(10); tell('bot-started-speaking'); loudly(500);", True),
        ("loudly(10); tell('bot-stopped-speaking'); quietly(50); tell('bot-started-speaking'); loudly(500);", True),
        ("loudly(10); quietly(50); loudly(63);", False),  # a pause between two words of what was said before
        ("quietly(50); tell('bot-started-speaking'); tell('bot-stopped-speaking'); loudly(63);", False),
        ("quietly(10); tell('bot-started-speaking'); quietly(500);", False),
        ("quietly(10); tell('bot-started-speaking'); sounds = false; loudly(500);", False),
        ("quietly(10); document.onvisibilitychange(); tell('bot-started-speaking'); loudly(9000);", False),
        ("quietly(10); hangUp(); context = { state: 'running' }; tell('bot-started-speaking'); loudly(9000);", False),
    ],
)
def test_heard_is_what_was_heard(page, happens, heard):
    """The figure goes with the next question, and comes with the sound of its answer."""
    page.evaluate(f"""() => {{ {LISTEN} figure("heard", "1"); asks("Hello."); {happens} }}""")
    assert page.locator("#heard").is_visible() is heard
    if heard:
        assert page.inner_text("#heard") == "500"


@needs_chromium
def test_the_page_talks(browser, bot_url):
    """Words appear while they are heard, an interrupted sentence stops, nothing is fetched from elsewhere."""
    from playwright.sync_api import expect

    page = browser.new_page(viewport={"width": 760, "height": 620})
    page.set_default_timeout(1000 * PATIENCE_S)
    asked_for, problems = [], []
    page.on("request", lambda request: asked_for.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(bot_url)
    page.get_by_role("button", name="Connect").click()
    expect(page.locator("#talk .bot").first).to_contain_text("Hello! What would", timeout=1000 * PATIENCE_S)
    box = page.get_by_role("textbox")
    box.fill("Count to three.")
    box.press("Enter")
    expect(page.locator("#talk .bot").last).to_have_text("One, two, three.", timeout=1000 * PATIENCE_S)
    expect(page.locator("#talk .bot").first).not_to_contain_text("story")  # it was interrupted
    expect(page.locator("#heard")).to_have_text(re.compile(r"^\d+$"), timeout=1000 * PATIENCE_S)
    assert float(page.inner_text("#ttfb")) > 0 and float(page.inner_text("#spoken")) > 0.5
    page.get_by_role("button", name="Hang up").click()
    expect(page.get_by_role("status")).to_have_text("not connected", timeout=1000 * PATIENCE_S)
    page.close()
    assert not problems
    assert all(url.startswith(bot_url) for url in asked_for), "everything comes from the bot's own server"
