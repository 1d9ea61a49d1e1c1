"""What do a voice engine and a language model on one GPU cost each other?

    python benchmarks/measure_neighbour.py [--size 0.6b|1.7b|demo] [--live 1 8 32] [--duty 1 0.5] [--seconds 10]
                                           [--layers 32]

The neighbour is a process of its own: the matrix products of an 8B language model that decodes 8 sequences, with
random bf16 weights, a CUDA graph a step. They take nearly all of a step, so attention and sampling are left out. "duty
0.5": it rests as long as it works. Ours is the engine with live listeners (measure_load.py). Each runs alone, then both
together. The driver gives them the GPU in turns, or at once where NVIDIA's MPS runs before this is started.
"""

import argparse
import contextlib
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import torch
from common import about, above_0, commit, machine, positive, random_model
from measure_load import live, summary

from qwen_megakernel import TTSEngine

WIDTH, SEQUENCES = 4096, 8
SHAPES = ((6144, WIDTH), (WIDTH, WIDTH), (28672, WIDTH), (WIDTH, 14336))  # of a layer: qkv, o, gate and up, down


def neighbour(device: torch.device, layers: int, duty: float) -> None:
    """Decode until the standard input ends. Prints "ready", then at the end the steps made and their seconds."""

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * 0.02

    weights = [[random(*shape) for shape in SHAPES] for _ in range(layers)]
    rows = random(SEQUENCES, WIDTH)

    def step() -> None:
        x = rows
        for qkv, o, gate_up, down in weights:
            attended = torch.nn.functional.linear(x, qkv)[:, :WIDTH]
            x = torch.nn.functional.linear(attended, o)
            x = torch.nn.functional.linear(torch.nn.functional.linear(x, gate_up)[:, : down.shape[1]], down)

    run = step
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

        def run() -> None:
            graph.replay()
            torch.cuda.synchronize()

    run()
    print("ready", flush=True)
    watch = threading.Thread(target=sys.stdin.read, daemon=True)
    watch.start()
    began, steps = time.perf_counter(), 0
    while watch.is_alive():
        start = time.perf_counter()
        run()
        steps += 1
        time.sleep((time.perf_counter() - start) * (1 / duty - 1))
    print(json.dumps([steps, time.perf_counter() - began]), flush=True)


@contextlib.contextmanager
def beside(device: str, layers: int, duty: float) -> Iterator[list[float]]:
    """The neighbour works while inside. The list then holds its steps a second."""
    command = [sys.executable, __file__, "--neighbour", str(duty), "--layers", str(layers), "--device", device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        if process.stdout.readline() != "ready\n":
            raise SystemExit("the neighbour did not start: see its error above")
        told: list[float] = []
        yield told
        process.stdin.close()
        steps, seconds = json.loads(process.stdout.readline())
        told.append(steps / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--live", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--duty", type=above_0, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--seconds", type=above_0, default=10)
    parser.add_argument("--layers", type=positive, default=32, help="of the language model")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--neighbour", type=above_0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if max(args.duty) > 1:
        parser.error(f"--duty: a share of the time, at most 1, got {max(args.duty):g}")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.neighbour:
        neighbour(torch.device(device), args.layers, args.neighbour)
        return
    results: list[dict] = []
    options = {"max_streams": max(args.live), "max_positions": 512}
    with random_model(args.size) as folder, TTSEngine.load(folder, device=device, **options) as engine:
        print(f"{machine()}, commit {commit()}, {args.size}, {engine.backend} backend")
        print(f"{'':24}{'first audio p50 ms':>20}{'p95 ms':>9}{'gaps':>7}{'neighbour, steps a second':>28}", flush=True)

        def measured(name: str, listeners: int, duty: float) -> str:
            """A line for the table, without what the neighbour did."""
            row = {"live": listeners, "duty": duty} | summary(live(engine, listeners, args.seconds))
            results.append(row)
            shown = f"{row.get('p50', math.nan):20.1f}{row.get('p95', math.nan):9.1f}{row['gaps']:7}"
            return f"{f'{listeners} live, {name}':24}{shown}"

        for listeners in args.live:
            print(measured("alone", listeners, 0.0), flush=True)
        for duty in args.duty:
            with beside(device, args.layers, duty) as told:
                time.sleep(args.seconds)
            alone = told[0]
            print(f"{f'neighbour alone, {duty:g}':24}{alone:64.1f}", flush=True)
            results.append({"live": 0, "duty": duty, "neighbour": alone})
            for listeners in args.live:
                with beside(device, args.layers, duty) as told:
                    line = measured(f"beside {duty:g}", listeners, duty)
                results[-1]["neighbour"] = told[0]
                print(f"{line}{told[0]:28.1f} ({told[0] / alone:.0%})", flush=True)
    print(json.dumps(about(args.size) | {"layers": args.layers, "results": results}))


if __name__ == "__main__":
    main()
