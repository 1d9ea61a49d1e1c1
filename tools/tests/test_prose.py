"""What tools/prose_counts.py counts."""

from prose_counts import sentences, words, written


def test_sentences_are_told_apart():
    text = "# Head\n\nOne two [three](four.md). `a b c` five:\n\n* six; seven\n* eight\n\n"
    text += "| no | no |\n\n```sh\nno\n```\n\n    no no\n\n<!-- figures: no -->\nno\n<!-- /figures -->\n"
    assert [words(s) for s in sentences(written(text)) if words(s)] == [
        ["One", "two", "three"],
        ["code", "five"],
        ["six", "seven"],
        ["eight"],
    ]
