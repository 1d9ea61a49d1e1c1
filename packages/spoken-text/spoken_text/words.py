"""Words in text: shortens addresses, cuts long words, and puts numbers into words."""

import re

from spoken_text.code import is_secret, spoken_name
from spoken_text.numbers import numbers_of
from spoken_text.rule import SEEN, Around
from spoken_text.spoken import Spoken
from spoken_text.stage import Stage, is_cjk, is_mark

LONGEST_WORD = 100  # A longer word is cut into parts of this many characters. The longest German words have some 80.
LONGEST_PHRASE = 12  # in a row of numbers, at most this many words are read together

_OPENING, _CLOSING = "\"'([{<«„“‚‘¿¡", ".,;:!?)]}>\"'»“”’…"
_TAIL = 4  # characters kept from a long address's end, for the marks after it
_UNDERSCORES = re.compile(r"(?<=\w)_+(?=\w)")
_URL = re.compile(r"(?:[a-z][a-z0-9+.-]{1,15}://|www\.)(?:[^\s/?#@]*@)?(?:www\.)?([^\s/?#:@]+)", re.I)
_EMAIL = re.compile(r"(?:mailto:)?([\w.+-]+)@((?:[\w-]+\.)+[A-Za-z]{2,})")
_DOMAIN = re.compile(
    r"(?:www\.)?((?:[A-Za-z0-9-]+\.)+(?:com|org|net|edu|gov|io|ai|dev|app|info|eu|uk|de|at|ch|fr|es|it|pt|br|ru|cn|jp|kr"
    r"|nl|be))"
    r"(?:[:/?#]\S*)?"
)


class Words(Stage):
    """Keeps only the host of an address, cuts words of more than `LONGEST_WORD` letters, and puts numbers into words of
    a language.

    It holds back the word in progress. After a number it also holds back the next word, which may be a unit or a
    month."""

    def __init__(self, spoken: Spoken | None):
        self._spoken = spoken
        self._numbers = numbers_of(spoken) if spoken else None
        self._word = ""
        self._phrase: list[str] = []  # a number's words; more may follow
        self._around = Around(begins=True)  # the words before the next phrase

    def feed(self, character: str) -> str:
        if character == " ":
            return self._end_word(" ")
        if is_cjk(character) and self._goes_on(character):
            return ""
        if character in "〜～" and self._numbers and not (self._word or self._phrase):
            self._word = character  # a number may follow
            return ""
        if character == "\n" or is_mark(character) or is_cjk(character):
            blank = " " if is_cjk(character) and not self._word else ""  # it came behind the phrase
            after = character if is_cjk(character) else ""
            given = self._end_word("", after) + self._end_phrase(blank, after) + character
            goes_on = character == "\n" and not self._around.begins  # a line may end within a sentence
            before, earlier = (self._around.before, self._around.earlier) if goes_on else ("", "")
            self._pass(after or before, earlier, after, begins=not after)
            return given
        self._word += character
        if len(self._word) > LONGEST_WORD:
            long = self._word.lstrip(_OPENING)
            if _URL.match(long) or is_secret(long[:LONGEST_WORD]):
                if len(self._word) > LONGEST_WORD + _TAIL:
                    self._word = self._word[:LONGEST_WORD] + self._word[-_TAIL:]
            else:
                return self._cut()
        return ""

    def end(self) -> str:
        return self._end_word("") + self._end_phrase("")

    def _goes_on(self, character: str) -> bool:
        """Take a character that may belong to the number before it, such as 年 or 元."""
        if not self._numbers or len(self._word) >= LONGEST_WORD:
            return False
        if not self._word and self._phrase and self._phrase[-1][-1].isdecimal():
            if not self._numbers.goes_on(self._phrase[-1], character):
                return False
            self._word = f"{self._phrase.pop()} "
        if not self._numbers.goes_on(self._word, character):
            return False
        self._word += character
        return True

    def _cut(self) -> str:
        """Give out part of a long word. The last character begins the next part."""
        last = self._word[-1]
        self._word = self._word[:-1]
        given = self._end_word(" ") + self._end_phrase(" ")
        self._word = last
        return given

    def _end_word(self, blank: str, after: str = "") -> str:
        """The word has ended. `after`: a Chinese or Japanese character behind it."""
        word, self._word = self._word, ""
        if not word:
            return "" if self._phrase else blank
        word, is_address = self._told(word)
        if not word:  # left out
            return "" if self._phrase else blank
        core = word.lstrip(_OPENING).rstrip(_CLOSING)
        has_digits = self._numbers is not None and self._numbers.is_number(word)
        if not self._numbers or is_address:
            if self._numbers and has_digits:
                word = self._numbers.read(word, Around())
            return self._end_phrase(" ") + self._give(word, blank)
        given = ""
        if self._phrase:
            more = self._numbers.follows(core or word, self._phrase[-1])
            if more and len(self._phrase) < LONGEST_PHRASE:
                self._phrase.append(word)
                return "" if blank else self._end_phrase("", after)
            given = self._end_phrase(" ", word.lstrip(_OPENING))
        if has_digits or self._numbers.begins_number(word) or self._numbers.is_roman(core, self._around):
            self._phrase.append(word)
            return given if blank else given + self._end_phrase("", after)
        return given + self._give(word, blank)

    def _give(self, word: str, blank: str) -> str:
        self._pass(word.strip(_OPENING), self._around.before, word + blank)
        return word + blank

    def _end_phrase(self, blank: str, after: str = "") -> str:
        if not self._phrase or not self._numbers:
            return ""
        phrase, self._phrase = " ".join(self._phrase), []
        self._around.after, self._around.ordinal_end = after, ""
        said = self._numbers.read(phrase, self._around)
        earlier, before = f"{self._around.before} {phrase}".split(" ")[-2:]
        self._pass(before, earlier, phrase + blank)
        return said + blank

    def _pass(self, before: str, earlier: str, text: str, begins: bool = False) -> None:
        """The next phrase comes behind these words. `text`: as they are written, if on the same line."""
        around = self._around
        around.before, around.earlier, around.begins = before, earlier, begins
        if self._spoken and self._spoken.joined:
            around.left = (around.left + text)[-SEEN:] if text else ""

    def _told(self, word: str) -> tuple[str, bool]:
        """The spoken form of a word, empty if nobody reads it aloud, and whether it is an address."""
        start = len(word) - len(word.lstrip(_OPENING))
        core = word[start:].rstrip(_CLOSING)
        closing = word[start + len(core) :]
        dot = self._spoken.dot.join([self._spoken.blank] * 2) if self._spoken else "."
        at = f" {self._spoken.at} " if self._spoken else "@"
        if email := _EMAIL.fullmatch(core):
            said = email[1].replace(".", dot).replace("_", " ") + at + email[2].replace(".", dot)
        elif url := _URL.match(core) or _DOMAIN.fullmatch(core):
            said = url[1].rstrip(_CLOSING).replace(".", dot)
        elif self._spoken and core[1:] in self._spoken.units:  # 5 /km²
            return word, False
        elif is_secret(core):
            return closing.strip(")]}>\"'»“”’"), False
        elif name := spoken_name(f"{core})" if core.endswith("(") and closing.startswith(")") else core, dot):
            said, closing = name, closing.removeprefix(")") if core.endswith("(") else closing
            return _UNDERSCORES.sub(" ", word[:start] + said + closing), False
        else:
            return _UNDERSCORES.sub(" ", word), False
        return word[:start] + said + closing, True
