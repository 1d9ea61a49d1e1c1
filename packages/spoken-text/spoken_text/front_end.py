"""The text front end: pauses, then the normalizer, then the lexicon."""

import copy
import logging
import re
import reprlib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence

from spoken_text import finder
from spoken_text.choices import NORMALIZE
from spoken_text.errors import TextError
from spoken_text.finder import LONGEST_WAIT, Candidates, Conversation, LanguageFinder
from spoken_text.lexicon import Lexicon, LexiconStream
from spoken_text.normalize import NormalizerStream, Silence, is_plain
from spoken_text.pauses import MARKS, Part, Pause, PauseStream, joined
from spoken_text.spoken import LANGUAGES, language_name, num2words
from spoken_text.stage import FIRST_MARK, check_text, has_words, is_mark

log = logging.getLogger(__name__)

_HALVES = re.compile("[\ud800-\udfff]")
_AT_MARKS = re.compile(f"([{FIRST_MARK}-\U0010ffff])")


class TextFrontEnd:
    """Turns written text into what the engine speaks: text, with pauses between."""

    def __init__(
        self,
        language: str | None = None,
        normalize: str = "off",
        lexicon: Lexicon | None = None,
        lenient: bool = False,
        languages: Sequence[str] | None = None,
    ):
        """
        Args:
            language: a name or a code, such as "german" or "de-AT". None and "auto": the only one of `languages`, else
                each text's own, which is found at its first clear sentence. Where none is found, numbers stay and a
                warning says so.
            normalize: "auto" applies the normalizer. With "off" text stays as it is, and SSML's other tags
                are an error.
            lexicon: applied last, to the normalizer's result.
            lenient: the text is a language model's. What would be an error in it is left out: a tag with a warning,
                half a character.
            languages: names of those that a text may be in, such as `TTSEngine.languages`. None: those of the
                published checkpoints, which lack Dutch.

        Raises:
            TextError: `normalize` has another value, or is "auto" without num2words, or another argument has another
                type. LanguageError: the same of `language`.
        """
        if not isinstance(normalize, str) or normalize not in NORMALIZE:
            raise TextError(f"normalize must be one of {', '.join(NORMALIZE)}, got {reprlib.repr(normalize)}")
        if normalize == "auto" and num2words is None:
            how = "pip install num2words, or take normalize='off'"
            raise TextError(f"normalize='auto' needs the package num2words: {how}")
        language_name(language)  # which refuses what is no string
        _check_type("lexicon", lexicon, Lexicon | None)
        _check_type("lenient", lenient, bool)
        self._normalize, self._lexicon, self._lenient = normalize, lexicon, lenient
        self._candidates = Candidates.of(languages)
        self._language = finder.sole(languages) if language in (None, "auto") else language
        self._conversation: Conversation | None = None
        self._markup = "ssml"
        self._looked_for = False  # the language, in the whole of a text whose parts come now
        if normalize == "auto" and self._language and language_name(self._language) not in LANGUAGES:
            finder.tell_unread(self._language)

    @property
    def changes_text(self) -> bool:
        """It normalizes, or has a lexicon."""
        return self._normalize == "auto" or self._lexicon is not None

    @property
    def _finds(self) -> bool:
        """Texts are read by their language, which nobody has named."""
        if self._language or self._looked_for:
            return False
        return self._normalize == "auto" or self._lexicon is not None and self._lexicon.has_languages

    def load(self) -> None:
        """Load what finding a language needs, if anything. It takes a second at its first call in a process, so call
        it before others wait, and in no event loop. Otherwise the first text does it."""
        if self._finds:
            finder.load(self._candidates)

    def in_conversation(self, conversation: Conversation) -> "TextFrontEnd":
        """The same for texts of one caller. A text whose language cannot be found has that of the text before it."""
        front_end = copy.copy(self)
        front_end._conversation = conversation
        return front_end

    def of_book(self, markup: str) -> "TextFrontEnd":
        """The same for the texts of a book. `markup`: "markdown": tags are the book's own words, except pauses that can
        be followed. "none": so are pauses and Markdown."""
        front_end = copy.copy(self)
        front_end._markup = markup
        return front_end

    def for_text(self, text: str) -> "TextFrontEnd":
        """The same for parts of this text, whose language is found once. Raises TextError: it is no text."""
        check_text(text)
        if not self._finds:
            return self
        found = LanguageFinder(self._candidates, self._conversation)
        found.push(text)
        front_end = copy.copy(self)
        front_end._language, front_end._looked_for = found.settle(_needs_language(text, self._lexicon)), True
        return front_end

    def _finder(self, needed: bool) -> LanguageFinder | None:
        return LanguageFinder(self._candidates, self._conversation) if needed and self._finds else None

    def leaves_alone(self, text: str) -> bool:
        """Does the text certainly stay as it is? A quick check, true for most texts. Raises TextError: it is none."""
        check_text(text)
        if self._lexicon and self._may_respell(self._lexicon, text):
            return False
        if self._normalize == "auto":
            return is_plain(text)
        if self._markup == "none":
            return has_words(text)
        if self._lenient:
            return MARKS.isdisjoint(text) and has_words(text) and not has_half_characters(text)
        return MARKS.isdisjoint(text) and (has_words(text) or has_half_characters(text))  # halves are refused later

    def whole(self, text: str) -> list[Part]:
        """Process a whole text. The result is texts and pauses in order; no two texts are adjacent. Each text has a
        letter or a digit.

        Raises:
            TextError: a pause or another tag is refused (`PauseStream`).
        """
        check_text(text)
        normalizes, lexicon = self._normalize == "auto" and not is_plain(text), self._lexicon
        if lexicon and not normalizes and not self._may_respell(lexicon, text):
            lexicon = None
        found = self._finder(normalizes or lexicon is not None)
        stream = TextFrontEndStream(self._language, normalizes, lexicon, self._lenient, found, markup=self._markup)
        return joined([*stream.push(text), *stream.finish()])

    def _may_respell(self, lexicon: Lexicon, text: str) -> bool:
        languages = self._candidates.names if self._finds else (self._language,)
        return any(lexicon.may_change(text, language) for language in languages)

    def shown(self, text: str) -> list[Part]:
        """A whole text as a reader sees it: like `whole`, but words and numbers stay as they are written.

        Raises:
            TextError: as `whole`.
        """
        normalizes = self._normalize == "auto"
        stream = TextFrontEndStream(
            self._language, normalizes, None, self._lenient, reads_aloud=False, markup=self._markup
        )
        return joined([*stream.push(text), *stream.finish()])

    def fragment(self, text: str) -> str:
        """How some words of a text are spoken if they stand alone. It tells an unknown language from the conversation,
        and no later text learns from it."""
        if not self.changes_text:
            return text
        language = self._language or (self._conversation.language if self._conversation else None)
        stream = TextFrontEndStream(language, self._normalize == "auto", self._lexicon, lenient=True)
        return "".join(part for part in [*stream.push(text), *stream.finish()] if isinstance(part, str))

    def stream(self, after: "TextFrontEndStream | None" = None) -> "TextFrontEndStream":
        """A stream for one text in pieces.

        Args:
            after: the stream of the text that this one continues, whose open elements and code blocks go on. It is not
                used afterwards. None: a text of its own.
        """
        _check_type("after", after, TextFrontEndStream | None)
        normalizes, found = self._normalize == "auto", self._finder(True)
        stream = TextFrontEndStream(
            self._language, normalizes, self._lexicon, self._lenient, found, markup=self._markup
        )
        if after:
            stream.follow(after)
        return stream


