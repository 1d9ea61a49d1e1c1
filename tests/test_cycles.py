"""An utterance that has ended is freed at once. A reference cycle would keep it until Python's garbage collector comes,
and a collection that finds many of them stops every call of the process for 10 ms and more."""

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import Iterator

import pytest
from pipecat.frames.frames import (
    ErrorFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
)
from pipecat.services.tts_service import TextAggregationMode
from pipelines import PATIENCE_S, came, play, until
from serving import running
from waiting import until as until_true

from qwen_megakernel import Chunk, TTSEngine, Utterance
from qwen_megakernel.engine.event_loop import AsyncUtterance
from qwen_megakernel.engine.sequence import Sequence
from qwen_megakernel.pipecat.audio_context import AudioContext
from qwen_megakernel.pipecat.remote import _RemoteUtterance
from qwen_megakernel.pipecat_tts import MegakernelTTSService
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService

OURS = (Utterance, Sequence, Chunk, AsyncUtterance, AudioContext, _RemoteUtterance)
LONG = "Hello there, how are you today? " * 4


@pytest.fixture(scope="module")
def server():
    options = {"device": "cpu", "max_streams": 4, "max_positions": 512, "queue_timeout": PATIENCE_S}
    with running(lambda: TTSEngine.load("demo", **options)) as server:
        until_true(lambda: server.service.state == "ready")
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
        callbacks = {"on_chunk": lambda chunk: held.append(chunk), "on_end": lambda: held.append(None)}
        held.append(server.service.engine.submit("Hello there.", max_frames=4, **callbacks))
        held[0].result()
        until_true(lambda: None in held)

    with in_cycles() as found:
        speak()
    assert not found


def test_the_check_sees_a_cycle():
    with in_cycles() as found:
        utterance = AsyncUtterance.__new__(AsyncUtterance)
        utterance.itself = utterance
        del utterance
    assert found == {"AsyncUtterance": 1}


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN])
@pytest.mark.parametrize("remote", [False, True])
def test_what_a_pipeline_spoke_is_freed(server, remote, mode, interrupted):
    async def main() -> None:
        if remote:
            service = MegakernelWebsocketTTSService(url=server.socket_url, text_aggregation_mode=mode)
        else:
            service = MegakernelTTSService(engine=server.service.engine, text_aggregation_mode=mode)
        frames = [LLMFullResponseStartFrame(), LLMTextFrame(LONG if interrupted else "Hello there.")]
        if interrupted:
            frames += [came(TTSAudioRawFrame), InterruptionFrame(), came(InterruptionFrame)]
        else:
            frames.append(LLMFullResponseEndFrame())
        down, up = await play(service, frames)
        assert any(isinstance(frame, TTSAudioRawFrame) for frame in down)
        assert not any(isinstance(frame, ErrorFrame) for frame in [*down, *up])
        await until(lambda: not server.service.utterances and server.service.engine.health()["streams"] == 0)

    with in_cycles() as found:
        asyncio.run(main())
    assert not found
