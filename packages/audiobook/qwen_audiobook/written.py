"""Spoken sentences as they were written, for subtitles: "five dollars" is shown as "$5"."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, pairwise

from spoken_text.cutting import sentences_of
from spoken_text.pauses import Pause

# A word, or one Chinese or Japanese character with the marks behind it.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff][^\w\s]*|[^\s\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")

_FURTHER = 8  # written words to look at beyond as many as are spoken


def with_written(spoken: Sequence[str | Pause], shown: Sequence[str | Pause]) -> Iterator[tuple[str, str] | Pause]:
    """Each sentence that is spoken, with its written form, and the pauses between.

    Args:
        spoken: what the front end makes of a text.
        shown: the same text as a reader sees it (`TextFrontEnd.shown`).
    """
    said = [part if isinstance(part, Pause) else sentences_of(part) for part in spoken]
    seen = [part if isinstance(part, Pause) else sentences_of(part) for part in shown]
    if [_shape(part) for part in said] == [_shape(part) for part in seen]:
        written = iter([sentence for part in seen if not isinstance(part, Pause) for sentence in part])
    else:  # a mark ends a sentence in one of them only, as that of "3. Mai"
        written = iter(_aligned(_joined(said), _joined(seen)))
    for part in said:
        if isinstance(part, Pause):
            yield part
        else:
            yield from ((sentence, next(written)) for sentence in part)


def _shape(part: Pause | list[str]) -> int:
    return -1 if isinstance(part, Pause) else len(part)


def _joined(parts: list[list[str] | Pause]) -> list[str]:
    return [sentence for part in parts if not isinstance(part, Pause) for sentence in part]


def _aligned(said: list[str], seen: list[str]) -> list[str]:
    """The sentences `seen` cut anew, so that there is one for each of `said`. Words that are equal in both tell where.
    Between them, cuts are at the ends of `seen`'s own sentences if they can be."""
    if not said or not seen:
        return said
    text = "\n".join(seen)
    found = list(_WORD.finditer(text))
    words, spoken = [word[0] for word in found], [_WORD.findall(sentence) for sentence in said]
    ends = list(accumulate(len(_WORD.findall(sentence)) for sentence in seen))
    cuts = [0]
    for this, following in pairwise(spoken):  # near by, because a text may repeat itself
        first = cuts[-1]
        near = words[first : first + len(this) + len(following) + _FURTHER]
        blocks = SequenceMatcher(None, near, this + following, autojunk=False).get_matching_blocks()
        pairs = {b + n: first + a + n for a, b, size in blocks for n in range(size)}
        cuts.append(_cut(len(this), pairs, first, ends))
    cuts.append(len(words))
    starts = [word.start() for word in found] + [len(text)]
    cut = [text[starts[begin] : starts[end]] for begin, end in pairwise(cuts)]
    return [one if one.strip() else other for one, other in zip(cut, said, strict=True)]


def _cut(at: int, pairs: dict[int, int], first: int, ends: list[int]) -> int:
    """Which written word begins the sentence that begins with spoken word `at`. `pairs`: spoken word -> the equal
    written one, in order. `first`: the lowest answer. `ends`: where written sentences end, in order."""
    if at - 1 in pairs:
        return pairs[at - 1] + 1
    if at in pairs:
        return pairs[at]
    lowest = max((written + 1 for word, written in pairs.items() if word < at), default=first)
    highest = min((written for word, written in pairs.items() if word > at), default=ends[-1])
    end = ends[min(bisect_right(ends, lowest), len(ends) - 1)]
    return min(end, highest)
