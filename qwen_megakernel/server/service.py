"""EngineService: what HTTP and WebSocket share. An engine, the voices of a folder, and utterances as an event loop sees
them: chunks come from the engine's threads through `call_soon_threadsafe`, prompts are built in threads of a pool.
"""

import asyncio
import base64
import contextlib
import logging
import re
import secrets
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_megakernel.checkpoint.config import SamplingParams
from qwen_megakernel.engine.audio import Audio, Chunk
from qwen_megakernel.engine.engine import TTSEngine
from qwen_megakernel.engine.utterance import Utterance
from qwen_megakernel.errors import (
    AudioError,
    CheckpointError,
    EngineBusy,
    EngineClosed,
    KernelFault,
    LanguageError,
    OutOfMemoryError,
    RequestError,
    SpeakerError,
    TextError,
    TTSError,
    VoiceError,
)
from qwen_megakernel.model.voice import Voice

log = logging.getLogger(__name__)

TOKEN = "QWEN_MEGAKERNEL_TOKEN"
"""Environment variable with a server's token: a command line can be read by every user of a machine."""

DEFAULT_VOICE = "default"
"""Whoever the checkpoint speaks with when nobody is named; of a Base checkpoint, the first saved voice."""

_VOICE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_MOST_VOICES = 1000
_SUBMITTERS = 4  # threads that build prompts: they compute, and hold up nobody else's loop
_SHORT = 500  # characters: cut into pieces in less than a millisecond, in which no thread is needed
_WATCH_S = 0.5
_BASE64_PIECE = 1 << 18  # characters, 0.4 ms
_SEED_BITS = 53  # of fresh ones: JavaScript's numbers hold so many


@dataclass(frozen=True)
class Limits:
    """What one caller may take of a server. Seconds, bytes, characters.

    Attributes:
        max_text: characters of one request, or of one context.
        max_body: bytes of a request's body, or of a WebSocket message.
        max_upload: bytes of a reference recording.
        connections: at once, HTTP and WebSocket together.
        contexts: of one WebSocket at once.
        header_s: a connection that has not sent the head of a request within so long is closed.
        idle_s: a client that sends or takes nothing for so long is let go.
        text_s: a context whose text has not ended and does not go on for so long is ended.
        total_s: one request, or one context, from its first byte to its last.
        drain_s: what is being said when the server is told to stop may go on for so long.
    """

    max_text: int = 4096
    max_body: int = 64 << 10
    max_upload: int = 8 << 20
    connections: int = 512
    contexts: int = 16
    header_s: float = 20.0
    idle_s: float = 60.0
    text_s: float = 120.0
    total_s: float = 600.0
    drain_s: float = 10.0


_FIELDS = {
    SpeakerError: "voice",
    VoiceError: "voice",
    LanguageError: "language",
    TextError: "text",
    AudioError: "audio",
}


@dataclass(frozen=True)
class Problem:
    """An error in words for a client.

    Attributes:
        status: of HTTP.
        code: what went wrong, see docs/serving.md.
        retryable: the same request may succeed elsewhere or later.
        field: of the request, that it is about.
    """

    status: int
    code: str
    message: str
    retryable: bool = False
    field: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Problem":
        if isinstance(error, RequestError):
            field = next((name for kind, name in _FIELDS.items() if isinstance(error, kind)), None)
            return cls(400, "invalid", str(error), field=field)
        if isinstance(error, EngineBusy):
            return cls(429, "busy", str(error), True)
        if isinstance(error, EngineClosed):
            code = "dead" if "died" in str(error) or "is dead" in str(error) else "closing"
            return cls(503, code, "nothing is served here now; try again, or elsewhere", True)
        if isinstance(error, (KernelFault, OutOfMemoryError)):
            return cls(503, "failed", f"{type(error).__name__}: {error}", True)
        if isinstance(error, TTSError):
            return cls(500, "failed", f"{type(error).__name__}: {error}")
        return cls(500, "failed", "an error inside the server; its log says which")


