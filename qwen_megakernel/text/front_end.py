"""The text front end: pauses, then the normalizer, then the lexicon."""

import logging
import re
import reprlib
import types
from collections.abc import Callable

from qwen_megakernel.choices import NORMALIZE
from qwen_megakernel.errors import TextError
from qwen_megakernel.text.lexicon import Lexicon, LexiconStream
from qwen_megakernel.text.normalize import NormalizerStream, Silence, is_plain
from qwen_megakernel.text.pauses import MARKS, Pause, PauseStream, joined
from qwen_megakernel.text.spoken import language_name, num2words
from qwen_megakernel.text.stage import FIRST_MARK, has_words, is_mark

log = logging.getLogger(__name__)


_HALVES = re.compile("[\ud800-\udfff]")
_AT_MARKS = re.compile(f"([{FIRST_MARK}-\U0010ffff])")


def check_normalize(normalize: str) -> None:
    """Raises TextError for a `normalize` that is not in `NORMALIZE`, and for "auto" without num2words."""
    if not isinstance(normalize, str) or normalize not in NORMALIZE:
        raise TextError(f"normalize must be one of {', '.join(NORMALIZE)}, got {reprlib.repr(normalize)}")
    if normalize == "auto" and num2words is None:
        raise TextError("normalize='auto' needs the package num2words: pip install num2words, or take normalize='off'")


class TextFrontEnd:
    """Turns written text into what the engine speaks: text, with pauses between."""

    def __init__(
        self,
        language: str | None = None,
        normalize: str = "off",
        lexicon: Lexicon | None = None,
        lenient: bool = False,
    ):
        """
        Args:
            language: a name or a code, such as "german" or "de-AT". For None and "auto" numbers stay as they are.
            normalize: "auto" applies the normalizer. With "off" text stays as it is, and SSML's other tags
                are an error.
            lexicon: applied last, to the normalizer's result.
            lenient: the text is a language model's. What would be an error in it is left out: a tag with a warning,
                half a character, text without letter or digit.

        Raises:
            TextError: `normalize` has another value, or another argument another type. LanguageError: the same of
                `language`.
        """
        check_normalize(normalize)
        language_name(language)  # which refuses what is no string
        _check_type("lexicon", lexicon, Lexicon | None)
        _check_type("lenient", lenient, bool)
        self._language, self._normalize, self._lexicon, self._lenient = language, normalize, lexicon, lenient

    def leaves_alone(self, text: str) -> bool:
        """Does the text certainly stay as it is? A quick check, true for most texts. Raises TextError: it is none."""
        _check_type("text", text, str)
        if self._lexicon and self._lexicon.may_change(text, self._language):
            return False
        if self._normalize == "auto":
            return is_plain(text)
        return MARKS.isdisjoint(text) and not (self._lenient and (has_half_characters(text) or not has_words(text)))

    def whole(self, text: str) -> list[str | Pause]:
        """Process a whole text. The result is non-empty texts and pauses in order; no two texts are adjacent.

        Raises:
            TextError: a pause or another tag is refused (`PauseStream`).
        """
        _check_type("text", text, str)
        normalizes, lexicon = self._normalize == "auto" and not is_plain(text), self._lexicon
        if lexicon and not normalizes and not lexicon.may_change(text, self._language):
            lexicon = None
        stream = TextFrontEndStream(self._language, normalizes, lexicon, self._lenient)
        return joined([*stream.push(text), *stream.finish()])

    def shown(self, text: str) -> list[str | Pause]:
        """A whole text as a reader sees it: like `whole`, but words and numbers stay as they are written.

        Raises:
            TextError: as `whole`.
        """
        if self._normalize == "auto":
            stream = TextFrontEndStream(self._language, True, None, self._lenient, reads_aloud=False)
        else:
            stream = TextFrontEndStream(self._language, False, None, self._lenient)
        return joined([*stream.push(text), *stream.finish()])

    def stream(self, after: "TextFrontEndStream | None" = None) -> "TextFrontEndStream":
        """A stream for one text in pieces.

        Args:
            after: the stream of the text that this one continues, whose open elements and code blocks go on. It is not
                used afterwards. None: a text of its own.
        """
        _check_type("after", after, TextFrontEndStream | None)
        stream = TextFrontEndStream(self._language, self._normalize == "auto", self._lexicon, self._lenient)
        if after:
            stream.follow(after)
        return stream


def _check_type(name: str, value: object, wanted: type | types.UnionType) -> None:
    if not isinstance(value, wanted):
        words = "a string" if wanted is str else getattr(wanted, "__name__", wanted)
        raise TextError(f"{name} must be {words}, got {type(value).__name__}")


