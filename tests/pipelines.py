"""A Pipecat pipeline around one processor. Frames go in, some of them not before a condition holds; what comes out is
kept. Nothing here depends on how fast the machine is."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import numpy as np
from loguru import logger
from pipecat.frames.frames import (
    EndFrame,
    Frame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    StartFrame,
    TTSAudioRawFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
)
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.workers.runner import WorkerRunner
from waiting import PATIENCE_S, until_in_loop

from qwen_megakernel import TTSEngine, Utterance

NO_TIME_OUT = {"stop_frame_timeout_s": 10 * PATIENCE_S}
"""For a service: a stop that waits for Pipecat's time-out, else 3 s, comes too late for the test."""


def turn(*tokens: str, pause: float = 0.0) -> list[Frame | float]:
    """As a language model writes it; pause: seconds behind each token."""
    frames: list[Frame | float] = [LLMFullResponseStartFrame()]
    for token in tokens:
        frames += [LLMTextFrame(token), *([pause] if pause else [])]
    return [*frames, LLMFullResponseEndFrame()]


def of(frames: Sequence[Frame], kind: type[Frame]) -> list:
    return [frame for frame in frames if isinstance(frame, kind)]


def pcm(frames: Sequence[Frame]) -> np.ndarray:
    """All sound of a service's frames, int16."""
    return np.frombuffer(b"".join(frame.audio for frame in of(frames, TTSAudioRawFrame)), np.int16)


def one_start_and_stop(down: Sequence[Frame], times: int = 1) -> bool:
    return len(of(down, TTSStartedFrame)) == len(of(down, TTSStoppedFrame)) == times


@contextmanager
def log_of_services() -> Iterator[list[str]]:
    """Lines that our services log meanwhile, each with its level."""
    lines: list[str] = []
    ours = {"": False} | {f"qwen_megakernel.pipecat.{name}": "DEBUG" for name in ("local", "remote", "turns")}
    sink = logger.add(lambda line: lines.append(line.rstrip()), level="DEBUG", filter=ours, format="{level} {message}")
    try:
        yield lines
    finally:
        logger.remove(sink)


@dataclass
class Until:
    """Stands between frames: those behind it are sent once the condition holds for what came out downstream."""

    condition: Callable[[list[Frame]], object]


def came(kind: type[Frame], times: int = 1) -> Until:
    """Until so many frames of a kind came out downstream."""
    return Until(lambda down: sum(isinstance(frame, kind) for frame in down) >= times)


class Prepared:
    """An engine that hands out an utterance's chunks when it has made them all, so that it is never too slow for a
    listener who hears them as they play."""

    def __init__(self, engine: TTSEngine):
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def submit(self, text, on_chunk, *, on_end, **request) -> Utterance:
        chunks = []

        def hand_out() -> None:
            for chunk in chunks:
                on_chunk(chunk)
            on_end()

        return self._engine.submit(text, chunks.append, on_end=hand_out, **request)


class Tap(FrameProcessor):
    """Tells of the frames of one direction."""

    def __init__(self, direction: FrameDirection, tell: Callable[[Frame], None]):
        super().__init__(enable_direct_mode=True)
        self._direction, self._tell = direction, tell

    async def process_frame(self, frame: Frame, direction: FrameDirection):
        await super().process_frame(frame, direction)
        if direction is self._direction:
            self._tell(frame)
        await self.push_frame(frame, direction)


class Watched(BaseObserver):
    """Frames of some kinds, each once, as a processor pushed them."""

    def __init__(self, processor, *kinds: type[Frame]):
        super().__init__()
        self._processor, self._kinds, self.frames = processor, kinds, []

    async def on_push_frame(self, data: FramePushed):
        downstream = data.direction is FrameDirection.DOWNSTREAM
        if data.source is self._processor and downstream and isinstance(data.frame, self._kinds):
            self.frames.append((data.timestamp, data.frame))


@asynccontextmanager
async def running(worker: PipelineWorker) -> AsyncIterator[None]:
    """A started worker in a runner of its own, ended by what it is told, cancelled by a failing test."""
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def on_pipeline_started(worker, frame):
        started.set()

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    task = asyncio.create_task(runner.run())
    task.add_done_callback(lambda _: started.set())  # where its set-up is cancelled, it never starts
    try:
        await asyncio.wait_for(started.wait(), PATIENCE_S)
        yield
        await asyncio.wait_for(task, PATIENCE_S)
    finally:
        if not task.done():
            await worker.cancel()
            await task


def worker_of(
    *processors: FrameProcessor, rate: int = 24000, observers: Sequence[BaseObserver] = (), **options
) -> PipelineWorker:
    params = PipelineParams(audio_out_sample_rate=rate, enable_metrics=True, enable_usage_metrics=True)
    pipeline = Pipeline([*processors])
    options |= {"cancel_on_idle_timeout": False, "enable_rtvi": False}
    return PipelineWorker(pipeline, params=params, observers=[*observers], **options)


async def play(
    processor: FrameProcessor, frames: Sequence[Frame | float | Until], *, rate: int = 24000, end: bool = True
) -> tuple[list[Frame], list[Frame]]:
    """Everything that came out, downstream and upstream.

    Args:
        frames: besides frames, seconds to wait and `Until`.
        end: an EndFrame follows the last of them; otherwise one of them ends the pipeline.
    """
    down, up = [], []
    before, behind = Tap(FrameDirection.UPSTREAM, up.append), Tap(FrameDirection.DOWNSTREAM, down.append)
    worker = worker_of(before, processor, behind, rate=rate)
    async with running(worker):
        for frame in frames:
            if isinstance(frame, Until):
                await until_in_loop(lambda condition=frame.condition: condition(down))
            elif isinstance(frame, float):
                await asyncio.sleep(frame)
            else:
                await worker.queue_frame(frame)
        if end:
            await worker.queue_frame(EndFrame())
    return tuple([frame for frame in came if not isinstance(frame, (StartFrame, EndFrame))] for came in (down, up))
