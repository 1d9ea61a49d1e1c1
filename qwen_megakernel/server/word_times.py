"""When words are spoken, as other servers' clients expect it: each word with its begin and its end."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TimedWord:
    """A word; `start` and `end` in seconds from the first sample."""

    word: str
    start: float
    end: float

    @property
    def in_ms(self) -> dict[str, Any]:
        """As vLLM-Omni has it in chunks and headers."""
        return {"word": self.word, "start_ms": round(1000 * self.start), "end_ms": round(1000 * self.end)}


class WordEnds:
    """Gives a word out once its end is known: where the next one begins, or the sound ends."""

    def __init__(self) -> None:
        self._last: tuple[str, float] | None = None

    def add(self, words: list[tuple[str, float]], offset: float = 0.0) -> list[TimedWord]:
        """The words that are complete now. `offset`: seconds of what was said before."""
        given = []
        for word, at in words:
            given += self.finish(at + offset)
            self._last = word, at + offset
        return given

    def finish(self, seconds: float) -> list[TimedWord]:
        """The word that is left, if there is one. `seconds`: where it ends."""
        if self._last is None:
            return []
        (word, start), self._last = self._last, None
        return [TimedWord(word, round(start, 3), round(max(start, seconds), 3))]


def alignment(words: list[TimedWord]) -> dict[str, Any]:
    """As vLLM-Omni has it in `timestamp_info`."""
    starts, ends = [word.start for word in words], [word.end for word in words]
    told = {"words": [word.word for word in words], "word_start_times_seconds": starts, "word_end_times_seconds": ends}
    return {"word_alignment": told}