def _check_type(name: str, value: object, wanted: type | types.UnionType) -> None:
    if not isinstance(value, wanted):
        raise TextError(f"{name} must be {getattr(wanted, '__name__', wanted)}, got {type(value).__name__}")


def _needs_language(text: str, lexicon: Lexicon | None) -> bool:
    """Is there something that languages read differently? Not all of it; the rest is no reason for a warning."""
    return any(map(str.isnumeric, text)) or lexicon is not None and lexicon.has_languages and has_words(text)


def has_half_characters(text: str) -> bool:
    """Are there lone surrogates? A stream of JSON may cut an emoji into two of them."""
    return _HALVES.search(text) is not None


class Reading:
    """Where the front end is in a text that several utterances speak, such as the sentences of a turn. What one of them
    leaves open, such as `<think>` or a code block, goes on in the next one."""

    def __init__(self) -> None:
        self._stream: TextFrontEndStream | None = None
        self._passed = ""  # the end of text that the stream did not see
        self.silence = Silence()  # tells which characters of the text, as it was written, are left out

    def go_on(self, front_end: TextFrontEnd) -> "TextFrontEndStream":
        """The stream for the text that comes next."""
        self._stream = front_end.stream(after=self._stream)
        if self._passed:
            self._stream.pass_over(self._passed)
            self._passed = ""
        return self._stream

    def sentence(self, front_end: TextFrontEnd, text: str) -> list[Part]:
        """Process the next sentence, or several. Empty if there is nothing to speak. Raises TextError: as
        `TextFrontEnd.whole`."""
        if (self._stream is None or self._stream.at_rest) and front_end.leaves_alone(text.strip()):
            self._passed = (self._passed + text)[-LONGEST_WAIT:]  # most sentences: a bot's first audio waits for this
            return [text]
        stream = self.go_on(front_end)
        return joined([*stream.push(text), *stream.settle()])


