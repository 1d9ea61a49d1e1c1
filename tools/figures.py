"""Write the measured tables of README and docs/, and all charts, from benchmarks/results/ (`make figures`).

    python tools/figures.py [ROOT]

Between `<!-- figures: NAME -->` and `<!-- /figures -->` stands the table or chart NAME of figure_tables.py. A cell
shows the newest file of its card that has it, and "–" if none has. Below a table stand its files with their commits;
letters tell cells of different files apart. A file is old if its commit is older than the newest `Speed:` line in
docs/log/. What compares us with others never shows an old file.
"""

import json
import re
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from figure_tables import CHARTS, OLD, TABLES, Chart, Table  # noqa: E402

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/*.md")
MARK = re.compile(r"(<!-- figures: ([\w. -]+) -->\n).*?(<!-- /figures -->)", re.S)
SPEED = re.compile(r"^Speed: (\w+), ([\dTZ:-]+)$", re.M)
NOTHING = "–"


@dataclass(frozen=True)
class File:
    """What was measured on one card at one commit."""

    name: str
    told: dict

    @property
    def when(self) -> str:
        """When its commit was made, in UTC; such strings sort as times do."""
        return self.told["committed"]

    def value(self, path: str):
        """What stands at "PART > SIZE > key > ..."; None if nothing does. "rate=10" finds a row of a list."""
        part, size, *steps = path.split(" > ")
        found = self.told["benchmarks"].get(part, {}).get(size, {}).get("said")
        for step in steps:
            if isinstance(found, list):
                wanted = [pair.split("=") for pair in step.split(", ")]
                rows = [row for row in found if all(str(row.get(key)).removesuffix(".0") == v for key, v in wanted)]
                found = rows[0] if rows else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return found


class Results:
    """All files, and when speed last changed."""

    def __init__(self, root: Path):
        self.root = root

    @cached_property
    def files(self) -> list[File]:
        """Newest first."""
        paths = sorted((self.root / "benchmarks" / "results").glob("*.json"))
        files = [File(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
        for file in files:
            if not re.fullmatch(r"[\dT:-]+Z", file.when):
                raise SystemExit(f"{file.name}: its commit's time is unknown, so nobody knows whether it is old")
        return sorted(files, key=lambda file: file.when, reverse=True)

    @cached_property
    def speed(self) -> tuple[str, str]:
        """Commit and time of the last change of speed."""
        days = (path.read_text(encoding="utf-8") for path in (self.root / "docs" / "log").glob("*.md"))
        lines = [line for text in days for line in SPEED.findall(text)]
        if not lines:
            raise SystemExit('no file of docs/log/ has a line "Speed: COMMIT, TIME"')
        return max(lines, key=lambda line: line[1])

    def is_old(self, file: File) -> bool:
        return file.when < self.speed[1]

    def of(self, card: str, new: bool) -> Iterator[File]:
        """Files of a card, newest first. `new`: none that is old."""
        for file in self.files:
            if re.search(rf"\b{card}\b", file.told["card"]) and not (new and self.is_old(file)):
                yield file


class Sheet:
    """What one mark shows, and the files that it was taken from."""

    def __init__(self, results: Results, page: str, timed: bool = True):
        """`timed`: a change of speed makes its files old."""
        self.results, self.timed, self.shown = results, timed, []
        self.up = "../" if page.startswith("docs/") else ""

    def cell(self, fields: dict, new: bool) -> tuple[str, File | None]:
        """The last step of a path may name several keys: "p50 & p95"."""
        start, _, last = fields["path"].format(**fields).rpartition(" > ")
        for file in self.results.of(fields["card"], new):
            values = [file.value(f"{start} > {key}") for key in last.split(" & ")]
            if any(value is not None for value in values):
                if file not in self.shown:
                    self.shown.append(file)
                texts = [NOTHING if value is None else format(value, fields["form"]) for value in values]
                return ", ".join(texts), file
        return NOTHING, None

    def table(self, table: Table) -> str:
        """In Markdown. A row of which nothing was measured is left out."""
        rows = {}
        for label, row in table.rows.items():
            cells = []
            for column in table.columns.values():
                fields = {"path": table.path, "form": table.form} | row | column
                cells.append(self.cell(fields, table.comparison))
            if any(file for _, file in cells):
                rows[label] = cells
        if not rows:
            return f"Not measured since the last change of speed, {self.results.speed[0]}."
        lines = [f"| {table.head} | {' | '.join(table.columns)} |", f"|---|{'---:|' * len(table.columns)}"]
        for label, cells in rows.items():
            texts = [text + (f" <sup>{self.letter(file)}</sup>" if self.letter(file) else "") for text, file in cells]
            lines.append(f"| {label} | {' | '.join(texts)} |")
        return "\n".join([*lines, "", self.caption()])

    def letter(self, file: File | None) -> str:
        """None is needed where all comes from one file."""
        return string.ascii_lowercase[self.shown.index(file)] if file and len(self.shown) > 1 else ""

    def caption(self) -> str:
        """The files, and which are old."""
        named = []
        for file in self.shown:
            link = f"[{file.told['commit']}]({self.up}benchmarks/results/{file.name}.json)"
            named.append(f"{f'{self.letter(file)}: ' * (len(self.shown) > 1)}{file.told['card']}, commit {link}")
        old = ", ".join(self.letter(file) or "all" for file in self.old())
        told = f" Older than the last change of speed ({self.results.speed[0]}): {old}." if old else ""
        return f"{'; '.join(named)}.{told}"

    def old(self) -> list[File]:
        return [file for file in self.shown if self.timed and self.results.is_old(file)]

    def picture(self, name: str, chart: Chart) -> str:
        file = newest(self.results, chart)
        if file is None:
            return f"Not measured since the last change of speed, {self.results.speed[0]}."
        self.shown.append(file)
        folder = "pictures" if self.up else "docs/pictures"
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.svg">'
        light = f'<img src="{folder}/{name}-light.svg" alt="{chart.alt}">'
        return f"<picture>{dark}{light}</picture><br>\n{self.caption()}"


def newest(results: Results, chart: Chart) -> File | None:
    """The file that a chart shows."""
    for file in results.files:
        sizes = file.told["benchmarks"].get(chart.part, {})
        if any("said" in row and (chart.size is None or size == chart.size) for size, row in sizes.items()):
            if not (chart.comparison and results.is_old(file)):
                return file
    return None


def page(results: Results, name: str, text: str) -> tuple[str, list[Sheet]]:
    """The page with its marks written anew, and what they show."""
    sheets: list[Sheet] = []

    def between(mark: re.Match) -> str:
        what = mark[2]
        if what not in TABLES and what not in CHARTS:
            raise SystemExit(f"{name}: figure_tables.py has no table or chart {what!r}")
        sheets.append(Sheet(results, name, (TABLES | CHARTS)[what].timed))
        made = sheets[-1].table(TABLES[what]) if what in TABLES else sheets[-1].picture(what, CHARTS[what])
        return f"{mark[1]}{made}\n{mark[3]}"

    return MARK.sub(between, text), sheets


def write_pages(root: Path) -> list[Sheet]:
    """What all marks show."""
    results, sheets = Results(root), []
    for path in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        before = path.read_text(encoding="utf-8")
        after, shown = page(results, path.relative_to(root).as_posix(), before)
        sheets += shown
        if after != before:
            path.write_text(after, encoding="utf-8")
    return sheets


def old_of(sheets: list[Sheet]) -> list[str]:
    """The names of the old files that they show."""
    return sorted({file.name for sheet in sheets for file in sheet.old()})


def draw_charts(root: Path, folder: Path) -> None:
    """All charts that there are results for. Pictures of the others are deleted."""
    results = Results(root)
    for name, chart in CHARTS.items():
        file = newest(results, chart)
        if file is None:
            for path in folder.glob(f"{name}-*.svg"):
                path.unlink()
        else:
            chart.draw(str(folder / name), file.told)


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    old = old_of(write_pages(root))
    draw_charts(root, root / "docs" / "pictures")
    if old != sorted(OLD):
        print(f"OLD in tools/figure_tables.py must name {', '.join(old) or 'nothing'}; it names {', '.join(OLD)}")


if __name__ == "__main__":
    main()
