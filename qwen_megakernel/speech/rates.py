"""SpeechRates: the paces of an engine's voices. All sessions share them, and they last as long as the process."""

from collections.abc import Hashable
from functools import lru_cache

from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.model.conditioning import Conditioning
from qwen_megakernel.speech.words import SpeechRate

_NOBODY = -1  # a voice that is no speaker of the checkpoint
_MOST = 1000  # paces that are kept, the last used; with its key one takes 1 kB
_SHIPPED_TRUST = 150.0  # units of weight that count as much as a pace that came with the checkpoint: 9 s of speech


class SpeechRates:
    """Of one checkpoint with its adapters. An engine that is loaded again goes on with what was learned. Any thread may
    use it."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint.fingerprint, *(str(adapter.folder) for adapter in checkpoint.adapters)
        self._ids = checkpoint.config.talker.speakers
        shipped = checkpoint.config.seconds_per_letter
        self._shipped = {self._ids[name]: seconds for name, seconds in shipped.items()}

    def of(self, conditioning: Conditioning) -> SpeechRate:
        """The pace of this voice in this language with this instruct."""
        number = self._ids.get((conditioning.speaker or "").lower(), _NOBODY)  # two names may be one speaker
        voice = conditioning.voice.digest if conditioning.voice else None
        who = self._checkpoint, number, voice, conditioning.language.lower()
        return _rate(who, conditioning.instruct or None, self._shipped.get(number))


@lru_cache(_MOST)
def _rate(who: Hashable, instruct: str | None, shipped: float | None) -> SpeechRate:
    if instruct:  # may change the pace: begin with what the voice takes without
        return SpeechRate(_rate(who, None, shipped).seconds)
    return SpeechRate(shipped, _SHIPPED_TRUST) if shipped else SpeechRate()
