"""Russian numbers in their cases: the word before and the ending of the noun behind tell the case, the noun tells the
gender. Where they do not, the figure stays."""

import re

from spoken_text.european import number_of
from spoken_text.rule import DASH, Around, Kept, Rules, keep
from spoken_text.spoken import Spoken, num2words

GENITIVE = frozenset(
    "от до около более менее свыше больше меньше с со из без кроме для у после против ради вокруг среди возле старше "
    "младше моложе дольше выше ниже течение продолжение порядка раньше позже из-за из-под вместо помимо относительно "
    "протяжении сроком".split()
)
_ACCUSATIVE = frozenset("в во на за через по про спустя сквозь".split())
_DATIVE = frozenset("к ко благодаря согласно".split())
_LABELS = frozenset(
    "глава главы главе страница странице страницы стр. часть части том номер пункт пункте статья статье раздел разделе "
    "серия урок уровень этап этаж дом квартира автобус маршрут трамвай школа группа версия рисунок рис. таблица табл. "
    "№ канал зона линия сезон эпизод вариант вопрос задание упражнение формула windows iphone д. кв. гл. ст. п. т. "
    "блок секция билет поезд рейс кабинет палата комната".split()
)
_FEMININE = frozenset(
    "книга минута секунда неделя машина страница женщина девушка девочка дочь мать сестра подруга рука нога голова "
    "тысяча копейка иена крона гривна рупия лира тонна миля звезда планета страна школа группа команда игра победа "
    "ошибка задача таблица строка строчка буква цифра точка картина песня история статья глава улица дорога комната "
    "квартира дверь ночь часть треть роль модель мышь вещь жизнь смерть очередь область связь соль кость лошадь "
    "кровать "
    "площадь степень цель тетрадь новость порция ложка чашка бутылка банка коробка таблетка капля долька луковица "
    "морковь картофелина груша слива штука упаковка пачка попытка встреча поездка компания организация станция "
    "позиция версия секция акция миссия операция функция реакция линия серия партия премия сессия дивизия лекция "
    "коллекция категория лаборатория территория фотография программа система проблема тема схема реклама кошка собака "
    "корова курица рыба птица муха пчела обезьяна семья скамья свеча дача удача минутка секундочка недостача "
    "ступень осень весна зима четверть смена пара дюжина половина сотня бригада рота армия пушка ракета подлодка "
    "больница аптека библиотека церковь мечеть фабрика шахта скважина деревня столица республика провинция "
    "остановка пересадка сумка куртка рубашка юбка шапка доля пуля земля цепь сеть норма доза ставка услуга цена "
    "покупка продажа заявка подпись подписка ссылка папка кнопка клавиша".split()
)
_MASCULINE = frozenset(
    "день рубль месяц человек год час раз метр литр доллар процент миллион миллиард килограмм грамм километр мужчина "
    "юноша дядя папа дедушка судья коллега гость учитель житель зритель водитель писатель строитель пользователь "
    "корабль автомобиль двигатель показатель уровень камень огонь конь король царь словарь календарь гол голос "
    "апрель сентябрь октябрь ноябрь декабрь январь февраль июнь июль путь дождь тоннель отель портфель "
    "покупатель посетитель производитель победитель представитель вождь медведь олень гусь голубь лебедь гвоздь "
    "картофель стебель нуль ноль".split()
)
_NO_NOUN = frozenset(
    "или и мы вы они если при почти ли ни бы с по в на к у о об от до из за для над под про без не как что это эти "
    "были есть только лишь уже ещё еще всего тоже так там тут где когда чтобы тогда потом затем также однако но "
    "а же вот он она оно их им ему ей нам вам были сами твои мои свои наши ваши".split()
)
_NOT_DATIVE = frozenset("реклам дам мам ям панорам драм сам там нам вам".split())
_FEW_GENITIVE = frozenset(
    "человек лет недель книг стран минут секунд тысяч раз женщин мужчин машин страниц команд групп школ дочерей "
    "копеек тонн миль звёзд игр побед ошибок задач рук ног штук таблеток ложек чашек бутылок суток компаний".split()
)
_ADJECTIVE = re.compile(r"[а-яё]{2,}(?:ых|их|ым|им|ыми|ими|ые|ие)")
_ADJECTIVE_ONE = re.compile(r"[а-яё]{2,}(?:ый|ий|ой|ая|яя|ое|ее|ого|его|ую|юю)")
_PLACES = {"этаж": "m", "класс": "m", "курс": "m", "сезон": "m", "тур": "m", "раунд": "m", "квартал": "m", "мест": "n"}
_TENTHS = {1: "десят", 2: "сот", 3: "тысячн"}
_ROMAN = r"[IVXХ]{1,8}"
_KINGS = {"Пётр": "Петр", "Петр": "Петр", "Александр": "Александр", "Павел": "Павл", "Людовик": "Людовик",
          "Генрих": "Генрих", "Карл": "Карл", "Фридрих": "Фридрих", "Вильгельм": "Вильгельм", "Иван": "Иван",
          "Наполеон": "Наполеон"}  # fmt: skip


