"""Two bots, one engine: `python examples/two_bots.py`, then open the address in two windows; each has its own voice.

Services that name the same model share one engine. Every utterance has a slot of its own in it: what one caller hears
does not depend on the other, and an interruption ends nobody else's speech.
"""

import asyncio
import itertools

from pipecat.frames.frames import LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.runner.utils import create_transport
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner

from qwen_megakernel import EngineArguments, bot_page
from qwen_megakernel.offline_llm import OfflineLLM
from qwen_megakernel.pipecat_tts import MegakernelTTSService

MODEL = "demo"
OPTIONS = EngineArguments(max_streams=8)  # who names the same model and options shares its engine
VOICES = itertools.cycle(("ada", "max"))


async def bot(runner_args):
    sound = {"webrtc": lambda: TransportParams(audio_in_enabled=True, audio_out_enabled=True)}
    transport = await create_transport(runner_args, sound)
    voice = MegakernelTTSService.Settings(voice=next(VOICES))
    tts = MegakernelTTSService(model=MODEL, engine_options=OPTIONS, settings=voice)
    user, assistant = LLMContextAggregatorPair(LLMContext())
    pipeline = Pipeline([transport.input(), user, OfflineLLM(), tts, transport.output(), assistant])
    params = PipelineParams(audio_out_sample_rate=24000, enable_metrics=True)
    worker = PipelineWorker(pipeline, params=params, observers=[bot_page.TurnLog()])

    @transport.event_handler("on_client_connected")
    async def greet(transport, client):
        await worker.queue_frame(LLMRunFrame())

    @transport.event_handler("on_client_disconnected")
    async def hang_up(transport, client):
        await worker.cancel()

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await runner.run()


if __name__ == "__main__":
    bot_page.check_port()  # before the model is loaded
    asyncio.run(MegakernelTTSService.warmup(MODEL, **OPTIONS))
    bot_page.run()
