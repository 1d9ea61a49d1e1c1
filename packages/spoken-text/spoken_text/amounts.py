"""Amounts: money, large numbers such as "3 Mio." and "10k", ranges, and numbers with a unit. A rule takes all of an
amount, with its sign, scale, currency and both ends of a range, or none of it."""

import re
from decimal import Decimal

from spoken_text.rule import DASH, DASHES, Found, Kept, Rules, ends_of, initials, keep
from spoken_text.spoken import SMALL_CODES, Spoken, gender_of, plain
from spoken_text.tables import shared_words, table_of

_ONLY_MONEY, DOTTED, _SCORE = map(shared_words, ("only_money", "dotted_units", "score"))
CODES = shared_words("currency_codes") | SMALL_CODES
SIGN = r"Rs\.?|(?:US|AU?|CA?|HK|NZ|NT|S|MX|R)\$|CN¥|[$€£¥￥₽₩₹₺₴₪₫฿₱₡]"
SIGN_BEHIND = r"zł|Kč|kr\b\.?|руб\b\.?|р\b\.?|долл\b\.?"
"""These stand only behind an amount."""

CODE = "|".join(CODES)
INITIALS = initials([*table_of("shared")["currency_signs"], *CODES])
_TAIL = r"(?![A-Za-zÀ-ɏЀ-ӿ])"


def _scale(spoken: Spoken) -> str:
    return rf"(?: ?({ends_of(spoken.scales)})(?![A-Za-zÀ-ɏЀ-ӿ²³]))"


def money(spoken: Spoken, rule: Rules) -> None:
    """Money comes before units, because "£5m" is no length."""
    scale, dash = f"{_scale(spoken)}?", rf" ?{DASH} ?"
    sign = rf"({SIGN}|(?:{CODE})\b)"
    behind = rf"({SIGN_BEHIND}|{SIGN}|(?:{CODE})\b)"
    if spoken.joined:  # HKD200 and 200달러 are written without a blank
        sign = sign.replace(r"\b)", "(?![A-Za-z]))")
        behind = behind.replace(r"\b)", ")") if spoken.code == "ko" else behind
    number = spoken.pattern
    if spoken.decimal == ".":
        number = rf"\d+,\d\d(?![.,]?\d)|\.\d{{1,5}}(?!\d)|{number}"  # €5,50 and $.50
    begins, ends, letters = r"(?<![\w.,])", r"(?![\d]|[.,]\d)", _TAIL if spoken.joined else r"(?!\w)"

    def ranged(
        found: Found, signs: set[str | None], first: tuple[str, str | None], last: tuple[str, str | None]
    ) -> str | None:
        """`first` and `last`: a number and its scale."""
        signs.discard(None)
        if " " in found[0] and first[1] == last[1] and Decimal(spoken.value(first[0])) > Decimal(spoken.value(last[0])):
            return None  # 3 % on £12,000 – £360
        if len(signs) != 1:
            return keep(found)
        sign = signs.pop() or ""
        if not first[1] and (said := spoken.range_at(found, first[0], last[0], spoken.many(sign), last[1])):
            return said + found.stop(sign)
        if (first[1] and not last[1]) or not (first[1] or last[1] or "." not in spoken.value(first[0])):
            start = spoken.amount(sign, *first)
        else:
            start = spoken.scaled(*first)
        return spoken.range(start, spoken.amount(sign, *last)) or keep(found)

    before = rf"{begins}{sign} ?({number}){scale}{dash}{sign}? ?({number}){scale}{ends}(?!-\d){_TAIL}"
    rule(DASHES, before, lambda f: ranged(f, {f[1], f[4]}, (f[2], f[3]), (f[5], f[6])))
    after = rf"(?<![\w.,-])({number}){scale} ?{behind}?{dash}({number}){scale} ?{behind}{letters}"
    rule(DASHES, after, lambda f: ranged(f, {f[3], f[6]}, (f[1], f[2]), (f[4], f[5])))

    def single(found: Found, sign: str, written: str, size: str | None) -> str | None:
        if spoken.code in ("es", "pt") and sign == "$" and not size and re.fullmatch(r"\d+(?:,\d{3})+", written):
            written = written.replace(",", "")
        if sign == "PHP" and found[0][0] == "P" and re.fullmatch(r"[3-8](?:\.\d)?", written):
            return None  # a language of computers
        said = spoken.money_at(found, sign, written, size) or spoken.amount(sign, written, size)
        if not said or isinstance(said, Kept):
            return said
        return spoken.below_zero(found[1]) + said + found.stop(sign)

    written = rf"(?<![\w])([-−])?{sign} ?({number}){scale}{ends}(?![-–~]\d){_TAIL}"
    rule(INITIALS, written, lambda f: single(f, f[2], f[3], f[4]))
    # An amount with a letter, a third decimal mark or a chain of dashes behind it may be anything.
    odd = r"(?:[\d.,]{0,30}[A-Za-zÀ-ɏЀ-ӿ]\w{0,30}|\d{0,30}[.,][\d.,]{0,30}\d)"
    rule("$€£¥￥₽₩₹₺₴₪₫฿₱", rf"(?<![\w])(?:{SIGN}) ?\d{odd}", keep)
    within = r"(?<![\w.,])(\d{1,6}) ?([€$£])(\d\d)(?![\w]|[.,]\d)"
    rule("$€£", within, lambda f: spoken.money(f"{f[1]}.{f[3]}", f[2]) if spoken.decimal == "," else keep(f))
    rule(INITIALS, rf"(?<![\w.,])([-−])?({number}){scale} ?{behind}{letters}", lambda f: single(f, f[4], f[2], f[3]))


