"""Amounts: money, large numbers such as "3 Mio." and "10k", ranges, and numbers with a unit. A rule takes all of an
amount, with its sign, scale, currency and both ends of a range, or none of it."""

import re
from decimal import Decimal

from spoken_text import currency
from spoken_text.agreement import Agreement
from spoken_text.rule import DASH, Around, Kept, Rules, ends_of, keep
from spoken_text.ru import rules as russian
from spoken_text.spoken import Spoken, num2words

_SCALES = {
    "en": "3 K k thousand : thousand, 6 M mn mln MM million : million, 5 lakh : lakh, 7 crore : crore, 9 B bn Bn BN "
    "bln billion : billion, 12 T tn trn trillion : trillion",
    "de": "3 K k Tsd Tsd. tausend Tausend : tausend, 6 M Mio Mio. Million Millionen : Million Millionen, 9 B bn Mrd "
    "Mrd. Milliarde Milliarden : Milliarde Milliarden, 12 Bio Bio. Billion Billionen : Billion Billionen",
    "fr": "3 K k mille : mille, 6 M Mio million millions : million millions, 9 B Md Mds Mrd milliard milliards : "
    "milliard milliards, 12 billion billions : billion billions",
    "es": "3 K k mil : mil, 6 M MM mill. mln millón millones : millón millones, 9 B : mil_millones mil_millones, 12 "
    "billón billones : billón billones",
    "it": "3 K k mila : mila, 6 M Mln mln mln. Mio milione milioni : milione milioni, 9 B mld mld. Mld miliardo "
    "miliardi : miliardo miliardi",
    "pt": "3 K k mil : mil, 6 M mi mln milhão milhões : milhão milhões, 9 B bi bilhão bilhões : bilhão bilhões, 12 "
    "trilhão "
    "trilhões : trilhão trilhões",
    "ru": "3 K k тыс тыс. тысяча тысячи тысяч : тысяч, 6 M млн млн. миллион миллиона миллионов : миллион миллиона "
    "миллионов, 9 B млрд млрд. миллиард миллиарда миллиардов : миллиард миллиарда миллиардов, 12 T трлн трлн. : "
    "триллион триллиона триллионов",
    "zh": "3 K k : , 6 M m : , 9 B bn : , 4 万 萬 : 万, 8 亿 億 : 亿",
    "ja": "3 K k : , 6 M m : , 9 B bn : , 4 万 : 万, 8 億 : 億, 12 兆 : 兆",
    "ko": "3 K k 천 : 천, 6 M m : , 9 B bn : , 4 만 : 만, 8 억 : 억, 12 조 : 조",
}
"""By language: a power of ten, how it is written, and how it is said behind a number."""

_ONLY_MONEY = frozenset("K k M m MM B b T bi mi".split())
"""Beside a currency these are scales. Alone they may be a letter, a unit or a name."""

_CROWD = frozenset(
    "followers subscribers users views likes downloads people readers members customers employees words tokens steps "
    "miles parameters params rows lines stars visitors fans viewers".split()
)
DOTTED = frozenset("Std. Sek. Min. ч. мин. сек. коп.".split())
"""Units that end with the dot of an abbreviation."""
_DOTTED_IN = {
    "en": frozenset("oz. lb. lbs. ft. hr. hrs. mi. min. mins. sec. secs. tsp. tbsp. yd. yds. qt. gal.".split()),
    "de": frozenset(["Pck."]),
}

GENITIVE = russian.GENITIVE
_SCORE = frozenset(
    "won win wins lost lose beat score scored scores draw drew drawn tied tie finished led lead ahead gewann "
    "gewinnt gewonnen verlor verloren siegte endete spielte gagné perdu battu score ganó perdió vinto perso "
    "ganhou perdeu".split()
)


