"""Runs Pipecat's own examples that use a TTS service, with our service in place of theirs: the demo voice, on a CPU.

    python tools/pipecat_examples.py CHECKOUT [PART ...]

CHECKOUT is a copy of Pipecat's repository. Of its examples, those run whose path contains one of the PARTs; by default
all. Each has a process of its own, without keys. The transport is a line whose user waits for a greeting, then asks
twice. Speech recognition knows what the user says. The language model is a server in the same process; it calls the
first function that it is offered, once for each question. A vendor's module that cannot be imported is a mock.

For each example it prints the seconds of sound in the greeting and in each answer, and the errors of the log.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import soxr
from aiohttp import web
from loguru import logger
from pipecat.frames.frames import (
    InputAudioRawFrame,
    ProposedUserStartedSpeakingFrame,
    ProposedUserStoppedSpeakingFrame,
    TranscriptionFrame,
)
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.runner import utils as runner_utils
from pipecat.runner.types import SmallWebRTCRunnerArguments
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.settings import STTSettings
from pipecat.services.stt_service import STTService
from pipecat.transports.base_input import BaseInputTransport
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import BaseTransport, TransportParams
from pipecat.utils.time import time_now_iso8601

from qwen_megakernel.pipecat.service import ServiceArguments
from qwen_megakernel.pipecat_tts import MegakernelTTSService

QUESTION = "Hello. What can you do for me?"
QUIET_S, PATIENCE_S = 3.0, 15.0  # behind an answer, because a busy machine has gaps; for one
LONGEST_S = 180  # for an example
LOUD = 300  # of 32767: sound
VOICES = itertools.cycle(("ada", "max"))
IDS = itertools.count()
SPEECH_TO_SPEECH = ("realtime", "live", "nova_sonic", "ultravox")


# ---------------------------------------------------------------- the line


class Line(BaseTransport):
    """A call. It takes handlers of any event, because the transports have different ones."""

    opened: list["Line"] = []

    def __init__(self, *arguments, **named):
        super().__init__()
        given = (one for one in (*arguments, *named.values()) if isinstance(one, TransportParams))
        params = next(given, None) or TransportParams()
        params.audio_in_enabled = params.audio_out_enabled = True
        self.microphone, self.loudspeaker = Microphone(params), Loudspeaker(params)
        self.opened.append(self)

    def input(self):
        return self.microphone

    def output(self):
        return self.loudspeaker

    def add_event_handler(self, event_name, handler):
        if event_name not in self._event_handlers:
            self._register_event_handler(event_name)
        super().add_event_handler(event_name, handler)

    def __getattr__(self, name):  # what only some transports can do
        if name.startswith("_"):
            raise AttributeError(name)
        return AsyncMock(name=name)


class Microphone(BaseInputTransport):
    """Hears silence, and `to_say`: PCM16 at 16 kHz."""

    to_say = b""

    async def start(self, frame):
        await super().start(frame)
        await self.set_transport_ready(frame)
        self._hearing = self.create_task(self._hear(), "hear")

    async def _hear(self):
        begun, size = time.monotonic(), self.sample_rate // 50 * 2
        for piece in itertools.count(1):
            pcm, self.to_say = self.to_say[:size].ljust(size, b"\0"), self.to_say[size:]
            await self.push_audio_frame(InputAudioRawFrame(pcm, self.sample_rate, 1))
            await asyncio.sleep(max(0.0, begun + piece * 0.02 - time.monotonic()))


class Loudspeaker(BaseOutputTransport):
    """Takes sound at the speed at which it plays, and counts its seconds."""

    def __init__(self, params):
        super().__init__(params)
        self.ready, self.heard_s, self.last = False, 0.0, 0.0
        self._free = 0.0

    async def start(self, frame):
        await super().start(frame)
        await self.set_transport_ready(frame)
        self.ready = True

    async def write_audio_frame(self, frame) -> bool:
        now, seconds = time.monotonic(), len(frame.audio) / 2 / frame.num_channels / frame.sample_rate
        if np.abs(np.frombuffer(frame.audio, np.int16).astype(int)).max(initial=0) > LOUD:
            self.heard_s, self.last = self.heard_s + seconds, now
        self._free = max(self._free, now) + seconds
        await asyncio.sleep(self._free - now)
        return True


# ---------------------------------------------------------------- services


class Replaced(type(STTService)):
    """Of a class that replaces a vendor's service. What it lacks is the vendor's."""

    @property
    def Settings(cls):  # the example's; an instance has its own
        return cls.make_settings

    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(vars(cls)["vendor"], name)


def settings_maker(real: type, *names: str):
    """Makes settings of a vendor's arguments, by those names that both have. Each voice is another one of ours."""

    def make(*_, **given):
        kept = {name: value for name, value in given.items() if name in names}
        if "voice" in names:
            kept["voice"] = next(VOICES)
        if "language" in kept:
            kept["language"] = "en"
        return real(**kept)

    return staticmethod(make)


