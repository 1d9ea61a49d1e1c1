"""docs/licences.md is what the installed packages say, and what is under the GPL or LGPL can be left out as it says."""

import subprocess
import sys

import licences
import numpy as np
import pytest

from qwen_megakernel import TextFrontEnd, TTSEngine
from qwen_megakernel.errors import RequestError, TextError
from qwen_megakernel.model import resample
from qwen_megakernel.speech.encoders import StreamEncoder
from spoken_text import front_end

HERE = tuple(extra for extra in licences.EXTRAS if extra != "ray")
"""The extras of the environment that tests run in."""
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("num2words", "soxr", "av")))
from qwen_megakernel import TTSEngine
import qwen_megakernel.commands.speak, qwen_megakernel.server.app, qwen_megakernel.server.wyoming.api
with TTSEngine.load("demo", backend="torch", device="cpu") as engine:
    print(len(engine.generate("Hello.", speaker="ada").samples))
"""


def test_the_page_names_what_comes_with_the_package():
    page, here = licences.written(licences.PAGE.read_text(encoding="utf-8")), licences.rows(HERE)
    known = {}
    for name, (licence, part) in page.items():
        if rest := [extra for extra in part.split(", ") if extra != "`[ray]`"]:
            known[name] = licence, ", ".join(rest)
    assert {name: part for name, (_, part) in here.items()} == {name: part for name, (_, part) in known.items()}
    for name, (licence, _) in here.items():
        assert licence in (None, known[name][0]), f"{name}: python tools/licences.py"


def test_the_page_was_made_from_these_notes():
    page = licences.PAGE.read_text(encoding="utf-8")
    assert f"<!-- table -->\n{licences.tables(licences.written(page))}\n<!-- end -->\n" in page


def test_everything_under_a_gnu_licence_has_a_note():
    found = [name for name in licences.rows(HERE) if (d := licences.installed(name)) and licences.has_gnu_licence(d)]
    assert {"num2words", "soxr", "soundfile", "numpy"} <= set(found) <= licences.COPYLEFT.keys()
    assert [name for name in licences.written(licences.PAGE.read_text()) if "GPL" in name] == []


@pytest.mark.slow
def test_it_speaks_without_any_of_them():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) > 1920


def test_without_num2words_the_normalizer_is_refused(monkeypatch):
    monkeypatch.setattr(front_end, "num2words", None)
    with pytest.raises(TextError, match="pip install num2words.*normalize='off'"):
        TextFrontEnd("english", "auto")
    assert TextFrontEnd("english").whole("In 1999.") == ["In 1999."]


def test_without_soxr_other_rates_are_refused(monkeypatch, tiny):
    monkeypatch.setattr(resample, "soxr", None)
    with pytest.raises(RequestError, match="24000 Hz .*8000 Hz .*pip install soxr"):
        StreamEncoder("wav", 24_000, 8000)
    assert len(StreamEncoder("pcm", 24_000, 24_000).encode(np.zeros(10, np.float32))) == 20
    with TTSEngine.load(tiny("base"), backend="torch", device="cpu") as engine:
        with pytest.raises(RequestError, match="16000 Hz .*24000 Hz .*soxr"):
            engine.create_voice((np.random.default_rng(0).uniform(-0.1, 0.1, 32_000), 16_000))
