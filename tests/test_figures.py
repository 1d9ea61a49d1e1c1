"""Every figure of README and docs/ is one of a file in benchmarks/results/, and old ones are told (`make figures`)."""

import datetime
import json
import re
import shutil
import subprocess
from pathlib import Path

import cases
import figures
import pytest
from common import UTC
from figure_tables import CHARTS, OLD, TABLES
from figures import ROOT, Results, Sheet, old_of, write_pages

from qwen_megakernel.trust.verdicts import RECORDS

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
MEASURED = ["README.md", *(f"docs/{name}.md" for name in ("benchmarks", "cards", "pipecat", "kernel", "fp8"))]
NUMBER = re.compile(r"\d[\d.,]*\s?(?:ms|us)\b|(?:RTF|real-time factor)\W+(?:\w+\W+){0,2}?\d|\d\s?x\b", re.I)
NO_MEASUREMENT = (
    "80 ms",  # a frame
    "150 ms, then 20 a token",  # what a simulated LLM takes
    "19 of the first 80 ms",
    "128 blocks x 512 threads",
)


@pytest.fixture
def copy(tmp_path) -> Path:
    """The pages and files."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("pictures"))
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    return tmp_path


def pages(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text() for path in [root / "README.md", *root.glob("docs/*.md")]
    }


def changed(root: Path) -> list[str]:
    """The pages that `make figures` would write anew."""
    before = pages(root)
    write_pages(root)
    return sorted(name for name, text in pages(root).items() if text != before[name])


def add(root: Path, name: str, part: str, size: str, said: dict, committed: str) -> None:
    told = {
        "card": "NVIDIA H200",
        "commit": "0123abc",
        "committed": committed,
        "benchmarks": {part: {size: {"said": said}}},
    }
    (root / "benchmarks" / "results" / f"{name}.json").write_text(json.dumps(told))


def test_the_pages_are_what_make_figures_writes(copy):
    assert changed(copy) == [], "make figures"


@pytest.mark.parametrize("name", MEASURED[:4])
def test_a_changed_number_is_found(copy, name):
    page = copy / name
    marks = [mark for mark in figures.MARK.finditer(page.read_text()) if mark[2] in TABLES]
    start = re.compile(r"\| \d").search(page.read_text(), marks[0].start()).end() - 1
    text = page.read_text()
    page.write_text(text[:start] + str((int(text[start]) + 1) % 10) + text[start + 1 :])
    assert changed(copy) == [name]
    assert page.read_text() == text, "and mended"


def test_a_changed_file_changes_every_page_that_shows_it(copy):
    shown = next(file for file in Results(copy).of("H200", False) if "measure_ttfc" in file.told["benchmarks"])
    path = copy / "benchmarks" / "results" / f"{shown.name}.json"
    told = json.loads(path.read_text())
    told["benchmarks"]["measure_ttfc"]["0.6b"]["said"]["results"]["plain"]["p50"] += 1
    path.write_text(json.dumps(told))
    shown = [name for name, text in pages(ROOT).items() if "<!-- figures: speed -->" in text]
    assert changed(copy) == sorted(shown) and len(shown) == 3, "all show one answer"


def test_every_mark_has_an_end_and_every_table_a_page():
    text = "".join(pages(ROOT).values())
    used = [mark[2] for mark in figures.MARK.finditer(text)]
    assert len(used) == text.count("<!-- figures: ") - text.count("`<!-- figures: ")
    assert set(used) == TABLES.keys() | CHARTS.keys()


@pytest.mark.parametrize("name", MEASURED)
def test_no_time_stands_outside_of_the_marks(name):
    """But in commands, and floors: they are computed."""
    text = figures.MARK.sub("", (ROOT / name).read_text())
    text = re.sub(r"^```.*?^```$|^    .*?$", "", text, flags=re.M | re.S)
    text = re.sub(r"^\|.*\b(?:floor|TB/s)\b.*\n(?:\|.*\n)+", "", text, flags=re.M)
    text = re.sub(r"`[^`\n]*`|^#.*$", "", text, flags=re.M)
    for known in NO_MEASUREMENT:
        text = text.replace(known, "")
    assert NUMBER.findall(text) == [], "put it into a file and a mark, or into docs/log/"


@pytest.mark.parametrize(
    "text",
    ["It takes 3.1 ms.", "1,300 us", "an RTF of 0.2", "real-time factor 0.020", "RTF is about 1", "1.9 x as many"],
)
def test_a_time_is_known_as_one(text):
    assert NUMBER.search(text)


# ---------------------------------------------------------------- how old files are


def test_old_files_are_listed_and_told(copy):
    """To mend it: measure, `make figures`, and take out of OLD what is no longer shown or old."""
    assert old_of(write_pages(copy)) == sorted(OLD)
    for page, text in pages(copy).items():
        for mark in figures.MARK.finditer(text):
            old = [name for name in OLD if f"{name}.json" in mark[0]]
            assert bool(old) == ("Older than the last change of speed" in mark[0]), (page, mark[2])


def test_a_later_change_of_speed_makes_all_files_old(copy):
    (copy / "docs" / "log" / "2099-01-01.md").write_text("Speed: fedcba9, 2099-01-01T00:00:00Z\n")
    timed = {file.name for sheet in write_pages(copy) if sheet.timed for file in sheet.shown}
    old = old_of(write_pages(copy))
    assert set(old) == timed > set(OLD)
    assert set(old) - set(OLD), "what the test above then finds missing in OLD"


def test_a_new_file_is_shown_alone_and_leaves_the_list(copy):
    said = {"results": {"plain": {"p50": 2.5, "p95": 2.75, "n": 50}}}
    add(copy, "nvidia-h200-0123abc", "measure_ttfc", "0.6b", said, "2098-01-01T00:00:00Z")
    old = old_of(write_pages(copy))
    readme = pages(copy)["README.md"]
    assert "2.50, 2.75 <sup>" in readme and "3.10" not in readme and "[0123abc]" in readme
    assert set(old) <= set(OLD)


def test_a_comparison_with_others_is_never_old(copy):
    for path in (copy / "benchmarks" / "results").glob("*.json"):
        told = json.loads(path.read_text())
        told["benchmarks"].pop("measure_peers", None)
        path.write_text(json.dumps(told))
    write_pages(copy)
    peer = {"versions": {"torch": "2.11"}, "frame_ms": 1.5, "memory_gb": None, "rtf": {"1": {"p50": 0.02}}}
    said = {"peers": {"qwen_megakernel": peer | {"ttfc_ms": {"1": {"p50": 4.25, "p95": 5.5}}}}}
    add(copy, "nvidia-h200-0123abc", "measure_peers", "0.6b", said, "2020-01-01T00:00:00Z")
    assert changed(copy) == []
    add(copy, "nvidia-h200-0123abc", "measure_peers", "0.6b", said, "2098-01-01T00:00:00Z")
    assert changed(copy) == ["docs/benchmarks.md"]
    text = pages(copy)["docs/benchmarks.md"]
    assert "| H200, 0.6B, qwen_megakernel | 2.11 | 1.50 | 4.2, 5.5 | 0.020 | – |" in text
    assert 'srcset="pictures/peers-0.6b-dark.svg"' in text and "peers-1.7b-dark" not in text


def test_what_cannot_be_written_is_told(copy):
    add(copy, "nvidia-h200-0123abc", "measure_peers", "0.6b", {}, "unknown")
    with pytest.raises(SystemExit, match="commit"):
        write_pages(copy)
    (copy / "README.md").write_text("<!-- figures: nothing -->\n<!-- /figures -->")
    with pytest.raises(SystemExit, match="README.md.*'nothing'"):
        figures.page(Results(ROOT), "README.md", (copy / "README.md").read_text())
    shutil.rmtree(copy / "docs" / "log")
    with pytest.raises(SystemExit, match="docs/log/ has a line"):
        print(Results(copy).speed)


def test_cells_of_several_files_have_letters():
    """One file needs none."""
    sheet = Sheet(Results(ROOT), "README.md")
    table = sheet.table(TABLES["speed"])
    assert len(sheet.shown) > 1 and "<sup>a</sup>" in table and "\na: NVIDIA" in table
    sheet = Sheet(Results(ROOT), "docs/benchmarks.md", timed=False)
    table = sheet.table(TABLES["change of voice"])
    assert len(sheet.shown) == 1 and "<sup>" not in table and "](../benchmarks/results/" in table


# ---------------------------------------------------------------- the files


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_file_says_what_it_is_of(path):
    told = json.loads(path.read_text())
    assert path.stem.endswith(f"-{told['commit']}"), "and no changes that are in no commit"
    assert {"card", "committed", "date", "source", "left_out", "benchmarks"} <= told.keys()
    git = ["git", "-C", str(ROOT), "show", "-s", "--format=%ct", told["commit"]]
    try:
        done = subprocess.run(git, capture_output=True, text=True)
    except OSError:
        pytest.skip("git is not installed")
    if done.returncode:
        pytest.skip(f"this clone does not know {told['commit']}")
    when = datetime.datetime.fromtimestamp(int(done.stdout), datetime.UTC)
    assert when.strftime(UTC) == told["committed"]


def test_every_file_is_shown(copy):
    assert {path.stem for path in RESULTS} == {file.name for sheet in write_pages(copy) for file in sheet.shown}


def test_what_decides_auto_is_in_a_file():
    """trust/verdicts.py has its own copy, because wheels hold no results."""
    files = Results(ROOT).files
    for record in RECORDS:
        for size, times in record.frame_ms.items():
            part = f"measure_decode > {size} > results > kernel, columns"
            paths = [f"{part} {columns}, position 200 > p50" for columns in (1, 8)]
            found = [tuple(file.value(path) for path in paths) for file in files if record.card in file.told["card"]]
            assert tuple(times) in [tuple(round(ms, 3) if ms else ms for ms in row) for row in found], (
                record.card,
                size,
            )


def test_the_readme_counts_the_cases_of_the_oracle():
    assert f"{len(cases.cases())} cases with small random weights" in (ROOT / "README.md").read_text()
