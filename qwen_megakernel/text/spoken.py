"""How each language says numbers, units, dates and times: tables, plus num2words."""

import re
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property

from num2words import num2words

from qwen_megakernel.checkpoint.languages import NAMES, primary_subtag
from qwen_megakernel.text.units import units_of

MOST_DIGITS = 15
"""A number of more digits is said digit by digit."""

_SIGNS = {"$": "USD", "US$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₽": "RUB", "₩": "KRW", "₹": "INR"}
CURRENCY = r"US\$|[$€£¥₽₩₹]"
CURRENCY_CODE = "USD|EUR|GBP|JPY|CHF|RUB|KRW|INR|CNY"


@dataclass(frozen=True)
class Spoken:
    """A language's words, marks and order of a date."""

    code: str  # num2words' name for the language; empty if the library lacks it: digits then stay as they are
    decimal: str  # the mark before a number's decimals
    groups: str  # marks between its groups of digits, as part of a character class
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
    units: dict[str, tuple[str, ...]] = field(default_factory=dict)  # as `units_of` returns them

    @property
    def pattern(self) -> str:
        """A regular expression for a number without its sign."""
        groups = f"(?:[{self.groups}]\\d{{3}})+(?!\\d)"
        decimals = f"(?:{re.escape(self.decimal)}\\d+)?"
        other = r"(?:\.\d+)?" if self.decimal == "," else ""
        return rf"(?:\d{{1,3}}{groups}{decimals}|\d+{re.escape(self.decimal)}\d+|\d+{other})"

    def value(self, written: str) -> str:
        """A written number in canonical form: digits, with a point before the decimals."""
        grouped = rf"\d{{1,3}}(?:[{self.groups}]\d{{3}})+(?:{re.escape(self.decimal)}\d+)?"
        if re.fullmatch(grouped, written):
            written = re.sub(f"[{self.groups}]", "", written)
        return written.replace(self.decimal, ".")

    def cardinal(self, value: str, mark: str = "") -> str:
        """A number in words, from its canonical form. `mark` is the decimal mark that was written."""
        if not self.code:
            return value
        whole, _, decimals = value.partition(".")
        if len(whole) > MOST_DIGITS or (len(whole) > 1 and whole[0] == "0"):
            said = self.digits(whole)
        else:
            said = num2words(int(whole), lang=self.code)
        if not decimals:
            return said
        if self.code == "ru" and len(decimals) <= 3:
            return num2words(Decimal(value), lang="ru")
        point = "coma" if self.code == "es" and mark == "," else self.point
        glue = "" if self.code == "ja" else " "
        return f"{said}{glue}{point}{glue}{self.digits(decimals)}"

    def digits(self, digits: str) -> str:
        """The digits in words, one by one."""
        if not self.code:
            return digits
        glue = "" if self.code == "ja" else " "
        return glue.join(num2words(int(digit), lang=self.code) for digit in digits)

    def ordinal(self, number: str, **inflection: str) -> str:
        return num2words(int(number), lang=self.code, to="ordinal", **inflection)

    def year(self, year: str) -> str:
        """A year in num2words' form. Japanese and Korean say the plain number."""
        if self.code in ("", "ja", "ko") or len(year) > 4:
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
        return found

    @property
    def around_dot(self) -> str:
        """What surrounds "dot": a blank, but nothing in Chinese and Japanese."""
        return "" if self.code in ("", "ja") else " "

    def counted(self, value: str, unit: str, mark: str = "") -> str | None:
        """A number with a unit of the table, such as "km"; None if the language's table lacks it."""
        if unit in self.nouns:
            return f"{self._before_noun(self.cardinal(value, mark), value, self.nouns[unit])} {unit}"
        if unit not in self.units:
            return None
        *forms, last = self.units[unit]
        gender, forms = ("f", forms) if last == "f" else ("m", [*forms, last])
        if "{}" in forms[0]:
            return forms[0].format(self.cardinal(value))
        is_currency = len(unit) == 3 and unit.isupper()
        glue = "" if self.joined and (self.code != "ko" or is_currency) else " "
        form = forms[min(self._form(value), len(forms) - 1)]
        return f"{self._before_noun(self.cardinal(value, mark), value, gender)}{glue}{form}"

    def _form(self, value: str) -> int:
        """Index of the noun's form for a number: 0 for singular, then the others."""
        if self.code == "ru":
            tens, ones = int(value.partition(".")[0][-2:]), int(value.partition(".")[0][-1])
            if "." in value or (ones in (2, 3, 4) and tens not in (12, 13, 14)):
                return 1
            return 0 if ones == 1 and tens != 11 else 2
        if self.code == "fr":
            return 0 if float(value) < 2 else 1
        return 0 if value == "1" else 1

    def _before_noun(self, words: str, value: str, gender: str) -> str:
        if "." in value:
            return words
        if value == "1" and self.one:
            return self.one[gender]
        if self.code == "es":
            if gender == "f":
                return re.sub("uno$", "una", words).replace("cientos", "cientas").replace("quinientos", "quinientas")
            return re.sub("uno$", "un", re.sub("veintiuno$", "veintiún", words))
        if gender == "f":
            if self.code == "ru":
                return re.sub("два$", "две", re.sub("один$", "одна", words))
            if self.code == "pt":
                return re.sub("dois$", "duas", re.sub("um$", "uma", words))
            if self.code == "fr":
                return re.sub("un$", "une", words)
        return words

    def money(self, value: str, sign: str, scale: str = "") -> str | None:
        """An amount in a currency, whose sign is such as "$" or "EUR"; None if neither num2words nor our table has it.
        `scale` is a word after the number, such as "million"."""
        currency = _SIGNS.get(sign, sign)
        whole, _, cents = value.partition(".")
        plural = self._plural(currency)
        if scale:
            link = {"es": "de ", "it": "di ", "pt": "de "}.get(self.code, "")
            if self.code == "fr":
                link = "d'" if plural[:1] in "aeiouy" else "de "
            return f"{self.cardinal(value)} {scale} {link}{plural}" if plural else None
        if currency in self.units or not plural:
            return self.counted(value, currency)
        if len(cents) > 2 or len(whole) > MOST_DIGITS:
            return f"{self.cardinal(value)} {plural}"
        amount = f"{whole}.{cents:0<2}"
        units, _, small = self._library_money(amount, currency, separator="|").partition("|")
        if not int(cents or 0):
            return units
        if not int(whole):
            return re.sub("^ *(und|et|con|e) ", "", small).strip()
        return self._library_money(amount, currency)

    def _plural(self, currency: str) -> str:
        """A currency's plural name; empty if there is none, or if the language has no plurals."""
        if currency in self.units or self.joined:
            return "".join(self.units.get(currency, ())[1:2])
        return self._library_money("2.00", currency, separator="|").partition("|")[0].partition(" ")[2]

    def _library_money(self, amount: str, currency: str, **options: str) -> str:
        """num2words' amount; empty if it does not know the currency: `money` then uses our table."""
        try:
            return num2words(Decimal(amount), lang=self.code, to="currency", currency=currency, **options)
        except NotImplementedError:
            return ""

    def on_date(self, year: str, month: int, day: str, end: str = "n") -> str:
        """A date in words. `year` may be empty; `end` is what a German ordinal ends with."""
        if not self.code:
            return f"{year}年{month}月{int(day)}日" if year else f"{month}月{int(day)}日"
        if self.code in ("ja", "ko"):
            marks = "年月日" if self.code == "ja" else ("년 ", "월 ", "일")
            named = [(year, marks[0]), (str(month), marks[1]), (str(int(day)), marks[2])]
            said = "".join(self.cardinal(part) + mark for part, mark in named if part)
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
            return f"{self._before_noun(hours, hour, 'f')} {noun} {said}".strip()
        if self.code == "es":
            feminine = self._before_noun(hours, hour, "f")
            return f"{feminine} {said}" if said else f"{feminine} {'hora' if hour == '1' else 'horas'}"
        if self.code in ("it", "pt"):
            whole = f"{self._before_noun(hours, hour, 'f')} horas" if self.code == "pt" and hour != "1" else hours
            return f"{hours} e {said}" if said else whole
        if self.code == "ru":
            tens = f"ноль {said or 'ноль'}" if minutes < 10 else said
            return f"{hours} {tens}"
        after, end = {"": ("点", "分"), "ja": ("時", "分"), "ko": ("시 ", "분")}[self.code]
        return f"{hours}{after}{said}{end}".strip() if minutes else f"{hours}{after}".strip()


