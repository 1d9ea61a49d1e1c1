"""One speech engine in its own process and environment. measure_peers.py starts it and reads its last line.

    python benchmarks/peers.py NAME --model FOLDER [--frames 63] [--utterances 20] [--repeats 3]

Every engine is called through its users' interface, with the same kind of texts, the same weights, and sampling as
published. This file imports only the standard library and what the engine itself needs.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

RATE, FRAME_MS = 24000, 80.0
CHUNKS = (1, 4, 8)  # frames
WORDS = "of text a test how are today I am fine it bonjour tout le monde wie geht".split()
LANGUAGE = "english"


def sentence() -> str:
    return " ".join(random.choices(WORDS, k=10)).capitalize() + "."


def speaker_of(folder: str) -> str:
    return next(iter(json.loads((Path(folder) / "config.json").read_text())["talker_config"]["spk_id"]))


class Ours:
    """This project's engine; "torch": its PyTorch backend, CUDA graphs on a GPU."""

    chunks = CHUNKS

    def __init__(self, folder: str, backend: str):
        import torch

        from qwen_check import bench
        from qwen_megakernel import TTSEngine
        from qwen_megakernel.checkpoint.load import Checkpoint
        from qwen_megakernel.trust.selection import Selection

        plan = Selection(backend).choose(Checkpoint.open(folder))  # raises the reason if it cannot run
        frames = 100 if plan.device.type == "cuda" else 20
        (self._ms,) = bench.frames_ms(plan, plan.checkpoint.talker(plan.device, plan.dtype), (1,), frames)
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()
        self._engine = TTSEngine.load(folder, backend=backend, max_streams=1)
        self._speaker = speaker_of(folder)
        self.versions = {"torch": torch.__version__}

    def speak(self, text: str, frames: int, chunk: int) -> Iterator[int]:
        request = {"speaker": self._speaker, "language": LANGUAGE, "max_frames": frames, "runaway_guard": False}
        for piece in self._engine.stream(text, chunk_frames=chunk, **request):
            yield len(piece.samples)

    def frame_ms(self, frames: int) -> float:
        return self._ms


class QwenTTS:
    """The reference implementation, eager bfloat16: speaks whole utterances only."""

    chunks = (None,)

    def __init__(self, folder: str):
        import torch
        from qwen_tts import Qwen3TTSModel

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._api, self._speaker = (
            Qwen3TTSModel.from_pretrained(folder, dtype=torch.bfloat16, device_map=device),
            speaker_of(folder),
        )
        self._talk, self._took = self._api.model.talker.generate, 0.0
        self._api.model.talker.generate = self._timed
        self.versions = {name: version(name) for name in ("qwen-tts-hf", "transformers", "torch")}

    def _timed(self, **kwargs):
        self._wait()
        began = time.perf_counter()
        out = self._talk(**kwargs)
        self._wait()
        self._took = time.perf_counter() - began
        return out

    def speak(self, text: str, frames: int, chunk: None) -> Iterator[int]:
        # One more than the frames wanted: the last step of generate() makes no frame.
        request = {"speaker": self._speaker, "language": LANGUAGE, "max_new_tokens": frames + 1}
        wavs, _ = self._api.generate_custom_voice(text, non_streaming_mode=False, **request)
        yield len(wavs[0])

    def frame_ms(self, frames: int) -> float:
        samples = sum(self.speak(sentence(), frames, None))
        return 1000 * self._took / (samples / 1920)


