"""Cuts long text where a reader may pause: at paragraphs, lines, sentences, clauses, words, last between characters.

Marks, scripts and what a reader takes for one character (a grapheme cluster) are Unicode's, by the package `regex`. Its
tables are current and its matching is in C. ICU is heavy, and splitters of sentences need to be told the language. A
fragment keeps the white space behind it, so that the fragments joined are the text. All takes time linear in the text.
"""

import itertools
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import regex

from spoken_text.errors import RequestError, TextError, TextTooLongError
from spoken_text.tables import shared_words

_Ends = Callable[[str], Iterator[int]]  # text -> where its fragments end

_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
"""Scripts that write no blanks between words."""
_IN_UNSPACED = regex.compile(rf"[{_UNSPACED}]")

_CLOSING = r"[\p{Pe}\p{Pf}\"'*_]*+"  # what may stand between a mark and the blank behind it
_RUN = regex.compile(rf"([.!?…；\p{{Sentence_Terminal}}]++)({_CLOSING})(\s*+)")
_CLAUSE = regex.compile(
    rf"(?<![,;:–])[,;:–]++{_CLOSING}\s++|[，、：،؛፣၊—]++{_CLOSING}\s*+|(?<=[{_UNSPACED}])…++{_CLOSING}|"
    rf"(?<=[{_UNSPACED}])[,;:]++(?=[{_UNSPACED}])"
)
_PARAGRAPH, _LINE = regex.compile(r"\n[^\S\n]*+\n\s*+"), regex.compile(r"\n\s*+")
_SAID = regex.compile("と|って|(?:이?라고|하고|라며|하며)(?!\\w)")
"""Behind a quote these go on with its sentence."""
_BUNSETSU = regex.compile(r"(?<=\p{Hiragana})(?=[\p{Han}\p{Katakana}「『（])|(?<=を)(?=\p{Hiragana})")
"""In Japanese most words begin with Han or Katakana, and end with Hiragana; を ends one."""
_WORD = regex.compile(r"[^\S\u00a0\u2007\u202f]++|\u200b")  # not at a no-break blank, as in 2 000 000
_CLUSTER = regex.compile(r"\X")
_EXTENDING = regex.compile(r"[\p{GCB=Extend}\p{GCB=ZWJ}\p{GCB=SpacingMark}]")

# A full stop after one of these, after a single letter or after one or two digits ends no sentence.
_ABBREVIATION = regex.compile(rf"\b(?:{'|'.join(shared_words('abbreviations'))}|[^\W\d_])\.$")
_BEFORE_NUMBER = regex.compile(rf"\b(?:{'|'.join(shared_words('abbreviations_before_numbers'))})\.$")
_SHORT = regex.compile(r"(?<![^\W\d_])[^\W\d_]{1,3}$")
_NUMBER = regex.compile(r"(?<![\d.,])\d{1,2}\.$")
_LOOKED_AT = 40  # characters before a mark

_WRAPPED = 45  # characters of a line that may have been broken for its length alone
_MANY, _TINY = 1000, 20  # parts, and how many of them fit a piece: then any cut is near an even one
_STACKED = 32  # code points; no language has clusters that are longer
_NOT_BEHIND = frozenset("เแโใไເແໂໃໄ")  # vowels that are written before their consonant
_NOT_BEFORE = frozenset("ะาำๅๆະາຳໆぁぃぅぇぉっゃゅょゎァィゥェォッャュョヮーゝゞ々〻")


def _matches(pattern: "regex.Pattern[str]", text: str) -> "Iterator[regex.Match[str]]":
    """Those that do not end within a cluster, such as between a blank and a joiner."""
    return (found for found in pattern.finditer(text) if not _EXTENDING.match(text, found.end()))


def _every(pattern: "regex.Pattern[str]") -> _Ends:
    return lambda text: (found.end() for found in _matches(pattern, text))


def _sentences(text: str) -> Iterator[int]:
    return (run.end() for run in _matches(_RUN, text) if _is_end(text, run))


def _beside(text: str, run: "regex.Match[str]") -> tuple[str, str]:
    """What decides about a run of marks: some characters before it, and the one behind it."""
    return text[max(0, run.start() - _LOOKED_AT) : run.start()], text[run.end() : run.end() + 1]


def _is_end(text: str, run: "regex.Match[str]") -> bool:
    """Does a sentence end with this run of marks, closing quotes and blanks?"""
    marks, closing, blanks = run.groups()
    before, after = _beside(text, run)
    if closing and _SAID.match(text, run.end()):
        return False
    if blanks:
        if marks == ".":
            if is_abbreviation(before, after):
                return False
            if after.islower() and _SHORT.search(before):  # etc., usw., ca.; after a longer word a number may follow
                return False
        return not (closing and after.islower())  # "No!" he said.
    if before[-1:].isdigit() and after.isdigit():
        return False
    if marks[-1] not in ".!?…":  # 。！？ and the like, also Hindi's । and Arabic's ؟, need no blank
        return True
    if not _IN_UNSPACED.match(after):
        return False
    return marks[-1] in "!?" or _IN_UNSPACED.match(before[-1:]) is not None