def has_half_characters(text: str) -> bool:
    """Are there lone surrogates? A stream of JSON may cut an emoji into two of them."""
    return _HALVES.search(text) is not None


class Reading:
    """Where the front end is in a text that several utterances speak, such as the sentences of a turn. What one of them
    leaves open, such as `<think>` or a code block, goes on in the next one."""

    def __init__(self) -> None:
        self._stream: TextFrontEndStream | None = None
        self._passed = ""  # the last character of text that the stream did not see
        self.silence = Silence()  # tells which characters of the text, as it was written, are left out

    def go_on(self, front_end: TextFrontEnd) -> "TextFrontEndStream":
        """The stream for the text that comes next."""
        self._stream = front_end.stream(after=self._stream)
        if self._passed:
            self._stream.pass_over(self._passed)
            self._passed = ""
        return self._stream

    def sentence(self, front_end: TextFrontEnd, text: str) -> list[str | Pause]:
        """Process the next sentence, or several. Empty if there is nothing to speak. Raises TextError: as
        `TextFrontEnd.whole`."""
        if (self._stream is None or self._stream.at_rest) and front_end.leaves_alone(text.strip()):
            self._passed = text[-1:]  # most sentences: a bot's first audio waits for this
            return [text]
        stream = self.go_on(front_end)
        return joined([*stream.push(text), *stream.settle()])


class TextFrontEndStream:
    """The front end for a text in pieces. However the text is cut, the parts, with adjacent texts joined, are the same
    as for the whole text."""

    def __init__(
        self,
        language: str | None,
        normalizes: bool,
        lexicon: Lexicon | None,
        lenient: bool = False,
        reads_aloud: bool = True,
    ):
        """`reads_aloud`: the normalizer puts numbers and addresses into words."""
        self._pauses = PauseStream(refuse_other_tags=not normalizes, lenient=lenient)
        self._lenient = lenient
        self._seeks = lenient and not normalizes  # a sentence begins with a word: the normalizer sees to that itself
        self._sought, self._silent = self._seeks, ""  # no word has come yet; what has come instead
        self._normalizer = NormalizerStream(language, reads_aloud) if normalizes else None
        self._words: LexiconStream | None = lexicon.stream(language) if lexicon else None

    def push(self, piece: str) -> list[str | Pause]:
        """Take a piece, and return the parts that are now final. Raises TextError: a pause or another tag is refused,
        or `piece` is not a string. The stream is then unusable."""
        if not isinstance(piece, str):
            raise TextError(f"text must be a string, got {type(piece).__name__}")
        if self._lenient and has_half_characters(piece):
            log.warning("left out half a character")
            piece = piece.encode("utf-8", "ignore").decode()
        return self._with_words(self._speak(self._pauses.push(piece)))

    def finish(self) -> list[str | Pause]:
        """End the text, and return what was held back. Raises TextError: the text ends within a tag."""
        return self._end(self._pauses.finish(), self._normalizer.finish if self._normalizer else None)

    def settle(self) -> list[str | Pause]:
        """A sentence has ended: return what was held back, but for open links, tags, elements and code blocks."""
        return self._end(self._pauses.settle(), self._normalizer.settle if self._normalizer else None)

    def follow(self, before: "TextFrontEndStream") -> None:
        """Go on within what `before` has left open."""
        self._pauses.follow(before._pauses)
        if self._normalizer and before._normalizer:
            self._normalizer.follow(before._normalizer)

    @property
    def at_rest(self) -> bool:
        """Nothing is held back or left open."""
        return self._pauses.at_rest and (self._normalizer is None or self._normalizer.at_rest)

    def pass_over(self, text: str) -> None:
        """Text that `leaves_alone` came meanwhile. `text` is its end."""
        if self._normalizer:
            self._normalizer.pass_over(text)

    def _end(self, parts: list[str | Pause], rest: Callable[[], str] | None) -> list[str | Pause]:
        """`rest`: gives what the normalizer holds back, once it has these parts."""
        parts = self._speak(parts)
        if rest:
            parts += self._look_up(rest())
        given = self._with_words(parts + ([last] if self._words and (last := self._words.finish()) else []))
        self._sought, self._silent = self._seeks, ""
        return given

    def _with_words(self, parts: list[str | Pause]) -> list[str | Pause]:
        """Hold back a beginning without letter or digit until one comes."""
        if not self._seeks:
            return parts
        given: list[str | Pause] = []
        for part in parts:
            if isinstance(part, Pause):
                self._sought, self._silent = True, ""
            elif self._sought:
                part, self._silent = self._silent + part, ""
                if not has_words(part):
                    self._silent = part
                    continue
                self._sought = False
            given.append(part)
        return given

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
