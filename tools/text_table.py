"""The table of numbers in docs/text.md, from the rows of the tests: `python tools/text_table.py` writes it."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "packages" / "spoken-text" / "tests"
PAGE = ROOT / "docs" / "text.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->"
LONGEST = 44  # characters of a text; longer ones make the table wide
OTHERS = ("agreement", "case", "counter", "date", "Ordnungszahl")
"""Kinds of rows that are shown in languages other than English."""


def rows() -> list[tuple[str, str, str, str]]:
    """The rows of all tests of numbers: their kind, the language, what is written and what is read."""
    sys.path.insert(0, str(TESTS))
    names = sorted(path.stem for path in TESTS.glob("test_text_numbers*.py"))
    found = [*importlib.import_module("test_text_rules").NUMBERS]
    for name in names:
        found += importlib.import_module(name).ROWS
    return found


def chosen() -> dict[tuple[str, str], tuple[str, str]]:
    """The first row of each kind that is short: all kinds in English, some in other languages."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for kind, language, text, said in sorted(rows(), key=lambda row: (row[1] != "english", row[1])):
        if (language == "english" or kind in OTHERS) and len(text) <= LONGEST and len(said) <= LONGEST:
            found.setdefault((language, kind), (text, said))
    return found


def table_of_numbers() -> str:
    """What is written and what is read, in Markdown."""
    lines = ["| kind | written | read |", "|---|---|---|"]
    for (language, kind), (text, said) in chosen().items():
        name = kind if language == "english" else f"{language.title()}: {kind}"
        lines.append(f"| {name} | `{text}` | {'stays' if said == text else said} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its table made anew."""
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}{table_of_numbers()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
