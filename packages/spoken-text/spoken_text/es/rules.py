"""What only Spanish says or writes."""

import re

from spoken_text.romance import Romance
from spoken_text.rule import Rules, keep


class Language(Romance):
    def agreed(self, said: str, value: str, noun: str, known: str) -> str:
        if known == "m" and noun in self.words("others"):
            return said
        return super().agreed(said, value, noun, known)

    def end(self, rule: Rules) -> None:
        self.iberian(rule)
        half = r"(?= ?[apAP]\. ?[mM]\.)"
        rule(".", rf"(?<![\w.,:/-])(\d\d?)\.([0-5]\d){half}", lambda f: self.at_time(f[1], f[2]))
        rule(" ", r"(?<![\w.,:/-])[679]\d\d(?: \d\d){3}(?![\w-]|[.,]\d)", self.dialled)
        pesos = r"\$ ?([\d.,]*\d)(?!\w)"  # $ 200 pesos, $ 200 ARS: the word behind tells the currency
        rule("$", pesos, lambda f: f[1] if re.fullmatch("pesos|ARS|COP|CLP|UYU|MXN", f.after) else None)
        part, behind = r"(?<![\w.,:/-])\d{1,2}/\d{1,2}(?![\w/])", ("parte", "partes")
        rule("/", part, lambda f: keep(f) if f.after in behind else None)
