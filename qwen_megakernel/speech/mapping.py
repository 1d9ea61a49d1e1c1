"""Many requests, one engine: what `TTSEngine.map` does."""

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Unpack, cast

from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.engine.utterance import Utterance
from qwen_megakernel.errors import EngineClosed, RequestError, TextError, TTSError
from qwen_megakernel.speech.jobs import Job, JobResults
from qwen_megakernel.speech.options import RequestOptions
from qwen_megakernel.speech.request import SpeechRequest
from qwen_megakernel.speech.retries import next_attempt
from spoken_text.spoken_text import SpokenText


class Speaker(Protocol):
    """What is needed of a `TTSEngine`."""

    @property
    def slots(self) -> int: ...

    def request(self, **options: Unpack[RequestOptions]) -> SpeechRequest: ...

    def begin(
        self, text: str | SpokenText, request: SpeechRequest, *, on_end: Callable[[], None] | None = None
    ) -> Utterance: ...

    def count_retry(self) -> None: ...


SILENTLY: RequestOptions = {"reproducible": True, "chunk_frames": 8}
"""Options of speech that nobody listens to before its end."""


@dataclass(frozen=True, eq=False)
class Mapped:
    """What became of one request.

    Attributes:
        index: of the request, from 0.
        error: why it failed; None if it was spoken.
    """

    index: int
    error: TTSError | None = None
    _audio: Audio | None = None

    @property
    def audio(self) -> Audio:
        """The whole utterance.

        Raises:
            TTSError: `error`.
        """
        if self.error:
            raise self.error
        assert self._audio
        return self._audio


def map_requests(
    engine: Speaker, requests: Iterable[str | Mapping[str, Any]], options: RequestOptions, *, ordered: bool
) -> Iterator[Mapped]:
    """See `TTSEngine.map`."""
    if not isinstance(requests, Iterable):
        raise RequestError(f"requests must be texts or mappings that can be iterated, got {type(requests).__name__}")
    if not isinstance(ordered, bool):
        raise RequestError(f"ordered must be True or False, got {type(ordered).__name__}")

    def job(index: int, request: str | Mapping[str, Any]) -> Job[Mapped]:
        try:
            text, own = _parts(request)
            merged = cast(RequestOptions, {**SILENTLY, **options, **own})
            return Mapped(index, _audio=(yield from say(engine, text, engine.request(**merged))))
        except EngineClosed:
            raise
        except TTSError as error:
            return Mapped(index, error)

    return JobResults((job(*item) for item in enumerate(requests)), at_once=engine.slots, ordered=ordered)


def _parts(request: Any) -> tuple[str, dict[str, Any]]:
    """A request's text and its own options."""
    if isinstance(request, str):
        return request, {}
    if not isinstance(request, Mapping):
        raise RequestError(f"a request is a text, or a mapping with 'text' and options, got {type(request).__name__}")
    if not isinstance(request.get("text"), str):
        raise TextError(f"text must be a string, got {type(request.get('text')).__name__}")
    own = {name: value for name, value in request.items() if name != "text"}
    if wrong := [name for name in own if not isinstance(name, str)]:
        raise RequestError(f"an option's name must be a string, got {reprlib.repr(wrong[0])}")
    return request["text"], own


def say(engine: Speaker, text: str | SpokenText, request: SpeechRequest) -> Job[Audio]:
    """Speak a whole utterance that nobody listens to meanwhile. If others have the engine's slots, it waits for one.

    Raises:
        TTSError: as `TTSEngine.begin` and `Utterance.result`, but for EngineBusy.
    """
    audio: Audio = yield partial(_begin, engine, text, request)
    while following := next_attempt(request, audio):
        engine.count_retry()
        request = following
        audio = yield partial(_begin, engine, text, request)
    return replace(audio, attempts=request.attempt)


def _begin(engine: Speaker, text: str | SpokenText, request: SpeechRequest, ended: Callable[[], None]) -> Utterance:
    return engine.begin(text, request, on_end=ended)
