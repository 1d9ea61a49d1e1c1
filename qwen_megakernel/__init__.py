"""Text to speech with Qwen3-TTS 12 Hz: an engine that streams PCM.

Importing this package touches no GPU and compiles nothing. Each name is imported at its first use, so that a server's
client needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen_megakernel.checkpoint.config import SamplingParams
    from qwen_megakernel.engine.audio import Audio, Chunk, Timings
    from qwen_megakernel.engine.utterance import ChunkStream, Utterance
    from qwen_megakernel.errors import (
        AudioError,
        BackendError,
        CallbackError,
        CheckpointError,
        CheckpointNotFoundError,
        EngineBusy,
        EngineClosed,
        InstructError,
        KernelFault,
        LanguageError,
        NoWordsError,
        OutOfMemoryError,
        RequestError,
        SamplingError,
        SpeakerError,
        SpeechError,
        SpeedError,
        TextEndedError,
        TextError,
        TextTooLongError,
        TTSError,
        VoiceError,
    )
    from qwen_megakernel.model.voice import Voice
    from qwen_megakernel.speech.engine import TTSEngine

__version__ = "0.2.0"

_MODULES = {
    "Audio": "engine.audio",
    "AudioError": "errors",
    "BackendError": "errors",
    "CallbackError": "errors",
    "CheckpointError": "errors",
    "CheckpointNotFoundError": "errors",
    "Chunk": "engine.audio",
    "ChunkStream": "engine.utterance",
    "EngineBusy": "errors",
    "EngineClosed": "errors",
    "InstructError": "errors",
    "KernelFault": "errors",
    "LanguageError": "errors",
    "NoWordsError": "errors",
    "OutOfMemoryError": "errors",
    "RequestError": "errors",
    "SamplingError": "errors",
    "SamplingParams": "checkpoint.config",
    "SpeakerError": "errors",
    "SpeedError": "errors",
    "SpeechError": "errors",
    "TTSEngine": "speech.engine",
    "TTSError": "errors",
    "TextEndedError": "errors",
    "TextError": "errors",
    "TextTooLongError": "errors",
    "Timings": "engine.audio",
    "Utterance": "engine.utterance",
    "Voice": "model.voice",
    "VoiceError": "errors",
}

__all__ = [
    "Audio",
    "AudioError",
    "BackendError",
    "CallbackError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "Chunk",
    "ChunkStream",
    "EngineBusy",
    "EngineClosed",
    "InstructError",
    "KernelFault",
    "LanguageError",
    "NoWordsError",
    "OutOfMemoryError",
    "RequestError",
    "SamplingError",
    "SamplingParams",
    "SpeakerError",
    "SpeedError",
    "SpeechError",
    "TTSEngine",
    "TTSError",
    "TextEndedError",
    "TextError",
    "TextTooLongError",
    "Timings",
    "Utterance",
    "Voice",
    "VoiceError",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # from now on found without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
