"""Whatever callers and the device do, in whatever order: a model of what must come of it, and a machine that tries.

The engine is a whole `TTSEngine` on a pretended GPU, in pretended threads (simulated.py). Who speaks gets the same
samples as alone, or ends by something that has happened, once. Afterwards all is free.
"""

import logging
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from callers import voice_of
from green import Threads
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated import pretended, simulated

from qwen_megakernel import (
    Audio,
    CallbackError,
    EngineBusy,
    EngineClosed,
    EngineDied,
    KernelFault,
    NoWordsError,
    OutOfMemoryError,
    SpeechError,
    TextEndedError,
    TTSEngine,
)
from qwen_megakernel.engine.admission import ENDS
from qwen_megakernel.engine.callbacks import returns_at_once
from qwen_megakernel.engine.failures import MOST_FAULTS
from qwen_megakernel.engine.options import Patience

TEXTS = ("Yes.", "Hello there, how are you today?", "Well: 3 of us are here! It's fine, isn't it? So be it.")
PARTS = "Well. [pause 200ms] So it is. [pause 100ms] Go on."
PIECES = ("Hel", "lo ", "there", ", how are you", " today? ", "It is", ".", " ")
POSITIONS = 128
PATIENCE = Patience(device_s=30.0, callback_s=30.0, look_s=0.5)
KINDS = ("gpu", "pages", "one by one", "cpu")
FAULTS = {
    "start": (RuntimeError, torch.OutOfMemoryError, KernelFault),
    "launch": (RuntimeError, torch.OutOfMemoryError),
    "collect": (RuntimeError, MemoryError),
    "fault": (KernelFault,),
    "listen": (RuntimeError,),
    "push": (RuntimeError, torch.OutOfMemoryError),
    "sound": (RuntimeError,),
    "vocoder fault": (KernelFault,),
    "not finite": (SpeechError,),
}


ALONE: dict[tuple, Audio] = {}
"""What requests say alone."""


class Broke(Exception):
    """A caller's own callback."""


class Places(deque):
    """The engine's free places.

    Attributes:
        found_none: threads that looked while there was none. A moment later there may be one.
    """

    def __init__(self, threads: Threads, places: deque):
        super().__init__(places)
        self.threads, self.found_none = threads, set()

    def __len__(self) -> int:
        if not (count := super().__len__()):
            self.found_none.add(self.threads.current)
        return count


