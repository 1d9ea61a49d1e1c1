"""Pauses in text: `[pause 500ms]` and SSML's `<break time="500ms"/>`."""

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from spoken_text.choices import LONGEST_PAUSE_S
from spoken_text.errors import TextError

log = logging.getLogger(__name__)

LONGEST_SILENCE_S = 60
"""Seconds of all pauses of one text beyond its speech, so that no short text is a long silence."""
_LETTER_MS = 70  # that a character may take to speak
_LONGEST_TAG = 1000  # characters; a <speak> tag names its schemas
_LONGEST_ODD_TAG = 200  # the same if odd tags are skipped: what is longer is text
_STRENGTHS = {"none": 0.0, "x-weak": 0.1, "weak": 0.25, "medium": 0.5, "strong": 0.8, "x-strong": 1.2}
"""Seconds. SSML leaves them to the speaker; these are ours."""

_FORMS = (
    f'[pause 500ms], [pause 1.5s], <break time="500ms"/> and <break strength="medium"/>, '
    f"of 0 to {LONGEST_PAUSE_S:.0f} seconds"
)
_OTHER = ("prosody", "phoneme", "say-as", "emphasis", "voice", "lang", "audio", "sub", "mark")
_OURS = ("[pause", "<break", "</break", "<speak", "</speak")
_REFUSED = tuple(f"<{slash}{name}" for name in _OTHER for slash in ("", "/"))
_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,6})?|\.\d{1,6})(ms|s)", re.I)
_PAUSE = re.compile(r"\[pause\s+([\d.]+\s*m?s)\s*\]", re.I)
_ODD_PAUSE = re.compile(r"\[pause[\s:=]*(?:[\d.,]+\s*[a-z]*)?\s*/?\]", re.I)
_ATTRIBUTES = r"((?:\s+[\w:.-]+\s*=\s*(?:\"[^\"]*\"|'[^']*'))*)\s*/?>"
_BREAK = re.compile(rf"<break{_ATTRIBUTES}", re.I)
_SPEAK = re.compile(rf"<speak{_ATTRIBUTES}|</(?:speak|break)\s*>", re.I)
_ATTRIBUTE = re.compile(r"([\w:.-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')")
MARKS = frozenset("[<\\")  # the characters with which a pause, a tag or an escaped one begins


@dataclass(frozen=True)
class Pause:
    """Silence of 0 to `LONGEST_PAUSE_S` seconds, in whole milliseconds."""

    seconds: float


Part = str | Pause
"""A part of a spoken text."""


