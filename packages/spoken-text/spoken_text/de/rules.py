"""What only German writes: abbreviations before numbers, endings of ordinals, genders behind 1 and 1/2."""

import re
from math import gcd

from spoken_text.rule import Around, Kept, Rules, ends_of, keep
from spoken_text.signs import SEASON, rates, season
from spoken_text.spoken import Spoken

_BEFORE = (
    "Nr Nummer, Nrn Nummern, S Seite, Abs Absatz, Art Artikel, Kap Kapitel, Abb Abbildung, Tab Tabelle, Bd Band, Ziff "
    "Ziffer, Rn Randnummer, Rdnr Randnummer, Anm Anmerkung, ca circa, Ca Circa, Jg Jahrgang, § Paragraf, §§ Paragrafen"
)
_LONG = dict(row.split() for row in _BEFORE.split(", "))
OPENERS = frozenset(["Fr."] + [f"{name}." for name in _LONG if name[0] != "§"] + ["§", "§§"])
"""Words that wait for the number behind them."""
FOLLOWERS = frozenset("Euro Dollar Franken Pfund %ig %ige %igen %iger %iges".split())

E = frozenset("der die das diese dieser dieses jede jeder jedes eine keine meine deine seine ihre unsere eure".split())
"""After these an ordinal ends in -e, unless a preposition says otherwise."""
_ENDS_N = re.compile(r"(?:(?:k|m|d|s)?ein|ihr|unser|eur|jed|dies|jen|manch)(?:em|en|es|er)")
_BEFORE_NOUN = frozenset("am im vom zum zur beim ins ans dem den des bis ab".split())
_BEFORE_DAY = _BEFORE_NOUN | frozenset("seit nach vor von zwischen gegen und oder sowie bzw".split())
_DATIVE = frozenset(
    "in mit bei nach von zu seit aus an auf vor unter über hinter neben während wegen trotz statt anhand innerhalb "
    "außerhalb laut nebst samt ab gegenüber aufgrund anlässlich bezüglich hinsichtlich zwischen".split()
)
_GENITIVE = frozenset(
    "Ende Anfang Mitte Beginn Laufe Verlauf Rahmen Sieger Teil Abschluss Start Auftakt Hälfte Opfer Zeit Zeiten "
    "Soldaten Aufstieg Meister".split()
)
_GENDERS = {
    "m": "Versuch Platz Tag Sieg Titel Geburtstag Teil Schritt Band Stock Rang Satz Punkt Preis Sohn Mann Monat "
    "Termin Weltkrieg Spieltag Anlauf Grund Artikel Zug Auftritt Jahrestag Lauf Gang Akt Fall Durchgang Wahlgang Film "
    "Roman Abschnitt Apfel Becher Bund Kopf Schuss Spritzer Würfel Liter Esslöffel Teelöffel Löffel Cent Euro Dollar "
    "Franken FC Mensch Meter Kilometer Fehler Treffer Gast Kunde Platz Tropfen Zweig Stern Bus Wagen Hund Spieler "
    "Gegentreffer Sitz Klick",
    "f": "Linie Liga Klasse Etage Bundesliga Runde Hälfte Halbzeit Auflage Minute Woche Stunde Ausgabe Phase Stufe "
    "Frage Person Reihe Chance Generation Staffel Folge Ehe Tochter Frau Stelle Seite Schicht Lesung Welle Impfung "
    "Instanz Sekunde Saison Tasse Tablette Prise Dose Flasche Packung Zwiebel Zehe Knoblauchzehe Zitrone Orange "
    "Tomate Banane Kartoffel Karotte Möhre Paprika Messerspitze Scheibe Handvoll Portion Tüte Schale Stange Nacht "
    "Million Milliarde Nachricht Stimme Katze Mannschaft Gurke Kugel Bundesliga Bewertung Antwort Übernachtung",
    "n": "Tor Auto Kind Mal Jahr Buch Spiel Album Semester Quartal Kapitel Jahrhundert Jahrtausend OG UG Obergeschoss "
    "Untergeschoss Lebensjahr Stockwerk Halbjahr Haus Treffen Rennen Turnier Mitglied Team Beispiel Ergebnis Gesetz "
    "Zimmer Ei Glas Päckchen Stück Blatt Brötchen Kilo Pfund Gramm Kilogramm Dutzend Bild Foto Bett Ticket Wort "
    "Prozent Grad Bier Brot Viertel Drittel Eigelb Eiweiß Lorbeerblatt Paar Zehntel",
}
_GENDER = {noun: gender for gender, nouns in _GENDERS.items() for noun in nouns.split()}
_STRONG = {"m": "r", "f": "", "n": "s"}
_COPULAS = frozenset("ist war bleibt fehlt und oder plus".split())
_JOINED = (
    "jährig|Jährig|köpfig|tägig|stündig|minütig|monatig|wöchig|malig|stellig|seitig|prozentig|stöckig|teilig|türig|"
    "bändig|fach|mal(?![a-zäöü])"
)
_PER = (
    "kg Kilogramm, g Gramm, h Stunde, Std. Stunde, Stunde Stunde, min Minute, Minute Minute, s Sekunde, Tag Tag, "
    "Woche Woche, Monat Monat, Mon. Monat, Jahr Jahr, Nacht Nacht, Person Person, Stück Stück, Stk. Stück, l Liter, "
    "Liter Liter, km Kilometer, m² Quadratmeter, km² Quadratkilometer, m³ Kubikmeter, kWh Kilowattstunde, MWh "
    "Megawattstunde, t Tonne, Tonne Tonne"
)
_RATES = dict(row.split() for row in _PER.split(", "))
_CITIES = frozenset(
    "Berlin Hamburg München Köln Frankfurt Stuttgart Düsseldorf Leipzig Dortmund Essen Bremen Dresden Hannover "
    "Nürnberg Duisburg Bochum Wuppertal Bielefeld Bonn Münster Mannheim Karlsruhe Augsburg Wiesbaden Aachen Kiel "
    "Freiburg Mainz Potsdam Heidelberg Rostock Erfurt Kassel Magdeburg Halle Lübeck".split()
)
_CAPITAL_STARTS = frozenset("Dass Wenn Weil Als Ob Ist War Wird Hat Und Aber Wie Da Sind Denn".split())