class Speech:
    """One utterance. Iterate over its chunks; then `audio` is the whole of it."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._utterance: Utterance | None = None
        self._cancelled = False
        self.audio: Audio | None = None

    def tell(self, chunk: Chunk | None) -> None:
        """From the engine's threads; None: it has ended."""
        try:
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.cancel()

    def began(self, utterance: Utterance) -> None:
        self._utterance = utterance
        if self._cancelled:
            utterance.cancel()

    @property
    def utterance(self) -> Utterance:
        return self._utterance

    def cancel(self) -> None:
        """Stop before the next frame; takes no time, also before it has begun."""
        self._cancelled = True
        if self._utterance and not self._utterance.done:
            self._utterance.cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """
        Raises:
            TTSError: why it failed.
        """
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        self.audio = audio = self._utterance.result()
        ttfc = "-" if audio.ttfc_s is None else f"{1000 * audio.ttfc_s:.1f} ms"
        log.info("%.2f s, %s, seed %d, first chunk %s", audio.duration_s, audio.finish_reason, audio.seed, ttfc)


class EngineService:
    """Loads its engine in the background; everything else runs in the event loop.

    Attributes:
        model: the name that clients call the model by.
        voices: saved ones, by name.
        state: "loading", "ready", "draining", "failed" (it could not be loaded) or "dead".
        error: why it is failed or dead.
        open: utterances that are being said.
        unsent: sockets that have not been sent all of what was said.
    """

    def __init__(
        self,
        load: Callable[[], TTSEngine],
        *,
        model: str,
        variant: str | None = None,
        voices: Path | None = None,
        limits: Limits,
        upload: bool = False,
        log_texts: bool = False,
    ):
        """
        Args:
            load: makes the engine; called in a thread.
            variant: the checkpoint's, where it is known already.
            voices: a folder of saved voices (`Voice.save`), each known by its file's name, which are read now.
            upload: clients may make voices.
            log_texts: what is said is told to the log.

        Raises:
            VoiceError: a file in `voices` that is none, or that such a checkpoint does not take.
            CheckpointError: it needs voices, and there will be none.
        """
        self.model, self.limits, self._load, self._folder = model, limits, load, voices
        self._upload, self._log_texts = upload, log_texts
        self.engine: TTSEngine | None = None
        self.voices = _read_voices(voices) if voices else {}
        if variant:
            self._check_voices(variant)
        self.state, self.error = "loading", ""
        self.open: set[Speech] = set()
        self.unsent: set[object] = set()
        self._pool = ThreadPoolExecutor(_SUBMITTERS, thread_name_prefix="qwen_megakernel submit")
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="qwen_megakernel voice")
        self._in_the_making: set[str] = set()
        self._tasks: list[asyncio.Task] = []
        self.gone = asyncio.Event()  # failed or dead

    # ------------------------------------------------------------ life

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._bring_up())]

    async def _bring_up(self) -> None:
        """Ready once a real utterance has been said: whoever is sent here then is heard at once."""
        try:
            self.engine = await _in_daemon(self._load)
            self._check_voices(self.engine.variant)
            await _in_daemon(self._warm_up)
        except Exception as error:
            self._give_up("failed", error, None if isinstance(error, TTSError) else error)
            return
        if self.state == "loading":
            self.state = "ready"
            log.info("ready: %s, %d voices", self.model, len(self.voice_names()))
        await self._watch()

    async def _watch(self) -> None:
        while (health := self.engine.health())["status"] != "dead":
            await asyncio.sleep(_WATCH_S)
        self._give_up("dead", health.get("error", ""))

    def _give_up(self, state: str, why: object, bug: Exception | None = None) -> None:
        """`bug`: what nobody foresaw, whose traceback is of use."""
        self.state, self.error = state, str(why)
        log.error("the engine is %s: %s", state, why, exc_info=bug)
        self.gone.set()

    async def drain(self) -> None:
        """Take no more; what is being said is said, within `drain_s`."""
        if self.state in ("loading", "ready"):
            self.state = "draining"
        end = asyncio.get_running_loop().time() + self.limits.drain_s
        while (self.open or self.unsent) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in (self._pool, self._uploads):
            pool.shutdown(wait=False, cancel_futures=True)
        if self.engine:
            await asyncio.to_thread(self.engine.close)

    def _check_voices(self, variant: str) -> None:
        """Could such a checkpoint speak with them?"""
        if variant == "base" and not self.voices and not self._upload:
            raise CheckpointError(
                f"{self.model} is a Base checkpoint, which speaks with saved voices only: --voices names a folder that "
                "has some, or --allow-upload lets clients make them"
            )
        if variant != "base" and self.voices:
            raise VoiceError(f"saved voices need a Base checkpoint; {self.model} is {variant}")

    def _warm_up(self) -> None:
        """A Base checkpoint without voices has nobody to say it; its first one may be uploaded yet.

        Raises:
            VoiceError: a voice that another checkpoint made.
        """
        for voice in self.voices.values():
            self.engine.check(voice=voice)
        if self.engine.variant != "base" or self.voices:
            self.engine.generate("Hello there.", **self.request(max_frames=4))

    # ------------------------------------------------------------ voices

    def voice_names(self) -> list[str]:
        return [*(self.engine.speakers if self.engine else ()), *self.voices]

    @property
    def can_clone(self) -> bool:
        """Clients may make voices, and the model can speak with them."""
        return self._upload and self.engine is not None and self.engine.variant == "base"

    async def add_voice(self, name: str, recording: str, text: str | None) -> None:
        """Make a voice of a recording, known by `name` from now on, and kept where there is a folder. Cancelled, it
        leaves none.

        Args:
            recording: a file's bytes, base64.

        Raises:
            RequestError: the name is taken or cannot be one, or the recording cannot be used.
        """
        if not _VOICE_NAME.fullmatch(name) or name == DEFAULT_VOICE:
            raise VoiceError(f"a voice is named by 1 to 64 of a-z 0-9 _ -, got {name[:80]!r}")
        if name in self.voice_names() or name in self._in_the_making:
            raise VoiceError(f"there is a voice {name!r} already; choose another name")
        if len(self.voices) >= _MOST_VOICES:
            raise VoiceError(f"there are {_MOST_VOICES} voices, which is all that are kept")

        def keep(voice: Voice) -> None:
            if self._folder:
                self._keep(voice, name)
            self.voices[name] = voice

        run = asyncio.get_running_loop().run_in_executor
        self._in_the_making.add(name)
        try:
            voice = await run(self._uploads, self._made_of, recording, text)
            await run(self._uploads, keep, voice)
        finally:
            self._in_the_making.discard(name)

    def _made_of(self, recording: str, text: str | None) -> Voice:
        with tempfile.NamedTemporaryFile() as file:
            for piece in _decoded(recording):
                file.write(piece)
            file.flush()
            try:
                return self.engine.create_voice(file.name, text)
            except RequestError as error:  # which names a file that the client does not know
                raise AudioError(str(error).replace(file.name, "the recording")) from None

    def _keep(self, voice: Voice, name: str) -> None:
        try:
            voice.save(self._folder / f"{name}.safetensors")
        except VoiceError as error:  # ours, not the client's
            log.error("a voice could not be kept: %s", error)
            raise TTSError("the voice could not be kept; the server's log says why") from None

    # ------------------------------------------------------------ speaking

    def check_ready(self) -> None:
        """
        Raises:
            EngineClosed: it is not ready, or no longer.
        """
        if self.state != "ready":
            raise EngineClosed(f"the server is {self.state}")

    def request(
        self,
        voice: str | None = None,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """What `TTSEngine.submit` takes, from what a client says; `options` are submit's own, which checks them.

        Raises:
            RequestError: a voice that is not there, or a sampling value out of its range.
        """
        options["sampling"] = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            subtalker_temperature=temperature,
            subtalker_top_k=top_k,
            subtalker_top_p=top_p,
            seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        )
        if self.engine.variant == "base" and not self.voices:
            raise SpeakerError("there are no voices yet: POST /v1/voices makes one of a recording")
        name = DEFAULT_VOICE if voice is None else voice.lower()
        if name in self.voices:
            options["voice"] = self.voices[name]
        elif name in self.engine.speakers:
            options["speaker"] = name
        elif name != DEFAULT_VOICE:
            raise SpeakerError(f"unknown voice {voice[:80]!r}; known: {', '.join(self.voice_names()) or DEFAULT_VOICE}")
        elif self.engine.variant == "base":
            options["voice"] = next(iter(self.voices.values()))
        return options

    async def pieces(self, text: str, request: dict[str, Any]) -> list[str]:
        """Whole text as utterances that each fit a slot.

        Raises:
            RequestError: it can never be served like this.
        """

        def cut() -> list[str]:
            return self.engine.pieces(text, **request)

        return cut() if len(text) <= _SHORT else await self.run(cut)

    def saying(self, text: str | None, request: dict[str, Any]) -> "_Saying":
        """`async with` what begins an utterance and cancels what is left of it. text: None where it comes in pieces."""
        return _Saying(self, text, request)

    def log_text(self, text: str) -> None:
        """Texts are nobody's business unless the operator asks for them."""
        if self._log_texts and text:
            log.info("text %r", text)

    async def run(self, job: Callable[[], Any]) -> Any:
        """In a thread that may compute."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, job)


def _read_voices(folder: Path) -> dict[str, Voice]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        name = path.stem.lower()
        if not _VOICE_NAME.fullmatch(name) or name == DEFAULT_VOICE:
            raise VoiceError(f"{path}: a voice's file is named by 1 to 64 of a-z 0-9 _ -, and not {DEFAULT_VOICE!r}")
        found[name] = Voice.load(path)
    return found


def _decoded(recording: str) -> Iterator[bytes]:
    """Of base64, piece by piece: 8 MB at once would keep every other thread waiting for 14 ms.

    Raises:
        AudioError: it is not base64.
    """
    try:
        for at in range(0, len(recording), _BASE64_PIECE):
            yield base64.b64decode(recording[at : at + _BASE64_PIECE], validate=True)
    except ValueError as error:
        raise AudioError(f"audio must be base64: {error}") from None


async def _in_daemon(job: Callable[[], Any]) -> Any:
    """In a thread that keeps no process from ending: a download may take an hour."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def tell(set_it: Callable, value: Any) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        try:
            told = done.set_result, job()
        except BaseException as error:
            told = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run, name="qwen_megakernel load", daemon=True).start()
    return await done


class _Saying:
    def __init__(self, service: EngineService, text: str | None, request: dict[str, Any]):
        self._service, self._text, self._request, self._speech = service, text, request, Speech()

    async def __aenter__(self) -> Speech:
        """
        Raises:
            TTSError: it cannot be said, or not now.
        """
        speech, engine = self._speech, self._service.engine

        def submit() -> None:
            speech.began(engine.submit(self._text, speech.tell, on_end=lambda: speech.tell(None), **self._request))

        self._service.open.add(speech)
        self._service.log_text(self._text or "")
        try:
            await self._service.run(submit)
        except BaseException:  # also cancelled: the thread goes on, and its utterance ends at once
            self._leave()
            raise
        return speech

    async def __aexit__(self, *_exc_info) -> None:
        self._leave()

    def _leave(self) -> None:
        self._speech.cancel()
        self._service.open.discard(self._speech)
