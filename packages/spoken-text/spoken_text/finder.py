"""The language that a text is in, so that its numbers can be read: by its script, then by statistics of letters.

A text in pieces is held back until its language is clear: to the end of its first clear sentence, for at most
`LONGEST_WAIT` characters. The language then holds for the whole text.
"""

import copy
import logging
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from spoken_text.languages import NAMES, PUBLISHED, codes_of
from spoken_text.normalize import NormalizerStream
from spoken_text.sentence import ends_sentence
from spoken_text.spoken import LANGUAGES, language_name

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

log = logging.getLogger(__name__)


class Clear(NamedTuple):
    """When a language counts as found."""

    least: float  # probability
    lead: float  # times the probability of the second


_FOREIGN = 0.7  # of all languages, another one is so probable
SURE, LIKELY = Clear(0.5, 2.0), Clear(0.3, 1.25)
"""At a sentence's end, and where no more text comes. Of 120 short sentences in six languages the first finds 98, one of
them wrongly, the second 106 and three. Of two languages, the first finds 92 %
(docs/log/2026-11-27.md#first-minute-typed)."""
LONGEST_WAIT = 120  # characters of spoken text that are held back at most
_MOST_SEEN = 2000  # characters that are looked at; the statistics take 4 ms for them

_LATIN = ("english", "french", "german", "italian", "portuguese", "spanish", "dutch")
_SCRIPTS = {
    "Kana": ("japanese",),
    "Hangul": ("korean",),
    "Han": ("chinese", "japanese"),
    "Cyrillic": ("russian",),
    "Latin": _LATIN,
}
"""Script -> the normalizer's languages that are written in it; of several that the statistics cannot tell, the likelier
first. Han stands for a text without kana."""
_LETTERS = (
    r"(?P<Kana>[\p{Hiragana}\p{Katakana}])|(?P<Hangul>\p{Hangul})|(?P<Han>\p{Han})|(?P<Cyrillic>\p{Cyrillic})"
    r"|(?P<Latin>\p{Latin})|(?P<other>\p{L})"
)
# Numbers with their units, addresses, names of programs:
_NO_WORDS = r"\p{N}+\p{Latin}*|\S*(?:[@/_\\]|\w\.\w)\S*"
_WIDE = 3  # a letter of East Asia says as much as so many others

_WIDE_ENDS = "。！？"  # behind these comes no blank

_loading = threading.Lock()


@dataclass(frozen=True)
class Candidates:
    """Attributes:
    names: of the normalizer's languages, those that a text may be in.
    others: ISO 639 codes of languages that the normalizer does not know. Numbers of such a text stay.
    """

    names: tuple[str, ...]
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, languages: Iterable[str] | None) -> "Candidates":
        """`languages`: names of those that a model knows; none: those of the published checkpoints. With Dutch among
        them, 10 of 1,041 short texts of the tests would not be found at their end, and one be called Dutch."""
        known = tuple(name for name in languages or () if name != "auto")
        return _candidates(known) if known else cls(tuple(name for name in LANGUAGES if name in PUBLISHED))


@lru_cache(64)  # each request has the same ones, and they take a tenth of its time before its prompt
def _candidates(known: tuple[str, ...]) -> Candidates:
    others = [name for name in known if language_name(name) not in LANGUAGES]
    names = {name: None for each in known if (name := language_name(each)) in LANGUAGES and name}
    return Candidates(tuple(names), tuple(codes_of(others)))


def load(candidates: Candidates) -> None:
    """Load what finding a language needs. It takes a second at its first call, and some 0.05 s of that hold the
    interpreter's lock. So call it before others wait, and in no event loop."""
    scripts_tell = len(candidates.others) + sum(name in _LATIN for name in candidates.names) < 2
    if not scripts_tell:
        with _loading:
            _statistics()


@cache
def _statistics(codes: frozenset[str] | None = None) -> "LanguageIdentifier":
    """Of the languages with these codes; None: of all. Call it under the lock."""
    if codes is not None:
        chosen = copy.copy(_statistics())
        chosen.set_languages(codes & {*chosen.labels})
        return chosen
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _is_foreign(words: str, candidates: Candidates) -> bool:
    """A text in a language that is no candidate looks like the nearest one."""
    with _loading:
        code, probability = _statistics().rank(words)[0]
    return probability >= _FOREIGN and code not in {*codes_of(candidates.names), *candidates.others}


