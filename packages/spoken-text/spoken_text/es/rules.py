"""What only Spanish says or writes."""

import re

from spoken_text.romance import Romance, behind_millions
from spoken_text.rule import Rules, keep

_TEENS = "undécimo duodécimo decimotercero decimocuarto decimoquinto decimosexto decimoséptimo decimoctavo decimonoveno"
_ORDINALS = dict(zip(map(str, range(11, 20)), _TEENS.split(), strict=True))
"""Those that num2words gets wrong."""


class Language(Romance):
    feminine_ends = re.compile(
        r"(?:(?:[cstx]i|[gñ]i|ni)ones|[cs]ión|[dt]ad(?:es)?|tud(?:es)?|umbres?|encias?|ancias?|(?<!m)as)$"
    )
    masculine_ends = re.compile(r"(?:[aeiouáéíóú]gramas|emas|omas|istas|itas?mas|[^m]os|(?<![aei])mos|es)$")
    ordinal_ends = r"\.?(?:[ºª°]|er\b|ro\b|ra\b|do\b|da\b|to\b|ta\b|mo\b|ma\b|vo\b|va\b|no\b|na\b)"
    clock_end = r"(?: ?h\b)?"

    def whole(self, number: int) -> str:
        return re.sub(r"uno(?= mil\b)", "un", super().whole(number)).replace("veintiun ", "veintiún ")

    def point_of(self, mark: str) -> str:
        return "coma" if mark == "," else self.point

    def ordinal(self, number: str, **inflection: str) -> str:
        return _ORDINALS.get(number) or super().ordinal(number)

    def masculine(self, words: str) -> str:
        return re.sub("uno$", "un", re.sub("veintiuno$", "veintiún", words))

    def feminine(self, words: str) -> str:
        head, tail = behind_millions(words)
        return head + re.sub(r"(cient|quinient)os\b", r"\1as", re.sub("uno$", "una", tail))

    def king(self, number: str, is_queen: bool) -> str:
        return self.cardinal(number) if int(number) > 10 else super().king(number, is_queen)

    def at_time(self, hour: str, minute: str, half: str = "") -> str:
        hours = self.before_noun(self.cardinal(str(int(hour))), str(int(hour)), "f")
        return f"{hours} {self.cardinal(str(int(minute))) if int(minute) else 'hora' if int(hour) == 1 else 'horas'}"

    def shortened(self, said: str, written: str) -> str:
        return re.sub("(primer|tercer)o$", r"\1", said) if written.endswith("er") else said

    def agreed(self, said: str, value: str, noun: str, known: str) -> str:
        if known == "m" and noun in self.words("others"):
            return said
        return self.feminine(said) if known == "f" else self.masculine(said)

    def end(self, rule: Rules) -> None:
        self.iberian(rule)
        half = r"(?= ?[apAP]\. ?[mM]\.)"
        rule(".", rf"(?<![\w.,:/-])(\d\d?)\.([0-5]\d){half}", lambda f: self.at_time(f[1], f[2]))
        rule(" ", r"(?<![\w.,:/-])[679]\d\d(?: \d\d){3}(?![\w-]|[.,]\d)", lambda f: self.dialled(f[0]))
        rule("$", r"\$ ?([\d.,]*\d)(?![\w])", self._pesos)
        part, behind = r"(?<![\w.,:/-])\d{1,2}/\d{1,2}(?![\w/])", ("parte", "partes")
        rule("/", part, lambda f: keep(f[0]) if self.around.word_after(f) in behind else None)

    def _pesos(self, found: re.Match[str]) -> str | None:
        """$ 200 pesos, $ 200 ARS: the word behind tells the currency"""
        after = self.around.word_after(found)
        return found[1] if after == "pesos" or re.fullmatch("ARS|COP|CLP|UYU|MXN", after) else None

    def products(self, rule: Rules) -> None:
        rule("x", r"(?<=\d) x (?=\d)", lambda f: " por ")
        rule("x", r"(?<![\w.,])(\d{1,4})x(?=\d{1,4}(?!\w))", lambda f: f"{f[1]} por ")