class TextFrontEndStream:
    """The front end for a text in pieces. However the text is cut, the parts, with adjacent texts joined, are the same
    as for the whole text. If its language must be found, text is held back until it is."""

    def __init__(
        self,
        language: str | None,
        normalizes: bool,
        lexicon: Lexicon | None,
        lenient: bool = False,
        finder: LanguageFinder | None = None,
        reads_aloud: bool = True,
        markup: str = "ssml",
    ):
        """`finder`: finds the language, if it is not known. `reads_aloud`: the normalizer puts numbers and addresses
        into words. `markup`: "ssml", or as for `TextFrontEnd.of_book`."""
        is_ssml = markup == "ssml"
        self._pauses = PauseStream(is_ssml and not normalizes, lenient, markup != "none", odd_stays=not is_ssml)
        self._lenient = lenient
        self._seeks, self._silent = True, ""  # no word has come yet; what has come instead
        self._lexicon = lexicon
        self._finder = finder
        self._waits = finder is not None  # for the language
        self._held: list[Part] = []  # meanwhile
        self._normalizer = NormalizerStream(language, reads_aloud, markup != "none") if normalizes else None
        self._words: LexiconStream | None = lexicon.stream(language) if lexicon else None

    def push(self, piece: str) -> list[Part]:
        """Take a piece, and return the parts that are now final. Raises TextError: a pause or another tag is refused,
        or `piece` is not a string. The stream is then unusable."""
        check_text(piece)
        if self._lenient and has_half_characters(piece):
            log.warning("left out half a character")
            piece = piece.encode("utf-8", "ignore").decode()
        parts = self._respell(self._speak(self._known(self._pauses.push(piece))))
        return list(self._with_words(parts))

    def finish(self) -> list[Part]:
        """End the text, and return what was held back. Raises TextError: the text ends within a tag."""
        return self._end(self._pauses.finish(), NormalizerStream.finish)

    def settle(self) -> list[Part]:
        """A sentence has ended: return what was held back, but for open links, tags, elements and code blocks."""
        return self._end(self._pauses.settle(), NormalizerStream.settle)

    def follow(self, before: "TextFrontEndStream") -> None:
        """Go on within what `before` has left open, and in its language if that had to be found."""
        self._pauses.follow(before._pauses)
        if self._normalizer and before._normalizer:
            self._normalizer.follow(before._normalizer)
        if self._finder and before._finder:
            self._finder = before._finder
            self._begin_if_decided()

    @property
    def at_rest(self) -> bool:
        """Nothing is held back or left open."""
        return self._pauses.at_rest and not self._held and (self._normalizer is None or self._normalizer.at_rest)

    def pass_over(self, text: str) -> None:
        """Text that `leaves_alone` came meanwhile. `text` is its end."""
        if self._normalizer:
            self._normalizer.pass_over(text)
        if self._finder:
            self._finder.push(text)
            self._begin_if_decided()

    def _known(self, parts: list[Part]) -> list[Part]:
        """Hold parts back until the language is known. Returns what can be spoken."""
        if not self._waits or not self._finder:
            return parts
        for part in parts:
            if isinstance(part, Pause):
                self._finder.pause()
            else:
                self._finder.push(part)
        self._held += parts
        self._begin_if_decided()
        return [] if self._waits else self._let_go()

    def _let_go(self) -> list[Part]:
        held, self._held = self._held, []
        return held

    def _begin_if_decided(self) -> None:
        if self._waits and self._finder and self._finder.decided:
            self._waits = False
            self._begin(self._finder.language)

    def _begin(self, language: str | None) -> None:
        """From here on the text is in this language."""
        if self._normalizer:
            self._normalizer.read_in(language)
        if self._lexicon:
            self._words = self._lexicon.stream(language)

    def _end(self, parts: list[Part], end: Callable[[NormalizerStream], str]) -> list[Part]:
        """`end`: of the normalizer, which then gives what it holds back."""
        parts = self._known(parts)
        if self._waits and self._finder:  # if its language stays unknown, the text behind this may still tell it
            parts = self._let_go()
            text = "".join(part for part in parts if isinstance(part, str))
            self._begin(self._finder.settle(_needs_language(text, self._lexicon)))
            self._waits = not self._finder.decided
        parts = list(self._speak(parts))
        if self._normalizer:
            parts += _at_marks(end(self._normalizer))
        given = list(self._with_words([*self._respell(parts), *self._last_word()]))
        self._seeks, self._silent = True, ""
        return given

    def _with_words(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Hold back a beginning without letter or digit until one comes: without them there is nothing to speak."""
        for part in parts:
            if isinstance(part, Pause):
                self._seeks, self._silent = True, ""
            elif self._seeks:
                part, self._silent = self._silent + part, ""
                if not has_words(part):
                    self._silent = part
                    continue
                self._seeks = False
            yield part

    def _speak(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if not self._normalizer:
                yield part
            elif isinstance(part, str):
                yield from _at_marks(self._normalizer.push(part))
            else:  # if the normalizer leaves out the text around a pause, it leaves out the pause too
                mark = chr(ord(FIRST_MARK) + round(part.seconds * 1000))
                yield from _at_marks(self._normalizer.push_mark(mark))

    def _respell(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Look words up in the lexicon, which starts anew after a pause."""
        for part in parts:
            if self._words and isinstance(part, Pause):
                yield from self._last_word()
            elif self._words and isinstance(part, str):
                part = self._words.push(part)
            if part:
                yield part

    def _last_word(self) -> list[str]:
        """What the lexicon holds back."""
        return [last] if self._words and (last := self._words.finish()) else []


def _at_marks(text: str) -> list[Part]:
    """Turn the marks of a text into pauses."""
    pieces = filter(None, _AT_MARKS.split(text))
    return [Pause((ord(piece) - ord(FIRST_MARK)) / 1000) if is_mark(piece) else piece for piece in pieces]
