"""Utterance and ChunkStream: what callers hold of an utterance."""

import numbers
import reprlib
import threading
from collections.abc import Iterator

from qwen_megakernel.engine.audio import Audio, Chunk
from qwen_megakernel.engine.core import EngineCore
from qwen_megakernel.engine.sequence import SpeechSequence
from qwen_megakernel.errors import RequestError, TextEndedError, TextError
from spoken_text.cutting import check_unicode


class Utterance:
    """One request on its way through an engine; made by `TTSEngine.submit`. Thread-safe. Dropping it while its text is
    open cancels it: nobody could end it any more."""

    def __init__(self, sequence: SpeechSequence, core: EngineCore, engine: object):
        """`engine`: stays alive as long as one of its utterances is held."""
        self._sequence = sequence
        self._core = core
        self._engine = engine

    @property
    def seed(self) -> int:
        """Given or fresh; the same request with it says the same again."""
        return self._sequence.request.seed

    @property
    def tokens(self) -> list[int]:
        """Ids of its text so far, of which `Audio.token_s` tells."""
        return list(self._sequence.input.tokens)

    @property
    def done(self) -> bool:
        return self._sequence.result.done.is_set()

    def push_text(self, text: str) -> None:
        """Append a piece of the text, cut anywhere. Speech starts as soon as a first word is whole. It waits, silent,
        when the text has run out but was not ended.

        Raises:
            TextEndedError: the text was ended, or the utterance was cancelled, failed or reached its limit.
            TextError: `text` is not a string of valid Unicode; nothing was taken.
            TextTooLongError: the text no longer fits a slot; the utterance has then failed.
        """
        if not isinstance(text, str):
            raise TextError(f"text must be a string, got {type(text).__name__}")
        check_unicode(text)
        with self._sequence.input.lock:
            self._refuse_closed_text("push_text")
            self._sequence.add_text(text)
            self._core.advance(self._sequence, lambda pieces: pieces.push(text))

    def flush(self) -> None:
        """Also speak what `push_text` holds back because the next character could change it. Raises TextEndedError: as
        `push_text`."""
        with self._sequence.input.lock:
            self._refuse_closed_text("flush")
            self._core.advance(self._sequence, lambda pieces: pieces.flush())

    def end_text(self) -> None:
        """The text is complete; calling it again changes nothing. Raises TextError: the whole text cannot be spoken
        (blank, too long); the utterance has then failed."""
        with self._sequence.input.lock:
            given = self._sequence.input
            if given.text_open and not given.cancelled and not self._sequence.result.settled:
                given.text_open = False
                self._core.advance(self._sequence, lambda pieces: pieces.end())

    def _refuse_closed_text(self, call: str) -> None:
        given, result, why = self._sequence.input, self._sequence.result, None
        if given.cancelled or result.audio and result.audio.finish_reason == "cancelled":
            why = "the utterance was cancelled"
        elif result.error:
            why = f"the utterance failed: {result.error!r}"
        elif not given.text_open:
            why = "its text is complete"
        elif result.settled:
            why = "the utterance has reached its limit"
        if why:
            raise TextEndedError(f"{call} after the end: {why}; begin another utterance")

    def cancel(self) -> None:
        """Stop before the next frame; what was handed out so far stays. Safe at any time, from any thread, also from
        finalizers and signal handlers."""
        self._core.cancel(self._sequence)

    def result(self, timeout: float | None = None) -> Audio:
        """Wait for the whole utterance.

        Raises:
            RequestError: called from its own callback, which would wait for its own thread; or `timeout` is no number.
            TimeoutError: not done within `timeout` seconds; the utterance goes on.
            TTSError: why it failed.
        """
        self._core.refuse_own_thread(self._sequence)
        if timeout is not None and (not isinstance(timeout, numbers.Real) or timeout != timeout):
            raise RequestError(f"timeout must be seconds or None, got {reprlib.repr(timeout)}")
        result = self._sequence.result
        done = result.done.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        if done and result.error:
            raise result.error
        if not done or result.audio is None:
            raise TimeoutError(f"the utterance did not end within {timeout} s")
        return result.audio

    def __del__(self) -> None:
        if self._sequence.input.text_open and not self._sequence.result.settled:
            self.cancel()


class ChunkStream:
    """Iterator over an utterance's chunks. Dropping it, or `close`, cancels the utterance. Its `utterance` has the
    `result()` after the last chunk."""

    def __init__(self, utterance: Utterance):
        self.utterance = utterance
        self._ended = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        self.utterance._core.refuse_own_thread(self.utterance._sequence)
        chunk = self.utterance._sequence.result.chunks.get()
        if chunk is not None:
            return chunk
        self._ended = True
        self.utterance._sequence.result.chunks.put(None)  # for others who iterate too
        self.utterance.result()  # raises what went wrong, if anything did
        raise StopIteration

    def close(self) -> None:
        self._ended = True
        self.utterance.cancel()

    __del__ = close
