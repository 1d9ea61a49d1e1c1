"""Russian numbers in their cases: the word before and the ending of the noun behind tell the case, the noun tells the
gender. Where they do not, the figure stays."""

import re
from decimal import Decimal

from spoken_text.european import European, number_of
from spoken_text.ru.nouns import readings
from spoken_text.rule import DASH, DASHES, HOUR, MINUTE, Found, Kept, Rules, ends_of, initials, keep
from spoken_text.spoken import num2words

_ADJECTIVE = re.compile(r"[а-яё]{2,}(?:ых|их|ым|им|ыми|ими|ые|ие)")
_ADJECTIVE_ONE = re.compile(r"[а-яё]{2,}(?:ый|ий|ой|ая|яя|ое|ее|ого|его|ую|юю)")
_ACCUSATIVE = str.maketrans("ая", "ую")
_VERBS = ("л", "лся", "ть", "т", "м", "ёт", "сь")
_PAST = ("л", "ла", "ло", "ли", "лся", "лась", "лось", "лись")
_TENTHS = {1: "десят", 2: "сот", 3: "тысячн"}
_ROMAN = r"[IVXХ]{1,8}"
_YEAR = r"(?:1\d|20)\d\d"
_OF_YEAR = r"(?: (\d{4}|\d{1,3}(?= года\b| г\.? до ))(?:-го)?(?: года\b| ?г\.| ?г\b)?(?!\d))?"
_LINKS = ("и", "или", "--", "–", "—")


def number(value: str, case: str, gender: str = "m") -> str:
    """A whole number or a decimal fraction in a case. The accusative is that of things."""
    whole, _, decimals = value.partition(".")
    if not decimals:
        if case == "g" and value == "0":
            return "нуля"
        return num2words(int(value), lang="ru", case=case, gender=gender, animate=case != "a")
    ends = {"n": ("ая", "ых"), "a": ("ую", "ых"), "g": ("ой", "ых"), "i": ("ой", "ыми")}[case]
    parts = []
    for figures, stem in ((whole, "цел"), (decimals, _TENTHS[len(decimals)])):
        parts.append(f"{number(str(int(figures)), case, 'f')} {stem}{ends[not is_one(figures)]}")
    return " ".join(parts)


def of_part(noun: str) -> str:
    """A noun as it is behind a decimal fraction, from its form behind 2: квадратных метра -> квадратного метра"""
    return re.sub("[ыи]х(?= )", "ого", noun.replace("ые ", "ой "))


def is_decimal(value: str) -> bool:
    return bool(re.fullmatch(r"\d{1,9}(?:\.\d{1,3})?", value))


def is_one(value: str) -> bool:
    return "." not in value and value[-1] == "1" and value[-2:] != "11"


