"""`qwen-megakernel bench`: how fast is it on this machine? Each figure is shown beside the card's floor."""

import dataclasses
import datetime
import gc
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qwen_megakernel import __version__
from qwen_megakernel.backend.card import driver_version
from qwen_megakernel.backend.cpu_threads import use_threads
from qwen_megakernel.backend.interfaces import AHEAD, FrameDecoder
from qwen_megakernel.backend.select import Backend, select_device
from qwen_megakernel.checkpoint.fp8 import dequantized
from qwen_megakernel.checkpoint.load import Checkpoint, name_of_model
from qwen_megakernel.checkpoint.synthetic import NO_EOS, write_checkpoint
from qwen_megakernel.choices import DEMO
from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.errors import RequestError
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.sampling_params import SamplingParams
from qwen_megakernel.speech.engine import TTSEngine
from qwen_megakernel.speech.options import RequestOptions
from qwen_megakernel.trust.selection import Selection

FRAME_MS = 80.0
UTTERANCE_FRAMES = 63  # 5.04 s
MAX_POSITIONS = 512
_RUN, _TRIES = 20, 40  # frames of a run; tries per counted run: one in seven demo streams ends within a run

# Each is one token in synthetic checkpoints, just as common words are in published ones.
_WORDS = "of text a test how are today I am fine it bonjour tout le monde wie geht".split()


def sentence() -> str:
    """Ten random words, 11 to 13 tokens. The last has several letters: sentence splitters take "I." for an initial."""
    words = random.choices(_WORDS, k=9) + random.choices([word for word in _WORDS if len(word) > 1])
    return " ".join(words).capitalize() + "."


def weight_bytes(sizes: Mapping[str, int]) -> tuple[int, int]:
    """(bytes that a talker pass without its head reads, bytes that a whole frame reads). `sizes`: bytes of every tensor
    by name. A frame reads the code predictor's layers 15 times, and each of its heads once."""
    talker = frame = 0
    for name, size in sizes.items():
        if "embedding" in name or "text_projection" in name:
            continue
        if "code_predictor" in name:
            frame += size if "lm_head" in name else 15 * size
        else:
            frame += size
            talker += 0 if "codec_head" in name else size
    return talker, frame


