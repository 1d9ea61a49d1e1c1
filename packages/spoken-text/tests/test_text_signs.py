"""Each rule states the signs without which it matches nothing; the table of docs/text.md shows what the tests say."""

import pytest
from text_table import PAGE, page, rows

from spoken_text.numbers import Numbers
from spoken_text.spoken import LANGUAGES, spoken_in


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_rule_matches_no_text_without_one_of_its_signs(language):
    rules = [(needed, pattern) for needed, pattern, _ in Numbers(spoken_in(language))._rules if needed]
    texts = {text for _, _, written, said in rows() for text in (written, said)}
    texts |= {word for text in texts for word in text.split()}
    assert sum(any(pattern.search(text) for text in texts) for _, pattern in rules) > len(rules) / 2
    missed = [
        (pattern.pattern, text)
        for text in texts
        for needed, pattern in rules
        if needed.isdisjoint(text) and pattern.search(text)
    ]
    assert not missed


def test_the_page_shows_the_rows():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run tools/text_table.py"
