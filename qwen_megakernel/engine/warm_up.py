"""What an engine says at load: first words, and enough at once to learn how many live listeners it sustains."""

import time
from collections.abc import Callable
from typing import Any

from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.engine.utterance import Utterance
from qwen_megakernel.errors import KernelFault


def first_words(say: Callable[..., Audio], request: dict[str, Any], *, again: bool) -> None:
    """
    Args:
        say: `TTSEngine.generate`.
        again: PyTorch takes over where kernels fault. It does so now and not at the first caller.
    """
    while True:
        try:
            say("Hello there.", max_frames=4, **request)
            return
        except KernelFault:
            if not again:
                raise


def sustained(submit: Callable[..., Utterance], request: dict[str, Any], at_once: int) -> float:
    """Seconds of audio a second, the better of two rounds.

    Args:
        submit: `TTSEngine.submit`.
        at_once: utterances; launches are full with them.
    """
    best, text = 0.0, "How are you today, my friend? " * 4
    for _ in range(2):
        began = time.monotonic()
        said = [submit(text, max_frames=32, chunk_frames=8, **request) for _ in range(at_once)]
        audio_s = sum(utterance.result().duration_s for utterance in said)
        best = max(best, audio_s / (time.monotonic() - began))
    return best