class OurTTS(MegakernelTTSService, metaclass=Replaced):
    make_settings = settings_maker(MegakernelTTSService.Settings, "voice", "language", "speed")

    def __init__(self, *_, settings=None, **named):
        ours = {name: value for name, value in named.items() if name in ServiceArguments.__annotations__}
        settings = settings or MegakernelTTSService.Settings(voice="ada", language="en")
        super().__init__(model="demo", engine_options={"device": "cpu"}, settings=settings, **ours)


class KnowingSTT(STTService, metaclass=Replaced):
    """It also proposes turns, for pipelines whose recogniser finds them; others do not listen to that."""

    make_settings = settings_maker(STTSettings, "language")
    _speaks = False

    def __init__(self, *_, **__):
        super().__init__(settings=STTSettings(model=None, language=None))

    async def process_audio_frame(self, frame, direction):
        await super().process_audio_frame(frame, direction)
        spoke, self._speaks = self._speaks, bool(Line.opened[0].microphone.to_say)
        if self._speaks and not spoke:
            await self.broadcast_frame(ProposedUserStartedSpeakingFrame)
        if spoke and not self._speaks:
            await self.push_frame(TranscriptionFrame(QUESTION, "user", time_now_iso8601()))
            await self.broadcast_frame(ProposedUserStoppedSpeakingFrame)

    async def run_stt(self, audio):
        yield None


class LocalLLM(OpenAILLMService, metaclass=Replaced):
    url = ""
    _names = {field.name for field in dataclasses.fields(OpenAILLMService.Settings)} - {"model", "extra"}
    make_settings = settings_maker(OpenAILLMService.Settings, *_names)

    def __init__(self, *_, settings=None, **__):
        super().__init__(api_key="none", base_url=self.url, settings=settings)


class Passing(FrameProcessor, metaclass=Replaced):
    """Does nothing."""

    def __init__(self, *_, **__):
        super().__init__()

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        await self.push_frame(frame, direction)


STAND_INS = {"TTSService": OurTTS, "STTService": KnowingSTT, "LLMService": LocalLLM}


class Vendor(types.ModuleType):
    """A module of Pipecat whose services and transports are replaced. All else is its own. If it cannot be imported,
    mocks are all else, and services that are none of the three kinds do nothing."""

    def __init__(self, name: str):
        super().__init__(name)
        try:
            self._real = importlib.import_module(name)
        except Exception:  # Pipecat raises Exception if a vendor's package is missing
            self._real = MagicMock(name=name)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        real = getattr(self._real, name)
        if name.endswith("Transport"):
            return Line
        kinds = {} if any(part in self.__name__ for part in SPEECH_TO_SPEECH) else STAND_INS
        for kind, stand_in in kinds.items():
            if name.endswith(kind.replace("Service", "Settings")):
                return stand_in.make_settings
        stand_in = next((kinds[kind] for kind in kinds if kind in name), None)
        if stand_in is None and isinstance(real, MagicMock) and name.endswith("Service"):
            stand_in = Passing
        return Replaced(name, (stand_in,), {"vendor": real}) if stand_in else real


def replace_vendors(path: Path) -> None:
    """In all that an example imports, also by way of files beside it."""
    text = path.read_text(encoding="utf-8")
    for name in set(re.findall(r"""(?:from |["'])(pipecat(?:\.[a-z]\w*)+)""", text)):
        if not isinstance(sys.modules.get(name), Vendor):
            vendor = Vendor(name)
            if re.match(r"pipecat\.(services|transports)\.\w+\.", name) or isinstance(vendor._real, MagicMock):
                sys.modules[name] = vendor
    for name in re.findall(r"""environ\[["'](\w+)""", text) + re.findall(r"""["'](\w+_API_KEY)["']""", text):
        os.environ.setdefault(name, "none")
    for name in re.findall(r"^(?:from|import) (\w+)", text, re.M):
        beside = path.with_name(f"{name}.py")
        if beside.exists() and beside != path:
            replace_vendors(beside)


# ---------------------------------------------------------------- the language model


