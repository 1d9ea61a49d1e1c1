"""Speech that starts while the LLM still writes: `python examples/token_mode.py`.

In TOKEN mode the LLM's tokens go straight into one utterance a turn: it starts with the first words, waits in silence
where the LLM pauses, and keeps one melody over all sentences. Here the LLM writes slowly, so that it can be heard.
"""

import asyncio

from pipecat.frames.frames import LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.runner.utils import create_transport
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner

from qwen_megakernel import bot_page
from qwen_megakernel.offline_llm import OfflineLLM
from qwen_megakernel.pipecat_tts import MegakernelTTSService

MODEL = "demo"


async def bot(runner_args):
    sound = {"webrtc": lambda: TransportParams(audio_in_enabled=True, audio_out_enabled=True)}
    transport = await create_transport(runner_args, sound)
    tts = MegakernelTTSService(
        model=MODEL,
        settings=MegakernelTTSService.Settings(voice="ada"),
        text_aggregation_mode=TextAggregationMode.TOKEN,
    )
    user, assistant = LLMContextAggregatorPair(LLMContext())
    pipeline = Pipeline([transport.input(), user, OfflineLLM(token_s=0.2), tts, transport.output(), assistant])
    params = PipelineParams(audio_out_sample_rate=24000, enable_metrics=True, enable_usage_metrics=True)
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
    asyncio.run(MegakernelTTSService.warmup(MODEL))
    bot_page.run()
