"""A voice bot that you can interrupt: `python voice_bot.py`, then open the address that it prints.

Ask it to tell a story. Type or speak while it does: it stops at once, and its LLM's context keeps what you heard. It
needs no key and no network: the voice is the bundled demo voice, the LLM is a handful of rules.

The engine runs in this process, unless QWEN_MEGAKERNEL_URL names a server:

    qwen-megakernel serve --model demo
    QWEN_MEGAKERNEL_URL=ws://127.0.0.1:8000/v1/audio/speech/socket python voice_bot.py

QWEN_MEGAKERNEL_TOKEN is the server's token, if it has one.
"""

import asyncio
import os

from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.evals.transport import EvalTransportParams
from pipecat.frames.frames import LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.runner.types import RunnerArguments
from pipecat.runner.utils import create_transport
from pipecat.services.tts_service import TTSService
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner

import pipecat_qwen_megakernel as qwen
from qwen_megakernel import bot_page
from qwen_megakernel.offline_llm import OfflineLLM

MODEL = "demo"  # or a folder or hub id, such as Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice
VOICE = "ada"
URL = os.environ.get("QWEN_MEGAKERNEL_URL")


def make_tts() -> TTSService:
    """The server's client if there is a server, else the engine itself."""
    if URL:
        return qwen.MegakernelWebsocketTTSService(
            url=URL,
            token=os.environ.get("QWEN_MEGAKERNEL_TOKEN"),
            settings=qwen.MegakernelWebsocketTTSService.Settings(voice=VOICE, language="en"),
        )
    return qwen.MegakernelTTSService(
        model=MODEL, settings=qwen.MegakernelTTSService.Settings(voice=VOICE, language="en")
    )


async def bot(runner_args: RunnerArguments) -> None:
    """One call, as Pipecat's runner starts it."""
    sound = {"audio_in_enabled": True, "audio_out_enabled": True}
    kinds = {"webrtc": lambda: TransportParams(**sound), "eval": lambda: EvalTransportParams(**sound)}
    transport = await create_transport(runner_args, kinds)
    user, assistant = LLMContextAggregatorPair(
        LLMContext(), user_params=LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer())
    )
    pipeline = Pipeline(
        [
            transport.input(),
            # a speech-to-text service, such as DeepgramSTTService(api_key=...); without one you type
            user,
            OfflineLLM(),  # or an LLM service, such as OpenAILLMService(api_key=...)
            make_tts(),
            transport.output(),
            assistant,
        ]
    )
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
    if not URL:
        asyncio.run(qwen.MegakernelTTSService.warmup(MODEL))  # loaded once, before the first call
    bot_page.run()
