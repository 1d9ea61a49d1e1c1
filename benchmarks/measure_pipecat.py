"""What does a Pipecat bot's listener get: how soon and how steadily is there sound, and how soon does it stop?

    python benchmarks/measure_pipecat.py [--size 0.6b|1.7b|demo] [--pipelines 1 4 8] [--rates 24000 16000 8000]

Times are the listener's: from queuing the text frame at the pipeline's head to the first piece of audio that a paced
output transport takes. Every utterance is interrupted after 0.3 to 0.7 s. All pipelines share one process, one event
loop and one engine. A task that sleeps 1 ms at a time measures the loop's stalls once all pipelines run; the last line
has those of their start too. The floor of the first audio is the engine's own, for similar texts in the same run.

Random weights at the published dims (or the demo voice): there is no leading silence, so none is cut.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time

from common import about, commit, machine, positive, quantile, random_model, spread
from listener import PacedOutput
from loguru import logger
from pipecat.frames.frames import EndFrame, InterruptionFrame, TTSSpeakFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.workers.runner import WorkerRunner

from qwen_check.bench import sentence
from qwen_megakernel import TTSEngine
from qwen_megakernel.choices import DEMO
from qwen_megakernel.pipecat_tts import MegakernelTTSService


class Figures:
    """Milliseconds by name, over all pipelines."""

    def __init__(self):
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self.values.setdefault(name, []).append(1000 * seconds)

    def summary(self) -> dict[str, dict[str, float]]:
        return {name: spread(v) | {"p99": quantile(v, 0.99), "max": max(v)} for name, v in self.values.items()}


async def watch_loop(figures: Figures, name: str) -> None:
    while True:
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        figures.add(name, max(0.0, time.perf_counter() - due))


async def caller(
    engine: TTSEngine, rate: int, utterances: int, alone: bool, figures: Figures, all_run: asyncio.Barrier
) -> None:
    """One pipeline: speak, listen a while, interrupt, pause, repeat."""
    output = PacedOutput()
    settings = MegakernelTTSService.Settings(voice=random.choice(engine.speakers))
    tts = MegakernelTTSService(engine=engine, settings=settings, trim_leading_silence=False)
    worker = PipelineWorker(
        Pipeline([tts, output]), params=PipelineParams(audio_out_sample_rate=rate), enable_rtvi=False
    )
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    task = asyncio.create_task(runner.run())
    await asyncio.sleep(0.3)
    await all_run.wait()
    for turn in range(utterances):
        await asyncio.sleep(random.uniform(0.0, 0.3))
        output.heard.clear()
        output.first.clear()
        asked = time.monotonic()
        await worker.queue_frame(TTSSpeakFrame(sentence()))
        await asyncio.wait_for(output.first.wait(), 30)
        if turn:  # the first one runs cold
            figures.add("first audio", output.heard[0][0] - asked)
        await asyncio.sleep(random.uniform(0.3, 0.7))
        speaking = [context.session for context in tts._contexts.values() if context.session]
        frames, at = engine.metrics()["frames"], time.monotonic()
        generating = [session for session in speaking if not session.done]
        await worker.queue_frame(InterruptionFrame())
        if generating:
            while not generating[0].done:  # its slot becomes free in the same round of frames
                await asyncio.sleep(0.0005)
            figures.add("interruption to free slot", time.monotonic() - at)
            if alone:  # else other callers' frames would count too
                figures.values.setdefault("frames after interruption", []).append(engine.metrics()["frames"] - frames)
        await asyncio.sleep(0.2)
        late = [when - at for when, _ in output.heard if when > at]
        figures.add("interruption to last piece", max(late, default=0.0))
        for (before, pcm), (after, _) in zip(output.heard, output.heard[1:], strict=False):
            figures.values.setdefault("gaps", []).append(float(after - before > len(pcm) / 2 / rate + 0.02))
    await worker.queue_frame(EndFrame())
    await asyncio.wait_for(task, 30)


async def measure(engine: TTSEngine, rate: int, pipelines: int, utterances: int) -> Figures:
    figures = Figures()
    ticker = asyncio.create_task(watch_loop(figures, "loop stall at the start"))
    alone, all_run = pipelines == 1, asyncio.Barrier(pipelines + 1)
    async with asyncio.TaskGroup() as callers:
        for _ in range(pipelines):
            callers.create_task(caller(engine, rate, utterances, alone, figures, all_run))
        await all_run.wait()
        ticker.cancel()
        ticker = asyncio.create_task(watch_loop(figures, "loop stall"))
    ticker.cancel()
    return figures


def engine_alone(engine: TTSEngine, utterances: int) -> float:
    """The engine's own median milliseconds from text to first chunk."""
    times = []
    for _ in range(utterances):
        time.sleep(random.uniform(0.0, 0.3))
        audio = engine.generate(sentence(), speaker=random.choice(engine.speakers), max_frames=8)
        times.append(1000 * audio.ttfc_s)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--pipelines", type=positive, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rates", type=int, nargs="+", default=[24000, 16000, 8000])
    parser.add_argument("--utterances", type=positive, default=25, help="utterances of each pipeline")
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    with random_model(args.size) if args.size != "demo" else contextlib.nullcontext(DEMO) as model:
        engine = asyncio.run(MegakernelTTSService.warmup(model, device=args.device, max_streams=max(args.pipelines)))
        try:
            run(engine, args)
        finally:
            asyncio.run(MegakernelTTSService.shutdown(engine))


def run(engine: TTSEngine, args: argparse.Namespace) -> None:
    print(f"{machine()}, commit {commit()}, {args.size}, {engine.backend} backend")
    engine_alone(engine, 5)
    floor, results = engine_alone(engine, args.utterances), []
    print(f"engine alone, text to first chunk: {floor:.1f} ms (the floor)")
    print(
        f"{'':24} {'first audio, ms':>24} {'loop stall, ms':>20} {'interruption to, ms':>24} {'frames':>7} {'gaps':>5}"
    )
    heads = ("p50", "p99", "adds", "x floor", "p99", "max", "last piece", "free slot", "after")
    print(f"{'':24} {heads[0]:>6}{heads[1]:>6}{heads[2]:>6}{heads[3]:>6} {heads[4]:>10}{heads[5]:>10}", end="")
    print(f" {heads[6]:>12}{heads[7]:>12} {heads[8]:>7}")
    for pipelines in args.pipelines:
        for rate in args.rates:
            figures = asyncio.run(measure(engine, rate, pipelines, args.utterances))
            s = figures.summary()
            first, stall, last = s["first audio"], s["loop stall"], s["interruption to last piece"]
            slot, frames = s.get("interruption to free slot"), figures.values.get("frames after interruption")
            gaps = int(sum(figures.values.get("gaps", [])))
            print(
                f"{pipelines} pipelines, {rate:5} Hz    {first['p50']:6.1f}{first['p99']:6.1f}"
                f"{first['p50'] - floor:6.1f}{first['p50'] / floor:6.2f} {stall['p99']:10.2f}{stall['max']:10.2f}"
                f" {last['max']:12.1f}{slot['max'] if slot else float('nan'):12.1f}"
                f" {max(frames) if frames else float('nan'):7.0f} {gaps:5}"
            )
            results.append({"pipelines": pipelines, "rate": rate, **s, "gaps": gaps})
    print(json.dumps(about(args.size) | {"engine_ttfc_ms": floor, "results": results}))


if __name__ == "__main__":
    main()
