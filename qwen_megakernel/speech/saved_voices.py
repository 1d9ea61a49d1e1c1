"""SavedVoices: the voices that a server's clients may name besides the checkpoint's speakers."""

import asyncio
import base64
import logging
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from qwen_megakernel.errors import AudioError, RequestError, TTSError, VoiceError
from qwen_megakernel.files import stamp_of
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.speech.base import SpeechEngine

log = logging.getLogger(__name__)

DEFAULT_VOICE = "default"
"""Used if a request names no voice: the checkpoint's first speaker; for a Base checkpoint the first saved voice
in the alphabet."""

MOST_NAME = 64  # characters of a voice's name
_NAME = re.compile(rf"[a-z0-9][a-z0-9_-]{{0,{MOST_NAME - 1}}}")
_MOST_VOICES = 1000
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_BASE64_PIECE = 1 << 18  # characters; decoding takes 0.4 ms


class SavedVoices:
    """Used in one event loop.

    Attributes:
        by_name: name -> voice.
    """

    def __init__(self, folder: Path | None):
        """
        Args:
            folder: where voices are kept. Its *.safetensors (`Voice.save`) are read now and named by their files. None:
                there are no voices yet, and new ones are lost when the process ends.

        Raises:
            VoiceError: a file is no voice, or its name is not allowed for a voice.
        """
        self._folder = folder
        self._files: dict[str, Path] = {}
        self._stamps: dict[str, tuple[int, ...] | None] = {}  # of the files as they were read
        self.by_name: dict[str, Voice] = {}
        if folder:
            self._read(folder, lambda name, voice: None)
        self._being_made: set[str] = set()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="qwen_megakernel voice")

    def reread(self, check: Callable[[str, Voice], object]) -> None:
        """Take over what has changed in the folder. Utterances that already use a voice go on. Waits for voices that
        are being made, so not for the event loop.

        Args:
            check: called with each new voice and its name. If it raises, nothing changes.

        Raises:
            VoiceError: as the class, or what `check` raises.
        """
        assert self._folder
        self._executor.submit(self._read, self._folder, check).result()

    def _read(self, folder: Path, check: Callable[[str, Voice], object]) -> None:
        files = _files(folder)
        stamps = {name: stamp_of(path) for name, path in files.items()}  # None: reading it says why
        known = {name for name, stamp in stamps.items() if stamp and stamp == self._stamps.get(name)}
        fresh = {name: Voice.load(path) for name, path in files.items() if name not in known}
        for name, voice in fresh.items():
            check(name, voice)
        for name in self._files.keys() - files.keys():
            self.by_name.pop(name, None)
        self.by_name.update(fresh)
        self._files, self._stamps = files, stamps

    async def add(
        self, engine: SpeechEngine, name: str, recording: str | bytes, text: str | None, *, replace: bool = False
    ) -> None:
        """Make a voice from a recording. If the calling task is cancelled, nothing changes.

        Args:
            name: the voice's name for clients.
            recording: an audio file's bytes, or the same in base64, also with line breaks or as a data URL.
            text: the recording's text; None or blank: not known.
            replace: replace the voice that was saved under this name. Utterances that already use the old voice go on.

        Raises:
            RequestError: the name is taken or not allowed, or the recording cannot be used.
        """
        if not _NAME.fullmatch(name) or name == DEFAULT_VOICE:
            raise VoiceError(f"a voice's name must be 1 to {MOST_NAME} of a-z 0-9 _ -, got {name[:80]!r}")
        if name in engine.speakers or (name in self.by_name and not replace) or name in self._being_made:
            raise VoiceError(f"there is a voice {name!r} already; choose another name")
        if len(self.by_name) >= _MOST_VOICES and not replace:
            raise VoiceError(f"there are {_MOST_VOICES} voices already, the most: delete one first")

        def keep(voice: Voice) -> None:
            if self._folder:
                path = self._files.get(name, self._folder / f"{name}.safetensors")
                # Not a voice's file name: a crash leaves no broken voice. Not another server's in this folder either.
                part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
                with _told("kept"):
                    try:
                        voice.save(part)
                        part.replace(path)
                    finally:
                        part.unlink(missing_ok=True)
                self._files[name] = path
            self.by_name[name] = voice

        run = asyncio.get_running_loop().run_in_executor
        self._being_made.add(name)
        try:
            voice = await self.make(engine, recording, text)
            await run(self._executor, keep, voice)
            log.info("the voice %r was %s", name, "replaced" if replace else "added")
        finally:
            self._being_made.discard(name)

    async def make(self, engine: SpeechEngine, recording: str | bytes, text: str | None) -> Voice:
        """A voice that is not kept, made behind those that were asked for before. `recording`, `text`: as `add` takes
        them. Raises RequestError: the recording cannot be used."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, _create, engine, recording, text)

    async def remove(self, name: str) -> None:
        """Delete a saved voice and its file. Utterances that already use it go on.

        Args:
            name: one of `by_name`.

        Raises:
            VoiceError: it is being replaced.
            TTSError: its file cannot be deleted.
        """
        if name in self._being_made:
            raise VoiceError(f"the voice {name!r} is being replaced: try again once that is done")

        def delete() -> None:
            if path := self._files.get(name):
                with _told("deleted"):
                    path.unlink(missing_ok=True)
            self.by_name.pop(name, None)
            self._files.pop(name, None)

        self._being_made.add(name)
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, delete)
            log.info("the voice %r was deleted", name)
        finally:
            self._being_made.discard(name)

    def close(self) -> None:
        """Do not make the voices that are still waiting to be made."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _files(folder: Path) -> dict[str, Path]:
    """The files of a folder's voices, by the voices' names. Raises VoiceError: a name is not allowed, or the folder
    cannot be read. A disk that is gone for a moment takes no voices along."""
    found = {}
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise VoiceError(f"{folder}: the folder of voices cannot be read: {error.strerror}") from None
    for path in paths:
        name = path.stem.lower()
        if not _NAME.fullmatch(name) or name == DEFAULT_VOICE:
            raise VoiceError(
                f"{path}: a voice's file name must be 1 to {MOST_NAME} of a-z 0-9 _ -, not {DEFAULT_VOICE!r}"
            )
        found[name] = path
    return found


