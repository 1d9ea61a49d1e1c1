"""Host: what an `AudioContext` needs of its service. `pipecat/service.py` makes contexts and is their host."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from pipecat.frames.frames import ErrorFrame, Frame

from qwen_megakernel.speech.events import Ended, Session


@dataclass(frozen=True)
class Opening:
    """A session that was made and waits for its beginning.

    Attributes:
        session: it.
        begin: begins it with the text for which it was opened. Raises TTSError or OSError.
        sample_rate: of its sound, in Hz.
        least_first_s: seconds that the first frame of its audio context must have.
    """

    session: Session
    begin: Callable[[], Awaitable[None]]
    sample_rate: int
    least_first_s: float = 0.0


class Host(Protocol):
    """A service that speaks. Pipecat's `TTSService` has those methods that say nothing of errors."""

    @property
    def in_tokens(self) -> bool:
        """Text comes in tokens, so a context is one session. Else each sentence is one."""

    @property
    def trims_silence(self) -> bool:
        """Silence in front of a context's first speech is cut."""

    @property
    def sample_rate(self) -> int:
        """Of the pipeline's audio, in Hz."""

    async def open_session(self, context_id: str, reading: object, text: str, *, complete: bool) -> Opening:
        """Make a context's next session.

        Args:
            reading: what the context reads together with others, by `TurnService._new_reading`.
            text: what the session begins with.
            complete: no more text will come.

        Raises:
            TTSError, OSError: it cannot speak.
        """

    async def tell(self, ended: Ended) -> None:
        """Log and measure what was spoken."""

    def error_frame(self, context_id: str, error: Exception) -> ErrorFrame:
        """Why a context's latest text cannot be spoken. The words of that sentence do not count as spoken."""

    async def finish_words(self, context_id: str) -> None:
        """Let a context's words be matched with its last sentence, which has ended."""

    async def close_context(self, context_id: str) -> None:
        """Say that a context gets nothing more. Does nothing if Pipecat has dropped it."""

    async def append_to_audio_context(self, context_id: str, frame: Frame) -> None:
        """Play a frame behind the others of its context."""

    async def add_word_timestamps(
        self, words: list[tuple[str, float]], context_id: str, includes_inter_frame_spaces: bool | None
    ) -> None:
        """Tell words, each with its time in seconds from the context's first audio. `includes_inter_frame_spaces`: no
        blank stands between them; None: one does."""

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task:
        """Run something beside the frames, until the pipeline ends."""
