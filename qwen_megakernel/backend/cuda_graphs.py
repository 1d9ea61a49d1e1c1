"""FrameGraphs: frames as CUDA graphs. A frame is thousands of small kernels, which a CPU launches far more slowly
than the GPU runs them; a graph is one launch.

A graph belongs to one slot, one length of attention and one shape of the draws; everything else that differs from
frame to frame or from request to request it reads from the slot's tensors.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qwen_megakernel.model.frame import Draws, Frame, SlotState

KEPT = 8
"""Graphs that one slot keeps, the latest used: a sequence at up to 2,048 positions needs at most 4 in its life."""

_SHORTEST = 256
_CAPTURING = threading.Lock()  # torch captures one graph at a time in a process, and every engine has a thread
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@contextlib.contextmanager
def capturing(device: torch.device) -> Iterator[None]:
    """For one thread at a time, the stream on which a device's graphs are captured, behind what the current stream was
    given and before what it is given next. It is always the same: cuBLAS keeps 32 MB for every stream it has seen.
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
    """Wait for everything that was queued on a device, but not into a capture: that would fail of it."""
    with _CAPTURING:
        torch.cuda.synchronize(device)


def capture(step: Callable[[], None], pool) -> torch.cuda.CUDAGraph:
    """Run `step`, which loads all that a capture must find loaded, then capture it; within `capturing`. Not with
    torch.cuda.graph, which collects all garbage and waits for the GPU, where other engines may be speaking."""
    step()
    graph = torch.cuda.CUDAGraph()
    # Other threads go on using the GPU meanwhile: only this one's calls may spoil the capture.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        step()
    finally:
        graph.capture_end()
    return graph


def attended(positions: int, max_positions: int) -> int:
    """How much of a cache a graph reads for so many positions: 256, 512, 1024, ..., at most the whole of it."""
    return min(max_positions, max(_SHORTEST, 1 << (positions - 1).bit_length()))


class Job(NamedTuple):
    """One frame to run: `positions` counts its own too."""

    state: SlotState
    draws: Draws
    positions: int


class FrameGraphs:
    """Runs frames of some slots on their GPU. Graphs are captured when they are first needed; all of them share one
    memory pool, because they run one after the other."""

    def __init__(self, frame: Frame, states: Sequence[SlotState], max_positions: int, *, ahead: int, width: int):
        """
        Args:
            states: of every slot; their caches are cleared here.
            ahead: launches that may be unread.
            width: frames of one launch, at most.
        """
        self._frame, self._max_positions = frame, max_positions
        self._graphs: dict[SlotState, dict[tuple, torch.cuda.CUDAGraph]] = {state: {} for state in states}
        clear(states)
        self._device, groups = states[0].codes.device, len(states[0].codes)
        self._pool = torch.cuda.graph_pool_handle()
        self._ring = [
            (torch.empty(width, groups, dtype=torch.int64, pin_memory=True), torch.cuda.Event()) for _ in range(ahead)
        ]
        self._launches = 0

    def launch(self, jobs: Sequence[Job]) -> Callable[[int], Tensor]:
        """Queue frames on the current stream, without waiting for them.

        Returns:
            fetch(i) -> codes of the i-th job, int64 [groups] on the CPU; waits for all of the launch. Valid until
            `ahead` more launches were made.
        """
        codes, done = self._ring[self._launches % len(self._ring)]
        self._launches += 1
        for job, row in zip(jobs, codes, strict=False):
            self._run(job)
            row.copy_(job.state.codes, non_blocking=True)
        done.record(torch.cuda.current_stream(self._device))

        def fetch(i: int) -> Tensor:
            done.synchronize()
            return codes[i].clone()

        return fetch

    def _run(self, job: Job) -> None:
        length = attended(job.positions, self._max_positions)
        key = (length, *(draw.shape for draw in job.draws))
        graphs = self._graphs[job.state]
        graph = graphs.pop(key, None)
        if graph is not None:
            graph.replay()
        else:
            graph = self._run_and_capture(job, length)
            if len(graphs) == KEPT:
                del graphs[next(iter(graphs))]
        graphs[key] = graph  # last: the latest used

    def _run_and_capture(self, job: Job, length: int) -> torch.cuda.CUDAGraph:
        """Run this frame without a graph, which loads all that a capture must find loaded, then capture the next."""

        def step() -> None:
            self._frame.step(job.state, job.draws, job.state.position, length)

        with capturing(self._device):
            return capture(step, self._pool)


def clear(states: Sequence[SlotState]) -> None:
    """Graphs read caches past the last position, with a weight of 0: not even there may a NaN be."""
    for state in states:
        state.cache.k.zero_()
        state.cache.v.zero_()