class Caller:
    """One utterance, and what its caller does, in a thread of its own.

    Attributes:
        did: what its text came as: pieces, None for a flush.
        may: what it may end by, besides what the device does.
    """

    def __init__(self, machine: "AnyOrder", way: str, text: str, direct: bool, **options):
        self.machine, self.way, self.text, self.options = machine, way, text, options
        self.threads = machine.threads
        self.steps = self.threads.module.Queue()
        self.did: list[str | None] = []
        self.may: set[type] = set()
        self.mood = ""
        self.chunks, self.read, self.ends = [], [], 0
        self.audio = self.error = self.utterance = self.stream = self.sequence = self.result = None
        self.ended = self.cancelled = self.dropped = False
        self.began = self.threads.now
        self.on_chunk = lambda chunk: self.listen(chunk)
        self.on_end = lambda: self.end()
        if direct:
            returns_at_once(self.on_chunk)
        self.direct = direct
        self.thread = self.threads.module.Thread(target=self.act, name=f"caller {way}")
        refused, self.threads.refused = self.threads.refused, 0
        self.thread.start()
        self.threads.refused = refused

    def listen(self, chunk) -> None:
        self.chunks.append(chunk.samples.copy())
        assert not self.ends, "a chunk behind the end"
        if self.direct:
            return
        mood, self.mood = self.mood, ""
        if mood == "raise":
            self.may.add(Broke)
            raise Broke
        if mood == "exit":
            self.may.add(SystemExit)
            raise SystemExit
        if mood == "sleep":
            self.may.add(CallbackError)
            self.threads.sleep(100.0)

    def end(self) -> None:
        self.ends += 1

    def act(self) -> None:
        engine = self.machine.engine
        try:
            if self.way == "generate":
                self.audio = engine.generate(self.text, **self.options)
                return
            if self.way == "stream":
                self.stream = engine.stream(self.text, **self.options)
                self.utterance = self.stream.utterance
            else:
                text = None if self.way == "pieces" else self.text
                self.utterance = engine.submit(text, self.on_chunk, on_end=self.on_end, **self.options)
        except Exception as error:
            self.error = error
            if isinstance(error, EngineBusy) and "wait, for" in str(error):
                self.may |= {EngineBusy} if self.thread in self.machine.places.found_none else set()
            return
        self.sequence = self.utterance._sequence
        self.result = self.sequence.result
        while step := self.steps.get():
            step()

    def push(self, piece: str | None) -> None:
        if not self.utterance:
            return
        try:
            self.utterance.push_text(piece) if piece is not None else self.utterance.flush()
            self.did.append(piece)
        except TextEndedError:
            assert self.ended or self.cancelled or self.result.error or self.result.audio
        except Exception as error:  # it has failed by that
            self.error = error

    def end_text(self) -> None:
        if self.utterance:
            self.ended = True
            try:
                self.utterance.end_text()
            except Exception as error:
                self.error = error

    def cancel(self) -> None:
        if self.utterance:
            self.cancelled = True
            self.utterance.cancel()

    def drop(self) -> None:
        self.dropped = True
        self.cancelled |= self.way == "stream" or not self.ended and self.way == "pieces"
        self.utterance = self.stream = None

    def next_chunk(self) -> None:
        if self.stream:
            try:
                self.read.append(next(self.stream).samples)
            except StopIteration:
                pass
            except BaseException:
                assert self.result.error

    @property
    def over(self) -> bool:
        told, result = self.way == "stream" or self.ends, self.result
        return not self.thread.is_alive() and (result is None or bool(told and result.done.is_set() and result.settled))

    # ------------------------------------------------------------ what must have come of it

    def judge(self) -> None:
        result = self.result
        audio, error = (result.audio, result.error) if result else (self.audio, self.error)
        if result:
            assert audio or error
            if self.way != "stream":
                assert self.ends == 1, "on_end is called once"
        if error:
            assert self.explains(error), repr(error)
        else:
            cut = audio.finish_reason == "cancelled"
            assert not cut or self.cancelled or self.machine.closed and not self.machine.may_die, "nobody cancelled it"
            if self.chunks:
                assert np.array_equal(np.concatenate(self.chunks), audio.samples), "its chunks are its samples"
            if not cut:
                whole = self.alone()
                assert (audio.finish_reason, audio.attempts) == (whole.finish_reason, whole.attempts)
                assert len(audio.samples) == len(whole.samples)
        if audio and audio.finish_reason == "cancelled" and self.options.get("retries"):
            return  # by the end of the engine, in any attempt
        for heard in ([audio.samples] if audio else [], self.chunks, self.read):
            if len(heard := np.concatenate([np.zeros(0), *heard])):
                assert np.array_equal(heard, self.alone().samples[: len(heard)]), "other samples than alone"

    def explains(self, error: BaseException) -> bool:
        machine = self.machine
        if isinstance(error, EngineDied):
            return machine.may_be_dead
        if isinstance(error, EngineClosed):  # who was admitted is cancelled
            return machine.closed and not self.result
        for what, hit in machine.device.hit:
            mine = self.sequence in hit
            if self.way == "generate" or mine or isinstance(what, SpeechError):
                same = error is what or type(error) is SpeechError is type(what)
                if same or isinstance(error, OutOfMemoryError) and OutOfMemoryError.of(what):
                    return True
        if isinstance(error, EngineBusy) and "became free within" in str(error):
            return self.threads.now >= self.began + machine.options["queue_timeout"]
        if isinstance(error, RuntimeError) and "new thread" in str(error):
            return machine.threads_ran_out
        return type(error) in self.may or self.way == "pieces" and isinstance(error, NoWordsError)

    def alone(self) -> Audio:
        """The same request, with nobody else."""
        machine = self.machine
        text = tuple(self.did) if self.way == "pieces" else self.text
        options = tuple(value.digest if name == "voice" else (name, value) for name, value in self.options.items())
        key = (machine.kind, machine.steady, self.way, text, options)
        if key not in ALONE:
            threads = Threads(0)
            with pretended(threads):
                size = {"max_streams": 1, "max_positions": POSITIONS}
                engine, _ = simulated(threads, machine.folder, machine.kind, machine.steady, **size)
                if self.way == "generate":
                    ALONE[key] = engine.generate(self.text, **self.options)
                elif self.way == "pieces":
                    utterance = engine.submit(**self.options)
                    for piece in self.did:
                        utterance.flush() if piece is None else utterance.push_text(piece)
                    utterance.end_text()
                    ALONE[key] = utterance.result()
                else:
                    ALONE[key] = engine.submit(self.text, **self.options).result()
                engine.close()
        return ALONE[key]