_STARTERS = frozenset(
    "Dann Danach Da Er Sie Es Wir Ich Das Die Der Am Im In Und Aber Doch Bis Bitte Wer Was Wie Wann Wo Vielen Danke "
    "Ihr Man Alle Ein Eine Diese Dieser Dieses Auch Nach Vor Seit Heute Morgen Gestern Jetzt Wenn Als Ob Kein Keine "
    "Mit Für Von Zum Zur Nun So Hier Dort Dies Den Dem Oder Weil Ist Hat Kann Können Sonst Trotzdem Ab Um Bei Unser "
    "Unsere".split()
)
_CITIES_OF_FOUR = frozenset("Wien Graz Linz Salzburg Innsbruck Zürich Bern Basel Genf Luzern".split())
_LABELS = frozenset(
    "Absatz Satz Artikel Kapitel Seite Seiten Nummer Nummern Teil Teile Band Bände Klasse Klassen Stufe Stufen Platz "
    "Plätze Gruppe Abschnitt Abschnitte Punkt Punkte Schritt Schritte Zeile Zeilen Spalte Tag Gleis Zimmer Linie Raum "
    "Haus Phase Variante Version Rang Aufgabe Aufgaben Frage Fragen Bild Abbildung Tabelle Formel Etage Block Runde "
    "Spiel Level Woche Typ Folge Folgen Paragraf".split()
)
_TIMES = frozenset("Stunde Minute Sekunde Woche Tag Monat Jahr Jahrhundert Nacht Mal".split())
_HEADED = frozenset(
    "Jahrhundert Jahrtausend OG UG Obergeschoss Untergeschoss Halbjahr Quartal Bundesliga Auflage FC Weltkrieg "
    "Halbzeit Spieltag Etage Stock Lebensjahr Liga Jahrestag Geburtstag".split()
)


