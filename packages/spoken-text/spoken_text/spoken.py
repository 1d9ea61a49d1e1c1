"""How each language says numbers, units, dates and times: tables, plus num2words."""

import re
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property

from spoken_text import currency
from spoken_text.agreement import feminine
from spoken_text.errors import LanguageError
from spoken_text.ko import rules as korean
from spoken_text.languages import NAMES, primary_subtag
from spoken_text.units import UNITS
from spoken_text.zh import rules as chinese

try:
    from num2words import num2words
except ModuleNotFoundError:  # it is under the LGPL, so everything but normalize="auto" works without it
    num2words = None

_SPANISH_TEENS = dict(
    zip(
        map(str, range(11, 20)),
        "undécimo duodécimo decimotercero decimocuarto decimoquinto decimosexto decimoséptimo decimoctavo "
        "decimonoveno".split(),
        strict=True,
    )
)
"""Ordinals that num2words gets wrong."""
_ONE_THOUSAND = re.compile("(?<![一二三四五六七八九])千(?=[万億兆])")
MOST_DIGITS = 15  # a number of more digits is said digit by digit


@dataclass(frozen=True)
class Spoken:
    """A language's words, marks and order of a date."""

    code: str  # of the language, as num2words has it; "zh", which that lacks, is in chinese.py
    decimal: str  # the mark before a number's decimals
    groups: str  # the marks that a number may have between its groups of digits
    point: str  # said for a decimal mark
    minus: str
    plus: str
    dot: str  # said in addresses and versions
    at: str
    to: str  # said between the ends of a range
    date: str  # order and mark of a date in digits, such as "mdy/"
    months: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()  # words such as "million" between a number and a currency
    years: frozenset[str] = frozenset()  # words before a year; only for languages that do not say years as counts
    number: str = ""  # said for "#" before a number
    one: dict[str, str] = field(default_factory=dict)  # the number 1 before a noun, by the noun's gender "m" or "f"
    joined: bool = False  # there is no blank between a number and its noun
    units: dict[str, tuple[str, ...]] = field(default_factory=dict)  # written form -> spoken forms, of `_UNITS`

    @cached_property
    def pattern(self) -> str:
        """A regular expression for a number without its sign."""
        decimals = rf"(?:{re.escape(self.decimal)}\d+)?"
        other = r"(?:\.\d+)?" if self.decimal == "," else ""
        return rf"(?:{'|'.join(self._grouped(decimals))}|\d+{re.escape(self.decimal)}\d+|\d+{other})"

    def _grouped(self, decimals: str) -> list[str]:
        """Regular expressions for numbers in groups of three digits. Another language's mark counts if there are two
        groups, or cents after one: 1.000.000 and 1.234,50 have one reading."""
        foreign = "." if self.decimal == "." else ","
        found = []
        for mark in self.groups:
            more = "(?! ?" if mark == " " else "(?!"  # 91 123 45 67 is no number in groups
            found.append(rf"\d{{1,3}}(?:{re.escape(mark)}\d{{3}}){{1,6}}{more}\d){decimals}")
        found.append(r"\d{1,3}(?:['’]\d{3}){1,6}(?!\d)(?:[.,]\d+)?")
        found.append(rf"\d{{1,3}}(?:{re.escape(foreign)}\d{{3}}){{1,6}}{'[,]' if foreign == '.' else '[.]'}\d\d(?!\d)")
        octets = r"(?!(?:\d{1,3}\.){3}\d{1,3}(?![\d.]))(?!0)"  # no address of a computer
        for mark in sorted({foreign, "."} - set(self.groups)):
            written = re.escape(mark)
            start = octets if mark == "." else ""
            found.append(rf"{start}\d{{1,3}}(?:{written}\d{{3}}){{2,6}}(?!\d|{written}\d)")
        if " " not in self.groups:
            found.append(r"\d{1,2}(?:,\d\d){1,5},\d{3}(?!\d)")  # in India
            found.append(r"[1-9]\d{0,2}(?: \d{3}){2,6}(?! ?\d)")
        return found

    def value(self, written: str) -> str:
        """A written number in canonical form: digits, with a point before the decimals."""
        foreign = "," if self.decimal == "." else "."
        if re.fullmatch(r"\d{1,3}(?:([.,'’ ])\d{3})(?:\1\d{3})*(?:(?!\1)[.,]\d+)?", written):
            mark = written.lstrip("0123456789")[0]
            if mark != self.decimal or written.count(mark) > 1 or re.search(r"[.,]", written.partition(mark)[2]):
                return written.replace(mark, "").replace(",", ".")
        if foreign == "," and re.fullmatch(r"\d{1,2}(?:,\d\d)+,\d{3}", written):
            return written.replace(",", "")
        written = f"0{written}" if written[0] == "." else written
        if foreign == "," and re.fullmatch(r"\d+,\d\d", written):
            return written.replace(",", ".")
        return written.replace(self.decimal, ".")

    def cardinal(self, value: str, mark: str = "") -> str:
        """A number in words, from its canonical form. `mark` is the decimal mark that was written."""
        whole, _, decimals = value.partition(".")
        if len(whole) > MOST_DIGITS or (len(whole) > 1 and whole[0] == "0"):
            said = self.digits(whole)
        else:
            said = chinese.cardinal(int(whole)) if self.code == "zh" else num2words(int(whole), lang=self.code)
            if self.code == "es":
                said = re.sub(r"uno(?= mil\b)", "un", said).replace("veintiun ", "veintiún ")
            elif self.code == "ja":
                said = _ONE_THOUSAND.sub("一千", said)
            elif self.code == "pt":  # as most of its speakers say it: dezenove, um bilhão
                said = num2words(int(whole), lang="pt_BR").replace(",", "")
        if not decimals:
            return said
        if self.code == "ru" and len(decimals) <= 3:
            return num2words(Decimal(value), lang="ru")
        point = "coma" if self.code == "es" and mark == "," else self.point
        glue = self.around_dot
        return f"{said}{glue}{point}{glue}{self.digits(decimals)}"

    def digits(self, digits: str) -> str:
        """The digits in words, one by one."""
        if self.code == "zh":
            return chinese.digits(digits)
        return self.around_dot.join(num2words(int(digit), lang=self.code) for digit in digits)

    def ordinal(self, number: str, **inflection: str) -> str:
        if self.code == "es" and number in _SPANISH_TEENS:
            return _SPANISH_TEENS[number]
        return num2words(int(number), lang=self.code, to="ordinal", **inflection)

    def year(self, year: str) -> str:
        """A year in num2words' form. Japanese, Korean and Portuguese say the plain number."""
        if self.code == "zh":
            return chinese.digits(year)
        if self.code in ("ja", "ko", "pt") or len(year) > 4:
            return self.cardinal(year)
        return num2words(int(year), lang=self.code, to="year")

    @cached_property
    def nouns(self) -> dict[str, str]:
        """Units written as words -> the gender, "m" or "f", that a number takes from them."""
        if not self.one or self.code == "en":
            return {}
        found: dict[str, str] = {}
        for forms in self.units.values():
            gender = "f" if forms[-1] == "f" else "m"
            found |= {form: gender for form in forms if form != "f" and " " not in form}
        for forms in currency.NAMES[self.code].values() if not self.joined else ():
            if forms[0] == "f":
                found |= dict.fromkeys(forms[1:3], "f")
        return found

    @property
    def around_dot(self) -> str:
        """What surrounds "dot": a blank, but nothing in Chinese and Japanese."""
        return "" if self.code in ("zh", "ja") else " "

    def counted(self, value: str, unit: str, mark: str = "") -> str | None:
        """A number with a unit of the table, such as "km"; None if the language's table lacks it."""
        if self.code == "it" and value == "1" and unit in ("h", "ora"):
            return "un'ora"
        if unit in self.nouns:
            return f"{self.before_noun(self.cardinal(value, mark), value, self.nouns[unit])} {unit}"
        if unit not in self.units:
            return None
        *forms, last = self.units[unit]
        gender, forms = ("f", forms) if last == "f" else ("m", [*forms, last])
        if "{}" in forms[0]:
            return forms[0].format(self.cardinal(value))
        is_currency = len(unit) == 3 and unit.isupper()
        glue = "" if self.joined and (self.code != "ko" or is_currency) else " "
        form = forms[min(self.form(value), len(forms) - 1)]
        if self.code == "zh" and value == "2" and unit[0] != "°":
            return f"两{form}"
        return f"{self.before_noun(self.cardinal(value, mark), value, gender)}{glue}{form}"

    def form(self, value: str) -> int:
        """Index of the noun's form for a number: 0 for singular, then the others."""
        if self.code == "ru":
            tens, ones = int(value.partition(".")[0][-2:]), int(value.partition(".")[0][-1])
            if "." in value or (ones in (2, 3, 4) and tens not in (12, 13, 14)):
                return 1
            return 0 if ones == 1 and tens != 11 else 2
        return int(float(value) >= 2 if self.code == "fr" else value != "1")

    def before_noun(self, words: str, value: str, gender: str) -> str:
        """A number as it is before a noun of this gender, "m" or "f"."""
        if "." in value:
            return words
        if value == "1" and self.one:
            return self.one[gender]
        if self.code == "es":
            if gender == "f":
                return feminine("es", words)
            return re.sub("uno$", "un", re.sub("veintiuno$", "veintiún", words))
        if gender == "f":
            if self.code == "ru":
                return re.sub("два$", "две", re.sub("один$", "одна", words))
            if self.code in ("pt", "fr"):
                return feminine(self.code, words)
        return words

    def money(self, value: str, sign: str) -> str | None:
        """An amount in a currency, whose sign is such as "$" or "EUR"; None if our table and num2words lack it."""
        whole, _, cents = value.partition(".")
        forms, gender, small = self.forms_of(sign)
        if not forms:
            return None
        if self.joined and cents in ("0", "00"):
            value = whole
        if self.joined or len(cents) > 2 or len(whole) > MOST_DIGITS or (cents and not small):
            glue = " " if not self.joined or " " in forms[0] else ""
            form = forms[min(self.form(value), len(forms) - 1)]
            return f"{self.before_noun(self.cardinal(value), value, gender)}{glue}{form}"
        cents = f"{cents:0<2}"
        units, hundredths = str(int(whole)), str(int(cents))
        said = f"{self.before_noun(self.cardinal(units), units, gender)} {forms[self.form(units)]}"
        if int(whole) and int(whole) % 10**6 == 0:
            said = f"{self.cardinal(units)} {self.many(sign)}"
        if not int(cents):
            return said
        coins = f"{self.before_noun(self.cardinal(hundredths), hundredths, 'm')} {small[self.form(hundredths)]}"
        link = {"de": " und ", "fr": " et ", "es": " con ", "it": " e ", "pt": " e "}.get(self.code, ", ")
        return f"{said}{link}{coins}" if int(whole) else coins

    def currency(self, sign: str) -> str:
        """The code of a currency's sign. In Chinese "¥" is the yuan. In English "kr" may be one of five: empty."""
        if sign == "kr" and self.code == "en":
            return ""
        name = currency.SIGNS.get(sign, sign)
        return "CNY" if name == "JPY" and sign in "¥￥" and self.code == "zh" else name

    def many(self, sign: str) -> str:
        """A currency's name behind a large number, with the word that links it; empty if there is none."""
        forms, _, _ = self.forms_of(sign)
        if not forms:
            return ""
        link = {"es": "de ", "it": "di ", "pt": "de ", "fr": "de "}.get(self.code, "")
        if self.code == "en" and forms[-1] == "euro":
            return "euros"
        if self.code == "fr" and forms[-1][0] in "aeiouy":
            link = "d'"
        return link + forms[-1]

    def forms_of(self, sign: str) -> tuple[list[str], str, list[str]]:
        """A currency's forms, gender and the forms of its hundredth, from our table or from num2words."""
        name = self.currency(sign)
        if name in currency.NAMES[self.code]:
            names = list(currency.NAMES[self.code][name])
            gender = "f" if names[0] == "f" else "m"
            names = names[1:] if gender == "f" else names
            count = 1 if self.joined else 3 if self.code == "ru" else 2
            return names[:count], gender, names[count:]
        try:
            said = [self._library_money(amount, name) for amount in ("1.01", "2.02", "5.05")]
        except NotImplementedError:
            return [], "m", []
        halves = [part.strip() for amount in said for part in amount.split("|")]
        forms = [half.partition(" ")[2] for half in halves]
        gender = "f" if halves[0].startswith("una ") else "m"
        if self.code == "ru":
            return forms[::2], gender, forms[1::2]
        return forms[:4:2], gender, forms[1:4:2]

    def _library_money(self, amount: str, name: str) -> str:
        return num2words(Decimal(amount), lang=self.code, to="currency", currency=name, separator="|")

    def on_date(self, year: str, month: int, day: str, end: str = "n") -> str:
        """A date in words. `year` may be empty; `end` is what a German ordinal ends with."""
        if self.code in ("zh", "ja", "ko"):
            marks = ("년 ", "월 ", "일") if self.code == "ko" else "年月日"
            named = [(str(month), marks[1]), (str(int(day)), marks[2])]
            said = self.year(year) + marks[0] if year else ""
            said += "".join(self.cardinal(part) + mark for part, mark in named)
            return said.replace("육월", "유월").replace("십월", "시월")  # June and October drop a sound
        name, link = self.months[month - 1], "de " if self.code in ("es", "pt") else ""
        behind = f" {link}{self.year(year)}" if year else ""
        if self.code == "en":
            return f"{name} {self.ordinal(day)}" + (f", {self.year(year)}" if year else "")
        if self.code == "ru":
            behind = f" {self.ordinal(year, case='g')} года" if year else ""
            return f"{self.ordinal(day, case='g', gender='n')} {name}{behind}"
        if self.code == "de":
            return f"{self.ordinal(day)}{end} {name}{behind}"
        first = {"fr": "premier", "it": "primo", "pt": "primeiro"}.get(self.code)
        said = first if first and int(day) == 1 else self.cardinal(str(int(day)))
        return f"{said} {link}{name}{behind}"

    def at_time(self, hour: str, minute: str, half: str = "") -> str:
        """A time in words. `half` is "AM", "PM" or nothing."""
        hour, minutes = str(int(hour)), int(minute)
        hours = self.cardinal(hour)
        if self.code == "en":
            said = f"oh {self.cardinal(str(minutes))}" if minutes < 10 else self.cardinal(str(minutes))
            if minutes:
                return f"{hours} {said} {half}".strip()
            return f"{hours} {half}" if half else f"{hours} o'clock" if int(hour) <= 12 else f"{hours} hundred hours"
        said = self.cardinal(str(minutes)) if minutes else ""
        if self.code == "de":
            return f"{'ein' if hour == '1' else hours} Uhr {said}".strip()
        if self.code == "fr":
            noun = "heure" if int(hour) < 2 else "heures"
            return f"{self.before_noun(hours, hour, 'f')} {noun} {said}".strip()
        if self.code == "es":
            feminine = self.before_noun(hours, hour, "f")
            return f"{feminine} {said}" if said else f"{feminine} {'hora' if hour == '1' else 'horas'}"
        if self.code in ("it", "pt"):
            hours = self.before_noun(hours, hour, "f")
            whole = f"{hours} {'hora' if hour == '1' else 'horas'}" if self.code == "pt" else hours
            return f"{hours} e {said}" if said else whole
        if self.code == "ru":
            tens = f"ноль {said or 'ноль'}" if minutes < 10 else said
            return f"{hours} {tens}"
        after, end = {"zh": ("点", "分"), "ja": ("時", "分"), "ko": ("시 ", "분")}[self.code]
        if self.code == "zh":
            hours = "两" if hour == "2" else hours
            said = f"零{said}" if 0 < minutes < 10 else said
        if self.code == "ko" and 1 <= int(hour) <= 12:
            hours = f"{korean.native(int(hour))} "
        return f"{hours}{after}{said}{end}".strip() if minutes else f"{hours}{after}".strip()


