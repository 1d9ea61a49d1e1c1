"""What do front processes take off the engine's process? A real server over a pretended GPU that computes nothing.

    python benchmarks/measure_fronts.py [--fronts 0 1 2] [--live 50 100] [--slower 5] [--seconds 10]
                                        [--way HTTP|WebSocket]

The pretended GPU is measure_loop.py's, in real time: the engine's thread sleeps while it waits for a launch or a push.
It is made --slower, so that a few listeners keep as many utterances open as that many times more would on a GPU.
Listeners are measure_listeners.py's. "engine" is the CPU time of the engine's process, "fronts" that of all fronts, in
milliseconds for a second of sound that was heard. CPU times bear a busy machine; p50 and p95, from request to first
audio, do not.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import torch
from common import about, commit, free_port, machine, positive, wait_until_ready
from measure_listeners import WAYS, crowd, live
from measure_load import FRAMES
from measure_loop import Model

from qwen_megakernel import TTSEngine
from qwen_megakernel.backend.interfaces import LoadedModel
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.server import app, process
from qwen_megakernel.server.fronts.serve import Fronts
from qwen_megakernel.server.options import ServerOptions
from qwen_megakernel.trust.selection import resolve

SLOTS, TICKS_S = 256, os.sysconf("SC_CLK_TCK")


class RealTime(Model):
    """To set its clock is to wait for that time."""

    slower = 1.0

    @property
    def now(self) -> float:
        return time.monotonic()

    @now.setter
    def now(self, until: float) -> None:
        time.sleep(max(0.0, until - time.monotonic()))

    def _queue(self, ms: float, *work: list[int]) -> float:
        return super()._queue(ms * self.slower, *work)


class Pretended:
    """The demo's backend, with another device."""

    def __init__(self, plan, slower: float):
        self._plan, self._slower = plan, slower

    def __getattr__(self, name: str):
        return getattr(self._plan, name)

    def load(self, slots: int, positions: int, pages: int | None) -> LoadedModel:
        model = RealTime(slots, SLOTS)
        model.slower = self._slower
        return LoadedModel(self._plan.load(slots, positions, pages).embeddings, model, model, lambda: None)


def load(slower: float) -> TTSEngine:
    options = EngineOptions(device="cpu", max_streams=SLOTS, max_positions=512, max_queue=SLOTS)
    plan = resolve("demo", options)
    return TTSEngine("demo", plan.checkpoint, Pretended(plan, slower), options)


def serve(count: int, port: int, slower: int) -> None:
    torch.set_num_threads(1)  # prompts are built on the CPU here; threads that wait for each other would count
    listener = process.bind("127.0.0.1", port)
    if count:
        Fronts(partial(load, slower), ServerOptions(), model="demo", config=None, count=count).serve(listener)
    else:
        app.serve(app.make_app(partial(load, slower), ServerOptions(), model="demo"), listener)


@contextlib.contextmanager
def server(count: int, slower: int) -> Iterator[tuple[str, int]]:
    """Its URL, and the process of its engine."""
    port = free_port()
    with subprocess.Popen([sys.executable, __file__, "--serve", str(count), str(port), str(slower)]) as process:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/ready", lambda: process.poll() is None)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()


def cpu_s(pid: int) -> float:
    """CPU time of a process up to now."""
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS_S


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fronts", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--live", type=positive, nargs="+", default=[50, 100])
    parser.add_argument("--slower", type=positive, default=5, help="how much slower than an H200 the GPU is")
    parser.add_argument("--seconds", type=positive, default=10, help="of a row")
    parser.add_argument("--way", choices=WAYS, default="HTTP")
    parser.add_argument("--clients", type=positive, default=2, help="client processes")
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return
    print(f"{machine()}, commit {commit()}, {args.way}")
    heads = ("p50 ms", "p95 ms", "n", "refused", "engine", "fronts")
    print(f"{'':28}" + "".join(f"{head:>10}" for head in heads), flush=True)
    results, fields = [], {"model": "demo", "max_frames": FRAMES}
    with multiprocessing.get_context("spawn").Pool(args.clients) as pool:
        for count in args.fronts:
            with server(count, args.slower) as (url, pid):
                listen = partial(crowd, pool, args.clients, args.way, f"{url}/v1/audio/speech", 10, fields)
                listen([0.0, 0.0])  # what is made once
                for listeners in args.live:
                    used = [cpu_s(pid), sum(map(cpu_s, children(pid)))]
                    row = listen(live(listeners, args.seconds))
                    sound_s = row["heard_s"] * (row["n"] - row["refused"])
                    engine, others = (
                        1000 * (now - then) / sound_s
                        for now, then in zip((cpu_s(pid), sum(map(cpu_s, children(pid)))), used, strict=True)
                    )
                    row |= {"engine_ms": engine, "fronts_ms": others}
                    results.append({"fronts": count, "live": listeners} | row)
                    shown = f"{row['p50']:10.1f}{row['p95']:10.1f}{row['n']:10}{row['refused']:10}"
                    name = f"{count} fronts, {listeners} listeners"
                    print(f"{name:28}{shown}{engine:10.2f}{others:10.2f}", flush=True)
    print(json.dumps(about("demo") | {"way": args.way, "slower": args.slower, "results": results}))


if __name__ == "__main__":
    main()