def language_of(text: str, candidates: Candidates, clear: Clear = LIKELY) -> str | None:
    """The language of a text, as languages.py names it. None: not clear, or none of the candidates.

    Args:
        text: of any length; its beginning counts.
        clear: when a language counts as found.
    """
    import regex  # 20 ms, which a text whose language is named does not need

    words = regex.sub(_NO_WORDS, " ", text[:_MOST_SEEN])
    letters = Counter(found.lastgroup for found in regex.finditer(_LETTERS, words))
    if not letters:
        return None
    for wide in ("Kana", "Hangul", "Han"):
        letters[wide] *= _WIDE
    if letters["Kana"]:  # Japanese has both
        letters["Kana"] += letters.pop("Han")
    script = letters.most_common(1)[0][0]
    names = [name for name in _SCRIPTS.get(script or "", ()) if name in candidates.names]
    if not names or not candidates.others and (len(names) == 1 or script != "Latin"):
        return names[0] if names else None
    if script == "Latin" and _is_foreign(words, candidates):
        return None
    with _loading:
        statistics = _statistics(frozenset([*codes_of(names), *candidates.others]))
    ranked = [*statistics.rank(words), ("", 0.0)]  # which may know but one of them
    found, probability, second = NAMES.get(ranked[0][0]), ranked[0][1], ranked[1][1]
    return found if found in names and probability >= max(clear.least, clear.lead * second) else None


class Conversation:
    """What several texts of one caller share.

    Attributes:
        language: the one that was found last. A text whose own cannot be found, such as "5.", is in this one.
        told: a warning has said that numbers stay.
    """

    def __init__(self) -> None:
        self.language: str | None = None
        self.told = False


class LanguageFinder:
    """Finds the language of a text in pieces. It sees characters one by one, so cuts cannot matter.

    Attributes:
        language: once it is found.
        decided: it is found, or it was looked for in vain for too long.
    """

    def __init__(self, candidates: Candidates, conversation: Conversation | None = None):
        self._candidates = candidates
        self._conversation = conversation or Conversation()
        self._shown = NormalizerStream(None, reads_aloud=False)  # Markdown, code and thoughts tell no language
        self._seen = ""
        self.language: str | None = None
        self.decided = False

    def push(self, text: str) -> None:
        """Take the next piece, which is nothing but text."""
        for character in text:
            if self.decided:
                return
            if shown := self._shown.push(character):
                self._see(shown)

    def pause(self) -> None:
        """A pause comes here: what is before it may be clear."""
        if not self.decided:
            self._see(self._shown.settle() + " ")
        if not self.decided:
            self._decide(SURE)

    def settle(self, needed: bool) -> str | None:
        """The text so far must be spoken now, and it has numbers or the like if its language is `needed`. Returns the
        language; None: numbers stay, and a warning says so once if it is needed."""
        if not self.decided:
            self._see(self._shown.settle() + "\n")
        if needed and not self.decided and not self._decide(LIKELY):
            self._tell()
        return self.language

    def _see(self, shown: str) -> None:
        """Take text that is spoken. Decide at a sentence's end if its language is clear."""
        for character in shown:
            ended = character.isspace() and ends_sentence(self._seen)
            self._seen += character
            if (ended or character in _WIDE_ENDS) and self._decide(SURE):
                return
            if len(self._seen) >= LONGEST_WAIT:
                if not self._decide(LIKELY):
                    self._tell()
                self.decided = True
                return

    def _decide(self, clear: Clear) -> bool:
        found = language_of(self._seen, self._candidates, clear)
        if found is None and clear is LIKELY:
            found = self._conversation.language
        if found:
            self.language = self._conversation.language = found
            self.decided = True
        return self.decided

    def _tell(self) -> None:
        if not self._conversation.told:
            self._conversation.told = True
            log.warning(
                "the text's language cannot be found, so numbers stay as they are written, and no entry of a lexicon "
                "for one language is used. Name the language, one of: %s",
                ", ".join(self._candidates.names) or "none; the normalizer knows no language of this model",
            )


@cache
def tell_unread(language: str) -> None:
    """Warn, once for each language, that its numbers are not read."""
    log.warning(
        "normalize='auto' reads no numbers in %r: they stay as they are written. It reads %s",
        language,
        ", ".join(LANGUAGES),
    )


def sole(languages: Iterable[str] | None) -> str | None:
    """The language of a model that has only one."""
    known = [name for name in languages or () if name != "auto"]
    return known[0] if len(known) == 1 else None
