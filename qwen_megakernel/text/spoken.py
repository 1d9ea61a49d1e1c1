"""How each language says numbers, units, dates and times: tables, plus num2words."""

import re
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property

from num2words import num2words

from qwen_megakernel.checkpoint.languages import NAMES, primary_subtag

MOST_DIGITS = 15  # a number of more digits is said digit by digit

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
    units: dict[str, tuple[str, ...]] = field(default_factory=dict)  # written form -> spoken forms, of `_UNITS`

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
        return int(float(value) >= 2 if self.code == "fr" else value != "1")

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

_TABLES = {
    "english": Spoken(
        "en", ".", ",", "point", "minus", "plus", "dot", "at", "to", "mdy/", tuple(_EN.title().split()),
        tuple("thousand million billion trillion".split()),
        frozenset("in since until till year before after around circa during early late mid from q1 q2 q3 q4".split()),
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
    "chinese": Spoken("", ".", ",", "点", "负", "加", "点", "艾特", "到", "ymd/", joined=True),
    "japanese": Spoken(
        "ja", ".", ",", "点", "マイナス", "プラス", "ドット", "アットマーク", "から", "ymd/",
        joined=True),
    "korean": Spoken("ko", ".", ",", "점", "마이너스 ", "플러스", "점", "골뱅이", "에서", "ymd/", joined=True),
}  # fmt: skip
_UNITS = {
    "english": "km kilometer kilometers, m meter meters, cm centimeter centimeters, mm millimeter millimeters, "
    "km/h kilometer_per_hour kilometers_per_hour, mph mile_per_hour miles_per_hour, mi mile miles, ft foot feet, "
    "lb pound pounds, lbs pound pounds, oz ounce ounces, kg kilogram kilograms, g gram grams, mg milligram milligrams, "
    "l liter liters, L liter liters, ml milliliter milliliters, °C degree_Celsius degrees_Celsius, "
    "°F degree_Fahrenheit degrees_Fahrenheit, ° degree degrees, h hour hours, min minute minutes, s second seconds, "
    "ms millisecond milliseconds, GB gigabyte gigabytes, MB megabyte megabytes, kB kilobyte kilobytes, "
    "KB kilobyte kilobytes, TB terabyte terabytes, W watt watts, kW kilowatt kilowatts, kWh kilowatt_hour "
    "kilowatt_hours, V volt volts, Hz hertz hertz, kHz kilohertz kilohertz, MHz megahertz megahertz, GHz gigahertz "
    "gigahertz, m² square_meter square_meters, km² square_kilometer square_kilometers, % percent percent, "
    "JPY yen yen, CNY yuan yuan",
    "german": "km Kilometer Kilometer, m Meter Meter, cm Zentimeter Zentimeter, mm Millimeter Millimeter, "
    "km/h Kilometer_pro_Stunde Kilometer_pro_Stunde, kg Kilogramm Kilogramm, g Gramm Gramm, mg Milligramm Milligramm, "
    "l Liter Liter, ml Milliliter Milliliter, °C Grad_Celsius Grad_Celsius, °F Grad_Fahrenheit Grad_Fahrenheit, "
    "° Grad Grad, h Stunde Stunden f, Std Stunde Stunden f, min Minute Minuten f, s Sekunde Sekunden f, "
    "ms Millisekunde Millisekunden f, GB Gigabyte Gigabyte, MB Megabyte Megabyte, kB Kilobyte Kilobyte, "
    "KB Kilobyte Kilobyte, TB Terabyte Terabyte, W Watt Watt, kW Kilowatt Kilowatt, kWh Kilowattstunde "
    "Kilowattstunden f, V Volt Volt, Hz Hertz Hertz, kHz Kilohertz Kilohertz, MHz Megahertz Megahertz, GHz Gigahertz "
    "Gigahertz, m² Quadratmeter Quadratmeter, km² Quadratkilometer Quadratkilometer, % Prozent Prozent, "
    "JPY Yen Yen, CHF Franken Franken",
    "french": "km kilomètre kilomètres, m mètre mètres, cm centimètre centimètres, mm millimètre millimètres, "
    "km/h kilomètre_par_heure kilomètres_par_heure, kg kilogramme kilogrammes, g gramme grammes, "
    "mg milligramme milligrammes, l litre litres, ml millilitre millilitres, °C degré_Celsius degrés_Celsius, "
    "°F degré_Fahrenheit degrés_Fahrenheit, ° degré degrés, h heure heures f, min minute minutes f, s seconde secondes "
    "f, ms milliseconde millisecondes f, Go gigaoctet gigaoctets, Mo mégaoctet mégaoctets, ko kilooctet kilooctets, "
    "GB gigaoctet gigaoctets, MB mégaoctet mégaoctets, TB téraoctet téraoctets, W watt watts, kW kilowatt kilowatts, "
    "kWh kilowattheure kilowattheures, V volt volts, Hz hertz hertz, kHz kilohertz kilohertz, MHz mégahertz mégahertz, "
    "GHz gigahertz gigahertz, m² mètre_carré mètres_carrés, km² kilomètre_carré kilomètres_carrés, "
    "% pour_cent pour_cent, JPY yen yens, GBP livre livres f, CHF franc_suisse francs_suisses",
    "spanish": "km kilómetro kilómetros, m metro metros, cm centímetro centímetros, mm milímetro milímetros, "
    "km/h kilómetro_por_hora kilómetros_por_hora, kg kilogramo kilogramos, g gramo gramos, mg miligramo miligramos, "
    "l litro litros, ml mililitro mililitros, °C grado_Celsius grados_Celsius, °F grado_Fahrenheit grados_Fahrenheit, "
    "° grado grados, h hora horas f, min minuto minutos, s segundo segundos, ms milisegundo milisegundos, "
    "GB gigabyte gigabytes, MB megabyte megabytes, kB kilobyte kilobytes, TB terabyte terabytes, "
    "W vatio vatios, kW kilovatio kilovatios, kWh kilovatio_hora kilovatios_hora, V voltio voltios, Hz hercio hercios, "
    "kHz kilohercio kilohercios, MHz megahercio megahercios, GHz gigahercio gigahercios, "
    "m² metro_cuadrado metros_cuadrados, km² kilómetro_cuadrado kilómetros_cuadrados, % por_ciento por_ciento",
    "italian": "km chilometro chilometri, m metro metri, cm centimetro centimetri, mm millimetro millimetri, "
    "km/h chilometro_all'ora chilometri_all'ora, kg chilogrammo chilogrammi, g grammo grammi, l litro litri, "
    "ml millilitro millilitri, °C grado_Celsius gradi_Celsius, ° grado gradi, h ora ore f, min minuto minuti, "
    "s secondo secondi, GB gigabyte gigabyte, MB megabyte megabyte, m² metro_quadrato metri_quadrati, "
    "% per_cento per_cento, JPY yen yen, CHF franco_svizzero franchi_svizzeri",
    "portuguese": "km quilómetro quilómetros, m metro metros, cm centímetro centímetros, mm milímetro milímetros, "
    "km/h quilómetro_por_hora quilómetros_por_hora, kg quilograma quilogramas, g grama gramas, l litro litros, "
    "ml mililitro mililitros, °C grau_Celsius graus_Celsius, ° grau graus, h hora horas f, min minuto minutos, "
    "s segundo segundos, GB gigabyte gigabytes, MB megabyte megabytes, m² metro_quadrado metros_quadrados, "
    "% por_cento por_cento, GBP libra libras f, JPY iene ienes",
    "russian": "км километр километра километров, м метр метра метров, см сантиметр сантиметра сантиметров, "
    "мм миллиметр миллиметра миллиметров, кг килограмм килограмма килограммов, г грамм грамма граммов, "
    "л литр литра литров, км/ч километр_в_час километра_в_час километров_в_час, °C градус_Цельсия градуса_Цельсия "
    "градусов_Цельсия, ° градус градуса градусов, ч час часа часов, мин минута минуты минут f, сек секунда секунды "
    "секунд f, % процент процента процентов, GBP фунт фунта фунтов, JPY иена иены иен f, CNY юань юаня юаней",
    "chinese": "km 公里, m 米, cm 厘米, mm 毫米, km/h 公里每小时, kg 公斤, g 克, l 升, ml 毫升, °C 摄氏度, ° 度, "
    "h 小时, min 分钟, s 秒"
    ", % 百分之{}, USD 美元, EUR 欧元, GBP 英镑, JPY 元, CNY 元, RUB 卢布, KRW 韩元, CHF 瑞士法郎",
    "japanese": "km キロメートル, m メートル, cm センチメートル, mm ミリメートル, "
    "km/h キロ毎時, kg キログラム, g グラム, l リットル, "
    "ml ミリリットル, °C 度, ° 度, h 時間, min 分, s 秒, "
    "% パーセント, USD ドル, EUR ユーロ, GBP ポンド, "
    "JPY 円, CNY 元, KRW ウォン, CHF スイスフラン",
    "korean": "km 킬로미터, m 미터, cm 센티미터, mm 밀리미터, kg 킬로그램, g 그램, l 리터, ml 밀리리터, °C 도, ° 도, "
    "% 퍼센트, USD 달러, EUR 유로, GBP 파운드, JPY 엔, CNY 위안, KRW 원, CHF 스위스_프랑",
}
"""By language: a written form, then its spoken forms. Two forms are singular and plural; Russian has three. "f" after
them marks a feminine noun, in languages where that changes the number. "_" stands for a blank. "{}" stands for the
number if it comes after a word. "L" and "KB" are other ways to write a unit."""


def _units_of(language: str) -> dict[str, tuple[str, ...]]:
    rows = (row.split() for row in _UNITS[language].split(", "))
    return {row[0]: tuple(word.replace("_", " ") for word in row[1:]) for row in rows}


LANGUAGES = {name: replace(spoken, units=_units_of(name)) for name, spoken in _TABLES.items()}
"""By the names of checkpoint/languages.py."""


def language_name(language: str | None) -> str | None:
    """The name that checkpoint/languages.py has for a language, or for a code with or without a region: "german", "de",
    "de-AT". A dialect such as "sichuan_dialect" is Chinese. None for None, "auto" and unknown languages."""
    name = (language or "").lower()
    if name.endswith("_dialect"):
        return "chinese"
    return name if name in LANGUAGES else NAMES.get(primary_subtag(name))
