"""Text to speech with Qwen3-TTS 12 Hz: an engine that streams PCM.

Importing this package touches no GPU and compiles nothing. All but the errors is imported at its first use, so that a
server's client needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from qwen_megakernel.errors import *  # noqa: F403 - every one of them is public

__version__ = "0.3.0"

if TYPE_CHECKING:  # for type checkers "X as X" is public; they see no `__getattr__`, so they report misspelt names
    from qwen_megakernel.engine.audio import Audio as Audio
    from qwen_megakernel.engine.audio import Chunk as Chunk
    from qwen_megakernel.engine.audio import Timings as Timings
    from qwen_megakernel.engine.options import EngineArguments as EngineArguments
    from qwen_megakernel.engine.options import EngineOptions as EngineOptions
    from qwen_megakernel.engine.utterance import ChunkStream as ChunkStream
    from qwen_megakernel.engine.utterance import Utterance as Utterance
    from qwen_megakernel.model.voice import Voice as Voice
    from qwen_megakernel.sampling_params import SamplingParams as SamplingParams
    from qwen_megakernel.speech.engine import TTSEngine as TTSEngine
    from spoken_text.front_end import TextFrontEnd as TextFrontEnd
    from spoken_text.lexicon import Lexicon as Lexicon
    from spoken_text.pauses import Pause as Pause
else:
    _MODULES = {
        "Audio": ".engine.audio",
        "Chunk": ".engine.audio",
        "ChunkStream": ".engine.utterance",
        "EngineArguments": ".engine.options",
        "EngineOptions": ".engine.options",
        "Lexicon": "spoken_text.lexicon",
        "Pause": "spoken_text.pauses",
        "SamplingParams": ".sampling_params",
        "TTSEngine": ".speech.engine",
        "TextFrontEnd": "spoken_text.front_end",
        "Timings": ".engine.audio",
        "Utterance": ".engine.utterance",
        "Voice": ".model.voice",
    }
    _ERRORS = [name for name, value in globals().items() if isinstance(value, type)]  # what is here already
    __all__ = sorted([*_MODULES, *_ERRORS])

    def __getattr__(name: str):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name], __name__), name)
        globals()[name] = value  # from now on found without this function
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
