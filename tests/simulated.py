"""A whole `TTSEngine` on the pretended GPU of test_schedule.py, in pretended threads (green.py).

What the pretended model says depends on every row that it gets, in their order, and on the seed. So does its sound on
every frame before it. Whatever an engine mixes up is heard.
"""

import contextlib
import functools
from dataclasses import replace
from hashlib import blake2b
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from green import Threads, interruptible
from test_schedule import GROUPS, Decoder, Gpu, Vocoder, sound_of

from qwen_megakernel import TTSEngine
from qwen_megakernel.backend.interfaces import CpuSpeed, LoadedModel
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.engine import (
    admission,
    callbacks,
    core,
    device_pipeline,
    failures,
    input,
    loop,
    output,
    pace,
    seat,
    sequence,
    slots,
    utterance,
    watchdog,
)
from qwen_megakernel.engine.device_pipeline import finite
from qwen_megakernel.engine.memory import kv_bytes
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.engine.sequence import SpeechSequence
from qwen_megakernel.errors import KernelFault
from qwen_megakernel.model import prompt
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.speech import engine as engine_module

ENDS_ONCE_IN = 24  # frames
ENDLESS = (6, 7)  # seeds, in eights: such speech does not end; of the last it repeats itself

MODULES = (
    admission, callbacks, core, device_pipeline, failures, input, loop, output, seat, sequence, slots, utterance,
    watchdog, engine_module, prompt,
)  # fmt: skip

Fault = tuple[BaseException, list[SpeechSequence]]
"""An error of the device, and whom it may end."""


