"""Make the pictures of pages and the diagram for README and docs/, light and dark (`make pictures`).

    python tools/pictures.py [FOLDER]

The pages are those of the demo voice on this machine's CPU, in a headless Chromium. tools/figures.py draws the charts.
"""

import argparse
import contextlib
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import diagram  # noqa: E402
from common import free_port, server, wait_until_ready  # noqa: E402

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync "
    "--disable-component-update --autoplay-policy=no-user-gesture-required"
)
PATIENCE_MS = 180_000


@contextlib.contextmanager
def bot() -> Iterator[str]:
    """The URL of `demo_pipeline.py --bot`, in its own process."""
    port = free_port()
    command = [sys.executable, str(ROOT / "demo_pipeline.py"), "--bot", "--device", "cpu", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until_ready(f"http://localhost:{port}/status", lambda: process.poll() is None)
            yield f"http://localhost:{port}"
        finally:
            process.terminate()


def use_serve_page(page: Page) -> None:
    expect(page.locator("#state")).to_have_text("ready")
    page.fill("#seed", "7")
    page.get_by_role("button", name="Speak").click()
    expect(page.locator("#rtf")).to_contain_text(".")  # all of it was made
    expect(page.locator("#state")).to_have_text("ready")  # and heard


def use_bot_page(page: Page) -> None:
    page.get_by_role("button", name="Connect").click()
    said, box = page.locator("#talk .bot"), page.get_by_role("textbox")
    expect(said.first).to_contain_text("Hello! What would")
    for question, answer in {"Count to seven.": "seven.", "Tell me a story.": "keeper who counted"}.items():
        box.fill(question)
        box.press("Enter")
        expect(said.last).to_contain_text(answer)


PAGES = {
    "serve_page": (lambda: server("demo", "--ui", "--device", "cpu"), use_serve_page, 760, 904),
    "bot_page": (bot, use_bot_page, 760, 620),
}
"""Name -> what serves it, what its user does before the picture, width, height."""


def photograph_pages(folder: Path) -> None:
    """
    Raises:
        SystemExit: there is no Chromium.
    """
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("the pages' pictures need chromium, chromium-browser or google-chrome: install one")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS.split())
        for name, (serve, use, width, height) in PAGES.items():
            page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=2)
            with serve() as url:
                page.goto(url)
                use(page)
                shots = {}
                for scheme in ("light", "dark"):
                    page.emulate_media(color_scheme=scheme)
                    shots[scheme] = page.screenshot()
                page.close()
            for scheme, shot in shots.items():
                picture = Image.open(io.BytesIO(shot)).convert("RGB").quantize(256)
                picture.save(folder / f"{name}-{scheme}.png", optimize=True)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "pictures")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    diagram.draw(str(folder / "sentence"))
    photograph_pages(folder)


if __name__ == "__main__":
    main()
