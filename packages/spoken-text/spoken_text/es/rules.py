"""What only Spanish says or writes."""

import re

from spoken_text.romance import Romance
from spoken_text.rule import Found, Rules, keep


class Language(Romance):
    def agreed(self, said: str, value: str, noun: str, known: str) -> str:
        if known == "m" and noun in self.words("others"):
            return said
        return super().agreed(said, value, noun, known)

    def end(self, rule: Rules) -> None:
        self.iberian(rule)
        half = r"(?= ?[apAP]\. ?[mM]\.)"
        rule(".", rf"(?<![\w.,:/-])(\d\d?)\.([0-5]\d){half}", lambda f: self.at_time(f[1], f[2]))
        rule(" ", r"(?<![\w.,:/-])[679]\d\d(?: \d\d){3}(?![\w-]|[.,]\d)", lambda f: self.dialled(f[0]))
        rule("$", r"\$ ?([\d.,]*\d)(?![\w])", self._pesos)
        part, behind = r"(?<![\w.,:/-])\d{1,2}/\d{1,2}(?![\w/])", ("parte", "partes")
        rule("/", part, lambda f: keep(f) if f.after in behind else None)

    def _pesos(self, found: Found) -> str | None:
        """$ 200 pesos, $ 200 ARS: the word behind tells the currency"""
        after = found.after
        return found[1] if after == "pesos" or re.fullmatch("ARS|COP|CLP|UYU|MXN", after) else None
