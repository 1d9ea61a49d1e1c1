"""Reports how long README and the pages of docs/ are, and their longest sentences: `python tools/prose_counts.py`."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONG = 30  # words of a sentence that is shown


def written(text: str) -> str:
    """A document without code blocks and without what tools have made."""
    text = re.sub(r"<!-- (?:table|figures: .*?) -->.*?<!-- (?:end|/figures) -->", "", text, flags=re.S)
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def sentences(text: str) -> Iterator[str]:
    """Sentences of a document outside of headings, tables and indented code. A list's item ends one too."""
    text = re.sub(r"^([#|]|    ).*$", "", text, flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]+`", "code", text)
    text = re.sub(r"^\s*([*+-]|\d+\.)\s", "\n\n", text, flags=re.M)
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.!?])[\s*)\"]+", " ".join(paragraph.split()))


def words(text: str) -> list[str]:
    return re.findall(r"[\w'/.-]*\w", text)


def main() -> None:
    print(" words  lines  page")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        print(f"{len(words(written(text))):6} {len(text.splitlines()):6}  {path.relative_to(ROOT)}")
        for sentence in sentences(written(text)):
            if len(words(sentence)) > LONG:
                print(f"{len(words(sentence)):20} words: {sentence}")


if __name__ == "__main__":
    main()
