"""WordTimes: estimates when each word of an utterance begins, where it is not measured (measured_words.py).

Words are spread by their length over the sound in which something is spoken, at the pace of this voice. Silence is no
such sound. A pause ends a word, most likely one at a punctuation mark near the place where the pace lets expect it. The
next word begins behind the pause, and what lies before it tells the pace anew. So the pace is learned while the
utterance is spoken, and an error lasts no longer than a phrase. If a pause may end one of several words, the next pause
tells which.

A word is given out once the sound in which it begins has been made, never before. It waits a little longer, because a
pause behind it may still correct its time.
"""

import re
from dataclasses import dataclass

import numpy as np

from qwen_megakernel.engine.runaway import is_syllable
from qwen_megakernel.model.edges import SILENCE
from spoken_text.normalize import Silence
from spoken_text.pauses import Pause, PauseStream

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff66-\uff9f"
# A word with what clings to it, or one Chinese or Japanese character with its marks.
WORD = re.compile(rf"[{_CJK}][^\w\s]*|[^\s{_CJK}]+")
_UNSPACED = re.compile(rf"[{_CJK}]")

GUESS = 0.06
"""Seconds for a unit of `weight` of a voice that was never heard."""
_GUESS_TRUST, _MOST_TRUST = 30.0, 300.0
"""Units of weight that outweigh a guess, and that an older pace counts at most: 2 and 18 seconds of speech."""

_WINDOW_S = 0.01  # sound is silent or not in windows of this length
_QUIET = 0.02  # -34 dB: what is so far below the loudest sound is silent too, as with the voice of a noisy recording
_PAUSE_S = 0.12  # a shorter silence belongs to a word, such as the one before a "t"
_BLIP_S = 0.05  # a shorter sound between two silences is no word
_LEAST_WAIT_S, _MOST_WAIT_S = 0.3, 1.0
"""Seconds of speech that must follow a word's beginning before it is given out: as many as were before it, within these
bounds. Sound that is made twice as fast as it is heard is then there before the word is heard."""

_NONE, _COMMA, _END = 0, 1, 2  # marks behind a word
_MARKS = dict.fromkeys(",;:\u2014\u2013\uff0c\u3001\uff1b\uff1a", _COMMA)
_MARKS |= dict.fromkeys(".!?\u2026\u3002\uff01\uff1f", _END)
_CLINGING = "\"'\u201d\u2019\u00bb)]*_"  # what may stand behind a mark
# How unlikely something is, as a negative logarithm: by the mark, that speech pauses there, and that it goes on. The
# demo voice paused behind all sentences, half of the commas, and 6 % of other words
# (docs/log/2026-11-27.md#first-minute-typed).
_PAUSES_AT = (2.8, 0.7, 0.0)
_GOES_ON_AT = (0.06, 0.7, 4.0)
_SHORT_PAUSE_S, _SHORT_AT_END = 0.2, 3.0  # between its sentences were at least 0.33 s
_IMPOSSIBLE = 8.0
_CLEAR = 1.5  # an end is certain if it is 4.5 times as likely as the second
_OFF_S, _OFF_SHARE = 0.1, 0.08
"""Standard deviation of a word's end: seconds, and share of the time since the last pause."""


def words_of(text: str) -> list[str]:
    """The words of a text; for Chinese and Japanese, its characters."""
    return WORD.findall(text)


def is_unspaced(text: str) -> bool:
    """Written without spaces between words?"""
    return bool(_UNSPACED.search(text))


def _mark_of(word: str) -> int:
    return _MARKS.get(word.rstrip(_CLINGING)[-1:], _NONE)


def _wait_after(at: float) -> float:
    return min(max(_LEAST_WAIT_S, at), _MOST_WAIT_S)


def weight(word: str) -> float:
    """How long a word takes, in Latin letters. Speakers draw it out before a mark."""
    spoken = sum(3.0 if is_syllable(c) else 4 if c.isdigit() else 1 for c in word if c.isalnum())
    return max(1.0, spoken) + (3 if _mark_of(word) else 0)


