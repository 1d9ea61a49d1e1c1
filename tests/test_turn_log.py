"""The bot's console: one line a turn, and no more."""

import asyncio
import contextlib
import io
import re

import pytest
from loguru import logger
from pipecat.frames.frames import (
    CancelFrame,
    EndFrame,
    Frame,
    InterruptionFrame,
    LLMContextFrame,
    MetricsFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.observers.base_observer import FramePushed
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TextAggregationMode, TTSService
from pipelines import Prepared, running, worker_of
from waiting import until_in_loop as until

from qwen_megakernel.bot_page import TurnLog, log_to_console
from qwen_megakernel.offline_llm import OfflineLLM
from qwen_megakernel.pipecat.audio_context import SpeechMetricsData
from qwen_megakernel.pipecat_tts import MegakernelTTSService


@pytest.fixture(scope="module")
def engine(backend):
    return backend.demo()


@pytest.fixture
def console():
    """What the bot's console shows."""
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        log_to_console()
    yield shown
    logger.remove()


def asked(text: str) -> LLMContextFrame:
    return LLMContextFrame(LLMContext([{"role": "user", "content": text}]))


async def converse(engine, *frames: Frame, mode=TextAggregationMode.SENTENCE) -> None:
    """A pipeline that answers by rules; each frame goes in when the line of the one before is written."""
    lines = []
    sink = logger.add(lines.append, filter="qwen_megakernel.pipecat.turn_log")
    tts = MegakernelTTSService(engine=Prepared(engine), text_aggregation_mode=mode)
    worker = worker_of(OfflineLLM(token_s=0), tts, observers=[TurnLog()])
    async with running(worker):
        for count, frame in enumerate(frames, 1):
            await worker.queue_frame(frame)
            await until(lambda count=count: len(lines) == count)
        await worker.queue_frame(EndFrame())
    logger.remove(sink)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(TextAggregationMode))
async def test_a_turn_is_one_line(engine, console, mode):
    """However many sentences its answer has."""
    await converse(engine, LLMContextFrame(LLMContext()), asked("Count to\nthree."), mode=mode)
    greeting, counted = console.getvalue().splitlines()
    assert "(no text) first audio " in greeting
    figures = r"first audio \d+ ms after the text \(TTFC \d+ ms\), RTF \d+\.\d\d, least lead -?\d+ ms"
    assert re.search(rf'^\d\d:\d\d:\d\d (INFO|WARNING) +"Count to three\." {figures}', counted)


class _Speech(TTSService):
    """Nobody but the source of frames."""

    def __init__(self):
        super().__init__(settings=TTSSettings(model=None, voice=None, language=None))

    async def run_tts(self, text: str, context_id: str):
        yield None


def tell(*happened: tuple) -> None:
    """What TurnLog is told: time in seconds, frame, and its source if that is not the speech. Each on two hops."""

    async def push() -> None:
        log, speech = TurnLog(), _Speech()
        for at, frame, *source in happened:
            for _ in range(2):
                data = FramePushed(*(source or [speech]), speech, frame, FrameDirection.DOWNSTREAM, int(1e9 * at))
                await log.on_push_frame(data)

    asyncio.run(push())


def audio(seconds: float, context_id: str | None = None) -> TTSAudioRawFrame:
    return TTSAudioRawFrame(bytes(2 * round(24000 * seconds)), 24000, 1, context_id=context_id)


def spent(audio_s: float, compute_s: float, ttfc_s: float) -> MetricsFrame:
    return MetricsFrame([SpeechMetricsData(processor="tts", audio_s=audio_s, compute_s=compute_s, ttfc_s=ttfc_s)])


def test_the_figures_are_those_of_the_whole_turn(console):
    """Of two sentences, of which the second comes 0.5 s before the listener has heard the first."""
    tell(
        (10.0, asked("Hello.")),
        (10.2, audio(0.1)),
        (10.25, audio(0.9)),
        (10.3, spent(1.0, 0.3, 0.02)),
        (10.7, audio(1.0)),
        (10.7, spent(1.0, 0.5, 0.03)),
        (10.8, TTSStoppedFrame()),
    )
    line = '"Hello." first audio 200 ms after the text (TTFC 20 ms), RTF 0.40, least lead 50 ms'
    assert console.getvalue()[9:] == f"INFO    {line}\n"


