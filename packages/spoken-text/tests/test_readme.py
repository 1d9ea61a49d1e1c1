"""What README shows is what comes out, and every word of the languages' files is used."""

import doctest
import re
import tomllib
from pathlib import Path

import pytest
from running import run_python

from spoken_text.spoken import LANGUAGES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spoken_text"
CODE = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
NAMED = set(re.findall(r"(?:[\"']|\b(?:self|spoken)\.)([a-z_]+)", CODE))


def test_the_examples_of_the_readme():
    failed, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False, encoding="utf-8")
    assert tried > 10 and not failed


@pytest.mark.parametrize("code", LANGUAGES.values())
def test_the_code_asks_for_every_list_and_table(code):
    data = tomllib.loads((PACKAGE / code / "words.toml").read_text(encoding="utf-8"))
    names = {*data, *data["lists"]}
    inflected = "(?:kings|queens)_[gdaip]|before_[mf]|(?:feminine|masculine)_ends"
    assert not {name for name in names - NAMED if not re.fullmatch(inflected, name)}


def test_a_sentence_in_a_named_language_needs_few_modules():
    code = "import sys; from spoken_text.__main__ import main; main(['--language', 'de', 'Das kostet 5 €.'])"
    printed = run_python(f"{code}; print({{'torch', 'regex', 'py3langid', 'iso639', 'numpy'}} & {{*sys.modules}})")
    assert printed == "Das kostet fünf Euro.\nset()\n"
