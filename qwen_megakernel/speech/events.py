"""What a session of speech says of itself: began, sound, words, ended.

This module imports no torch, because a server's client takes these events too.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qwen_megakernel.engine.audio import Audio


@dataclass(frozen=True)
class Began:
    """Speech was asked for. `seed`: the one that it is spoken with."""

    seed: int


@dataclass(frozen=True, eq=False)
class Sound:
    """The next samples, fp32 [n] in -1..1."""

    samples: np.ndarray


@dataclass(frozen=True)
class Words:
    """Words, and when each begins, in seconds from the first sample."""

    words: list[tuple[str, float]]
    measured: bool = False  # by the model's attention to its text; False: estimated by the words' lengths


@dataclass(frozen=True)
class Ended:
    """Everything was made."""

    finish_reason: str  # as `Audio` has it
    seconds: float  # of audio
    compute_s: float  # seconds that making it took
    seed: int
    attempts: int = 1  # how often a part was said at most
    cut: str | None = None  # why text was left unspoken; None: none was, or the caller had said how long speech may be
    audio: Audio | None = None  # all of it, if this process made it


Event = Began | Sound | Words | Ended


class Session(Protocol):
    """Speech of one text, which may come in pieces."""

    @property
    def begun(self) -> bool:
        """It was begun without an error."""

    @property
    def done(self) -> bool:
        """All was made, or it was cancelled."""

    async def push_text(self, text: str) -> None:
        """Append a piece of text. Raises TextEndedError if speech has ended; `events` says why."""

    async def flush(self) -> None:
        """Speak text that is held back because the next character could change it."""

    async def end_text(self) -> None:
        """The text is complete."""

    def end_word(self) -> list[tuple[str, float]]:
        """The text so far ends with a whole word. Returns the words that are due by now."""

    def cancel(self) -> None:
        """Stop. Takes no time and never fails."""

    def events(self) -> AsyncIterator[Event]:
        """Yield what is spoken, as it is made."""
