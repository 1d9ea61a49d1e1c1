"""What only Portuguese says or writes. It is said as in Brazil: dezenove, um bilhão."""

import re

from spoken_text.romance import Romance
from spoken_text.rule import DAY, MONTH, Found, Rules


class Language(Romance):
    def nth_part(self, top: int, bottom: int) -> str:
        """três onze avos"""
        if bottom <= 10 or bottom in (100, 1000):
            return super().nth_part(top, bottom)
        return f"{self.before_noun(str(top), 'm')} {self.cardinal(str(bottom))} avos"

    def holds_noun(self, word: str, held: str) -> bool:
        return word == "em"

    def begins(self, word: str) -> bool:
        return word in ("R", "US", "D.") or super().begins(word)

    def follows(self, word: str, held: str) -> bool:
        return held in ("R", "US") and word.startswith("$") or super().follows(word, held)

    def first(self, rule: Rules) -> None:
        super().first(rule)

        @rule("D", r"^D\.$")
        def dom(found: Found) -> str | None:
            """D. Pedro, D. Maria"""
            name = found.around.after.rstrip(",;:!?.")
            begins = not found.around.before or found.around.before[0].islower()
            known = begins and name[:1].isupper() and name[1:].islower()
            return ("Dona" if name[-1] == "a" else "Dom") if known else None

        rule("$", r"(?<!\w)(R|US) (?=\$)", lambda f: f[1])
        day = rf"(?<![\w.,:/-])(?:(1)º ?/ ?(0[1-9]|1[0-2])|{DAY} / (0[1-9]))(?![\w/]|[.,]\d)"
        rule("/", day, lambda f: self.on_date("", int(f[2] or f[4]), f[1] or f[3]))

        @rule("/.", rf"\({DAY} ?[/.] ?{MONTH}(?=\))")
        def on_day(found: Found) -> str | None:
            """quarta-feira (5/11)"""
            named = found.around.before.lower().split("-")[-1] in ("dia", "feira", "sábado", "domingo")
            return f"({self.on_date('', int(found[2]), found[1])}" if named else None

        @rule("$", rf"(?<!\w)R\$ ?({self.pattern}(?: (?:mil|milhão|milhões|bilhão|bilhões))?)")
        def twice(found: Found) -> str | None:
            """R$ 1 mil reais"""
            return found[1] if re.match(" +(?:de +)?reais", f"{found.rest} {found.around.after}") else None

        months = "|".join(self.months)
        rule("0", rf"(?<![\w.,:/-])0(?=[1-9] de (?:{months}))", lambda f: "")

        @rule("/", r"(?<![\w.,/])[0-7]/[0-7](?:(?:, | e )[0-7]/[0-7])*(?![\w/])")
        def sets(found: Found) -> str | None:
            """por 6/2, 1/6 e 7/6"""
            sure = re.search("[67]/[0-6]", found[0]) and (found.before == "por" or len(found[0]) > 3)
            return found[0].replace("/", " a ") if sure else None

        rule("x", r"(?<=\d{3})x(?=\d{3})", lambda f: f" {self.by} ")

        @rule("°", r"(?<![\w.,])([1-9]\d?) ?°(?=$| [A-Z])")
        def before_name(found: Found) -> str | None:
            """o 38° Encontro"""
            name = found.after[:1].isupper() and len(found.after) > 2 and found.after != "Celsius"
            return self.ordinal(found[1]) if name and found.before in ("o", "a", "do", "da", "no", "na") else None

        score = r"(?<![\w.,])(\d{1,2}) ?x ?(\d{1,2})(?![\w.,])"  # Flamengo 2x1 Vasco
        rule("x", score, lambda f: f"{f[1]} a {f[2]}" if f.around.before[:1].isupper() else None)

    def is_open(self, value: str, noun: str, said: str) -> bool:
        return value == "1" and noun.endswith("a")

    def end(self, rule: Rules) -> None:
        self.iberian(rule)
        rule("-", r"(?<![\w.,:/-])(?:\d{3}\.\d{3}\.\d{3}|\d{8,12})-\d\d(?![\w-]|[.,]\d)", self.dialled)  # CPF, CNPJ
        postal = r"(?<![\w.,:/-])\d{4}-\d{3}(?!\w|[.,-])"
        rule("-", postal, lambda f: self.dialled(f) if f.after[:1].isupper() else None)
