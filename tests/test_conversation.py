"""A conversation with no network: a spoken user, voice activity detection, speech-to-text by script, an LLM of rules,
our service, and a websocket client that talks and listens. Two turns; the second interrupts the first."""

import asyncio
import shutil
import subprocess

import numpy as np
import pytest
import soundfile
import soxr
from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.audio.vad.vad_analyzer import VADParams
from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    Frame,
    InputAudioRawFrame,
    InterruptionFrame,
    OutputAudioRawFrame,
    TranscriptionFrame,
    TTSStartedFrame,
    UserStartedSpeakingFrame,
    UserStoppedSpeakingFrame,
)
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.serializers.base_serializer import FrameSerializer
from pipecat.services.settings import STTSettings
from pipecat.services.stt_service import SegmentedSTTService
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transports.websocket.server import SingleClientWebsocketServerParams, SingleClientWebsocketServerTransport
from pipecat.turns.user_stop import SpeechTimeoutUserTurnStopStrategy
from pipecat.turns.user_turn_strategies import UserTurnStrategies
from pipecat.utils.time import time_now_iso8601
from pipelines import Prepared, Watched, running, worker_of
from waiting import free_port
from waiting import until_in_loop as until
from websockets.asyncio.client import connect

from qwen_megakernel import TTSEngine
from qwen_megakernel.offline_llm import OfflineLLM, answer
from qwen_megakernel.pipecat_tts import MegakernelTTSService

RATE = 16000
SAID = ["Please tell me a story.", "Now count to three please."]


def spoken(text: str, engine: TTSEngine, folder) -> np.ndarray:
    """A user's words, int16 at 16 kHz: by espeak-ng, or by the demo voice where that is missing."""
    if shutil.which("espeak-ng"):
        path = folder / "user.wav"
        subprocess.run(["espeak-ng", "-w", str(path), text], check=True)
        samples, rate = soundfile.read(path, dtype="float32")
    else:
        audio = engine.generate(text, speaker="max")
        samples, rate = audio.samples, audio.sample_rate
    return (soxr.resample(samples, rate, RATE) * 32767).astype(np.int16)


class ScriptedSTT(SegmentedSTTService):
    """Hears a segment, says what the script says."""

    def __init__(self, texts: list[str]):
        super().__init__(sample_rate=RATE, settings=STTSettings(model=None, language=None))
        self._texts = list(texts)

    async def run_stt(self, audio: bytes):
        yield TranscriptionFrame(self._texts.pop(0), "user", time_now_iso8601())


class Pcm(FrameSerializer):
    """PCM16 both ways; a text for the moment of an interruption."""

    async def serialize(self, frame: Frame) -> str | bytes | None:
        if isinstance(frame, InterruptionFrame):
            return "interrupted"
        return bytes(frame.audio) if isinstance(frame, OutputAudioRawFrame) else None

    async def deserialize(self, data: str | bytes) -> Frame | None:
        return InputAudioRawFrame(audio=data, sample_rate=RATE, num_channels=1)


async def converse(engine: TTSEngine, utterances: list[np.ndarray]):
    transport = SingleClientWebsocketServerTransport(
        params=SingleClientWebsocketServerParams(
            serializer=Pcm(), audio_in_enabled=True, audio_out_enabled=True, audio_out_end_silence_secs=0
        ),
        host="127.0.0.1",
        port=(port := free_port()),
    )
    context = LLMContext()
    user, assistant = LLMContextAggregatorPair(
        context,
        user_params=LLMUserAggregatorParams(
            vad_analyzer=SileroVADAnalyzer(params=VADParams(stop_secs=0.4)),
            user_turn_strategies=UserTurnStrategies(stop=[SpeechTimeoutUserTurnStopStrategy()]),
        ),
    )
    tts = MegakernelTTSService(
        engine=Prepared(engine),
        settings=MegakernelTTSService.Settings(voice="ada", seed=3),
        text_aggregation_mode=TextAggregationMode.TOKEN,
    )
    output = transport.output()
    shown = (TTSStartedFrame, InterruptionFrame, UserStartedSpeakingFrame, UserStoppedSpeakingFrame)
    watched = Watched(output, *shown, BotStartedSpeakingFrame, BotStoppedSpeakingFrame)
    processors = transport.input(), ScriptedSTT(SAID), user, OfflineLLM(token_s=0.05), tts, output, assistant
    worker = worker_of(*processors, observers=[watched])
    ready = asyncio.Event()

    @transport.event_handler("on_websocket_ready")
    async def on_websocket_ready(transport):
        ready.set()

    heard: list[str | bytes] = []
    queue: list[np.ndarray] = []

    async def microphone(client):
        """20 ms every 20 ms: what is queued, else a silent room."""
        due = asyncio.get_running_loop().time()
        while True:
            piece = np.zeros(RATE // 50, np.int16)
            if queue:
                piece[: len(queue[0][: len(piece)])] = queue[0][: len(piece)]
                queue[0] = queue[0][len(piece) :]
                if not len(queue[0]):
                    queue.pop(0)
            await client.send(piece.tobytes())
            due += 0.02
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))

    async def listen(client):
        async for message in client:
            heard.append(message)

    async with running(worker):
        await until(ready.is_set)
        async with connect(f"ws://127.0.0.1:{port}") as client:
            tasks = [asyncio.create_task(microphone(client)), asyncio.create_task(listen(client))]
            queue.append(utterances[0])
            await until(lambda: sum(len(m) for m in heard if isinstance(m, bytes)) > 2 * 24000 * 2)
            queue.append(utterances[1])
            await until(lambda: context.get_messages()[-1].get("content") == "One, two, three.")
            await worker.cancel()
            for task in tasks:
                task.cancel()
    return heard, [type(frame) for _, frame in watched.frames], context.get_messages()


@pytest.mark.slow
def test_two_turns_and_an_interruption(tmp_path):
    with TTSEngine.load("demo", backend="torch", device="cpu", max_streams=2) as engine:
        utterances = [spoken(text, engine, tmp_path) for text in SAID]
        heard, kinds, messages = asyncio.run(converse(engine, utterances))
        cancelled = engine.metrics()["cancelled"]
        assert engine.health()["streams"] == 0
    story = answer(SAID[0])
    assert [(m["role"], m["content"]) for m in messages[::2]] == [("user", text) for text in SAID]
    assert messages[3] == {"role": "assistant", "content": "One, two, three."}
    told = messages[1]["content"]
    assert story.startswith(told) and 3 < len(told.split()) < len(story.split()), "the words that were heard"
    assert cancelled <= 1, "the story may have been made whole before it was interrupted"

    asked = [UserStartedSpeakingFrame, InterruptionFrame]
    answered = [UserStoppedSpeakingFrame, TTSStartedFrame, BotStartedSpeakingFrame]
    expected = [*asked, *answered, *asked, BotStoppedSpeakingFrame, *answered]
    assert kinds in (expected, [*expected, BotStoppedSpeakingFrame]), "the answer is in the context once it was heard"

    cut = max(i for i, m in enumerate(heard) if m == "interrupted")
    before = sum(len(m) for m in heard[:cut] if isinstance(m, bytes)) / 2 / 24000
    after = sum(len(m) for m in heard[cut:] if isinstance(m, bytes)) / 2 / 24000
    assert before > 2 and 0.5 < after < 5, "after the interruption the short answer alone is heard"
