"""Seat: a place in the engine for one utterance after another, such as the parts of a long text."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Seat:
    """Its first utterance takes a place. The following ones need no other: neither a full queue nor a drain refuses
    them. They come before all strangers who wait, and the slot is kept for them for a while (`Slots`). Any thread may
    call these methods, also from a finalizer, so they take no lock.

    Attributes:
        left: no further utterance will come.
        entered: it has had a slot. The engine's thread writes this one and those below.
        speed: of its last utterance that had a slot.
        until: when its slot is no longer kept.
    """

    def __init__(
        self, take: Callable[[], None], free: Callable[[], None], taken: "set[Seat]", wake: Callable[[], None]
    ):
        """
        Args:
            take: takes a place of the engine; raises IndexError: there is none.
            free: gives one back.
            taken: gets this seat, while it has a place.
            wake: tells the engine that a place is free.
        """
        self._take_place, self._free_place = take, free
        self._taken = taken
        self._wake = wake
        self._mine: deque[None] = deque()  # the place, while no utterance uses it
        self.left = self.entered = False
        self.speed, self.until = 1.0, 0.0

    @property
    def free(self) -> bool:
        """It has a place for the next utterance."""
        return bool(self._mine)

    def take(self) -> None:
        """An utterance begins. Raises IndexError: there is no place."""
        try:
            self._mine.pop()
        except IndexError:
            self._take_place()
            self._taken.add(self)

    def give_back(self) -> None:
        """The utterance has ended."""
        self._mine.append(None)
        if self.left:
            self.leave()

    def leave(self) -> None:
        """No further utterance will come. The place is free once the last one has ended."""
        self.left = True
        with suppress(IndexError):
            self._mine.pop()
            self._free_place()
            self._taken.discard(self)
            self._wake()
