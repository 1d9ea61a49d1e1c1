"""What does a frame cost the engine's thread in Python? The real loop, over a pretended GPU that computes nothing.

    python benchmarks/measure_loop.py [--open 1 16 64 256 512] [--width 16 256] [--frames 20000] [--rounds 5]

So many utterances of 5.04 s (63 frames) are always open. Their callbacks return at once. A launch takes up to --width
of them. The clock is the pretended GPU's, which goes on while the thread waits for a launch or a push. So the loop
decides the same on every machine. "decided" is a checksum of all launches and pushes: if two commits differ in it, they
do not do the same work. Time is the thread's CPU time, so a busy machine disturbs little. Callers are left out, and so
is what a real decoder and vocoder add. "guarded" is with the runaway guard, as speech is by default.
"""

import argparse
import gc
import json
import random
import time
import zlib
from collections import deque

import numpy as np
import torch
from common import about, commit, machine, positive
from measure_load import FRAMES

from qwen_megakernel.backend.interfaces import LoadedModel, Watch
from qwen_megakernel.engine.callbacks import returns_at_once
from qwen_megakernel.engine.core import EngineCore
from qwen_megakernel.engine.input import Request
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.model.conditioning import UNCONDITIONED
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.sampling_params import SamplingParams

GROUPS, SAMPLES, RATE = 16, 1920, 24000
MOST_FRAMES = 128  # of a push, as a GPU's vocoder has with many slots


class Model:
    """Frame decoder and vocoder: codes and samples are noise, made in advance."""

    max_positions, weight_bytes, prefixes, recent_codes = 2048, 0, (), None
    groups, steady, follows, most_frames, slot_bytes = GROUPS, True, True, MOST_FRAMES, 0

    def __init__(self, slots: int, width: int):
        self.slots, self.pages = slots, 0
        self.width, self.narrow = width, min(width, 16)
        self.now = self._free_at = 0.0
        self.frames = self.decided = self._next = 0
        self._launches: deque[tuple[float, int]] = deque()
        torch.manual_seed(1)
        self._codes = list(torch.randint(2048, (10_007, GROUPS)).numpy())  # more than the guard remembers
        self._sound = torch.randn(MOST_FRAMES * SAMPLES) * 0.1

    def _queue(self, ms: float, *work: list[int]) -> float:
        self.decided = zlib.crc32(repr(work).encode(), self.decided)
        self._free_at = max(self.now, self._free_at) + ms / 1000
        return self._free_at

    def launch(self, slots: list[int]) -> None:
        self.frames += len(slots)
        self._launches.append((self._queue(1.5 + len(slots) / 150, slots), len(slots)))

    def collect(self) -> list[np.ndarray]:
        done, count = self._launches.popleft()
        self.now = max(self.now, done)
        self._next = (self._next + count) % (len(self._codes) - self.width)
        return self._codes[self._next : self._next + count]

    def follow(self, slots: list[int], first: list[int], frames: list[int]):
        done = self._queue(0.4 + 0.035 * sum(frames), slots, first, frames)

        def wait() -> list[torch.Tensor]:
            self.now = max(self.now, done)
            return list(self._sound[: sum(frames) * SAMPLES].split([n * SAMPLES for n in frames]))

        return wait

    def start(self, slot: int, prompt: Prompt, sampling: SamplingParams, pages: list[int], watch: Watch) -> None:
        pass

    def told(self, slot: int) -> list[np.ndarray]:
        return []

    def reset(self, slot: int) -> None:
        pass


def us_a_frame(streams: int, width: int, guarded: bool, frames: int, rounds: int) -> tuple[float, int]:
    """(microseconds of the thread a frame, in the fastest of some rounds of `frames` frames, checksum)."""
    model = Model(streams, width)
    core = EngineCore(
        LoadedModel(None, model, model, lambda: None),
        sample_rate=RATE,
        device=torch.device("cpu"),
        limits=EngineOptions(max_streams=streams, max_queue=0),
        clock=lambda: model.now,
    )
    sampling = SamplingParams(seed=1)
    plain = {"speed": 1.0, "trim": "none", "silence_s": 0.0, "before_s": 0.0, "after_s": 0.0, "reproducible": False}
    plain |= {"non_streaming_mode": False, "judge_length": guarded, "chunk_frames": (1, 2, 4, 8)}
    prompt = Prompt(torch.zeros(20, 1), torch.zeros(1, 1), torch.zeros(1))
    ended: list[None] = []

    def submit(frames: int = FRAMES) -> None:
        request = Request(UNCONDITIONED, sampling=sampling, max_frames=frames, runaway_guard=guarded, **plain)
        sequence = core.new_sequence(request, returns_at_once(lambda chunk: None), lambda: ended.append(None))
        sequence.add_text("Ten words of which the pretended model says nothing at all.")
        sequence.stopwatch.arrived = model.now
        core.admission.admit(sequence)
        core.hand_over(sequence, prompt, text_complete=True)

    def turns(until: int) -> float:
        took = 0.0
        while model.frames < until:
            began = time.thread_time()
            while not ended and model.frames < until:
                core.loop.turn()
            took += time.thread_time() - began
            while ended:
                ended.pop()
                submit()
        return took

    lengths = random.Random(1)
    for _ in range(streams):
        submit(lengths.randint(1, FRAMES))  # so that they do not end in step
    times = []
    with torch.inference_mode():
        turns(2 * FRAMES * streams)
        gc.collect()  # as the services do
        gc.freeze()
        for _ in range(rounds):
            before = model.frames
            took = turns(before + frames)
            times.append(1e6 * took / (model.frames - before))
        gc.unfreeze()
    return min(times), model.decided


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open", type=positive, nargs="+", default=[1, 16, 64, 256, 512])
    parser.add_argument("--width", type=positive, nargs="+", default=[16, 256])
    parser.add_argument("--frames", type=positive, default=20_000, help="of a round")
    parser.add_argument("--rounds", type=positive, default=5, help="the fastest one counts")
    args = parser.parse_args()
    print(f"{machine()}, commit {commit()}")
    print(f"{'us a frame':24}{'plain':>9}{'guarded':>9}{'decided':>20}", flush=True)
    results = []
    for width in args.width:
        for streams in args.open:
            (plain, decided), (guarded, with_guard) = (
                us_a_frame(streams, width, guard, args.frames, args.rounds) for guard in (False, True)
            )
            row = {"open": streams, "width": width, "plain_us": plain, "guarded_us": guarded}
            results.append(row | {"decided": [decided, with_guard]})
            shown = f"{plain:9.1f}{guarded:9.1f}{decided:11x}{with_guard:9x}"
            print(f"{f'{streams} open, width {width}':24}{shown}", flush=True)
    told = about("none")
    del told["size"]
    print(json.dumps(told | {"results": results}))


if __name__ == "__main__":
    main()
