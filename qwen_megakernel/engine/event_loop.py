"""AsyncUtterance: an utterance as an event loop sees it. The server and the Pipecat service both speak through it.

    event loop ── submit, push_text, flush, end_text ──► executor ──► engine
    event loop ◄── call_soon_threadsafe ◄── the utterance's callback thread

The calls into the engine compute (they tokenise text and build the prompt), so they run in an executor.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Any

from qwen_megakernel.engine.audio import Audio, Chunk
from qwen_megakernel.engine.engine import TTSEngine
from qwen_megakernel.engine.utterance import Utterance


class AsyncUtterance:
    """One utterance of an engine, for one event loop. Make it in that loop, `submit` it, iterate over its chunks.

    Attributes:
        audio: the whole utterance, as soon as the last chunk has been taken; None before.
    """

    def __init__(self, engine: TTSEngine, executor: Executor):
        """
        Args:
            engine: that speaks.
            executor: runs the calls into the engine. With a single thread they keep their order, so that pieces of
                text may be pushed by several tasks.
        """
        self._engine, self._executor = engine, executor
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._utterance: Utterance | None = None
        self._cancelled = False
        self.audio: Audio | None = None

    async def submit(self, text: str | None, **request: Any) -> None:
        """Begin. If the calling task is cancelled meanwhile, the utterance is cancelled as soon as it exists.

        Args:
            text: what to say; None: it comes through `push_text` and `end_text`.
            **request: `TTSEngine.submit`'s options.

        Raises:
            TTSError: as `TTSEngine.submit`.
        """

        def submit() -> None:
            utterance = self._engine.submit(text, self._receive, on_end=lambda: self._receive(None), **request)
            self._utterance = utterance
            if self._cancelled:  # `cancel` came before the utterance existed
                utterance.cancel()

        try:
            await self._run(submit)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _receive(self, chunk: Chunk | None) -> None:
        """Called by the engine's callback thread. None: the utterance has ended."""
        try:
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)
        except RuntimeError:  # the loop is closed: nobody waits for chunks any more
            self.cancel()

    @property
    def begun(self) -> bool:
        """`submit` has succeeded."""
        return self._utterance is not None

    @property
    def done(self) -> bool:
        """The engine has ended it; chunks may still wait to be taken."""
        return self._utterance is not None and self._utterance.done

    async def push_text(self, text: str) -> None:
        """See `Utterance.push_text`, which also says what it raises."""
        await self._run(lambda: self._utterance.push_text(text))

    async def flush(self) -> None:
        """See `Utterance.flush`."""
        await self._run(self._utterance.flush)

    async def end_text(self) -> None:
        """See `Utterance.end_text`."""
        await self._run(self._utterance.end_text)

    async def _run(self, call: Callable[[], Any]) -> None:
        await self._loop.run_in_executor(self._executor, call)

    def cancel(self) -> None:
        """Stop before the next frame. Takes no time, also before the utterance has begun and after its end."""
        self._cancelled = True
        if self._utterance and not self._utterance.done:
            self._utterance.cancel()

    async def next_chunk(self) -> Chunk | None:
        """The next chunk; None after the last one, when `audio` is set.

        Raises:
            TTSError: why the utterance failed.
        """
        chunk = await self._chunks.get()
        if chunk is None:
            self.audio = self._utterance.result()  # it has ended, so this does not wait
        return chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """
        Raises:
            TTSError: why the utterance failed.
        """
        while (chunk := await self.next_chunk()) is not None:
            yield chunk