class _Amounts:
    """The rules' words, for one language."""

    def __init__(self, spoken: Spoken, around: Around):
        self.spoken, self.around = spoken, around
        self.agree = Agreement(spoken.code, around)
        self.scales: dict[str, tuple[int, list[str]]] = {}
        for row in _SCALES[spoken.code].split(", "):
            written, _, said = row.partition(":")
            power, *names = written.split()
            self.scales |= dict.fromkeys(names, (int(power), [form.replace("_", " ") for form in said.split()]))
        if spoken.code == "en":
            self.scales |= {"m": self.scales["M"], "b": self.scales["B"]}
        self.number = spoken.pattern
        self.scale = rf"(?: ?({ends_of(' '.join(self.scales))})(?![A-Za-zÀ-ɏЀ-ӿ²³]))?"
        self.sign = rf"({currency.SIGN}|(?:{currency.CODE})\b)"
        self.behind = rf"({currency.SIGN_BEHIND}|{currency.SIGN}|(?:{currency.CODE})\b)"
        if spoken.joined:  # HKD200 and 200달러 are written without a blank
            self.sign = self.sign.replace(r"\b)", "(?![A-Za-z]))")
            self.behind = self.behind.replace(r"\b)", ")") if spoken.code == "ko" else self.behind

    def minus(self, sign: str | None) -> str:
        return (self.spoken.minus + ("" if self.spoken.joined else " ")) if sign else ""

    def exact(self, written: str, scale: str | None) -> str | None:
        """The whole number that number and scale make, if the language says it as one."""
        if not scale:
            return None
        power, forms = self.scales[scale]
        value = Decimal(self.spoken.value(written)).scaleb(power)
        whole = value == int(value) and value < 10**15
        if (power == 3 and self.spoken.code != "ko") or not forms:
            return str(int(value)) if whole else None
        return None

    def words(self, written: str, scale: str | None) -> str | None:
        """Number and scale in words; None if they cannot be said."""
        value, mark = self.spoken.value(written), "," if re.search(r",\d+$", written) else "."
        if not scale:
            return self.spoken.cardinal(value, mark)
        if exact := self.exact(written, scale):
            return self.spoken.cardinal(exact)
        power, forms = self.scales[scale]
        if not forms or (power == 3 and self.spoken.code != "ko"):
            return None
        if self.spoken.joined:
            special = {("zh", "2"): "两", ("ja", "1000"): "一千"}.get((self.spoken.code, value))
            return (special or self.spoken.cardinal(value, mark)) + forms[0]
        gender = "f" if self.spoken.code == "de" else "m"
        number = self.spoken.before_noun(self.spoken.cardinal(value, mark), value, gender)
        form = scale if scale in forms and self.spoken.one else forms[min(self.form(value), len(forms) - 1)]
        return f"{number} {form}"

    def form(self, value: str) -> int:
        if self.spoken.code == "pt":
            return int(float(value) >= 2)
        return self.spoken.form(value)

    def money(self, sign: str, written: str, scale: str | None) -> str | None:
        """An amount of money; None if the language lacks the currency or the scale."""
        sign = sign.rstrip(".") if sign != "Fr." else sign
        if not scale:
            return self.spoken.money(self.spoken.value(written), sign)
        if exact := self.exact(written, scale):
            return self.spoken.money(exact, sign)
        words, many = self.words(written, scale), self.spoken.many(sign)
        if not words or not many:
            return None
        return words + ("" if self.spoken.joined else " ") + many

    def in_case(self, found: re.Match[str], sign: str, written: str, scale: str | None) -> str | None:
        """An amount of money in Russian behind a word that takes a case; None if the nominative says it."""
        forms, gender, _ = self.spoken.forms_of(sign) if self.spoken.code == "ru" else ([], "m", [])
        if not forms:
            return None
        if scale:
            said = self.scaled_in_case(found, written, scale)
            return said and (said if isinstance(said, Kept) else f"{said} {forms[-1]}")
        value = self.spoken.value(written)
        if "." in value and self.around.word_before(found) in GENITIVE:
            return None if not int(value.partition(".")[2]) else keep(found[0])
        return russian.measured(self.around, found, value, forms, gender) if "." not in value else None

    def scaled_in_case(self, found: re.Match[str], written: str, scale: str) -> str | None:
        """более 5 млн: более пяти миллионов"""
        before = self.around.word_before(found)
        if self.spoken.code != "ru" or russian.case_before(before) == "n":
            return None
        value, (power, forms) = self.spoken.value(written), self.scales[scale]
        if power == 3:
            exact = self.exact(written, scale)
            case = russian.case_before(before)
            return russian.number(exact, case) if exact and case != "d" else keep(found[0])
        return russian.measured(self.around, found, value, forms, "m")

    def russian(
        self, found: re.Match[str], first: str, last: str, noun: str = "", scale: str | None = None
    ) -> str | None:
        """A range in Russian takes the genitive: от пяти до десяти километров. None if it cannot be said like this."""
        ends = [self.spoken.value(first), self.spoken.value(last)]
        if self.spoken.code != "ru" or not all(end.isdecimal() and len(end) < 10 for end in ends):
            return None
        before = self.around.word_before(found)
        case = russian.case_before(before)
        many = self.scales[scale][1][-1] if scale else ""
        if case == "d":
            return None
        if case == "a" or (case == "g" and before not in ("от", "с", "со")):
            if case == "a" and self.spoken.form(ends[1]) != 2:
                return None
            words = "-".join(russian.number(end, "g" if case == "g" else "n") for end in ends)
            return " ".join(f"{words} {many} {noun}".split())
        said = " до ".join(num2words(int(end), lang="ru", case="g") for end in ends)
        start = "" if before in GENITIVE else "от "
        return " ".join(f"{start}{said} {many} {noun}".split())

    def range(self, first: str | None, last: str | None) -> str | None:
        if not first or not last:
            return None
        blank = self.spoken.around_dot
        if self.spoken.code == "ru":
            return f"{first} – {last}"
        if self.spoken.code == "it":
            return f"{first}-{last}"  # dieci-quindici: with any word before it
        start = "" if self.spoken.code == "ko" else blank
        return f"{first}{start}{self.spoken.to}{blank}{last}"