class PauseStream:
    """Splits a text that comes in pieces into texts and pauses, in order. A tag may be cut anywhere. `<speak>` around
    the text is left out."""

    def __init__(
        self, refuse_other_tags: bool = True, lenient: bool = False, has_tags: bool = True, odd_stays: bool = False
    ):
        """`refuse_other_tags`: SSML's other tags are an error; otherwise they stay in the text. `lenient`: what would
        be an error is left out, with a warning. What is no tag after all stays in the text. `has_tags`: otherwise
        nothing in the text is a tag. `odd_stays`: a malformed tag, or too long a pause, is text, with a warning."""
        self._held = ""
        self._left_ms = 1000 * LONGEST_SILENCE_S  # of silence that is allowed; whole, so that cuts do not matter
        self._warned: set[str] = set()  # names of what was left out: each is told once
        self._lenient, self._odd_stays = lenient, odd_stays
        self._names = (_OURS + _REFUSED if refuse_other_tags else _OURS) if has_tags else ()

    def push(self, piece: str) -> list[Part]:
        """Take a piece, and return the parts that are now final. Adjacent text may come in several parts. Raises
        TextError: a tag is malformed, its pause is too long, all pauses together are, or it is an SSML tag that we do
        not support."""
        if not self._held and MARKS.isdisjoint(piece):  # quick for most pieces: a bot's first audio waits for them
            self._allow(piece)
            return [piece] if piece else []
        return joined(part for character in piece for part in self._bounded(self._feed(character)))

    def finish(self) -> list[Part]:
        """End the text, and return what was held back. Raises TextError: the text ends within a tag."""
        held, self._held = self._held, ""
        if _name(held, self._names) and not (self._lenient or self._odd_stays):
            raise _malformed(held)
        self._allow(held)
        return [held] if held else []

    def settle(self) -> list[Part]:
        """Return what may become a tag but is none yet. A tag that has begun stays open, unless it may be odd."""
        return self.finish() if self._lenient or not _name(self._held, self._names) else []

    @property
    def at_rest(self) -> bool:
        """No tag may have begun."""
        return not self._held

    def follow(self, before: "PauseStream") -> None:
        """Go on within the tag that `before` has left open."""
        self._held = before._held

    def _allow(self, text: str) -> None:
        """Text has come, so there may be more silence behind it. Blanks are not spoken."""
        self._left_ms += _LETTER_MS * sum(map(len, text.split()))

    def _bounded(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Without the pauses that would make too long a silence together."""
        for part in parts:
            if isinstance(part, str):
                self._allow(part)
            elif (milliseconds := round(1000 * part.seconds)) > self._left_ms:
                told = f"over {LONGEST_SILENCE_S} seconds longer than the speech before them"
                if not self._lenient:
                    raise TextError(f"the text's pauses are together {told}: write fewer, or several texts")
                if "silence" not in self._warned:
                    self._warned.add("silence")
                    log.warning("left out pauses that are together %s", told)
                continue
            else:
                self._left_ms -= milliseconds
            yield part

    def _feed(self, character: str) -> Iterator[Part]:
        self._held += character
        while (held := self._held) and not self._may_begin(held):
            name = _name(held.removeprefix("\\"), self._names)
            if not name:
                self._held = held[1:]
                yield held[0]
                continue
            if held[0] == "\\":
                self._held = ""
                yield held[1:]
            elif name in _REFUSED and not self._lenient:
                told = f"expected text with the tags {_FORMS}, and <speak> around it; got {held!r}"
                how = "Leave the tag out, or write a backslash in front of it to speak it as text"
                raise TextError(f"{told}, which is not supported. {how}")
            elif character == (name[0] == "[" and "]" or ">"):
                self._held = ""
                yield from self._read(held, name)
            elif self._lenient and (character in "<\n" or len(held) > _LONGEST_ODD_TAG):
                self._held = character if character == "<" else ""
                yield held.removesuffix("<")
            elif len(held) > _LONGEST_TAG:
                if not self._odd_stays:
                    raise _malformed(held)
                self._held = ""
                yield held
            return

    def _may_begin(self, held: str) -> bool:
        """May a tag, or one with a backslash before it, begin like this?"""
        start = held.lower().removeprefix("\\")
        return held[0] in MARKS and any(name.startswith(start) for name in self._names)

    def _read(self, tag: str, name: str) -> list[Part]:
        """What a whole tag stands for."""
        if not self._lenient:
            try:
                return _read(tag)
            except TextError:
                if not self._odd_stays:
                    raise
                log.warning("read as text, because it is no pause of 0 to %.0f seconds: %s", LONGEST_PAUSE_S, tag)
                return [tag]
        try:
            if name not in _REFUSED:
                return _read(tag)
        except TextError:
            if tag[0] == "[" and not _ODD_PAUSE.fullmatch(tag):
                return [tag]  # it is text in brackets
        if name not in self._warned:
            self._warned.add(name)
            log.warning("left out a tag that cannot be followed: %s", name)
        return []


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same with adjacent texts joined."""
    joined: list[Part] = []
    for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
        run = list(group)
        joined += ["".join(map(str, run))] if is_text else run
    return joined


def _name(held: str, names: tuple[str, ...]) -> str | None:
    """The name of the tag that certainly begins here; None if none does."""
    found = re.match(r"(\[|</?)[a-z-]+(?=[\s/>\]])", held, re.I)
    return found[0].lower() if found and found[0].lower() in names else None


def _read(tag: str) -> list[Part]:
    if _SPEAK.fullmatch(tag):
        return []
    if pause := _PAUSE.fullmatch(tag):
        return [Pause(_seconds(pause[1], tag))]
    if not (found := _BREAK.fullmatch(tag)):
        raise _malformed(tag)
    given = {name.lower(): double or single for name, double, single in _ATTRIBUTE.findall(found[1])}
    if given.keys() - {"time", "strength"}:
        raise _malformed(tag)
    if "time" in given:
        return [Pause(_seconds(given["time"], tag))]
    strength = given.get("strength", "medium")
    if strength not in _STRENGTHS:
        raise TextError(f"{tag}: strength must be one of {', '.join(_STRENGTHS)}, got {strength!r}")
    return [Pause(_STRENGTHS[strength])]


def _seconds(written: str, tag: str) -> float:
    duration = _DURATION.fullmatch("".join(written.split()))
    if not duration:
        raise _malformed(tag)
    seconds = round(float(duration[1]) * (1000 if duration[2].lower() == "s" else 1)) / 1000
    if seconds > LONGEST_PAUSE_S:
        raise TextError(f"{tag}: a pause may last at most {LONGEST_PAUSE_S:.0f} seconds; use several")
    return seconds


def _malformed(tag: str) -> TextError:
    how = "Write a backslash in front of a tag to speak it as text"
    return TextError(f"expected one of {_FORMS}; got {tag[:60]!r}. {how}")
