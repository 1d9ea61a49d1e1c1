"""A lexicon: words that a model misreads, with spellings that it reads correctly."""

import csv
import errno
import io
import json
import re
import reprlib
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from spoken_text.errors import TextError
from spoken_text.files import read_file
from spoken_text.spoken import language_name
from spoken_text.stage import Stage, check_text, is_cjk

MOST_BYTES, MOST_ENTRIES, LONGEST_ENTRY, LONGEST_SPELLING = 1_000_000, 10_000, 100, 500

_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"(\s*+:)?')  # a key if there is a colon

_RUNS = re.compile(r"\w+", re.ASCII)

_Row = tuple[int, str, object, object]  # line, language or "", word, spelling


class _Table(NamedTuple):
    entries: dict[str, str]  # word -> spelling
    words: list[str]  # sorted
    lengths: list[int]  # the words' lengths, the longest first
    first_runs: set[str]  # of letters and digits in each word, in lower case; of words in ASCII


class Lexicon:
    """Words and their spellings, for all languages or for one.

    A word in lower case matches in any case: "sql" matches "SQL" too. A word with a capital letter matches only
    exactly. If two match, the longest wins, then the exact one, then the language's own.

    Only whole words match: no letter, digit, "_" or combining mark is next to them. Chinese and Japanese letters are an
    exception, because these languages have no blanks: a word may be next to them.
    """

    def __init__(self, entries: Mapping[str, str], by_language: Mapping[str, Mapping[str, str]] | None = None):
        """
        Args:
            entries: word -> spelling, for all languages. An empty spelling leaves the word out.
            by_language: name or code of a language -> its entries.

        Raises:
            TextError: an entry is not text, is empty or too long; too many entries; an unknown language.
        """
        self._entries = _checked(_given_rows(entries, {} if by_language is None else by_language), "lexicon")
        self._tables: dict[str, _Table] = {}  # by language

    @classmethod
    def load(cls, path: str | Path) -> "Lexicon":
        """Load a file in UTF-8. `.json`: an object of words and spellings. If a value is an object, its key is a
        language and it holds that language's entries. `.csv`: columns word, spelling and optionally language, with
        these names in the first row. Raises TextError: the file is missing, too large or broken, or an entry is
        refused. The message has the line."""
        readers = {".json": _json_rows, ".csv": _csv_rows}
        ending = Path(path).suffix.lower() if isinstance(path, (str, Path)) else type(path).__name__
        if ending not in readers:
            raise TextError(f"{path}: a lexicon is a .json or a .csv file, got {ending or 'no suffix'!r}")
        text = lexicon_text(path).removeprefix("\ufeff")
        lexicon = cls({})
        lexicon._entries = _checked(readers[ending](text, str(path)), str(path))
        return lexicon

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def apply(self, text: str, language: str | None = None) -> str:
        """The text with words replaced by their spellings. Spellings are not looked up again. Raises TextError: it is
        no string. LanguageError: the same of `language`."""
        check_text(text)
        stream = self.stream(language)
        return stream.push(text) + stream.finish()

    def may_change(self, text: str, language: str | None = None) -> bool:
        """May a word of the text be an entry? A quick check, and exact enough to say no to most sentences in ASCII.
        Raises as `apply`."""
        check_text(text)
        if not text.isascii():
            return True
        return not self._table(language).first_runs.isdisjoint(_RUNS.findall(text.lower()))

    @property
    def has_languages(self) -> bool:
        """Some entries belong to one language."""
        return any(self._entries)

    def stream(self, language: str | None = None) -> "LexiconStream":
        """A stream for one text in pieces."""
        return LexiconStream(self._table(language))

    def _table(self, language: str | None) -> "_Table":
        name = language_name(language) or ""
        if name not in self._tables:
            entries = self._entries.get("", {}) | self._entries.get(name, {})
            lengths = sorted(set(map(len, entries)), reverse=True)
            runs = {_RUNS.findall(word.lower())[0] for word in entries if word.isascii()}
            self._tables[name] = _Table(entries, sorted(entries), lengths, runs)
        return self._tables[name]


