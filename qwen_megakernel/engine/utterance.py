"""Utterance and ChunkStream: what callers hold of an utterance."""

import threading
from collections.abc import Iterator

from qwen_megakernel.engine.owner import Owner
from qwen_megakernel.engine.stream import Audio, Chunk, Stream
from qwen_megakernel.errors import TextEndedError, TextError
from qwen_megakernel.model.text import check_unicode


class Utterance:
    """One request on its way through an engine; made by `TTSEngine.submit`. Thread-safe. Dropping it while its text is
    open cancels it: nobody could end it any more."""

    def __init__(self, stream: Stream, owner: Owner, engine: object):
        """`engine`: lives as long as somebody holds one of its utterances."""
        self._stream, self._owner, self._engine = stream, owner, engine

    @property
    def seed(self) -> int:
        """Given or fresh; the same request with it says the same again."""
        return self._stream.seed

    @property
    def done(self) -> bool:
        return self._stream.done.is_set()

    def push_text(self, text: str) -> None:
        """Append a piece of the text, cut anywhere. Speech starts as soon as a first word is whole, and waits, silent,
        where the text has run out and was not ended.

        Raises:
            TextEndedError: the text was ended, or the utterance has: it was cancelled, it failed, or reached its limit.
            TextError: `text` is not a string of valid Unicode; nothing was taken.
            TextTooLongError: the text no longer fits a slot; the utterance has then failed.
        """
        if not isinstance(text, str):
            raise TextError(f"text must be a string, got {type(text).__name__}")
        check_unicode(text)
        with self._stream.lock:
            self._refuse_closed_text("push_text")
            self._owner.advance(self._stream, lambda pieces: pieces.push(text))

    def flush(self) -> None:
        """That is all for now: also speak what `push_text` holds back because the next character could change it.

        Raises:
            TextEndedError: see `push_text`.
        """
        with self._stream.lock:
            self._refuse_closed_text("flush")
            self._owner.advance(self._stream, lambda pieces: pieces.flush())

    def end_text(self) -> None:
        """The text is complete; calling it again changes nothing.

        Raises:
            TextError: the whole text cannot be spoken (blank, too long); the utterance has then failed.
        """
        with self._stream.lock:
            if self._stream.text_open and not self._stream.over and not self._stream.cancelled:
                self._stream.text_open = False
                self._owner.advance(self._stream, lambda pieces: pieces.end())

    def _refuse_closed_text(self, call: str) -> None:
        stream, why = self._stream, None
        if stream.cancelled or stream.audio and stream.audio.finish_reason == "cancelled":
            why = "the utterance was cancelled"
        elif stream.error:
            why = f"the utterance failed: {stream.error!r}"
        elif not stream.text_open:
            why = "its text is complete"
        elif stream.over:
            why = "the utterance has reached its limit"
        if why:
            raise TextEndedError(f"{call} after the end: {why}")

    def cancel(self) -> None:
        """Stop before the next frame; what was handed out so far stays. Safe at any time, from any thread, also from
        finalizers and signal handlers."""
        self._owner.cancel(self._stream)

    def result(self, timeout: float | None = None) -> Audio:
        """Wait for the whole utterance.

        Raises:
            RequestError: called from its own callback, which would wait for its own thread.
            TimeoutError: not done within `timeout` seconds; the utterance goes on.
            TTSError: why it failed.
        """
        self._owner.refuse_own_thread(self._stream)
        if not self._stream.done.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"the utterance was not done within {timeout} s")
        if self._stream.error:
            raise self._stream.error
        return self._stream.audio

    def __del__(self) -> None:
        if self._stream.text_open and not self._stream.over:
            self.cancel()


class ChunkStream:
    """Iterator over an utterance's chunks. Dropping it, or `close`, cancels the utterance.

    Attributes:
        utterance: for `result()` behind the last chunk.
    """

    def __init__(self, utterance: Utterance):
        self.utterance = utterance
        self._ended = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        self.utterance._owner.refuse_own_thread(self.utterance._stream)
        chunk = self.utterance._stream.chunks.get()
        if chunk is not None:
            return chunk
        self._ended = True
        self.utterance._stream.chunks.put(None)  # for others who iterate too
        self.utterance.result()  # raises what went wrong, if anything did
        raise StopIteration

    def close(self) -> None:
        self._ended = True
        self.utterance.cancel()

    __del__ = close