def dotted(spoken: Spoken) -> frozenset[str]:
    """Units of the language that may end with the dot of an abbreviation."""
    return DOTTED | _DOTTED_IN.get(spoken.code, frozenset())


def written_scales(spoken: Spoken) -> list[str]:
    """How the language writes thousands, millions and more."""
    return list(_Amounts(spoken, Around()).scales)


def glued(scales: list[str]) -> list[str]:
    """Scales with a sign behind: M€."""
    return [scale + sign for scale in scales for sign in "€$£¥₽₩"]


def rules(spoken: Spoken, around: Around) -> Rules:
    """Money and scales. They come before units, because "£5m" is no length."""
    amounts = _Amounts(spoken, around)
    yield from _money(amounts)
    yield from _scaled(amounts)


def _money(amounts: _Amounts) -> Rules:
    number, scale, sign, behind = amounts.number, amounts.scale, amounts.sign, amounts.behind
    dash, blank = rf" ?{DASH} ?", " ?"
    if amounts.spoken.decimal == ".":
        number = rf"\d+,\d\d(?![.,]?\d)|\.\d\d?(?!\d)|{number}"  # €5,50 and $.50
    begins, ends = r"(?<![\w.,])", r"(?![\d]|[.,]\d)"

    def said(
        signs: list[str | None], first: str, first_scale: str | None, last: str, last_scale: str | None
    ) -> str | None:
        named = {name for name in signs if name}
        if len(named) != 1:
            return None
        name = named.pop()
        both = amounts.money(name, last, last_scale)
        whole = "." not in amounts.spoken.value(first) or first_scale or last_scale
        if first_scale and not last_scale:
            start = amounts.money(name, first, first_scale)
        else:
            start = amounts.words(first, first_scale) if whole else amounts.money(name, first, first_scale)
        return amounts.range(start, both)

    def before(found: re.Match[str]) -> str | None:
        if (not found[4] or found[4] == found[1]) and not found[3]:
            if russian := amounts.russian(found, found[2], found[5], amounts.spoken.many(found[1]), found[6]):
                return russian
        return said([found[1], found[4]], found[2], found[3], found[5], found[6]) or keep(found[0])

    def after(found: re.Match[str]) -> str | None:
        if (not found[3] or found[3] == found[6]) and not found[2]:
            if russian := amounts.russian(found, found[1], found[4], amounts.spoken.many(found[6]), found[5]):
                return russian + (amounts.around.stop(found, False) if found[6][-1] == "." else "")
        return said([found[3], found[6]], found[1], found[2], found[4], found[5]) or keep(found[0])

    tail = r"(?![A-Za-zÀ-ɏЀ-ӿ])"
    letters = tail if amounts.spoken.joined else r"(?!\w)"
    yield rf"{begins}{sign} ?({number}){scale}{dash}{sign}?{blank}({number}){scale}{ends}(?!-\d){tail}", before
    yield rf"(?<![\w.,-])({number}){scale}{blank}{behind}?{dash}({number}){scale}{blank}{behind}{letters}", after

    def single(found: re.Match[str]) -> str | None:
        minus, name, written, size = found[1], found[2], found[3], found[4]
        money = amounts.in_case(found, name, written, size) or amounts.money(name, written, size)
        if isinstance(money, Kept):
            return money
        return amounts.minus(minus) + money if money else None

    yield rf"(?<![\w])([-−])?{sign} ?({number}){scale}{ends}(?![-–~]\d){tail}", single
    # An amount with a letter, a third decimal mark or a chain of dashes behind it may be anything.
    odd = r"(?:[\d.,]{0,30}[A-Za-zÀ-ɏЀ-ӿ]\w{0,30}|\d{0,30}[.,][\d.,]{0,30}\d)"
    yield rf"(?<![\w])(?:{currency.SIGN}) ?\d{odd}", lambda f: keep(f[0])

    yield (
        r"(?<![\w.,])(\d{1,6}) ?([€$£])(\d\d)(?![\w]|[.,]\d)",
        lambda f: amounts.spoken.money(f"{f[1]}.{f[3]}", f[2]) if amounts.spoken.decimal == "," else keep(f[0]),
    )

    def trailing(found: re.Match[str]) -> str | None:
        minus, written, size, name = found[1], found[2], found[3], found[4]
        money = amounts.in_case(found, name, written, size) or amounts.money(name, written, size)
        if not money or isinstance(money, Kept):
            return money
        return amounts.minus(minus) + money + (amounts.around.stop(found, False) if name[-1] == "." else "")

    yield rf"(?<![\w.,])([-−])?({number}){scale} ?{behind}{letters}", trailing


