"""MeasuredWords: when each word of an utterance begins, by when its tokens are spoken (engine/text_path.py).

The tokens are those of the spoken text, in which the normalizer and the lexicon have changed words. Most words stay, so
both texts are the same between the changed places. There each written word is read alone, to count how many spoken
ones it takes.
"""

import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from qwen_megakernel.speech.words import WORD, SpeechRate, Word, WordTimes
from spoken_text.normalize import Silence

_EARLY_S = 0.0  # what begins so shortly before a pause is behind it
_WRITTEN, _SPOKEN = 8, 32  # words that a changed place has at most
_UNSPOKEN = 3  # spoken words more in a changed place are as unlikely as that its written ones are not spoken


class _Spoken(NamedTuple):
    """A word of the spoken text."""

    key: str
    token: int  # its first one


class MeasuredWords(WordTimes):
    """The words of a text that may be said in parts. A word is given out once its first token has begun."""

    measured = True

    def __init__(
        self, spelt: Callable[[list[int]], list[str]], speak: Callable[[str], str], silence: Silence | None = None
    ):
        """
        Args:
            spelt: `TTSEngine.spelt`.
            speak: `TextFrontEnd.fragment`.
            silence: as in `WordTimes`.
        """
        super().__init__(SpeechRate(), silence=silence)
        self._spelt, self._speak = spelt, speak
        self._heard_s = 0.0
        self._starts: list[float] = []  # of tokens, in seconds
        self._spoken: list[_Spoken] = []
        self._matched = 0  # of these; the next written word begins with the one behind them
        self._places: list[int] = []  # for each of the first of `_words`, the spoken word with which it begins
        self._begin_part()

    def _begin_part(self) -> None:
        self._part = self._heard_s, len(self._starts), len(self._spoken)  # where it begins: seconds, tokens, words
        self._tokens = 0  # of the part
        self._begun: list[float] = []  # as `_starts`; the sound there may be silence
        self._silences: list[tuple[float, float]] = []  # begin and end of those that are over
        self._speech = self._quiet = 0.0

    def _hear(self, silent: bool, seconds: float) -> None:
        if not silent and self._pausing:
            self._silences.append((self._heard_s - self._quiet, self._heard_s))
        self._heard_s += seconds
        self._quiet = self._quiet + seconds if silent else 0.0
        self._speech += 0.0 if silent else seconds

    def enter(self, tokens: list[int], starts: Sequence[float]) -> None:
        """More tokens have begun. `tokens`: of the part's text so far. `starts`: see `Chunk.token_s`; the sound up to
        there was heard."""
        begin, token, word = self._part
        if len(tokens) > self._tokens:
            self._tokens = len(tokens)
            self._spoken[word:] = _spoken_words(self._spelt(tokens), token)
        self._begun += [begin + start for start in starts]
        # The attention gets to a word in the pause before it.
        while self._begun and (not self._quiet or self._begun[0] < self._heard_s - self._quiet - _EARLY_S):
            at = self._begun.pop(0)
            ends = [end for start, end in self._silences if start - _EARLY_S <= at < end]
            self._starts.append(max([at, *ends, *self._starts[-1:]]))
        self._give_begun()

    def end_part(self) -> None:
        self._starts += [self._heard_s] * (self._part[1] + self._tokens - len(self._starts))
        self._give_begun()
        self._begin_part()

    def due(self) -> list[tuple[str, float]]:
        due, self._due = self._due, []
        return due

    def finish(self) -> list[tuple[str, float]]:
        self.flush()
        self.end_part()
        for word in self._words:
            self._tell(word, self._heard_s)
        return self.due()

    def _tell(self, word: Word, at: float) -> None:
        self._told = max(self._told, at)
        self._due.append((word.text, self._told))

    def _give_begun(self) -> None:
        """Give out the words whose tokens have begun."""
        self._place()
        while self._places and self._places[0] < len(self._spoken):
            token = self._spoken[self._places[0]].token
            if token >= len(self._starts):
                break
            if not self._words:  # it is spoken, so it is whole
                self._end_words()
            del self._places[0]
            self._tell(self._words.pop(0), self._starts[token])

    def _place(self) -> None:
        """Find with which spoken words the next written ones begin: up to the next two that are alike, or one by
        one."""
        left = [*self._words, *self._words_up_to(len(self._open))[0]][len(self._places) :]
        while spoken := self._spoken[self._matched : self._matched + _SPOKEN]:
            keys = [key for key in map(_key, left[: 2 * _WRITTEN]) if key][:_WRITTEN]
            if not keys or spoken[0].token >= len(self._starts):
                return
            alike = [(a, b) for a, key in enumerate(keys) for b, word in enumerate(spoken) if key == word.key]
            if alike:
                written, said = min(alike, key=lambda counts: sum(counts) + (0 if counts[1] else _UNSPOKEN))
                left = self._share(left, _first(left, written), said)
            left = self._share(left, _first(left, 1), 1 if alike else self._said(left[_first(left, 1) - 1 :]))

    def _share(self, left: list[Word], written: int, said: int) -> list[Word]:
        """The first of the words that are left are said as so many spoken ones. Returns the others."""
        shares = [self._said(left[index:]) for index in range(written)] if written > 1 else [1]
        for before in accumulate(shares[: written - 1], initial=0) if written else ():
            self._places.append(self._matched + min(round(said * before / (sum(shares) or 1)), max(0, said - 1)))
        self._matched += said
        return left[written:]

    def _said(self, words: list[Word]) -> int:
        """With how many spoken words the first of the words is said. Read alone it may be said otherwise."""
        if not _key(words[0]):
            return 0
        following = next((word.text for word in words[1:] if _key(word)), "")
        both, second = (
            len(_spoken_words([self._speak(text)], 0)) for text in (f"{words[0].text} {following}", following)
        )
        return max(1, both - second)


def _key(word: Word) -> str:
    """What is the same in a written and a spoken word; empty for one without sound."""
    text = unicodedata.normalize("NFKD", word.text).casefold() if word.weight else ""
    return "".join(filter(str.isalnum, text))


def _first(words: list[Word], count: int) -> int:
    """How many words have the first so many with sound among them."""
    return [0, *(index + 1 for index, word in enumerate(words[: 2 * _WRITTEN]) if _key(word))][count]


def _spoken_words(tokens: list[str], first: int) -> list[_Spoken]:
    """The words with sound of a text. `tokens`: their texts. `first`: number of the first one."""
    ends = list(accumulate(map(len, tokens)))
    found = [(Word(word[0], 1.0, 0), word.start()) for word in WORD.finditer("".join(tokens))]
    return [_Spoken(key, first + bisect_right(ends, at)) for word, at in found if (key := _key(word))]