_EN = "january february march april may june july august september october november december"
_DE = "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
_FR = "janvier février mars avril mai juin juillet août septembre octobre novembre décembre"
_ES = "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre"
_IT = "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre"
_PT = "janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro"
_RU = "января февраля марта апреля мая июня июля августа сентября октября ноября декабря"

_TABLES = {
    "english": Spoken(
        "en", ".", ",", "point", "minus", "plus", "dot", "at", "to", "mdy/", tuple(_EN.title().split()),
        tuple("thousand million billion trillion".split()),
        frozenset("in since until till by between year "
            "before after around circa during early late mid from q1 q2 q3 q4".split()),
        "number", {"m": "one", "f": "one"}),
    "german": Spoken(
        "de", ",", ". ", "Komma", "minus", "plus", "Punkt", "at", "bis", "dmy.", tuple(_DE.split()),
        tuple("Tausend Million Millionen Milliarde Milliarden Billionen".split()),
        frozenset("in seit bis jahr jahre jahres anno um vor nach ab von".split()),
        "Nummer", {"m": "ein", "f": "eine"}),
    "french": Spoken(
        "fr", ",", ". ", "virgule", "moins", "plus", "point", "arobase", "à", "dmy/", tuple(_FR.split()),
        tuple("million millions milliard milliards".split()), number="numéro", one={"m": "un", "f": "une"}),
    "spanish": Spoken(
        "es", ",", ". ", "punto", "menos", "más", "punto", "arroba", "a", "dmy/", tuple(_ES.split()),
        tuple("millón millones".split()), number="número", one={"m": "un", "f": "una"}),
    "italian": Spoken(
        "it", ",", ". ", "virgola", "meno", "più", "punto", "chiocciola", "a", "dmy/", tuple(_IT.split()),
        tuple("milione milioni miliardo miliardi".split()), number="numero", one={"m": "un", "f": "una"}),
    "portuguese": Spoken(
        "pt", ",", ". ", "vírgula", "menos", "mais", "ponto", "arroba", "a", "dmy/", tuple(_PT.split()),
        tuple("milhão milhões bilhão bilhões".split()), number="número", one={"m": "um", "f": "uma"}),
    "russian": Spoken(
        "ru", ",", " ", "запятая", "минус", "плюс", "точка", "собака", "до", "dmy.", tuple(_RU.split()), number="номер",
        one={"m": "один", "f": "одна"}),
    "chinese": Spoken("zh", ".", ",", "点", "负", "加", "点", "艾特", "到", "ymd/", joined=True),
    "japanese": Spoken(
        "ja", ".", ",", "点", "マイナス", "プラス", "ドット", "アットマーク", "から", "ymd/",
        joined=True),
    "korean": Spoken("ko", ".", ",", "점", "마이너스 ", "플러스", "점", "골뱅이", "에서", "ymd/", joined=True),
}  # fmt: skip

LANGUAGES = {name: replace(spoken, units=UNITS[name]) for name, spoken in _TABLES.items()}
"""By the names of languages.py."""


def language_name(language: str | None) -> str | None:
    """The name that languages.py has for a language, or for a code with or without a region: "german", "de",
    "de-AT". A dialect such as "sichuan_dialect" is Chinese. None for None, "auto" and unknown languages. Raises
    LanguageError: it is no string."""
    if language is not None and not isinstance(language, str):
        raise LanguageError(f"language must be a string or None, got {type(language).__name__}")
    name = (language or "").lower()
    if name.endswith("_dialect"):
        return "chinese"
    return name if name in LANGUAGES else NAMES.get(primary_subtag(name))
