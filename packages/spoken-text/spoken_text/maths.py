"""Maths and citations, as language models write them: a formula in a line is read by its words. A formula that stands
alone, such as `$$...$$`, and citations such as `[1]` or `【4†source】` are left out."""

import re

from spoken_text.stage import Stage, is_cjk, is_mark
from spoken_text.tables import shared_words

_LONGEST, _LONGEST_DISPLAYED = 200, 2000  # characters; what is longer is no formula
_SEEN = 24
"""How many characters before a citation are looked at."""
_CHOICES, _LINKS = tuple(shared_words("choices")), shared_words("choice_links")
_NUMBERS = r"[1-9]\d{0,2}(?:(?:, ?| ?[-–] ?)\d{1,3}){0,9}"
_CITATION = re.compile(rf"\[{_NUMBERS}\] ?|【[^】]*】")
_MAY_BE_CITATION = re.compile(rf"\[(?:{_NUMBERS}(?:,|, | ?[-–]? ?)?)?|【(?:\d{{1,3}}(?:[:†][^】\n]{{0,200}})?)?")
_NO_CITATION = re.compile(r"\] ?[=(:]")  # an index such as a[3] = 5, a link's text, or what a link is defined by
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4}$")  # such a word is in no formula, unless a backslash is before it
_CLOSING = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}
_BEGINS = frozenset("\\[$【")
_BOXES = frozenset("boxed text textbf textit texttt emph underline mathrm mathbf".split())
_SIGN = re.compile(r"[\\^_=<>+]")

_COMMANDS = {"times": "×", "cdot": "×", "div": "/", "pm": "±", "leq": "≤", "geq": "≥", "neq": "≠", "approx": "≈"}
_SILENT = frozenset("left right text mathrm mathbf mathit displaystyle quad qquad limits".split())
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


class Maths(Stage):
    """Holds a formula back to its end. A dollar sign before a digit or a blank begins none."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}  # what signs are called; others stay
        self._opening = ""  # of _CLOSING, once it is known; a sign that may open something is held back
        self._said = ""  # the last characters before
        self._chosen = False  # was the last number in brackets one of a choice?

    def push(self, piece: str) -> str:
        if self._held or not _BEGINS.isdisjoint(piece):
            return super().push(piece)
        return self._give(piece)  # most text, quickly

    def feed(self, character: str) -> str:
        if not self._held:
            if character in _BEGINS and not (character == "$" and self._said[-1:].isalnum()):
                self._held = character
                return ""
            return self._give(character)
        held = self._held
        if held[0] in "[【":
            return self._in_citation(character)
        if held[0] == "\\" and not self._opening and character not in "([":
            return self._in_command(character)
        if is_mark(character):
            return self._give_up() + self.feed(character)
        self._held = held = held + character
        if not self._opening:
            if held == "$$" or held[0] == "\\":
                self._opening = held
                return ""
            self._opening = "$"
            if character.isspace() or character.isdigit():
                return self._give_up()
        return self._in_formula(character)

    def _in_formula(self, character: str) -> str:
        held, opening = self._held, self._opening
        inside = held[len(opening) :]
        closing = _CLOSING.get(opening, "}")
        if inside.endswith(closing) and len(inside) > len(closing):
            inside = inside.removesuffix(closing)
            if opening == "$" and (inside[-1].isspace() or not (_SIGN.search(inside) or len(inside) == 1)):
                return self._give_up()
            self._held = self._opening = ""
            if opening in ("$$", "\\["):
                return ""
            return self._give(inside if closing == "}" and not _SIGN.search(inside) else self._read(inside))
        if opening in ("$$", "\\["):
            return self._give_up() if len(held) > _LONGEST_DISPLAYED else ""
        if character == "\n" or len(held) > _LONGEST or (closing != "}" and _PROSE.search(inside)):
            return self._give_up()
        return ""

    def _in_command(self, character: str) -> str:
        r"""\boxed{42} is its content."""
        name = self._held[1:]
        if character == "{" and name in _BOXES:
            self._held = self._opening = f"{self._held}{{"
            return ""
        if character.isascii() and character.isalpha() and len(name) < 10:
            self._held += character
            return ""
        return self._give_up() + self.feed(character)

    def _in_citation(self, character: str) -> str:
        held = self._held + character
        if _CITATION.fullmatch(held) or _MAY_BE_CITATION.fullmatch(held):
            self._held = held
            return ""
        if not _CITATION.fullmatch(self._held) or _NO_CITATION.search(held):
            return self._give_up() + self.feed(character)
        return self._end_citation(" " * self._held.endswith(" ")) + self.feed(character)

    def _end_citation(self, blank: str) -> str:
        """Leave a citation out. A number to choose, as in "option [3]", is none."""
        held, self._held = self._held, ""
        word = re.search(r"(\w+)[ :]*$", self._said.lower())
        before = word[1] if word else ""
        is_choice = before.endswith(_CHOICES) if is_cjk(before[-1:] or " ") else before in _CHOICES
        self._chosen = held[0] == "[" and (is_choice or self._chosen and before in _LINKS)
        return self._give(held.strip("[] ") + blank if self._chosen else blank)

    def end(self) -> str:
        if _CITATION.fullmatch(self._held):
            return self._end_citation("")
        return self._give_up()

    def _give_up(self) -> str:
        self._opening = ""
        return self._give(super().end())

    def _give(self, text: str) -> str:
        self._said = (self._said + text)[-_SEEN:]
        return text

    def _read(self, formula: str) -> str:
        for _ in range(5):  # fractions within fractions
            formula = _FRACTION.sub(r" \1 / \2 ", formula)
        formula = re.sub(r"\\([A-Za-z]+)", self._command, formula)
        formula = re.sub(r"\^\{?2\}?(?!\d)", " ² ", formula)
        formula = re.sub(r"[\\^_{}]", " ", formula)
        formula = re.sub(r"[=+/*×²]|(?<=\S)\s*-\s*(?=\S)", lambda sign: f" {self._word(sign[0].strip())} ", formula)
        return " ".join(formula.split())

    def _command(self, found: "re.Match[str]") -> str:
        name = found[1]
        return " " if name in _SILENT else f" {_COMMANDS.get(name, name)} "

    def _word(self, sign: str) -> str:
        return self.words.get("×" if sign == "*" else sign, sign)
