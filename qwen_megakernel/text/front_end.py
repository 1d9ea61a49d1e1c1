"""The text front end: pauses, then the normalizer, then the lexicon."""

import re
import reprlib

from qwen_megakernel.errors import TextError
from qwen_megakernel.text.lexicon import Lexicon, LexiconStream
from qwen_megakernel.text.normalize import NormalizerStream, is_plain
from qwen_megakernel.text.pauses import MARKS, Pause, PauseStream
from qwen_megakernel.text.stage import FIRST_MARK, is_mark

NORMALIZE = ("off", "auto")
"""The values of `normalize`."""

_AT_MARKS = re.compile(f"([{FIRST_MARK}-\U0010ffff])")


def check_normalize(normalize: str) -> None:
    """Raises TextError for a `normalize` that is not in `NORMALIZE`."""
    if normalize not in NORMALIZE:
        raise TextError(f"normalize must be one of {', '.join(NORMALIZE)}, got {reprlib.repr(normalize)}")


class TextFrontEnd:
    """Turns written text into what the engine speaks: text, with pauses between."""

    def __init__(self, language: str | None = None, normalize: str = "off", lexicon: Lexicon | None = None):
        """
        Args:
            language: a name or a code, such as "german" or "de-AT". For None and "auto" numbers stay as they are.
            normalize: "auto" applies the normalizer. With "off" text stays as it is, and SSML's other tags
                are an error.
            lexicon: applied last, to the normalizer's result.

        Raises:
            TextError: `normalize` has another value.
        """
        check_normalize(normalize)
        self._language, self._normalize, self._lexicon = language, normalize, lexicon

    def leaves_alone(self, text: str) -> bool:
        """Does the text certainly stay as it is? A quick check, and true for most texts."""
        return self._normalize == "off" and self._lexicon is None and not MARKS.intersection(text)

    def whole(self, text: str) -> list[str | Pause]:
        """Process a whole text. The result is non-empty texts and pauses in order; no two texts are adjacent.

        Raises:
            TextError: a pause or another tag is refused (`split_pauses`).
        """
        normalizes, lexicon = self._normalize == "auto" and not is_plain(text), self._lexicon
        if lexicon and not normalizes and not lexicon.may_change(text, self._language):
            lexicon = None
        stream = TextFrontEndStream(self._language, normalizes, lexicon)
        parts: list[str | Pause] = []
        for part in [*stream.push(text), *stream.finish()]:
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        return parts

    def stream(self) -> "TextFrontEndStream":
        """A stream for one text in pieces."""
        return TextFrontEndStream(self._language, self._normalize == "auto", self._lexicon)


class TextFrontEndStream:
    """The front end for a text in pieces. However the text is cut, the parts, with adjacent texts joined, are the same
    as for the whole text."""

    def __init__(self, language: str | None, normalizes: bool, lexicon: Lexicon | None):
        self._pauses = PauseStream(refuse_other_tags=not normalizes)
        self._normalizer = NormalizerStream(language) if normalizes else None
        self._words: LexiconStream | None = lexicon.stream(language) if lexicon else None

    def push(self, piece: str) -> list[str | Pause]:
        """Take a piece, and return the parts that are now final.

        Raises:
            TextError: a pause or another tag is refused, or `piece` is not a string. The stream is then unusable.
        """
        if not isinstance(piece, str):
            raise TextError(f"text must be a string, got {type(piece).__name__}")
        return self._speak(self._pauses.push(piece))

    def finish(self) -> list[str | Pause]:
        """End the text, and return what was held back.

        Raises:
            TextError: the text ends within a tag.
        """
        parts = self._speak(self._pauses.finish())
        if self._normalizer:
            parts += self._look_up(self._normalizer.finish())
        return parts + ([last] if self._words and (last := self._words.finish()) else [])

    def _speak(self, parts: list[str | Pause]) -> list[str | Pause]:
        given: list[str | Pause] = []
        for part in parts:
            if not self._normalizer:
                given += self._look_up(part)
            elif isinstance(part, str):
                given += self._look_up(self._normalizer.push(part))
            else:  # if the normalizer leaves out the text around a pause, it leaves out the pause too
                mark = chr(ord(FIRST_MARK) + round(part.seconds * 1000))
                given += self._look_up(self._normalizer.push_mark(mark))
        return given

    def _look_up(self, part: str | Pause) -> list[str | Pause]:
        """Turn marks into pauses and look words up in the lexicon, which starts anew after a pause."""
        if isinstance(part, Pause):
            last = self._words.finish() if self._words else ""
            return [last, part] if last else [part]
        given: list[str | Pause] = []
        for piece in _AT_MARKS.split(part) if self._normalizer else [part]:
            if self._normalizer and piece and is_mark(piece):
                given += self._look_up(Pause((ord(piece) - ord(FIRST_MARK)) / 1000))
            elif text := self._words.push(piece) if self._words else piece:
                given.append(text)
        return given
