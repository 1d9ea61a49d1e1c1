"""Figures that are no amounts: telephone numbers, serial numbers, fractions, scores, directions, Roman numerals."""

import re
from math import gcd

from spoken_text.european import MAY_BE_ROMAN
from spoken_text.rule import Around, Rules, ends_of, keep
from spoken_text.ru.rules import KINGS as RUSSIAN_KINGS
from spoken_text.ru.rules import number as russian_number
from spoken_text.spoken import Spoken

_CALLED = frozenset("call dial text phone tel notruf pin".split())
_SERIAL = frozenset("isbn issn isbn-10 isbn-13 ean imei iban".split())
_PARTS = {
    "en": "half/halves third/thirds quarter/quarters fifth/fifths sixth/sixths 0 eighth/eighths 0 tenth/tenths",
    "de": "halb Drittel Viertel Fünftel Sechstel 0 Achtel 0 Zehntel",
    "fr": "demi/demis tiers quart/quarts cinquième/cinquièmes sixième/sixièmes septième/septièmes huitième/huitièmes "
    "neuvième/neuvièmes dixième/dixièmes",
    "es": "medio/medios tercio/tercios cuarto/cuartos quinto/quintos sexto/sextos séptimo/séptimos octavo/octavos "
    "noveno/novenos décimo/décimos",
    "it": "mezzo/mezzi terzo/terzi quarto/quarti quinto/quinti sesto/sesti settimo/settimi ottavo/ottavi nono/noni "
    "decimo/decimi",
    "pt": "meio/meios terço/terços quarto/quartos quinto/quintos sexto/sextos sétimo/sétimos oitavo/oitavos "
    "nono/nonos décimo/décimos",
    "ru": "вторая/вторых третья/третьих четвёртая/четвёртых пятая/пятых шестая/шестых седьмая/седьмых восьмая/восьмых "
    "девятая/девятых десятая/десятых",
}
_AND = {"en": " and ", "de": " und ", "fr": " et ", "es": " y ", "it": " e ", "pt": " e ", "ru": " и ", "zh": "又"}
_AND |= {"ja": "と", "ko": "과 "}
OF = {"zh": "分之", "ja": "分の", "ko": "분의 "}
_ONE_HALF = {"en": "a half", "fr": "demi", "es": "medio", "it": "mezzo", "pt": "meio", "de": "ein halb"}
VULGAR = dict(zip("½⅓⅔¼¾⅕⅛", ("1/2", "1/3", "2/3", "1/4", "3/4", "1/5", "1/8"), strict=True))
"""Fractions of one character."""
_DATED = frozenset(
    "on by from until till since before after due am vom bis zum ab le du au el del desde hasta il dal al dia "
    "em até с до от на".split()
)
_RUSSIAN_SCORE = frozenset(
    "счёт счет счётом счетом счёте счете выиграл выиграла выиграли победил победила победили проиграл проиграла "
    "проиграли матч обыграл обыграла обыграли вничью".split()
)
DIRECTIONS = frozenset("NSEWO")
RATIO = {
    "en": "to",
    "de": "zu",
    "fr": "à",
    "es": "a",
    "it": "a",
    "pt": "a",
    "zh": "比",
    "ja": "対",
    "ko": "대",
}
_DIRECTIONS = {
    "en": "north south east west",
    "de": "Nord Süd Ost West",
    "fr": "nord sud est ouest",
    "es": "norte sur este oeste",
    "it": "nord sud est ovest",
    "pt": "norte sul leste oeste",
    "ru": "северной_широты южной_широты восточной_долготы западной_долготы",
}


