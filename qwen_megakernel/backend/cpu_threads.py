"""How many threads PyTorch computes with on a CPU: measured when a model is loaded.

More threads help a large model. They slow down a small one, above all beside other busy processes, because every
operator waits for the slowest thread. The demo voice on two cores: docs/log/2026-11-22.md#first-five-minutes.
"""

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from qwen_megakernel.backend.interfaces import CpuSpeed, LoadedModel
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.sampling_params import SamplingParams

_ROUNDS = 5  # after the first one; their median counts
_FRAMES = 2  # of a round: end of speech is suppressed that long
_PUSHED = 8  # frames of a vocoder push, as in mid-utterance
_ENOUGH_S = 3.0  # no round begins after that: a choice. A large model's first round alone takes longer
_DEFAULT = threading.Lock()  # of the number that new threads get: `use_threads` changes it for a moment
_WORTH = 0.75  # more threads must save a quarter of the time: beside other work they lose more than that


def use_threads(count: int) -> None:
    """Let PyTorch compute with `count` threads in the calling thread, and leave other threads as they are.

    Where PyTorch is built with OpenMP (Linux, Windows), each thread has its own number. `torch.set_num_threads` also
    sets the default for threads that have not yet called PyTorch, so another thread restores it. Other builds have one
    number for the process, which then stays `count`.
    """
    with _DEFAULT:
        before = torch.get_num_threads()
        if count == before:
            return
        torch.set_num_threads(count)
        putting_back = threading.Thread(target=torch.set_num_threads, args=(before,))
        putting_back.start()
        putting_back.join()
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)


def prompt_threads(count: int) -> ThreadPoolExecutor:
    """So many threads that build prompts. Each computes alone, because a prompt is small. Otherwise OpenMP starts
    helpers for each of them, and ends the process where the system gives it none. All these threads exist when this
    returns. Raises RuntimeError: the process can have no more threads."""
    pool, all_begun = ThreadPoolExecutor(count, thread_name_prefix="qwen_megakernel submit"), threading.Barrier(count)

    def begin() -> None:
        if torch.backends.openmp.is_available():  # else it would hold for the engine's threads too
            use_threads(1)
        all_begun.wait()

    try:
        for begun in [pool.submit(begin) for _ in range(count)]:
            begun.result()
    except RuntimeError:
        all_begun.abort()
        pool.shutdown(wait=False)
        raise
    return pool


def measure(
    model: LoadedModel,
    sampling: SamplingParams,
    threads: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CpuSpeed:
    """How fast a model is on this CPU, with the best number of threads. No sequence may be in its slots. `sampling`:
    the checkpoint's, complete. `threads`: use this number; None: the fewest that are about as fast as any, at most
    PyTorch's own number (`torch.get_num_threads`, OMP_NUM_THREADS)."""
    most = torch.get_num_threads()
    counts = [*(count for count in (1, 2, 4) if count < most), most] if threads is None else [threads]
    with ThreadPoolExecutor(1) as pool:  # in its own thread, so that the caller keeps its number
        seconds = pool.submit(_seconds_a_frame, model, sampling, counts, clock).result()
    fastest = min(seconds.values())
    chosen = next(count for count in counts if seconds[count] * _WORTH <= fastest)
    return CpuSpeed(chosen, seconds)


@torch.inference_mode()
def _seconds_a_frame(
    model: LoadedModel, sampling: SamplingParams, counts: list[int], clock: Callable[[], float]
) -> dict[int, float]:
    """Seconds by the number of threads, measured in turns."""
    row = model.embeddings.code0([0])
    prompt = Prompt(row, row, row[0])
    codes = torch.zeros(1, _PUSHED, model.vocoder.groups, dtype=torch.int64)
    taken: dict[int, list[float]] = {count: [] for count in counts}
    began = clock()
    for _ in range(1 + _ROUNDS):
        for count in counts:
            use_threads(count)
            start = clock()
            model.decoder.start(0, prompt, sampling)
            for _ in range(_FRAMES):
                model.decoder.launch([0])
                model.decoder.collect()
            middle = clock()
            model.vocoder.push([0], codes)
            taken[count].append((middle - start) / _FRAMES + (clock() - middle) / _PUSHED)
        if clock() - began > _ENOUGH_S:
            break
    model.decoder.recover()
    model.vocoder.reset(0)
    # The first round includes what is made at first use.
    return {count: statistics.median(times[1:] or times) for count, times in taken.items()}
