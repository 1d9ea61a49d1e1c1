"""WordTimes: estimates when each word of an utterance begins, because the model does not tell.

Words are spread over the audio by their length, at the rate at which this voice has spoken so far. Once all audio is
there, the words that are left are spread over the rest of it. A word is given out once the audio in which it begins has
been made, never before.
"""

import re

from qwen_megakernel.engine.runaway import is_syllable
from qwen_megakernel.text.normalize import Silence
from qwen_megakernel.text.pauses import Pause, PauseStream

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff66-\uff9f"
# A word with what clings to it, or one Chinese or Japanese character with its marks.
_WORD = re.compile(rf"[{_CJK}][^\w\s]*|[^\s{_CJK}]+")
_UNSPACED = re.compile(rf"[{_CJK}]")
_PAUSE = {",": 3, ";": 3, ":": 3, ".": 6, "!": 6, "?": 6, "，": 3, "、": 3, "。": 6, "！": 6, "？": 6}


def words_of(text: str) -> list[str]:
    """The words of a text; for Chinese and Japanese, its characters."""
    return _WORD.findall(text)


def is_unspaced(text: str) -> bool:
    """Written without spaces between words?"""
    return bool(_UNSPACED.search(text))


class _Unspoken(str):
    """A word that the normalizer leaves out."""


def weight(word: str) -> float:
    """How long a word takes, in Latin letters."""
    if isinstance(word, _Unspoken):
        return 0.0
    spoken = sum(2.5 if is_syllable(c) else 3 if c.isdigit() else 1 for c in word if c.isalnum())
    return max(1.0, spoken) + 1 + _PAUSE.get(word[-1], 0)  # 1 is for the gap after it


class SpeechRate:
    """Seconds for a unit of `weight`: a guess at first, then what this voice took."""

    def __init__(self) -> None:
        self.seconds = 0.06  # between the demo voice, 0.05, and slow speech, 0.07
        self._trust = 1.0  # the first utterance replaces the guess

    def learn(self, weight: float, seconds: float) -> None:
        self.seconds += self._trust * (seconds / weight - self.seconds)
        self._trust = 0.5


class WordTimes:
    """The words of one utterance, whose text may come in pieces."""

    def __init__(self, rate: SpeechRate, speed: float = 1.0, silence: Silence | None = None):
        """
        Args:
            rate: the voice's at speed 1.0.
            speed: how many times as fast the audio is.
            silence: of the text, if it is normalized: words that are left out take no time.
        """
        self._rate = rate
        self._speed = speed
        self._silence = silence
        self._open = ""  # text after the last whole word
        self._unspoken: list[bool] = []  # for each character of it
        self._pauses = PauseStream(refuse_other_tags=False, lenient=True)
        self._words: list[str | Pause] = []  # not given out
        self._at = 0.0  # where the next of them begins, in seconds
        self._given = 0.0  # weight of those given out
        self._paused = 0.0  # seconds of the pauses that were passed

    def add(self, text: str) -> None:
        """A piece of the text as it was written."""
        self._take(self._pauses.push(text))

    def _take(self, parts: list[str | Pause]) -> None:
        for part in parts:
            if isinstance(part, Pause):
                self._end_words()
                self._words.append(part)
            else:
                self._add(part)

    def _add(self, text: str) -> None:
        if not text:
            return
        self._open += text
        if self._silence:
            self._unspoken += self._silence.push(text)
        if not self._open[-1].isspace():
            *_, last = _WORD.finditer(self._open)
            self._end_words(last.start())
        else:
            self._end_words()

    def _end_words(self, until: int | None = None) -> None:
        """The words of the open text are whole, up to this place or to its end."""
        until = len(self._open) if until is None else until
        for word in _WORD.finditer(self._open, 0, until):
            left_out = self._silence and all(self._unspoken[word.start() : word.end()])
            self._words.append(_Unspoken(word[0]) if left_out else word[0])
        self._open, self._unspoken = self._open[until:], self._unspoken[until:]

    def flush(self) -> None:
        """The last word so far is whole."""
        self._take(self._pauses.settle())
        self._end_words()

    def due(self, made: float) -> list[tuple[str, float]]:
        """Words that begin within the first `made` seconds of audio, and when."""
        due = []
        while self._words and self._at < made:
            due += self._give(self._rate.seconds / self._speed)
        return due

    def finish(self, made: float) -> list[tuple[str, float]]:
        """The text and its `made` seconds of audio are complete: the words that are left, and when they begin."""
        self._take(self._pauses.finish())
        self._end_words()
        left = sum(weight(word) for word in self._words if isinstance(word, str))
        paused = sum(part.seconds for part in self._words if isinstance(part, Pause))
        if made > 0 and self._given + left > 0:
            self._rate.learn(self._given + left, max(0.0, made - self._paused - paused) * self._speed)
        self._at = min(self._at, made)
        pace = max(0.0, made - self._at - paused) / left if left else 0.0
        return [given for _ in range(len(self._words)) for given in self._give(pace)]

    def _give(self, pace: float) -> list[tuple[str, float]]:
        """The next word and when it begins; nothing for a pause."""
        word, at = self._words.pop(0), self._at
        if isinstance(word, Pause):
            self._at, self._paused = at + word.seconds, self._paused + word.seconds
            return []
        self._at += weight(word) * pace
        self._given += weight(word)
        return [(word, at)]
