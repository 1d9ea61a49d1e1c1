"""Retries: an utterance that ended badly is said again with another seed. Only for whole results: what a listener has
heard cannot be said again."""

import numbers
from collections.abc import Callable, Generator
from dataclasses import replace

from qwen_megakernel.checkpoint.config import SamplingParams
from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.engine.request import RequestOptions
from qwen_megakernel.errors import RequestError

MOST_RETRIES = 100


def next_seed(seed: int) -> int:
    """The seed of the next attempt: this seed plus 1, or 0 after 2**63 - 1."""
    return (seed + 1) % 2**63


def ended_badly(audio: Audio) -> bool:
    """The model did not find its end, or was cut before it."""
    return audio.finish_reason in ("runaway", "length")


def check_retries(retries: int) -> int:
    """
    Raises:
        RequestError: no integer, or out of range.
    """
    if isinstance(retries, bool) or not isinstance(retries, numbers.Integral) or not 0 <= retries <= MOST_RETRIES:
        raise RequestError(f"retries must be an integer in 0..{MOST_RETRIES}, got {retries!r}")
    return int(retries)


def attempts(
    request: RequestOptions, retries: int, count: Callable[[], None]
) -> Generator[RequestOptions, Audio, Audio]:
    """Yield the request of each attempt, and be sent its audio, until one ends well. Return the last attempt.

    Args:
        retries: how many more attempts at most, each with the next seed.
        count: called before each of these.

    Raises:
        RequestError: `retries` is no integer, or out of range.
    """
    retries = check_retries(retries)
    audio = yield request
    for attempt in range(2, retries + 2):
        if not ended_badly(audio):
            break
        count()
        sampling = replace(request.get("sampling", SamplingParams()), seed=next_seed(audio.seed))
        audio = replace((yield request | {"sampling": sampling}), attempts=attempt)
    return audio


def say_well(
    say: Callable[[RequestOptions], Audio], request: RequestOptions, retries: int, count: Callable[[], None]
) -> Audio:
    """Say it until it ends well: see `attempts`.

    Args:
        say: speaks a request.
    """
    asked = attempts(request, retries, count)
    request = next(asked)
    while True:
        try:
            request = asked.send(say(request))
        except StopIteration as end:
            return end.value