def digest(*parts: object) -> bytes:
    told = blake2b(digest_size=16)
    for part in parts:
        told.update(part.numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
    return told.digest()


class GreenGpu(Gpu):
    """While somebody waits for it, others go on."""

    def __init__(self, threads: Threads):
        self.threads = threads
        super().__init__()

    @property
    def now(self) -> float:
        return self.threads.now

    @now.setter
    def now(self, now: float) -> None:
        self.threads.now = max(now, self.threads.now)

    def compute(self, ms: float) -> None:
        super().compute(ms)
        self.threads.breathe()

    def wait(self, until: float) -> None:
        if until > self.now:
            self.threads.sleep(until - self.now)
        super().wait(until)


class Device:
    """What is to happen to it. `faults`: by the call that fails next. `hit`: the faults that happened."""

    def __init__(self, threads: Threads):
        self.threads, self.gpu = threads, GreenGpu(threads)
        self.faults: dict[str, BaseException] = {}
        self.hit: list[Fault] = []
        self.stands_still_s = 0.0  # the next frame takes so much longer
        self.lost: BaseException | None = None
        self.engine: TTSEngine | None = None
        self.started: list[SpeechSequence] = []  # in order

    def who(self, slots: list[int]) -> list[SpeechSequence]:
        running = self.engine._core.loop.slots.running if self.engine else []
        return [stream for stream in running if stream.slot in slots]

    def fail(self, call: str, slots: list[int]) -> None:
        error = self.lost or self.faults.pop(call, None)
        if error:
            everybody = self.lost or isinstance(error, KernelFault)
            self.hit.append((error, self.who(range(99)) if everybody else self.who(slots)))
            raise error

    def check(self) -> None:
        if self.lost:
            raise self.lost


class Says(Decoder):
    """Its codes depend on all that it was given."""

    weight_bytes = 0

    def __init__(self, device: Device, slots: int, width: int, pages: int, max_positions: int):
        super().__init__(device.gpu, slots, width, pages)
        self.device, self.max_positions = device, max_positions
        self.prefixes = WeakKeyDictionary()
        self.launched: list[list[int]] = []  # slots of the uncollected launches

    def fail(self, where: str, error: Exception) -> None:
        """`device` knows what fails."""

    def start(self, slot, prompt, sampling, pages, watch):
        self.device.started += self.device.who([slot])
        self.device.fail("start", [slot])
        told = {"rows": prompt.rows, "trailing": prompt.trailing, "text_open": prompt.text_open, "frames": 10**9}
        super().start(slot, SimpleNamespace(**told), sampling, pages, watch)
        kept, done = b"", prompt.prefix.rows if prompt.prefix else 0
        if done:
            kept = self.prefixes.setdefault(prompt.prefix, digest(prompt.rows[:done]))
        stream = self.streams[slot]
        stream.said = digest(kept, prompt.rows[done:], sampling)
        stream.trailing, stream.pad = list(prompt.trailing), digest(prompt.pad)
        stream.endless = ENDLESS.index(sampling.seed % 8) + 1 if sampling.seed % 8 in ENDLESS else 0
        stream.codes, stream.ends_at = [], None
        stream.most = self.max_positions - len(prompt.rows) + 1

    def extend(self, slot, rows, ended):
        super().extend(slot, rows, ended)
        self.streams[slot].trailing += list(rows)

    def launch(self, slots):
        self.device.fail("launch", slots)
        super().launch(slots)
        self.launched.append(list(slots))
        for slot in slots:
            stream = self.streams[slot]
            frame = len(stream.codes)
            assert frame < stream.most, "its slot is full"
            if frame:
                rows = stream.trailing
                stream.said = digest(stream.said, rows[frame - 1] if frame <= len(rows) else stream.pad)
            if stream.endless == 2 and frame >= len(stream.trailing):
                stream.codes.append(np.full(GROUPS, 7))
                continue
            stream.codes.append(np.frombuffer(stream.said, np.uint8).astype(np.int64))
            if not stream.endless and stream.said[0] * ENDS_ONCE_IN < 256 and stream.ends_at is None:
                stream.ends_at = frame

    def say(self, stream, frame):
        stream.over |= stream.ends_at is not None and frame >= stream.ends_at
        return None if stream.over else stream.codes[frame]

    def collect(self):
        if self.device.stands_still_s:
            seconds, self.device.stands_still_s = self.device.stands_still_s, 0.0
            self.gpu.threads.sleep(seconds)
        slots = self.launched.pop(0)
        frames = super().collect()
        self.device.fail("collect", slots)
        self.device.fail("fault", slots)
        return frames

    def recover(self):
        super().recover()
        self.launched.clear()
        self.prefixes.clear()


class Speaks(Vocoder):
    """Its sound depends on all codes of a slot so far."""

    weight_bytes = slot_bytes = 0

    def __init__(self, device: Device, decoder: Says, follows: bool, steady: bool):
        super().__init__(device.gpu, decoder, follows, 128 if follows else 0)
        self.device, self.steady, self.past = device, steady, {}

    def fail(self, where: str, error: Exception) -> None:
        """`device` knows what fails."""

    def reset(self, slot):
        super().reset(slot)
        self.past[slot] = b""

    def save(self, slot):
        return {"past": self.past[slot]}

    def restore(self, slot, state):
        self.past[slot] = state["past"]

    def listen(self, slot, portion):
        super().listen(slot, portion)
        self.device.fail("listen", [slot])
        self.past[slot] = digest(self.past[slot], portion.codes)

    def hear(self, slot: int, codes: list[np.ndarray]) -> torch.Tensor:
        numbers = []
        for frame in codes:
            self.past[slot] = digest(self.past[slot], frame.tolist())
            repeats = (frame == 7).all()
            numbers.append(0 if repeats else int.from_bytes(self.past[slot][:2]) % 4096)
        return sound_of(torch.tensor(numbers, dtype=torch.float32)).flatten()

    def follow(self, slots, first, frames):
        self.device.fail("push", slots)
        collect = super().follow(slots, first, frames)
        streams = [self.decoder.streams[slot] for slot in slots]
        coming = zip(slots, streams, first, frames, strict=True)
        sounds = [self.hear(slot, stream.codes[begin : begin + n]) for slot, stream, begin, n in coming]

        def collected():
            collect()
            self.device.fail("sound", slots)
            self.device.fail("vocoder fault", slots)
            return finite(self.broken(sounds))

        return collected

    def push(self, slots, codes):
        self.gpu.compute(0.3 * codes.shape[1])
        self.device.fail("push", slots)
        self.device.fail("vocoder fault", slots)
        (slot,) = slots
        return self.broken([self.hear(slot, list(codes[0].numpy()))])[0][None]

    def broken(self, sounds: list[torch.Tensor]) -> list[torch.Tensor]:
        if error := self.device.faults.pop("not finite", None):
            sounds[0][-1] = torch.nan
            self.device.hit.append((error, []))  # who it was is told by the error's type
        return sounds


@functools.cache
def loaded(folder: str) -> tuple[Checkpoint, Embeddings]:
    checkpoint = Checkpoint.open(folder)
    tensors = checkpoint.talker(torch.device("cpu"), torch.float32, frozenset())
    return checkpoint, Embeddings(checkpoint.config.talker, tensors)


class SimulatedBackend:
    """`kind`: "gpu", whose vocoder follows; "pages", the same with shared keys and values; "one by one", a GPU without
    our vocoder; "cpu"."""

    dtype, fp8, void = torch.float32, frozenset(), None
    device = torch.device("cpu")

    def __init__(self, device: Device, folder: str, kind: str, steady: bool):
        self.simulated, self.kind, self.steady, self.folder = device, kind, steady, folder
        self.name = "megakernel" if kind == "pages" else "torch"

    def load(self, slots: int, max_positions: int, pages: int | None = None) -> LoadedModel:
        _, embeddings = loaded(self.folder)
        follows = self.kind in ("gpu", "pages")
        decoder = Says(self.simulated, slots, 8 if follows else 1, pages or 0, max_positions)
        vocoder = Speaks(self.simulated, decoder, follows, self.steady)
        model = LoadedModel(embeddings, decoder, vocoder, self.simulated.check)
        return replace(model, cpu=CpuSpeed(1, {1: 0.01})) if self.kind == "cpu" else model

    def spare(self) -> "SimulatedBackend":
        return SimulatedBackend(self.simulated, self.folder, "one by one", self.steady)


@contextlib.contextmanager
def pretended(threads: Threads):
    """The engine's modules have these threads, this clock, and a window of pace that ends."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            for name in ("threading", "queue", "time"):
                if hasattr(module, name):
                    patch.setattr(module, name, threads.module)
        patch.setattr(device_pipeline, "Future", threads.module.Future)
        patch.setattr(engine_module, "EngineCore", functools.partial(core.EngineCore, clock=threads.module.monotonic))
        for module in (core, device_pipeline):
            patch.setattr(module, "use_threads", lambda count: None)
        patch.setattr(pace, "_WINDOW_S", 2.0)
        if threads.interrupts:
            interruptible(patch, MODULES, threads)
        yield


def simulated(threads: Threads, folder: str, kind: str, steady: bool, **options) -> tuple[TTSEngine, Device]:
    """An engine, and its device. Only within `pretended(threads)`. With "pages" slots share two thirds of theirs."""
    device, (checkpoint, _) = Device(threads), loaded(folder)
    if kind == "pages":
        whole = kv_bytes(EngineOptions(**options), checkpoint.config.talker.stack, torch.float32)
        slots = max(1, 2 * options["max_streams"] // 3)
        options["kv_memory"] = 1.001 * whole * slots / options["max_streams"] / 2**30
    backend = SimulatedBackend(device, folder, kind, steady)
    device.engine = TTSEngine("simulated", checkpoint, backend, EngineOptions(**options))
    return device.engine, device
