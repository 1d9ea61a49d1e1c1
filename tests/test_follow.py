"""Rounds that are queued ahead say what rounds one by one say: a vocoder that follows the codes on a pretended device,
whose work is done in order, when somebody waits for it or by chance earlier; on a CPU."""

import contextlib
import hashlib
import random
import struct
import time
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from callers import cut
from probes import ProbedBackend, probed
from waiting import PATIENCE_S, run_all, slow_case, until, until_spoken

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.backend.interfaces import PUSH_FRAMES, RECENT_FRAMES, LoadedModel, Watch
from qwen_megakernel.checkpoint.config import TextHead
from qwen_megakernel.engine.text_path import HeadFinder
from qwen_megakernel.errors import KernelFault, TextEndedError
from qwen_megakernel.model.vocoder import Portion, VocoderState
from qwen_megakernel.trust import text_heads

GROUPS, SAMPLES = 16, 1920
WORDS = "hello world the quick brown fox jumps over lazy dog of text and this how are you today I am fine".split()
SCHEDULES = (None, 1, 2, 3, 5, 8, 9, 50, [1, 3], [3], [2, 9, 1], [1, 2, 4, 8], [7, 2], [4, 1, 16])


class Broke(Exception):
    """A listener's own."""


class Device:
    def __init__(self, rng: random.Random | None):
        self.rng, self.queue, self.queued, self.done = rng, deque(), 0, 0

    def put(self, work) -> int:
        self.queue.append(work)
        self.queued += 1
        for _ in range(self.rng.choice((0, 0, 1, 3)) if self.rng else 0):
            self.step()
        return self.queued

    def step(self):
        if self.queue:
            self.queue.popleft()()
            self.done += 1

    def wait(self, ticket: int):
        while self.done < ticket:
            self.step()


class QueuedDecoder:
    """A TorchFrameDecoder whose frames are computed in the queue's order and leave their codes in a ring; end of speech
    and what follows it is junk there."""

    def __init__(self, inner, device: Device, width: int):
        self.inner, self.device, self.width, self.narrow = inner, device, width, width
        self.slots, self.max_positions, self.weight_bytes = inner.slots, inner.max_positions, inner.weight_bytes
        self.pages = inner.pages
        self.recent_codes = torch.full((inner.slots, RECENT_FRAMES, GROUPS), -7, dtype=torch.int32)
        self.frames, self.results, self.fault, self.prefixes = [0] * inner.slots, deque(), False, ()
        self.watches, self.telling = [None] * inner.slots, [[] for _ in range(inner.slots)]

    def start(self, slot, prompt, sampling, pages, watch):
        self.frames[slot], self.telling[slot] = 0, []
        own = watch and Watch(watch.text_at, watch.text, watch.head)
        self.watches[slot] = watch and (watch, own)
        self.inner.start(slot, prompt, sampling, pages, own)  # frames of it that are still queued become None

    def extend(self, slot, rows, ended):
        self.device.wait(self.device.queued)  # on a CPU a frame reads its text row when it is computed
        self.inner.extend(slot, rows, ended)

    def launch(self, slots):
        slots, said = list(slots), []
        assert 1 <= len(slots) <= self.width
        self.inner.launch(slots)
        at = [self.frames[slot] for slot in slots]
        watches = [(watch[1], watch[0].first) for slot in slots if (watch := self.watches[slot])]
        for slot in slots:
            self.frames[slot] += 1

        def work():
            for watch, first in watches:  # as it was at the launch
                watch.first = first
            for slot, frame, codes in zip(slots, at, self.inner.collect(), strict=True):
                junk = torch.randint(-5, 3000, (GROUPS,), dtype=torch.int32)
                self.recent_codes[slot, frame % RECENT_FRAMES] = junk if codes is None else torch.from_numpy(codes)
                said.append(None if codes is None else codes.copy())

            told.extend((slot, self.watches[slot], self.inner.told(slot)) for slot in slots)

        told = []
        self.results.append((self.device.put(work), said, told))

    def collect(self):
        ticket, said, told = self.results.popleft()
        self.device.wait(ticket)
        if self.fault:
            raise KernelFault("pretended")
        for slot, watch, rows in told:
            if watch is self.watches[slot]:
                self.telling[slot] += rows
        return said

    def told(self, slot):
        told, self.telling[slot] = self.telling[slot], []
        return told

    def recover(self):
        self.device.wait(self.device.queued)
        self.results.clear()
        self.fault = False
        self.inner.recover()