def _scaled(amounts: _Amounts) -> Rules:
    number, scale, spoken, around = amounts.number, amounts.scale.removesuffix("?"), amounts.spoken, amounts.around

    def is_scale(found: re.Match[str], written: str, name: str) -> bool:
        glued = written + name in found[0]
        if spoken.code == "fr" and name in ("M", "Md") and around.word_after(found).startswith(("d'", "d’", "de")):
            return True
        if spoken.code == "en" and name in ("K", "k", "M", "B") and glued:
            value = spoken.value(written)
            if value == "401" or (name == "K" and value in ("2", "4", "8")):
                return False
            crowd = around.word_after(found).lower() in _CROWD
            return name == "k" or "." in value or crowd or (name == "K" and float(value) >= 12)
        if name == "k" and glued:
            return True
        return name not in _ONLY_MONEY

    def stop(found: re.Match[str], name: str) -> str:
        return around.stop(found, spoken.code == "de") if name[-1] == "." else ""

    def ranged(found: re.Match[str]) -> str | None:
        first, first_scale, last, last_scale = found[1], found[2], found[3], found[4]
        thousands = last_scale in ("k", "K") and last + last_scale in found[0]
        thousands |= bool(first_scale) and first_scale in "MB" and first + first_scale in found[0]
        if not thousands and (not is_scale(found, last, last_scale)) or (first_scale and first_scale != last_scale):
            return None
        if not first_scale and (russian := amounts.russian(found, first, last, "", last_scale)):
            return russian + stop(found, last_scale)
        said = amounts.range(amounts.words(first, first_scale), amounts.words(last, last_scale))
        return said and said + stop(found, last_scale)

    def single(found: re.Match[str]) -> str | None:
        if not is_scale(found, found[2], found[3]):
            return None
        said = amounts.scaled_in_case(found, found[2], found[3])
        if said:
            return said if isinstance(said, Kept) else said + stop(found, found[3])
        said = amounts.words(found[2], found[3])
        exact = said and amounts.exact(found[2], found[3])
        said = amounts.agree(found, exact, said, True) if said and exact else said
        return said and amounts.minus(found[1]) + said + stop(found, found[3])

    yield rf"(?<![\w.,-])({number}){scale}? ?{DASH} ?({number}){scale}(?!\w)", ranged
    yield rf"(?<![\w.,])([-−])?({number}){scale}" + ("" if spoken.joined else r"(?!\w)"), single


