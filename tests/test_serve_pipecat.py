"""MegakernelWebsocketTTSService against the real server: what a pipeline hears is what the engine says."""

import asyncio

import numpy as np
import pytest
from pipecat.frames.frames import ErrorFrame, Frame, InterruptionFrame, TTSAudioRawFrame, TTSSpeakFrame, TTSTextFrame
from pipecat.services.tts_service import TextAggregationMode
from pipelines import PATIENCE_S, Until, came, play
from serving import running, until
from test_pipecat import of, pcm, turn

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService

TEXT = "Hello there, how are you today?"
Settings = MegakernelWebsocketTTSService.Settings


@pytest.fixture(scope="module")
def server():
    options = {"device": "cpu", "max_streams": 4, "max_positions": 512, "queue_timeout": PATIENCE_S}
    with running(lambda: TTSEngine.load("demo", **options), token="secret") as server:
        until(lambda: server.service.state == "ready")
        yield server


def speak(server, frames: list[Frame | Until], **options) -> list[Frame]:
    async def main() -> list[Frame]:
        how = {"settings": Settings(voice="ada", seed=5), "trim_leading_silence": False} | options
        service = MegakernelWebsocketTTSService(url=server.socket_url, token="secret", **how)
        down, up = await play(service, frames)
        assert not of([*down, *up], ErrorFrame), of([*down, *up], ErrorFrame)
        return down

    return asyncio.run(main())


def said(server, text: str, **options) -> np.ndarray:
    audio = server.service.engine.generate(text, speaker="ada", sampling=SamplingParams(seed=5), **options)
    return np.frombuffer(pcm16(audio.samples), np.int16)


def test_sentences_sound_like_the_engine(server):
    down = speak(server, [TTSSpeakFrame(TEXT), TTSSpeakFrame("I am fine.")])
    assert np.array_equal(pcm(down), np.concatenate([said(server, TEXT), said(server, "I am fine.")]))
    assert [frame.text for frame in of(down, TTSTextFrame)] == [*TEXT.split(), "I", "am", "fine."]


@pytest.mark.parametrize("mode", [True, False])
def test_the_layout_of_sentences_can_be_chosen(server, mode):
    down = speak(server, [TTSSpeakFrame(TEXT)], settings=Settings(voice="ada", seed=5, non_streaming_mode=mode))
    assert np.array_equal(pcm(down), said(server, TEXT, non_streaming_mode=mode))


def test_tokens_sound_like_text_in_pieces(server):
    tokens = ["Hel", "lo there,", " how are", " you today?"]
    down = speak(server, turn(*tokens), text_aggregation_mode=TextAggregationMode.TOKEN)
    assert np.array_equal(pcm(down), said(server, TEXT, non_streaming_mode=False))


def test_an_interruption_frees_the_slot(server):
    before = server.service.engine.metrics()["cancelled"]
    interrupted = [came(TTSAudioRawFrame), InterruptionFrame(), came(InterruptionFrame)]
    speak(server, [TTSSpeakFrame(" ".join([TEXT] * 5)), *interrupted])
    server.at_rest()
    assert server.service.engine.metrics()["cancelled"] == before + 1
