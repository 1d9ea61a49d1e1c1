"""FrameGraphs: frames as CUDA graphs. A frame is thousands of small kernels, which a CPU launches far more slowly
than the GPU runs them; a graph is one launch.

A graph belongs to one slot, one length of attention and one shape of the draws. It reads everything else that differs
between frames or requests from the slot's tensors.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qwen_megakernel.model.frame import Draws, Frame, SlotState

KEPT = 8  # a slot keeps its latest used graphs. A sequence of up to 2,048 positions needs at most 4.

_SHORTEST = 256
_CAPTURING = threading.Lock()  # torch captures one graph at a time in a process; each engine has a thread
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@contextlib.contextmanager
def capturing(device: torch.device) -> Iterator[None]:
    """Enter the CUDA stream on which a device's graphs are captured, one thread at a time. It runs after the current
    stream's earlier work and before its later work. There is one per device, because cuBLAS keeps 32 MB per stream.
    """
    with _CAPTURING:
        stream = _STREAMS.get(device)
        if stream is None:
            stream = _STREAMS[device] = torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)


def synchronize(device: torch.device | None = None) -> None:
    """Wait for everything queued on a device, but never during a capture, which would fail."""
    with _CAPTURING:
        torch.cuda.synchronize(device)


def capture(step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Run `step` to load what it needs, then capture it. Call this within `capturing`. torch.cuda.graph would collect
    all garbage and wait for the GPU, where other engines may be speaking."""
    step()
    graph = torch.cuda.CUDAGraph()
    # Other threads use the GPU meanwhile, so only this thread's calls may break the capture.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        step()
    finally:
        graph.capture_end()
    return graph


def attended(positions: int, max_positions: int) -> int:
    """How much of the KV cache a graph reads for `positions`: 256, 512, 1024, ..., at most all of it."""
    return min(max_positions, max(_SHORTEST, 1 << (positions - 1).bit_length()))


class Job(NamedTuple):
    """One frame to run; `positions` includes its own. `tell`: called behind it, queues what is told of it, or None."""

    state: SlotState
    draws: Draws
    positions: int
    tell: Callable[[], Tensor | None]


class FrameGraphs:
    """Runs frames of some slots on their GPU. It captures each graph when it is first needed. All graphs share one
    memory pool, because they run one after the other."""

    def __init__(self, frame: Frame, states: Sequence[SlotState], max_positions: int, *, ahead: int, width: int):
        """`states`: one for each slot; their caches are cleared here. `ahead`: how many launches may be unread.
        `width`: most frames of one launch."""
        self._frame = frame
        self._max_positions = max_positions
        self._graphs: dict[SlotState, dict[tuple[object, ...], torch.cuda.CUDAGraph]] = {state: {} for state in states}
        clear(states)
        self._device = states[0].codes.device
        self._pool = torch.cuda.graph_pool_handle()
        shape = (width, len(states[0].codes))
        self._ring = [
            (torch.empty(shape, dtype=torch.int64, pin_memory=True), torch.cuda.Event()) for _ in range(ahead)
        ]
        self._launches = 0

    def launch(self, jobs: Sequence[Job]) -> Callable[[int], tuple[Tensor, Tensor | None]]:
        """Queue frames on the current stream, without waiting for them. Returns fetch(i) -> codes of the i-th job,
        int64 [groups], and what `tell` told, both on the CPU. It waits for the whole launch and is valid until `ahead`
        more launches were made."""
        codes, done = self._ring[self._launches % len(self._ring)]
        self._launches += 1
        told = []
        for job, row in zip(jobs, codes, strict=False):
            self._run(job)
            row.copy_(job.state.codes, non_blocking=True)
            told.append(_on_host(job.tell()))
        done.record(torch.cuda.current_stream(self._device))

        def fetch(i: int) -> tuple[Tensor, Tensor | None]:
            done.synchronize()
            return codes[i].clone(), told[i]

        return fetch

    def _run(self, job: Job) -> None:
        length = attended(job.positions, self._max_positions)
        key = (length, job.state.cache.watched, *(draw.shape for draw in job.draws))
        graphs = self._graphs[job.state]
        graph = graphs.pop(key, None)
        if graph is not None:
            graph.replay()
        else:
            step = partial(self._frame.step, job.state, job.draws, job.state.position, length)
            with capturing(self._device):  # this frame runs without a graph; the next one is captured
                graph = capture(step, self._pool)
            if len(graphs) == KEPT:
                del graphs[next(iter(graphs))]
        graphs[key] = graph  # last: the latest used


def _on_host(told: Tensor | None) -> Tensor | None:
    """A copy in pinned memory, which is there once the stream gets to it."""
    if told is None:
        return None
    return torch.empty(told.shape, dtype=told.dtype, pin_memory=True).copy_(told, non_blocking=True)


def clear(states: Sequence[SlotState]) -> None:
    """Clear the caches. Graphs read past the last position with weight 0, so even there a NaN would spread."""
    for state in states:
        state.cache.k.zero_()
        state.cache.v.zero_()