def phones(spoken: Spoken, around: Around) -> Rules:
    """Digit by digit, with a comma between the groups."""
    glue = {"zh": "，", "ja": "、"}.get(spoken.code, ", ")

    def say(found: re.Match[str]) -> str:
        said = glue.join(map(spoken.digits, re.findall(r"\d+", found[0])))
        said = said.replace("영", "공") if spoken.code == "ko" else said
        return f"{spoken.plus}{spoken.around_dot}{said}" if found[0][0] == "+" else said

    def local(found: re.Match[str]) -> str | None:
        """555-0134, but not 100-2000, which may be a range."""
        is_range = found[0][4] != "0" and found[0].endswith("00")
        sure = around.before == "〒"
        return say(found) if sure or not (found[0][0] in "01" or is_range) else None

    before, after = r"(?<![\w.,:/-])(?<!\d )", r"(?![\w-]|[.,]\d)"
    yield rf"{before}(?:97[89][- ]?)?\d{{1,5}}-\d{{1,7}}-\d{{1,7}}-[\dX](?![\w-])", lambda f: _serial(f, say)
    yield r"\+\d{1,3}(?:[ ()./-]{0,2}\d+){1,6}(?<=\d{2})", lambda f: say(f) if len(f[0]) > 7 else None
    yield rf"{before}[18][ -.](?:\(\d{{3}}\)[ -.]?|\d{{3}}[-. ])\d{{3}}[-. ](?:\d{{4}}|\d\d-\d\d){after}", say
    yield rf"(?<![\w.,-])(?<!\d )(?:\(\d{{3}}\)[ -]?|\d{{3}}[-. ])\d{{3}}[-. ]\d{{4}}{after}", say
    yield rf"{before}\(\d\d\) ?9?\d{{4}}-\d{{4}}{after}", say
    yield r"(?<![\w.,:/-])(?<!\d )0\d{1,4}(?:[ -]\d{2,}|/\d{4,})+(?!\w|[.,]\d)", say
    if spoken.code in ("es", "pt"):
        yield rf"{before}\d\d \d{{3}} \d\d \d\d{after}", say
        yield rf"{before}[679]\d\d \d{{3}} (?!000)\d{{3}}{after}(?! \d| ?[€$%])", say
    yield rf"{before}\d{{3}}-\d{{4}}{after}", local
    yield rf"{before}\d{{4}}(?: \d{{4}}){{2,4}}{after}", say
    yield rf"{before}(?:\d{{3}}-\d\d-\d{{4}}|\d{{5}}-\d{{4}}){after}", say
    if spoken.code == "ko":
        yield rf"{before}1[5-8]\d\d-\d{{4}}(?!\d|년)", say
        yield r"(?<![\w.,])(\d{1,2})대(\d{1,2})(?!\d)", lambda f: f"{spoken.cardinal(f[1])} 대 {spoken.cardinal(f[2])}"
    # Groups with three hyphens or more, such as serial numbers, are no amounts.
    yield rf"{before}\d+(?:-\d+){{3,20}}(?![\w-])", say
    known = _CALLED | _SERIAL
    yield (
        r"(?<![\w.,])\d{3,20}(?![\w]|[.,:/-]\d)",
        lambda f: say(f) if around.word_before(f).strip(".:,#") in known else None,
    )


def _serial(found: re.Match[str], say) -> str:
    said = say(found)
    return f"{said} X" if found[0].endswith("X") else said