class HashVocoder:
    """A frame's samples are a function of its codes and of all before; loud, or silent for a while at a time."""

    weight_bytes = slot_bytes = 0
    steady = True

    def __init__(self, slots, recent, device: Device, *, follows: bool, most_frames: int):
        self.slots, self.groups, self.follows, self.most_frames = slots, GROUPS, follows, most_frames
        self.recent, self.device, self.fault = recent, device, False
        self.state = [(0, b"", 0)] * slots  # frames, digest of the past, kind of stream

    def _frame(self, slot, codes):
        n, past, kind = self.state[slot]
        digest = hashlib.sha256(past + struct.pack(f"{GROUPS}q", *codes)).digest()
        kind = kind if n else digest[0]
        self.state[slot] = (n + 1, digest, kind)
        silent = kind % 5 and n // (60, 20, 14, 45)[kind % 5 - 1] % 2 == kind // 5 % 2
        x = np.frombuffer(digest * 240, dtype=np.uint32).astype(np.float64) / 2**33
        return (x * (1e-6 if silent else 1.0)).astype(np.float32)

    def _decode(self, slots, codes):
        pairs = zip(slots, codes, strict=True)
        return [torch.from_numpy(np.concatenate([self._frame(slot, c) for c in cs])) for slot, cs in pairs]

    def reset(self, slot):
        self.device.put(lambda: self.state.__setitem__(slot, (0, b"", 0)))

    def save(self, slot):
        saved = VocoderState({})
        self.device.put(lambda: saved.update(all=self.state[slot]))
        return saved

    def restore(self, slot, state):
        self.device.put(lambda: self.state.__setitem__(slot, state["all"]))

    def push(self, slots, codes):
        assert codes.shape[1] >= 1 and len(set(slots)) == len(slots)
        codes, out = codes.tolist(), []
        self.device.wait(self.device.put(lambda: out.append(self._decode(slots, codes))))
        return torch.stack(out[0])

    def follow(self, slots, first, frames):
        assert all(1 <= n <= PUSH_FRAMES for n in frames) and sum(frames) <= self.most_frames
        assert len(set(slots)) == len(slots)
        slots, first, frames, out = list(slots), list(first), list(frames), []

        def codes(slot, begin, count):
            return [self.recent[slot, (begin + i) % RECENT_FRAMES].tolist() for i in range(count)]

        ticket = self.device.put(lambda: out.append(self._decode(slots, list(map(codes, slots, first, frames)))))

        def collect():
            self.device.wait(ticket)
            if self.fault:
                raise KernelFault("pretended")
            return out[0]

        return collect

    def portions(self, codes):
        return [Portion(some, True) for some in codes.split(25)]

    def listen(self, slot, portion):
        codes = [portion.codes.tolist()]
        self.device.put(lambda: self._decode([slot], codes))

    def recover(self):
        self.device.wait(self.device.queued)
        self.fault = False


@pytest.fixture
def load():
    """load(folder, follows, seed, width, most_frames, slots) -> an engine on a pretended device."""
    with contextlib.ExitStack() as stack:

        def load(folder, follows: bool, seed=0, width=1, most_frames=8, slots=1) -> TTSEngine:
            device = Device(random.Random(seed) if follows else None)

            class Pretended(ProbedBackend):
                def load(self, slots: int, max_positions: int, pages: int | None = None) -> LoadedModel:
                    model = super().load(slots, max_positions)
                    self.decoder = QueuedDecoder(model.decoder, device, width)
                    recent = self.decoder.recent_codes
                    self.vocoder = HashVocoder(slots, recent, device, follows=follows, most_frames=most_frames)
                    return LoadedModel(model.embeddings, self.decoder, self.vocoder, model.check_device)

            options = {"queue_timeout": PATIENCE_S, "max_queue": 64, "max_streams": slots}
            return stack.enter_context(probed(folder, wrap=Pretended, **options))

        yield load


def draw(rng: random.Random) -> dict:
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 12))).capitalize() + "."
    in_pieces = rng.random() < 0.4
    return {
        "text": text,
        "pieces": cut(text, rng, 40) if in_pieces else None,
        "non_streaming_mode": None if in_pieces else rng.random() < 0.5,
        "chunk_frames": rng.choice(SCHEDULES),
        "max_frames": rng.choice((1, 2, 3, 7, 20, 60, 150, 150)),
        "runaway_guard": rng.random() < 0.6,
        "sampling": SamplingParams(seed=rng.randrange(2**31), do_sample=rng.random() < 0.8),
    }


def speak(engine: TTSEngine, request: dict, pause: bool, on_chunk=None):
    """(audio, frames of its chunks); with `pause` every piece comes once the last one is spoken."""
    options = {name: value for name, value in request.items() if name not in ("text", "pieces")}
    chunks = []
    utterance = engine.submit(None if request["pieces"] else request["text"], on_chunk or chunks.append, **options)
    try:
        for piece in request["pieces"] or ():
            utterance.push_text(piece)
            if pause:
                until_spoken(engine, utterance)
            elif random.random() < 0.3:
                time.sleep(random.random() * 0.01)  # a slow writer
        utterance.end_text()
    except TextEndedError:  # it was over before its text was
        pass
    audio = utterance.result(timeout=PATIENCE_S)
    check(audio, chunks, request)
    return audio, [len(chunk.codes) for chunk in chunks]