class Faster:
    """faster-qwen3-tts: CUDA graphs, bfloat16, its codec too."""

    chunks = CHUNKS

    def __init__(self, folder: str):
        import faster_qwen3_tts.generate as generate
        from faster_qwen3_tts import FasterQwen3TTS

        self._model, self._speaker = FasterQwen3TTS.from_pretrained(folder), speaker_of(folder)
        self._model.warmup()
        self._timing, plain = {}, generate.fast_generate

        def told(*args, **kwargs):
            codes, self._timing = plain(*args, **kwargs)
            return codes, self._timing

        generate.fast_generate = told
        self.versions = {name: version(name) for name in ("faster-qwen3-tts", "qwen-tts-hf", "transformers", "torch")}

    def _request(self, text: str, frames: int) -> dict:
        request = {"text": text, "speaker": self._speaker, "language": LANGUAGE, "max_new_tokens": frames}
        return request | {"non_streaming_mode": False}

    def speak(self, text: str, frames: int, chunk: int) -> Iterator[int]:
        for samples, *_ in self._model.generate_custom_voice_streaming(**self._request(text, frames), chunk_size=chunk):
            yield len(samples)

    def frame_ms(self, frames: int) -> float:
        self._model.generate_custom_voice(**self._request(sentence(), frames))
        return self._timing["ms_per_step"]


class Server:
    """Any server with OpenAI's speech API that streams 16-bit PCM at 24 kHz. It chooses chunks and ends of speech."""

    chunks = (None,)
    frame_ms = None
    versions: dict = {}

    def __init__(self, url: str, fields: str):
        self._url, self._fields = url, json.loads(fields)

    def speak(self, text: str, frames: int, chunk: None) -> Iterator[int]:
        body = json.dumps({"input": text, "response_format": "pcm", **self._fields}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                while piece := response.read1(1 << 16):
                    yield len(piece) / 2
        except urllib.error.HTTPError as error:
            words = " ".join(error.read(300).decode(errors="replace").split())
            raise SystemExit(f"HTTP {error.code}: {words}") from None


ENGINES = {
    "qwen_megakernel": lambda args: Ours(args.model, "megakernel"),
    "qwen_megakernel, PyTorch": lambda args: Ours(args.model, "torch"),
    "qwen-tts-hf": lambda args: QwenTTS(args.model),
    "faster-qwen3-tts": lambda args: Faster(args.model),
    "server": lambda args: Server(args.url, args.fields),
}


def memory_used_gb() -> float | None:
    """Memory that any process uses on this process's first GPU; None if nvidia-smi does not tell."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 2**20 / 1e9
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def spread(values: list[float]) -> dict[str, float]:
    """As common.py's, which other engines' environments cannot import."""
    return {"p50": statistics.median(values), "p95": sorted(values)[int(0.95 * len(values))], "n": len(values)}


def timed(pieces: Iterator[int]) -> tuple[float, float, float]:
    """Seconds to the first piece, to the last, and of audio."""
    began, first, samples = time.perf_counter(), None, 0
    for piece in pieces:
        first, samples = first or time.perf_counter(), samples + piece
    assert samples, "it said nothing"
    return first - began, time.perf_counter() - began, samples / RATE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ENGINES)
    parser.add_argument("--model")
    parser.add_argument("--url")
    parser.add_argument("--fields", default="{}")
    parser.add_argument("--frames", type=int, default=63)
    parser.add_argument("--utterances", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.name == "server" and not args.url:
        parser.error("server needs --url")
    before = memory_used_gb()
    engine = ENGINES[args.name](args)
    told: dict = {"versions": engine.versions, "ttfc_ms": {}, "rtf": {}}
    for _ in range(2):  # warms up graphs, caches, clocks
        timed(engine.speak(sentence(), 10, engine.chunks[-1]))
    told["frame_ms"] = engine.frame_ms(args.frames) if engine.frame_ms else None
    for chunk in engine.chunks:
        whole = [timed(engine.speak(sentence(), args.frames, chunk)) for _ in range(args.repeats)]
        short = [timed(engine.speak(sentence(), chunk + 3, chunk)) for _ in range(args.utterances)] if chunk else whole
        key = str(chunk or "whole")
        told["ttfc_ms"][key] = spread([1000 * first for first, _, _ in short])
        told["rtf"][key] = spread([took / audio for _, took, audio in whole])
    after = memory_used_gb()
    told["memory_gb"] = None if before is None or args.name == "server" else after - before
    print(json.dumps(told))


if __name__ == "__main__":
    main()
