"""MegakernelTTSService: Qwen3-TTS in a Pipecat pipeline. Its code is in pipecat/local.py."""

from qwen_megakernel.pipecat.local import DEFAULT_MODEL, MegakernelTTSService, MegakernelTTSSettings

__all__ = ["DEFAULT_MODEL", "MegakernelTTSService", "MegakernelTTSSettings"]
