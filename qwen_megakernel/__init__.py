"""Text to speech with Qwen3-TTS 12 Hz: an engine that streams PCM.

Importing this package touches no GPU and compiles nothing.
"""

from qwen_megakernel.config import SamplingParams
from qwen_megakernel.engine import Audio, Chunk, TTSEngine, Utterance
from qwen_megakernel.errors import (
    AudioError,
    BackendError,
    CheckpointError,
    CheckpointNotFoundError,
    EngineBusyError,
    EngineClosedError,
    KernelFault,
    RequestError,
    TextTooLongError,
    TTSError,
)
from qwen_megakernel.voice import Voice

__version__ = "0.1.0"

__all__ = [
    "Audio",
    "AudioError",
    "BackendError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "Chunk",
    "EngineBusyError",
    "EngineClosedError",
    "KernelFault",
    "RequestError",
    "SamplingParams",
    "TTSEngine",
    "TTSError",
    "TextTooLongError",
    "Utterance",
    "Voice",
]
