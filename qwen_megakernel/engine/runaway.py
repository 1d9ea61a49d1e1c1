"""RunawayGuard: tells speech from what the model makes when it misses its end.

Once in a few hundred requests the published model never says end of speech. It stays in near-silence, repeats itself,
or babbles on, up to the frame limit (207 of 60,424 requests in sglang-omni issue 1179).

At first a pause looks like a loop, and a slow speaker like babble. But frames are made much faster than they are heard.
So the guard hands out the first second of a loop, holds back what follows, and decides after three seconds. Speech that
takes longer than its text should is also held back; the guard decides at a length that no speaker needs. If speech goes
on or ends by itself, the listener gets all of it, a little later. Otherwise what was held back is dropped.

How long a text should take follows from its characters alone. So nothing that an engine says depends on what it said
before.

If a head of the talker was known when the engine was loaded, its attention to the text (text_path.py) tells more:
speech that gets to no token that it has not been at before is a loop of its own kind, a standstill.
"""

import functools
import math
import re
import unicodedata
from collections import deque
from collections.abc import Sequence

import numpy as np

from qwen_megakernel.model.edges import lasting_level, levels

HANDED_OUT = 12  # frames of a loop that a listener hears at most: 0.96 s
VERDICT = 38  # frames in a loop after which it is a runaway: 3 s, a second more than the pauses of slow speech

LETTER_FRAMES = 0.875
"""Frames that a Latin letter takes: 0.07 s, blanks included. English speech has 12 to 16 letters a second."""
HELD_TIMES, HELD_SLACK = 0.85, 25
"""Speech is held back if it takes longer than `HELD_TIMES` what its text should plus `HELD_SLACK` frames (2 s). The
demo voice takes 0.8 to 1.4 times what a sentence should, 2 times for a single letter
(docs/log/2026-11-23.md#speech-goes-long)."""
BABBLE_TIMES, BABBLE_AT_LIMIT, BABBLE_SLACK = 4, 2, 62
"""Speech is babble if it takes longer than `BABBLE_TIMES` what its text should plus `BABBLE_SLACK` frames (5 s). At the
frame limit, where it is cut anyway, `BABBLE_AT_LIMIT` times are enough."""

_PERIODS = range(1, 5)
_QUIET, _SILENT = 0.01, 5e-4  # lasting RMS: relative to the loudest frame so far (-40 dB), absolute (-66 dBFS)
_WINDOWS = 40  # of a frame, 2 ms each
_SPELT = 6.0  # letters of a digit or a symbol: "seven", "percent", "siebenundsiebzig" for two
_SYLLABLE = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff66-\uff9f\uac00-\ud7af]")
_SPOKEN_MARKS = "%&@#*/\\"  # which Unicode counts as punctuation


