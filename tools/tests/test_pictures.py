"""The pictures of README and docs/ are those that their commands make, of what was measured."""

import re
import sys
from pathlib import Path

import pytest
from test_serve_page import CHROMIUM

pytest.importorskip("matplotlib")
import charts  # noqa: E402
import diagram  # noqa: E402
import figures  # noqa: E402
import measure_drift  # noqa: E402
import measure_load  # noqa: E402
import measure_peers  # noqa: E402
import pictures  # noqa: E402
from figure_tables import CHARTS  # noqa: E402

ROOT = Path(__file__).parents[2]
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
    figures.draw_charts(ROOT, tmp_path)
    names = [name for name, chart in CHARTS.items() if figures.newest(figures.Results(ROOT), chart)]
    assert {path.stem for path in tmp_path.iterdir()} == {f"{n}-{s}" for n in names for s in charts.SCHEMES}
    for name in names:
        for scheme in charts.SCHEMES:
            path = tmp_path / f"{name}-{scheme}.svg"
            assert texts(path) == texts(STORED / path.name), f"{path.name}: make figures"
            assert path.read_text().count("<path") == (STORED / path.name).read_text().count("<path")
            assert 'style="fill: none"' in path.read_text(), "transparent"


def test_a_chart_of_what_is_not_shown_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "CHARTS", {"peers-0.6b": figures.Chart("no part", "", lambda target, told: None)})
    (tmp_path / "peers-0.6b-dark.svg").touch()
    (tmp_path / "load-dark.svg").touch()
    figures.draw_charts(ROOT, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["load-dark.svg"]


@pytest.mark.slow
def test_charts_name_what_they_show(tmp_path):
    row = {"p50": 4.31, "p95": 5.5, "n": 20}
    ours = {"frame_ms": 1.4, "ttfc_ms": {"1": row}, "rtf": {"1": {"p50": 0.026}}}
    theirs = {"frame_ms": 177.0, "ttfc_ms": {"whole": {"p50": 8957.0}}, "rtf": {"whole": {"p50": 1.78}}}
    told = {"machine": "NVIDIA H200, torch 2.11", "commit": "940b5c6", "size": "0.6b", "floor_ms": 0.7}
    measure_peers.draw(str(tmp_path / "peers"), told | {"peers": {"qwen_megakernel": ours, "others": theirs}})
    shown = texts(tmp_path / "peers-dark.svg")
    assert {"qwen_megakernel", "others", "1.4", "177", "4.31", "8,957", "0.026", "1.78"} <= set(shown)
    assert any("0.6B, one stream, NVIDIA H200, commit 940b5c6" in text for text in shown)
    rows = [{"rate": rate, "p50": 4.0, "p95": 5.0 + rate, "without_gap": 1.0} for rate in (10, 20)]
    rows += [{"live": live, "p50": 4.0, "p95": live, "without_gap": 1.0 if live < 900 else 0.5} for live in (64, 1000)]
    sizes = {size: {"said": {"results": rows}} for size in ("0.6b", "1.7b")}
    measure_load.draw(str(tmp_path / "load"), {"card": "C", "commit": "x", "benchmarks": {"measure_load": sizes}})
    shown = texts(tmp_path / "load-light.svg")
    assert {"live listeners", "1.7B, p50"} <= set(shown) and shown.count("0.6B, p95") == 2
    assert not {"800", "1000"} & set(shown), "half of the 1,000 hear gaps"
    pieces = [{"at_s": 20.0 * i, "pace": 60.0, "pitch": 170.0 + i, "loudness": -21.0} for i in range(5)]
    said = {"model": "demo", "speaker": "ada", "longest": 300, "results": {"pieces": pieces}}
    measure_drift.draw(str(tmp_path / "drift"), said)
    assert {"pitch, Hz", "minutes of speech"} <= set(texts(tmp_path / "drift-light.svg"))


def test_the_diagram_in_the_docs_is_the_one_that_is_drawn(tmp_path):
    diagram.draw(str(tmp_path / "sentence"))
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (STORED / path.name).read_bytes(), f"{path.name}: make pictures"
        assert {"talker", "code predictor", "16 codes", "10 vocoder"} <= set(texts(path))


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
