"""MegakernelWebsocketTTSService: the same service with its engine behind a socket. Its code is in pipecat/remote.py.

Its import needs no torch.
"""

from qwen_megakernel.pipecat.remote import MegakernelWebsocketTTSService, SpeechSettings

__all__ = ["MegakernelWebsocketTTSService", "SpeechSettings"]