class SpeechRate:
    """The pace of a voice: a guess at first, then what it took. Any thread may use it."""

    def __init__(self, seconds: float = GUESS, trust: float = _GUESS_TRUST):
        """
        Args:
            seconds: of sound, without pauses, for a unit of `weight`, at speed 1.0.
            trust: units of weight that count as much as this value.
        """
        self.seconds = seconds
        self._trust = trust

    def learn(self, weight: float, seconds: float) -> None:
        """So many units took so many seconds. What was learned long before counts less and less. No voice is three
        times as fast or as slow as another: such seconds belong to other words."""
        if not weight * self.seconds / 3 < seconds < weight * self.seconds * 3:
            return
        self._trust = min(self._trust, _MOST_TRUST) + weight
        self.seconds += (seconds - weight * self.seconds) / self._trust


@dataclass
class Word:
    text: str
    weight: float
    behind: int  # the mark of the word before it


class WordTimes:
    """The words of one utterance, whose text may come in pieces."""

    measured = False

    def __init__(self, rate: SpeechRate, speed: float = 1.0, silence: Silence | None = None):
        """
        Args:
            rate: the voice's. It learns while the utterance is spoken.
            speed: how many times as fast the sound is.
            silence: of the text, if it is normalized: words that are left out take no time.
        """
        self._rate = rate
        self._speed = speed
        self._silence = silence
        self._open = ""  # text after the last whole word
        self._unspoken: list[bool] = []  # for each character of it
        self._pauses = PauseStream(refuse_other_tags=False, lenient=True)
        self._mark = _END  # behind the last whole word
        self._waits = True  # the writer keeps up
        # Seconds are the model's: at speed 2 they pass twice as fast. "Speech" is the sound without its pauses.
        self._words: list[Word] = []  # behind the last pause that was recognised
        self._from = 0.0  # where the first of them begins, in seconds of speech
        self._given = 0  # how many of them were given out
        self._last = 0.0  # where the last of these begins, in seconds of speech
        self._told = 0.0  # and when, in seconds of the sound as it is heard
        self._due: list[tuple[str, float]] = []  # given out, not yet told
        self._speech = 0.0  # seconds so far; also those of a silence that is too short for a pause
        self._paused: list[tuple[float, float]] = [(0.0, 0.0)]  # where a pause is in the speech; pauses up to its end
        self._unsure: tuple[float, bool] | None = None  # a pause behind no certain word: where it is; is it short?
        self._quiet = 0.0  # seconds of silence at the end of the sound
        self._loudest = 0.0
        self._rest = np.zeros(0, np.float32)  # sound that does not fill a window

    # ------------------------------------------------------------ text

    def add(self, text: str) -> None:
        """A piece of the text as it was written."""
        self._waits = True
        self._take(self._pauses.push(text))

    def _take(self, parts: list[str | Pause]) -> None:
        for part in parts:
            if isinstance(part, Pause):
                self._end_words()
                self._mark = _END
            else:
                self._add(part)

    def _add(self, text: str) -> None:
        if not text:
            return
        self._open += text
        if self._silence:
            self._unspoken += self._silence.push(text)
        if not self._open[-1].isspace():
            *_, last = WORD.finditer(self._open)
            self._end_words(last.start())
        else:
            self._end_words()

    def _end_words(self, until: int | None = None) -> None:
        """The words of the open text are whole, up to this place or to its end."""
        until = len(self._open) if until is None else until
        words, self._mark = self._words_up_to(until)
        self._words += words
        self._open, self._unspoken = self._open[until:], self._unspoken[until:]

    def _words_up_to(self, until: int) -> tuple[list[Word], int]:
        """The words of the open text up to a place, and the mark behind them."""
        words, mark = [], self._mark
        for found in WORD.finditer(self._open, 0, until):
            left_out = bool(self._silence) and all(self._unspoken[found.start() : found.end()])
            words.append(Word(found[0], 0.0 if left_out else weight(found[0]), mark))
            mark = max(mark, _mark_of(found[0])) if left_out else _mark_of(found[0])
        return words, mark

    def flush(self) -> None:
        """The last word so far is whole, and no word waits for more sound: the writer is slow."""
        self._take(self._pauses.settle())
        self._end_words()
        self._waits = False
        if self._unsure:
            self._decide()

    # ------------------------------------------------------------ sound

    def hear(self, samples: np.ndarray, sample_rate: int) -> None:
        """The next of the sound: fp32 [n], always at the same `sample_rate` in Hz."""
        size = round(_WINDOW_S * sample_rate)
        samples = np.concatenate([self._rest, samples])
        whole = len(samples) // size * size
        self._rest = samples[whole:]
        for peak in np.abs(samples[:whole].reshape(-1, size)).max(1, initial=0.0).tolist():
            self._loudest = max(self._loudest, peak)
            self._hear(peak <= max(SILENCE, _QUIET * self._loudest), _WINDOW_S * self._speed)

    def _hear(self, silent: bool, seconds: float) -> None:
        """The next window."""
        pauses = self._pausing
        if not silent:
            if pauses and self._quiet < _SHORT_PAUSE_S:
                self._recognise()
            self._speech += seconds
            self._quiet = 0.0
            self._go_on()
            return
        self._quiet += seconds
        if pauses:
            place, paused = self._paused[-1]
            self._paused[-1] = place, paused + seconds
            if self._quiet - seconds < _SHORT_PAUSE_S <= self._quiet:
                self._recognise()
        elif self._pausing:  # it has become long enough
            self._speech -= self._quiet - seconds
            self._paused.append((self._speech, self._paused[-1][1] + self._quiet))
        else:
            self._speech += seconds

    @property
    def _pausing(self) -> bool:
        return self._quiet >= _PAUSE_S or not self._speech  # before the first sound any silence is a pause

    @property
    def spoken_s(self) -> float:
        """Seconds of speech so far, without what may become a pause."""
        return self._speech if self._pausing else self._speech - self._quiet

    def end_part(self) -> None:
        """The sound so far ends with a word, because a part of the text is whole. The text so far reaches beyond it."""
        now = self.spoken_s
        self._end_unsure(now)
        if now - self._from >= _BLIP_S:
            words = self._all_words()
            self._choose(self._unlikely(words, 0, self._from, now, sure=True), now, len(words) - 2)

    def _go_on(self) -> None:
        """There is speech again. Soon the last pause cannot wait for the next one."""
        if self._unsure and self._speech - self._unsure[0] >= _wait_after(self._unsure[0]):
            self._decide(left=1)

    def _recognise(self) -> None:
        """The speech has come to a pause, so a word has ended. If it may be one of several, the next pause tells which
        one. The end of all words waits too, because more speech may follow."""
        now, short = self.spoken_s, self._quiet < _SHORT_PAUSE_S
        if now - (self._unsure[0] if self._unsure else self._from) < _BLIP_S:
            return
        if self._unsure:
            self._decide(following=(now, short))
        words = self._all_words()
        ranked = sorted((cost, count) for count, cost in self._unlikely(words, 0, self._from, now, short).items())
        if not ranked:
            return
        self._unsure = now, short
        clear = len(ranked) == 1 or ranked[1][0] - ranked[0][0] > _CLEAR
        if clear and ranked[0][1] < len(words) - 1 or not self._waits:
            self._decide()

    def _decide(self, following: tuple[float, bool] | None = None, left: int = 0) -> None:
        """Choose the word that ended at the unsure pause. `following`: the pause after it. `left`: so many words are
        still to come at least."""
        assert self._unsure
        (now, short), self._unsure = self._unsure, None
        words = self._all_words()
        unlikely = self._unlikely(words, 0, self._from, now, short)
        if following:
            for count in unlikely:
                after = self._unlikely(words, count, now, *following)
                unlikely[count] += min(after.values(), default=_IMPOSSIBLE)
        self._choose(unlikely, now, len(words) - 1 - left)

    def _end_unsure(self, now: float) -> None:
        """No later pause will tell more about the unsure one."""
        if self._unsure and now - self._unsure[0] >= _BLIP_S:
            self._decide(following=(now, False))
        self._unsure = None

    def _all_words(self) -> list[Word]:
        """The words that were not given out for sure, with the open text's, and an empty one behind them."""
        words, mark = self._words_up_to(len(self._open))  # a pause would not come within the last one
        return [*self._words, *words, Word("", 0.0, mark)]

    def _unlikely(
        self, words: list[Word], first: int, start: float, now: float, short: bool = False, sure: bool = False
    ) -> dict[int, float]:
        """For each count of words that may have ended at a pause `now`, how unlikely that is. Without what is
        impossible.

        Args:
            words: as of `_all_words`.
            first: of them have ended before `start`.
            short: so is the pause.
            sure: a word ended there.
        """
        found, at, passed = {}, start, 0.0
        for count in range(first, len(words)):
            mark = words[count].behind if count > first else _NONE
            off = (at - now) / (_OFF_S + _OFF_SHARE * (at - start))
            if off > 0 and off * off / 2 + passed > _IMPOSSIBLE and not sure:
                break
            cost = off * off / 2 + passed + _PAUSES_AT[mark]
            if mark == _END and short:
                cost += _SHORT_AT_END
            if cost < _IMPOSSIBLE or sure:
                found[count] = cost
            passed += _GOES_ON_AT[mark] if count > first else 0.0
            at += words[count].weight * self._rate.seconds
        return found

    def _choose(self, unlikely: dict[int, float], now: float, most: int) -> None:
        """Give out all words up to the likeliest end, and begin anew behind it. `most`: the last count that can be."""
        if possible := [(cost, count) for count, cost in unlikely.items() if count <= most]:
            _, count = min(possible)
            if count > len(self._words):
                self._end_words()
            self._begin_anew(count, now)

    def _begin_anew(self, behind: int, now: float) -> None:
        """So many words have ended now, at a pause."""
        self._spread(behind, now)
        said, self._words = self._words[:behind], self._words[behind:]
        self._rate.learn(sum(word.weight for word in said), now - self._from)
        self._from, self._given = now, max(0, self._given - behind)
        self._last = now + sum(word.weight for word in self._words[: self._given - 1]) * self._rate.seconds

    # ------------------------------------------------------------ words and times

    def due(self) -> list[tuple[str, float]]:
        """Words that begin within the sound so far, each with the time: in seconds from the first sample."""
        while self._given < len(self._words) and not self._unsure:
            at, wait = self._from, _BLIP_S
            if self._given:
                at = self._last + self._words[self._given - 1].weight * self._rate.seconds
                wait = _wait_after(at) if self._waits else 0.0
            if at + wait >= self.spoken_s:
                break
            self._give(self._words[self._given], at)
        due, self._due = self._due, []
        return due

    def finish(self) -> list[tuple[str, float]]:
        """Text and sound are complete: the words that are left, each with its time."""
        self._take(self._pauses.finish())
        self._end_words()
        self._end_unsure(self.spoken_s)
        self._begin_anew(len(self._words), self.spoken_s)
        due, self._due = self._due, []
        return due

    def _spread(self, until: int, end: float) -> None:
        """Give out the words before this one: they take the time from the last one that was given out to `end`."""
        first, at = max(0, self._given - 1), self._last if self._given else self._from
        pace = max(0.0, end - at) / (sum(word.weight for word in self._words[first:until]) or 1.0)
        for index in range(first, until):
            if index >= self._given:
                self._give(self._words[index], at)
            at += self._words[index].weight * pace

    def _give(self, word: Word, at: float) -> None:
        """Give out the next word. It begins after so many seconds of speech."""
        self._last, self._given = at, self._given + 1
        paused = next(seconds for place, seconds in reversed(self._paused) if place <= at + _WINDOW_S / 2)
        self._told = max(self._told, (at + paused) / self._speed)
        self._due.append((word.text, self._told))
