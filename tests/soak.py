"""A million frames: random callers on one engine, whose every code must be what the request says alone.

python tests/soak.py [--frames 1000000] [--slots 64] [--requests 200] [--size demo|0.6b|1.7b] [--callers 96]

So many seeded requests (text, voice, language, seed, length) are spoken alone first, in both layouts; the demo voice's
with its speakers, the other sizes' (random weights) with 24 cloned voices, more than the engine keeps. Then callers
draw from them, at random times, and do all that callers.py knows. It fails at the first hang, wrong code, or growth of
memory.
"""

import argparse
import ctypes
import gc
import random
import resource
import tempfile
import threading
import time
from collections import Counter
from functools import partial

import torch
from callers import ACTIONS, Model, act, assert_at_rest, voice_of
from waiting import PATIENCE_S, run_all

from qwen_megakernel import SamplingParams, TTSEngine, Voice
from qwen_megakernel.checkpoint.synthetic import write_checkpoint

WORDS = "of text a test how are today I am fine it hello there my friend well three of us are here so be it".split()
M_ARENA_MAX = -8  # of glibc's malloc.h

WAYS = ("whole",) * 6 + ("pieces",) * 4 + ("cancel",) * 2 + ACTIONS


def draw(rng: random.Random, engine: TTSEngine, voices: list[Voice]) -> dict:
    return {
        "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 20))).capitalize() + rng.choice(".!?"),
        **({"voice": rng.choice(voices)} if voices else {"speaker": rng.choice(engine.speakers)}),
        "language": rng.choice(engine.languages),
        "sampling": SamplingParams(seed=rng.randrange(2**63), do_sample=rng.random() < 0.9),
        "max_frames": rng.choice((3, 20, 60, 120)),
    }


def soak(engine: TTSEngine, model: Model, frames: int, callers: int) -> None:
    done, ended, began = threading.Event(), Counter(), time.monotonic()

    def caller(luck: float) -> None:
        rng = random.Random(luck)
        try:
            while not done.wait(rng.expovariate(20)):
                ended[act(model, engine, rng.choice(WAYS), rng.randrange(len(model.requests)), rng)] += 1
        finally:
            done.set()

    def watch() -> None:
        before = None
        while not done.wait(5):
            made = engine.metrics()["frames"]
            print(f"{time.monotonic() - began:6.0f} s {made:9} frames {memory()} {dict(ended)}", flush=True)
            if before is None and made > frames / 5:
                before = memory()
            if made >= frames:
                done.set()
        assert_at_rest(engine)
        gc.collect()
        after, counts = memory(), engine.metrics()
        print(f"{counts['frames']} frames in {time.monotonic() - began:.0f} s, memory {before} -> {after}, {counts}")
        assert after["GPU MB"] <= before["GPU MB"] and after["host MB"] <= before["host MB"] + 64, (before, after)

    run_all(*[partial(caller, random.random()) for _ in range(callers)], watch, seconds=86_400 + PATIENCE_S)


def memory() -> dict[str, int]:
    gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    with open("/proc/self/statm") as file:
        host = int(file.read().split()[1]) * resource.getpagesize()
    return {"GPU MB": gpu >> 20, "host MB": host >> 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--callers", type=int, default=96)
    parser.add_argument("--size", choices=("demo", "0.6b", "1.7b"), default="demo")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    args = parser.parse_args()
    print(f"--seed {args.seed}")
    # Each thread of a caller would keep freed memory in an arena of its own, which looks like a leak
    # (docs/log/2026-11-28.md#soak-arenas).
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = "demo"
        if args.size != "demo":
            model = write_checkpoint(folder, size=args.size, variant="base", codec="real", eos_gain=2.0)
        options = {"max_streams": args.slots, "max_positions": 512, "max_queue": args.slots // 2}
        with TTSEngine.load(model, **options) as engine:
            voices = [voice_of(engine, rng.choice((0, 5, 30, 60))) for _ in range(24 if args.size != "demo" else 0)]
            requests = [draw(rng, engine, voices) for _ in range(args.requests)]
            soak(engine, Model(engine, requests), args.frames, args.callers)


if __name__ == "__main__":
    main()
