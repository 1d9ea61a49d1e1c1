"""Qwen3-TTS in Pipecat bots: the two services of `qwen-megakernel`, and their settings.

A name is imported at its first use: `MegakernelTTSService` needs torch, a server's client does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers "X as X" is public; they see no `__getattr__`, so they report misspelt names
    from qwen_megakernel.pipecat_tts import DEFAULT_MODEL as DEFAULT_MODEL
    from qwen_megakernel.pipecat_tts import MegakernelTTSService as MegakernelTTSService
    from qwen_megakernel.pipecat_tts import MegakernelTTSSettings as MegakernelTTSSettings
    from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService as MegakernelWebsocketTTSService
    from qwen_megakernel.websocket_tts import SpeechSettings as SpeechSettings
else:
    _MODULES = {
        "DEFAULT_MODEL": "pipecat_tts",
        "MegakernelTTSService": "pipecat_tts",
        "MegakernelTTSSettings": "pipecat_tts",
        "MegakernelWebsocketTTSService": "websocket_tts",
        "SpeechSettings": "websocket_tts",
    }
    __all__ = sorted(_MODULES)

    def __getattr__(name: str):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
        return getattr(import_module(f"qwen_megakernel.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
