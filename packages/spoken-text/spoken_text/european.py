"""What French, Spanish, Italian, Portuguese and Russian write beside numbers: abbreviations such as "n° 5", centuries
in Roman numerals, signs of arithmetic, dates with dots or dashes, and halves."""

import re
from math import gcd

from spoken_text.agreement import feminine, gender, singular
from spoken_text.rule import Around, Kept, Rules, keep
from spoken_text.spoken import Spoken

CODES = frozenset(("fr", "es", "it", "pt", "ru"))

_LEADS = {
    "fr": "n° nº no. num. : numéro, art. : article, p. : page, pp. : pages, chap. : chapitre, vol. : volume, "
    "fig. : figure, env. : environ, § : paragraphe",
    "es": "n.º nº n° n.° nro. núm. : número, art. : artículo, arts. : artículos, p. pág. : página, "
    "pp. págs. : páginas, cap. : capítulo, vol. : volumen, fig. : figura, aprox. : aproximadamente",
    "it": "n. n° nº n.º n.° : numero, art. : articolo, artt. : articoli, p. pag. : pagina, pp. pagg. : pagine, "
    "cap. : capitolo, vol. : volume, fig. : figura, ca. : circa, § : paragrafo",
    "pt": "n.º nº n° n.° : número, art. : artigo, arts. : artigos, p. pág. : página, pp. págs. : páginas, "
    "cap. : capítulo, vol. : volume, fig. : figura, aprox. : aproximadamente, § : parágrafo",
    "ru": "№ : номер",
}
_SIGNS = {
    "fr": "plus, plus ou moins, environ, égale, moins, fois, divisé par",
    "es": "más, más o menos, aproximadamente, igual a, menos, por, entre",
    "it": "più, più o meno, circa, uguale, meno, per, diviso",
    "pt": "mais, mais ou menos, aproximadamente, igual a, menos, vezes, dividido por",
    "ru": "плюс, плюс-минус, примерно, равно, минус, умножить на, разделить на",
}
_SIGN_KINDS = ("+", "±", "≈", "=", "−", "×", "÷")
_SAME = {"~": "≈", "-": "−", "–": "−", "x": "×", "*": "×", "·": "×", "х": "×", "/": "÷", ":": "÷"}

_CENTURY = {
    "es": {"siglo": "siglo", "siglos": "siglos", "s.": "siglo", "ss.": "siglos"},
    "pt": {"século": "século", "séculos": "séculos", "séc.": "século", "sécs.": "séculos", "secs.": "séculos"},
    "it": {"secolo": "secolo", "secoli": "secoli", "sec.": "secolo", "secc.": "secoli"},
}
_EVENTS = {
    "es": "guerra:f república:f edición:f dinastía:f cumbre:f congreso:m aniversario:m reich:m concilio:m centenario:m",
    "pt": "guerra:f república:f edição:f dinastia:f cúpula:f congresso:m aniversário:m reich:m concílio:m",
    "it": "guerra:f repubblica:f edizione:f dinastia:f congresso:m anniversario:m reich:m concilio:m municipio:m",
}
_ROMAN = r"[IVXL]{1,8}"
_FRENCH = re.compile(r"([IVX]{2,8}|[VX]|I(?=er|re|ʳᵉ|ᵉʳ))(er|re|e|i?èmes?|ʳᵉ|ᵉʳ|ᵉ)")
_VALID = re.compile(r"(?=[IVXL])L?X{0,3}(?:IX|IV|V?I{0,3})|XL(?:IX|IV|V?I{0,3})")
_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "Х": 10}
_FIGURES = frozenset("IVXLХ")
_ALONE = frozenset("+±≈~=")
_JOINS = frozenset("y e et и al a - –".split())
MAY_BE_ROMAN = (
    r"\b[IVX]{1,8}(?:er|re|e|i?èmes?)\b|\b[IVXLХ]{2,8}\b"
    r"|\b[IVXLХ] (?:[Ss]ec|[Gg]uerra|[Rr]ep|в|[Ee]di[czç]|[Dd]inast|[Cc]on[gc]|[Aa]n|Reich|[Cc][uú][mp]|[Cc]ent|[Mm]un)"
    r"|\b[IVXХ] и [IVXХ]"
    r"|\b(?:siglos?|s|ss|séculos?|sécs?|sec|secc|secol[oi])\.? [IVXL]"
)
"""What `figures.BEFORE_ROMAN` looks for as well."""


