"""Turns text as an LLM or a book writes it into text as a speaker should read it. docs/text.md has the rules."""

import re

from spoken_text.cleaning import Clean, Layout
from spoken_text.figures import before_roman
from spoken_text.markdown import Markdown
from spoken_text.maths import Maths
from spoken_text.spelling import short_in_any_language
from spoken_text.spoken import LANGUAGES, language_name, spoken_in
from spoken_text.stage import Stage, is_mark
from spoken_text.tags import Tags
from spoken_text.words import Words

_LETTERS = r"[A-Za-zÀ-ÖØ-öø-ɏЀ-џ]{1,60}"  # Latin and Cyrillic letters, with no digits of any kind
_WORD = rf"{_LETTERS}(?:['’-]{_LETTERS}){{0,5}}[.,;:!?]?"
_PLAIN = re.compile(rf"{_WORD}(?: {_WORD})*")
_MARKS = re.compile("[,;:!?]")
_ROMAN = frozenset("IVXLCХ")
_BEGINS = frozenset("<`~")  # with these begins what is left out


def is_plain(text: str) -> bool:
    """Does the normalizer certainly leave the text as it is? A quick check for words with one blank between and at most
    one mark after each. Most sentences of a bot are like this."""
    if _PLAIN.fullmatch(text) is None or not short_in_any_language().isdisjoint(_MARKS.sub("", text).split(" ")):
        return False
    return _ROMAN.isdisjoint(text) or not before_roman().search(text)


class NormalizerStream:
    """Turns a text in pieces, as an LLM or a book writes it, into what a speaker reads. It leaves out Markdown, tags,
    emojis and most of an address, and writes numbers in words of the language, such as "german", "de" or "de-AT". For
    None, "auto" and any other language numbers stay as they are. However the text is cut, the joined results are the
    same as for the whole text.

    In plain prose it holds back the word in progress and blank lines. A link's target, a tag or an entity waits for its
    end, for at most `LONGEST_HELD` characters. A number waits for the word after it.
    """

    def __init__(self, language: str | None = None, reads_aloud: bool = True, has_markup: bool = True):
        """`reads_aloud`: otherwise numbers, addresses and long words stay as they are. `has_markup`: otherwise signs of
        tags, formulas and Markdown are characters like others."""
        self._clean, self._tags, self._maths, self._markdown = Clean(), Tags(), Maths(), Markdown()
        self._layout, self._reads_aloud, self._has_markup = Layout(), reads_aloud, has_markup
        self.read_in(language)

    def read_in(self, language: str | None) -> None:
        """From here on the text is in this language. Words may not be held back."""
        name = language_name(language) if self._reads_aloud else None
        spoken = spoken_in(name) if name and name in LANGUAGES else None
        self._maths.words = spoken.table("formula") if spoken else {}
        self._words = Words(spoken)

    @property
    def _stages(self) -> list[Stage]:
        if not self._has_markup:
            return [self._words, self._layout] if self._reads_aloud else [self._layout]
        if self._reads_aloud:
            return [self._tags, self._maths, self._markdown, self._words, self._layout]
        return [self._tags, self._markdown, self._layout]

    def push(self, piece: str) -> str:
        """Take a piece, and return what is now final."""
        return self._through(self._clean.push(piece), 0)

    def push_mark(self, mark: str) -> str:
        """Take a private-use character from `FIRST_MARK` on, which stands for something other than text. It comes out
        at its place, unless the text around it is left out."""
        if len(mark) != 1 or not is_mark(mark):
            raise ValueError(f"a mark is one private-use character from U+100000 on, got {mark!r}")
        return self._through(mark, 0)

    def finish(self) -> str:
        """End the text, and return what was held back."""
        return "".join(self._through(stage.end(), place + 1) for place, stage in enumerate(self._stages))

    def settle(self) -> str:
        """A sentence has ended: return what was held back, but for open links, tags, elements and code blocks."""
        return "".join(self._through(stage.settle(), place + 1) for place, stage in enumerate(self._stages))

    @property
    def at_rest(self) -> bool:
        """No link, tag, element, block of code or item of a list is open."""
        return self._tags.at_rest and self._markdown.at_rest and self._maths.at_rest

    @property
    def silent(self) -> bool:
        """The text is left out here, as in `<think>` or a code block."""
        return self._tags.silent or self._markdown.silent

    def pass_over(self, text: str) -> None:
        """Plain text came meanwhile. `text` is its end."""
        self._markdown.pass_over(text)

    def follow(self, before: "NormalizerStream") -> None:
        """Go on within what `before` has left open. `before` is not used afterwards."""
        self._clean, self._tags, self._markdown = before._clean, before._tags, before._markdown
        before._maths.words = self._maths.words  # of this stream's language
        self._maths = before._maths

    def _through(self, text: str, first: int) -> str:
        for stage in self._stages[first:]:
            text = stage.push(text)
        return text


class Silence:
    """Tells which characters the normalizer leaves out together, as in `<think>` or a code block."""

    def __init__(self) -> None:
        self._stream = NormalizerStream(reads_aloud=False)

    def push(self, text: str) -> list[bool]:
        """Take the text's next piece. Is each of its characters left out?"""
        if self._stream.at_rest and _BEGINS.isdisjoint(text):
            self._stream.pass_over(text)  # quick for most texts
            return [False] * len(text)
        return list(map(self._push, text))

    def _push(self, character: str) -> bool:
        before = self._stream.silent
        self._stream.push(character)
        return before and self._stream.silent
