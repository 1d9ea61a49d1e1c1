"""Text as an LLM or a book writes it -> text as a speaker should read it. docs/text.md has the rules."""

import re

from qwen_megakernel.text.cleaning import Clean, Layout
from qwen_megakernel.text.markdown import Markdown
from qwen_megakernel.text.spoken import spoken_in
from qwen_megakernel.text.stage import is_mark
from qwen_megakernel.text.tags import Tags
from qwen_megakernel.text.words import Words

_LETTERS = r"[A-Za-zÀ-ÖØ-öø-ɏЀ-џ]{1,60}"  # of Latin and Cyrillic: no digit of any kind is among them
_WORD = rf"{_LETTERS}(?:['’-]{_LETTERS}){{0,5}}[.,;:!?]?"
_PLAIN = re.compile(rf"{_WORD}(?: {_WORD})*")


def is_plain(text: str) -> bool:
    """Is it surely what the normalizer would make of it? Words, one blank between, each with a mark behind it at most.
    This is quick, and most sentences of a bot are so."""
    return _PLAIN.fullmatch(text) is not None


class NormalizerStream:
    """The normalizer for a text in pieces. The results joined are what the whole text gives, however it is cut.

    Of plain prose it holds back the word in progress, and a blank line. A link's target, a tag or an entity waits until
    it ends, for `LONGEST_HELD` characters at most. A number waits for the word behind it.
    """

    def __init__(self, language: str | None = None):
        """
        Args:
            language: as for `Normalizer`.
        """
        self._clean = Clean()
        self._stages = [Tags(), Markdown(), Words(spoken_in(language)), Layout()]

    def push(self, piece: str) -> str:
        """Take a piece; what is final now comes back."""
        return self._through(self._clean.push(piece), 0)

    def push_mark(self, mark: str) -> str:
        """Take a private-use character from `FIRST_MARK` on, which stands for something that is no text. It comes out
        at its place, unless it stands within what is left out.

        Raises:
            ValueError: it is another character.
        """
        if len(mark) != 1 or not is_mark(mark):
            raise ValueError(f"a mark is one private-use character from U+100000 on, got {mark!r}")
        return self._through(mark, 0)

    def finish(self) -> str:
        """The text is over; what was held back comes back."""
        return "".join(self._through(stage.end(), place + 1) for place, stage in enumerate(self._stages))

    def _through(self, text: str, first: int) -> str:
        for stage in self._stages[first:]:
            text = stage.push(text)
        return text


class Normalizer:
    """What an LLM or a book writes, as a speaker reads it: without Markdown, tags, emojis and the rests of addresses,
    with numbers in words."""

    def __init__(self, language: str | None = None):
        """
        Args:
            language: a name or a code of checkpoint/languages.py, such as "german", "de" or "de-AT". For None, "auto"
                and any other language numbers stay as they are; the other rules apply.
        """
        self._language = language

    def whole(self, text: str) -> str:
        """The whole text at once. It is empty if it holds nothing to speak."""
        stream = self.stream()
        return stream.push(text) + stream.finish()

    def stream(self) -> NormalizerStream:
        """For one text in pieces."""
        return NormalizerStream(self._language)
