"""Many requests, one engine: what `TTSEngine.map` does."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.engine.jobs import Job, run_jobs
from qwen_megakernel.engine.request import RequestOptions
from qwen_megakernel.engine.retries import attempts
from qwen_megakernel.engine.utterance import Utterance
from qwen_megakernel.errors import EngineClosed, RequestError, TextError, TTSError

_CHUNK = 8  # frames of a chunk; nobody listens before the end


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
        return self._audio


def map_requests(
    submit: Callable[..., Utterance],
    requests: Iterable[str | Mapping[str, Any]],
    options: RequestOptions,
    *,
    retries: int,
    count_retry: Callable[[], None],
    slots: int,
    ordered: bool,
) -> Iterator[Mapped]:
    """See `TTSEngine.map`.

    Args:
        submit, count_retry: the engine's.
        retries: for requests that have none of their own.
    """

    def job(index: int, request: Any) -> Job[Mapped]:
        try:
            text, own = _parts(request)
            often = own.pop("retries", retries)
            return Mapped(index, _audio=(yield from say(submit, text, options | own, often, count_retry)))
        except EngineClosed:
            raise
        except TTSError as error:
            return Mapped(index, error)

    return run_jobs((job(*item) for item in enumerate(requests)), at_once=slots, ordered=ordered)


def _parts(request: Any) -> tuple[str, dict[str, Any]]:
    """A request's text and its own options."""
    if isinstance(request, str):
        return request, {}
    if not isinstance(request, Mapping):
        raise RequestError(f"a request is a text, or a mapping with 'text' and options, got {type(request).__name__}")
    known = RequestOptions.__annotations__
    for name in request:
        if name not in ("text", "retries", *known):
            raise RequestError(f"unknown option {name!r}; known: text, retries, {', '.join(known)}")
    if not isinstance(request.get("text"), str):
        raise TextError(f"text must be a string, got {type(request.get('text')).__name__}")
    return request["text"], {name: value for name, value in request.items() if name != "text"}


def say(
    submit: Callable[..., Utterance],
    text: str,
    request: RequestOptions,
    retries: int,
    count_retry: Callable[[], None],
) -> Job[Audio]:
    """Speak a whole utterance that nobody listens to meanwhile. If others have the engine's slots, it waits for one.

    Args:
        submit, count_retry: the engine's.
        retries: as `TTSEngine.generate` takes it.

    Raises:
        TTSError: as `submit` and `Utterance.result`, but for EngineBusy.
    """
    defaults: RequestOptions = {"reproducible": True, "chunk_frames": _CHUNK}
    asked = attempts(defaults | request, retries, count_retry)
    request = next(asked)
    while True:
        audio = yield partial(_begin, submit, text, request)
        try:
            request = asked.send(audio)
        except StopIteration as end:
            return end.value


def _begin(
    submit: Callable[..., Utterance], text: str, request: RequestOptions, ended: Callable[[], None]
) -> Utterance:
    return submit(text, on_end=ended, **request)