def made_up(schema: dict):
    """A value for a parameter of a function."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "object":
        return {name: made_up(one) for name, one in schema.get("properties", {}).items()}
    examples = re.findall(r"""["']([\w -]+)["']""", schema.get("description", ""))
    word = examples[-1] if examples else "Lisbon"
    return {"integer": 2, "number": 2.0, "boolean": True, "array": []}.get(schema.get("type"), word)


async def complete(request: web.Request) -> web.StreamResponse:
    """OpenAI's chat completions."""
    body = await request.json()
    mark = "● " if "●" in json.dumps(body, ensure_ascii=False) else ""  # some examples want it: the user has finished
    words = f"{mark}I can hear you. This is what I say, and here is the end of it."
    deltas = [{"content": token} for token in re.findall(r"\s*\S+", words)]
    if body.get("tools") and [message["role"] for message in body["messages"][-1:]] == ["user"]:
        function = body["tools"][0]["function"]
        given = json.dumps(made_up({"type": "object"} | function.get("parameters", {})))
        call = {"type": "function", "function": {"name": function["name"], "arguments": given}}
        deltas = [{"tool_calls": [{"index": 0, "id": str(next(IDS)), **call}]}]
    about = {"id": "1", "created": 0, "model": "m"}
    if not body.get("stream"):
        message = {"role": "assistant", "content": words}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(about | {"object": "chat.completion", "choices": [choice]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        chunk = about | {"object": "chat.completion.chunk", "choices": [choice]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


# ---------------------------------------------------------------- one example


class Hurried(types.ModuleType):
    """asyncio of an example: it waits for two seconds at most."""

    __getattr__ = staticmethod(lambda name: getattr(asyncio, name))
    sleep = staticmethod(lambda seconds, *result: asyncio.sleep(min(seconds, 2), *result))


async def listen(speaker: Loudspeaker, bot: asyncio.Task) -> float:
    """Until an answer is over. Returns the seconds of sound in it."""
    before, last = speaker.heard_s, time.monotonic()
    while not bot.done():
        await asyncio.sleep(0.1)
        last = max(last, speaker.last)
        if time.monotonic() - last > (QUIET_S if speaker.heard_s > before else PATIENCE_S):
            break
    return round(speaker.heard_s - before, 1)


async def hold(path: Path) -> None:
    """A conversation with an example. Its last line is the result as JSON, and then the process ends."""
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/chat/completions", complete)
    server = web.AppRunner(app)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    LocalLLM.url = "http://{}:{}/v1".format(*server.addresses[0])
    engine = await MegakernelTTSService.warmup("demo", device="cpu")
    audio = await asyncio.to_thread(engine.generate, QUESTION, speaker="max")
    question = (soxr.resample(audio.samples, audio.sample_rate, 16000) * 32767).astype("<i2").tobytes()

    async def create_transport(runner_args, transport_params):
        return Line((transport_params.get("webrtc") or next(iter(transport_params.values())))())

    runner_utils.create_transport = create_transport
    replace_vendors(path)
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    names = runpy.run_path(str(path), run_name="example")
    start = names.get("bot") or names["main"]
    if "asyncio" in start.__globals__:
        start.__globals__["asyncio"] = Hurried("asyncio")
    heard, errors = [], []
    logger.remove()
    logger.add(lambda line: errors.append(line.strip()), level="ERROR", format="{message}")
    logger.add(sys.stderr, level="DEBUG")
    arguments = [SmallWebRTCRunnerArguments(webrtc_connection=None)][: len(inspect.signature(start).parameters)]
    bot = asyncio.create_task(start(*arguments))
    while not bot.done() and not (Line.opened and Line.opened[0].loudspeaker.ready):
        await asyncio.sleep(0.1)
    if not bot.done():
        line = Line.opened[0]
        for event in ("on_client_connected", "on_first_participant_joined"):
            await line._call_event_handler(event, {"id": "user"})
        heard.append(await listen(line.loudspeaker, bot))
        while len(heard) < 3 and not bot.done():
            line.microphone.to_say = question
            heard.append(await listen(line.loudspeaker, bot))
        await line._call_event_handler("on_client_disconnected", {"id": "user"})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(bot), 10)
    if bot.done() and (error := bot.exception()):
        errors.append(repr(error))
    print(json.dumps({"heard": heard, "errors": errors}), flush=True)
    os._exit(0)  # what an example leaves behind may not end


# ---------------------------------------------------------------- all


def run(path: Path, log: Path) -> str:
    """In a process of its own. Returns the words about it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", str(path)]
    with tempfile.TemporaryDirectory() as folder, log.open("w") as told:
        streams = {"stdout": subprocess.PIPE, "stderr": told, "text": True}
        try:
            ended = subprocess.run(command, cwd=folder, timeout=LONGEST_S, **streams)
        except subprocess.TimeoutExpired:
            return f"did not end within {LONGEST_S} s"
    last = ended.stdout.splitlines()[-1:]
    if not last or not last[0].startswith('{"heard"'):
        return f"did not start | {log.read_text(encoding='utf-8').strip().splitlines()[-1]}"
    found = json.loads(last[0])
    heard = found["heard"]
    kind = "spoke" if heard and all(heard) else "spoke in part" if any(heard) else "silent"
    return " | ".join([kind, str(heard), *dict.fromkeys(error[:200] for error in found["errors"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("parts", nargs="*", default=[""])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        asyncio.run(hold(args.checkout))
    examples = args.checkout.resolve() / "examples"
    paths = sorted(path for path in examples.rglob("*.py") if "TTSService" in path.read_text(encoding="utf-8"))
    paths = [path for path in paths if any(part in str(path.relative_to(examples)) for part in args.parts)]
    if not paths:
        parser.error(f"no example with a TTSService and one of {args.parts} in its path, in {examples}")
    logs = Path(tempfile.mkdtemp(prefix="pipecat-examples-"))
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, path, logs / f"{number}-{path.stem}.log") for number, path in enumerate(paths)]
        for path, one in zip(paths, runs, strict=True):
            print(f"{path.relative_to(examples)} | {one.result()}", flush=True)
    print(f"{len(paths)} examples; their logs are in {logs}", file=sys.stderr)


if __name__ == "__main__":
    main()