def _kings() -> dict[str, tuple[str, str]]:
    ends = {"а": "g", "у": "d", "ом": "i", "е": "p"}
    found = {stem + end: (case, "m") for stem in _KINGS.values() for end, case in ends.items()}
    found |= {f"Никола{end}": (case, "m") for end, case in {"я": "g", "ю": "d", "ем": "i", "е": "p"}.items()}
    for stem in ("Екатерин", "Елизавет"):
        found |= {stem + end: (case, "f") for end, case in {"ы": "g", "е": "d", "у": "a", "ой": "i"}.items()}
    return found


KINGS = _kings()
"""Names of kings and queens that are not in the nominative -> the case and the gender."""


def number(value: str, case: str, gender: str = "m") -> str:
    """A whole number or a decimal fraction in a case. The accusative is that of things."""
    whole, _, decimals = value.partition(".")
    if not decimals:
        if case == "g" and value == "0":
            return "нуля"
        if case == "a":
            return num2words(int(value), lang="ru", case="a", gender=gender, animate=False)
        return num2words(int(value), lang="ru", case=case, gender=gender)
    ends = {"n": ("ая", "ых"), "a": ("ую", "ых"), "g": ("ой", "ых")}[case]
    parts = []
    for figures, stem in ((whole, "цел"), (decimals, _TENTHS[len(decimals)])):
        one = figures[-1] == "1" and figures[-2:] != "11"
        parts.append(f"{number(str(int(figures)), case, 'f')} {stem}{ends[0] if one else ends[1]}")
    return " ".join(parts)


def is_decimal(value: str) -> bool:
    return bool(re.fullmatch(r"\d{1,9}(?:\.\d{1,3})?", value))


def is_one(value: str) -> bool:
    return "." not in value and value[-1] == "1" and value[-2:] != "11"


def case_before(before: str) -> str:
    """The case that a word takes: "g", "a" or "d"; "n" if it takes none."""
    cases = {"g": GENITIVE, "a": _ACCUSATIVE, "d": _DATIVE}
    return next((case for case, words in cases.items() if before in words), "n")


def measured(around: Around, found: re.Match[str], value: str, forms: list[str], gender: str) -> str | None:
    """A number with a unit or a currency in their case; None if nominative forms say it."""
    before, after = around.word_before(found), around.word_after(found)
    case = case_before(before)
    if before in ("в", "во") and after == "от" and forms[2].endswith("метров") and value.isdecimal():
        noun = forms[2].removesuffix("ов") + ("е" if is_one(value) else "ах")
        return f"{number(value, 'p')} {noun}"
    if case == "n" or not is_decimal(value):
        return None
    if case == "d":
        return keep(found[0])
    said = number(value, case, gender)
    if case == "g":
        return f"{said} {forms[1 if '.' in value or is_one(value) else 2]}"
    if not is_one(value):
        return None if "." not in value else f"{said} {forms[1]}"
    return f"{said} {re.sub('а$', 'у', forms[0]) if gender == 'f' else forms[0]}"