class RunawayGuard:
    """Watches one utterance once its text is used up. Before that, repeats and silence are allowed.

    It takes frames one by one, each with its codes and its sound. So the verdict does not depend on how far the vocoder
    is behind the codes, nor on how many frames it makes at once.
    """

    def __init__(self) -> None:
        self._unheard: deque[tuple[bytes, bool]] = deque()  # of frames seen: codes; is the text used up?
        self._recent: deque[bytes] = deque(maxlen=_PERIODS[-1])
        self._repeated: dict[int, int] = {}  # by period: latest frames that equal the one so many before, if any do
        self._quiet = 0  # latest frames that are near silence
        self.reached: Sequence[int] = ()  # see `TextPath`; it knows a frame before `hear` does, or nobody knows
        self._standing = 0  # frames that are no silence since it got to a new token
        self._loudest = 0.0
        self._frames = 0
        self._watched_from = 0  # the first frame behind the text
        self._should_take = 0.0  # frames, for the text so far; 0: no text is known, and length is not judged
        self._runaway: str | None = None  # its kind; no further frame is looked at

    def add_text(self, text: str) -> None:
        """More of the text that is spoken. Called in callers' threads, before the text is complete."""
        self._should_take += LETTER_FRAMES * letters_of(text)

    def see(self, codes: np.ndarray, text_used_up: bool) -> None:
        """One more frame: codes int64 [groups]. `hear` follows."""
        self._unheard.append((codes.tobytes(), text_used_up))  # comparing arrays four times would take longer

    def hear(self, samples: np.ndarray, frames: int) -> None:
        """What the next frames sound like: fp32 [frames * 1920]. A click within silence leaves it silent."""
        for level in lasting_level(levels(samples.reshape(frames, _WINDOWS, -1))).tolist():
            codes, text_used_up = self._unheard.popleft()
            if not self._runaway:
                self._add(codes, text_used_up, level)
                self._runaway = self._judge()

    def _add(self, codes: bytes, text_used_up: bool, level: float) -> None:
        recent = self._recent
        repeats = [p for p in _PERIODS if p <= len(recent) and codes == recent[-p]] if codes in recent else ()
        if repeats or self._repeated:
            self._repeated = {period: self._repeated.get(period, 0) + 1 for period in repeats}
        recent.append(codes)
        self._loudest = max(self._loudest, level)
        self._quiet = self._quiet + 1 if level < max(_SILENT, _QUIET * self._loudest) else 0
        if self._frames < len(self.reached):
            moves = not self._frames or self.reached[self._frames] > self.reached[self._frames - 1]
            self._standing = 0 if moves or not text_used_up else self._standing + (not self._quiet)
        self._frames += 1
        if not text_used_up:
            self._watched_from = self._frames

    def verdict(self, *, at_limit: bool = False) -> str | None:
        """The kind of runaway: "repeats", "silence", "standstill" or "babble"; None: it may still be speech.
        `at_limit`: the frame limit ends it. A loop of more than `HANDED_OUT` frames is then a runaway already, and
        babble is one after `BABBLE_AT_LIMIT` times."""
        return self._runaway or (self._judge(at_limit=True) if at_limit else None)

    def _judge(self, *, at_limit: bool = False) -> str | None:
        for kind, begin in self._loops():
            if self._frames - begin >= VERDICT or at_limit and begin + HANDED_OUT < self._frames:
                return kind
        times = BABBLE_AT_LIMIT if at_limit else BABBLE_TIMES
        return "babble" if self._is_longer_than(times, BABBLE_SLACK) else None

    def longest(self, text_rows: int) -> float:
        """By how many frames there is a verdict, whatever is said; infinity: perhaps by none. `text_rows`: of the whole
        text. Only once all of it was added."""
        if not self._should_take:
            return math.inf
        # While the text was open, at most one frame was launched beyond its rows (`SpeechSequence.starved`).
        return max(int(BABBLE_TIMES * self._should_take + BABBLE_SLACK), text_rows + 1) + 1

    @property
    def presentable(self) -> int:
        """How many frames, from the utterance's first, may be handed out by now."""
        most = [begin + HANDED_OUT for _, begin in self._loops()]
        if self._is_longer_than(HELD_TIMES, HELD_SLACK):
            most.append(max(int(HELD_TIMES * self._should_take + HELD_SLACK), self._watched_from))
        return min(most, default=self._frames)

    def _is_longer_than(self, times: float, slack: int) -> bool:
        """Is the text used up, and has the speech taken more than `times` its expected frames plus `slack`?"""
        most = times * self._should_take + slack
        return self._should_take > 0 and self._frames > most and self._frames > self._watched_from

    def _loops(self) -> list[tuple[str, int]]:
        """Kind and first frame of every run that lasts until now."""
        if not (self._repeated or self._quiet or self._standing):  # as nearly always
            return []
        loops = [("repeats", self._frames - run - period) for period, run in self._repeated.items()]
        loops += [("silence", self._frames - self._quiet)] if self._quiet else []
        loops += [("standstill", self._frames - self._standing)] if self._standing else []
        return [(kind, max(begin, self._watched_from)) for kind, begin in loops]


def is_syllable(character: str) -> bool:
    """Is it Chinese, Japanese or Korean, where a character is a syllable or more?"""
    return bool(_SYLLABLE.match(character))


def letters_of(text: str) -> float:
    """How long a text takes to say, in Latin letters, with a generous length for each character. It is a sum over
    characters, so the pieces of a text add up wherever they are cut."""
    return sum(map(_letters, text))


@functools.lru_cache(4096)
def _letters(character: str) -> float:
    kind = unicodedata.category(character)
    if is_syllable(character):
        return 4.0  # 0.28 s; Chinese and Korean take 0.2, a Japanese character up to three syllables
    if kind == "Lu":
        return 3.0  # as in "USA"
    if kind.startswith("L"):
        return 1.0
    if kind.startswith(("N", "S")) or character in _SPOKEN_MARKS:
        return _SPELT
    return 4.0 if kind.startswith("P") else 1.0  # a pause
