"""Cases and genders of Russian nouns, by pymorphy3 if it is installed (`pip install spoken-text[russian]`)."""

from functools import cache, lru_cache
from importlib import import_module
from typing import Any

_CASES = {"nomn": "n", "gent": "g", "gen2": "g", "datv": "d", "accs": "a", "ablt": "i", "loct": "p", "loc2": "p"}
_GENDERS = {"masc": "m", "femn": "f", "neut": "n"}


@cache
def _analyzer() -> Any:
    """It takes 0.1 s to load, once. None: it is not installed."""
    try:
        return import_module("pymorphy3").MorphAnalyzer()
    except ModuleNotFoundError:
        return None


@lru_cache(maxsize=4096)
def readings(noun: str) -> frozenset[tuple[str, str, bool]]:
    """What a form of a noun may be: its case ("n", "g", "d", "a", "i", "p"), its gender ("m", "f", "n"), and whether it
    is a plural. The accusative of living beings that is like the genitive is "g". Empty if nothing is known."""
    analyzer = _analyzer()
    if analyzer is None or not analyzer.word_is_known(noun):
        return frozenset()
    found = set()
    for tag in (parse.tag for parse in analyzer.parse(noun)):
        if tag.POS != "NOUN" or tag.case not in _CASES:
            continue
        case, gender = _CASES[tag.case], _GENDERS.get(tag.gender, "m")
        if case == "a" and tag.animacy == "anim" and (gender == "m" or tag.number == "plur"):
            case = "g"
        found.add((case, gender, tag.number == "plur"))
    return frozenset(found)
