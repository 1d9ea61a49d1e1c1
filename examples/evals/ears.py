"""Ears for `pipecat eval`: they hear nothing. What the service says of its words (`tts_response`) needs no ears."""

from collections.abc import AsyncGenerator

from pipecat.frames.frames import Frame
from pipecat.services.settings import STTSettings
from pipecat.services.stt_service import STTService


class Deaf(STTService):
    """Takes sound, and never has a transcript."""

    async def run_stt(self, audio: bytes) -> AsyncGenerator[Frame | None, None]:
        yield None


def deaf(config: dict) -> STTService:
    """What a scenario's `judge.transcription.factory` names."""
    return Deaf(settings=STTSettings(model=None, language=None))
