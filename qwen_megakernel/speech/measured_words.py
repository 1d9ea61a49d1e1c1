"""MeasuredWords: when each word of an utterance begins, by when its tokens are spoken (engine/text_path.py).

The tokens are those of the spoken text, in which the normalizer and the lexicon have changed words. A changed word is
read alone, to count how many spoken ones it takes. Read so it may take others, but most words stay, and tell where both
texts are the same again.
"""

import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qwen_megakernel.speech.words import WORD, SpeechRate, Word, WordTimes, words_of
from spoken_text.normalize import Silence

_AHEAD = 64  # tokens that are spelt before they begin; to spell all of a long text would hold an event loop
_NEAR = 3  # spoken words by which a count may be wrong, before or behind


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
        self._part = self._heard_s, len(self._starts)  # where it begins: seconds, tokens
        self._tokens: list[int] = []  # of the part, so far
        self._text, self._ends = "", [0]  # of its first tokens: what they spell, and where they end in it
        self._open_at = 0, len(self._spoken)  # where the last word of that begins, and which spoken one it is
        self._begun: list[float] = []  # as `_starts`; the sound there may be silence
        self._silences: list[tuple[float, float]] = []  # begin and end of those that are over
        self._speech = self._quiet = 0.0

    def _hear(self, silent: bool, seconds: float) -> None:
        if not silent and self._quiet:
            self._silences.append((self._heard_s - self._quiet, self._heard_s))
        self._heard_s += seconds
        self._quiet = self._quiet + seconds if silent else 0.0
        self._speech += 0.0 if silent else seconds

    def enter(self, tokens: list[int], starts: Sequence[float]) -> None:
        """More tokens have begun. `tokens`: of the part's text so far. `starts`: see `Chunk.token_s`; the sound up to
        there was heard."""
        self._tokens = tokens
        self._begun += [self._part[0] + start for start in starts]
        self._spell(len(self._starts) + len(self._begun) - self._part[1] + _AHEAD)
        # The attention gets to a word in the pause before it.
        while self._begun and (not self._quiet or self._begun[0] < self._heard_s - self._quiet):
            at = self._begun.pop(0)
            ends = [end for start, end in self._silences if start <= at < end]
            self._starts.append(max([at, *ends, *self._starts[-1:]]))
        self._give_begun()

    def _spell(self, until: int) -> None:
        """Find the spoken words up to this token of the part. The last one may go on, so it is looked at again."""
        for text in self._spelt(self._tokens[len(self._ends) - 1 : until]):
            self._text += text
            self._ends.append(len(self._text))
        del self._spoken[self._open_at[1] :]
        for found in WORD.finditer(self._text, self._open_at[0]):
            self._open_at = found.start(), len(self._spoken)
            if key := _key(found[0]):
                self._spoken.append(_Spoken(key, self._part[1] + bisect_right(self._ends, found.start()) - 1))

    def end_part(self) -> None:
        self._spell(len(self._tokens))
        self._starts += [self._heard_s] * (self._part[1] + len(self._tokens) - len(self._starts))
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
        """Find with which spoken words the next written ones begin, once these spoken ones have begun."""
        left = [*self._words, *self._words_up_to(len(self._open))[0]][len(self._places) :]
        for index, word in enumerate(left):
            at = self._matched
            if at >= len(self._spoken) or self._spoken[at].token >= len(self._starts):
                return
            if key := _sounds(word):
                near = range(max(0, at - _NEAR), min(len(self._spoken), at + _NEAR + 1))
                alike = [place for place in near if self._spoken[place].key == key]
                at = min(alike, key=lambda place: abs(place - self._matched), default=at)
                self._matched = at + (1 if alike else self._said(left[index:]))
            self._places.append(at)

    def _said(self, words: list[Word]) -> int:
        """With how many spoken words the first of the words is said. Read alone it may be said otherwise."""
        if not _sounds(words[0]):
            return 0
        following = next((word.text for word in words[1:] if _sounds(word)), "")
        texts = (f"{words[0].text} {following}", following)
        both, second = (sum(map(bool, map(_key, words_of(self._speak(text))))) for text in texts)
        return max(0, both - second)


def _key(word: str) -> str:
    """What is the same in a written and a spoken word; empty for one without sound."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", word).casefold()))


def _sounds(word: Word) -> str:
    """The key of a written word; empty for one that is left out too."""
    return _key(word.text) if word.weight else ""