def fractions(spoken: Spoken, around: Around) -> Rules:
    """1/2, 1 3/4, ½. Where it may be a date or a ratio, the figures stay as they are read alone."""
    single = "".join(VULGAR)
    letters = "A-Za-z0-9_" if spoken.joined else r"\w"
    names = ends_of(" ".join(name for name in spoken.units if name != "%"))
    unit = rf"(?: ?({names})(?![{letters}/²³]))?"

    def part(top: int, bottom: int) -> str | None:
        if spoken.code in OF:
            return f"{spoken.cardinal(str(bottom))}{OF[spoken.code]}{spoken.cardinal(str(top))}"
        forms = _PARTS[spoken.code].split()
        if not 2 <= bottom <= len(forms) + 1 or forms[bottom - 2] == "0":
            return None
        form = forms[bottom - 2].split("/")[-1 if top > 1 else 0]
        gender = "f" if spoken.code == "ru" else "m"
        return f"{spoken.before_noun(spoken.cardinal(str(top)), str(top), gender)} {form}"

    def measured(found: re.Match[str]) -> str | None:
        said, unit = say(found), found[3]
        if not said or not unit:
            return said
        *forms, last = spoken.units[unit]
        forms = [form for form in [*forms, last] if form != "f"]
        if spoken.code in ("es", "it", "pt") and said in ("un medio", "un mezzo", "um meio"):
            said = said.partition(" ")[2]
        form = forms[1 if found[1] and len(forms) > 1 else 0]
        return form.format(said) if "{}" in form else f"{said}{'' if spoken.joined else ' '}{form}"

    def say(found: re.Match[str]) -> str | None:
        whole, written = found[1], VULGAR.get(found[2], found[2])
        top, bottom = (int(figure) for figure in written.split("/"))
        if not 0 < top < bottom <= 10 or gcd(top, bottom) > 1 or not part(top, bottom):
            return None
        if found[2] not in VULGAR and not whole and around.word_before(found) in _DATED:
            return keep(found[0])
        said = part(top, bottom)
        if not whole or not said:
            return said
        if (top, bottom) == (1, 2):
            said = _ONE_HALF.get(spoken.code, said)
        number = spoken.cardinal(whole)
        if spoken.code == "de" and (top, bottom) == (1, 2):
            return f"{spoken.before_noun(number, whole, 'm')}einhalb"
        return f"{number}{_AND[spoken.code]}{said}"

    yield rf"(?<![\w.,/:–-])(?:(\d{{1,2}}) ?)?([{single}]){unit}(?![\w/])", measured
    yield rf"(?<![\w.,/:–-])(?:(\d{{1,2}}) )?([1-9]/(?:10|[2-9])){unit}(?![{letters}/]|[.,]\d|-\d)", measured


def others(spoken: Spoken, around: Around) -> Rules:
    """Addresses of computers, scores and ratios, directions."""
    blank = spoken.around_dot
    dot = f"{blank}{spoken.dot}{blank}"

    def address(found: re.Match[str]) -> str | None:
        parts = found[0].split(".")
        said = spoken.digits if spoken.code == "en" else spoken.cardinal
        return (
            dot.join(map(said, parts))
            if all(part == "0" or (part[0] != "0" and int(part) < 256) for part in parts)
            else None
        )

    yield r"(?<![\w.,])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)", address

    def ratio(found: re.Match[str]) -> str:
        if spoken.code == "ru":
            if around.word_before(found) in _RUSSIAN_SCORE:
                return f"{spoken.cardinal(found[1])}-{spoken.cardinal(found[2])}"
            return f"{spoken.cardinal(found[1])} к {russian_number(found[2], 'd')}"
        return f"{spoken.cardinal(found[1])} {RATIO[spoken.code]} {spoken.cardinal(found[2])}".replace(" ", blank)

    yield r"(?<![\w.,:/-])(\d{1,3}):(\d|[1-9]\d{2})(?![\w:/]|-\d|[.,]\d)", ratio
    if spoken.code in _DIRECTIONS:
        words = [word.replace("_", " ") for word in _DIRECTIONS[spoken.code].split()]
        names = dict(zip("NSEW", words, strict=True)) | {"O": words[2] if spoken.code == "de" else words[3]}

        def toward(found: re.Match[str]) -> str | None:
            said = spoken.counted(spoken.value(found[1]), "°", "," if "," in found[1] else ".")
            return said and f"{said} {names[found[2]]}"

        yield rf"(?<![\w.,])({spoken.pattern}) ?° ?([NSEWO])(?!\w)", toward


# ---------------------------------------------------------------- Roman numerals

