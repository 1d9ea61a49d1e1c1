"""Maths and citations in text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_megakernel import TextFrontEnd

ROWS = [
    ("english", "Let $x_1 = 2$ hold.", "Let x one equals two hold."),
    ("english", "It is \\(E = mc^2\\).", "It is E equals mc squared."),
    ("english", "So $\\frac{a}{b} \\times \\alpha$ is it.", "So a over b times alpha is it."),
    ("english", "The variable $x$ is free.", "The variable x is free."),
    ("german", "Es gilt $x = y$.", "Es gilt x gleich y."),
    ("russian", "Пусть $x = y$.", "Пусть x равно y."),
    (None, "Let $x_1 = 2$ hold.", "Let x one equals two hold."),  # the text's language is found
    ("english", "Look: $$\\int_0^1 x dx$$ Done.", "Look: Done."),
    ("english", "Look: \\[a + b\\] Done.", "Look: Done."),
    ("english", "It is big.[1] Also [2, 3] and [4-6].", "It is big. Also and ."),
    ("english", "It grew【4†source】 fast【12:3†a.pdf】.", "It grew fast."),
    ("chinese", "【重要】增长了【4†source】。", "【重要】增长了。"),
    ("english", "Set a[3] = 5 and b[0].", "Set a three equals five and b zero."),
    ("english", "See [1](http://example.com/2) now.", "See one now."),
    ("english", "Both.[1][2]", "Both."),
    ("english", "So \\boxed{x^2 + 1} and \\textbf{a well-known word}.",
     "So x squared plus one and a well-known word."),
    ("english", "C:\\newer and \\textual", "C newer and \\textual"),
    ("english", "A \\boxed{without an end", "A \\boxed{without an end"),
    ("english", "A [link](http://example.com) and [x].", "A link and x."),
    ("english", "$HOME is set, and $PATH too.", "$HOME is set, and $PATH too."),
    ("english", "It costs $5 and then $10.", "It costs five dollars and then ten dollars."),
]  # fmt: skip


@pytest.mark.parametrize("language, text, said", ROWS)
def test_a_row(language, text, said):
    assert TextFrontEnd(language, normalize="auto").whole(text) == [said]


BITS = r"$|$$|\(|\)|\[|\]|x|_1|^2|=| |word |[1]|[|5|【|†|】|\boxed{|}|(|.".split("|")


@given(st.lists(st.sampled_from([*BITS, "\n"]), max_size=40))
def test_cuts_do_not_matter_and_prose_stays(parts):
    text = "a" + "".join(parts)
    front_end = TextFrontEnd("english", normalize="auto", lenient=True)
    stream = front_end.stream()
    said = [piece for part in text for piece in stream.push(part)] + stream.finish()
    assert "".join(said) == "".join(front_end.whole(text)) and text.count("word") >= "".join(said).count("word")


def test_a_formula_that_never_ends_is_given_out():
    text = "a $x + " + "y + " * 100
    assert "y plus y" not in TextFrontEnd("english", normalize="auto").whole(text)[0]
    assert TextFrontEnd("english", normalize="auto").whole(text)[0].count("y") == 100
