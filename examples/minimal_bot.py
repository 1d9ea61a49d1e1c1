"""The smallest voice bot: `python examples/minimal_bot.py`, then open the address that it prints.

Its LLM is a handful of rules and it is typed to; put any Pipecat LLM service in the place of OfflineLLM, and any
speech-to-text service in front of `user`.
"""

import asyncio

from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.evals.transport import EvalTransportParams
from pipecat.frames.frames import LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.runner.utils import create_transport
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner

from qwen_megakernel import bot_page
from qwen_megakernel.offline_llm import OfflineLLM
from qwen_megakernel.pipecat_tts import MegakernelTTSService

MODEL = "demo"  # or "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"


async def bot(runner_args):
    sound = {"audio_in_enabled": True, "audio_out_enabled": True}
    kinds = {"webrtc": lambda: TransportParams(**sound), "eval": lambda: EvalTransportParams(**sound)}
    transport = await create_transport(runner_args, kinds)
    tts = MegakernelTTSService(model=MODEL, settings=MegakernelTTSService.Settings(voice="ada", language="en"))
    user, assistant = LLMContextAggregatorPair(
        LLMContext(), user_params=LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer())
    )
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
    asyncio.run(MegakernelTTSService.warmup(MODEL))  # loaded once, before the first call, for all of them
    bot_page.run()