OPTIONS = st.fixed_dictionaries(
    {"seed": st.integers(0, 15), "max_frames": st.sampled_from((1, 12, 60, 90)), "voice": st.integers(0, 2)},
    optional={
        "speed": st.sampled_from((0.7, 1.0, 2.0)),
        "trim": st.sampled_from(("both", "start")),
        "chunk_frames": st.sampled_from((1, 3, 50)),
        "reproducible": st.booleans(),
    },
)
CALL = st.fixed_dictionaries(
    {
        "way": st.sampled_from(("whole", "whole", "pieces", "stream", "generate")),
        "text": st.sampled_from(TEXTS),
        "parts": st.booleans(),
        "retries": st.integers(0, 2),
        "whole": st.booleans(),
        "direct": st.booleans(),
        "options": OPTIONS,
    }
)


class AnyOrder(RuleBasedStateMachine):
    folder, voices = "", []
    callers = Bundle("callers")

    @initialize(
        seed=st.integers(0, 2**32),
        interrupts=st.sampled_from((0.0, 0.002, 0.05)),
        kind=st.sampled_from(KINDS),
        steady=st.booleans(),
        slots=st.sampled_from((1, 3, 4)),
        max_queue=st.sampled_from((0, 3, 12)),
        timeout=st.sampled_from((0.05, 5.0, 86_400.0)),
        kept=st.integers(1, 3),
        fallback=st.booleans(),
    )
    def load(self, seed, interrupts, kind, steady, slots, max_queue, timeout, kept, fallback):
        self.threads = Threads(seed, interrupts)
        self.patched = pretended(self.threads)
        self.patched.__enter__()
        self.kind, self.steady = kind, steady
        self.options = {"max_streams": slots, "max_queue": max_queue, "queue_timeout": timeout, "kept_voices": kept}
        self.options |= {"max_positions": POSITIONS, "patience": PATIENCE, "fallback": "torch" if fallback else None}
        self.engine, self.device = simulated(self.threads, self.folder, kind, steady, **self.options)
        self.core = self.engine._core
        self.core.admission.inbox.log = []
        self.places = self.core.admission.places = Places(self.threads, self.core.admission.places)
        self.said: list[Caller] = []
        self.closed = self.threads_ran_out = False
        self.may_die = False

    @property
    def may_be_dead(self) -> bool:
        faults = sum(isinstance(error, KernelFault) for error, _ in self.device.hit)
        return self.may_die or faults >= MOST_FAULTS

    # ------------------------------------------------------------ what callers do

    @rule(target=callers, calls=st.lists(CALL, min_size=1, max_size=3))
    def call(self, calls):
        new = [self.caller(**call) for call in calls]
        self.said += new
        return multiple(*new)

    def caller(self, way, text, parts, retries, whole, direct, options) -> Caller:
        options = options | {"voice": self.voices[options["voice"]]}
        if way == "generate":
            text, options = PARTS if parts else text, options | {"retries": retries}
            options.pop("chunk_frames", None)
        if way != "pieces":
            options["non_streaming_mode"] = whole
        return Caller(self, way, text, direct, **options)

    @rule(caller=callers, pieces=st.lists(st.sampled_from((*PIECES, None)), max_size=4), end=st.booleans())
    def write(self, caller, pieces, end):
        if caller.way == "pieces":
            for piece in pieces:
                caller.steps.put(partial(caller.push, piece))
            if end:
                caller.steps.put(caller.end_text)

    @rule(
        caller=callers,
        what=st.sampled_from(("cancel", "cancel from outside", "drop", "read", "raise", "exit", "sleep")),
    )
    def act(self, caller, what):
        if what == "cancel from outside":
            caller.cancel()
        elif what == "read":
            for _ in range(3):
                caller.steps.put(caller.next_chunk)
        elif what in ("cancel", "drop"):
            caller.steps.put(getattr(caller, what))
        else:
            caller.mood = what

    # ------------------------------------------------------------ what the world does

    @rule(steps=st.sampled_from((1, 30, 300)))
    def go_on(self, steps):
        for _ in range(steps):
            self.threads.step()

    @rule(steps=st.sampled_from((300, 2000)))
    def go_on_for_long(self, steps):
        self.go_on(steps)

    @rule(data=st.data(), call=st.sampled_from(tuple(FAULTS)))
    def fails(self, data, call):
        error = data.draw(st.sampled_from(FAULTS[call]))
        if self.kind != "cpu" or error is not KernelFault:
            self.device.faults[call] = error("pretended")

    @rule(seconds=st.sampled_from((0.1, 20.0, None)))
    def is_short(self, seconds):
        """Of time, or of threads."""
        if seconds is None:
            self.threads.refused, self.threads_ran_out = 1, True
        else:
            self.device.stands_still_s = seconds

    @precondition(lambda self: not self.closed and len(self.said) > 3)
    @rule(how=st.sampled_from(("close", "drain", "lost", "hangs")))
    def ends(self, how):
        self.closed = True
        self.may_die = how in ("lost", "hangs")
        if how == "lost":
            self.device.lost = RuntimeError("CUDA error: an illegal memory access was encountered")
        elif how == "hangs":
            self.device.stands_still_s = 1000.0
        else:
            closing = self.threads.module.Thread(target=self.engine.close, args=(0.0 if how == "close" else 3.0,))
            refused, self.threads.refused = self.threads.refused, 0
            closing.start()
            self.threads.refused = refused

    # ------------------------------------------------------------ what must be so

    @invariant()
    def nobody_has_more_than_there_is(self):
        if not hasattr(self, "engine"):
            return
        health, slots = self.engine.health(), self.core.loop.slots
        assert health["running"] <= self.options["max_streams"]
        assert health["streams"] <= self.options["max_streams"] + self.options["max_queue"]
        held = [page for stream in slots.running for page in stream.pages]
        if health["status"] == "ok" and not self.threads.interrupts:
            assert len(held) + len(slots.free_pages) == slots.pages and len(set(held)) == len(held)

    def in_order(self) -> None:
        came = [stream for stream in self.core.admission.inbox.log if stream and not stream.seat]
        begun = [stream for stream in self.device.started if not stream.seat]
        assert begun == [stream for stream in came if stream in begun], "first come, first served"

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        try:
            self.finish()
        finally:
            self.threads.kill()
            self.patched.__exit__(None, None, None)

    def finish(self) -> None:
        device, threads = self.device, self.threads
        device.faults.clear()
        threads.refused = 0
        for number, caller in enumerate(self.said):
            caller.mood = ""
            if caller.way == "pieces":
                caller.steps.put(caller.cancel if number % 2 else caller.end_text)
            caller.steps.put(None)
        threads.run(lambda: all(caller.over for caller in self.said), 1000.0)
        for caller in self.said:
            caller.judge()
        self.in_order()
        status = self.engine.health()["status"]
        assert status != "dead" or self.may_be_dead
        if not self.closed and status == "ok":
            threads.run(lambda: self.engine.snapshot().at_rest)
            admission, snapshot = self.core.admission, self.engine.snapshot()
            assert snapshot.free_places == admission.running_limit + self.options["max_queue"]
            assert not admission.seats and not admission._excess
            counts = self.engine.metrics()
            assert counts["utterances"] == sum(counts[end] for end in ENDS)
            self.said = [Caller(self, "whole", TEXTS[1], False, seed=3, voice=self.voices[0], max_frames=20)]
            self.said[0].steps.put(None)
            threads.run(lambda: self.said[0].over)
            self.said[0].judge()
            assert self.said[0].audio is None and not self.said[0].result.error, "later requests are what they were"
        if device.lost is None and status != "dead":
            self.engine.close()
            threads.run(lambda: not threads.alive, 2000.0)
            assert self.engine.health()["status"] in ("closed", "dead")
            assert not self.core.admission.open and not self.core.admission.unsettled


@pytest.mark.parametrize("examples, steps", [(60, 30), pytest.param(400, 60, marks=pytest.mark.faults)])
def test_whatever_happens_in_whatever_order(tiny, caplog, examples, steps):
    caplog.set_level(logging.CRITICAL, "qwen_megakernel")
    AnyOrder.folder = str(tiny("base"))
    with TTSEngine.load(AnyOrder.folder, device="cpu", max_streams=1) as engine:
        AnyOrder.voices = [voice_of(engine, frames) for frames in (0, 5, 30)]
    run_state_machine_as_test(
        AnyOrder,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