def number_of(roman: str) -> int:
    """The value of a Roman numeral below 90; 0 if it is none."""
    roman = roman.replace("Х", "X")
    if not _VALID.fullmatch(roman):
        return 0
    values = [_VALUES[letter] for letter in roman]
    return sum(-a if a < b else a for a, b in zip(values, [*values[1:], 0], strict=True))


class European:
    """The rules of one language."""

    def __init__(self, spoken: Spoken, around: Around):
        self.spoken, self.around, self.code = spoken, around, spoken.code
        self.leads: dict[str, str] = {}
        for row in _LEADS.get(self.code, "").split(", "):
            written, _, said = row.partition(" : ")
            self.leads |= dict.fromkeys(written.split(), said)
        self.centuries = _CENTURY.get(self.code, {})
        self.signs = dict(zip(_SIGN_KINDS, _SIGNS.get(self.code, "").split(", "), strict=False))
        self.signs |= {other: self.signs[sign] for other, sign in _SAME.items()} if self.code in CODES else {}
        self.events = dict(pair.split(":") for pair in _EVENTS.get(self.code, "").split())

    # ---------------------------------------------------------------- which words belong together

    def begins(self, word: str) -> bool:
        """Is the word one that a number may follow, such as "art." or "+"?"""
        if self.code not in CODES:
            return False
        word = re.split("['’]", word)[-1] if "'" in word or "’" in word else word  # l'art.
        word = word.lstrip('("«„[').lower()
        is_money = word in ("l.", "lit.") and self.code == "it" or word == "fr." and self.code in ("fr", "it")
        return word in self.leads or word in _ALONE or word in self.centuries or is_money

    def is_roman(self, word: str) -> bool:
        """May the word be a century?"""
        if word[:1] not in _FIGURES:
            return False
        if self.code == "fr":
            return bool(_FRENCH.fullmatch(word))
        return self.code in ("es", "it", "pt") and all(map(number_of, re.split("[-–]", word)))

    def follows(self, word: str, held: str) -> bool:
        """Does the word belong to the word before it, which is held?"""
        if self.code not in CODES:
            return False
        if held[-1].isdecimal():
            return word in ("+", "=", "×", "÷", "·", "*", "x", "х", "/", "-", "−")
        has_digit = any(map(str.isdecimal, word))
        if held in self.signs or self.begins(held):
            return has_digit or self.is_roman(word) and held.lower() in self.centuries
        if number_of(held):
            return word in _JOINS or f"{word}." in self.centuries or word in self.centuries
        if held in _JOINS and word in ("il", "el", "o"):
            return True
        return held in (*_JOINS, "il", "el", "o") and bool(number_of(word))

    # ---------------------------------------------------------------- rules

    def first(self) -> Rules:
        """What no other rule may take apart."""
        if self.code not in CODES:
            return
        if self.code == "fr":
            roman = rf"(?<!\w){_FRENCH.pattern}(?!\w)"
            articles = frozenset("le la les ce cette au aux du des en un une et à".split())
            named = frozenset("siècle siècles république empire arrondissement congrès dynastie régiment".split())

            def french(found: re.Match[str]) -> str | None:
                """Le XIXe; alone, Xe may be a sign or a name."""
                words = self.around.word_before(found), self.around.word_after(found).lower()
                is_sure = len(found[1]) > 1 or words[0] in articles or words[1] in named
                return self._ordinal(found[1], found[2][0] in "rʳ") if is_sure else None

            yield roman, french
        if self.centuries:
            yield from self._centuries()
        names = "|".join(sorted(map(re.escape, self.leads), key=len, reverse=True))
        yield rf"(?i:(?<![\w.])({names})) ?(?=\d)", self._lead
        yield from self._dates()
        yield r"(?<![\w.,/-])24/7(?![\w/]|[.,]\d)", lambda f: self._always()
        if self.code in ("fr", "it"):
            francs = rf"(?<!\w)Fr\. ?({self.spoken.pattern})(?![\w]|[.,]\d)"
            yield francs, lambda f: self.spoken.money(self.spoken.value(f[1]), "CHF")
        if self.code == "fr":
            yield r"(?<!\d)24 ?h ?/ ?24(?!\d)", lambda f: "vingt-quatre heures sur vingt-quatre"
            yield r"(?<![\w.,])(\d\d?) ?(h|heures?|ans?) (?:1/2|½)(?![\w/])", self._french_half
            yield r"(?<!\d)7 ?j ?/ ?7(?!\d)", lambda f: "sept jours sur sept"
            yield r"(?<![\w.,])([12]) ?m ?([1-9]\d)(?!\w)", lambda f: self._height(f)
            yield r"(?<![\w.,:/-])0[1-9](?:\.\d\d){4}(?![\w.]\d)", lambda f: self._digits(f[0])
        if self.code == "it":
            yield r"(?<!\w)h\.? ?(?=\d)", lambda f: "ore "
            hours = r"(?<![\w.,:/-])(\d\d?)\.([0-5]\d) ?[-–] ?(\d\d?)\.([0-5]\d)(?![\w]|[.,]\d)"
            yield hours, lambda f: f"{self.spoken.at_time(f[1], f[2])}-{self.spoken.at_time(f[3], f[4])}"
            free = r"(?<![\w.,:/-])800 \d{3} \d{3}(?![\w]| \d|[.,]\d)"
            called = ("verde", "tel", "tel.", "telefono", "numero", "chiama", "chiamare", "chiamate")
            yield free, lambda f: self._digits(f[0]) if self.around.word_before(f) in called else None
            yield r"(?<!\w)L(?:it)?\. ?(\d{1,3}(?:\.\d{3})+)(?![\d/,])", lambda f: self._lire(f[1])
            yield r"(?<![\w.,:/-])3\d\d[ -/]\d{6,7}(?![\w-]|[.,]\d)", lambda f: self._digits(f[0])
        clocks = r"(?<![\w.,:/-])(\d\d?) ?h ?([0-5]\d)? ?[-–] ?(?=\d\d? ?h)"
        if self.code in ("fr", "es", "pt"):
            yield clocks, lambda f: f"{self.spoken.at_time(f[1], f[2] or '0')} {self.spoken.to} "
        yield r"(?<![\w.,])\d{1,2}['’′]\d\d(?:[\"”″]|'')?(?!\d)", lambda f: keep(f[0])
        yield r"(?<![\w.,:/-])(?:\d+,\d+/(?:5|10)|\d{1,3}/(?:10|20|30|100|110))(?![\w/]|[.,]\d)", self._mark
        scale = r"(?<![\w.,:/-])1:(\d{4,7}|\d{1,3}(?:[. ]\d{3})+)(?![\w:/]|[.,]\d)"
        yield (
            scale,
            lambda f: (
                f"{self.spoken.cardinal('1')} {self.spoken.to if self.code != 'ru' else 'к'} "
                + (self.spoken.cardinal(self.spoken.value(f[1])))
            ),
        )
        yield r"(?<![\w'’])['’](?=\d\d(?![\d'’]))", lambda f: ""
        local = r"(?<![\w.,:/-])(?<![\d)] )\d{3}-(?:\d{3}-\d{2,4}|\d\d-\d\d)(?![\w-]|[.,]\d)"
        yield local, lambda f: self._digits(f[0])
        if self.code in ("es", "pt"):
            years = r"(?!(?:1[5-9]|20)\d\d-(?:1[5-9]|20))"
            phone = rf"(?<![\w.,:/)-])(?<!\) ){years}(?:\d\d )?9?\d{{4}}-\d{{4}}(?![\w-]|[.,]\d)"
            yield phone, lambda f: self._digits(f[0])
            months = "|".join(self.spoken.months)
            day = rf"(?<![\w.,:/-])(\d\d?) ({months})(?!\w)(?: (?:del? )?(\d{{4}})(?![\w]|[.,]\d))?"
            yield day, lambda f: self._named(f)
        yield r"(?<![\w.,:/-])(\d\d?)H(?=\d\d(?!\w)|(?!\w))", lambda f: f"{f[1]}h"
        yield r"(?<![\w.,:/-])0(\d)(?= ?h(?!\w))", lambda f: f[1]
        yield r"(?<![\w.,:/-])\d{2,4}s(?!\w)", self._decade
        if self.code == "pt":
            yield r"(?<![\w.,:/-])\d{4}-\d{3}(?!\w|[.,-])", self._postal
        if self.code == "es":
            half = r"(?= ?[apAP]\. ?[mM]\.)"
            yield rf"(?<![\w.,:/-])(\d\d?)\.([0-5]\d){half}", lambda f: self.spoken.at_time(f[1], f[2])
            yield r"(?<![\w.,:/-])[679]\d\d(?: \d\d){3}(?![\w-]|[.,]\d)", lambda f: self._digits(f[0])
            yield r"\$ ?([\d.,]*\d)(?![\w])", self._pesos
            part = r"(?<![\w.,:/-])\d{1,2}/\d{1,2}(?![\w/])"
            yield part, lambda f: keep(f[0]) if self.around.word_after(f) in ("parte", "partes") else None
        if self.code in ("it", "es", "pt"):
            yield r"(?<![\w.,])([1-9]\d?)([°oa])(?!\w)", self._loose_ordinal
        yield from self._halves()

    def later(self) -> Rules:
        """Signs of arithmetic. They come behind telephone numbers, which begin with a plus."""
        if self.code not in CODES:
            return
        number = self.spoken.pattern
        equation = rf"(?<![\w.,]){number}(?: [+×÷·*xх/:−–-] {number}){{1,6}} = (?=[−-]?\d)"
        yield equation, lambda f: re.sub(r"(?<=\d) ([^\s\d]) (?=[−-]?\d|$)", self._sign, f[0])
        yield r"(?<=\d) ([+×÷=]) (?=\d)", self._sign
        yield r"(?<![\w.,)%])= (?=[−-]?\d)", lambda f: f"{self.signs['=']} "
        if self.code in ("es", "it", "pt"):
            times = " per " if self.code == "it" else " por "
            yield r"(?<=\d) x (?=\d)", lambda f: times
        if self.code in ("es", "it"):
            yield r"(?<![\w.,])(\d{1,4})x(?=\d{1,4}(?!\w))", lambda f: f"{f[1]}{times}"
        yield r"(?<![\w.,)%])([±≈~+]) ?(?=\d)", lambda f: f"{self.signs[f[1]]} "

    def _postal(self, found: re.Match[str]) -> str | None:
        return self._digits(found[0]) if self.around.word_after(found)[:1].isupper() else None

    def _pesos(self, found: re.Match[str]) -> str | None:
        """$ 200 pesos, $ 200 ARS: the word behind tells the currency"""
        after = self.around.word_after(found)
        return found[1] if after == "pesos" or re.fullmatch("ARS|COP|CLP|UYU|MXN", after) else None

    def _mark(self, found: re.Match[str]) -> str | None:
        """15/20: quinze sur vingt"""
        before = self.around.word_before(found)
        top, bottom = found[0].split("/")
        is_date = before in ("le", "el", "il", "dia", "em", "du", "au", "del", "al", "dal", "c", "с", "на", "до", "от")
        if "," not in top and (int(top) > int(bottom) or is_date or (bottom == "10" and gcd(int(top), 10) == 1)):
            return None
        of = {"fr": "sur", "es": "sobre", "it": "su", "pt": "em", "ru": "из"}[self.code]
        return f"{self.spoken.cardinal(self.spoken.value(top), ',')} {of} {self.spoken.cardinal(bottom)}"

    def _french_half(self, found: re.Match[str]) -> str:
        said = self.spoken.counted(found[1], "h") if found[2][0] == "h" else None
        return f"{said} et demie" if said else f"{self.spoken.cardinal(found[1])} {found[2]} et demi"

    def _named(self, found: re.Match[str]) -> str | None:
        """5 febrero 2024"""
        month = self.spoken.months.index(found[2]) + 1
        return self.spoken.on_date(found[3] or "", month, found[1]) if 1 <= int(found[1]) <= 31 else None

    def _decade(self, found: re.Match[str]) -> str | None:
        """les 80s, which are no seconds"""
        before = self.around.word_before(found)
        return keep(found[0]) if before in ("les", "los", "os", "années", "años", "anos", "gli", "anni") else None

    def _always(self) -> str:
        between = " на " if self.code == "ru" else " "
        return f"{self.spoken.cardinal('24')}{between}{self.spoken.cardinal('7')}"

    def _sign(self, found: re.Match[str]) -> str:
        return f" {self.signs[found[1]]} "

    def _digits(self, written: str) -> str:
        return ", ".join(map(self.spoken.digits, re.findall(r"\d+", written)))

    def _height(self, found: re.Match[str]) -> str:
        metres = "un mètre" if found[1] == "1" else "deux mètres"
        return f"{metres} {self.spoken.cardinal(found[2])}"

    def _lire(self, written: str) -> str:
        value = self.spoken.value(written)
        return f"{self.spoken.cardinal(value)} {'di ' if int(value) % 10**6 == 0 else ''}lire"

    def _lead(self, found: re.Match[str]) -> str:
        said = self.leads[found[1].lower()]
        return f"{said[0].upper() if found[1][0].isupper() else said[0]}{said[1:]} "

    def _ordinal(self, roman: str, is_feminine: bool = False) -> str | None:
        number = number_of(roman)
        if not number:
            return None
        if self.code == "fr" and number == 1:
            return "première" if is_feminine else "premier"
        said = self.spoken.ordinal(str(number))
        return " ".join(re.sub("o$", "a", word) for word in said.split()) if is_feminine else said

    def _centuries(self) -> Rules:
        names = "|".join(sorted(map(re.escape, self.centuries), key=len, reverse=True))
        joins = r"(?: (?:y|e|al|a) (?:(?:el|il|o) )?| ?[-–] ?)"
        chain = rf"{_ROMAN}(?:{joins}{_ROMAN}){{0,3}}"
        yield rf"(?<!\w)((?i:{names})) ({chain})(?!\w)", self._century
        yield (
            rf"^({chain})(?!\w)",
            lambda f: self._chain(f[1]) if self.around.before.lower() in self.centuries else None,
        )
        if self.code == "it":
            yield rf"(?<!\w)({chain}) ?(sec(?:oli|olo|c?\.)(?!\w))?", self._italian_century
        yield rf"(?<!\w)({_ROMAN})(?!\w)", self._event

    def _chain(self, chain: str) -> str | None:
        numerals = re.findall(_ROMAN, chain)
        if not all(map(number_of, numerals)):
            return None

        def say(found: re.Match[str]) -> str:
            number = number_of(found[0])
            is_ordinal = self.code == "it" or number <= 10
            return self.spoken.ordinal(str(number)) if is_ordinal else self.spoken.cardinal(str(number))

        return re.sub(_ROMAN, say, chain)

    def _century(self, found: re.Match[str]) -> str | None:
        said, name = self._chain(found[2]), self.centuries[found[1].lower()]
        return said and f"{name[0].upper() if found[1][0].isupper() else name[0]}{name[1:]} {said}"

    def _italian_century(self, found: re.Match[str]) -> str | None:
        name = found[2] or ""
        if not name and self.around.word_after(found) not in ("secolo", "secoli"):
            return None
        said = self._chain(found[1])
        if not name or not said:
            return said
        stop = self.around.stop(found, False) if name[-1] == "." else ""
        return f"{said} {self.centuries[name]}{stop}"

    def _event(self, found: re.Match[str]) -> str | None:
        """II Guerra Mundial."""
        kind = self.events.get(self.around.word_after(found).lower())
        if not kind or not 0 < number_of(found[1]) < 40:
            return None
        said = self._ordinal(found[1], kind == "f")
        return re.sub("(primer|tercer)o$", r"\1", said) if said and self.code == "es" else said

    def _loose_ordinal(self, found: re.Match[str]) -> str | None:
        """il 3° posto, la 2a volta: with an article before, and a noun behind."""
        before, noun = self.around.word_before(found), self.around.word_after(found)
        if not re.fullmatch("[a-zà-ú]{3,}", noun) or found.string[found.end() : found.end() + 1].strip():
            return None
        kind = {"°": "m", "o": "m", "a": "f"}[found[2]]
        articles = {"m": "il al del dal nel sul el o ao do no", "f": "la alla della dalla nella sulla a à da na"}[kind]
        known = gender(self.code, noun) == kind and found[2] != "°"
        if (before not in articles.split() and not known) or (self.code == "es" and found[2] != "°"):
            return None
        if noun in ("con", "com", "per", "por", "para", "nord", "sud", "est", "norte", "sur", "sul", "celsius"):
            return None
        said = self.spoken.ordinal(found[1])
        if kind == "f":
            return " ".join(re.sub("o$", "a", word) for word in said.split())
        return re.sub("(primer|tercer)o$", r"\1", said) if self.code == "es" else said

    def _dates(self) -> Rules:
        def say(found: re.Match[str]) -> str | None:
            day, month, year = int(found[1]), int(found[3]), found[4]
            if not (1 <= day <= 31 and 1 <= month <= 12):
                return keep(found[0]) if found[2] == "." else None
            return self.spoken.on_date(year, month, str(day))

        guard = r"(?![\w/-]|[.,]\d)"
        if self.code != "ru":
            yield rf"(?<![\w.,:/-])(\d\d?)([.-])(\d\d?)\2(\d{{4}}){guard}", say
        if self.code == "ru":
            yield rf"(?<![\w.,:/-])(\d\d?)([/-])(\d\d?)\2(\d{{4}}){guard}", say
        mark = "." if self.code == "ru" else "/"
        yield rf"(?<![\w.,:/-])(\d\d?)([{mark}])(\d\d?)\2([012]\d){guard}", say

        def day(found: re.Match[str]) -> str | None:
            before = self.around.word_before(found)
            dated = "le au du el al il dal dia até".split()
            if before not in dated or not (1 <= int(found[1]) <= 31 and 1 <= int(found[2]) <= 12):
                return None
            return self.spoken.on_date("", int(found[2]), found[1])

        yield rf"(?<![\w.,:/-])(\d\d?)/(0\d|1[0-2]){guard}(?! ?%)", day

    def _halves(self) -> Rules:
        """2 1/2 tasses: deux tasses et demie."""
        said = {"fr": ("et demi", "et demie"), "es": ("y medio", "y media"), "pt": ("e meio", "e meia")}
        said |= {"it": ("e mezzo", "e mezza")}
        code = self.code
        if code not in said:
            return

        def more(found: re.Match[str]) -> str | None:
            number, noun = found[1], found[2]
            kind = gender(code, noun)
            if not kind or (code == "it" and number == "1"):
                return keep(found[0]) if kind else None
            words = self.spoken.cardinal(number)
            if number == "1":
                noun = singular(code, noun)
                words = self.spoken.one[kind]
            words = feminine(code, words) if kind == "f" else words
            return f"{words} {noun} {said[code][kind == 'f']}"

        yield r"(?<![\w.,/:–-])([1-9]\d?) ?(?:1/2|½) ([a-zà-ÿœ]+)", more
        half = {
            "fr": ("un demi", "une demi"),
            "es": ("medio", "media"),
            "pt": ("meio", "meia"),
            "it": ("mezzo", "mezza"),
        }

        def one(found: re.Match[str]) -> str | None:
            before = self.around.word_before(found)
            if before in ("un", "una", "um", "uma", "une") or before[-1:].isdigit():
                return None
            if before in ("an", "ans", "heure", "heures", "jours", "mois", "años", "anos", "anni"):
                return keep(found[0])
            kind = gender(code, self.around.word_after(found))
            return Kept(half[code][kind == "f"]) if kind else None

        yield r"(?<![\w.,/:–-])(?<!\d )(?:1/2|½)(?= ?[a-zà-ÿ]|$)(?! ?(?:kg|g|l|km|m|cm|h|ml|mg)\b)", one