def end_of_ordinal(around: Around, found: re.Match[str], noun: str = "") -> str | None:
    """What an ordinal ends with behind "-e": "", "n", "r" or "s". None: the words around do not say. `noun`: the word
    behind, or empty for a day of a month."""
    ahead = found.string[: found.start()].split()
    before, earlier = ([around.earlier, around.before, *ahead])[-1:-3:-1]
    before, earlier = before.strip("\"'([„"), earlier.strip("\"'([„")
    low = before.lower()
    if low == "der" and noun:
        genitive = earlier in _GENITIVE or (
            earlier[:1].isupper() and earlier.isalpha() and earlier not in _CAPITAL_STARTS and _GENDER.get(noun) == "f"
        )
        return "n" if earlier.lower() in _DATIVE or genitive else ""
    if low in E:
        return "" if low not in ("dieser", "jeder") or earlier.lower() not in _DATIVE else "n"
    if (low in _BEFORE_NOUN if noun else low in _BEFORE_DAY) or _ENDS_N.fullmatch(low):
        return "n"
    if noun:
        gender = _GENDER.get(noun)
        if gender and low in _DATIVE:  # in zweiter Auflage
            return "r" if gender == "f" else "m"
        if low == "als" and noun.endswith("er"):
            return "r"
        alone = before[-1:] in ",:(" or re.fullmatch("(?:(?:k|m|d|s)?ein|ihr|unser|euer|als)", low)
        return _STRONG[gender] if gender and alone else None
    is_named = before.endswith(",") and earlier.lower() in ("am", "vom", "ab", "bis", "seit", "den", "dem", "zum")
    return "n" if is_named else "r"