def scaled(spoken: Spoken, rule: Rules) -> None:
    """Numbers with a power of ten, before units as well."""
    number, scale = spoken.pattern, _scale(spoken)

    def is_scale(found: Found, written: str, name: str) -> bool:
        glued, after = written + name in found[0], found.after
        if spoken.code == "fr" and name in ("M", "Md") and after.startswith(("d'", "d’", "de")):
            return True
        if name == "m" and after in spoken.table("coins"):
            return True
        if spoken.code == "en" and name in ("K", "k", "M", "B") and glued:
            value = spoken.value(written)
            if value == "401" or (name == "K" and value in ("2", "4", "8")):
                return False
            crowd = after.lower() in spoken.words("crowd")
            if after.lower() in spoken.words("sounds"):
                return False
            return name == "k" or "." in value or crowd or (name == "K" and float(value) >= 12)
        return (name == "k" and glued) or name not in _ONLY_MONEY

    def ranged(found: Found) -> str | None:
        first, first_scale, last, last_scale = found[1], found[2], found[3], found[4]
        sure = last_scale in ("k", "K") and last + last_scale in found[0]
        sure |= bool(first_scale) and first_scale in "MB" and first + first_scale in found[0]
        if not (sure or is_scale(found, last, last_scale)) or (first_scale and first_scale != last_scale):
            return None
        said = None if first_scale else spoken.range_at(found, first, last, "", last_scale)
        said = said or spoken.range(spoken.scaled(first, first_scale), spoken.scaled(last, last_scale))
        return said and said + found.stop(last_scale, spoken.code == "de")

    def single(found: Found) -> str | None:
        if not is_scale(found, found[2], found[3]):
            return None
        if unit := found[4]:  # 5 million km²
            said = spoken.scaled_at(found, found[2], found[3]) or spoken.scaled(found[2], found[3])
            of = spoken.of if " " in (said or "") and spoken.scales[found[3]][0] > 3 else ""
            noun = f" {of}{plain(spoken.units[unit.rstrip('.')])[-1]}"
            return said if not said or isinstance(said, Kept) else f"{said}{noun}{found.stop(unit)}"
        if said := spoken.scaled_at(found, found[2], found[3]):
            return said if isinstance(said, Kept) else said + found.stop(found[3], spoken.code == "de")
        said, exact = spoken.scaled(found[2], found[3]), spoken.exact(found[2], found[3])
        said = spoken.agree(found, exact, said, True) if said and exact and spoken.code != "ru" else said
        return said and spoken.below_zero(found[1]) + said + found.stop(found[3], spoken.code == "de")

    rule(DASHES, rf"(?<![\w.,-])({number}){scale}? ?{DASH} ?({number}){scale}(?!\w)", ranged)
    measured = rf"(?: ({ends_of(spoken.words('scaled_units')) or '(?!)'})(?![\w²³/]))?"
    written = rf"(?<![\w.,])([-−])?({number}){scale}" + ("()" if spoken.joined else rf"(?!\w){measured}")
    rule(initials(spoken.scales), written, single)


