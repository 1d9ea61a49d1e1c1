"""MegakernelWebsocketTTSService against the real server: what a pipeline hears is what the engine says."""

import asyncio

import numpy as np
import pytest
from pipecat.frames.frames import ErrorFrame, Frame, InterruptionFrame, TTSSpeakFrame, TTSTextFrame
from pipecat.services.tts_service import TextAggregationMode
from pipecat.tests.utils import SleepFrame, run_test
from serving import running, until
from test_pipecat import of, pcm, turn

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService

TEXT = "Hello there, how are you today?"
Settings = MegakernelWebsocketTTSService.Settings


@pytest.fixture(scope="module")
def server():
    with running(
        lambda: TTSEngine.load("demo", device="cpu", max_streams=4, max_positions=512), token="secret"
    ) as server:
        until(lambda: server.service.state == "ready", 60)
        yield server


def play(server, frames: list[Frame], **options) -> list[Frame]:
    async def main() -> list[Frame]:
        settings = Settings(voice="ada", seed=5)
        options.setdefault("trim_leading_silence", False)
        service = MegakernelWebsocketTTSService(
            url=server.socket_url, token="secret", settings=settings, sample_rate=24000, **options
        )
        down, up = await run_test(service, frames_to_send=frames)
        assert not of([*down, *up], ErrorFrame), of([*down, *up], ErrorFrame)
        return list(down)

    return asyncio.run(asyncio.wait_for(main(), 60))


def said(server, text: str, **options) -> np.ndarray:
    audio = server.service.engine.generate(text, speaker="ada", sampling=SamplingParams(seed=5), **options)
    return np.frombuffer(pcm16(audio.samples), np.int16)


def test_sentences_sound_like_the_engine(server):
    down = play(server, [TTSSpeakFrame(TEXT), TTSSpeakFrame("I am fine.")])
    assert np.array_equal(pcm(down), np.concatenate([said(server, TEXT), said(server, "I am fine.")]))
    assert [frame.text for frame in of(down, TTSTextFrame)] == [*TEXT.split(), "I", "am", "fine."]


def test_tokens_sound_like_text_in_pieces(server):
    tokens = ["Hel", "lo there,", " how are", " you today?"]
    down = play(server, turn(*tokens), text_aggregation_mode=TextAggregationMode.TOKEN)
    assert np.array_equal(pcm(down), said(server, TEXT, non_streaming_mode=False))


def test_an_interruption_frees_the_slot(server):
    before = server.service.engine.metrics()["cancelled"]
    play(server, [TTSSpeakFrame(" ".join([TEXT] * 5)), SleepFrame(0.4), InterruptionFrame(), SleepFrame(0.3)])
    server.at_rest()
    assert server.service.engine.metrics()["cancelled"] == before + 1