_CHAPTERS = {
    "en": "Chapter Part Volume Book Act Section Appendix Phase Type Stage Title Article Figure Table Annex War Bowl",
    "de": "Kapitel Teil Band Akt Abschnitt",
    "fr": "Chapitre chapitre Tome tome Partie Acte Livre",
    "es": "Capítulo capítulo Tomo tomo Parte Acto Libro",
    "it": "Capitolo capitolo Tomo Parte Atto Libro",
    "pt": "Capítulo capítulo Tomo Parte Ato Livro",
    "ru": "Глава глава Том Часть Акт",
}
_KINGS = {
    "en": "Henry Louis George Edward Charles William Richard James John Elizabeth Philip Pius Francis Frederick "
    "Napoleon Benedict Alexander Nicholas Peter Catherine Paul Leo Gregory Innocent Urban Clement Ferdinand Otto "
    "Mary Ramses",
    "de": "Ludwig Heinrich Friedrich Wilhelm Karl Otto Georg Philipp Franz Joseph Leopold Elisabeth Katharina Peter "
    "Nikolaus Alexander Papst Pius Benedikt Johannes Paul Gregor Leo Napoleon Maximilian Rudolf Konrad",
    "fr": "Louis Henri François Charles Philippe Napoléon Jean Pie Benoît Paul Grégoire Léon Élisabeth Catherine "
    "Guillaume Édouard Georges Frédéric Alexandre Nicolas Pierre",
    "es": "Felipe Alfonso Carlos Fernando Isabel Enrique Luis Juan Pío Benedicto Pablo Napoleón Jaime Pedro Sancho",
    "it": "Luigi Enrico Carlo Filippo Vittorio Umberto Pio Benedetto Paolo Giovanni Gregorio Leone Napoleone Federico "
    "Ferdinando Elisabetta Emanuele",
    "pt": "Luís Pedro João Afonso Filipe Manuel Carlos Henrique Pio Bento Paulo Napoleão Isabel Maria Sebastião",
    "ru": "Пётр Петр Николай Александр Павел Екатерина Елизавета Людовик Генрих Карл Фридрих Вильгельм Иван Наполеон",
}
_QUEENS = frozenset("Isabel Maria Elisabetta Elizabeth Екатерина Елизавета Élisabeth Elisabeth Katharina".split())
_ALL = {name for names in (*_CHAPTERS.values(), *_KINGS.values(), " ".join(RUSSIAN_KINGS)) for name in names.split()}
BEFORE_ROMAN = re.compile(rf"\b(?:{ends_of(' '.join(sorted(_ALL)))}) [IVXLC]|{MAY_BE_ROMAN}")
"""A text with this may be changed."""
_ROMAN = re.compile(r"(?=[IVXLC])(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")
_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}


def roman(spoken: Spoken, word: str, before: str) -> str | None:
    """The number after a king's name or "Chapter", without marks at its ends; None if it is none."""
    if spoken.code == "fr" and word in ("Ier", "Ire") and before in _KINGS["fr"].split():
        return "premier" if word == "Ier" else "première"
    if not _ROMAN.fullmatch(word) or word in ("C", "L") or spoken.joined:  # Appendix C
        return None
    values = [_VALUES[letter] for letter in word]
    number = sum(-a if a < b else a for a, b in zip(values, [*values[1:], 0], strict=True))
    if before in _CHAPTERS[spoken.code].split() and (before, word) not in (("War", "I"), ("Type", "V"), ("Type", "X")):
        return spoken.cardinal(str(number))
    if spoken.code == "ru" and before in RUSSIAN_KINGS:
        case, gender = RUSSIAN_KINGS[before]
        return spoken.ordinal(str(number), case=case, gender=gender)
    if before not in _KINGS[spoken.code].split() or (word == "I" and spoken.code == "en"):
        return None
    queen = before in _QUEENS
    if spoken.code == "fr":
        return ("première" if queen else "premier") if number == 1 else spoken.cardinal(str(number))
    if spoken.code in ("es", "pt") and number > 10:
        return spoken.cardinal(str(number))
    if spoken.code == "ru":
        return spoken.ordinal(str(number), **({"gender": "f"} if queen else {}))
    said = spoken.ordinal(str(number))
    if spoken.code == "en":
        return f"the {said}"
    if spoken.code == "de":
        return f"{'die' if queen else 'der'} {said[0].upper()}{said[1:]}"
    return re.sub("o$", "a", said) if queen else said
