"""Languages by name and code."""

import subprocess
import sys

import pytest

from spoken_text.errors import LanguageError
from spoken_text.languages import PUBLISHED as NAMED
from spoken_text.languages import codes_of, find_language, listed

PUBLISHED = ("auto", *NAMED, "sichuan_dialect")
TUNED = (
    "auto",
    "english",
    "vietnamese",
    "arabic",
    "tr",
    "greek",
    "cantonese",
    "persian",
    "malay",
    "norwegian",
    "klingon talk",
    "dutch",
)


@pytest.mark.parametrize(
    "known, wanted, asked",
    [
        (PUBLISHED, "chinese", "zh ZH zh-CN zho chi cmn cmn-Hans-CN Mandarin Chinese"),
        (PUBLISHED, "english", "en en-US en_GB eng English ENGLISH"),
        (PUBLISHED, "german", "de deu ger de-AT"),
        (PUBLISHED, "french", "fr fra fre"),
        (PUBLISHED, "auto", "auto AUTO"),
        (TUNED, "vietnamese", "vi vie VI-VN Vietnamese"),
        (TUNED, "arabic", "ar ara arb ar-EG Arabic"),
        (TUNED, "tr", "tr tur Turkish TR-tr"),
        (TUNED, "greek", "el ell gre Greek"),
        (TUNED, "cantonese", "yue Cantonese"),
        (TUNED, "persian", "fa fas per Persian Farsi"),
        (TUNED, "malay", "ms msa may Malay ms-MY"),
        (TUNED, "norwegian", "no nor nb nob Norwegian"),
        (TUNED, "dutch", "nl nld dut nl-BE Dutch"),
        (("auto", "nl"), "nl", "nl nld Dutch Flemish"),
    ],
)
def test_a_language_has_many_spellings(known, wanted, asked):
    assert {find_language(spelling, known) for spelling in asked.split()} == {wanted}


@pytest.mark.parametrize(
    "known, asked",
    [(PUBLISHED, "nl"), (PUBLISHED, "vi"), (PUBLISHED, "yue"), (TUNED, "zh"), (TUNED, ""), (TUNED, "xx")],
)
def test_an_unknown_language_is_refused_with_the_known_ones(known, asked):
    with pytest.raises(LanguageError, match=f"unknown language '{asked}'; known: auto, .*english"):
        find_language(asked, known)


def test_codes_are_shown_for_people_and_clients():
    assert codes_of(TUNED) == ["en", "vi", "ar", "tr", "el", "yue", "fa", "ms", "no", "nl"]
    assert listed(TUNED[:5]) == "auto, english (en), vietnamese (vi), arabic (ar), tr"


def test_the_published_languages_need_no_table():
    """Its import takes a fifth of a second."""
    code = (
        "import sys; from spoken_text.languages import NAMES, find_language as f; "
        "assert f('deu', ('auto', *NAMES.values())) == 'german'; assert 'iso639' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
