"""How long does a bot's answer take? From the user's turn as text to the first sound: an LLM of known pace, and ours.

    python benchmarks/measure_e2e.py [--size 0.6b|1.7b|demo] [--turns 20] [--token-ms 20] [--llm-ms 150]

A Pipecat pipeline gets the user's words in a context. Its LLM takes --llm-ms to its first token and --token-ms for each
later one. The service runs by sentences and by tokens; the output takes audio at playing speed. `the LLM` is the known
time to the token that speech can begin with: the first word, or the word after the first sentence. `ours` runs from
there to the first sound and includes Pipecat's share; its floor is that of measure_ttfc.py. Speech recognition and turn
detection come on top. Gaps: the audio ran dry while there was more to say.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time

from common import about, above_0, commit, first_audio_floor_ms, machine, positive, random_model, spread
from listener import PacedOutput
from loguru import logger
from pipecat.frames.frames import (
    EndFrame,
    Frame,
    InterruptionFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.tts_service import TextAggregationMode
from pipecat.workers.runner import WorkerRunner

from qwen_check.bench import sentence
from qwen_megakernel import TTSEngine
from qwen_megakernel.choices import DEMO
from qwen_megakernel.pipecat_tts import MegakernelTTSService

RATE = 24000
SENTENCES = 3  # of an answer


class TimedLLM(FrameProcessor):
    """An LLM of a known pace. `settled`: when the text that speech can begin with was out, by time.monotonic()."""

    def __init__(self, llm_s: float, token_s: float, by_tokens: bool):
        super().__init__()
        self._llm_s, self._token_s, self._by_tokens = llm_s, token_s, by_tokens
        self.settled = 0.0

    async def process_frame(self, frame: Frame, direction: FrameDirection):
        await super().process_frame(frame, direction)
        if not isinstance(frame, LLMContextFrame):
            await self.push_frame(frame, direction)
            return
        await self.push_frame(LLMFullResponseStartFrame())
        tokens = " ".join(sentence() for _ in range(SENTENCES)).split()
        first = 0 if self._by_tokens else 1 + next(i for i, token in enumerate(tokens) if token.endswith("."))
        await asyncio.sleep(self._llm_s)
        for i, token in enumerate(tokens):
            if i == first:
                self.settled = time.monotonic()
            await self.push_frame(LLMTextFrame(token + " "))
            await asyncio.sleep(self._token_s)
        await self.push_frame(LLMFullResponseEndFrame())


async def converse(engine: TTSEngine, args: argparse.Namespace, mode: TextAggregationMode) -> dict[str, list[float]]:
    by_tokens = mode == TextAggregationMode.TOKEN
    llm, output = TimedLLM(args.llm_ms / 1000, args.token_ms / 1000, by_tokens), PacedOutput()
    settings = MegakernelTTSService.Settings(voice=random.choice(engine.speakers))
    options = {"text_aggregation_mode": mode, "trim_leading_silence": False}
    tts = MegakernelTTSService(engine=engine, settings=settings, **options)
    params = PipelineParams(audio_out_sample_rate=RATE)
    worker = PipelineWorker(Pipeline([llm, tts, output]), params=params, enable_rtvi=False)
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    task = asyncio.create_task(runner.run())
    await asyncio.sleep(0.3)
    figures: dict[str, list[float]] = {"wait": [], "llm": [], "ours": [], "gaps": []}
    for turn in range(args.turns + 1):
        await asyncio.sleep(random.uniform(0.1, 0.4))
        output.heard.clear()
        output.first.clear()
        asked = time.monotonic()
        await worker.queue_frame(LLMContextFrame(LLMContext([{"role": "user", "content": sentence()}])))
        await asyncio.wait_for(output.first.wait(), 60)
        await asyncio.sleep(2.0)
        gaps = sum(
            after - before > len(pcm) / 2 / RATE + 0.02
            for (before, pcm), (after, _) in zip(output.heard, output.heard[1:], strict=False)
        )
        await worker.queue_frame(InterruptionFrame())  # random weights would go on for minutes
        await asyncio.sleep(0.2)
        if turn:  # the first one runs cold
            first = output.heard[0][0]
            figures["wait"].append(1000 * (first - asked))
            figures["llm"].append(1000 * (llm.settled - asked))
            figures["ours"].append(1000 * (first - llm.settled))
            figures["gaps"].append(gaps)
    await worker.queue_frame(EndFrame())
    await asyncio.wait_for(task, 30)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--turns", type=positive, default=20)
    parser.add_argument("--token-ms", type=above_0, default=20)
    parser.add_argument("--llm-ms", type=above_0, default=150)
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    results = {}
    with random_model(args.size) if args.size != "demo" else contextlib.nullcontext(DEMO) as model:
        engine = asyncio.run(MegakernelTTSService.warmup(model, device=args.device, max_streams=4))
        try:
            print(f"{machine()}, commit {commit()}, {args.size}, {engine.backend} backend")
            print(f"LLM: {args.llm_ms:g} ms to its first token, {args.token_ms:g} ms for each more")
            floor = first_audio_floor_ms(engine.config)
            heads = ("wait p50", "p95 ms", "the LLM", "ours p50", "p95 ms", "x floor")
            print(f"{'':12}{''.join(f'{head:>10}' for head in heads)}{'gaps':>6}")
            for mode in (TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN):
                figures = asyncio.run(converse(engine, args, mode))
                row = {name: spread(figures[name]) for name in ("wait", "llm", "ours")}
                x_floor, gaps = row["ours"]["p50"] / floor, int(sum(figures["gaps"]))
                results[mode.value] = row | {"x_floor": x_floor, "gaps": gaps}
                cells = [row["wait"]["p50"], row["wait"]["p95"], row["llm"]["p50"], row["ours"]["p50"]]
                cells += [row["ours"]["p95"], x_floor]
                print(f"{mode.value:12}{''.join(f'{cell:10.1f}' for cell in cells)}{gaps:6}", flush=True)
        finally:
            asyncio.run(MegakernelTTSService.shutdown(engine))
    print(json.dumps(about(args.size) | {"floor_ms": floor, "results": results}))


if __name__ == "__main__":
    main()