def units(spoken: Spoken, rule: Rules) -> None:
    """Numbers with a unit, alone or as a range."""
    number = spoken.pattern
    nouns = [] if spoken.code == "ru" else [*spoken.nouns]  # counted by their endings
    dotted = [name for name in DOTTED | spoken.words("dotted") if name[:-1] in spoken.units]
    names = ends_of([*spoken.units, *nouns, *dotted])

    def counted(written: str, unit: str, minus: str | None = None) -> str | None:
        said = spoken.counted_as(written, unit.rstrip("."))
        return said and spoken.below_zero(minus) + said

    def ranged(found: Found) -> str | None:
        minus, first, unit, last, last_unit = found[1], found[2], found[3], found[4], found[5].rstrip(".")
        if unit and unit != last_unit:
            return spoken.range(counted(first, unit, minus), counted(last, last_unit))
        forms = plain(spoken.units.get(last_unit, [""]))
        if not minus and forms[0] and (said := spoken.range_at(found, first, last, forms[-1])):
            return said
        start = spoken.below_zero(minus) + spoken.said(first)
        if "{}" in forms[0]:
            start = counted(first, last_unit, minus) or start
        return spoken.range(start, counted(last, last_unit))

    def single(found: Found) -> str | None:
        unit = found[3].rstrip(".")
        forms = spoken.units.get(unit) if not found[1] or spoken.code == "ru" else None
        said = forms and spoken.measured(found, spoken.value(found[2]), plain(forms), gender_of(forms))
        if isinstance(said, Kept):
            return said
        said = spoken.below_zero(found[1]) + said if said else counted(found[2], unit, found[1])
        return said and said + found.stop(found[3], spoken.code == "de")

    ends = r"(?<!%)(?![A-Za-z0-9_À-ɏЀ-ӿ²³]|/[A-Za-z0-9])|(?<=%)" if spoken.joined else r"(?![\w²³/])"
    ends = rf"(?:{ends})(?!-\d|['’]\w)"
    rule(DASHES, rf"(?<![\w.,-])([-−])?({number}) ?({names})? ?{DASH} ?({number}) ?({names}){ends}", ranged)
    begins = r"(?<![\w.,])(?<!\d[-–~])(?<!\b[A-Z][-–])"  # B-29s
    rule(initials([*spoken.units, *nouns]), rf"{begins}([-−])?({number}) ?({names}){ends}", single)


def ranges(spoken: Spoken, rule: Rules) -> None:
    """Two numbers with a dash between. A hyphen counts only if the second one is larger: 3-2 is a score."""
    number = spoken.pattern
    guard = rf"(?![.,:/_]?\d)(?![-–~]\d)(?!-[^\W\d]\S*\d){_TAIL}" + ("(?![가-힣])" if spoken.code == "ko" else "")

    @rule(DASHES, rf"(?<![\w.,:/-])({number})(?: (?=[–~～〜]))?({DASH})(?:(?<=[–~～〜]) )?({number}){guard}")
    def said(found: Found) -> str | None:
        first, last, before = spoken.value(found[1]), spoken.value(found[3]), found.before
        rises = Decimal(first) < Decimal(last) and "0" not in (first[0], last[0])
        if found[2] in "-−" and (not rises or before.strip(".,:") in _SCORE and not spoken.is_counted(found)):
            return None
        if before in spoken.words("genitive") and (case := spoken.range_at(found, found[1], found[3])):
            return case
        start = spoken.agree(found, first, spoken.said(found[1]), True)
        end = spoken.agree(found, last, spoken.said(found[3]), True)
        stays = isinstance(start, Kept) or isinstance(end, Kept)
        return keep(found) if stays else spoken.range(start, end, spoken.range_of_counts)
