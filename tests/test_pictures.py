"""The pictures of README and docs/ are those that their commands make, of what was measured."""

import json
import re
import sys
from pathlib import Path

import pytest
from test_serve_page import CHROMIUM

pytest.importorskip("matplotlib")
import charts  # noqa: E402
import diagram  # noqa: E402
import measure_peers  # noqa: E402
import pictures  # noqa: E402

ROOT = Path(__file__).parents[1]
STORED = ROOT / "docs" / "pictures"
BACKGROUNDS = {"light": ["#ffffff", "#f6f8fa"], "dark": ["#0d1117", "#1e2129", "#212830"]}
"""Of the pages of GitHub, of our site, and of GitHub's dimmed theme."""


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text(encoding="utf-8"))


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", charts.SCHEMES)
def test_colours_can_be_seen(scheme):
    """WCAG 2 asks for a contrast of 4.5 for text and of 3 for bars."""
    for use, colour in charts.SCHEMES[scheme].items():
        for background in BACKGROUNDS[scheme]:
            assert contrast(colour, background) >= (3 if use == "other" else 4.5), (use, background)


@pytest.mark.parametrize("scheme", charts.SCHEMES)
def test_colours_of_the_servers_page_can_be_seen(scheme):
    """The same for its text and for the edges of what one can press or fill."""
    page = (ROOT / "qwen_megakernel" / "server" / "page.html").read_text(encoding="utf-8")
    rules = dict(zip(("light", "dark"), re.findall(r":root {(.*?)}", page, flags=re.S), strict=True))
    colours = {name: value for name, value in re.findall(r"--([\w-]+): (#\w+)", rules[scheme])}
    colours = {
        name: "#" + "".join(2 * digit for digit in value[1:]) if len(value) == 4 else value
        for name, value in colours.items()
    }
    for background in ("page", "card"):
        for use, least in {"ink": 4.5, "soft": 4.5, "bad": 4.5, "edge": 3, "accent": 3, "good": 3}.items():
            assert contrast(colours[use], colours[background]) >= least, (use, background)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5


@pytest.mark.slow
def test_the_charts_in_the_docs_show_what_was_measured(tmp_path):
    pictures.draw_charts(tmp_path)
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 2 * len(pictures.CHARTS)
    for path in drawn:
        assert texts(path) == texts(STORED / path.name), f"{path.name}: make pictures"
        assert 'style="fill: none"' in path.read_text(), "transparent"
    for size in ("0.6b", "1.7b"):
        told = json.loads((ROOT / "benchmarks" / "results" / f"nvidia-h200-peers-{size}.json").read_text())
        shown = texts(tmp_path / f"peers-{size}-dark.svg")
        for name, peer in told["peers"].items():
            assert name in shown and measure_peers.label(peer["frame_ms"]) in shown
        assert any(told["commit"] in text for text in shown)


def test_the_diagram_in_the_docs_is_the_one_that_is_drawn(tmp_path):
    diagram.draw(str(tmp_path / "sentence"))
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (STORED / path.name).read_bytes(), f"{path.name}: make pictures"
        assert {"talker", "code predictor", "16 codes", "vocoder"} <= set(texts(path))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_page_is_photographed_light_and_dark(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr(pictures, "PAGES", {"serve_page": pictures.PAGES["serve_page"]})
    pictures.photograph_pages(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {f"{n}-{s}" for n in pictures.PAGES for s in charts.SCHEMES}
    for path in tmp_path.iterdir():
        with Image.open(path) as made, Image.open(STORED / path.name) as stored:
            assert made.size == stored.size
            assert (sum(made.convert("RGB").getpixel((2, 2))) > 382) == path.stem.endswith("light")


def test_pictures_are_small():
    assert all(path.stat().st_size < 150_000 for path in STORED.iterdir())


def test_without_matplotlib_it_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        charts.draw(str(tmp_path / "chart"), lambda pyplot, colours: None)


def test_without_chromium_it_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(pictures.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="install one"):
        pictures.photograph_pages(tmp_path)
