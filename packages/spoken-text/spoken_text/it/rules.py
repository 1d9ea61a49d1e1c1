"""What only Italian says or writes."""

import re

from spoken_text.romance import CHAIN, Romance
from spoken_text.rule import Found, Rules


class Language(Romance):
    def counted(self, value: str, unit: str, mark: str = "") -> str | None:
        return "un'ora" if value == "1" and unit in ("h", "ora") else super().counted(value, unit, mark)

    def nth_part(self, top: int, bottom: int) -> str:
        said = self.part(top, bottom)
        name = self.ordinal(str(bottom))
        return said or f"{self.before_noun(str(top), 'm')} {name if top == 1 else name[:-1] + 'i'}"

    def per_one(self, unit: str, gender: str) -> str:
        return f"all'{unit}" if unit[0] in "aeiou" else f"{'alla' if gender == 'f' else 'al'} {unit}"

    def singulars(self, word: str) -> list[str]:
        ends = self.table("singulars").items()
        found = [word, *(word.removesuffix(end) + single for end, single in ends if word.endswith(end))]
        return [*found, word[:-1] + "o", word[:-1] + "e", word + "o"] if word[-1] == "i" else found

    def holds_noun(self, word: str, held: str) -> bool:
        return held.lstrip("(") == "1" and word[:1] in tuple("aeiou") and self.gender(word) == "f"

    def agreed(self, said: str, value: str, noun: str, known: str) -> str:
        if value != "1":
            return re.sub("uno$", "un", said) if noun == "anni" else said
        if known == "f":
            return "un'" if noun[0] in "aeiouàèéìòù" else "una"
        return "uno" if re.match("z|gn|ps|x|y|pn|s[^aeiouàèéìòù]", noun) else "un"

    def middle(self, rule: Rules) -> None:
        super().middle(rule)
        rule("F", rf"(?<!\w)Fr\. ?({self.pattern})(?![\w]|[.,]\d)", lambda f: self.money(self.value(f[1]), "CHF"))
        rule("h", r"(?<!\w)h\.? ?(?=\d)", lambda f: "ore ")
        hours = r"(?<![\w.,:/-])(\d\d?)\.([0-5]\d) ?[-–] ?(\d\d?)\.([0-5]\d)(?![\w]|[.,]\d)"
        rule(".", hours, lambda f: f"{self.at_time(f[1], f[2])}-{self.at_time(f[3], f[4])}")
        rule(
            "/",
            r"(?<![\w.,:/-])0/(\d\d?)(?![\w/])",
            lambda f: f"{self.cardinal('0')} {self.slash} {self.cardinal(f[1])}",
        )
        several = r"(?<![\w.,:/-])([1-9]\d?)/([1-9]\d?)(?![\w/]|[.,]\d)"  # 20/30 secondi
        rule("/", several, self._several)
        nth = r"(?<![\w.,])(\d{1,6})-?esim([oaie])(?!\w)"  # 96esima
        rule("e", nth, lambda f: self.ordinal(f[1])[:-1] + f[2])
        has = r"(?<![\w.,])(\d{1,4}) ha$"  # l'articolo 134 ha luogo: a verb
        others = ("di", "e", "a", "con", "in", "circa")
        rule(
            "h", has, lambda f: f"{self.cardinal(f[1])} ha" if f.after[:1].islower() and f.after not in others else None
        )
        free = r"(?<![\w.,:/-])800 \d{3} \d{3}(?![\w]| \d|[.,]\d)"
        called = self.words("called")
        rule(" ", free, lambda f: self.dialled(f) if f.before in called else None)
        rule("L", r"(?<!\w)L(?:it)?\. ?(\d{1,3}(?:\.\d{3})+)(?![\d/]|,\d)", self._lire)
        rule("", r"(?<![\w.,:/-])3\d\d[ -/]\d{6,7}(?![\w-]|[.,]\d)", self.dialled)

    def _several(self, found: Found) -> str | None:
        rises = int(found[1]) < int(found[2]) and found.after in self.words("lasting")
        return f"{self.cardinal(found[1])}-{self.cardinal(found[2])}" if rises else None

    def _lire(self, found: Found) -> str:
        value = self.value(found[1])
        return f"{self.cardinal(value)} {'di ' if int(value) % 10**6 == 0 else ''}lire"

    def centuries_behind(self, rule: Rules) -> None:
        rule("ILVX", rf"(?<!\w)({CHAIN}) ?(sec(?:oli|olo|c?\.)(?!\w))?", self._century_behind)

    def _century_behind(self, found: Found) -> str | None:
        name = found[2] or ""
        if not name and found.after not in ("secolo", "secoli"):
            return None
        said = self.chain(found[1])
        if not name or not said:
            return said
        return f"{said} {self.centuries[name]}{found.stop(name)}"