_EN = "january february march april may june july august september october november december"
_DE = "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
_FR = "janvier février mars avril mai juin juillet août septembre octobre novembre décembre"
_ES = "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre"
_IT = "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre"
_PT = "janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro"
_RU = "января февраля марта апреля мая июня июля августа сентября октября ноября декабря"


def _words(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_TABLES = {
    "english": Spoken(
        "en", ".", ",", "point", "minus", "plus", "dot", "at", "to", "mdy/", _words(_EN.title()),
        _words("thousand million billion trillion"),
        frozenset(_words("in since until till year before after around circa during early late mid from q1 q2 q3 q4")),
        "number", {"m": "one", "f": "one"},
    ),
    "german": Spoken(
        "de", ",", ". ", "Komma", "minus", "plus", "Punkt", "at", "bis", "dmy.", _words(_DE),
        _words("Tausend Million Millionen Milliarde Milliarden Billionen"),
        frozenset(_words("in seit bis jahr jahre jahres anno um vor nach ab von")),
        "Nummer", {"m": "ein", "f": "eine"},
    ),
    "french": Spoken(
        "fr", ",", ". ", "virgule", "moins", "plus", "point", "arobase", "à", "dmy/", _words(_FR),
        _words("million millions milliard milliards"), number="numéro", one={"m": "un", "f": "une"},
    ),
    "spanish": Spoken(
        "es", ",", ". ", "punto", "menos", "más", "punto", "arroba", "a", "dmy/", _words(_ES),
        _words("millón millones"), number="número", one={"m": "un", "f": "una"},
    ),
    "italian": Spoken(
        "it", ",", ". ", "virgola", "meno", "più", "punto", "chiocciola", "a", "dmy/", _words(_IT),
        _words("milione milioni miliardo miliardi"), number="numero", one={"m": "un", "f": "una"},
    ),
    "portuguese": Spoken(
        "pt", ",", ". ", "vírgula", "menos", "mais", "ponto", "arroba", "a", "dmy/", _words(_PT),
        _words("milhão milhões bilhão bilhões"), number="número", one={"m": "um", "f": "uma"},
    ),
    "russian": Spoken(
        "ru", ",", " ", "запятая", "минус", "плюс", "точка", "собака", "до", "dmy.", _words(_RU), number="номер",
        one={"m": "один", "f": "одна"},
    ),
    "chinese": Spoken("", ".", ",", "点", "负", "加", "点", "艾特", "到", "ymd/", joined=True),
    "japanese": Spoken(
        "ja", ".", ",", "点", "マイナス", "プラス", "ドット", "アットマーク", "から", "ymd/",
        joined=True,
    ),
    "korean": Spoken("ko", ".", ",", "점", "마이너스 ", "플러스", "점", "골뱅이", "에서", "ymd/", joined=True),
}  # fmt: skip
LANGUAGES = {name: replace(spoken, units=units_of(name)) for name, spoken in _TABLES.items()}
"""By the names of checkpoint/languages.py."""


def language_name(language: str | None) -> str | None:
    """The name that checkpoint/languages.py has for a language, or for a code with or without a region: "german", "de",
    "de-AT". A dialect such as "sichuan_dialect" is Chinese. None for None, "auto" and unknown languages."""
    name = (language or "").lower()
    if name.endswith("_dialect"):
        return "chinese"
    return name if name in LANGUAGES else NAMES.get(primary_subtag(name))


def spoken_in(language: str | None) -> Spoken | None:
    """The tables for a language, named as for `language_name`. None: there are none, and numbers stay as they are."""
    name = language_name(language)
    return LANGUAGES[name] if name else None
