"""The score against the test suites of others."""

import importlib.util
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "score_suites.py"
SPEC = importlib.util.spec_from_file_location("score_suites", TOOL)
assert SPEC and SPEC.loader
score_suites = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(score_suites)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("date.txt", "5 km => five kilometers\n", [("5 km", "five kilometers")]),
        ("date.txt", "fünf Meter~5 m\n# 1~2\n\n", [("5 m", "fünf Meter")]),
        ("date.tsv", "5 km\tfive kilometers\n", [("5 km", "five kilometers")]),
        ("date.jsonl", '{"in": "5 km", "out": "five kilometers"}\n[1]\n', [("5 km", "five kilometers")]),
        ("test_a.py", 'assert f("5 km", 1) == "five kilometers"\nassert f(x) == 1\n', [("5 km", "five kilometers")]),
    ],
)
def test_cases_are_found_in_every_form(tmp_path, name, text, found):
    path = tmp_path / "en" / name
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    assert [*score_suites.cases(path)] == found
    assert score_suites.language_of(path) == "english"


@pytest.mark.parametrize(
    ("said", "spoken", "language", "verdict"),
    [
        ("Five kilometers.", "five kilometers", "english", "equal"),
        ("zweihundert Meter", "zwei hundert meter", "german", "equal"),
        ("one hundred and five", "one hundred five", "english", "other"),
        ("5 km", "five kilometers", "english", "left"),
        ("five", "six", "english", "wrong"),
        ("两点", "二点", "chinese", "other"),
    ],
)
def test_a_reading_is_judged_by_its_words(said, spoken, language, verdict):
    assert score_suites.verdict(said, spoken, language) == verdict


def test_the_table_has_a_row_for_each_kind(tmp_path, monkeypatch, capsys):
    (tmp_path / "de").mkdir()
    (tmp_path / "de" / "units.txt").write_text("5 km => fünf Kilometer\n7 => acht\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["score_suites.py", str(tmp_path), "--show", "wrong"])
    score_suites.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("wrong german units: '7' -> 'sieben'")
    assert lines[-1].split() == ["german", "units", "2", "50.0%", "0.0%", "0.0%", "50.0%"]
