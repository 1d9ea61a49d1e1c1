"""Callers of an engine who do everything that callers do, and know what must come of it."""

import random
import time
from collections.abc import AsyncIterator

import numpy as np
import torch
from waiting import PATIENCE_S, until

from qwen_megakernel import (
    EngineBusy,
    EngineClosed,
    RequestError,
    SamplingParams,
    TextEndedError,
    TTSEngine,
    Utterance,
    Voice,
)
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.speech.events import Sound
from qwen_megakernel.speech.session import SpeechSession

TEXTS = ("Yes.", "Hello there, how are you today?", "Well: 3 of us are here! It's fine, isn't it? So be it.")
ACTIONS = ("whole", "pieces", "cancel", "abandon", "silent", "half", "raise", "wrong", "unread")


class Broke(Exception):
    """A caller's own callback."""


def made_up(config: ModelConfig, frames: int, fingerprint: str = "") -> Voice:
    """A voice out of the air, with a reference of so many frames or without."""
    vector = torch.randn(config.talker.stack.hidden_size)
    codes = torch.randint(0, config.codec.vocoder.codebook_size, (frames, 16)) if frames else None
    return Voice(vector, codes, "this is the text of it" if frames else None, fingerprint)


def voice_of(engine: TTSEngine, frames: int) -> Voice:
    """One that fits an engine."""
    return made_up(engine.config, frames, Checkpoint.open(engine.model).fingerprint)


def cut(text: str, rng: random.Random, longest: int = 5) -> list[str]:
    """A text in pieces of 1 to `longest` characters."""
    pieces = []
    while text:
        size = rng.randint(1, longest)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed)


def say(utterance: Utterance, *pieces: str) -> Utterance:
    """The same utterance, whose text comes in these pieces and has ended."""
    for piece in pieces:
        utterance.push_text(piece)
    utterance.end_text()
    return utterance


async def sounds(session: SpeechSession) -> AsyncIterator[np.ndarray]:
    """The samples of its sounds."""
    async for event in session.events():
        if isinstance(event, Sound):
            yield event.samples


def parts_of(engine: TTSEngine, text: str, **request) -> list[str]:
    """What a text that comes in pieces is said as, one utterance a part."""
    turn, parts = engine.turn(engine.request(**request)), [""]
    for part in [*turn.push(text), *turn.flush()]:
        if isinstance(part, str):
            parts[-1] += part
        else:
            parts.append("")
    return parts


class Model:
    """What requests say alone. `said`: of each the codes, by whether its text is there as a whole (else it streams)."""

    def __init__(self, engine: TTSEngine, requests: list[dict]):
        self.requests = requests
        self.said = [
            {whole: engine.generate(non_streaming_mode=whole, **request).codes for whole in (True, False)}
            for request in requests
        ]


def act(model: Model, engine: TTSEngine, action: str, number: int, rng: random.Random) -> str:
    """Do it with one of the requests; raise AssertionError if anything but what must come has come. How it ended, in a
    word."""
    request, said = dict(model.requests[number]), model.said[number]
    text, whole = request.pop("text"), action in ("whole", "cancel", "abandon") and rng.random() < 0.7
    expected = said[whole]
    try:
        if action == "wrong":
            wrong = rng.choice([{"text": " "}, {"text": "x" * 99_999}, {"text": "Yes.", "speaker": "nobody"}])
            try:
                engine.submit(**wrong)
            except RequestError:
                return "refused"
            raise AssertionError("a wrong request was taken")
        if action in ("whole", "cancel", "abandon"):
            chunk_frames = rng.choice([None, 1, 3, 50])
            stream = engine.stream(text, chunk_frames=chunk_frames, non_streaming_mode=whole, **request)
            chunks = []
            stop = len(expected) + 1 if action == "whole" else rng.randint(0, 12)
            while sum(len(c.codes) for c in chunks) < stop:
                chunk = next(stream, None)
                if chunk is None:
                    break
                chunks.append(chunk)
            codes = np.concatenate([c.codes for c in chunks]) if chunks else expected[:0]
            assert np.array_equal(codes, expected[: len(codes)])
            if action == "abandon":
                del stream
                return "abandoned"
            if action == "cancel":
                stream.utterance.cancel()
            audio = stream.utterance.result(timeout=PATIENCE_S)
            return check(audio, expected, action == "whole" and not engine_closed(engine))
        if action == "unread":  # nobody reads the chunks, nobody waits
            engine.submit(text, **request)
            return "unread"

        def listen(_chunk) -> None:
            if action == "raise":
                raise Broke

        utterance = engine.submit(on_chunk=listen, **request)
        if action == "silent":
            if rng.random() < 0.5:
                utterance.cancel()
                return check(utterance.result(timeout=PATIENCE_S), expected, False)
            return "dropped"
        try:
            pieces = cut(text, rng, 9)
            for at, piece in enumerate(pieces):
                utterance.push_text(piece)
                if rng.random() < 0.2:
                    time.sleep(rng.random() * 0.01)  # a caller who takes time
                if action == "half" and at >= len(pieces) // 2:
                    return "dropped"
            utterance.end_text()
        except TextEndedError:  # it was over before its text was
            pass
        audio = utterance.result(timeout=PATIENCE_S)
        assert action != "raise" or engine_closed(engine) or not audio.frames, "its callback raised"
        return check(audio, expected, not engine_closed(engine) and action == "pieces")
    except Broke:
        assert action == "raise"
        return "raised"
    except EngineBusy:
        time.sleep(0.02)
        return "busy"
    except EngineClosed:
        assert engine_closed(engine)
        return "closed"


def engine_closed(engine: TTSEngine) -> bool:
    return engine.health()["status"] == "closed"


def check(audio, expected: np.ndarray, complete: bool) -> str:
    assert np.array_equal(audio.codes, expected[: audio.frames])
    assert len(audio.samples) == audio.frames * 1920 and np.isfinite(audio.samples).all()
    if audio.finish_reason == "cancelled":
        assert not complete
    else:
        assert audio.frames == len(expected)
    return audio.finish_reason


def assert_at_rest(engine: TTSEngine) -> None:
    """No slot taken, nobody waiting, every utterance counted once."""
    until(lambda: engine.snapshot().at_rest)
    counts = engine.metrics()
    ends = ("eos", "length", "runaway", "cancelled", "failed")
    assert counts["utterances"] == sum(counts[end] for end in ends)