def first(spoken: Spoken, around: Around) -> Rules:
    """What no other rule may take apart."""
    names = ends_of(" ".join(name for name in _LONG if name[0] != "§"))

    def long(found: re.Match[str]) -> str | None:
        name = found[2]
        if name == "S" and around.before.isdecimal():
            return f"{found[1]}Satz "
        return f"{found[1]}{_LONG[name]} "

    yield rf"^([(\[\"„]?)({names})\. ?(?=\d)", long
    yield r"(?:^|(?<=[(\[ ]))(§§?) ?(?=\d)", lambda f: f"{_LONG[f[1]]} "
    months = "|".join(spoken.months)
    days = rf"(?<![\w.])(\d\d?)\. ?(bis|und|oder|sowie|[-–/]) ?(\d\d?)\. ?(?=(?:{months})\b)"

    def two(found: re.Match[str]) -> str:
        end, between = end_of_ordinal(around, found), "bis" if found[2] in "-–" else found[2].replace("/", "und")
        return f"{spoken.ordinal(found[1])}{end} {between} {spoken.ordinal(found[3])}{end} "

    yield days, two

    def listed(found: re.Match[str]) -> str | None:
        end = end_of_ordinal(around, found, "?")
        return None if end is None else f"{spoken.ordinal(found[1])}{end}"

    yield r"(?<![\w.,:])(\d{1,3})\.(?=,)", listed

    def joined(found: re.Match[str]) -> str:
        return f"{_one(spoken, found[1])}{found[2].lower()}"

    yield rf"(?<![\w.,])(\d{{1,4}})-?((?:{_JOINED})\w*)", joined
    yield r"(?<![\w.,-])(\d{1,3})x(?![\w/*+=-]| [-+=*/])", lambda f: f"{_one(spoken, f[1])}mal"
    yield r"(?<![\w.,])(\d+(?:,\d+)?) ?%-?(ig\w{0,2})", lambda f: f"{_said(spoken, f[1])}prozent{f[2]}"
    year = r"(?<![\w.,])((?:1[1-9]|20)\d0)er(?![a-zäöü])"
    yield year, lambda f: f"{spoken.year(f[1])}er"

    def clock(found: re.Match[str]) -> str | None:
        return spoken.at_time(found[1], found[2]) if around.word_before(found) in ("um", "ab", "gegen", "bis") else None

    yield r"(?<![\w.,:-])(1?\d|2[0-4])h([0-5]\d)(?!\w)", clock
    coins = r"(?<![\w.,-])(\d{1,6}|\d{1,3}(?:\.\d{3})+),(\d\d) (Euro|Dollar|Franken|Pfund)(?!\w)"
    codes = {"Euro": "EUR", "Dollar": "USD", "Franken": "CHF", "Pfund": "GBP"}
    yield coins, lambda f: spoken.money(f"{f[1].replace('.', '')}.{f[2]}", codes[f[3]])
    equal = r"(?<![\w.,/])(50/50|24/7|9/11)(?![\w/]|[.,]\d)"
    yield equal, lambda f: " ".join(map(spoken.cardinal, f[1].split("/")))
    yield SEASON, lambda f: season(spoken, f)

    def post(found: re.Match[str]) -> str | None:
        city = around.after.rstrip(",.;)")
        is_code = city in (_CITIES if len(found[1]) == 5 else _CITIES_OF_FOUR) or found[0][0] == "D"
        return spoken.digits(found[1]) if is_code else None

    yield r"^(?:D-)?(\d{4,5})(?![\w-]|[.,]\d)", post
    yield r"(?<=\d)[,.][-–—]{1,2}(?= ?€| EUR| Euro|$|[.,;)])", lambda f: ""
    yield r"^Fr\. (?=\d)", lambda f: "CHF "

    def starts(found: re.Match[str]) -> str | None:
        sure = around.after == "bis" and around.before.lower() in ("von", "zwischen", "ab")
        return spoken.at_time(found[1], found[2]) if sure else None

    yield r"^(\d\d?)\.([0-5]\d)$", starts
    short = r"(?<![\w.])(\d\d?)\.(\d\d?)\.(\d\d)(?![\w.]|[,/]\d)"

    def short_date(found: re.Match[str]) -> str | None:
        sure = around.word_before(found) in _BEFORE_DAY or found[0][0] + found[2][0] in ("00", "01", "10", "20", "30")
        if not (sure and 1 <= int(found[1]) <= 31 and 1 <= int(found[2]) <= 12):
            return None
        year = ("20" if found[3] < "40" else "19") + found[3]
        return spoken.on_date(year, int(found[2]), found[1], end_of_ordinal(around, found) or "")

    yield short, short_date
    yield r"(?<=\d\.)[-–](?=\d\d?\.\d\d?\.)", lambda f: " bis "
    yield r"(?<![\w.,])((?:(?:1[1-9]|20)\d|\d)0)ern\b", lambda f: f"{spoken.year(f[1])}ern"
    phones = (
        r"(?<![\w.,:/-])(?:\(0\d{1,5}\) ?\d{2,9}(?:[ -]\d{1,9}){0,5}|0\d{1,5}/\d{2,9}(?:[ -]\d{1,9}){1,5})(?!\w|[.,]\d)"
    )
    yield phones, lambda f: ", ".join(map(spoken.digits, re.findall(r"\d+", f[0])))
    part = r"(?<![\w.,/:–-])(?:(\d{1,2}) )?([1-9]\d?)/(7|9|1[1-9]|[2-9]0|100|1000)(?![\w/]|[.,]\d|-\d)"
    yield part, lambda f: _part(spoken, around.before, f)
    yield from rates(spoken, _RATES, "pro")
    issue = r"(?<![\w.,/:–-])(\d{1,2})/((?:19|20)\d\d)(?![\w/]|[.,]\d)"
    yield issue, lambda f: f"{spoken.cardinal(str(int(f[1])))} {spoken.year(f[2])}"
    pressure = r"(?<![\w.,/:–-])(\d{2,3})/(\d{2,3})(?![\w/]|[.,]\d)"

    def over(found: re.Match[str]) -> str | None:
        sure = around.word_before(found) == "blutdruck" or around.word_after(found) == "mmHg"
        return f"{spoken.cardinal(found[1])} zu {spoken.cardinal(found[2])}" if sure else None

    yield pressure, over
    beats = {"4": "Vierteltakt", "8": "Achteltakt"}
    yield r"(?<![\w.,/])(\d\d?)/([48])-?[Tt]akt", lambda f: f"{spoken.cardinal(f[1])} {beats[f[2]]}"
    yield r"(?<![\w.,])1(?=-[A-ZÄÖÜ]\w{1,40}-)", lambda f: "ein"
    signs = {"€": "Euro", "$": "Dollar", "£": "Pfund"}
    yield r"(?<=\d)-([€$£])(?=-[A-ZÄÖÜ])", lambda f: f"-{signs[f[1]]}"
    short_units = ends_of(" ".join(name for name, forms in spoken.units.items() if name.isalpha() and len(forms) > 1))
    yield rf"(?<=\d)-({short_units})(?=-[A-ZÄÖÜ])", lambda f: f"-{spoken.units[f[1]][0]}"
    yield r"^(\d\d?) x$", lambda f: f"{_one(spoken, f[1])}mal" if around.after[:1].islower() else None
    few = r"^1 ?[-–] ?(?=(\d{1,2})(?:$| ))"

    def from_one(found: re.Match[str]) -> str | None:
        counts = around.after[:1].isupper() or " " in found.string[found.end() :]
        return "ein bis " if counts and around.before not in _LABELS else None

    yield few, from_one

    def one(found: re.Match[str]) -> str | None:
        gender, before = _GENDER.get(around.after.strip("\"'()[].,;:!?")), around.word_before(found)
        if not gender or around.before in _LABELS:
            return None  # Absatz 1 Satz 2
        if before in _DATIVE:
            noun = around.after.strip("\"'()[].,;:!?")
            if before in ("in", "auf", "vor", "an", "über", "unter", "hinter", "neben") and noun not in _TIMES:
                return None
            return {"m": "einem", "f": "einer", "n": "einem"}[gender]
        if gender != "m":
            return {"f": "eine", "n": "ein"}[gender]
        names = not before or around.before[-1] in ".,:;!?(" or before in _COPULAS
        return "ein" if names else "einen" if before in ("für", "um", "durch", "ohne", "gegen") else keep(found[0])

    yield r"^1$", one
    unit = r"^1 (Stunde|Minute|Sekunde)$"
    yield unit, lambda f: f"einer {f[1]}" if around.before.lower() in _DATIVE else None

    def half(found: re.Match[str]) -> str | None:
        noun, before = around.after.strip("\"'()[].,;:!?"), around.word_before(found)
        name = {"l": "Liter", "TL": "Teelöffel", "EL": "Esslöffel"}.get(found[1], found[1])
        gender = _GENDER.get(name or noun)
        behind = f" {name}" if name else ""
        if gender == "f" and before not in _DATIVE | {"der", "einer"}:
            return f"eine halbe{behind}"
        if gender == "n" and not before:
            return f"ein halbes{behind}"
        names = not before or around.before[-1] in ".,:;!?("
        return f"ein halber{behind}" if gender == "m" and names else None

    yield r"^(?:1/2|½)(?: (Liter|Stunde|Minute|Kilometer|Meter|l|TL|EL))?$", half


