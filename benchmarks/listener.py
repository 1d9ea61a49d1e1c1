"""PacedOutput: a Pipecat output transport without a device. It records what a caller would hear, and when."""

import asyncio
import time

import numpy as np
from pipecat.frames.frames import OutputAudioRawFrame, StartFrame
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams


class PacedOutput(BaseOutputTransport):
    """Takes audio at the speed at which it plays, like a sound card.

    Attributes:
        heard: (seconds by time.monotonic(), PCM16) of every piece of 10 to 40 ms, in order.
    """

    def __init__(self, **kwargs):
        params = TransportParams(audio_out_enabled=True, audio_out_end_silence_secs=0)
        super().__init__(params, **kwargs)
        self.heard: list[tuple[float, bytes]] = []
        self.first = asyncio.Event()
        self._free = 0.0  # when all audio taken so far has been played

    async def start(self, frame: StartFrame):
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        now = time.monotonic()
        self.heard.append((now, frame.audio))
        self.first.set()
        self._free = max(self._free, now) + len(frame.audio) / 2 / frame.sample_rate
        await asyncio.sleep(self._free - now)
        return True

    @property
    def samples(self) -> np.ndarray:
        """All samples heard, int16."""
        return np.frombuffer(b"".join(pcm for _, pcm in self.heard), "<i2")
