"""How soon is there sound? From submit(text) to the first chunk of one frame, PCM on the host.

    python benchmarks/measure_ttfc.py [--size 0.6b|1.7b|demo] [--only idle busy ...] [--utterances 100]

Random weights at the published dims, sampling as published, a new text of 10 words and another speaker every time, one
process. The floor is the time to read the weights of a frame, which a prompt of up to 16 rows shares, and the
vocoder's once. Cases:

    plain     one after the other, 0 to 30 ms apart
    idle      after 5 s of doing nothing (cold clocks)
    busy      while the process's event loop computes in pure Python for 8 of every 10 ms
    eight     eight at once
    tokens    text in pieces, a token every 20 ms; timed from the piece that settles the first text row
    clone     in-context clone of a 5 s reference (Base): the first sentence in a voice, and later ones
    vocoder   a push of 1 frame, of 1 and of 8 streams, codes in, PCM out
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import fields

import numpy as np
import torch
from common import (
    CLAIMED,
    about,
    busy_loop,
    commit,
    first_audio_floor_ms,
    machine,
    positive,
    quantile,
    random_model,
    spread,
)

from qwen_check.bench import sentence
from qwen_megakernel import Audio, TTSEngine, Utterance
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.engine.sequence import State
from qwen_megakernel.trust.selection import Selection

CASES = ("plain", "idle", "busy", "eight", "tokens", "clone", "vocoder")
FRAMES = 4  # of an utterance: the first chunk is what counts


class Report:
    def __init__(self, floor_ms: float):
        self.floor, self.results = floor_ms, {}
        print(f"{'':44} {'p50 ms':>8} {'p95 ms':>8} {'p99 ms':>8} {'max ms':>8} {'x floor':>8} {'n':>5}")

    def add(self, name: str, ms: list[float], floor: bool = True) -> None:
        row = self.results[name] = spread(ms) | {"p99": quantile(ms, 0.99), "max": max(ms)}
        ratio = f"{row['p50'] / self.floor:8.1f}" if floor else f"{'':8}"
        times = " ".join(f"{row[share]:8.2f}" for share in ("p50", "p95", "p99", "max"))
        print(f"{name:44} {times} {ratio} {row['n']:5}", flush=True)

    def add_stages(self, name: str, said: list[Audio], heard_ms: list[float] | None = None) -> None:
        """heard_ms: when the caller had the first chunk; None: when the engine's thread handed it out."""
        total = [1000 * audio.ttfc_s for audio in said]
        self.add(name, heard_ms or total)
        stages = {f.name: [1000 * (getattr(a.timings, f.name) or 0.0) for a in said] for f in fields(said[0].timings)}
        print("    of which " + ", ".join(f"{stage} {statistics.median(ms):.2f}" for stage, ms in stages.items()))
        together = statistics.median(map(sum, zip(*stages.values(), strict=True)))
        print(f"    together {together:.2f} ({together / statistics.median(total):.1%} of the whole)")


def ask(engine: TTSEngine, **request) -> dict:
    speaker = random.choice(engine.speakers) if engine.speakers else None
    return {"speaker": speaker, "max_frames": FRAMES, "runaway_guard": False, **request}


def first_chunk(engine: TTSEngine, **request) -> tuple[float, Audio]:
    """TTFC in ms as the caller sees it, and the utterance."""
    there = []
    start = time.perf_counter()
    utterance = engine.submit(sentence(), lambda chunk: there.append(time.perf_counter()), **ask(engine, **request))
    audio = utterance.result()
    return 1000 * (there[0] - start), audio


def one_after_the_other(engine: TTSEngine, count: int, **request) -> list[Audio]:
    said = []
    for _ in range(count):
        time.sleep(random.uniform(0.0, 0.03))
        said.append(engine.generate(sentence(), **ask(engine, **request)))
    return said


def plain(engine: TTSEngine, count: int, report: Report) -> None:
    report.add_stages("plain", one_after_the_other(engine, count))