def last(spoken: Spoken, around: Around) -> Rules:
    """Rates, once their amounts are words."""
    units = ends_of(" ".join(name for name in spoken.units if name != "%"))
    yield rf"(?<=(?:illionen|lliarden) )({units})$", lambda f: spoken.units[f[1]][1]
    per = ends_of(" ".join(_RATES))
    yield rf"(?<=[a-z]{{3}})/(\d{{1,4}} )?({per})(?![\w²³])", lambda f: f" pro {f[1] or ''}{_RATES[f[2]]}"


def headed(spoken: Spoken, around: Around) -> Rules:
    """19. Jahrhundert at the beginning of a line is no item of a list."""
    nouns = "|".join(sorted(_HEADED))

    def say(found: re.Match[str]) -> str | None:
        return f"{spoken.ordinal(found[1])}{_STRONG[_GENDER[found[2]]]}" if around.begins else None

    yield rf"^(\d{{1,3}})\.(?= ({nouns})\b)", say


def ordinals(spoken: Spoken, around: Around) -> Rules:
    """The 2. Platz: its article, or its noun, tells its ending."""

    last = ""  # ending of the ordinal before

    def say(found: re.Match[str]) -> str | Kept | None:
        nonlocal last
        noun = (found.string[found.end() :].split() or [around.after])[0].strip("\"'()[].,;:!?“")
        if re.search(r"\d\. (?:und|oder|bis|sowie) $", found.string[: found.start()]):
            return f"{spoken.ordinal(found[1])}{last}"
        end = end_of_ordinal(around, found, noun or "?")
        if noun in _STARTERS:  # am 5. Dann: the full stop is the sentence's, too
            return None if end is None else f"{spoken.ordinal(found[1])}{end}."
        last = end or ("n" if noun[:1].islower() else "")
        if around.word_before(found) in ("wurde", "wird", "werde", "wurden"):  # er wurde 2. im Lauf
            of = {"er": "r", "sie": ""}.get(around.earlier.lower())
            return keep(found[0]) if of is None else f"{spoken.ordinal(found[1]).capitalize()}{of}"
        if end is None and noun[:1].islower():
            return f"{spoken.ordinal(found[1])}n" if not around.before[-1:].isdecimal() else None
        if end is None:
            article = around.word_before(found)
            return keep(found[0]) if re.fullmatch("(?:(?:k|m|d|s)?ein|ihr|unser|euer)", article) else None
        return f"{spoken.ordinal(found[1])}{end}"

    def both(found: re.Match[str]) -> str | None:
        noun = (found.string[found.end() :].split() or [around.after])[0].strip("\"'()[].,;:!?“")
        end = end_of_ordinal(around, found, noun)
        return None if end is None else f"{spoken.ordinal(found[1])}{end} und {spoken.ordinal(found[2])}{end}"

    yield r"(?<![\w.,:/])(\d{1,3})\./(\d{1,3})\.(?= \w)", both
    yield r"(?<![\w.,:])(\d{1,3})\.(?= \w)", say

    def at_end(found: re.Match[str]) -> str | None:
        if around.after or around.word_before(found) not in ("der", "den", "dem", "am", "vom", "zum", "des"):
            return None
        return f"{spoken.ordinal(found[1])}{end_of_ordinal(around, found, '?')}."

    yield r"(?<![\w.,:])([1-9]|[12]\d|3[01])\.(?=$|[\"“)])", at_end


def years(spoken: Spoken, around: Around) -> Rules:
    """German says 1989 as nineteen hundreds also where it is no year."""
    yield r"(?<![\w.,:/-])(1[1-9]\d\d)(?![\w%]|[.,]\d|[:/-]\d| ?[$€£°])", lambda f: spoken.year(f[1])


def _part(spoken: Spoken, before: str, found: re.Match[str]) -> str | None:
    """1/7, 3/20, 2 1/16."""
    top, bottom = int(found[2]), int(found[3])
    if top >= bottom or gcd(top, bottom) > 1 or not (top == 1 or bottom in (7, 9, 16, 100, 1000)) or before.isupper():
        return None
    said = re.sub("^ein(?=hundert|tausend)", "", spoken.cardinal(found[3]))
    name = "siebtel" if bottom == 7 else said + ("tel" if bottom < 20 else "stel")
    whole = f"{spoken.cardinal(found[1])} " if found[1] else ""
    return f"{whole}{_one(spoken, found[2])} {name.capitalize()}"


def _one(spoken: Spoken, written: str) -> str:
    return re.sub("eins$", "ein", spoken.cardinal(written))


def _said(spoken: Spoken, written: str) -> str:
    return spoken.cardinal(spoken.value(written))