def lexicon_text(path: str | Path) -> str:
    """What a lexicon's file holds. Raises TextError: it cannot be read, is too large, or is not in UTF-8."""
    try:
        return read_file(path, "a lexicon", MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            most = f"a lexicon may have at most {MOST_BYTES:,} bytes"
            raise TextError(f"{path}: {most}; split it by language or shorten it") from None
        why = getattr(error, "strerror", None) or error
        raise TextError(
            f"{path}: a lexicon must be a readable file in UTF-8: {why}; name a .json or .csv file"
        ) from None


class LexiconStream(Stage):
    """A lexicon for a text in pieces. However the text is cut, the joined results are the same as for the whole text.

    It holds back only a possible beginning of an entry, and the character behind an entry.
    """

    def __init__(self, table: "_Table"):
        self._table = table
        self._last = " "  # the character before the held text

    def feed(self, character: str) -> str:
        self._held += character
        return self._settle(ended=False)

    def end(self) -> str:
        """End the text, and return what was held back. Another text may then begin."""
        given = self._settle(ended=True)
        self._last = " "
        return given

    finish = end

    def _settle(self, ended: bool) -> str:
        given = []
        while self._held:
            held = self._held
            length, said = 1, held[0]
            if _is_border(self._last, held[0]):
                forms = {held, _lower(held)}
                if not ended and (any(map(self._begins_entry, forms)) or self._spelling(held) is not None):
                    break
                length, said = self._longest(held) or (length, said)
            given.append(said)
            self._last = held[length - 1]
            self._held = held[length:]
        return "".join(given)

    def _longest(self, text: str) -> tuple[int, str] | None:
        """Length and spelling of the longest entry at the beginning of the text."""
        for length in self._table.lengths:
            if length <= len(text) and (length == len(text) or _is_border(text[length - 1], text[length])):
                spelling = self._spelling(text[:length])
                if spelling is not None:
                    return length, spelling
        return None

    def _spelling(self, word: str) -> str | None:
        entries = self._table.entries
        exact = entries.get(word)
        return exact if exact is not None else entries.get(_lower(word))

    def _begins_entry(self, text: str) -> bool:
        """Does a longer entry begin with this text?"""
        words = self._table.words
        place = bisect_right(words, text)  # behind the text itself, if it is an entry
        return place < len(words) and words[place].startswith(text)


def _lower(text: str) -> str:
    """The text in lower case, with as many characters as before."""
    return "".join(small if len(small := character.lower()) == 1 else character for character in text)


def _is_border(left: str, right: str) -> bool:
    """Can a word end or begin between these two characters?"""
    return not (_in_word(left) and _in_word(right)) or is_cjk(left) or is_cjk(right)


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_" or unicodedata.category(character)[0] == "M"


def _checked(rows: Iterable[_Row], where: str) -> dict[str, dict[str, str]]:
    """Language's name ("" for all) -> word -> spelling."""
    entries: dict[str, dict[str, str]] = {}
    for count, (line, language, word, spelling) in enumerate(rows, 1):
        at = f"{where}, line {line}" if line else where
        if count > MOST_ENTRIES:
            most = f"a lexicon may have at most {MOST_ENTRIES:,} entries"
            raise TextError(f"{at}: {most}; split it by language or shorten it")
        if not isinstance(word, str) or not isinstance(spelling, str):
            got = f"{reprlib.repr(word)} and {reprlib.repr(spelling)}"
            raise TextError(f"{at}: word and spelling must be text, got {got}")
        name = language_name(language)
        if language and not name:
            unknown = f"unknown language {reprlib.repr(language)}"
            raise TextError(f"{at}: {unknown}; write a name such as english, or a code such as en")
        word, spelling = " ".join(unicodedata.normalize("NFC", word).split()), " ".join(spelling.split())
        if not 1 <= len(word) <= LONGEST_ENTRY or len(spelling) > LONGEST_SPELLING:
            most = f"a word has 1 to {LONGEST_ENTRY} characters and its spelling at most {LONGEST_SPELLING}"
            raise TextError(f"{at}: {most}, got {len(word)} and {len(spelling)}")
        if not (_in_word(word[0]) or _in_word(word[-1])):
            raise TextError(f"{at}: a word must begin or end with a letter or a digit, got {word!r}")
        if word in entries.setdefault(name or "", {}):
            raise TextError(f"{at}: the word {word!r} is there twice; keep one of the entries")
        entries[name or ""][word] = spelling
    return entries


def _given_rows(entries: object, by_language: object) -> Iterator[_Row]:
    """Rows of what a caller gave."""
    if not isinstance(entries, Mapping) or not isinstance(by_language, Mapping):
        got = f"{type(entries).__name__} and {type(by_language).__name__}"
        raise TextError(f"lexicon: expected mappings of words to spellings, got {got}")
    yield from ((0, "", word, spelling) for word, spelling in entries.items())
    for language, more in by_language.items():
        if not isinstance(language, str) or not isinstance(more, Mapping):
            got = f"{reprlib.repr(language)} and {type(more).__name__}"
            raise TextError(f"lexicon: expected languages with mappings of words to spellings, got {got}")
        yield from ((0, language, word, spelling) for word, spelling in more.items())


def _json_rows(text: str, where: str) -> Iterator[_Row]:
    twice: list[str] = []

    def pairs(found: list[tuple[str, object]]) -> dict[str, object]:
        unique: dict[str, object] = {}
        for word, value in found:
            if word in unique:
                twice.append(word)
            unique[word] = value
        return unique

    try:
        whole = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise TextError(f"{where}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise TextError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(whole, dict):
        raise TextError(f"{where}, line 1: expected an object of words and spellings, got {type(whole).__name__}")
    if twice:
        line = next(line for line, word in _json_keys(text) if word == twice[0])
        told = f"{reprlib.repr(twice[0])} is there twice; keep one of the entries"
        raise TextError(f"{where}, line {line}: {told}")
    keys = _json_keys(text)  # in the order of the rows, as far as the rows are right
    for key, value in whole.items():
        line, _ = next(keys)
        if not isinstance(value, dict):
            yield line, "", key, value
            continue
        if not language_name(key):
            raise TextError(f"{where}, line {line}: unknown language {reprlib.repr(key)}; write english, or en")
        yield from ((next(keys)[0], key, word, spelling) for word, spelling in value.items())


def _json_keys(text: str) -> Iterator[tuple[int, str]]:
    """The line and the word of every key of valid JSON."""
    line, passed = 1, 0
    for found in _JSON_STRING.finditer(text):
        if found[1]:
            line, passed = line + text.count("\n", passed, found.start()), found.start()
            yield line, json.loads(found[0][: -len(found[1])])


def _csv_rows(text: str, where: str) -> Iterator[_Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        if header not in (["word", "spelling"], ["word", "spelling", "language"]):
            expected = "expected the columns word,spelling or word,spelling,language"
            raise TextError(f"{where}, line 1: {expected}, got {reprlib.repr(header)}")
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                wrong = f"expected {len(header)} columns, got {len(row)}; put quotes around text with commas"
                raise TextError(f"{where}, line {reader.line_num}: {wrong}")
            yield reader.line_num, row[2].strip() if len(row) > 2 else "", row[0], row[1]
    except csv.Error as error:
        raise TextError(f"{where}, line {reader.line_num}: not valid CSV: {error}") from None
