"""What only Spanish says or writes."""

import re

from spoken_text.romance import Romance
from spoken_text.rule import HOUR, MINUTE, Found, Rules

_PLAIN = str.maketrans("áéíóú", "aeiou")


class Language(Romance):
    def ordinal(self, number: str, **inflection: str) -> str:
        return self.changed(super().ordinal(number, **inflection), "ordinal_corrections")

    def nth_part(self, top: int, bottom: int) -> str:
        """doceavo, veintidosavo, treintaiunavo"""
        if bottom <= 10 or bottom in range(100, 1001, 100):
            return super().nth_part(top, bottom)
        if bottom % 1000 == 0:
            many = self.cardinal(str(bottom // 1000)).replace(" ", "")
            return f"{self.before_noun(str(top), 'm')} {many}milésimo{'s' if top > 1 else ''}"
        name = self.cardinal(str(bottom)).replace(" y ", "i").replace(" ", "").translate(_PLAIN)
        name = f"{re.sub('[ao]$', '', name)}avo{'s' if top > 1 else ''}"
        return f"{self.before_noun(str(top), 'm')} {name}"

    def _parts(self, found: Found) -> str | None:
        """5/12 partes: cinco doceavas partes"""
        top, bottom = found[1], int(found[2])
        if bottom < 3:
            return None
        name = self.nth_part(1, bottom).removeprefix("un ")
        name = {"tercio": "tercer", "cuarto": "cuart"}.get(name, name[:-1])
        return f"{self.before_noun(top, 'f')} {name}a{'s' if top != '1' else ''}"

    def agreed(self, said: str, value: str, noun: str, known: str) -> str:
        if known == "m" and noun in self.words("others"):
            return said
        return super().agreed(said, value, noun, known)

    def clock_at(self, found: Found) -> str:
        """a la una, a las cinco y dos"""
        hour, minute = str(int(found[1])), int(found[2])
        if found.before in ("la", "las") and not minute and int(hour) <= 12:
            return self.before_noun(hour, "f")
        if 0 < minute < 10:
            return f"{self.before_noun(hour, 'f')} y {self.cardinal(str(minute))}"
        return super().clock_at(found)

    def _is_hour(self, found: Found) -> bool:
        earlier = [found.around.earlier, found.around.before, *found.head.split()][-2]
        return earlier in ("a", "de", "desde", "hasta", "sobre")

    def _of_day(self, found: Found) -> str:
        """5:02 p. m.: cinco y dos de la tarde"""
        hour, minute = str(int(found[1])), int(found[2] or 0)
        said = self.before_noun(hour, "f") + (f" y {self.cardinal(str(minute))}" if minute else "")
        day = "mañana" if "a" == found[3] or found[4] == "mañana" else "noche" if 8 <= int(hour) < 12 else "tarde"
        return f"{said} de la {day}"

    def end(self, rule: Rules) -> None:
        self.iberian(rule)
        rule("'’", r"(?<![\w.,'’])(\d{1,3})['’](\d\d?)(?![\w'’\"”])", lambda f: f"{f[1]},{f[2]}")
        rule(",", r"(?<![\w.,])[1-9]\d{0,2},\d00(?![\w,]|\.\d)", lambda f: f[0].replace(",", ""))

        @rule("", r"(?<![\w.,:/-])[679]\d{8}(?![\w/-]|[.,]\d)")
        def phone(found: Found) -> str | None:
            named = {found.before.strip(".:"), found.around.earlier.lower()} & self.words("phones")
            return self.digits(found[0]) if named else None

        clock = rf"(?<![\w.,:/-]){HOUR}\.{MINUTE}(?![\w%]|[.,]\d)"
        rule(".", clock, lambda f: f"{f[1]}:{f[2]}" if f.before == "las" and self._is_hour(f) else None)
        day = rf"(?<![\w.,:/-]){HOUR}(?:[:.]{MINUTE})? ?(?:([ap])\.?m(?![\w.])|de la (mañana|tarde)(?!\w))"
        rule("dm", day, self._of_day)
        half = r"(?= ?[apAP]\. ?[mM]\.)"
        rule(".", rf"(?<![\w.,:/-])(\d\d?)\.([0-5]\d){half}", lambda f: self.at_time(f[1], f[2]))
        rule(" ", r"(?<![\w.,:/-])[679]\d\d(?: \d\d){3}(?![\w-]|[.,]\d)", self.dialled)
        pesos = r"\$ ?([\d.,]*\d)(?!\w)"  # $ 200 pesos, $ 200 ARS: the word behind tells the currency
        rule("$", pesos, lambda f: f[1] if re.fullmatch("pesos|ARS|COP|CLP|UYU|MXN", f.after) else None)
        part, behind = r"(?<![\w.,:/-])([1-9]\d?)/([1-9]\d?)(?![\w/])", ("parte", "partes")
        rule("/", part, lambda f: self._parts(f) if f.after in behind else None)
