"""Voices that a request brings along: a recording or a speaker vector, for this request and for later equal ones."""

import asyncio
import hashlib
import reprlib
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from qwen_megakernel.errors import EngineBusy, RequestError, SpeakerError
from qwen_megakernel.model.voice import MOST_REF_TEXT, Voice
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.speech.base import SpeechEngine
from qwen_megakernel.speech.patience import within
from qwen_megakernel.speech.saved_voices import SavedVoices, check_base64_size

CLONE_FIELDS = ("ref_audio", "ref_text", "x_vector_only_mode", "speaker_embedding")
MOST_NUMBERS = 8192  # of a speaker vector
_LARGEST = torch.finfo(torch.float32).max
_PATIENCE_S = 60.0  # until a voice is made
_ADDRESSES = ("http:", "https:", "file:", "ftp:", "s3:", "/", "./", "../", "~")


@dataclass(frozen=True)
class Clone:
    """What a voice is made of.

    Attributes:
        audio: the recording, in base64 or as a data URL.
        text: what it says; None: not known.
        vector: the speaker vector, in place of a recording.
    """

    audio: str = ""
    text: str | None = None
    vector: tuple[float, ...] = ()

    @property
    def digest(self) -> bytes:
        """Equal for equal clones. Takes 1 ms a megabyte."""
        made = hashlib.blake2b(repr((self.text, self.vector)).encode("utf-8", "surrogatepass"), digest_size=16)
        made.update(self.audio.encode("utf-8", "surrogatepass"))
        return made.digest()


def read_clone(given: Mapping[str, Any]) -> Clone | None:
    """
    Args:
        given: the fields of `CLONE_FIELDS` that came.

    Returns:
        None if they bring no voice along.

    Raises:
        RequestError: a field is of another type, they contradict each other, or the recording is an address.
    """
    audio, vector, text = given.get("ref_audio"), given.get("speaker_embedding"), given.get("ref_text")
    vector_only = given.get("x_vector_only_mode")
    right = {
        "ref_audio": (isinstance(audio, str | list), "a recording in base64"),
        "ref_text": (isinstance(text, str) and len(text) <= MOST_REF_TEXT, f"at most {MOST_REF_TEXT} characters"),
        "x_vector_only_mode": (isinstance(vector_only, bool), "true or false"),
        "speaker_embedding": (_is_vector(vector), f"1 to {MOST_NUMBERS} numbers"),
    }
    for name, value in given.items():
        fits, wanted = right[name]
        if not fits:
            raise RequestError(f"{name} must be {wanted}, got {reprlib.repr(value)}", field=name)
    if isinstance(audio, list):
        if len(audio) != 1:
            raise RequestError(f"ref_audio must be one recording, got {len(audio)}", field="ref_audio")
        audio = audio[0]
    if audio is None and vector is None:
        if text is not None and not vector_only:
            words = "ref_text says what the recording ref_audio says: send both, or leave ref_text out"
            raise RequestError(words, field="ref_text")
        return None
    if audio is not None and vector is not None:
        words = "ref_audio and speaker_embedding both say who speaks: send one of them"
        raise RequestError(words, field="speaker_embedding")
    if vector is not None:
        if not all(abs(number) <= _LARGEST for number in vector):  # not a number is neither
            words = "speaker_embedding must be finite numbers of fp32"
            raise RequestError(f"{words}, so at most {_LARGEST:.2g}", field="speaker_embedding")
        return Clone(vector=tuple(vector))
    if not isinstance(audio, str) or audio.lstrip().lower().startswith(_ADDRESSES):
        words = f"ref_audio must be the recording itself, in base64 or as a data URL, got {reprlib.repr(audio)}"
        raise RequestError(f"{words}: this server opens no addresses and no files", field="ref_audio")
    return Clone(audio, text if text and text.strip() and not vector_only else None)


def _is_vector(value: Any) -> bool:
    if not isinstance(value, list) or not 0 < len(value) <= MOST_NUMBERS:
        return False
    return all(isinstance(number, int | float) and not isinstance(number, bool) for number in value)


class Clones:
    """Makes voices of requests, and keeps the latest. Used in one event loop."""

    def __init__(self, saved: SavedVoices, limits: Limits):
        """`saved`: its thread makes the voices, one after the other."""
        self._saved = saved
        self._limits = limits
        self._made: OrderedDict[bytes, asyncio.Future[Voice]] = OrderedDict()
        self._times: deque[float] = deque()  # when the last new ones were asked for

    async def voice(self, engine: SpeechEngine, clone: Clone) -> Voice:
        """The voice, made now or found again.

        Raises:
            RequestError: it cannot be made of this.
            EngineBusy: too many new voices were asked for.
        """
        if engine.variant != "base":
            words = f"this server's model {engine.model} cannot clone: leave ref_audio and speaker_embedding out"
            raise SpeakerError(f"{words}, or start a server with a Base checkpoint", field="ref_audio")
        if clone.vector:
            return _of_vector(engine, clone.vector)
        check_base64_size(clone.audio, self._limits.max_upload)
        digest = await asyncio.to_thread(lambda: clone.digest) if len(clone.audio) > 1 << 20 else clone.digest
        made = self._made.get(digest)
        if made is None:
            made = self._begin(engine, digest, clone)
        self._made.move_to_end(digest)
        async with within(_PATIENCE_S):
            return await asyncio.shield(made)

    def _begin(self, engine: SpeechEngine, digest: bytes, clone: Clone) -> "asyncio.Future[Voice]":
        now = asyncio.get_running_loop().time()
        while self._times and self._times[0] < now - 60:
            self._times.popleft()
        if len(self._times) >= (most := self._limits.clones_a_minute):
            raise EngineBusy(f"more than {most} new voices were asked for within a minute: try again later")
        self._times.append(now)
        made = asyncio.ensure_future(self._saved.make(engine, clone.audio, clone.text))

        def forget(ended: "asyncio.Future[Voice]") -> None:
            if ended.cancelled() or ended.exception():
                self._made.pop(digest, None)

        made.add_done_callback(forget)
        self._made[digest] = made
        while len(self._made) > self._limits.clones:
            self._made.popitem(last=False)
        return made


def _of_vector(engine: SpeechEngine, vector: tuple[float, ...]) -> Voice:
    wanted = engine.config.talker.stack.hidden_size
    if len(vector) != wanted:
        words = f"speaker_embedding must have {wanted} numbers for this model, got {len(vector)}"
        raise RequestError(words, field="speaker_embedding")
    placeholder = engine.placeholder_voice()
    assert placeholder, "a Base checkpoint has one"
    return replace(placeholder, speaker_embedding=torch.tensor(vector, dtype=torch.float32))
