"""Languages by name and by code: the one table for Python, the command line, Pipecat, HTTP and the WebSocket.

A language is known by its ISO 639-1 and 639-3 codes and its English names. The published ten, and others whose numbers
are read, stand in languages.toml. For the rest, which fine-tunes add, python-iso639 has the table of the standard's
registration authority.
"""

import functools
import re
from collections.abc import Mapping, Sequence

from spoken_text.errors import LanguageError
from spoken_text.tables import table_of

_TABLES = table_of("languages")
_SPELLINGS = {code: spellings.split() for code, spellings in (_TABLES["published"] | _TABLES["read"]).items()}
NAMES = {code: spellings[0] for code, spellings in _SPELLINGS.items()}
"""ISO 639-1 codes of the languages of the published checkpoints -> how `codec_language_id` names them; the same of
other languages whose numbers are read."""
PUBLISHED = tuple(NAMES[code] for code in _TABLES["published"])
"""Names of the published checkpoints' languages."""
_CODES = {name: code for code, name in NAMES.items()}


def primary_subtag(tag: str) -> str:
    """The language part of a BCP 47 tag, in lower case: "en" for "EN", "en-US" and "en_US"."""
    return re.split("[-_]", tag.lower())[0]


def find_language(asked: str, known: Sequence[str]) -> str:
    """The language that a caller means, as `known` spells it. `asked` is one of `known`, or another name of it, or its
    code, alone or with a region such as "en-US", in upper or lower case. Raises LanguageError: it is none of them."""
    if isinstance(asked, str):
        asked = str(asked)  # Pipecat's `Language` is a str with another repr
        table = spellings_of(tuple(known))
        for spelling in (asked.lower(), primary_subtag(asked)):
            if spelling in table:
                return table[spelling]
    raise LanguageError(f"unknown language {asked!r}; known: {listed(known)}")


@functools.lru_cache(64)
def spellings_of(known: tuple[str, ...]) -> Mapping[str, str]:
    """What a caller may write, in lower case -> the language as `known` spells it. Kept, because every request asks,
    and the first question about a language that is not published takes a third of a second."""
    table: dict[str, str] = {}
    for name in known:
        code = _code_of(name)
        if code and code in NAMES:
            table |= dict.fromkeys([code, *_SPELLINGS[code]], name)
        elif code:
            iso = _iso639()
            table |= dict.fromkeys([spelling for spelling, of in iso.items() if of == iso[code]], name)
    return table | {name.lower(): name for name in known}


def _code_of(name: str) -> str | None:
    """The ISO 639-1 code of a language of a checkpoint, else its ISO 639-3 code; None: "auto", a dialect, unknown."""
    if name in _CODES or name in NAMES:
        return _CODES.get(name, name)
    if name == "auto" or "dialect" in name:
        return None
    if not (code := _iso639().get(name.lower().replace("_", " "))):
        return None
    import iso639

    return iso639.Language.from_part3(code).part1 or code


@functools.cache
def _iso639() -> Mapping[str, str]:
    """Every code and English name, in lower case -> ISO 639-3 code. A name counts without what stands in brackets."""
    import iso639  # reads its tables at import, which takes a fifth of a second; the published languages need none

    table: dict[str, str] = {}
    for language in sorted(iso639.ALL_LANGUAGES, key=lambda language: not language.part1):
        codes = (language.part3, language.part1, language.part2b, language.part2t)
        names = [language.name, *(other.print for other in language.other_names or ())]
        for spelling in [*codes, *(re.sub(r" \(.*\)", "", name).lower() for name in names)]:
            if spelling:
                table.setdefault(spelling, language.part3)
    return table | _TABLES["also"]


def codes_of(known: Sequence[str]) -> list[str]:
    """The ISO 639 codes of the languages that have one, in the same order. "auto" and dialects have none."""
    return [code for name in known if (code := _code_of(name))]


def listed(known: Sequence[str]) -> str:
    """The names with their codes, for people: "auto, english (en)"."""
    return ", ".join(f"{name} ({code})" if (code := _code_of(name)) and code != name else name for name in known)
