"""A million frames: random callers on one engine, whose every code must be what the request says alone.

python tests/soak.py [--frames 1000000] [--slots 64] [--requests 200] [--size demo|0.6b|1.7b] [--callers 96]

So many seeded requests (text, voice, language, layout, seed, length) are spoken alone first and their codes hashed; the
demo voice's with its speakers, the other sizes' (random weights) with 24 cloned voices, more than the engine keeps.
Then callers draw from them, at random times, whole or with the text in pieces, cancel some, abandon some, read slowly,
raise in callbacks. It fails at the first hang, wrong code, or growth of memory.
"""

import argparse
import gc
import hashlib
import random
import resource
import tempfile
import threading
import time
from collections import Counter

import numpy as np
import torch
from callers import Broke, cut, voice_of

from qwen_megakernel import EngineBusy, SamplingParams, TextEndedError, TTSEngine, Voice
from qwen_megakernel.checkpoint.synthetic import write_checkpoint

WORDS = "of text a test how are today I am fine it hello there my friend well three of us are here so be it".split()
WAYS = ("whole",) * 4 + ("pieces",) * 3 + ("cancel", "cancel", "abandon", "raise")


def draw(rng: random.Random, engine: TTSEngine, voices: list[Voice]) -> dict:
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 20))).capitalize() + rng.choice(".!?")
    return {
        "text": text,
        **({"voice": rng.choice(voices)} if voices else {"speaker": rng.choice(engine.speakers)}),
        "language": rng.choice(engine.languages),
        "non_streaming_mode": rng.random() < 0.5,
        "sampling": SamplingParams(seed=rng.randrange(2**63), do_sample=rng.random() < 0.9),
        "max_frames": rng.choice((3, 20, 60, 120)),
    }


def hashes(codes: np.ndarray) -> list[bytes]:
    """Of every prefix."""
    digest, said = hashlib.sha256(), []
    for frame in codes:
        digest.update(frame.tobytes())
        said.append(digest.digest())
    return said


class Soak:
    def __init__(self, engine: TTSEngine, requests: list[dict], frames: int):
        self.engine, self.requests, self.frames = engine, requests, frames
        self.said = [hashes(engine.generate(**request).codes) for request in requests]
        self.done, self.failures, self.ended = threading.Event(), [], Counter()

    def caller(self, luck: int) -> None:
        rng = random.Random(luck)
        try:
            while not self.done.is_set():
                time.sleep(rng.expovariate(20))
                i, way = rng.randrange(len(self.requests)), rng.choice(WAYS)
                try:
                    self.ended[self.act(dict(self.requests[i]), self.said[i], way, rng)] += 1
                except EngineBusy:
                    self.ended["busy"] += 1
        except BaseException as error:
            self.failures.append(error)
            self.done.set()

    def act(self, request: dict, said: list[bytes], way: str, rng: random.Random) -> str:
        text, left = request.pop("text"), rng.randint(0, 6)
        request["chunk_frames"] = rng.choice([None, None, 1, 3, 8])

        def tell(_chunk) -> None:
            nonlocal left
            left -= 1
            if way == "raise" and left < 0:
                raise Broke

        if way == "pieces" and not request["non_streaming_mode"]:
            utterance = self.engine.submit(None, tell, **request)
            try:
                for piece in cut(text, rng, 12):
                    utterance.push_text(piece)
                    if rng.random() < 0.2:
                        time.sleep(rng.random() * 0.03)  # a caller who takes time
                utterance.end_text()
            except TextEndedError:  # it was over before its text was
                pass
        else:
            utterance = self.engine.submit(text, tell, **request)
        if way == "abandon":
            del utterance
            return "abandoned"
        if way == "cancel":
            time.sleep(rng.random() * 0.1)
            utterance.cancel()
        try:
            audio = utterance.result(timeout=120)
        except Broke:
            assert way == "raise"
            return "raised"
        assert not audio.frames or hashes(audio.codes)[-1] == said[audio.frames - 1], (request, way)
        assert audio.finish_reason == "cancelled" or audio.frames == len(said), (request, way)
        assert len(audio.samples) == 1920 * audio.frames and np.isfinite(audio.samples).all()
        return audio.finish_reason

    def run(self, callers: int) -> None:
        threads = [threading.Thread(target=self.caller, args=(random.random(),)) for _ in range(callers)]
        began, before = time.monotonic(), None
        for thread in threads:
            thread.start()
        while not self.done.wait(5):
            frames = self.engine.metrics()["frames"]
            print(f"{time.monotonic() - began:6.0f} s {frames:9} frames {memory()} {dict(self.ended)}", flush=True)
            if before is None and frames > self.frames / 5:
                before = memory()
            if frames >= self.frames:
                self.done.set()
        for thread in threads:
            thread.join(timeout=180)
            assert not thread.is_alive(), "a caller hangs"
        if self.failures:
            raise self.failures[0]
        while self.engine.health()["streams"]:
            time.sleep(0.01)
        gc.collect()
        after, counts = memory(), self.engine.metrics()
        assert after["GPU MB"] <= before["GPU MB"] and after["host MB"] <= before["host MB"] + 64, (before, after)
        frames, lasted = counts["frames"], time.monotonic() - began
        print(f"{frames} frames in {lasted:.0f} s, memory {before} -> {after}, {counts}")


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
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = "demo"
        if args.size != "demo":
            model = write_checkpoint(folder, size=args.size, variant="base", codec="real", eos_gain=2.0)
        options = {"max_streams": args.slots, "max_positions": 512, "max_queue": args.slots // 2}
        with TTSEngine.load(model, **options) as engine:
            voices = [voice_of(engine, rng.choice((0, 5, 30, 60))) for _ in range(24 if args.size != "demo" else 0)]
            requests = [draw(rng, engine, voices) for _ in range(args.requests)]
            Soak(engine, requests, args.frames).run(args.callers)


if __name__ == "__main__":
    main()
