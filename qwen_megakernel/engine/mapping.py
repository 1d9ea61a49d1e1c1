"""Many requests, one engine: what `TTSEngine.map` does."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.engine.in_parallel import Stopped, in_parallel
from qwen_megakernel.engine.request import RequestOptions
from qwen_megakernel.engine.retries import say_well
from qwen_megakernel.engine.utterance import Utterance
from qwen_megakernel.errors import EngineBusy, EngineClosed, RequestError, TextError, TTSError

_LOOK_S = 0.25  # how soon a worker sees that nobody wants its result
_BUSY_S = 0.05  # between two attempts while others have the slots
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

    def work(item: tuple[int, Any], stopped: threading.Event) -> Mapped:
        index, request = item
        try:
            text, own = _parts(request)
            often = own.pop("retries", retries)
            return Mapped(index, _audio=say(submit, text, options | own, stopped, often, count_retry))
        except EngineClosed:
            raise
        except TTSError as error:
            return Mapped(index, error)

    return in_parallel(work, enumerate(requests), workers=slots, ordered=ordered)


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
    stopped: threading.Event,
    retries: int,
    count_retry: Callable[[], None],
) -> Audio:
    """Speak a whole utterance that nobody listens to meanwhile. If others have the engine's slots, wait for one.

    Args:
        submit, count_retry: the engine's.
        retries: as `TTSEngine.generate` takes it.
        stopped: another thread sets it to cancel the utterance.

    Raises:
        TTSError: as `submit` and `Utterance.result`, but for EngineBusy.
        Stopped: it was cancelled.
    """
    defaults: RequestOptions = {"reproducible": True, "chunk_frames": _CHUNK}

    def attempt(request: RequestOptions) -> Audio:
        while not stopped.is_set():
            try:
                return _result(submit(text, **request), stopped)
            except EngineBusy:
                stopped.wait(_BUSY_S)
        raise Stopped

    return say_well(attempt, defaults | request, retries, count_retry)


def _result(utterance: Utterance, stopped: threading.Event) -> Audio:
    while not stopped.is_set():
        with contextlib.suppress(TimeoutError):
            return utterance.result(timeout=_LOOK_S)
    utterance.cancel()
    utterance.result()
    raise Stopped
