"""The voice changes while a call goes on: `python examples/change_voice.py`, then type "speak as max".

A TTSUpdateSettingsFrame carries the change. It holds from the next sentence on; language, instruct, temperature and the
other settings change in the same way.
"""

import asyncio
import re

from pipecat.frames.frames import Frame, LLMContextFrame, LLMRunFrame, TTSUpdateSettingsFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.runner.utils import create_transport
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner

from qwen_megakernel import bot_page
from qwen_megakernel.offline_llm import OfflineLLM
from qwen_megakernel.pipecat_tts import MegakernelTTSService

MODEL = "demo"


class VoiceSwitch(FrameProcessor):
    """Hears "speak as NAME" before the LLM does."""

    async def process_frame(self, frame: Frame, direction: FrameDirection):
        await super().process_frame(frame, direction)
        if isinstance(frame, LLMContextFrame) and frame.context.get_messages():
            asked = re.search(r"speak as (\w+)", str(frame.context.get_messages()[-1]["content"]), re.IGNORECASE)
            if asked:
                change = MegakernelTTSService.Settings(voice=asked.group(1).lower())
                await self.push_frame(TTSUpdateSettingsFrame(delta=change))
        await self.push_frame(frame, direction)


async def bot(runner_args):
    sound = {"webrtc": lambda: TransportParams(audio_in_enabled=True, audio_out_enabled=True)}
    transport = await create_transport(runner_args, sound)
    tts = MegakernelTTSService(model=MODEL, settings=MegakernelTTSService.Settings(voice="ada"))
    user, assistant = LLMContextAggregatorPair(LLMContext())
    pipeline = Pipeline([transport.input(), user, VoiceSwitch(), OfflineLLM(), tts, transport.output(), assistant])
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
    asyncio.run(MegakernelTTSService.warmup(MODEL))
    bot_page.run()