class Language(European):
    # ---------------------------------------------------------------- words

    def cardinal(self, value: str, mark: str = "") -> str:
        decimals = value.partition(".")[2]
        return num2words(Decimal(value), lang="ru") if 0 < len(decimals) <= 3 else super().cardinal(value, mark)

    def form(self, value: str, plural_from: int | None = None) -> int:
        whole = value.partition(".")[0]
        if "." in value or (whole[-1] in "234" and whole[-2:] not in ("12", "13", "14")):
            return 1
        return 0 if is_one(whole) else 2

    def on_date(self, year: str, month: int, day: str) -> str:
        behind = f" {self.ordinal(year, case='g')} года" if year else ""
        return f"{self.ordinal(day, case='g', gender='n')} {self.months[month - 1]}{behind}"

    def named_months(self, months: str, rule: Rules) -> None:
        date = rf"(?<!\d)(\d\d?) ({months})\b{_OF_YEAR}"
        rule(initials(self.months), date, self._named_date)

    def _named_date(self, found: Found) -> str:
        return self.on_date(found[3] or "", self.months.index(found[2]) + 1, found[1]) + (
            found.stop(found[0]) if found.before else ""
        )

    def ordinal_at(self, found: Found) -> str | None:
        number, end, after = found[1], found[0][-1], found.after
        if end == "х" and number[-1] in "234" and number[-2:-1] != "1":
            return num2words(int(number), lang="ru", case="g")  # 23-х арбитров
        if found[0][-2:] == "-ю" and re.search("[ая]ми$", after):
            return num2words(int(number), lang="ru", case="i")
        if plural := self._plural_ordinal(number, found[0].lstrip("0123456789-"), after):
            return num2words(int(number), lang="ru", to="ordinal", plural=True, case=plural)
        if end == "м" and self._is_instrumental(found):
            return self.ordinal(number, case="i")
        adjective, noun = after, found.rest.strip() and found.around.after.strip(".,;:!?)»")
        is_pair = noun and adjective[-2:] in ("ой", "ей") and re.search("(?:[иыею]|ой|ией)$", noun)
        ends_oblique = re.search("[а-яё]{2}(?:[ыеу]|[кит]и)$", adjective) and not re.search("[ыи]е$", adjective)
        is_noun = ends_oblique and adjective not in self.words("no_noun")  # 80-й годовщины
        rules_it = found.before in self.words("genitive") or found.before in ("с", "к", "ко")
        rules_it |= bool(re.search("[а-яё]{3}(?:ой|ей)$", found.before))  # от 99-й автомагистрали
        oblique = end == "й" and (bool(rules_it or is_pair or is_noun) or self._is_oblique(adjective))
        return self.ordinal(
            number, **({"gender": "f", "case": "g"} if oblique else self.table("ordinal_forms").get(end, {}))
        )

    def _plural_ordinal(self, number: str, end: str, after: str) -> str:
        """The case of an ordinal in the plural; empty if it is a singular."""
        if end.endswith("х"):
            return "g"
        if end.endswith("ми"):
            return "i"
        if end.endswith("м") and re.search("[ая]м$", after):
            return "d"
        is_many = (
            number[-1] == "0"
            and not (end.endswith("ье") or re.search("(?:о|[оие]е)$", after))
            or re.fullmatch("[а-яё]{3,}(?:ы|[ыи]е)", after)
        )
        return "n" if end == "и" or (end.endswith("е") and is_many) else ""

    def _is_instrumental(self, found: Found) -> bool:
        """в 5-м классе, but стал 5-м"""
        if found.before in ("между", "перед", "над"):
            return True
        if found.before in self.words("inside") or found.before in ("на", "по") or re.search("[еу]$", found.after):
            return False
        return bool(re.search("[ыи]м$", found[0]) or re.search("[оеыи]м$|ью$", found.after)) or (
            found.before.endswith((*_PAST, "ть", "ться"))
        )

    def per_one(self, unit: str, gender: str) -> str:
        link = "в" if unit in self.words("time_units") else self.per
        return f"{link} {unit[:-1]}{unit[-1].translate(_ACCUSATIVE)}"

    def nth_part(self, top: int, bottom: int) -> str:
        """одна двенадцатая, три двенадцатых"""
        one = is_one(str(top))
        name = num2words(bottom, lang="ru", to="ordinal", **({"gender": "f"} if one else {"plural": True, "case": "g"}))
        return f"{number(str(top), 'n', 'f')} {name}"

    def king(self, number: str, is_queen: bool) -> str:
        return self.ordinal(number, **({"gender": "f"} if is_queen else {}))

    # ---------------------------------------------------------------- amounts in their case

    def case_before(self, before: str) -> str:
        """The case that a word takes: "g", "a" or "d"; "n" if it takes none."""
        cases = {"g": "genitive", "a": "accusative", "d": "dative"}
        return next((case for case, name in cases.items() if before in self.words(name)), "n")

    def _cases_of(self, before: str) -> str:
        """The cases that a noun may have behind this word and its number, the likeliest first."""
        listed = self.table("cases_behind").get(before)
        return listed or {"g": "g", "d": "d", "a": "a", "n": "na"}[self.case_before(before)]

    def _ruler(self, found: Found, noun: str, goes_on: bool = True) -> str:
        """The word before a number, or the preposition that goes on behind "и": из 5 человек и 3 собак."""
        before, around = found.before, found.around
        earlier = [around.earlier, around.before, *found.head.split()][-2].lower()
        if before in self.words("about") or (earlier, before) == ("том", "числе"):  # более чем 5, до примерно 5
            before = earlier.replace("том", "")
        if (
            goes_on
            and around.ruled[0]
            and not found.head
            and (before in ("и", "или") and earlier == around.ruled[0] or {before, noun} <= self.words("time_nouns"))
        ):  # из 5 человек и 3 собак, в течение 3 лет 10 месяцев
            before = around.ruled[1]
        if re.fullmatch("[а-яё]{2,}[ыи]х", before):  # из последних 36 гонок
            before = "из"
        if before in self.words("genitive"):
            around.ruled = noun, before
        return before

    def counted(self, value: str, unit: str, mark: str = "") -> str | None:
        said = super().counted(value, unit, mark)
        if not said or "." not in value or unit in self.nouns:
            return said
        noun = self.units[unit][1]
        return said.removesuffix(noun) + of_part(noun)

    def measured(self, found: Found, value: str, forms: list[str], gender: str) -> str | None:
        before, after = self._ruler(found, found[0].split()[-1], "%" not in found[0]), found.after
        case = self.case_before(before)
        case = "a" if case == "n" and re.search("[аеиу]ть$", before) else case  # добавить 1 ложку
        if before in ("в", "во") and after in self.words("away") and forms[2].endswith("метров") and value.isdecimal():
            noun = forms[2].removesuffix("ов") + ("е" if is_one(value) else "ах")
            return f"{number(value, 'p')} {noun}"
        if before in self.words("instrumental") or re.search("[а-яё][ыи]ми$", before):  # владеет 50 % акций
            case = "i"
        if case == "n" or not is_decimal(value):
            return None
        if case == "i" and "." not in value:
            noun = re.sub("[аеь]?$", "", forms[0].split(" ")[0]) + ("ом" if is_one(value) else "ами")
            return f"{number(value, 'i')} {noun}" if gender == "m" and " " not in forms[0] else None
        if case == "d":
            return keep(found)
        said = number(value, case, gender)
        if "." in value:
            return f"{said} {of_part(forms[1])}"
        if case == "g":
            return f"{said} {forms[1 if is_one(value) else 2]}"
        one = re.sub("а(?= |$)", "у", forms[0].replace("ая ", "ую ")) if gender == "f" else forms[0]
        return f"{said} {one}" if is_one(value) else None

    def money_at(self, found: Found, sign: str, written: str, scale: str | None) -> str | None:
        forms, gender, _ = self.forms_of(sign)
        if not forms:
            return None
        if scale:
            said = self.scaled_at(found, written, scale)
            return said and (said if isinstance(said, Kept) else f"{said} {forms[-1]}")
        whole, _, cents = (value := self.value(written)).partition(".")
        if cents[1:] == "" != cents and self.case_before(found.before) == "g":
            return f"{number(value, 'g')} {of_part(forms[1])}"
        if cents:
            return keep(found) if int(cents) and found.before in self.words("genitive") else None
        return self.measured(found, value, forms, gender)

    def scaled_at(self, found: Found, written: str, scale: str) -> str | None:
        """более 5 млн: более пяти миллионов"""
        case, (power, forms) = self.case_before(found.before), self.scales[scale]
        if case == "n":
            return None
        if power == 3:
            exact = self.exact(written, scale)
            return number(exact, case) if exact and case != "d" else keep(found)
        return self.measured(found, self.value(written), forms, "m")

    def range_at(self, found: Found, first: str, last: str, noun: str = "", scale: str | None = None) -> str | None:
        """A range takes the genitive: от пяти до десяти километров."""
        ends = [self.value(first), self.value(last)]
        if not all(end.isdecimal() and len(end) < 10 for end in ends):
            return None
        before = found.before
        case = self.case_before(before)
        many = self.scales[scale][1][-1] if scale else ""
        if before in ("в", "во") and found.after in self.words("away") and noun.endswith("метров") and not scale:
            return f"{'-'.join(number(end, 'p') for end in ends)} {noun.removesuffix('ов')}ах"
        if case == "d" or (case == "a" and self.form(ends[1]) != 2):
            return None
        if case == "a" or (case == "g" and before not in ("от", "с", "со")):
            words = "-".join(number(end, "g" if case == "g" else "n") for end in ends)
            return " ".join(f"{words} {many} {noun}".split())
        said = " до ".join(num2words(int(end), lang="ru", case="g") for end in ends)
        start = "" if before in self.words("genitive") else "от "
        return " ".join(f"{start}{said} {many} {noun}".split())

    def ratio(self, found: Found) -> str:
        if found.before in self.words("score"):
            return f"{self.cardinal(found[1])}-{self.cardinal(found[2])}"
        return f"{self.cardinal(found[1])} к {number(found[2], 'd')}"

    # ---------------------------------------------------------------- which words belong together

    def _ranked(self, noun: str) -> dict[str, str] | None:
        """Gender and case of a noun that an ordinal ranks, such as "степени"; None if it is none."""
        for kind, ends in self.table("rank_ends").items():
            stem = next(filter(noun.startswith, self.table("ranked")[kind].split()), None)
            if stem and noun.removeprefix(stem) in ends:
                return {"gender": kind[0], "case": ends[noun.removeprefix(stem)]}
        return None

    def holds(self, word: str, held: str) -> bool:
        """Is the word, behind the word `held`, needed to tell what a number agrees with?"""
        if held in ("г.", "гг.", "в.", "вв.") and word in ("до", "н", "н.э"):
            return True
        if held == "до" and word in ("н", "н.э"):
            return True
        if re.fullmatch(rf"[(«]?{_YEAR},?", held):  # 1998, 2003 и 2010 годах
            if held[-1] != "," and word in _LINKS or re.fullmatch(_YEAR, word):
                return True
        if re.search(r"\d-й$", held) and re.fullmatch("[А-ЯЁа-яё]{2,}[ое]й", word):  # 1-й пехотной дивизией
            return True
        if re.search(rf"(?:^|[(«\"–—-]){_ROMAN}$", held):
            return word in ("в", "вв", *self.table("century_cases"), "и", "по")
        if held in ("и", "по") and self.is_roman(word):
            return True
        if re.fullmatch(r"\d{1,2},", held) and re.fullmatch(r"\d{1,2}(?:-[а-я]{1,3})?", word):  # 3, 6 и 8-м
            return True
        if held in ("ст.", "ч.") and (word == "л" or word.startswith("лож")) or held == "л." and word == "с":
            return True
        if not held[-1].isdecimal():
            goes_on = held in ("по", "до", "на", "из", "х", *_LINKS) and word[:1].isdigit()
            return goes_on or held == "кв." and word in ("м", "км", "миль", "километров", "метров", "футов")
        if (
            re.match(r"(?:руб|долл)\.?/", word)
            or word in ("х", "--", "—", "ст", "ст.л", "ч.л")
            or re.fullmatch(r"\d\d?", held)
            and word in ("и", "или")
        ):
            return True
        if word == "из" and re.search(r"(?:^|[^1\d])[12]$|[2-9][12]$", held):
            return True
        if (
            word in ("по", "до", "на", "кв", "годах", "годов", "вв")
            or word == "в"
            or word in self.table("century_cases")
        ):
            return word != "в" or bool(re.search(r"(?<!\d)(?:[1-9]|1\d|2[01])$", held))
        return bool((_ADJECTIVE_ONE if held[-1] == "1" and held[-2:] != "11" else _ADJECTIVE).fullmatch(word))

    def is_roman(self, word: str) -> bool:
        return word[:1] in "IVXХ" and bool(re.fullmatch(rf"{_ROMAN}(?:[–—-]{_ROMAN})?", word))

    def begins(self, word: str) -> bool:
        return word.lstrip("(«") in self.table("places_short") or super().begins(word)

    def first(self, rule: Rules) -> None:
        names = ends_of(self.table("places_short"))

        @rule("г.у", rf"^([(«]?)({names})$")
        def place(found: Found) -> str | None:
            """в г. Москве: в городе Москве"""
            before, after = found.around.before.lower(), found.around.after
            if not after[:1].isupper():
                return None
            case = "p" if before in ("в", "во", "на", "о", "об", "при") else "d" if before in ("к", "ко", "по") else "n"
            if before in self.words("genitive") or (after.endswith(("ы", "и")) and re.fullmatch("[а-яё]{3,}", before)):
                case = "g"
            case = "n" if case == "p" and after.rstrip(".,;:!?").endswith(("у", "ю")) else case
            return found[1] + self.table("places_short")[found[2]][case]

        @rule("-—", r"(?<![\w.,])(\d+(?:,\d+)?)( ?)(?:--|—)( ?)(?=(\d+(?:,\d+)?)(?:-е)?(?! ?-)( г(?:од|г))?)")
        def dashed(found: Found) -> str | None:
            """1816 -- 1893, but not "в 1905 -- 3 школы" """
            first, last = (float(found[group].replace(",", ".")) for group in (1, 4))
            return f"{found[1]}{found[2]}–{found[3]}" if first < last or found[5] else None

        @rule("-", r"^-(?=\d)")
        def item(found: Found) -> str | None:
            """-250 мл молока: a dash before an item of a list"""
            behind = re.sub(r"^[\d.,/–-]+ ?", "", f"{found.rest} {found.around.after}")
            names = rf"(?:{self.unit_names})(?!\w)|[а-яё]{{3,}}"
            is_item = re.match(names, behind) and not re.match("°|град|мороз|гр\\. ?[CС]|или|для|при", behind)
            return "– " if found.around.begins and is_item else None

        part = r"((?:ст\.|п\.|стать[а-я]+) ?\d[\d.]*) ч\. ?(?=\d)"
        rule("ч", part, lambda f: f"{f[1]} часть ")
        article = r"(?<![\w.,:/-])(\d{1,4})\.(\d{1,2})(?!\w|[.,]\d)"
        rule(".", article, lambda f: f"{f[1]} {self.dot} {self.said(f[2])}" if self._is_numbered(f) else None)
        rule("ч", r"(?<=\d )чел\.? ?/ *(?=к?м)", lambda f: "чел /")
        rule("N", r"(?<!\w)No\.? ?(?=\d)", lambda f: "№ ")
        rule("х", r"(?<=\d)( ?)х ?(?=\d)", lambda f: f"{f[1]}x{f[1]}")
        rule(
            "сч", r"(?<=\d) ?(?:(ст|ч)\. ?л(?:\.|(?!\w))|л\. ?с\.)", lambda f: f" {f[1] or 'л'}.{'л' if f[1] else 'с'}."
        )
        spoons = r"(?<=\d )(ст|ч)\. (?=лож(к[аиу]|ек)(?!\w))"
        ends = {"ка": "ая", "ку": "ую", "ки": "ые", "ек": "ых"}
        stems = {"ст": "столов", "ч": "чайн"}
        rule("сч", spoons, lambda f: f"{stems[f[1]]}{ends[f[2]]} ")
        sacred = r"(?<![\w.,:/-])(\d{1,3}):(\d{1,3})(?![\w:/])"
        books = self.words("scripture")
        rule(":", sacred, lambda f: f"{f[1]}, {f[2]}" if f.before.rstrip(".") in books else None)

        @rule("", r"(?<![\w.,:/-])\d{8,15}(?![\w/-]|[.,]\d)")
        def code(found: Found) -> str | None:
            """Код КАТО -- 113247300"""
            names = (found.around.before, found.around.earlier)
            if re.fullmatch(r"[78]\d{10}", found[0]):
                return self.pause.join(map(self.digits, re.findall(r"^\d|\d{3}(?=\d{4})|\d\d", found[0])))
            return self.digits(found[0]) if any(name[:3].isupper() and len(name) > 2 for name in names) else None

        @rule("IVXХ", rf"^({_ROMAN})(?= (?:и|-|–|--|—)$|$)")
        def event(found: Found) -> str | None:
            """II мировая война, II степени, в конце XIX – начале XX века"""
            if found.before in self.words("century_before") and found.after in ("и", "-", *_LINKS):
                return self.ordinal(str(number_of(found[1])), case="g") if number_of(found[1]) else None
            if form := self._ranked(found.after):
                return self.ordinal(str(number_of(found[1])), **form) if number_of(found[1]) else None
            end = re.search("(?:[аоы]я|ую|[оыи]й|ого|ому|ом|ое)$", found.after)
            forms = self.table("adjective_ends").get(end[0]) if end else None
            value = number_of(found[1])
            return self.ordinal(str(value), **forms) if forms is not None and value else None

        def times(found: Found) -> str:
            form = ("раз", "раза", "раз")[self.form(found[1])]
            return f"{self.cardinal(found[1])} {form}"

        rule("xх", r"(?<![\w.,/-])(\d{1,3})[xх](?=$|[,.;!?]| )(?! \d)", times)
        rule(
            "+",
            r"(?<![\w.,+-])(\d{1,3})\+(\d{1,3})(?![\w.,+=])",
            lambda f: f" {self.plus} ".join(map(self.cardinal, (f[1], f[2]))),
        )
        rule(":", r"(?<=\d,\d):(?=\d,\d(?!\d))", lambda f: " – ")
        season = r"(?<![\w.,:/-])((?:19|20)\d\d)/((?:19|20)?\d\d)(?![\w/]|[.,]\d)"

        @rule("/", season)
        def of_season(found: Found) -> str | None:
            first, last = found[1], found[2] if found[2][0] != "0" else found[1][:2] + found[2]
            return f"{self.cardinal(first)} – {self.cardinal(last)}" if last[-2:] > first[2:] else None

    # ---------------------------------------------------------------- counts

    def agree(self, found: Found, value: str, said: str, in_range: bool = False) -> str:
        """A number in the case and gender of what stands around it."""
        before, words = found.before, self._behind(found)
        if before == "числе" and "том" in (found.around.earlier, *found.head.split()[-2:-1]):
            before = ""  # в том числе 112
        if re.search(r"[^\W\d_]-?$", found.head):  # Формула-1, СО2
            return said
        is_year = re.fullmatch(r"1[1-9]\d\d|20\d\d", value) and not in_range and found[0][0] not in "-−"
        if is_year and before in self.words("genitive") and found.after in ("по", "до"):
            return self._year(value, "g")
        if of := re.match(r" из \d+$", found.rest):
            return self._one_of(found, value, said) if found.around.after and of else said
        noun = words[-1] if words else ""
        if before in self.words("labels") or not is_decimal(value):
            return said
        if "." in value:
            return self._fraction(found, value, noun, said)
        if not noun:
            case = "g" if before in self.words("genitive") else "d" if before in ("к", "ко") else "n"
            case = "i" if before in ("между", "над", "перед") else case
            case = "p" if before in ("в", "во") and found.after == "из" else case  # в 3 из 5 случаев
            return number(value, case) if case != "n" and (value[0] != "0" or (value, case) == ("0", "g")) else said
        if value[0] == "0":
            return said
        form = self._ranked(noun)
        if form and form["case"] != "n" and self.form(value) == 2 and not in_range:  # 112 созыва
            return self.ordinal(value, **form)
        one = is_one(value) and not in_range
        # собаки behind 3, as 1 собака, follow no preposition
        before = self._ruler(found, noun, noun[-1] not in "аяыи" or (one and noun[-1] in "ыи"))
        if re.search("(?:лся|лась|лось|лись)$|^(?:бы|ста)л[аои]?$", noun):  # Глава 1 была
            return said
        case, gender = self._singular(words, before) if one else self._plural(words, value, before)
        if in_range and case in ("n", "g"):  # 21-23 недель, 4-5 месяцев
            case = self._plural(words, self.value(found[3]), before)[0]
        if case == "place":
            return self._place(value, noun) or keep(found)
        return number(value, case, gender) if case else keep(found)

    def _one_of(self, found: Found, value: str, said: str) -> str:
        """1 из 5 женщин"""
        noun = found.around.after.strip("\"'»)”.,;:!?…")
        is_noun = re.fullmatch("[а-яё]{3,}", noun) and not re.search("[оеё]в$|^человек$", noun)
        if not is_noun or noun in self.words("no_noun"):
            return said
        singulars = {noun, noun + "а", noun + "я", re.sub("ий$", "ия", noun), re.sub("[её]к$", "ка", noun)}
        return number(value, "n", "f") if singulars & self.words("feminine") else keep(found)

    def _behind(self, found: Found) -> list[str]:
        """The adjective, if there is one, and the noun behind the number."""
        text = found.rest
        if text and text[0] != " ":
            return []
        words = [*text.split(), *([found.around.after] if found.around.after else [])]
        first = words[0] if words else ""
        more = 2 if len(words) > 1 and (_ADJECTIVE.fullmatch(first) or _ADJECTIVE_ONE.fullmatch(first)) else 1
        found_words = [word.strip("\"'»)”.,;:!?…") for word in words[:more]]
        are_words = all(re.fullmatch(r"[а-яё-]+", word) for word in found_words)
        return found_words if are_words and self.words("no_noun").isdisjoint(found_words[-1:]) else []

    def _fraction(self, found: Found, value: str, noun: str, said: str) -> str:
        case = self.case_before(found.before)
        if case == "d":
            return keep(found)
        if case != "g" and re.search("[аяыи]$", noun) and re.fullmatch(r"\d\d?\.5", value) and value != "0.5":
            feminine = noun[-1] in "ыи"
            if value == "1.5":
                return "полторы" if feminine else "полтора"
            return f"{number(value.removesuffix('.5'), case, 'f' if feminine else 'm')} с половиной"
        return number(value, case) if case != "n" else said

    def _plural(self, words: list[str], value: str, before: str) -> tuple[str, str]:
        """The case and the gender; the case is empty if it is open."""
        noun, first = words[-1], words[0]
        few = value[-1] in "234" and value[-2:-1] != "1"
        adjective = len(words) > 1
        stem = re.sub("(?:[аеоу]|ом)?$", "", noun)
        if stem in self.table("places") and (noun[-1] == "е" or noun in (stem, "место") and noun != "мест"):
            return "place", ""
        known = readings(noun)
        of_many = {case for case, _, plural in known if plural}
        of_one = {gender for case, gender, plural in known if case == "g" and not plural}
        for case in self._cases_of(before):
            if case in "dip" and case in of_many and "n" not in of_many:  # "евро" is in every case
                return case, "m"
        if few and len(value) < 5 and of_many == {"g"} and not of_one:
            return "g", "m"
        if few and len(of_one) == 1 and "a" in self._cases_of(before):
            return "n", of_one.pop().replace("n", "m")
        if re.search("[аяь]ми$", noun) or (adjective and first.endswith("ми")):
            return "i", "m"
        if re.search("[ая]х$", noun):
            return "p", "m"
        if re.search("[ая]м$", noun) and noun not in self.words("not_dative"):
            return "d", "m"
        if before in self.words("genitive") or (before in ("о", "об", "при") and not few):
            return ("g" if before in self.words("genitive") else "p"), "m"
        if before in ("к", "ко"):
            return "d", "m"
        if few and len(value) < 5 and (re.search("[оеё]в$|ей$", noun) or noun in self.words("few_genitive")):
            return "g", "m"
        if value[-1] == "2" and few:
            singulars = {re.sub("[ыи]$", end, noun) for end in ("а", "я", "ь")}
            ends_in_li = noun.endswith("ли") and singulars.isdisjoint(self.words("feminine"))
            if noun[-1] in "ыи" and not ends_in_li:
                return "n", "m" if not singulars.isdisjoint(self.words("masculine")) else "f"
        return "n", "m"

    def _singular(self, words: list[str], before: str) -> tuple[str, str]:
        noun, first, end = words[-1], words[0], words[-1][-1]
        case = self.case_before(before)
        known = "m" if noun in self.words("masculine") else ""
        known = "f" if noun in self.words("feminine") or noun.endswith(("ость", "ция")) else known
        if re.sub("[аеоу]$", "", noun) in self.table("places"):
            return ("place", "") if end == "е" and before in ("в", "на") else ("", "")
        known_forms = {case: gender for case, gender, plural in readings(noun) if not plural}
        for wanted in self._cases_of(before):
            if wanted in known_forms:
                return wanted, known_forms[wanted]
        if len(known_forms) == 1:
            return next(iter(known_forms.items()))
        if case == "g":
            if end in "ыи":
                return "g", "f"
            return ("g", "m") if end in "ая" else ("", "")
        if noun == "человека" or end in "ая" and {noun[:-1], noun[:-1] + "ь"} & self.words("masculine"):
            return "g", "m"
        if end in "ую":
            nominative = {re.sub("у$", "а", noun), re.sub("ю$", "я", noun)}
            if case == "d" or (before == "по" and re.sub("[ую]$", "а", noun) not in self.words("feminine")):
                return "d", "m"
            is_feminine = nominative & self.words("feminine") or noun.endswith("ию") and case == "a"
            accusative = is_feminine or first.endswith(("ую", "юю"))
            return ("a", "f") if accusative else ("", "")
        rules_it = before in ("с", "со", "перед", "над", "под", "между") or before in self.words("instrumental")
        if re.search("[оеё]м$", noun) and rules_it:
            return "i", "m"
        if end == "е" and before == "по" and re.sub("е$", "а", noun) in self.words("feminine"):
            return "d", "f"
        if known == "f" or first.endswith(("ая", "яя")):
            return "n", "f"
        if known == "m":
            return "n", "m"
        if first.endswith(("ое", "ее")) or end == "о" or re.search("[иь]е$", noun):
            return "n", "n"
        if end not in "аеёиоуыэюяьй" and len(noun) > 2:
            return "n", "m"
        return "", ""

    def _is_oblique(self, noun: str) -> bool:
        """Is it a feminine noun in another case than the nominative and the accusative, such as "минуте"?"""
        stem = re.sub("(?:[оеь]?[йю]|[еиы])$", "", noun)
        return stem != noun and any(stem + end in self.words("feminine") for end in "аяь")

    def _place(self, value: str, noun: str) -> str | None:
        """на 2 этаже: на втором этаже."""
        case = "p" if noun.endswith("е") else "n"
        stem = re.sub("[ео]$", "", noun)
        return num2words(int(value), lang="ru", to="ordinal", case=case, gender=self.table("places")[stem])

    # ---------------------------------------------------------------- centuries, dates, times

    def own(self, rule: Rules) -> None:
        rule("п", rf"(?<!\w)({_ROMAN}) по ({_ROMAN})(?= век(?!\w))", self._from_to)
        figure = rf"(?:{_ROMAN}|(?<![\w.,:/-])\d\d?|(?<=-)\d\d?)"
        chain = rf"({figure})(?:( ?[–-] ?| и )({figure}))?"
        rule("вст", rf"(?<!\w){chain} ?({'|'.join(self.table('century_cases'))}|вв?\.)(?!\w)", self._century)
        months = "|".join(self.months)
        day = r"(\d\d?)"
        rule("дпн", rf"(?<![\w.,:/-]){day} (по|до|на) {day} (?=(?:{months})\b)", self._days)
        two_styles = rf"(?<![\w.,:/-]){day} \({day}\) (?=(?:{months})\b)"
        rule("(", two_styles, lambda f: f"{self._day(f[1])} ({self._day(f[2])}) ")
        rule("п", rf"(?<![\w.,:/-]){day} по {day}(?=[.!?]?$)", self._places)
        several = rf"(?<![\w.,:/-])\d\d?(?:, \d\d?)* (?:и|или) \d\d? (?=(?:{months})\b)"
        rule("и", several, self._several_days)
        written = rf"(?<![\w.,:/-]){day} ?{DASH} ?{day} (?=(?:{months})\b)"
        rule(DASHES, written, lambda f: f"{self._day(f[1])} – {self._day(f[2])} ")
        rule(initials(self.months), rf"(?<![\w.,:/-]){day} ({months})\b{_OF_YEAR}", self._date)
        clock = rf"{HOUR}:{MINUTE}"
        rule(",", rf"(?<![\w.,:/-]){HOUR},00(?![\w%]|[.,:/-]\d| ?[$€₽%])", self._oclock)
        both = rf"(?<![\w.,:/-]){HOUR}\.{MINUTE} (до|по) {HOUR}\.{MINUTE}(?!\w|[.,:/-]\d)"
        rule(".", both, lambda f: f"{f[1]}:{f[2]} {f[3]} {f[4]}:{f[5]}" if f.before in ("с", "со") else None)
        rule(".", rf"(?<![\w.,:/-]){HOUR}\.{MINUTE}(?![\w%]|[.,:/-]\d)", self._dotted_time)
        rule(":", r"(?<=\d:\d )\((\d\d):(\d\d)", lambda f: f"({self.ratio(f)}")
        rule("", r"(?<![\w.,:/-])(\d\d?)$", self._day_of_month)
        rule(":", rf"(?<![\w.,:/-]){clock} ?{DASH} ?{clock}(?![\w:/]|[.,]\d)", self._span)
        rule(":", rf"(?<![\w.,:/-]){clock}(?![\w:/]|[.,]\d)", self._time)
        decades = r"(?<![\w.,:/-])(\d{1,3}0)(?:-[ех])? ?[–-] ?(?=\d{1,3}0-([ех])(?!\w))"
        rule("-–", decades, lambda f: f"{self._tens(f[1], f[2])} – ")
        rule("-", r"(?<![\w.,:/-])(\d{1,3}0)-(е|х|м|ми) (гг\.?|годы|годов|годах|годам)(?!\w)", self._decade)
        year, ends = r"(1[1-9]\d\d|20\d\d)", r"(?![\w%]|[.,]\d|[:/–-]\d| ?(?:г|[$€₽°%]))"
        rule("-–", rf"(?<![\w.,:/-]){year} ?[–-] ?{year}{ends}", self._years)
        rule("-–", rf"(?<![\w.,:/-]){year}[–-](\d\d){ends}", self._years)
        rule("к", r"(?<=\d )кв\.? (?=миль|километров|метров|футов)", lambda f: "квадратных ")
        rule("к", r"(?:(?<=\d) |/ ?)кв\. ?(к?м)(?!\w)\.?", lambda f: f"{f[0][0]}{f[1]}²{f.stop(f[0])}")
        rule("(", r"(?<=\()(10\d[1-9]|1[1-9]\d\d|20[0-3]\d)(?=\))", lambda f: self._year(f[1], "n"))
        written = r"(?<![\w.,:/-])(?:0[1-9]|[12]\d|3[01])\.(?:0[1-9]|1[0-2])(?![\w]|[.,]\d| ?[%€$₽])"
        # 12.05: a day or a decimal; after "в" a time.
        rule(".", written, lambda f: None if f.before == "в" else keep(f))
        rule(".", r"(?<![\w.,:/·-])[1-9]\d{0,2}\.\d{3}(?![\w.,:/·-])", keep)  # thousands or thousandths
        rule(",", r"(?<![\w.,])(?!1,5-)\d+,\d+(?=-[а-яё])", keep)
        rule("/", r"(?<![\w.,:/–-])1/([2-9])(?![\w/]|[.,]\d|-\d)", self._part)
        grouped = rf"(?<![\w.,–-])(\d{{1,2}}) (000)(?=-(?:{self.any_of('compounds')}))"
        rule(" ", grouped, lambda f: f[1] + f[2])
        rule("", rf"(?<![\w.,–-])([1-9]\d{{0,3}})-?(?=(?:{self.any_of('compounds')}))", self._compound)
        adjective = "[а-яё]{3,}(?:[ыио]й|[ая]я|[ыио]е|ее|[оеы]го|[ое]му|[ыи]м|[ое]м|[ую]ю|[ыи]х|[ыи]ми)(?!\\w)"
        rule("-", rf"(?<![\w.,–-])([1-9]\d{{0,3}})-(?={adjective})", self._compound)
        sized = rf"(?<![\w.,–-])(\d{{1,4}})-({ends_of(self.table('sizes'))})(?!\w)"
        rule("-", sized, self._sized)
        percent = r"(?<![\w.,–-])([1-9]\d{0,3}) ?%-(?=н[а-яё]+)"
        rule("%", percent, lambda f: Kept(self._compound(f) + "процент"))
        rule(",", rf"(?<![\w.,–-])1,5-(?={adjective})", lambda f: Kept("полутора"))
        counted = r"(?<![\w.,-])(?!3-и)(\d{1,3})-(ти|и|мя|тью|ью|(?<=[78]-)ми)(?!\w)(?! [а-яё]+ми(?!\w))"
        rule("-", counted, lambda f: number(f[1], "g" if f[2][-1] == "и" else "i"))
        rule("+", r"(?<![\w.,])(\d{1,2})\+(?=\s|$|[,.;:!?)])", lambda f: f"{self.cardinal(f[1])} плюс")

    def _part(self, found: Found) -> str | None:
        """1/2 стакана: пол стакана, as a subject or an object"""
        noun, before = found.after, found.before
        if not re.fullmatch("[а-яё]{3,}[аяыией]|[а-яё]+(?:ов|ев|ей|ых|их|ой)", noun) or before[-1:].isdigit():
            return None
        forms = self.table("parts").get(found[1])
        if not forms:  # в 1/8 ширины
            case = self.case_before(before)
            ordinal = self.ordinal(found[1], gender="f", case=case)
            return keep(found) if case == "d" else f"{number('1', case, 'f')} {ordinal}"
        if before in self.words("genitive"):
            return forms[1]
        return keep(found) if before in self.words("dative") else forms[0]

    def _from_to(self, found: Found) -> str | None:
        first, last = number_of(found[1]), number_of(found[2])
        if not first or not last or found.before not in ("с", "со"):
            return None
        return f"{self.ordinal(str(first), case='g')} по {self.ordinal(str(last))}"

    def _compound(self, found: Found) -> str:
        """десятилетний, двадцатиэтажный, столетие"""
        if found[1] == "1":
            return Kept("одно")
        said = num2words(int(found[1]), lang="ru", case="g").removeprefix("одной ")
        instead = {"одного": "одно", "ста": "сто", "девяноста": "девяносто", "тысячи": "тысяче", "тысяч": "тысяче"}
        return Kept("".join(instead.get(word, word) for word in said.split()))

    def _sized(self, found: Found) -> str | None:
        """122-мм пушка: an adjective that ends as the one behind it"""
        end = re.search("(?:ый|ой|ая|ое|ые|ого|ому|ым|ом|ую|ых|ыми|[а-яё])$", found.after)
        if not end:
            return None
        one = {"а": "ая", "у": "ую", "о": "ое", "е": "ое", "ы": "ые", "и": "ые", "я": "ые"}
        ends = end[0] if end[0][1:] else one.get(end[0], "ый")
        return Kept(self._compound(found) + self.table("sizes")[found[2]] + ends)

    def _day(self, day: str, case: str = "g") -> str:
        if not 1 <= int(day) <= 31:
            return day
        return self.ordinal(day, case="n" if case == "a" else case, gender="n")

    def _day_of_month(self, found: Found) -> str | None:
        """10 числа, к 5 числу, в 8 часу"""
        if found.after == "часу":
            return self.ordinal(found[1], case="p")
        case = {"числа": "g", "число": "n", "числу": "d", "числом": "i"}.get(found.after)
        return self.ordinal(found[1], gender="n", case=case) if case and 1 <= int(found[1]) <= 31 else None

    def _dotted_time(self, found: Found) -> str | None:
        """около 21.00 по местному времени"""
        known = found.before in ("около", "после", "до", "к", "с") and found.after in (
            "по",
            "мск",
            "утра",
            "вечера",
            "дня",
        )
        return f"{found[1]}:{found[2]}" if known else None

    def _is_numbered(self, found: Found) -> bool:
        """статья 205.1, на рисунке 2.21"""
        stems = ("стать", "статей", "пункт", "рис", "таблиц", "раздел", "глав")
        return found.before.startswith(stems) or found.before in ("ст.", "п.", "табл.", "гл.")

    def _oclock(self, found: Found) -> str | None:
        """в 21,00"""
        known = found.before in ("в", "до", "к", "с", "около", "после")
        return f"{found[1]}:00" if known and not found.after.startswith(("руб", "проц")) else None

    def _places(self, found: Found) -> str | None:
        """места с 3 по 10"""
        places, after = self.table("places"), re.sub("о$", "", found.after)
        if found.before not in ("с", "со") or after not in places and found.around.earlier != "места":
            return None
        gender = places.get(after, "n")
        return f"{self.ordinal(found[1], case='g')} по {self.ordinal(found[2], gender=gender)}"

    def _several_days(self, found: Found) -> str:
        """16, 17 и 18 октября"""
        case = self.case_before(found.before)
        return re.sub(r"\d+", lambda day: self._day(day[0], "g" if case == "n" else case), found[0])

    def _days(self, found: Found) -> str | None:
        if found.before not in ("с", "со", "от"):
            return None
        return f"{self._day(found[1])} {found[2]} {self._day(found[3], 'g' if found[2] == 'до' else 'a')} "

    def _date(self, found: Found) -> str | None:
        case = self.case_before(found.before)
        if case not in "ad" or not 1 <= int(found[1]) <= 31:
            return None
        year = f" {self.ordinal(found[3], case='g').removeprefix('одной ')} года" if found[3] else ""
        return f"{self._day(found[1], case)} {found[2]}{year}{found.stop(found[0])}"

    def _clock(self, hour: str, minute: str, case: str) -> str:
        zero = "ноль " if int(minute) < 10 else ""
        minutes = number(str(int(minute)), case, "f" if int(minute) and case == "f" else "m") if int(minute) else "ноль"
        return f"{number(str(int(hour)), case)} {zero}{minutes}"

    def _time(self, found: Found) -> str:
        case = self.case_before(found.before)
        return self._clock(found[1], found[2], case if case in "gd" else "n")

    def _span(self, found: Found) -> str:
        cases = "n" if self.case_before(found.before) != "n" else "g"
        first, last = self._clock(found[1], found[2], cases), self._clock(found[3], found[4], cases)
        return f"с {first} до {last}" if cases == "g" else f"{first} – {last}"

    def _years(self, found: Found) -> str:
        last = found[1][: -len(found[2])] + found[2]  # 1926-33
        if found[1] >= last:
            return keep(found)
        case = "p" if found.before in ("в", "во") else "n"
        return " – ".join(self._year(year, case) for year in (found[1], last))

    def _tens(self, number: str, end: str) -> str:
        return num2words(int(number), lang="ru", to="ordinal", plural=True, case="n" if end == "е" else "g")

    def _decade(self, found: Found) -> str:
        case = {"е": "n", "х": "g", "м": "d", "ми": "i"}[found[2]]
        said = num2words(int(found[1]), lang="ru", to="ordinal", plural=True, case=case)
        inside = case == "g" and found.before in self.words("inside")
        noun = self.table("years")["p" if inside else case] if found[3].startswith("гг") else found[3]
        return f"{said} {noun}{found.stop(found[3])}"

    def _century(self, found: Found) -> str | None:
        first, link, last, noun = found[1], found[2], found[3], found[4]
        before = found.before
        values = [int(figure) if figure.isdecimal() else number_of(figure) for figure in (first, last) if figure]
        counts = (
            first.isdecimal()
            and not last
            and (noun in ("веков", "столетий", "тысячелетий") or noun[-1] in "ая" and values[0] in (2, 3, 4))
        )
        if not all(values) or max(values) > 30 or (counts and before not in self.words("century_before")):
            return None
        if noun.endswith("."):
            inside = before in self.words("inside") or before == "на"
            case = "p" if inside else self.case_before(before).replace("a", "n")
            if case == "n" and re.fullmatch("[а-яё]+\\.?", before):
                case = "a" if before in self.words("accusative") else "g"
            noun = self.table("centuries_many" if last else "century")[case] + found.stop(noun)
        else:
            case = self.table("century_cases")[noun] if not (last and noun[-1] in "ая") else "n"
        case = "n" if case == "a" else case
        gender = "n" if noun.startswith(("стол", "тыс")) else "m"
        ordinals = [num2words(value, lang="ru", to="ordinal", case=case, gender=gender) for value in values]
        return f"{(link if link and 'и' in link else ' – ').join(ordinals)} {noun}"

    def last(self, rule: Rules) -> None:
        units = ends_of(self.words("time_units"))
        rule("/", rf"(?<=[а-яё])/({units})(?!\w)", lambda f: f" {self.per_one(f[1], '')}")
        rule("/", "(рублей|долларов|евро)/(?=[а-яё]{3})", lambda f: f"{f[1]} за ")

    # ---------------------------------------------------------------- years

    def _year(self, year: str, case: str) -> str:
        return self.ordinal(year, case=case).removeprefix("одна ")

    def headed(self, rule: Rules) -> None:
        chain = r"(?<![\w.,:/-])(\d{1,2}(?:, \d{1,2})*(?:,| и| или) )(?=\d{1,2}-(й|я|е|м|го|му|ый|ая|ое|ом|ым)(?!\w))"

        @rule("-", chain)
        def listed(found: Found) -> str:
            end = "ым" if found.before == "между" else found[2]
            return re.sub(r"\d+", lambda figure: f"{figure[0]}-{end}", found[1])

    def years_first(self, rule: Rules) -> None:
        any_year, years = r"(0?[1-9]\d{0,2}|1\d{3}|20\d\d)", r"(гг\.|гг|год(?:ы|ах|ов|ам|ами))(?!\w)"

        span_years = years.replace("ами)", "ами|а|у)")

        def case_of(found: Found, noun: str) -> str:
            before = found.before
            is_noun = re.fullmatch("[а-яё]{3,}", before) and not before.endswith(_VERBS)
            inside = "p" if before in ("в", "во") else "n"
            inside = "g" if before in self.words("genitive") or is_noun and before not in _LINKS else inside
            return self.table("cases_of_years").get(noun.removeprefix("год"), inside)

        @rule("г", rf"(?<![\w.,:/-]){any_year} ?{DASH} ?{any_year} ?{span_years}")
        def span(found: Found) -> str | None:
            if found[3] in ("года", "году") and len(found[1]) < 3:  # 2-3 года
                return None
            case = case_of(found, found[3])
            noun = f"{self.table('years')[case]}{found.stop(found[3])}"
            last = found[2] if found[2][0] != "0" else found[1][:2] + found[2]  # 2001–02 годов
            return f"{self._year(found[1], case)} – {self._year(last, case)} {noun}"

        ends = r"(год(?:ах|ов|ами|ам|ы|а|у|ом|)|гг\.|г\.)(?!\w)"
        chain = rf"(?<![\w.,:/-])({_YEAR}(?:, {_YEAR})*) ({'|'.join(_LINKS)}) ({_YEAR}) {ends}"

        @rule("г", chain)
        def listed(found: Found) -> str:
            """1998, 2003 и 2010 годов"""
            case = case_of(found, found[4])
            short = self.table("years" if found[4][1] == "г" else "year").get(case, "годов")
            noun = found[4] if found[4][0:2] == "го" else short + found.stop(found[4])
            years = re.sub(_YEAR, lambda year: self._year(year[0], case), found[1])
            return f"{years} {found[2] if found[2][0] == 'и' else '–'} {self._year(found[3], case)} {noun}"

        @rule("г", r"(?<![\w.,:/-])(1\d{3}|20\d\d) (годах|годов|годами)(?!\w)")
        def second(found: Found) -> str | None:
            """в 1812 и 1814 годах"""
            goes_on = found.before == "и" or found.before in self.words("year_months")
            return f"{self._year(found[1], case_of(found, found[2]))} {found[2]}" if goes_on else None

        @rule("г", r"(?<![\w.,:/-])([1-9]\d{2,3}) по ([1-9]\d{2,3}) (г\.|год)(?!\w)")
        def lasting(found: Found) -> str | None:
            if found.before not in ("с", "со"):
                return None
            return f"{self._year(found[1], 'g')} по {self._year(found[2], 'n')} год{found.stop(found[3])}"

        @rule("г", rf"(?<=по ){any_year} ?(гг\.|гг|годы)(?!\w)")
        def last(found: Found) -> str:
            return f"{self._year(found[1], 'n')} {self.table('years')['n']}{found.stop(found[2])}"

        @rule(
            "г",
            r"(?<![\w.,:/-])([1-9]\d{0,2}|[12]\d{3}|\d{4}(?= год[ау])) ?(году|года|годом|год|г\.|г)(?!\w)",
        )
        def say(found: Found) -> str | None:
            year, written = found[1], found[2]
            before = found.before
            case = {"года": "g", "годом": "i", "год": "n"}.get(written)
            era = re.match(" (?:до )?нашей эры", found.rest)
            if (
                int(year) < 1000
                and written not in ("году", "годом" if int(year) > 31 else "")
                and not (era or (before in ("в", "во") and written == "г." and int(year) % 50))
            ):
                return None
            if not case:
                is_genitive = before in self.words("year_genitive") | self.words("year_months")
                case = "g" if is_genitive else self.table("year_cases").get(before, "n")
                if written == "г." and case == "n" and not era and int(year) < 1100:
                    return None
                is_noun = re.fullmatch("[а-яё(«]*[а-яё]{3,}", before) and before not in self.words("accusative")
                case = "g" if case == "n" and is_noun and written == "г." else case
                if written == "г" and case == "n":  # grams or a year
                    if not re.fullmatch(r"19\d[1-9]|20[0-3][1-9]", year):
                        return keep(found)
                    case = "g"
            if written == "году":
                case = "d" if before in ("к", "ко") else "p"
            noun = written if written not in ("г", "г.") else self.table("year")[case]
            return f"{self._year(year, case)} {noun}{found.stop(written)}"

        @rule("г", r"(?<![\w.,:/-])([2-9]0|1\d\d0|20\d0) ?(гг\.|гг|год(?:ы|ах|ов))(?!\w)")
        def decade(found: Found) -> str:
            """в 70 годы"""
            case = case_of(found, found[2])
            noun = f"{self.table('years')[case]}{found.stop(found[2])}"
            said = num2words(int(found[1]), lang="ru", to="ordinal", plural=True, case="g" if case == "p" else case)
            return f"{said.removeprefix('одна ')} {noun}"

        @rule("(", r"(?<=\()(\d{3,4}) ?[-–] ?(\d{3,4})(?=\))")
        def life(found: Found) -> str | None:
            """(973–1050)"""
            years = [self._year(found[group], "n") for group in (1, 2)]
            is_life = 0 < int(found[2]) - int(found[1]) < 110 and int(found[2]) < 2050 and int(found[1]) % 100
            return " – ".join(years) if is_life else None

        @rule("", rf"(?<![\w.,:/-])({_YEAR})$")
        def taught(found: Found) -> str | None:
            """2019 учебный год"""
            kind = re.fullmatch("(?:учебн|финансов|календарн|бюджетн)(ый|ого|ом|ому)", found.after)
            return self._year(found[1], {"ый": "n", "ого": "g", "ом": "p", "ому": "d"}[kind[1]]) if kind else None

        beside = rf"(?<=\()({_YEAR}(?:[,;] {_YEAR})+)(?=\))"
        rule("(", beside, lambda f: re.sub(_YEAR, lambda year: self._year(year[0], "n"), f[1]))

        @rule(
            "",
            rf"(?<![\w.,:/-])({_YEAR})((?:, {_YEAR})*(?: и {_YEAR})?)(?![\w%]|[.,]\d|[:/–-]\d| ?[$€₽°]| \d{{3}}(?!\d))"
            r"(?! (?!(?:и|или|до|по)(?: |$))[а-яё])",
        )
        def bare(found: Found) -> str | None:
            """С 1930 преподавал: a year, unless a noun follows that it counts."""
            before, after = found.before.rstrip(")"), found.after
            genitive = self.words("year_genitive") | self.words("year_months")
            case = "g" if before in genitive else self.table("year_cases").get(before)
            sure = before in self.words("year_months") or before == "в" and after.endswith(_PAST)
            if not sure and not "1500" <= found[1] < "2050":
                return None
            if re.search("год[а-я]* или$", found.head):
                case = "g"  # 28 июня 1927 или 1928?
            end = found.rest.strip('.!?»"')
            is_name = (found.head.split() or [found.around.before])[-1][:1].isupper()
            if (
                not case
                and found[1][2:] != "00"
                and (
                    end[:1] == ")" or end[:1] in (",", ";") and "(" in found.match.string or is_name and end[:1] == ","
                )
            ):
                case = "n"  # (Париж, 1935)
            if not case and found.around.begins and not (found.head or end or after):
                case = "n"
            goes_on = re.sub(rf",? (?:{'|'.join(_LINKS)}|до|по|{_YEAR})\b.*|(?: --| –| —).*", "", found.rest)
            if not case or goes_on.strip('.,;:!?)»"') or self.is_plural(after):
                return None
            return self._year(found[1], case) + re.sub(_YEAR, lambda year: self._year(year[0], case), found[2])

    def is_plural(self, word: str) -> bool:
        """Is the word a noun or an adjective in the genitive plural, which a number counts?"""
        if not re.fullmatch("[а-яё]{3,}", word):
            return False
        if known := readings(word):
            return any(case == "g" and plural for case, _, plural in known)
        ends = "(?:[оеё]в|ей|ых|их|лет|раз|[бвгджзклмнпрстфхцчшщ]|(?<![кгхщжч])ий|ь)$"
        return bool(re.search(ends, word)) and not word.endswith(_VERBS)
