"""What only Dutch writes: times such as 14.30 and 14u30, scores, centuries, postal codes, halves."""

import re

from spoken_text.european import number_of
from spoken_text.germanic import Germanic
from spoken_text.rule import DAY, HOUR, MINUTE, MONTH, Found, Rules, ends_of

_ROMAN_END = re.compile("(?:ste|de|e)(?:-eeuw.*)?$")
_WITH_LETTERS = re.compile(r"[(\[]?[1-9]\d{3} [A-Z]{2}[,.;:!?)]*|NL\d\d [A-Z]{4}")
"""A postal code, and the beginning of an account's number."""


class Language(Germanic):
    # ---------------------------------------------------------------- numbers

    def whole(self, number: int) -> str:
        """1,100 to 1,999 are said in hundreds, as years and as counts."""
        hundreds, rest = divmod(number, 100)
        if not 11 <= hundreds <= 19:
            return super().whole(number)
        return self.changed(f"{super().whole(hundreds)}honderd{super().whole(rest) if rest else ''}", "corrections")

    def cardinal(self, value: str, mark: str = "") -> str:
        """Two decimals are said as one number: drie komma veertien."""
        whole, _, decimals = value.partition(".")
        if len(decimals) != 2 or decimals[0] == "0":
            return super().cardinal(value, mark)
        return f"{super().cardinal(whole)} {self.point} {self.whole(int(decimals))}"

    def king(self, number: str, is_queen: bool) -> str:
        return f"de {self.ordinal(number).capitalize()}"

    def ordinal(self, number: str, **inflection: str) -> str:
        return self.changed(super().ordinal(number), "corrections")

    def part(self, top: int, bottom: int) -> str:
        name = {2: "half", 4: "kwart"}.get(bottom) or self.ordinal(str(bottom))
        return f"{'een' if top == 1 else self.cardinal(str(top))} {name}"

    def with_part(self, whole: str, part: str, is_half: bool) -> str:
        if not is_half:
            return super().with_part(whole, part, is_half)
        said = self.cardinal(whole)
        return "anderhalf" if whole == "1" else f"{said}{'ën' if said[-1] == 'e' else 'en'}half"

    # ---------------------------------------------------------------- which words belong together

    def follows(self, word: str, held: str) -> bool:
        return _WITH_LETTERS.fullmatch(f"{held} {word}") is not None

    def begins(self, word: str) -> bool:
        return word.rstrip(",;:!?)").endswith("str.")

    def is_roman(self, word: str) -> bool:
        return bool(_ROMAN_END.search(word)) and number_of(_ROMAN_END.sub("", word)) > 0

    # ---------------------------------------------------------------- rules

    def first(self, rule: Rules) -> None:
        century = rf"^([IVX]{{1,8}})(?:ste|de|e)(?=$|-(?:{self.any_of('centuries')}))"
        rule("IVX", century, self._century)
        names = ends_of(name for name in self.leads if name[0] != "§")
        rule(".", rf"(?<![\w.])({names})\. ?(?=\d)", lambda f: f"{self.leads[f[1]]} ")
        rule("§", r"(?:^|(?<=[(\[ ]))(§§?) ?(?=\d)", lambda f: f"{self.leads[f[1]]} ")
        rule(".", r"(\w+)str\.", lambda f: f"{f[1]}straat{f.stop(f[0])}")
        self._times(rule)
        self._short_dates(rule)
        rule("-–", r"(?<![\w.,/–-])(\d\d?) ?[-–] ?(\d\d?)(?![\w%€/–-]|[.,:]\d| ?=| - ?\d)", self._score)
        rule("-", rf"(?<![\w.,])(\d{{1,4}})-?((?:{self.any_of('joined_ends')})\w*)", self._joined)
        rule("x", r"(?<![\w.,-])(\d{1,3})x(?![\w/*+=-]| [-+=*/])", lambda f: f"{self.cardinal(f[1])} keer")
        self.coins(r",(\d\d) ", rule)
        self.fixed_pairs(rule)
        self.seasons(rule)
        rule(" ", r"^([1-9]\d{3}) ([A-Z])([A-Z])(?!\w)", self._post_code)
        rule(".,", r"(?<=\d)[,.][-–—]{1,2}(?= ?€| EUR| euro|$|[.,;)])", lambda f: "")
        phone = r"\(0\d{1,3}\) ?\d{2,9}(?:[ -]\d{1,9}){0,5}|0\d{1,3}/\d{2,9}(?:[. -]\d{1,9}){0,5}"
        rule("/(", rf"(?<![\w.,:/-])(?:{phone})(?!\w|[.,]\d)", self.dialled)
        self.rates(rule)
        self.issues(rule)
        self.pressures("bloeddruk", rule)
        self.signs(rule)

    def _century(self, found: Found) -> str | None:
        """XXe eeuw, XIXe-eeuwse"""
        is_century = found.rest.startswith("-") or found.after in self.words("centuries")
        number = number_of(found[1])
        return self.ordinal(str(number)) if number and is_century else None

    def _times(self, rule: Rules) -> None:
        """14.30 uur, om 14.30, 14u30, and the decade '80"""
        dotted = rf"(?<![\w.,:/-]){HOUR}\.{MINUTE}"
        rule(".", rf"{dotted} ?[-–] ?(?=\d\d?\.[0-5]\d ?u)", lambda f: f"{self.clock_at(f)} {self.to} ")
        rule(".", rf"{dotted} ?(?:uur|u)\b\.?", lambda f: self.clock_at(f) + f.stop(f[0]))

        @rule(".", rf"{dotted}(?![\w%]|[.,:]\d| ?[€$£%°])")
        def alone(found: Found) -> str | None:
            return self.clock_at(found) if found.before in self.words("before_time") else None

        rule("uh", rf"(?<![\w.,:/-]){HOUR} ?[uh] ?{MINUTE}(?!\w| ?min)", self.clock_at)
        rule("'’‘", r"(?<![\w'’])['’‘](?=\d\d(?![\d'’]))", lambda f: "")

    def _short_dates(self, rule: Rules) -> None:
        """12-05-24, op 1-2-24"""

        @rule("-/.", rf"(?<![\w.,:/-]){DAY}([-/.]){MONTH}\2(\d\d)(?![\w/-]|[.,]\d)")
        def short(found: Found) -> str | None:
            padded = len(found[1]) == len(found[3]) == 2
            if not padded and found.before not in self.words("before_day"):
                return None
            return self.on_date(("20" if found[4] < "40" else "19") + found[4], int(found[3]), found[1])

    def _score(self, found: Found) -> str | None:
        """Het werd 3 - 0, een 2-1 zege"""
        falls, is_alone = int(found[1]) >= int(found[2]), found.head[-1:] == "(" or found.rest[:1] == ","
        sure = falls and (found.before in self.words("score_before") or is_alone and " " in found[0])
        if not sure and self.words("scores").isdisjoint((found.before, found.after)):
            return None
        return f"{self.cardinal(found[1])} {self.cardinal(found[2])}"

    def _joined(self, found: Found) -> str:
        """12-jarige"""
        return f"{self.cardinal(found[1])}{found[2]}"

    def _post_code(self, found: Found) -> str | None:
        """1012 AB Amsterdam"""
        before, after = found.around.before, found.after
        is_place = after[:1].isupper() or before.lower() == "postcode" or before[-1:] == ","
        return f"{self.digits(found[1])} {found[2]} {found[3]}" if is_place else None

    def last(self, rule: Rules) -> None:
        """5 euro/maand, and a half before a noun: een halve liter, een half uur."""
        rates = self.table("rates")
        rule("/", rf"(?<=[a-z]{{3}})/({ends_of(rates)})(?![\w²³])", lambda f: f" {self.per} {rates[f[1]]}")
        nouns = {forms[0] for forms in self.units.values()} | self.words("halve_nouns")
        nouns -= self.words("half_nouns")
        half = r"\b(een |\w+[eë]n|ander)half\b"
        rule("h", half, lambda f: f"{f[1]}halve" if f.after in nouns else None)
