"""What only French says or writes."""

import re

from spoken_text.european import number_of
from spoken_text.romance import Romance
from spoken_text.rule import Found, Rules

_ROMAN = re.compile(r"([IVX]{2,8}|[VX]|I(?=er|re|ʳᵉ|ᵉʳ))(er|re|e|i?èmes?|ʳᵉ|ᵉʳ|ᵉ)")
_VOWELS = tuple("aeiouyéèêœh")


class Language(Romance):
    def ordinal_at(self, found: Found) -> str | None:
        number, end = found[1], found[0].lstrip("0123456789.")
        many, end = "s" if end[-1] == "s" else "", end.removesuffix("s")
        if number == "1" and end in ("er", "ᵉʳ", "re", "ère", "ʳᵉ"):
            return ("premier" if end in ("er", "ᵉʳ") else "première") + many
        if number != "1" and end in ("d", "nd", "nde"):
            return ("seconde" if end == "nde" else "second") + many if number == "2" else None
        return self.ordinal(number) + many

    def holds_noun(self, word: str, held: str) -> bool:
        return held.endswith("000") and word.startswith(_VOWELS) and bool(self.gender(word))

    def of_noun(self, noun: str) -> str:
        return "d'" if noun.startswith(_VOWELS) else "de"

    def agreed(self, said: str, value: str, noun: str, known: str) -> str:
        """1 rue Scribe is the number of a house."""
        return said if noun in self.words("numbered_streets") else super().agreed(said, value, noun, known)

    def is_open(self, value: str, noun: str, said: str) -> bool:
        return said.endswith("un") and noun.endswith("e" if value == "1" else "es")

    def is_roman(self, word: str) -> bool:
        return bool(_ROMAN.fullmatch(word))

    def own(self, rule: Rules) -> None:
        rule("IVX", rf"(?<!\w){_ROMAN.pattern}(?!\w)", self._roman)

    def middle(self, rule: Rules) -> None:
        rule("F", rf"(?<!\w)Fr\. ?({self.pattern})(?![\w]|[.,]\d)", lambda f: self.money(self.value(f[1]), "CHF"))
        rule("h", r"(?<!\d)24 ?h ?/ ?24(?!\d)", lambda f: "vingt-quatre heures sur vingt-quatre")
        rule("ah", r"(?<![\w.,])(\d\d?) ?(h|heures?|ans?) (?:1/2|½)(?![\w/])", self._half_more)
        rule("j", r"(?<!\d)7 ?j ?/ ?7(?!\d)", lambda f: "sept jours sur sept")
        rule("'’", r"(?<=\d0)['’]s(?!\w)", lambda f: "")  # 90's
        metres = {"1": "un mètre", "2": "deux mètres"}
        rule("m", r"(?<![\w.,])([12]) ?m ?([1-9]\d)(?!\w)", lambda f: f"{metres[f[1]]} {self.cardinal(f[2])}")
        rule(".", r"(?<![\w.,:/-])0[1-9](?:\.\d\d){4}(?![\w.]\d)", self.dialled)
        super().middle(rule)

    def _roman(self, found: Found) -> str | None:
        """Le XIXe; alone, Xe may be a sign or a name."""
        number = number_of(found[1])
        sure = found.before in self.words("articles") or found.after.lower() in self.words("numbered")
        if not number or not (sure or len(found[1]) > 1):
            return None
        first = "première" if found[2][0] in "rʳ" else "premier"
        return first if number == 1 else self.ordinal(str(number))

    def _half_more(self, found: Found) -> str:
        said = self.counted(found[1], "h") if found[2][0] == "h" else None
        return f"{said} et demie" if said else f"{self.cardinal(found[1])} {found[2]} et demi"