class Russian:
    """The rules for counts, centuries, dates and times of day."""

    def __init__(self, spoken: Spoken, around: Around):
        self.spoken, self.around = spoken, around

    # ---------------------------------------------------------------- which words belong together

    def holds(self, word: str, held: str) -> bool:
        """Is the word, behind the word `held`, needed to tell what a number agrees with?"""
        if re.search(rf"(?:^|[(«\"–-]){_ROMAN}$", held):
            return word in ("в", "вв", "век", "века", "веке", "веку", "веком", "веков", "веках", "и", "по")
        if held in ("и", "по") and self.is_roman(word):
            return True
        if not held[-1].isdecimal():
            return held in ("по", "до", "из") and word[:1].isdigit() or held == "кв." and word in ("м", "км")
        if word == "из" and re.search(r"(?:^|[^1\d])[12]$|[2-9][12]$", held):
            return True
        if word in ("по", "до", "кв", "годах", "годов"):
            return True
        one = held[-1] == "1" and held[-2:] != "11"
        return bool((_ADJECTIVE_ONE if one else _ADJECTIVE).fullmatch(word))

    def is_roman(self, word: str) -> bool:
        return word[:1] in "IVXХ" and bool(re.fullmatch(rf"{_ROMAN}(?:[–-]{_ROMAN})?", word))

    # ---------------------------------------------------------------- counts

    def count(self, found: re.Match[str], value: str, said: str, in_range: bool = False) -> str:
        """A number in the case and gender of what stands around it."""
        before, words = self.around.word_before(found), self._behind(found)
        if of := re.match(r" из \d+$", found.string[found.end() :]):
            return self._one_of(found, value, said) if self.around.after and of else said
        noun = words[-1] if words else ""
        if before in _LABELS or not is_decimal(value):
            return said
        if "." in value:
            return self._fraction(found, value, noun, said)
        if not noun:
            case = "g" if before in GENITIVE else "d" if before in ("к", "ко") else "n"
            return number(value, case) if case != "n" and value[0] != "0" else said
        if value[0] == "0":
            return said
        case, gender = (
            self._singular(words, before) if is_one(value) and not in_range else self._plural(words, value, before)
        )
        if case == "place":
            return self._place(value, noun) or keep(found[0])
        return number(value, case, gender) if case else keep(found[0])

    def _one_of(self, found: re.Match[str], value: str, said: str) -> str:
        """1 из 5 женщин"""
        noun = self.around.after.strip("\"'»)”.,;:!?…")
        if not re.fullmatch("[а-яё]{3,}", noun) or noun in _NO_NOUN or re.search("[оеё]в$", noun) or noun == "человек":
            return said
        singulars = {noun, noun + "а", noun + "я", re.sub("ий$", "ия", noun), re.sub("[её]к$", "ка", noun)}
        return number(value, "n", "f") if singulars & _FEMININE else keep(found[0])

    def _behind(self, found: re.Match[str]) -> list[str]:
        """The adjective, if there is one, and the noun behind the number."""
        text = found.string[found.end() :]
        if text and text[0] != " ":
            return []
        words = [*text.split(), *([self.around.after] if self.around.after else [])]
        first = words[0] if words else ""
        more = 2 if len(words) > 1 and (_ADJECTIVE.fullmatch(first) or _ADJECTIVE_ONE.fullmatch(first)) else 1
        found_words = [word.strip("\"'»)”.,;:!?…") for word in words[:more]]
        if (
            not all(re.fullmatch(r"[а-яё-]+", word) for word in found_words)
            or found_words[-1:]
            and found_words[-1] in _NO_NOUN
        ):
            return []
        return found_words

    def _fraction(self, found: re.Match[str], value: str, noun: str, said: str) -> str:
        case = case_before(self.around.word_before(found))
        if case == "d":
            return keep(found[0])
        if (
            case != "g"
            and noun
            and re.search("[аяыи]$", noun)
            and value.endswith(".5")
            and value != "0.5"
            and len(value) < 5
        ):
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
        if stem in _PLACES and (noun[-1] == "е" or noun in (stem, "место")):
            return "place", ""
        if re.search("[аяь]ми$", noun) or (adjective and first.endswith("ми")):
            return "i", "m"
        if re.search("[ая]х$", noun):
            return "p", "m"
        if re.search("[ая]м$", noun) and noun not in _NOT_DATIVE:
            return "d", "m"
        if before in GENITIVE or (before in ("о", "об", "при") and not few):
            return ("g" if before in GENITIVE else "p"), "m"
        if before in ("к", "ко"):
            return "d", "m"
        if few and (re.search("[оеё]в$|ей$", noun) or noun in _FEW_GENITIVE):
            return "g", "m"
        if value[-1] == "2" and few:
            singulars = {re.sub("[ыи]$", end, noun) for end in ("а", "я", "ь")}
            ends_in_li = noun.endswith("ли") and singulars.isdisjoint(_FEMININE)
            if noun[-1] in "ыи" and not ends_in_li:
                return "n", "m" if not singulars.isdisjoint(_MASCULINE) else "f"
        return "n", "m"

    def _singular(self, words: list[str], before: str) -> tuple[str, str]:
        noun, first, end = words[-1], words[0], words[-1][-1]
        case = case_before(before)
        known = "f" if noun in _FEMININE or noun.endswith(("ость", "ция")) else "m" if noun in _MASCULINE else ""
        if re.sub("[аеоу]$", "", noun) in _PLACES:
            return ("place", "") if end == "е" and before in ("в", "на") else ("", "")
        if case == "g":
            if end in "ыи":
                return "g", "f"
            return ("g", "m") if end in "ая" else ("", "")
        if end in "ую":
            if case == "d" or (case == "a" and before == "по" and re.sub("[ую]$", "а", noun) not in _FEMININE):
                return "d", "m"
            accusative = {re.sub("у$", "а", noun), re.sub("ю$", "я", noun)} & _FEMININE or first.endswith(("ую", "юю"))
            return ("a", "f") if accusative else ("", "")
        if re.search("[оеё]м$", noun) and before in ("с", "со", "перед", "над", "под", "между"):
            return "i", "m"
        if end == "е" and before == "по" and re.sub("е$", "а", noun) in _FEMININE:
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

    def is_oblique(self, noun: str) -> bool:
        """Is it a feminine noun in another case than the nominative and the accusative, such as "минуте"?"""
        stem = re.sub("(?:[оеь]?[йю]|[еиы])$", "", noun)
        return stem != noun and any(stem + end in _FEMININE for end in "аяь")

    def _place(self, value: str, noun: str) -> str | None:
        """на 2 этаже: на втором этаже."""
        case = "p" if noun.endswith("е") else "n"
        stem = re.sub("[ео]$", "", noun)
        return num2words(int(value), lang="ru", to="ordinal", case=case, gender=_PLACES[stem])

    # ---------------------------------------------------------------- centuries, dates, times

    def first(self) -> Rules:
        """What no other rule may take apart."""
        yield rf"(?<!\w)({_ROMAN}) по ({_ROMAN})(?= век(?!\w))", self._from_to
        chain = rf"({_ROMAN})(?:( ?[–-] ?| и )({_ROMAN}))?"
        yield rf"(?<!\w){chain} ?(век(?:а|е|у|ом|ов|ах)?|вв?\.)(?!\w)", self._century
        months = "|".join(self.spoken.months)
        day, year = r"(\d\d?)", r"(?: (\d{4})(?: года\b| г\.| г\b)?(?!\d))?"
        yield rf"(?<![\w.,:/-]){day} (по|до) {day} (?=(?:{months})\b)", self._days
        yield (
            rf"(?<![\w.,:/-]){day} ?{DASH} ?{day} (?=(?:{months})\b)",
            lambda f: f"{self._day(f[1])} – {self._day(f[2])} ",
        )
        yield rf"(?<![\w.,:/-]){day} ({months})\b{year}", self._date
        clock = r"(\d\d?):(\d\d)"
        yield rf"(?<![\w.,:/-]){clock} ?{DASH} ?{clock}(?![\w:/]|[.,]\d)", self._span
        yield rf"(?<![\w.,:/-]){clock}(?![\w:/]|[.,]\d)", self._time
        decade = r"(?<![\w.,:/-])(\d{2,4}0)-(е|х|м|ми) (гг\.?|годы|годов|годах|годам)(?!\w)"
        yield decade, self._decade
        yield (
            r"(?<![\w.,:/-])(1[1-9]\d\d|20\d\d) ?[–-] ?(1[1-9]\d\d|20\d\d)(?![\w%]|[.,]\d|[:/–-]\d| ?(?:г|[$€₽°%]))",
            self._years,
        )
        yield r"(?<=\d) кв\. ?(к?м)(?!\w)", lambda f: f" {f[1]}²"
        yield r"(?<=\()(1[1-9]\d\d|20[0-3]\d)(?=\))", lambda f: self.spoken.ordinal(f[1]).removeprefix("одна ")
        yield (
            r"(?<![\w.,:/-])(?:0[1-9]|[12]\d|3[01])\.(?:0[1-9]|1[0-2])(?![\w]|[.,]\d| ?[%€$₽])",
            lambda f: self._short(f),
        )
        yield r"(?<![\w.,])[1-9]\d{0,2}\.\d{3}(?![\w.,])", lambda f: keep(f[0])  # thousands or thousandths
        yield r"(?<![\w.,])\d+,\d+(?=-[а-яё])", lambda f: keep(f[0])
        yield r"(?<![\w.,:/–-])1/([2-9])(?![\w/]|[.,]\d|-\d)", self._part
        parts = "этаж|комнатн|процентн|летн|лети|дневн|часов|минутн|секундн|кратн|местн|метров|километров|килограммов"
        parts += "|тонн|литров|страничн|зв[её]здочн|томн|серийн|тысячн|миллионн|рубл[её]в|битн|ядерн|значн|мерн|дюймов"
        parts += "|балльн|недельн|месячн|процентн|градусн|цилиндров|колесн|колёсн|ступенчат|бальн|долларов"
        yield rf"(?<![\w.,–-])([1-9]\d{{0,2}})-?(?=(?:{parts}))", self._compound
        yield r"(?<![\w.,-])(\d{1,2})-ти(?!\w)", lambda f: number(f[1], "g")
        yield r"(?<![\w.,])(\d{1,2})\+(?=\s|$|[,.;:!?)])", lambda f: f"{self.spoken.cardinal(f[1])} плюс"

    def _part(self, found: re.Match[str]) -> str | None:
        """1/2 стакана: пол стакана, as a subject or an object"""
        noun, before = self.around.word_after(found), self.around.word_before(found)
        if not re.fullmatch("[а-яё]{3,}[аяыией]|[а-яё]+(?:ов|ев|ей|ых|их|ой)", noun) or before[-1:].isdigit():
            return None
        known = {"2": "пол", "3": "треть", "4": "четверть"}.get(found[1])
        if before in GENITIVE or not known:
            return {"2": "половины", "3": "трети", "4": "четверти"}.get(found[1]) if known else keep(found[0])
        return keep(found[0]) if before in _DATIVE else known

    def _from_to(self, found: re.Match[str]) -> str | None:
        first, last = number_of(found[1]), number_of(found[2])
        if not first or not last or self.around.word_before(found) not in ("с", "со"):
            return None
        return f"{self.spoken.ordinal(str(first), case='g')} по {self.spoken.ordinal(str(last))}"

    def _short(self, found: re.Match[str]) -> str | None:
        """12.05: a day or a decimal; after "в" a time."""
        return None if self.around.word_before(found) == "в" else keep(found[0])

    def _compound(self, found: re.Match[str]) -> str:
        """десятилетний, двадцатиэтажный, столетие"""
        if found[1] == "1":
            return Kept("одно")
        said = num2words(int(found[1]), lang="ru", case="g")
        return Kept("".join({"ста": "сто", "девяноста": "девяносто"}.get(word, word) for word in said.split()))

    def _day(self, day: str, case: str = "g") -> str:
        if not 1 <= int(day) <= 31:
            return day
        return self.spoken.ordinal(day, case="n" if case == "a" else case, gender="n")

    def _days(self, found: re.Match[str]) -> str | None:
        if self.around.word_before(found) not in ("с", "со", "от"):
            return None
        return f"{self._day(found[1])} {found[2]} {self._day(found[3], 'a' if found[2] == 'по' else 'g')} "

    def _date(self, found: re.Match[str]) -> str | None:
        case = case_before(self.around.word_before(found))
        if case not in "ad" or not 1 <= int(found[1]) <= 31:
            return None
        year = f" {self.spoken.ordinal(found[3], case='g').removeprefix('одной ')} года" if found[3] else ""
        return f"{self._day(found[1], case)} {found[2]}{year}"

    def _clock(self, hour: str, minute: str, case: str) -> str | None:
        if int(hour) > 24 or int(minute) > 59:
            return None
        zero = "ноль " if int(minute) < 10 else ""
        minutes = number(str(int(minute)), case, "f" if int(minute) and case == "f" else "m") if int(minute) else "ноль"
        return f"{number(str(int(hour)), case)} {zero}{minutes}"

    def _time(self, found: re.Match[str]) -> str | None:
        case = case_before(self.around.word_before(found))
        return self._clock(found[1], found[2], case if case in "gd" else "n")

    def _span(self, found: re.Match[str]) -> str | None:
        before = self.around.word_before(found)
        cases = "n" if case_before(before) not in "n" else "g"
        first, last = self._clock(found[1], found[2], cases), self._clock(found[3], found[4], cases)
        if not first or not last:
            return None
        return f"с {first} до {last}" if cases == "g" else f"{first} – {last}"

    def _years(self, found: re.Match[str]) -> str:
        if found[1] >= found[2]:
            return keep(found[0])
        case = "p" if self.around.word_before(found) in ("в", "во") else "n"
        return " – ".join(self.spoken.ordinal(year, case=case).removeprefix("одна ") for year in found.groups())

    def _decade(self, found: re.Match[str]) -> str:
        case = {"е": "n", "х": "g", "м": "d", "ми": "i"}[found[2]]
        said = num2words(int(found[1]), lang="ru", to="ordinal", plural=True, case=case)
        inside = self.around.word_before(found) in ("в", "во", "о", "об", "при")
        noun = {"n": "годы", "g": "годах" if inside else "годов", "d": "годам", "i": "годами"}[case]
        stop = self.around.stop(found, False) if found[3] == "гг." else ""
        return f"{said} {noun if found[3].startswith('гг') else found[3]}{stop}"

    def _century(self, found: re.Match[str]) -> str | None:
        first, link, last, noun = found[1], found[2], found[3], found[4]
        before = self.around.word_before(found)
        values = [number_of(roman) for roman in (first, last) if roman]
        if not all(values):
            return None
        inside = before in ("в", "во", "о", "об", "при", "на")
        case = "p" if inside else "g" if before in GENITIVE else "d" if before in _DATIVE else "n"
        if noun.endswith("."):
            if case == "n" and re.fullmatch("[а-яё]+", before):
                case = "a" if before in _ACCUSATIVE else "g"
            forms = {"n": "века", "a": "века", "g": "веков", "d": "векам", "p": "веках"} if last else {
                "n": "век", "a": "век", "g": "века", "d": "веку", "p": "веке"}  # fmt: skip
            said = forms[case] + self.around.stop(found, False)
        else:
            said = noun
            one = {"век": "n", "века": "g", "веке": "p", "веку": "d", "веком": "i", "веков": "g", "веках": "p"}
            case = one[noun] if not (last and noun == "века") else "n"
        case = "n" if case == "a" else case
        ordinals = [num2words(value, lang="ru", to="ordinal", case=case) for value in values]
        return f"{(link if link and 'и' in link else ' – ').join(ordinals)} {said}"
