"""Speech with Qwen3-TTS: one persistent CUDA kernel per frame, plain PyTorch elsewhere.

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
    "RequestError",
    "SamplingParams",
    "TTSEngine",
    "TTSError",
    "TextTooLongError",
    "Utterance",
    "Voice",
]
