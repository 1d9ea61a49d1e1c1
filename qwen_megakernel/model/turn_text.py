"""Turn: a text that is still being written, made ready to be spoken without waiting for its end."""

import re
from collections.abc import Callable

from spoken_text.cutting import bytes_of, is_abbreviation
from spoken_text.front_end import Reading, TextFrontEnd
from spoken_text.pauses import Pause

_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\u3000-\u303f\uff00-\uff65]")  # Chinese, Japanese
_SENTENCE = re.compile(r"[.!?…][\"'”’)\]]?\s+$|[。！？；][”’」』）]*\s*$|\n\s*\n\s*$")
_CLAUSE = re.compile(r"[,;:—]\s+$|[，、；：]\s*$")
_CLOSES = "。！？；，、：”’」』）"  # never begins a part

SENTENCE_FROM, CLAUSE_FROM, WORD_FROM = 0.5, 0.75, 1.0
"""Shares of the tokens that fit. From these on a part may end after a sentence, after a clause, after any word."""


class TurnText:
    """Cuts the text into parts that each fit a slot. The cuts depend on the text alone, not on the pieces in which it
    comes. A piece is given out at once, except for white space near a cut.

    A part ends after the first sentence that ends above `SENTENCE_FROM`. A sentence that takes the rest of the room is
    cut after a clause, or after a word.
    """

    def __init__(self, count: Callable[[str], int], room: int, at_most: Callable[[str], int] = bytes_of):
        """`count` gives the number of tokens of a text; it is called once for each word. `room` is the most tokens that
        a part may have. `at_most` quickly gives a number that `count` does not exceed."""
        self._count = count
        self._at_most = at_most
        self._room = room
        self._word = ""  # text after the last place at which a part could end
        self._tokens = 0  # of the part up to that place
        self._blank = ""  # white space that is not given out yet

    def push(self, piece: str) -> list[str]:
        """Take a piece. Returns first the text that goes on with the part, then the text of each new part."""
        parts = [""]
        for character in piece:
            if self._ends_a_word(character) and self._ends_a_part(character):
                parts.append("")
                self._blank = ""
            self._word += character
            # If the part may end after the word, its white space waits.
            if character.isspace() and self._tokens + self._at_most(self._word) >= SENTENCE_FROM * self._room:
                self._blank += character
            else:
                parts[-1] += self._blank + character
                self._blank = ""
        return parts

    def finish(self) -> str:
        """The text is complete: what is left of it."""
        rest, self._blank = self._blank, ""
        return rest

    def restart(self) -> None:
        """A part begins here for another reason, such as a pause."""
        self._word = ""
        self._tokens = 0
        self._blank = ""

    def _ends_a_word(self, following: str) -> bool:
        if not self._word.strip() or following.isspace() or following in _CLOSES:
            return False
        last = self._word[-1]
        return last.isspace() or bool(_UNSPACED.match(last) or _UNSPACED.match(following))

    def _ends_a_part(self, following: str) -> bool:
        """The word is whole. Does the part end after it?"""
        word, self._word = self._word, ""
        self._tokens += self._count(word)
        share = self._tokens / self._room
        ends = share >= WORD_FROM or share >= CLAUSE_FROM and bool(_CLAUSE.search(word))
        if not ends and share >= SENTENCE_FROM and _SENTENCE.search(word):
            stopped = word.strip()
            ends = stopped[-1:] != "." or not is_abbreviation(stopped[:-1], following)
        if ends:
            self._tokens = 0
        return ends


class Turn:
    """Prepares a text that comes in pieces for an engine: finds pauses, normalizes, and cuts where a slot ends."""

    def __init__(self, front_end: TextFrontEnd, cuts: TurnText | None, reading: Reading | None = None):
        """`cuts` None: the text may have any length. `reading`: of the text that this one continues, if it does."""
        self._stream = (reading or Reading()).go_on(front_end)
        self._cuts = cuts

    def push(self, piece: str) -> list[str | Pause]:
        """Take a piece. Returns text that goes on with the part. After a `Pause` a new part begins; a `Pause` of 0
        seconds is no silence. Raises TextError: a malformed pause. The turn cannot be used afterwards."""
        return self._cut(self._stream.push(piece))

    def flush(self) -> list[str | Pause]:
        """Give out what is held back because the next character could change it. The turn may go on: what is left out,
        such as `<think>`, is left out up to its end. Raises TextError as `push` does."""
        return self._rest(self._stream.settle())

    def end_part(self) -> list[str | Pause]:
        """The same, and a new part begins."""
        parts = [*self.flush(), Pause(0.0)]
        if self._cuts:
            self._cuts.restart()
        return parts

    def finish(self) -> list[str | Pause]:
        """The text is complete: give out what is held back. Raises TextError as `push` does."""
        return self._rest(self._stream.finish())

    def _rest(self, parts: list[str | Pause]) -> list[str | Pause]:
        return self._cut(parts) + ([rest] if self._cuts and (rest := self._cuts.finish()) else [])

    def _cut(self, parts: list[str | Pause]) -> list[str | Pause]:
        given: list[str | Pause] = []
        for part in parts:
            if isinstance(part, Pause) or not self._cuts:
                given.append(part)
                if self._cuts:
                    self._cuts.restart()
                continue
            first, *others = self._cuts.push(part)
            given += [first] if first else []
            for text in others:
                given += [Pause(0.0), text]
        return given
