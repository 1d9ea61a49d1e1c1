"""Qwen3-TTS in a Pipecat pipeline.

    python demo_pipeline.py --text "Hello there." --output hello.wav    text in, sound out
    python demo_pipeline.py --bot                                       a voice bot on a web page
    python demo_pipeline.py --bot --local-audio                         the same at this machine's microphone

The bot answers by rules unless --llm-url names an OpenAI-compatible server. It is typed to unless --stt names a Pipecat
speech-to-text service:

    --stt pipecat.services.deepgram.stt:DeepgramSTTService --stt-options '{"api_key": "$DEEPGRAM_API_KEY"}'
"""

from qwen_megakernel.__main__ import end_at_interrupt
from qwen_megakernel.commands.demo import make_parser, parse

if __name__ == "__main__":
    end_at_interrupt(True)
    parse(make_parser(__doc__))  # help, and words about wrong options, before the imports below, which take seconds

import argparse
import asyncio
import importlib
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("LOGURU_LEVEL", "WARNING")  # Pipecat greets with a log line while it is imported

from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames.frames import (
    CancelFrame,
    CancelWorkerFrame,
    EndFrame,
    Frame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMMessagesAppendFrame,
    LLMRunFrame,
    LLMTextFrame,
    OutputAudioRawFrame,
    StartFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner

from qwen_megakernel import TTSEngine, TTSError, bot_page
from qwen_megakernel.choices import DEMO, DEMO_NOTICE, OUT, PUBLISHED
from qwen_megakernel.commands.idle import RULES, refuse_idle
from qwen_megakernel.commands.options import (
    check_voice,
    engine_options,
    told,
    voice_options,
)
from qwen_megakernel.commands.output import SpeechFile, checked_output, play, players_of, write_stdout
from qwen_megakernel.errors import RequestError
from qwen_megakernel.offline_llm import OfflineLLM
from qwen_megakernel.pipecat_tts import MegakernelTTSService

INSTRUCTION = "You speak with a user by voice. Answer in one or two short sentences, without markup, lists or emoji."


def main(argv: list[str] | None = None) -> int:
    end_at_interrupt(False)
    parser = make_parser(__doc__)
    args = parse(parser, argv)
    bot_page.log_to_console(args.verbose)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("qwen_megakernel").setLevel(logging.DEBUG if args.verbose else logging.INFO)
    try:
        make_stt(args)  # wrong options are told now, not to the first caller
        voice_options(args, "demo")
        refuse_idle(args, parser, RULES["demo"])
        if not args.bot:
            speak(args)
        elif args.local_audio:
            asyncio.run(talk_here(args))
        else:
            serve(args, parser)
    except (TTSError, ImportError) as error:  # a part of Pipecat may be missing; it says which extra has it
        print(told(error, args), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the process that read our PCM is gone
        return 1
    return 0


def warmup(args: argparse.Namespace) -> Awaitable[TTSEngine]:
    return MegakernelTTSService.warmup(args.model, engine_options(args))


@asynccontextmanager
async def loaded_engine(args: argparse.Namespace):
    """The process's engine, loaded and warmed; of several users the last one closes it."""
    engine = await warmup(args)
    try:
        yield engine
    finally:
        await MegakernelTTSService.shutdown(engine)


async def make_tts(args: argparse.Namespace, engine: TTSEngine) -> MegakernelTTSService:
    options: dict[str, Any] = {**voice_options(args, "demo")}
    if args.ref_audio is not None:
        options["voice"] = await asyncio.to_thread(engine.create_voice, args.ref_audio, args.ref_text)
    elif speaker := options.pop("speaker", None):
        options["voice"] = speaker
    check_voice(engine.variant, options)
    return MegakernelTTSService(
        engine=engine,
        settings=MegakernelTTSService.Settings(**options),
        text_aggregation_mode=TextAggregationMode.TOKEN if args.tokens else TextAggregationMode.SENTENCE,
    )


# ---------------------------------------------------------------- text in, sound out


class SoundOutput(BaseOutputTransport):
    """An output transport that takes audio as fast as it comes: into a sound file, or as PCM16 to standard output."""

    def __init__(self, path: str):
        # A transport fills its last piece up with silence; with pieces of 10 ms that is next to none.
        params = TransportParams(audio_out_enabled=True, audio_out_10ms_chunks=1, audio_out_end_silence_secs=0)
        super().__init__(params)
        self._path, self._pcm = path, bytearray()
        self.first_audio: float | None = None  # time.monotonic()
        self.last_audio = 0.0
        self.error: RequestError | BrokenPipeError | None = None  # which ended it

    async def start(self, frame: StartFrame):
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def process_frame(self, frame: Frame, direction: FrameDirection):
        frame.pts = None  # words are held until they are heard, and the end behind them: here nobody listens
        await super().process_frame(frame, direction)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        if self.error:
            return False
        self.last_audio = time.monotonic()
        self.first_audio = self.first_audio or self.last_audio
        if self._path == "-":
            try:
                write_stdout(frame.audio)
            except (RequestError, BrokenPipeError) as error:
                self.error = error
                await self.push_frame(CancelWorkerFrame(), FrameDirection.UPSTREAM)
                return False
        self._pcm += frame.audio
        return True

    @property
    def seconds(self) -> float:
        return len(self._pcm) / 2 / self.sample_rate

    def save(self) -> None:
        if self._path != "-":
            with SpeechFile(self._path, self.sample_rate) as file:
                file.write(self._pcm)


def speak(args: argparse.Namespace) -> None:
    text = args.text if args.text is not None else sys.stdin.read()
    if not text.strip():
        raise RequestError("the text is blank; give it with --text or on standard input")
    output = checked_output(args)
    with tempfile.TemporaryDirectory() as folder:
        path = output or str(Path(folder) / OUT)
        lines = asyncio.run(say(args, text, path))
        if output:
            where = "PCM16 on standard output" if output == "-" else Path(output).resolve()
            lines.insert(0, f"wrote   {where}")
        if output not in (None, "-"):
            lines += next_steps(output, args.model)
        print("\n".join(lines), file=sys.stderr if output == "-" else sys.stdout)
        if args.play:
            play(Path(path))


async def say(args: argparse.Namespace, text: str, path: str) -> list[str]:
    """Speak into a file. Returns the lines that tell about it."""
    async with loaded_engine(args) as engine:
        tts, output = await make_tts(args, engine), SoundOutput(path)
        worker = PipelineWorker(
            Pipeline([tts, output]), params=PipelineParams(audio_out_sample_rate=args.rate), enable_rtvi=False
        )
        errors, began, end = [], 0.0, None

        @worker.event_handler("on_pipeline_started")
        async def on_pipeline_started(worker, frame):
            nonlocal began
            began = time.monotonic()
            turn = [LLMFullResponseStartFrame(), LLMTextFrame(text), LLMFullResponseEndFrame(), EndFrame()]
            await worker.queue_frames(turn)

        @worker.event_handler("on_pipeline_error")
        async def on_pipeline_error(worker, frame):
            errors.append(frame.error)

        @worker.event_handler("on_pipeline_finished")
        async def on_pipeline_finished(worker, frame):
            nonlocal end
            end = frame

        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(worker)
        interrupted = asyncio.Event()

        def interrupt() -> None:
            # By way of the pipeline: a worker that has its EndFrame takes no other, and goes on until all is said.
            interrupted.set()
            worker.create_task(tts.queue_frame(CancelFrame()), "interrupt")

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        await runner.run()
        if interrupted.is_set():
            raise KeyboardInterrupt
        if output.error:
            raise output.error
        if errors or not isinstance(end, EndFrame) or output.first_audio is None:
            raise RequestError(errors[0] if errors else "the pipeline ended before all was said; nothing was written")
        output.save()
        lines = [
            f"speech  {output.seconds:.2f} s at {output.sample_rate} Hz",
            f"speed   TTFC {1000 * (output.first_audio - began):.1f} ms from the text to the output transport, "
            f"RTF {(output.last_audio - began) / output.seconds:.3f} ({engine.backend} backend)",
        ]
        if args.model == DEMO:
            lines.append(f"voice   {DEMO_NOTICE}")
        return lines


def next_steps(output: str, model: str) -> list[str]:
    """What to do with the file, and what else there is."""
    players = players_of(Path(output).suffix.lower() or ".wav")
    player = next(filter(shutil.which, players), players[0])
    here = shlex.join([os.path.relpath(sys.executable), os.path.relpath(__file__)])
    lines = [
        f"listen  {shlex.join([player, output])}, or any other player",
        f"talk    {'make bot' if Path('Makefile').exists() else f'{here} --bot'}, then open http://localhost:7860",
    ]
    if model == DEMO:
        lines.append(f'model   {here} --model {PUBLISHED[1]} --text "Hello there."')
    return lines


# ---------------------------------------------------------------- bot


def serve(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Load the model, then serve the page and the telephony routes of Pipecat's runner; every caller gets a `bot`."""
    try:
        import pipecat.runner.run  # noqa: F401
    except ImportError as error:
        raise RequestError(f"--bot needs the extra [bot] ({error}): `make bot`, or pip install -e '.[bot]'") from error

    bot_page.check_port()

    async def load():
        return await warmup(args)

    engine = asyncio.run(load())  # kept until the server stops, so that no caller waits for it
    try:
        bot_page.run(parser)
    finally:
        asyncio.run(MegakernelTTSService.shutdown(engine))


async def bot(runner_args) -> None:
    """One call: what Pipecat's runner asks a bot file for."""
    from pipecat.runner.types import WebSocketRunnerArguments
    from pipecat.runner.utils import create_transport
    from pipecat.transports.websocket.fastapi import FastAPIWebsocketParams

    sound = {"audio_in_enabled": True, "audio_out_enabled": True}
    kinds = {name: lambda: FastAPIWebsocketParams(**sound) for name in ("twilio", "telnyx", "plivo", "exotel")}
    transport = await create_transport(runner_args, {"webrtc": lambda: TransportParams(**sound), **kinds})
    telephone = isinstance(runner_args, WebSocketRunnerArguments)
    await run_bot(transport, runner_args.cli_args, rate=8000 if telephone else runner_args.cli_args.rate)


async def run_bot(
    transport, args: argparse.Namespace, *, rate: int, here: bool = False, lines: asyncio.Queue | None = None
) -> None:
    """Until the caller hangs up. `here`: there is none to wait for. `lines`: what is typed, where there is no page to
    type into; None in it is the end."""
    async with loaded_engine(args) as engine:
        context = LLMContext()
        user, assistant = LLMContextAggregatorPair(
            context, user_params=LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer())
        )
        stt, tts = make_stt(args), await make_tts(args, engine)
        processors = [transport.input(), stt, user, make_llm(args), tts, transport.output(), assistant]
        worker = PipelineWorker(
            Pipeline([p for p in processors if p]),
            params=PipelineParams(
                audio_in_sample_rate=8000 if rate == 8000 else 16000,
                audio_out_sample_rate=rate,
                enable_metrics=True,
                enable_usage_metrics=True,
            ),
            observers=[bot_page.TurnLog()],
        )

        async def greet(*_):
            await worker.queue_frame(LLMRunFrame())  # with nothing said yet: a greeting

        async def hang_up(*_):
            await worker.cancel()

        async def read_lines():
            while (line := await lines.get()) is not None:
                message = {"role": "user", "content": line}
                await worker.queue_frames([InterruptionFrame(), LLMMessagesAppendFrame([message], run_llm=True)])
            await worker.queue_frame(EndFrame())

        if here:
            worker.add_event_handler("on_pipeline_started", greet)
        else:
            transport.add_event_handler("on_client_connected", greet)
            transport.add_event_handler("on_client_disconnected", hang_up)
        runner = WorkerRunner(handle_sigint=here)
        await runner.add_workers(worker)
        reader = asyncio.create_task(read_lines()) if lines else None
        try:
            await runner.run()
        finally:
            if reader:
                reader.cancel()


async def talk_here(args: argparse.Namespace) -> None:
    """At this machine's microphone and loudspeaker, or its keyboard where there is no speech-to-text."""
    from pipecat.transports.local.audio import LocalAudioTransport, LocalAudioTransportParams

    transport = LocalAudioTransport(
        LocalAudioTransportParams(audio_in_enabled=args.stt is not None, audio_out_enabled=True)
    )
    await run_bot(transport, args, rate=args.rate, here=True, lines=None if args.stt else typed_lines())


def typed_lines() -> asyncio.Queue:
    """Lines of standard input; None behind the last."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            if line.strip():
                loop.call_soon_threadsafe(lines.put_nowait, line.strip())
        loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()  # blocked in a read, it must not keep the process
    print("type something and press Enter; Ctrl-D ends", file=sys.stderr)
    return lines


def make_llm(args: argparse.Namespace) -> FrameProcessor:
    if not args.llm_url:
        return OfflineLLM()
    from pipecat.services.openai.llm import OpenAILLMService

    return OpenAILLMService(
        base_url=args.llm_url,
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        settings=OpenAILLMService.Settings(model=args.llm_model, system_instruction=INSTRUCTION),
    )


def make_stt(args: argparse.Namespace) -> FrameProcessor | None:
    if not args.stt:
        return None
    module, _, name = args.stt.partition(":")
    if not module or not name:
        raise RequestError(f"--stt must be MODULE:CLASS, as in --help, got {args.stt!r}")
    try:
        options = json.loads(args.stt_options)
        for option, value in options.items():
            if isinstance(value, str) and value.startswith("$"):  # a command line can be read by everybody here
                if value[1:] not in os.environ:
                    raise ValueError(f"{option}: the environment variable {value[1:]} is not set")
                options[option] = os.environ[value[1:]]
        return getattr(importlib.import_module(module), name)(**options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise RequestError(f"--stt {args.stt}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
