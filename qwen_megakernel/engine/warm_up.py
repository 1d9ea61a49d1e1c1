"""What an engine says at load: first words, then many at once to learn how many live listeners it sustains."""

import time
from collections.abc import Callable, Mapping

from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.engine.utterance import Utterance
from qwen_megakernel.errors import KernelFault


def first_words(say: Callable[..., Audio], request: Mapping[str, object], *, again: bool) -> None:
    """`say`: `TTSEngine.generate`. `again`: after a kernel fault say it again, until PyTorch takes over. So it takes
    over now, not at a caller."""
    while True:
        try:
            say("Hello there.", max_frames=4, **request)
            return
        except KernelFault:
            if not again:
                raise


def sustained(submit: Callable[..., Utterance], request: Mapping[str, object], at_once: int) -> float:
    """Seconds of audio made in a second, the better of two rounds. `submit`: `TTSEngine.submit`. `at_once`: how many
    utterances; enough to fill launches."""
    best, text = 0.0, "How are you today, my friend? " * 4
    for _ in range(2):
        began = time.monotonic()
        said = [submit(text, max_frames=32, chunk_frames=8, **request) for _ in range(at_once)]
        audio_s = sum(utterance.result().duration_s for utterance in said)
        best = max(best, audio_s / (time.monotonic() - began))
    return best
