"""Right calls and wrong ones, as type checkers see them. `make lint` reads this file; nobody runs it.

Each "type: ignore" stands for a mistake that is found: one that is not needed is an error itself.
"""

from typing import assert_type

from pipecat.frames.frames import TTSUpdateSettingsFrame
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transcriptions.language import Language
from pipecat.utils.types import NOT_GIVEN, NotGiven

from qwen_megakernel import EngineArguments, EngineOptions, Lexicon, TTSEngine, Voice
from qwen_megakernel.pipecat_tts import MegakernelTTSService
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService


def settings(voice: Voice) -> None:
    local, remote = MegakernelTTSService.Settings, MegakernelWebsocketTTSService.Settings
    one = local(
        model="demo", voice=voice, language=Language.EN, speed=2, seed=None, chunk_frames=[1, 2], trim=NOT_GIVEN
    )
    TTSUpdateSettingsFrame(delta=remote(voice="ada", language="en-US", temperature=0.5, lexicon=Lexicon({})))
    assert_type(one.speed, float | None | NotGiven)
    assert_type(one.voice, str | Voice | None | NotGiven)
    one.speed = 1.5
    one.sped = 1.5  # type: ignore[attr-defined]
    one.speed = "fast"  # type: ignore[assignment]
    local(seeed=3)  # type: ignore[call-arg]
    local(speed="fast")  # type: ignore[arg-type]
    local(voice=7)  # type: ignore[arg-type]
    local(language=7)  # type: ignore[arg-type]
    local(speaker="ada")  # type: ignore[call-arg]
    remote(voice=voice)  # type: ignore[arg-type]
    remote(instructions="Slowly.")  # type: ignore[call-arg]


def services() -> None:
    mode = TextAggregationMode.TOKEN
    MegakernelTTSService(model="demo", text_aggregation_mode=mode, sample_rate=16000, engine_options={"threads": 1})
    MegakernelWebsocketTTSService(url="ws://host", token=None, reconnect_on_error=False, name="mine")
    MegakernelTTSService(models="demo")  # type: ignore[call-arg]
    MegakernelTTSService(voice="ada")  # type: ignore[call-arg]
    MegakernelTTSService(sample_rate="16000")  # type: ignore[arg-type]
    MegakernelTTSService(reconnect_on_error=False)  # type: ignore[call-arg]
    MegakernelTTSService(engine_options={"max_strams": 8})  # type: ignore[arg-type]
    MegakernelTTSService(settings={"voice": "ada"})  # type: ignore[arg-type]
    MegakernelWebsocketTTSService()  # type: ignore[call-arg]
    MegakernelWebsocketTTSService(url="ws://host", tokn="x")  # type: ignore[call-arg]
    MegakernelWebsocketTTSService(url="ws://host", name=7)  # type: ignore[arg-type]


async def engines() -> None:
    options = EngineArguments(max_streams=8)
    engine = TTSEngine.load("demo", EngineOptions(), **options)
    await MegakernelTTSService.warmup("demo", **options)
    TTSEngine.load("demo", max_strams=8)  # type: ignore[call-arg]
    TTSEngine.load("demo", max_streams="8")  # type: ignore[arg-type]
    await MegakernelTTSService.warmup("demo", devise="cpu")  # type: ignore[call-arg]
    engine.generate("Hello.", speaker="ada", speed=2, retries=1)
    engine.generate("Hello.", sped=2)  # type: ignore[call-arg]
    engine.stream("Hello.", speed="fast")  # type: ignore[arg-type]
    engine.submit("Hello.", speeker="ada")  # type: ignore[call-arg]
    list(engine.map(["Hello."], seed="7"))  # type: ignore[arg-type]