def idle(engine: TTSEngine, count: int, report: Report) -> None:
    ms = []
    for _ in range(max(5, count // 10)):
        time.sleep(5)
        ms.append(first_chunk(engine)[0])
    report.add("after 5 s idle", ms)


def busy(engine: TTSEngine, count: int, report: Report) -> None:
    heard = []
    with busy_loop():
        for _ in range(count):
            time.sleep(random.uniform(0.0, 0.03))
            heard.append(first_chunk(engine))
    report.add_stages("event loop at 80 % load", [audio for _, audio in heard], [ms for ms, _ in heard])


def eight(engine: TTSEngine, count: int, report: Report) -> None:
    ms = []
    for _ in range(max(3, count // 8)):
        utterances = [engine.submit(sentence(), **ask(engine)) for _ in range(8)]
        ms += [1000 * utterance.result().ttfc_s for utterance in utterances]
    report.add("eight at once", ms)


def tokens(engine: TTSEngine, count: int, report: Report) -> None:
    ms = []
    for _ in range(count):
        there: list[float] = []
        request = ask(engine, max_frames=None)
        utterance = engine.submit(None, lambda chunk, t=there: t.append(time.perf_counter()), **request)
        settled = None
        for piece in sentence().split(" ")[:6]:
            utterance.push_text(piece + " ")
            if settled is None and state_of(engine, utterance) is not State.WAITING_TEXT:
                settled = time.perf_counter()
            time.sleep(0.02)
        utterance.cancel()
        ms.append(1000 * (there[0] - settled))
    report.add("text by tokens, after the first row settled", ms)


def state_of(engine: TTSEngine, utterance: Utterance) -> State:
    sequence = engine.snapshot().sequence(utterance.seed)
    return sequence.state if sequence else State.DONE


def clone(size: str, count: int, report: Report, **options) -> None:
    with random_model(size, "base") as folder:
        with TTSEngine.load(folder, **options) as engine:
            engine.generate("Hello.", voice=reference(engine), max_frames=FRAMES)  # warms up what is made at first use
            first, later = [], []
            for _ in range(max(3, count // 10)):
                said = one_after_the_other(engine, 6, voice=reference(engine))
                first.append(said[0])
                later += said[1:]
    report.add_stages("clone of 5 s, first sentence in that voice", first)
    report.add_stages("clone of 5 s, later sentences", later)


def reference(engine: TTSEngine):
    noise = np.random.default_rng().normal(0, 0.1, 5 * 24000).astype(np.float32)
    return engine.create_voice((noise, 24000), "the quick brown fox jumps over the lazy dog while it rains")


def vocoder(engine: TTSEngine, count: int, report: Report) -> None:
    """Times a separate vocoder, not the engine's own."""
    checkpoint, device = Checkpoint.open(engine.model), torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    apart = Selection("torch", device).choose(checkpoint).vocoder(slots=8)
    push, groups = apart.push, apart.groups
    for streams in (1, 8):
        codes, ms = torch.randint(0, 100, (streams, 1, groups)), []
        for _ in range(count + 10):
            start = time.perf_counter()
            push(list(range(streams)), codes)
            ms.append(1000 * (time.perf_counter() - start))
        report.add(f"vocoder, 1 frame of {streams} streams", ms[10:], floor=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--utterances", type=positive, default=100)
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    options = {"device": args.device}
    with random_model(args.size) as folder:
        start = time.monotonic()
        with TTSEngine.load(folder, **options) as engine:
            loaded = time.monotonic() - start
            print(f"{machine()}, commit {commit()}, {args.size}, {engine.backend} backend, loaded in {loaded:.1f} s")
            parts = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in engine.memory.items())
            print(f"GB on the device: {parts}; together {sum(engine.memory.values()) / 1e9:.2f}")
            if engine.memory and torch.cuda.is_initialized():
                print(f"allocated by PyTorch in all: {torch.cuda.memory_allocated() / 1e9:.2f}")
            first, _ = first_chunk(engine)
            report = Report(first_audio_floor_ms(engine.config))
            report.add("the first utterance after load", [first])
            for _ in range(20):
                first_chunk(engine)
            for name in CASES:
                if name in args.only and name != "clone":
                    globals()[name](engine, args.utterances, report)
    if "clone" in args.only:
        clone(args.size, args.utterances, report, **options)
    print(CLAIMED)
    print(json.dumps(about(args.size) | {"load_s": loaded, "floor_ms": report.floor, "results": report.results}))


if __name__ == "__main__":
    main()
