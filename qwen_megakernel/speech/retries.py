"""Retries: an utterance that ended badly is said again with another seed. Only for whole results: what a listener has
heard cannot be said again."""

from collections.abc import Callable, Generator
from dataclasses import replace

from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.speech.request import SpeechRequest


def next_seed(seed: int) -> int:
    """The seed of the next attempt: this seed plus 1, or 0 after 2**63 - 1."""
    return (seed + 1) % 2**63


def ended_badly(audio: Audio) -> bool:
    """The model did not find its end, or was cut before it."""
    return audio.finish_reason in ("runaway", "length")


def attempts(request: SpeechRequest, count: Callable[[], None]) -> Generator[SpeechRequest, Audio, Audio]:
    """Yield the request of each attempt, and be sent its audio, until one ends well or no retry is left. Return the
    last attempt.

    Args:
        count: called before each attempt but the first.
    """
    audio = yield request
    for attempt in range(2, request.retries + 2):
        if not ended_badly(audio):
            break
        count()
        audio = replace((yield request.with_seed(next_seed(audio.seed))), attempts=attempt)
    return audio


def say_well(say: Callable[[SpeechRequest], Audio], request: SpeechRequest, count: Callable[[], None]) -> Audio:
    """Say it until it ends well: see `attempts`.

    Args:
        say: speaks a request.
    """
    asked = attempts(request, count)
    request = next(asked)
    while True:
        try:
            request = asked.send(say(request))
        except StopIteration as end:
            audio: Audio = end.value
            return audio
