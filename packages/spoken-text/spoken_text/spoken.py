"""How a language says numbers, units, dates and times: the words of its folder, its own class there, and num2words."""

import re
from decimal import Decimal
from functools import cache, cached_property
from importlib import import_module
from typing import Any

from spoken_text.errors import LanguageError
from spoken_text.languages import NAMES, primary_subtag
from spoken_text.rule import Found, Rules, ends_of, initials
from spoken_text.tables import shared_words, table_of

try:
    from num2words import num2words
except ModuleNotFoundError:  # it is under the LGPL, so everything but normalize="auto" works without it
    num2words = None

LANGUAGES = {NAMES[code]: code for code in ("en", "de", "fr", "es", "it", "pt", "ru", "zh", "ja", "ko", "nl")}
"""Languages whose numbers are read, by the names of languages.py -> their folder."""
SMALL_CODES = shared_words("small_codes")
"""Codes of currencies that are also written small."""
MOST_DIGITS = 15  # a number of more digits is said digit by digit
_MILLIONS = re.compile(r"\b(?:mi|bi|tri)l[lh]\w+ ")


class Spoken:
    """A language. What `words.toml` in its folder says are its words; README.md explains them. The lines before its
    lists become attributes. A subclass in `rules.py` of the same folder has what the language says in its own way, and
    the rules that no other language has."""

    decimal: str  # the mark before a number's decimals
    groups: str  # the marks that a number may have between its groups of digits
    point: str  # said for a decimal mark
    minus: str
    plus: str
    dot: str  # said in addresses and versions
    at: str
    to: str  # said between the ends of a range
    date: str  # order and mark of a date in digits, such as "mdy/"
    ratio_to: str  # said for the colon of 2:1
    clock: list[str]  # a time on the hour, for 1 and for others; the same with minutes
    units: dict[str, list[str]]  # written form -> spoken forms, "f" behind feminine ones
    number = ""  # said for "#" before a number
    hashtag: str  # said for "#" before a word
    ampersand: str  # said for "&"
    colon: str  # said in addresses with a port
    slash: str  # said for "/" beside digits
    over = ""  # said for the bar of a fraction that is said by its two numbers
    per: str  # between an amount and what it is for
    either = ""  # between two ordinals with a bar: 1st/2nd
    year_ends = ""  # a regular expression for what may be written behind the year of a date
    of = ""  # between a power of ten and a unit: 5 millions de km²
    part_ends = ""  # a regular expression for what may be written behind a fraction
    comma = ""  # said for a decimal comma, if it differs from `point`
    one: dict[str, str] = {}  # the number 1 before a noun, by the noun's gender "m" or "f"
    joined = False  # there is no blank between a number and its noun
    blank = " "  # between the words of a number, and around `dot`
    pause = ", "  # between the groups of a telephone number
    range_of = range_of_counts = ""  # how a range is said, if not with `to` between blanks; the same without units
    zero_of = ""  # said before a minute or second below 10
    dialect = ""  # num2words' name for the numbers, if it is not the language's code
    counted_years = False  # a year is said as a count
    ordinal_kings = 99  # kings up to this number have an ordinal
    many_forms = 2  # how many forms a noun has behind numbers
    plural_from = scales_from = 0  # numbers from here on have a noun in the plural, a power of ten; 0: all but 1
    part_gender = scale_gender = hour_gender = "m"  # of fractions, powers of ten and hours
    ordinal_ends = clock_end = ""  # regular expressions: behind an ordinal's digits, behind a time such as 14:30
    duration_units = ("h", "min", "s")
    openers: frozenset[str] = frozenset()  # words and signs that wait for the number behind them
    followers: frozenset[str] = frozenset()  # words and signs that belong to the number before them

    def __init__(self, code: str):
        self.code = code  # as num2words has it
        self._data = table_of(f"{code}/words")
        vars(self).update({name: words for name, words in self._data.items() if not isinstance(words, dict)})
        self.units, self.one = self._data["units"], self.table("one")
        self.following = frozenset(self._data.get("following", ""))  # characters for which a number waits
        self.currencies = table_of("shared")["currency_signs"] | self.table("currency_signs")
        self.months = tuple(self._data["lists"].get("months", "").split())
        self._lists = {name: frozenset(words.split()) for name, words in self._data["lists"].items()}

    def words(self, name: str) -> frozenset[str]:
        """A list of words; empty if the language has none."""
        return self._lists.get(name, frozenset())

    def table(self, name: str) -> dict[str, Any]:
        """A table of words; empty if the language has none."""
        return self._data.get(name, {})

    def any_of(self, name: str) -> str:
        """A regular expression for any word of a list."""
        return ends_of(self.words(name))

    @cached_property
    def unit_names(self) -> str:
        """A regular expression for any unit but the percent sign."""
        return ends_of(unit for unit in self.units if unit != "%")

    # ---------------------------------------------------------------- rules of this language alone

    def no_rules(self, rule: Rules) -> None:
        """Where `Numbers` asks for rules of this language alone, most languages have none."""

    first = no_rules  # what no shared rule may take apart
    second = no_rules  # the same behind the rules for names, addresses and signs
    later = no_rules  # behind telephone numbers
    years_first = no_rules  # years with a word that says so
    headed = no_rules  # ordinals that begin a line and no list
    ordinals = no_rules
    years_last = no_rules  # years that nothing but their place tells from counts
    counters = no_rules  # numbers before words that count things
    last = no_rules  # what is read once amounts are words

    def named_months(self, months: str, rule: Rules) -> None:
        """Days before the name of a month, which is one of `months`, a regular expression."""
        if self.months:
            first = self._data.get("first_day") or self.cardinal("1")
            rule(initials(self.months), rf"(?<!\d)1(?:er| ?[º°])?(?= (?:de )?(?:{months})\b)", lambda f: first)

    # ---------------------------------------------------------------- words that belong together

    def begins(self, word: str) -> bool:
        """May a number follow this word, such as "art." or "+"?"""
        return False

    def holds(self, word: str, held: str) -> bool:
        """Is the word, behind the word `held`, needed to tell what a number agrees with?"""
        return False

    def follows(self, word: str, held: str) -> bool:
        """Does the word belong to `held`, the word before it?"""
        return False

    def is_roman(self, word: str) -> bool:
        """May the word be a Roman numeral whose meaning the words around tell?"""
        return False

    def gender(self, word: str) -> str:
        """The gender of a noun, "m" or "f"; empty if it is not known."""
        return ""

    def per_one(self, unit: str, gender: str) -> str:
        """What is said for the bar before a unit, and the unit."""
        return f"{self.per}{self.blank}{unit}"

    def is_counted(self, found: Found) -> bool:
        """Does a noun follow that the number counts? It may be wrong if the language cannot tell."""
        return False

    # ---------------------------------------------------------------- numbers that agree with the words around them

    def agree(self, found: Found, value: str, said: str, in_range: bool = False) -> str:
        """The words for a number as they are at this place. `said`: as they are alone."""
        return said

    def measured(self, found: Found, value: str, forms: list[str], gender: str) -> str | None:
        """A number with a noun, both in their case; None if the nominative says it."""
        return None

    def money_at(self, found: Found, sign: str, written: str, scale: str | None) -> str | None:
        """The same for money."""
        return None

    def scaled_at(self, found: Found, written: str, scale: str) -> str | None:
        """The same for a power of ten."""
        return None

    def range_at(self, found: Found, first: str, last: str, noun: str = "", scale: str | None = None) -> str | None:
        """The same for a range."""
        return None

    # ---------------------------------------------------------------- numbers

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

    def said(self, written: str) -> str:
        """A written number in words."""
        return self.cardinal(self.value(written), mark_of(written))

    def cardinal(self, value: str, mark: str = "") -> str:
        """A number in words, from its canonical form. `mark` is the decimal mark that was written."""
        whole, _, decimals = value.partition(".")
        by_digits = len(whole) > MOST_DIGITS or (len(whole) > 1 and whole[0] == "0")
        said = self.digits(whole) if by_digits else self.whole(int(whole))
        if not decimals:
            return said
        return self.blank.join((said, (mark == "," and self.comma) or self.point, self.digits(decimals)))

    def whole(self, number: int) -> str:
        """A whole number in words."""
        return self.changed(num2words(number, lang=self.dialect or self.code), "corrections")

    def changed(self, words: str, table: str) -> str:
        """Words whose parts are replaced as a table says, which has regular expressions."""
        for part, instead in self.table(table).items():
            words = re.sub(part, instead, words)
        return words

    def below_one(self, decimals: str) -> str:
        """A number that begins with its point, such as .5"""
        return self.cardinal(f"0.{decimals}")

    def digits(self, digits: str) -> str:
        """The digits in words, one by one."""
        return self.blank.join(num2words(int(digit), lang=self.code) for digit in digits)

    def ordinal(self, number: str, **inflection: str) -> str:
        known = self.table("ordinals").get(number)
        return known or num2words(int(number), lang=self.code, to="ordinal", **inflection)

    def feminine_ordinal(self, said: str) -> str:
        return " ".join(self.changed(word, "feminine_ordinals") for word in said.split())

    def year(self, year: str) -> str:
        """A year in num2words' form, or as a count."""
        if self.counted_years or len(year) > 4:
            return self.cardinal(year)
        return num2words(int(year), lang=self.code, to="year")

    def ordinal_at(self, found: Found) -> str | None:
        """The ordinal whose digits are the match's first group."""
        return self.ordinal(found[1])

    def king(self, number: str, is_queen: bool) -> str:
        """The number behind a king's or a queen's name."""
        said = self.ordinal(number) if int(number) <= self.ordinal_kings else self.cardinal(number)
        return self.feminine_ordinal(said) if is_queen else said

    def is_king(self, found: Found) -> bool:
        """Does what stands around a Roman numeral behind a name say that it is no sequel? Cristián II de Dinamarca.
        `found`: its groups are a mark, the numeral and a full stop."""
        return not found[3] and found.after in self.words("king_of")

    def king_in_case(self, said: str, before: str) -> str:
        """The number behind a king's name in the case that the word before the name asks for."""
        return said

    @cached_property
    def declined_kings(self) -> dict[str, tuple[str, str]]:
        """Names that are not in the nominative -> their case and gender, as num2words has them."""
        lists = ((kind, case) for kind in ("kings", "queens") for case in "gdaip")
        return {name: (case, "fm"[kind == "kings"]) for kind, case in lists for name in self.words(f"{kind}_{case}")}

    def dialled(self, found: Found) -> str:
        """A telephone number, digit by digit, with a pause between the groups."""
        said = self.pause.join(map(self.digits, re.findall(r"\d+", found[0])))
        return f"{self.plus}{self.blank}{said}" if found[0][0] == "+" else said

    def ratio(self, found: Found) -> str:
        """2:1"""
        return self.blank.join((self.cardinal(found[1]), self.ratio_to, self.cardinal(found[2])))

    def part(self, top: int, bottom: int) -> str | None:
        """A fraction; None if it has no name."""
        if not (forms := self.table("fractions").get(str(bottom))):
            return None
        return f"{self.before_noun(str(top), self.part_gender)} {forms[-1 if top > 1 else 0]}"

    def fraction(self, top: int, bottom: int) -> str:
        """Any fraction."""
        if bottom < 2 or (bottom > 100 and bottom % 100) or top > bottom > 20:
            return self.blank.join((self.cardinal(str(top)), self.over, self.cardinal(str(bottom))))
        return (self.part(top, bottom) if bottom > 2 or top == 1 else None) or self.nth_part(top, bottom)

    def nth_part(self, top: int, bottom: int) -> str:
        """A fraction whose parts are named by their number, as twelfths are."""
        name = self.part(top, bottom)
        end = "s" if top > 1 else ""
        return name or f"{self.before_noun(str(top), self.part_gender)} {self.ordinal(str(bottom))}{end}"

    def with_part(self, whole: str, part: str, is_half: bool) -> str:
        """A whole number and a fraction."""
        return f"{self.cardinal(whole)}{self._data['and']}{self._data.get('one_half', part) if is_half else part}"

    def part_of_unit(self, whole: str | None, part: str, unit: str) -> str | None:
        """A fraction such as "3/4", or a whole number and one, with a unit; None if the unit just stands behind."""
        return None

    @cached_property
    def scales(self) -> dict[str, tuple[int, list[str]]]:
        """How a power of ten is written -> the power, and how it is said behind a number."""
        rows = self.table("scales").items()
        return {name: (int(power), forms) for power, (names, *forms) in rows for name in names.split()}

    def exact(self, written: str, scale: str | None) -> str | None:
        """The whole number that number and scale make, if the language says it as one."""
        if not scale:
            return None
        power, forms = self.scales[scale]
        value = Decimal(self.value(written)).scaleb(power)
        if forms and (power != 3 or (self.code == "ko" and value < 10_000)):
            return None
        return str(int(value)) if value == int(value) and value < 10**15 else None

    def scaled(self, written: str, scale: str | None) -> str | None:
        """Number and scale in words; None if they cannot be said."""
        if not scale:
            return self.said(written)
        if exact := self.exact(written, scale):
            return self.cardinal(exact)
        value, (power, forms) = self.value(written), self.scales[scale]
        if not forms or (power == 3 and self.code != "ko"):
            return None
        if self.joined:
            return self.before_scale(value) + forms[0]
        number = self.before_noun(value, self.scale_gender, mark_of(written))
        many = self.form(value, self.scales_from or self.plural_from)
        form = scale if scale in forms and self.one else forms[min(many, len(forms) - 1)]
        return f"{number} {form}"

    def before_scale(self, value: str) -> str:
        """A number before a power of ten, in languages without blanks."""
        return self.table("before_scales").get(value) or self.cardinal(value)

    @property
    def less(self) -> str:
        """Said for the minus between two numbers."""
        signs = self.table("signs")
        return signs.get("-") or signs.get("−") or self.minus.strip()

    def below_zero(self, sign: str | None) -> str:
        """What is said before a number with this sign."""
        return (self.minus + ("" if self.joined else " ")) if sign else ""

    def range(self, first: str | None, last: str | None, form: str = "") -> str | None:
        """A range of what is words already; None if one of its ends is missing."""
        said = form or self.range_of or f"{{}}{self.blank}{self.to}{self.blank}{{}}"
        return said.format(first, last) if first and last else None

    # ---------------------------------------------------------------- numbers before nouns

    @cached_property
    def nouns(self) -> dict[str, str]:
        """Units written as words -> the gender, "m" or "f", that a number takes from them."""
        if not self.one or self.code == "en":
            return {}
        found: dict[str, str] = {}
        for forms in self.units.values():
            found |= {form: gender_of(forms) for form in plain(forms) if " " not in form}
        for forms in self.table("currencies").values():
            if forms[-1] == "f":
                found |= dict.fromkeys(forms[:2], "f")
        return found

    def counted(self, value: str, unit: str, mark: str = "") -> str | None:
        """A number with a unit of the table, such as "km"; None if the language's table lacks it."""
        if unit in self.nouns:
            return f"{self.before_noun(value, self.nouns[unit], mark)} {unit}"
        if unit not in self.units:
            return None
        forms = plain(self.units[unit])
        if "{}" in forms[0]:
            return forms[0].format(self.cardinal(value))
        form = forms[min(self.form(value), len(forms) - 1)]
        number = self.before_noun(value, gender_of(self.units[unit]), mark)
        return f"{number}{self.blank}{form}"

    def counted_as(self, written: str, unit: str) -> str | None:
        """The same for a number as it is written."""
        return self.counted(self.value(written), unit, mark_of(written))

    def form(self, value: str, plural_from: int | None = None) -> int:
        """Index of the noun's form for a number: 0 for singular, then the others."""
        least = self.plural_from if plural_from is None else plural_from
        return int(float(value) >= least) if least else int(value != "1")

    def before_noun(self, value: str, gender: str, mark: str = "") -> str:
        """A number in words, as it is before a noun of this gender, "m" or "f"."""
        if value == "1" and self.one:
            return self.one[gender]
        words = self.cardinal(value, mark)
        return words if "." in value else self.inflected(words, gender)

    def inflected(self, words: str, gender: str) -> str:
        """A number of more than 1 as it is before a noun of this gender. What counts millions stays as it is."""
        start = max((found.end() for found in _MILLIONS.finditer(words)), default=0)
        return words[:start] + self.changed(words[start:], f"before_{gender}")

    # ---------------------------------------------------------------- money

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
            return f"{self.before_noun(value, gender)}{glue}{form}"
        cents = f"{cents:0<2}"
        units, hundredths = str(int(whole)), str(int(cents))
        said = f"{self.before_noun(units, gender)} {forms[self.form(units)]}"
        if int(whole) and int(whole) % 10**6 == 0:
            said = f"{self.cardinal(units)} {self.many(sign)}"
        if not int(cents):
            return said
        coins = f"{self.before_noun(hundredths, 'm')} {small[self.form(hundredths)]}"
        return f"{said}{self._data.get('and_cents', ', ')}{coins}" if int(whole) else coins

    def many(self, sign: str) -> str:
        """A currency's name behind a large number, with the word that links it; empty if there is none."""
        forms, _, _ = self.forms_of(sign)
        return self.changed(self.of + forms[-1], "many_of_money") if forms else ""

    def forms_of(self, sign: str) -> tuple[list[str], str, list[str]]:
        """A currency's forms, gender and the forms of its hundredth, from our table or from num2words."""
        sign = sign.upper() if sign in SMALL_CODES else sign
        name = self.currencies.get(sign, sign)  # empty if the sign may be one of several
        if row := self.table("currencies").get(name):
            names = plain(row)
            count = 1 if self.joined else self.many_forms
            return names[:count], gender_of(row), names[count:]
        try:
            said = [
                num2words(Decimal(amount), lang=self.code, to="currency", currency=name, separator="|")
                for amount in ("1.01", "2.02", "5.05")[: self.many_forms]
            ]
        except NotImplementedError:
            return [], "m", []
        halves = [part.strip() for amount in said for part in amount.split("|")]
        forms = [half.partition(" ")[2] for half in halves]
        return forms[::2], "f" if halves[0].startswith("una ") else "m", forms[1::2]

    def amount(self, sign: str, written: str, scale: str | None) -> str | None:
        """An amount of money as it is written; None if the language lacks the currency or the scale."""
        sign = sign.rstrip(".") if sign != "Fr." else sign
        if not scale:
            return self.money(self.value(written), sign)
        if exact := self.exact(written, scale):
            return self.money(exact, sign)
        words, many = self.scaled(written, scale), self.many(sign)
        return words + ("" if self.joined else " ") + many if words and many else None

    # ---------------------------------------------------------------- dates and times

    def lasting(self, value: str, unit: str) -> str | None:
        """A part of a duration."""
        return self.counted(value, unit)

    def dated(self, found: Found, year: str, month: int, day: str) -> str:
        """The date of a match."""
        return self.on_date(year, month, day)

    def on_date(self, year: str, month: int, day: str) -> str:
        """A date in words. `year` may be empty."""
        link = self._data.get("of_month", "")
        said = self._data["first_day"] if int(day) == 1 and "first_day" in self._data else self.cardinal(str(int(day)))
        return f"{said} {link}{self.months[month - 1]}" + (f" {link}{self.year(year)}" if year else "")

    def clock_at(self, found: Found) -> str:
        """The time of a match."""
        return self.at_time(found[1], found[2])

    def at_time(self, hour: str, minute: str, half: str = "") -> str:
        """A time in words. `half`: "a" or "p", in English, where the day has two halves."""
        value, minutes = str(int(hour)), str(int(minute))
        said = self.clock[min(self.form(value), 1) + (2 if int(minute) else 0)]
        zero = self.zero_of if int(minute) < 10 else ""
        return said.format(self.before_noun(value, self.hour_gender), zero + self.cardinal(minutes))


def mark_of(written: str) -> str:
    """The decimal mark of a written number; a point if it has none."""
    return "," if re.search(r",\d+$", written) else "."


def plain(forms: list[str]) -> list[str]:
    """A noun's forms without its gender."""
    return forms[:-1] if forms[-1] == "f" else forms


def gender_of(forms: list[str]) -> str:
    """The gender of a noun of a table, "m" or "f"."""
    return "f" if forms[-1] == "f" else "m"


@cache
def spoken_in(language: str) -> Spoken:
    """A language of `LANGUAGES`, made once."""
    code = LANGUAGES[language]
    return import_module(f"spoken_text.{code}.rules").Language(code)


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
