"""Retries: an utterance that ended badly is said again with another seed. Only for whole results: what a listener has
heard cannot be said again."""

from collections.abc import Callable
from dataclasses import replace

from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.speech.request import SpeechRequest


def ended_badly(audio: Audio) -> bool:
    """The model did not find its end, was cut before it, or left out text."""
    return audio.finish_reason in ("runaway", "length") or bool(audio.lost)


def next_attempt(request: SpeechRequest, audio: Audio) -> SpeechRequest | None:
    """The next attempt after `audio`, with one retry less and the next seed: this one plus 1, or 0 after 2**63 - 1.
    None: `audio` ended well, or no retry is left."""
    if not request.retries or not ended_badly(audio):
        return None
    sampling = replace(request.sampling, seed=(audio.seed + 1) % 2**63)
    return replace(request, sampling=sampling, retries=request.retries - 1, attempt=request.attempt + 1)


def say_well(say: Callable[[SpeechRequest], Audio], request: SpeechRequest, retried: Callable[[], None]) -> Audio:
    """The last attempt: speech that has ended well, or for which no retry is left. `say`: speaks a request. `retried`:
    called before each attempt but the first."""
    audio = say(request)
    while following := next_attempt(request, audio):
        retried()
        request = following
        audio = say(request)
    return replace(audio, attempts=request.attempt)