def test_a_gap_is_a_warning(console):
    tell((0.0, asked("Hello.")), (1.0, audio(0.1)), (1.3, audio(0.1)), (1.5, audio(0.1)), (1.5, TTSStoppedFrame()))
    line = '"Hello." first audio 1000 ms after the text, least lead -200 ms, A GAP WAS HEARD (300 ms of silence in all)'
    assert console.getvalue()[9:] == f"WARNING {line}\n"


def test_a_transport_begins_with_a_whole_piece(console):
    """A first chunk of which 10 ms are left without its silence is heard together with the next."""
    tell((0.0, asked("Hello.")), (0.1, audio(0.01)), (0.2, audio(0.1)), (0.25, audio(0.1)), (0.3, TTSStoppedFrame()))
    assert "first audio 200 ms" in console.getvalue() and "least lead 60 ms" in console.getvalue()


@pytest.mark.parametrize("end", [InterruptionFrame(), CancelFrame()])
def test_an_interrupted_turn_has_its_line_too(console, end):
    tell((0.0, asked("x" * 400)), (0.1, audio(0.1)), (0.15, audio(0.1)), (0.16, end), (0.17, InterruptionFrame()))
    assert console.getvalue()[9:] == (
        f'INFO    "{"x" * 59}…" first audio 100 ms after the text, least lead 50 ms, interrupted\n'
    )


def test_sound_that_passes_an_interruption_is_no_turn(console):
    """It goes from processor to processor: the service speaks on until it comes, and behind it what may not be
    interrupted."""
    llm = OfflineLLM()
    tell(
        (0.0, audio(0.1, "greeting")),
        (1.0, InterruptionFrame(), llm),
        (2.0, audio(0.1, "greeting")),
        (3.0, audio(0.1, "late")),
        (4.0, InterruptionFrame()),
        (5.0, audio(0.1, "greeting")),
        (6.0, TTSStoppedFrame(context_id="greeting")),
        (7.0, asked("Hm."), llm),
        (8.0, audio(0.1, "answer")),
        (9.0, TTSStoppedFrame(context_id="answer")),
    )
    greeting, answer = console.getvalue().splitlines()
    assert greeting.endswith("interrupted") and '"Hm." first audio 1000 ms' in answer


def test_a_turn_without_sound_says_so(console):
    """Also where the interruption of the turn before is still on its way."""
    tell((0.0, asked("Hello.")), (0.1, InterruptionFrame()), (1.0, asked("Hm.")), (1.1, TTSStoppedFrame()))
    assert [line[17:] for line in console.getvalue().splitlines()] == ['"Hello." no sound', '"Hm." no sound']


def test_a_context_that_holds_the_answer_asks_nothing(console):
    """But a question stays one where the words that it interrupted stand behind it already."""
    assistant = LLMContextAggregatorPair(LLMContext()).assistant()
    answered, late = asked("Hi."), asked("Hm.")
    for frame in (answered, late):
        frame.context.add_message({"role": "assistant", "content": "Yes."})
    tell(
        (0.0, asked("Hi.")),
        (0.1, audio(0.1)),
        (0.1, TTSStoppedFrame()),
        (0.2, answered, assistant),
        (0.3, late),
        (0.4, audio(0.1)),
        (0.4, TTSStoppedFrame()),
    )
    assert [line[17:].split(" ms")[0] for line in console.getvalue().splitlines()] == [
        '"Hi." first audio 100',
        '"Hm." first audio 100',
    ]


def test_a_transport_that_passes_audio_on_is_not_counted_again(console):
    tell((0.0, asked("Hello.")), (0.1, audio(0.1), OfflineLLM()), (0.1, TTSStoppedFrame()))
    assert "no sound" in console.getvalue()


def test_the_console_shows_what_matters(console):
    """Of others' lines those from WARNING on, without what Pipecat says of every call that has no microphone."""
    logger.debug("a detail")
    logger.info("more of it")
    logger.warning("No video transceiver is available")
    logger.warning("Timeout: No audio frame received within the specified time.")
    assert not console.getvalue()
    logger.warning("look at {this}")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed")
    shown = console.getvalue()
    assert "WARNING look at {this}" in shown and "ERROR   it failed" in shown and "ValueError: broken" in shown
    with contextlib.redirect_stderr(console):
        log_to_console(verbose=True)
    logger.debug("a detail")
    assert "a detail" in console.getvalue()
