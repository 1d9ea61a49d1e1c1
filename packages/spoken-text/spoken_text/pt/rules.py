"""What only Portuguese says or writes. It is said as in Brazil: dezenove, um bilhão."""

import re

from spoken_text.romance import Romance, behind_millions
from spoken_text.rule import Rules
from spoken_text.spoken import num2words


class Language(Romance):
    feminine_ends = re.compile(
        r"(?:[çx]ões|[nsg]iões|ssões|nsões|rsões|stões|usões|isões|esões|liões|ção|ssão|ades?|tudes?|agens?|ências?|"
        r"âncias?|ezas|ãs|(?<!m)as|[uoi]zes|ezes)$"
    )
    masculine_ends = re.compile(
        r"(?:[aeiou]gramas|emas|omas|istas|[^m]os|(?<![aeiá])mos|ões|es|ais|eis|óis|uis|ens|ins|uns)$"
    )
    ordinal_ends = r"\.?[ºª°]"
    clock_end = r"(?: ?h\b)?"

    def whole(self, number: int) -> str:
        return num2words(number, lang="pt_BR").replace(",", "")

    def year(self, year: str) -> str:
        return self.cardinal(year)

    def scale_form(self, value: str) -> int:
        return int(float(value) >= 2)

    def feminine(self, words: str) -> str:
        head, tail = behind_millions(words)
        tail = re.sub(r"\bdois\b", "duas", re.sub(r"\bum\b", "uma", tail))
        return head + re.sub(r"(\w+(?:cent|zent|hent))os\b", r"\1as", tail)

    def king(self, number: str, is_queen: bool) -> str:
        return self.cardinal(number) if int(number) > 10 else super().king(number, is_queen)

    def at_time(self, hour: str, minute: str, half: str = "") -> str:
        hours = self.before_noun(self.cardinal(str(int(hour))), str(int(hour)), "f")
        if int(minute):
            return f"{hours} e {self.cardinal(str(int(minute)))}"
        return f"{hours} {'hora' if int(hour) == 1 else 'horas'}"

    def holds_noun(self, word: str, held: str) -> bool:
        return word == "em"

    def is_open(self, value: str, noun: str, said: str) -> bool:
        return value == "1" and noun.endswith("a")

    def end(self, rule: Rules) -> None:
        self.iberian(rule)
        rule("-", r"(?<![\w.,:/-])\d{4}-\d{3}(?!\w|[.,-])", self._postal)

    def _postal(self, found: re.Match[str]) -> str | None:
        return self.dialled(found[0]) if self.around.word_after(found)[:1].isupper() else None

    def products(self, rule: Rules) -> None:
        rule("x", r"(?<=\d) x (?=\d)", lambda f: " por ")