def check(audio, chunks, request) -> None:
    assert len(audio.samples) == audio.frames * SAMPLES
    if chunks:
        assert np.array_equal(np.concatenate([chunk.samples for chunk in chunks]), audio.samples)
        assert np.array_equal(np.concatenate([chunk.codes for chunk in chunks]), audio.codes)
    schedule = request["chunk_frames"] or (1, 2, 4, 8)
    schedule = (schedule,) if isinstance(schedule, int) else schedule
    for i, chunk in enumerate(chunks):
        size, last = schedule[min(i, len(schedule) - 1)], i == len(chunks) - 1
        assert len(chunk.codes) == size or len(chunk.codes) < size and (request["pieces"] or last), (i, request)


def at_rest(engine: TTSEngine) -> None:
    until(lambda: engine.snapshot().at_rest)
    assert engine.health()["status"] == "ok"


def act(engine: TTSEngine, request: dict, expected, how: str, rest: float) -> None:
    truth, sizes = expected
    if how in ("pause", "rush"):
        audio, got = speak(engine, request, how == "pause")
        assert audio.finish_reason == truth.finish_reason, request
        assert np.array_equal(audio.codes, truth.codes) and np.array_equal(audio.samples, truth.samples), request
        if audio.finish_reason != "runaway":
            # Sums in another order may decide a close call otherwise, and a few tokens then begin some frames apart.
            assert len(audio.token_s) == len(truth.token_s), request
            same = np.isclose(audio.token_s, truth.token_s, atol=1e-4).sum()
            assert 2 * same >= len(truth.token_s), (request, audio.token_s, truth.token_s)
        assert how == "rush" and request["pieces"] or got == sizes, (request, got, sizes)
        return
    request = request | {"pieces": None, "non_streaming_mode": request["non_streaming_mode"] or False}
    options = {name: value for name, value in request.items() if name not in ("text", "pieces")}
    if how == "cancel":
        chunks = []
        utterance = engine.submit(request["text"], chunks.append, **options)
        time.sleep(rest)  # at any moment
        utterance.cancel()
        audio = utterance.result(timeout=PATIENCE_S)
        check(audio, chunks, request)
        assert np.array_equal(audio.codes, truth.codes[: audio.frames]) or truth.codes[: audio.frames].size == 0
    elif how == "raise":
        left = [int(rest * 60)]

        def broken(_chunk):
            left[0] -= 1
            if left[0] < 0:
                raise Broke

        with contextlib.suppress(Broke):
            engine.submit(request["text"], broken, **options).result(timeout=PATIENCE_S)
    else:  # its text can never be ended
        utterance = engine.submit(**(options | {"non_streaming_mode": None}))
        utterance.push_text(request["text"][: len(request["text"]) // 2])
        time.sleep(rest)  # at any moment


@pytest.mark.parametrize(
    "gain, width, most_frames, slots",
    [(4.0, 8, 128, 3), (6.0, 1, 16, 3), slow_case(2.0, 2, 8, 4)],
)
def test_what_is_queued_ahead_says_what_is_said_one_by_one(
    tiny, load, fresh_seed, monkeypatch, gain, width, most_frames, slots
):
    monkeypatch.setattr(text_heads, "finder_of", lambda *_: HeadFinder(TextHead(1, 0, 0.0)))  # tokens begin by chance
    folder, rng = tiny("custom_voice", eos_gain=gain), random.Random(fresh_seed)
    plain, follow = load(folder, False), load(folder, True, fresh_seed, width, most_frames, slots)
    for turn in range(4):
        faulty = turn == 2
        requests = [draw(rng) for _ in range(rng.randint(1, 2 * slots))]
        expected = [speak(plain, request, pause=True) for request in requests]

        def one(*args, faulty=faulty) -> None:
            with contextlib.suppress(KernelFault) if faulty else contextlib.nullcontext():
                act(follow, *args)

        def break_a_part() -> None:
            time.sleep(rng.random() * 0.05)  # at any moment
            rng.choice((follow.probes.decoder, follow.probes.vocoder)).fault = True

        ways = ("pause", "pause", "pause", "rush", "cancel", "raise", "half")
        scripts = [(r, e, rng.choice(ways), rng.random() * 0.05) for r, e in zip(requests, expected, strict=True)]
        run_all(*(partial(one, *script) for script in scripts), *[break_a_part] * faulty)
        at_rest(follow)
        follow.probes.decoder.fault = follow.probes.vocoder.fault = False


@pytest.mark.parametrize("follows", [False, True])
def test_another_engines_fault_in_a_listener_harms_its_own_utterance_alone(tiny, load, follows):
    engine = load(tiny("custom_voice", eos_gain=0.0), follows, 1, 8, 8, 3)
    other = engine.submit("Hello there.", max_frames=40, runaway_guard=False)

    def tell(_chunk) -> None:
        raise KernelFault("of another engine")

    with pytest.raises(KernelFault):
        engine.submit("Hello there.", tell, max_frames=10).result(timeout=PATIENCE_S)
    assert len(other.result(timeout=PATIENCE_S).codes) == 40 and engine.metrics()["kernel_faults"] == 0
    at_rest(engine)