def _create(engine: SpeechEngine, recording: str | bytes, text: str | None) -> Voice:
    with tempfile.NamedTemporaryFile() as file:
        for piece in [recording] if isinstance(recording, bytes) else _decode_base64(recording):
            file.write(piece)
        file.flush()
        try:
            return engine.create_voice(file.name, text)
        except RequestError as error:  # the message names a file that the client does not know
            raise AudioError(str(error).replace(file.name, "the recording")) from None


@contextmanager
def _told(done: str) -> Iterator[None]:
    try:
        yield
    except (VoiceError, OSError) as error:  # the server's fault, not the client's
        log.error("a voice could not be %s: %s", done, error)
        raise TTSError(f"the voice could not be {done}; the server's log says why") from None


def check_base64_size(text: str, most: int) -> None:
    """Raises AudioError: base64 stands for a recording of more than `most` bytes, give or take two. `text`: as
    `SavedVoices.add` takes it."""
    if len(text) <= most * 4 // 3 + 4:
        return
    if (len(text) - _base64_start(text) - sum(map(text.count, " \t\r\n"))) * 3 // 4 > most + 2:
        raise recording_too_long(most)


def recording_too_long(most: int) -> AudioError:
    return AudioError(f"the recording may have at most {most} bytes: send a shorter one")


def _base64_start(text: str) -> int:
    """Where base64 begins: behind the head of a data URL."""
    url = _DATA_URL.match(text)
    return url.end() if url else 0


def _decode_base64(text: str) -> Iterator[bytes]:
    """Decode piece by piece: 8 MB at once would hold the interpreter's lock for 14 ms.

    Raises:
        AudioError: `text` is not base64.
    """
    rest = ""
    try:
        for at in range(_base64_start(text), len(text), _BASE64_PIECE):
            piece = rest + "".join(text[at : at + _BASE64_PIECE].split())  # without line breaks
            whole = len(piece) // 4 * 4
            yield base64.b64decode(piece[:whole], validate=True)
            rest = piece[whole:]
        yield base64.b64decode(rest, validate=True)
    except ValueError as error:
        raise AudioError(f"audio must be base64: {error}") from None