def is_abbreviation(before: str, after: str) -> bool:
    """Does a full stop between these end a word, and no sentence?"""
    stopped = f"{before}."
    if _ABBREVIATION.search(stopped) or _NUMBER.search(stopped):
        return True
    return after.isdigit() and _BEFORE_NUMBER.search(stopped) is not None


def _marks(text: str) -> Iterator[int]:
    """Behind any mark and blank: where a writer of small letters only ends sentences."""
    for run in _matches(_RUN, text):
        if run[3] and not (run[1] == "." and is_abbreviation(*_beside(text, run))):
            yield run.end()


def _lines(text: str) -> Iterator[int]:
    """Verses and items. A long line without a mark, before a small letter, was broken for its length alone."""
    begin = 0
    for found in _matches(_LINE, text):
        line, after = text[begin : found.start()], text[found.end() : found.end() + 1]
        if len(line) < _WRAPPED or not after.islower():
            yield found.end()
        begin = found.end()


def _unspaced(text: str) -> Iterator[int]:
    """Between characters of scripts that write no blanks."""
    last = ""
    for end, cluster in _clusters(text):
        may = last and last not in _NOT_BEHIND and cluster[0] not in _NOT_BEFORE
        if may and _IN_UNSPACED.match(last) and _IN_UNSPACED.match(cluster):
            yield end - len(cluster)
        last = cluster[0]


def _characters(text: str) -> Iterator[int]:
    return (end for end, _ in _clusters(text))


def _clusters(text: str) -> Iterator[tuple[int, str]]:
    """Where each grapheme cluster ends, and what it is. Stacks of marks that no language has are parted."""
    for found in _CLUSTER.finditer(text):
        for begin in range(found.start(), found.end(), _STACKED):
            end = min(begin + _STACKED, found.end())
            yield end, text[begin:end]


_LEVELS: tuple[_Ends, ...] = (
    *(_every(_PARAGRAPH), _lines, _sentences, _every(_LINE), _marks),
    *(_every(_CLAUSE), _every(_WORD), _every(_BUNSETSU), _unspaced, _characters),
)
"""Where to cut, from the best place to the last resort."""
_SENTENCES, _WITHIN_SENTENCE = _LEVELS[:3], _LEVELS[3:]


def _cut(text: str, ends: _Ends) -> list[str]:
    """Cut at every end. The fragments joined are the text."""
    cuts = [0, *ends(text), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts) if start < end]


def _pieces(text: str, most: int, levels: Sequence[_Ends]) -> list[str]:
    """Cut at the first level, and join neighbours as long as they fit. A fragment that is too long by itself begins a
    new piece, and is cut at the next level: no piece ends with the beginning of a sentence if it need not."""
    pieces: list[str] = []
    for fragment in _cut(text, levels[0]):
        if len(fragment.strip()) > most and len(levels) > 1:
            pieces += _pieces(fragment, most, levels[1:])
        elif pieces and len((pieces[-1] + fragment).strip()) <= most:
            pieces[-1] += fragment
        else:
            pieces.append(fragment)
    return pieces


def split_sentences(text: str, max_chars: int = 300) -> list[str]:
    """Cut long text into pieces of at most `max_chars` characters, at the best places there are.

    A piece takes as many whole sentences as fit. Short text comes back whole; blank text gives an empty list. Only a
    grapheme cluster that is longer by itself makes a longer piece.
    """
    if max_chars < 1:
        raise RequestError(f"max_chars must be at least 1, got {max_chars}")
    if len(whole := text.strip()) <= max_chars:
        return [whole] if whole else []
    return [piece.strip() for piece in _pieces(text, max_chars, _LEVELS) if piece.strip()]


def bytes_of(text: str) -> int:
    """Bytes of a text in NFC. A byte-level tokenizer makes at most a token of each, if it does not fold the text."""
    return len(unicodedata.normalize("NFC", text).encode())


