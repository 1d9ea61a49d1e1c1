"""An utterance that has ended is freed at once. A reference cycle would keep it until Python's garbage collector comes,
and a collection that finds many of them stops every call of the process for 10 ms and more."""

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import Iterator

import pytest
from entrances import SocketClient
from pipecat.frames.frames import ErrorFrame, InterruptionFrame, TTSAudioRawFrame
from pipecat.services.tts_service import TextAggregationMode
from pipelines import came, play
from serving import connect, ready, small_demo, until
from test_pipecat import of, turn
from waiting import slow_case

from qwen_megakernel import Chunk, Utterance
from qwen_megakernel.engine.output import Output, Result
from qwen_megakernel.engine.sequence import SpeechSequence
from qwen_megakernel.pipecat.audio_context import AudioContext
from qwen_megakernel.pipecat.remote_session import RemoteSession
from qwen_megakernel.pipecat_tts import MegakernelTTSService
from qwen_megakernel.speech.session import SpeechSession
from qwen_megakernel.speech.stall_watch import StallWatch
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService

SEQUENCE = (SpeechSequence, Output, Result)
SESSION = (SpeechSession, StallWatch)
OURS = (Utterance, *SEQUENCE, Chunk, *SESSION, AudioContext, RemoteSession)
LONG = "Hello there, how are you today? " * 4


@pytest.fixture(scope="module")
def server():
    with ready(small_demo) as server:
        yield server


@contextlib.contextmanager
def in_cycles() -> Iterator[Counter]:
    """Counts what only the garbage collector can free, by type."""
    found = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(type(thing).__name__ for thing in gc.garbage if issubclass(type(thing), OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_an_utterance_whose_callbacks_hold_it_is_freed(server):
    def speak() -> None:
        held = []
        callbacks = {"on_chunk": held.append, "on_end": lambda: held.append(None)}
        held.append(server.service.engine.submit("Hello there.", max_frames=4, **callbacks))
        held[0].result()
        until(lambda: None in held)

    with in_cycles() as found:
        speak()
    assert not found


def test_the_check_sees_a_cycle():
    with in_cycles() as found:
        utterance = SpeechSession.__new__(SpeechSession)
        utterance.itself = utterance
        del utterance
    assert found == {"SpeechSession": 1}


@pytest.mark.parametrize("text, end, rest", [("...", True, ""), ("Hello ", False, "x" * 4096)])
def test_a_context_that_fails_is_freed(server, text, end, rest):
    """Its error holds the frames that it came through."""
    with in_cycles() as found:
        with connect(server.socket_url) as line:
            client = SocketClient(line)
            client.say("text", "a", text=text, end=end)
            if rest:
                client.say("text", "a", text=rest, end=True)
            client.until("error" if rest else "end", "a")
        server.at_rest()
    assert not found


@pytest.mark.parametrize("interrupted", [slow_case(False), True])
@pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, slow_case(TextAggregationMode.TOKEN)])
@pytest.mark.parametrize("remote", [False, True])
def test_what_a_pipeline_spoke_is_freed(server, remote, mode, interrupted):
    async def main() -> None:
        if remote:
            service = MegakernelWebsocketTTSService(url=server.socket_url, text_aggregation_mode=mode)
        else:
            service = MegakernelTTSService(engine=server.service.engine, text_aggregation_mode=mode)
        if interrupted:
            frames = [*turn(LONG)[:-1], came(TTSAudioRawFrame), InterruptionFrame(), came(InterruptionFrame)]
        else:
            frames = turn("Hello there.")
        down, up = await play(service, frames)
        assert of(down, TTSAudioRawFrame) and not of([*down, *up], ErrorFrame)

    with in_cycles() as found:
        asyncio.run(main())
        server.at_rest()
    assert not found
