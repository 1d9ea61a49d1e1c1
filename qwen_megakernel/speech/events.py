"""What a session of speech says of itself: began, sound, words, ended.

This module imports no torch, because a server's client takes these events too.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np


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


@dataclass(frozen=True)
class Ended:
    """Everything was made.

    Attributes:
        finish_reason: as `Audio` has it.
        seconds: of audio.
        compute_s: seconds that making it took.
        attempts: how often a part was said at most.
        cut: why the rest of the text was not spoken; None: it was, or the caller had said how long speech may be.
    """

    finish_reason: str
    seconds: float
    compute_s: float
    seed: int
    attempts: int = 1
    cut: str | None = None


Event = Began | Sound | Words | Ended


class Session(Protocol):
    """Speech of one text, as it comes.

    Attributes:
        open: more text may come.
    """

    @property
    def done(self) -> bool: ...

    async def push_text(self, text: str) -> None: ...

    async def flush(self) -> None: ...

    async def end_text(self) -> None: ...

    def cancel(self) -> None: ...

    def events(self) -> AsyncIterator[Event]: ...