def split_to_fit(
    text: str, count: Callable[[str], int], most: int, at_most: Callable[[str], int] = bytes_of
) -> list[str]:
    """Cut text like `split_sentences`, but into pieces of at most `most` tokens. A sentence that is longer by itself is
    cut like `split_evenly`, so that no word stands alone.

    A piece with more tokens is cut again, into pieces of as many characters as have `most` tokens on average. `count`
    gives the number of tokens of a text, and `at_most` quickly a number that `count` does not exceed. Raises
    TextTooLongError: a single character has more tokens. TextError: lone surrogates.
    """
    check_unicode(text)

    def fits(piece: str) -> bool:
        return at_most(piece) <= most or count(piece) <= most

    pieces: list[str] = []
    left = [whole] if (whole := text.strip()) else []
    while left:
        piece = left.pop()
        if fits(piece):
            pieces.append(piece)
            continue
        tokens = count(piece)
        limit = len(piece) * most // tokens
        parts = _pieces(piece, limit, _SENTENCES)
        for most_chars in (limit, limit * 9 // 10) if len(parts) == 1 else ():  # some characters take more tokens
            parts = _split_evenly(piece, max(1, most_chars), _WITHIN_SENTENCE, [piece])
            if all(map(fits, parts)):
                break
        if len(parts) == 1:
            raise TextTooLongError(f"{piece!r} has {tokens} tokens, but a piece of the text may have at most {most}")
        left += [part.strip() for part in reversed(parts) if part.strip()]
    return pieces


def check_unicode(text: str, name: str = "text") -> None:
    """Raises TextError for lone surrogates, which have no UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(f"{name} must be valid Unicode: {error}") from None


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, each with the white space after it: joined they are the text. A stop after "Mr", "Dr",
    a single letter or a small number ends no sentence, nor does a closing quote before a small letter."""
    return [sentence for part in _cut(text, _every(_PARAGRAPH)) for sentence in _cut(part, _sentences)]


def ends_with_mark(text: str) -> bool:
    """Does the text end with a mark that ends a sentence? Closing quotes and white space after it do not count."""
    return any(run.end() == len(text) for run in _RUN.finditer(text, max(0, len(text) - _LOOKED_AT)))


def split_evenly(text: str, max_chars: int) -> list[str]:
    """Cut long text into pieces of at most `max_chars` characters, at sentences where they allow it. The pieces are as
    few as the sentences allow, and about equally long. White space at a piece's ends is not counted.

    A sentence that is longer by itself is cut in the same way at the best places within it. Each piece has the white
    space after it: joined they are the text.
    """
    return _split_evenly(text, max_chars, _WITHIN_SENTENCE, sentences_of(text))


def _split_evenly(text: str, max_chars: int, levels: Sequence[_Ends], fragments: list[str]) -> list[str]:
    """`fragments`: joined they are the text. Fragments that are too long are cut at the first of `levels`."""
    if len(text.strip()) <= max_chars:
        return [text]
    parts: list[str] = []
    for fragment in fragments:
        if len(fragment.strip()) <= max_chars or not levels:
            parts.append(fragment)
        elif levels[0] in (_unspaced, _characters):
            for part in _cut_evenly(fragment, max_chars, list(levels[0](fragment))):
                parts += _split_evenly(part, max_chars, levels[1:], [part])
        else:
            parts += _split_evenly(fragment, max_chars, levels[1:], _cut(fragment, levels[0]))
    return _join_evenly(parts, max_chars)


def _cut_evenly(text: str, max_chars: int, ends: list[int]) -> list[str]:
    """Cut at those of many ends that make few pieces of about the same length."""
    cuts = [0]
    short = len(text) // max(1, len(ends)) - 1  # by so many characters a cut may miss the even place
    while (left := len(text) - cuts[-1]) > max_chars:
        count = -(-left // max(1, max_chars - short))
        at = bisect_right(ends, cuts[-1] + -(-left // count))
        if at and ends[at - 1] > cuts[-1]:
            cuts.append(ends[at - 1])
        elif at < len(ends):
            cuts.append(ends[at])
        else:
            break
    return [text[start:end] for start, end in itertools.pairwise([*cuts, len(text)]) if start < end]


def _join_evenly(parts: list[str], max_chars: int) -> list[str]:
    """Join neighbours into as few texts of at most `max_chars` characters as possible. Of all such joins it takes the
    most even one: the least sum of squared lengths."""
    if len(parts) > _MANY and len(parts) * max_chars > _TINY * sum(map(len, parts)):  # else this would take minutes
        return _cut_evenly("".join(parts), max_chars, list(itertools.accumulate(map(len, parts))))
    best = [(0, 0, 0)]  # for the first n parts: texts, sum of squares, where the last text begins
    for end in range(1, len(parts) + 1):
        length, options = 0, []
        for start in range(end - 1, -1, -1):
            length += len(parts[start])
            inside = max(0, length - _blank_ends(parts[start], parts[end - 1]))
            if inside > max_chars and start < end - 1:
                break
            count, squares, _ = best[start]
            options.append((count + 1, squares + inside**2, start))
        best.append(min(options))
    cuts = [len(parts)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][2])
    return ["".join(parts[start:end]) for start, end in itertools.pairwise(reversed(cuts))]


def _blank_ends(first: str, last: str) -> int:
    """How many blanks are before `first` and after `last`."""
    return len(first) - len(first.lstrip()) + len(last) - len(last.rstrip())
