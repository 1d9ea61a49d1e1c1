"""What the engine's process and its fronts say to each other: frames over a Unix socket. Nothing is pickled.

A frame is a head and two parts: JSON and the bytes that belong to it. Of a chunk they are its samples and its codes.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, fields
from enum import IntEnum, auto
from typing import Any

import numpy as np
import torch

from qwen_megakernel import errors
from qwen_megakernel.engine.audio import Chunk
from qwen_megakernel.engine.input import Request
from qwen_megakernel.errors import TTSError
from qwen_megakernel.model.conditioning import Conditioning
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.sampling_params import SamplingParams
from qwen_megakernel.speech.request import SpeechRequest
from spoken_text.front_end import TextFrontEnd
from spoken_text.spoken_text import SpokenText

HEAD = struct.Struct("<4I")  # kind, number of the utterance or call, bytes of each part

_SEEN_TO: dict[str, Any] = {"front_end": TextFrontEnd(None), "normalizes": False, "lenient": False}
_SEEN_TO |= {"retries": 0, "whole": False, "capped": False}
"""Fields of a `SpeechRequest` that no engine heeds. A front has seen to them: it makes the spoken text."""


class Kind(IntEnum):
    # from a front
    UP = auto()  # it can serve; after that, it has heard STATE
    ANSWERED = auto()  # a request over HTTP
    SAID = auto()  # an utterance was heard
    RETRY = auto()  # it is said again
    CANCEL = auto()
    GIVE = auto()  # a key has a stream less
    LEAVE = auto()  # a seat
    BEGIN = auto()  # this one and those below are calls, which get a REPLY
    PUSH = auto()
    FLUSH = auto()
    END_TEXT = auto()
    METRICS = auto()
    TAKE = auto()  # a key wants a stream or characters
    # from the engine's process
    REPLY = auto()
    TOKENS = auto()  # those that begin in the next chunk, and all ids so far
    CHUNK = auto()
    ENDED = auto()
    STATE = auto()


def frame(kind: Kind, number: int = 0, told: Any = None, rest: bytes = b"") -> bytes:
    """A frame with JSON."""
    words = json.dumps(told).encode()
    return HEAD.pack(kind, number, len(words), len(rest)) + words + rest


def chunk_frame(number: int, chunk: Chunk) -> list[bytes | memoryview]:
    """A frame in pieces, none of them empty, whose samples are not copied."""
    samples, codes = np.ascontiguousarray(chunk.samples), chunk.codes.tobytes()
    head = HEAD.pack(Kind.CHUNK, number, samples.nbytes, len(codes))
    sound = [samples.data.cast("B")] if samples.size else []
    return [head, *sound, codes] if codes else [head, *sound]


def read_chunk(
    samples: bytes, codes: bytes, token_s: tuple[float, ...] | None, *, groups: int, sample_rate: int
) -> Chunk:
    """`groups`: codes of a frame."""
    frames = np.frombuffer(codes, np.int64).reshape(-1, groups)
    return Chunk(np.frombuffer(samples, np.float32), frames, sample_rate, token_s)


class Frames:
    """Cuts what comes from a socket into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, int, bytes, bytes]]:
        """The frames that are complete now: kind, number and both parts."""
        self._buffer += data
        found, at = [], 0
        with memoryview(self._buffer) as view:
            while at + HEAD.size <= len(view):
                kind, number, first, second = HEAD.unpack_from(view, at)
                begin = at + HEAD.size
                if (end := begin + first + second) > len(view):
                    break
                found.append((kind, number, bytes(view[begin : begin + first]), bytes(view[begin + first : end])))
                at = end
        del self._buffer[:at]
        return found


# ---------------------------------------------------------------- requests and errors


def write_begin(number: int, text: SpokenText | None, request: SpeechRequest, seat: int) -> bytes:
    """The frame that begins an utterance. `seat`: its number; 0: none."""
    told = {field.name: getattr(request, field.name) for field in fields(Request)}
    spoken, voice = request.conditioning, request.conditioning.voice
    told["sampling"] = vars(request.sampling)
    told["conditioning"] = {"speaker": spoken.speaker, "language": spoken.language, "instruct": spoken.instruct}
    words: dict[str, Any] = {"text": text and asdict(text), "request": told, "seat": seat}
    if voice is None:
        return frame(Kind.BEGIN, number, words)
    vector, codes = voice.speaker_embedding.numpy().tobytes(), b""
    words["voice"] = {"ref_text": voice.ref_text, "fingerprint": voice.fingerprint, "vector": len(vector)}
    if voice.ref_codes is not None:
        codes = voice.ref_codes.contiguous().numpy().tobytes()
        words["voice"]["groups"] = voice.ref_codes.shape[1]
    return frame(Kind.BEGIN, number, words, vector + codes)


def read_begin(told: Mapping[str, Any], rest: bytes) -> tuple[SpokenText | None, SpeechRequest]:
    """What `write_begin` was given."""
    given, voice = dict(told["request"]), None
    if who := told.get("voice"):
        vector = torch.from_numpy(np.frombuffer(rest[: who["vector"]], np.float32).copy())
        codes = None
        if "groups" in who:
            codes = torch.from_numpy(np.frombuffer(rest[who["vector"] :], np.int64).reshape(-1, who["groups"]).copy())
        voice = Voice(vector, codes, who["ref_text"], who["fingerprint"])
    given["conditioning"] = Conditioning(**given["conditioning"], voice=voice)
    given["sampling"] = SamplingParams(**given["sampling"])
    given["chunk_frames"] = tuple(given["chunk_frames"])
    text = told["text"] and SpokenText(**told["text"])
    return text, SpeechRequest(**given, **_SEEN_TO)


def write_error(error: BaseException) -> dict[str, Any]:
    """An error as JSON."""
    return {"kind": type(error).__name__, "words": str(error), "field": getattr(error, "field", None)}


def read_error(told: Mapping[str, Any]) -> Exception:
    """The error. One that is not the package's becomes a RuntimeError."""
    kind = getattr(errors, told["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, TTSError)):
        return RuntimeError(f"{told['kind']}: {told['words']}")
    return kind(told["words"], field=told["field"]) if issubclass(kind, errors.RequestError) else kind(told["words"])
