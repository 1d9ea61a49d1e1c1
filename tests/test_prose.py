"""README and docs/ stay short and plain: no long sentences, and a README that takes three minutes."""

import re
from collections.abc import Iterator

import pytest
from test_docs import FENCE, GUIDES, SPAN, TEXTS

UNCOUNTED = ("docs/log.md", "docs/options.md")
"""The log, and a page that is mostly a table made by a tool."""


def sentences(text: str) -> Iterator[str]:
    """Sentences outside of code blocks, headings and tables. A list's item ends one too."""
    text = FENCE.sub("", text)
    text = re.sub(r"^([#|]|    ).*$", "", text, flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = SPAN.sub("code", text)
    text = re.sub(r"^\s*([*+-]|\d+\.)\s", "\n\n", text, flags=re.M)
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.!?])[\s*)\"]+", " ".join(paragraph.split()))


def written(name: str) -> str:
    """A document without what tools have made."""
    text = re.sub(r"<!-- table -->.*?<!-- end -->", "", TEXTS[name], flags=re.S)
    return re.sub(r"<!-- figures: .*?<!-- /figures -->", "", text, flags=re.S)


def words(text: str) -> list[str]:
    return re.findall(r"[\w'/.-]*\w", text)


def test_sentences_are_told_apart():
    text = "# Head\n\nOne two [three](four.md). `a b c` five:\n\n* six; seven\n* eight\n\n"
    text += "| no | no |\n\n```sh\nno\n```\n\n    no no\n"
    assert [words(s) for s in sentences(text) if words(s)] == [
        ["One", "two", "three"],
        ["code", "five"],
        ["six", "seven"],
        ["eight"],
    ]


@pytest.mark.parametrize("name", GUIDES)
def test_no_sentence_has_more_than_30_words(name):
    assert not [sentence for sentence in sentences(written(name)) if len(words(sentence)) > 30]


def test_the_readme_is_short():
    assert len(TEXTS["README.md"].splitlines()) <= 160
    assert len(written("README.md").split()) <= 1300


def test_the_documents_are_short():
    """Counted as `wc -w` does, without tables that a tool has made."""
    documents = [written(name) for name in TEXTS if name.startswith("docs/") and name not in UNCOUNTED]
    assert len(documents) > 10
    assert sum(len(text.split()) for text in documents) <= 16_000