def read_bytes_s(device: torch.device) -> float:
    """Bytes a second at which PyTorch reads a device's memory: the best of ten sums of up to 4 GB of fp32."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**31
    x = torch.ones(min(2**30, free // 16), device=device)
    best = 0.0
    for _ in range(10):
        began = time.perf_counter()
        x.sum().item()
        best = max(best, x.nbytes / (time.perf_counter() - began))
    return best


def free_memory() -> None:
    """Return unused memory to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def frame_ms(
    decoder: FrameDecoder, like: Tensor, sampling: SamplingParams, streams: int, frames: int, threads: int | None = None
) -> float:
    """Wall-clock milliseconds per frame of several sequences, launched ahead as the engine does. It is the median of
    runs of 20 frames from position 13 on. A run in which a sequence ends does not count, because a backend may compute
    nothing after an end. `like`: [hidden], on the decoder's device and of its dtype. Prompts and text rows are noise of
    this form. `streams`: how many sequences. `frames`: how many frames to time in all. `threads`: how many PyTorch
    computes with on a CPU; None: its own number. Raises RequestError: too few runs counted."""
    slots = list(range(streams))

    def measure() -> float | None:
        """Milliseconds per frame of one run; None: a sequence ended."""
        noise, ended = torch.randn_like(like), False
        prompt = Prompt(noise.expand(10, -1).contiguous(), noise[None], noise)
        for slot in slots:
            decoder.start(slot, prompt, dataclasses.replace(sampling, seed=random.getrandbits(31)))
        for _ in range(AHEAD - 1):
            decoder.launch(slots)
        for collected in range(AHEAD + _RUN):
            if collected == AHEAD:
                began = time.perf_counter()
            decoder.launch(slots)
            ended |= any(codes is None for codes in decoder.collect())
        took = time.perf_counter() - began
        for _ in range(AHEAD - 1):
            decoder.collect()
        return None if ended else 1000 * took / _RUN

    # In its own thread, like the engine's: PyTorch's number of threads belongs to a thread.
    needed, runs = max(1, frames // _RUN), []
    initializer = partial(use_threads, threads) if threads else None
    with ThreadPoolExecutor(1, initializer=initializer) as pool:
        for _ in range(_TRIES * needed):
            if (ms := pool.submit(measure).result()) is not None:
                runs.append(ms)
            if len(runs) == needed:
                return statistics.median(runs)
    raise RequestError(f"no run could be timed: in too many of {_TRIES * needed} speech ended within {_RUN} frames")


def frames_ms(
    plan: Backend, tensors: dict[str, Tensor], streams: Sequence[int], frames: int, threads: int | None = None
) -> list[float]:
    """`frame_ms` for each number of streams. `tensors`: every `talker.*` tensor."""
    norm, sampling = tensors["talker.model.norm.weight"], SamplingParams().over(plan.checkpoint.config.sampling)
    _, decoder = plan.frame_decoder(tensors, slots=max(streams), max_positions=MAX_POSITIONS)
    return [frame_ms(decoder, norm, sampling, count, frames, threads) for count in streams]


def first_audio_ms(engine: TTSEngine, utterances: int) -> list[float]:
    """TTFC of successive utterances: milliseconds from the text to a first chunk of one frame."""
    times = []
    for _ in range(utterances):
        time.sleep(random.uniform(0.0, 0.03))
        if (ttfc_s := _speak(engine, 4, 1).ttfc_s) is not None:
            times.append(1000 * ttfc_s)
    return times


def _speak(engine: TTSEngine, frames: int, chunk_frames: int) -> Audio:
    request: RequestOptions = {"max_frames": frames, "chunk_frames": chunk_frames, "runaway_guard": False}
    request["voice"] = engine.placeholder_voice()
    return engine.submit(sentence(), **request).result()


def real_time_factor(engine: TTSEngine, repeats: int, chunk_frames: int) -> float:
    """The median RTF of utterances of up to 5 s, vocoder included."""
    return statistics.median(_speak(engine, UTTERANCE_FRAMES, chunk_frames).rtf for _ in range(repeats))


def run(
    model: str | None,
    *,
    size: str | None = None,
    backend: str = "auto",
    device: str | None = None,
    weights: str | list[str] | None = None,
    tell: Callable[[str], None] = print,
) -> dict:
    """Measure, and print each figure as a line of text. `model`: a folder, a hub id or "demo"; None: random weights on
    a GPU, the demo voice elsewhere. `size`: of the random weights, "0.6b" (None) or "1.7b". Returns the figures by
    name, in the form for an issue. Raises CheckpointError, BackendError: as `TTSEngine.load`. RequestError: `size` is
    given, but no random weights are made."""
    where = select_device(device)
    if size is not None and (model is not None or where.type == "cpu"):
        raise RequestError("--size chooses random weights, which need a GPU and no --model: leave --size out")
    size = size or "0.6b"
    if model is not None or where.type == "cpu":
        model = model or DEMO
        return _measure(model, name_of_model(model), backend, where, weights, tell)
    with tempfile.TemporaryDirectory() as folder:
        tell(f"writing a {size} checkpoint with random weights, which are as fast as trained ones")
        model = str(write_checkpoint(Path(folder), size=size, eos_gain=NO_EOS))
        return _measure(model, f"{size}, random weights", backend, where, weights, tell)


def _cpu() -> str:
    """The number of CPU cores, and their model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {named[0] if named else platform.machine()}"


def _measure(
    model: str, name: str, backend: str, device: torch.device, weights: str | list[str] | None, tell: Callable
) -> dict:
    cuda = device.type == "cuda"
    plan = Selection(backend, device, weights=weights).choose(Checkpoint.open(model))
    # On a CPU the number of threads is measured once, for everything below.
    speed = None if cuda else plan.load(1, MAX_POSITIONS).cpu
    threads = speed.threads if speed else None
    card = torch.cuda.get_device_name(device) if cuda else f"CPU, {threads} of {torch.get_num_threads()} threads"
    told: dict = {"version": __version__, "when": datetime.date.today().isoformat(), "model": name, "machine": card}
    told |= {"cpu": _cpu(), "system": platform.platform(), "python": platform.python_version()}
    told |= {"torch": torch.__version__, "driver_cuda": ".".join(map(str, driver_version() or ("none",)))}
    if cuda:
        told["card_gb"] = torch.cuda.get_device_properties(device).total_memory / 1e9
    told["backend"] = plan.name
    tell(f"{told['machine']}, {plan.name} backend ({plan.reason}), {name}")
    bandwidth = told["read_gb_s"] = read_bytes_s(device) / 1e9
    tell(f"{'':36}{'measured':>12}{'floor':>12}{'of floor':>10}")
    tell(f"{'memory, read by PyTorch':36}{bandwidth:7.0f} GB/s")

    tensors = plan.checkpoint.talker(device, plan.dtype, plan.fp8)
    if plan.name == "torch":  # it has no FP8 weights and would dequantise them itself
        tensors = dequantized(tensors, plan.dtype)
    told["gb_a_frame"] = weight_bytes({n: t.nbytes for n, t in tensors.items()})[1] / 1e9
    floor = told["floor_ms"] = 1000 * told["gb_a_frame"] / bandwidth
    streams, frames, utterances, repeats = ((1, 8), 200, 50, 5) if cuda else ((1,), 20, 5, 1)
    for count, ms in zip(streams, frames_ms(plan, tensors, streams, frames, threads), strict=True):
        told[f"frame_ms_{count}"] = ms
        label = f"a frame of 16 codes, {count} stream{'s' * (count > 1)}"
        tell(f"{label:36}{ms:9.3f} ms{floor:9.3f} ms{floor / ms:10.0%}")
    del tensors

    free_memory()
    free = torch.cuda.mem_get_info(device)[0] if cuda else 0
    with TTSEngine.load(model, backend=backend, device=device, weights=weights, threads=threads) as engine:
        told["weights"] = engine.weights
        first_audio_ms(engine, 3)
        ttfc = sorted(first_audio_ms(engine, utterances))
        p50 = told["ttfc_ms_p50"] = statistics.median(ttfc)
        p95 = told["ttfc_ms_p95"] = ttfc[int(0.95 * len(ttfc))]
        tell(f"{f'first audio (TTFC), p50 of {utterances}':36}{p50:9.2f} ms{'':12}{'':10}  p95 {p95:.2f}")
        for chunk in (1, 8):
            rtf = told[f"rtf_{chunk}"] = real_time_factor(engine, repeats, chunk)
            label = f"RTF with vocoder, chunks of {chunk}"
            tell(f"{label:36}{rtf:12.4f}{floor / FRAME_MS:12.4f}{floor / FRAME_MS / rtf:10.0%}")
        if cuda:
            told["memory_gb"] = (free - torch.cuda.mem_get_info(device)[0]) / 1e9
            tell(f"{'memory of an engine with 8 slots':36}{told['memory_gb']:9.2f} GB")
    tell("\nTo paste into an issue:\n")
    tell("```json\n" + json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}) + "\n```")
    return told
