"""Text to speech with Qwen3-TTS 12 Hz: an engine that streams PCM.

Importing this package touches no GPU and compiles nothing.
"""

from qwen_megakernel.config import SamplingParams
from qwen_megakernel.engine import TTSEngine
from qwen_megakernel.errors import (
    AudioError,
    BackendError,
    CallbackError,
    CheckpointError,
    CheckpointNotFoundError,
    EngineBusy,
    EngineClosed,
    KernelFault,
    LanguageError,
    OutOfMemoryError,
    RequestError,
    SamplingError,
    SpeakerError,
    SpeechError,
    TextEndedError,
    TextError,
    TextTooLongError,
    TTSError,
    VoiceError,
)
from qwen_megakernel.stream import Audio, Chunk, Timings
from qwen_megakernel.utterance import ChunkStream, Utterance
from qwen_megakernel.voice import Voice

__version__ = "0.1.0"

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
    "KernelFault",
    "LanguageError",
    "OutOfMemoryError",
    "RequestError",
    "SamplingError",
    "SamplingParams",
    "SpeakerError",
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
