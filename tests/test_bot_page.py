"""The demo's voice bot, driven in a real browser: connect, be greeted, type, be answered, hang up."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from test_pipecat_transports import free_port

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync "
    "--disable-component-update --autoplay-policy=no-user-gesture-required"
)


@pytest.fixture
def bot_url(tmp_path):
    """The bot of `demo_pipeline.py --bot`, served by a process of its own."""
    port = free_port()
    command = [sys.executable, str(ROOT / "demo_pipeline.py"), "--bot", "--device", "cpu", "--port", str(port)]
    with open(tmp_path / "bot.log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
    url, deadline = f"http://localhost:{port}", time.monotonic() + 60
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/status", timeout=1).close()
                break
            except OSError:
                told = (tmp_path / "bot.log").read_text()
                assert server.poll() is None and time.monotonic() < deadline, told
                time.sleep(0.2)
        yield url
        server.send_signal(signal.SIGINT)
        assert server.wait(20) in (0, 130), (tmp_path / "bot.log").read_text()
        assert " ERROR " not in (tmp_path / "bot.log").read_text()
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_talks(bot_url):
    """Words appear while they are heard, an interrupted sentence stops, nothing is fetched from elsewhere."""
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        page = browser.new_page(viewport={"width": 760, "height": 620})
        asked_for, problems = [], []
        page.on("request", lambda request: asked_for.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(bot_url)
        page.get_by_role("button", name="Connect").click()
        expect(page.locator("#talk .bot").first).to_contain_text("Hello! What would", timeout=30000)
        box = page.get_by_role("textbox")
        box.fill("Count to seven.")
        box.press("Enter")
        expect(page.locator("#talk .bot").last).to_have_text("One, two, three, four, five, six, seven.", timeout=30000)
        expect(page.locator("#talk .bot").first).not_to_contain_text("story")  # it was interrupted
        expect(page.locator("#heard")).to_have_text(re.compile(r"^\d+$"))
        assert float(page.inner_text("#ttfb")) > 0 and float(page.inner_text("#spoken")) > 0.5
        if picture := os.environ.get("BOT_PAGE_PICTURE"):
            box.fill("Tell me a story.")
            box.press("Enter")
            time.sleep(4)
            page.screenshot(path=picture)
        page.get_by_role("button", name="Hang up").click()
        expect(page.get_by_role("status")).to_have_text("not connected")
        browser.close()
    assert not problems
    assert all(url.startswith(bot_url) for url in asked_for), "everything comes from the bot's own server"
