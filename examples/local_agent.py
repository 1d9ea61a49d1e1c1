"""A voice agent on one machine, without keys: it hears you, thinks and speaks.

Two servers with OpenAI's API hold the other models: one recognises speech, one is the language model. Pipecat finds the
turns: Silero VAD notices speech, and Smart Turn, Pipecat's default, whether the speaker has finished. Both are in its
package. The voice is in this process. examples/local_agent.compose.yaml starts everything; or start servers of your
own, name them by the variables below, run `python examples/local_agent.py`, and open the address that it prints.
"""

import asyncio
import os

from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames.frames import TTSSpeakFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.runner.utils import create_transport
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.stt import OpenAISTTService
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner

from qwen_megakernel import bot_page
from qwen_megakernel.pipecat_tts import MegakernelTTSService

STT_URL = os.environ.get("STT_URL", "http://127.0.0.1:8001/v1")
STT_MODEL = os.environ.get("STT_MODEL", "Systran/faster-whisper-small")
LLM_URL = os.environ.get("LLM_URL", "http://127.0.0.1:8080/v1")
LLM_MODEL = os.environ.get("LLM_MODEL", "default")  # a llama.cpp server has one model, and takes any name
KEY = os.environ.get("MODELS_KEY", "none")  # of both servers; a local one takes any
VOICE_MODEL = os.environ.get("VOICE_MODEL", "demo")  # or "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"
VOICE = os.environ.get("VOICE")  # a speaker; by default the model's first
INSTRUCTION = "You speak with a user by voice. Answer in one or two short sentences, without markup, lists or emoji."


async def bot(runner_args):
    sound = {"webrtc": lambda: TransportParams(audio_in_enabled=True, audio_out_enabled=True)}
    transport = await create_transport(runner_args, sound)
    stt = OpenAISTTService(base_url=STT_URL, api_key=KEY, settings=OpenAISTTService.Settings(model=STT_MODEL))
    llm = OpenAILLMService(
        base_url=LLM_URL,
        api_key=KEY,
        settings=OpenAILLMService.Settings(model=LLM_MODEL, system_instruction=INSTRUCTION),
    )
    voice = MegakernelTTSService.Settings(voice=VOICE, language="en", normalize="auto")  # LLMs write digits
    tts = MegakernelTTSService(model=VOICE_MODEL, settings=voice)
    user, assistant = LLMContextAggregatorPair(
        LLMContext(), user_params=LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer())
    )
    pipeline = Pipeline([transport.input(), stt, user, llm, tts, transport.output(), assistant])
    params = PipelineParams(audio_out_sample_rate=24000, enable_metrics=True)
    worker = PipelineWorker(pipeline, params=params, observers=[bot_page.TurnLog()])

    @transport.event_handler("on_client_connected")
    async def greet(transport, client):
        # Not in the context: some models want the user to speak first.
        await worker.queue_frame(TTSSpeakFrame("Hello! What can I do for you?", append_to_context=False))

    @transport.event_handler("on_client_disconnected")
    async def hang_up(transport, client):
        await worker.cancel()

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await runner.run()


if __name__ == "__main__":
    bot_page.check_port()  # before the model is loaded
    asyncio.run(MegakernelTTSService.warmup(VOICE_MODEL))
    bot_page.run()
