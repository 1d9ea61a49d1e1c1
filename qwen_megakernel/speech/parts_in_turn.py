"""PartsInTurn: the calls of `Parts` for an event loop, and which part is said next."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from qwen_megakernel.engine.audio import Audio, joined
from qwen_megakernel.errors import EngineBusy, NoWordsError
from qwen_megakernel.speech.engine import TTSEngine
from qwen_megakernel.speech.parts import CUT, Parts
from qwen_megakernel.speech.request import SpeechRequest
from qwen_megakernel.speech.retries import ended_badly, next_seed

_BUSY_S = 0.25  # a patient session tries again after this time if all slots are taken


class PartsInTurn:
    """All in one event loop, but for the calls themselves, which run in the executor.

    Attributes:
        lock: held from one piece of text to its end, so that pieces keep their order.
        cancelled: no part will follow.
        most_attempts: how often the part was said that was said most often.
    """

    def __init__(self, engine: TTSEngine, executor: Executor, request: SpeechRequest, parts: Parts, *, patient: bool):
        """`patient`: wait for a slot, however long it takes."""
        self._engine = engine
        self._executor = executor
        self._request = request
        self._parts = parts
        self._patient = patient
        self._loop = asyncio.get_running_loop()
        self.lock = asyncio.Lock()
        self._news = asyncio.Event()  # text has come, or its end, or a cancel
        self._said: list[Audio] = []  # the parts that are over
        self._attempts = 1  # of the current part
        self.most_attempts = 1
        self.cancelled = False

    async def call(self, function: Callable[..., None], *args: object) -> None:
        """A call of `Parts`, in the executor. `lock` is held, or no other call can come."""
        await self._loop.run_in_executor(self._executor, partial(function, *args))
        self._news.set()

    async def begin(self, begin: Callable[..., None], *args: object) -> None:
        """As `call`, for what begins a part. Raises EngineBusy: there is no slot, and it is not patient."""
        while True:
            try:
                return await self.call(begin, *args)
            except EngineBusy:
                if not self._patient:
                    raise
            await asyncio.sleep(_BUSY_S)

    def cancel(self) -> None:
        """Stop before the next frame, and begin no further part. Any thread may call it once the loop is closed."""
        self.cancelled = True
        self._news.set()
        self._parts.cancel()

    async def part_ended(self) -> tuple[Audio | None, Audio | None]:
        """The current part has ended. Begin the next one, or that one again. Returns what was held back of it, and
        everything if it was the last.

        Raises:
            TTSError: why it failed, or the next one cannot begin. NoWordsError: no part had a word.
        """
        assert self._parts.utterance
        try:
            audio = self._parts.utterance.result()  # it has ended, so this does not wait
        except EngineBusy:  # it has waited too long for a slot
            if not self._patient:
                raise
            await asyncio.sleep(_BUSY_S)
            await self.begin(self._parts.repeat)
            return None, None
        held = None
        if self._request.retries:
            again = self._attempts <= self._request.retries and self._parts.can_repeat() and not self.cancelled
            if again and ended_badly(audio):
                self._attempts += 1
                self.most_attempts = max(self.most_attempts, self._attempts)
                self._engine.count_retry()
                await self.begin(self._parts.repeat, next_seed(audio.seed))
                return None, None
            held = audio
        if await self._go_on(audio):
            return held, None
        if len(self._said) == 1:
            return held, self._said[0]
        # To join minutes takes too long for an event loop.
        return held, await self._loop.run_in_executor(self._executor, joined, self._said)

    async def _go_on(self, audio: Audio) -> bool:
        """Begin the part behind the one that said `audio`. False: there is none."""
        if self.cancelled or not self._parts.superseded:
            self._said.append(audio)
            if self.cancelled or audio.finish_reason in CUT:
                return False
        while not self.cancelled:
            self._news.clear()
            async with self.lock:
                if self._parts.has_next:
                    self._attempts = 1
                    await self.begin(self._parts.begin_next, self._said[-1] if self._said else None)
                    return True
                if self._parts.complete:
                    break
            await self._news.wait()
        if not self._said and not self.cancelled:
            raise NoWordsError("text must not be blank")
        self._said = self._said or [audio]
        return False