def units(spoken: Spoken, around: Around) -> Rules:
    """Numbers with a unit, alone or as a range."""
    amounts, number = _Amounts(spoken, around), spoken.pattern
    nouns = [] if spoken.code == "ru" else [*spoken.nouns]  # counted by their endings
    abbreviated = [name for name in dotted(spoken) if name[:-1] in spoken.units]
    names = "|".join(sorted(map(re.escape, [*spoken.units, *nouns, *abbreviated]), key=len, reverse=True))

    def mark(written: str) -> str:
        return "," if re.search(r",\d+$", written) else "."

    def stop(found: re.Match[str], said: str | None, unit: str) -> str | None:
        if isinstance(said, Kept):
            return said
        return said and said + (around.stop(found, spoken.code == "de") if unit[-1] == "." else "")

    def counted(written: str, unit: str, minus: str | None = None) -> str | None:
        unit = unit.rstrip(".")
        said = spoken.counted(spoken.value(written), unit, mark(written))
        return said and amounts.minus(minus) + said

    def ranged(found: re.Match[str]) -> str | None:
        minus, first, unit, last, last_unit = found[1], found[2], found[3], found[4], found[5]
        last_unit = last_unit.rstrip(".")
        if unit and unit != last_unit:
            return amounts.range(counted(first, unit, minus), counted(last, last_unit))
        if not minus and last_unit in spoken.units:
            forms = [form for form in spoken.units[last_unit] if form != "f"]
            if said := amounts.russian(found, first, last, forms[-1]):
                return said
        start = amounts.minus(minus) + spoken.cardinal(spoken.value(first), mark(first))
        if "{}" in spoken.units.get(last_unit, ("",))[0]:
            start = counted(first, last_unit, minus) or start
        return amounts.range(start, counted(last, last_unit))

    def in_case(found: re.Match[str]) -> str | None:
        """около 5 км: in Russian the number takes the case of the word before it."""
        unit = found[3].rstrip(".")
        if spoken.code != "ru" or found[1] or unit not in spoken.units:
            return None
        *forms, last = spoken.units[unit]
        forms, gender = (forms, "f") if last == "f" else ([*forms, last], "m")
        return russian.measured(around, found, spoken.value(found[2]), forms, gender)

    ends = r"(?<!%)(?![A-Za-z0-9_À-ɏЀ-ӿ²³]|/[A-Za-z0-9])|(?<=%)" if spoken.joined else r"(?![\w²³/])"
    ends = f"(?:{ends})"
    ends += r"(?!-\d)"
    yield rf"(?<![\w.,-])([-−])?({number}) ?({names})? ?{DASH} ?({number}) ?({names}){ends}", ranged
    yield (
        rf"(?<![\w.,])(?<!\d[-–~])([-−])?({number}) ?({names}){ends}",
        lambda f: stop(f, in_case(f) or counted(f[2], f[3], f[1]), f[3]),
    )


def ranges(spoken: Spoken, around: Around) -> Rules:
    """Two numbers with a dash between. A hyphen counts only if the second one is larger: 3-2 is a score."""
    amounts, number = _Amounts(spoken, around), spoken.pattern
    ru = russian.Russian(spoken, around) if spoken.code == "ru" else None

    def said(found: re.Match[str]) -> str | None:
        first, last = spoken.value(found[1]), spoken.value(found[3])
        if found[2] in "-−" and (
            Decimal(first) >= Decimal(last)
            or "0" in (first[0], last[0])
            or around.word_before(found).strip(".,:") in _SCORE
        ):
            return None
        if around.word_before(found) in GENITIVE and (russian := amounts.russian(found, found[1], found[3])):
            return russian
        words = [
            (ru.count if ru else amounts.agree)(
                found, value, spoken.cardinal(value, "," if "," in written else "."), True
            )
            for value, written in ((first, found[1]), (last, found[3]))
        ]
        if any(isinstance(word, Kept) for word in words):
            return keep(found[0])
        return "-".join(words) if spoken.code == "ru" else amounts.range(*words)

    guard = r"(?![.,:/_]?\d)(?![-–~]\d)(?![A-Za-zÀ-ɏЀ-ӿ])" + ("(?![가-힣])" if spoken.code == "ko" else "")
    yield rf"(?<![\w.,:/-])({number})(?: (?=[–~～〜]))?({DASH})(?:(?<=[–~～〜]) )?({number}){guard}", said
