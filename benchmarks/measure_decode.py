"""How long does one frame of 16 codes take, and how far is that from the hardware's floor?

    python benchmarks/measure_decode.py [--size 0.6b|1.7b|demo] [--positions 200 2000] [--columns 1 8]
                                        [--weights bf16|fp8|fp8-predictor] [--frames 200] [--stages] [--graph]
                                        [--no-torch]

Random weights at the published dims, sampling as published for both models (or --greedy), a full penalty history,
checked codes. The floor is the bytes of a frame (talker once, code predictor 15 times, heads) over the card's measured
read bandwidth, 4.67 TB/s on an H200. A prefill's floor is one talker pass a launch. --stages uses a separate build with
a clock, in which a frame takes a little longer. --graph adds a baseline: the frame as a CUDA graph of ordinary kernels
(graph_frame.py), with and without programmatic dependent launches. Its logits are compared with the kernel's.
"""

import argparse
import json
import time

import torch
from common import about, build_with, commit, machine, positive, read_ms, spread
from graph_frame import POSITIONS, GraphFrame

from qwen_check.bench import weight_bytes
from qwen_megakernel.backend import build
from qwen_megakernel.backend.megakernel import STAGES, MegakernelFrameDecoder
from qwen_megakernel.backend.torch_decoder import TorchFrameDecoder
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.fp8 import dequantized, parts_in, quantized
from qwen_megakernel.checkpoint.load import DEMO_FOLDER
from qwen_megakernel.checkpoint.synthetic import random_talker, synthetic_config
from qwen_megakernel.choices import WEIGHTS
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.sampling_params import GREEDY, SamplingParams


def times_ms(step, repeats: int) -> torch.Tensor:
    for _ in range(20):
        step()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return torch.tensor([a.elapsed_time(b) for a, b in events])


class Frames:
    """Runs frames of some streams of a kernel, at a position, with a full penalty history, and checks their codes."""

    def __init__(
        self, kernel: MegakernelFrameDecoder, config: ModelConfig, sampling: SamplingParams, checked: bool = True
    ):
        device = kernel._rows.device
        rows = torch.randn(10, config.talker.stack.hidden_size, device=device).to(torch.bfloat16)
        self.kernel, self.prompt, self.sampling = kernel, Prompt(rows, rows[:1], rows[0]), sampling
        self.codes, self.checked = config.talker.first_suppressed_id, checked

    def begin(self, columns: int, position: int) -> list[int]:
        for slot in range(columns):
            self.kernel.start(slot, self.prompt, self.sampling)
            self.kernel._launcher.seek(slot, position, 5)
            self.kernel._seen[slot, : self.codes] = 1  # a full history: every code is penalised
        return list(range(columns))

    def launch(self, slots: list[int]) -> None:
        self.kernel.launch(slots)
        if self.kernel._launcher.uncollected() == 4:
            self.collect()

    def collect(self) -> None:
        for codes in self.kernel.collect():
            if self.checked:
                assert codes is not None and 0 <= int(codes.min()) and int(codes.max()) < self.codes

    def drain(self) -> None:
        while self.kernel._launcher.uncollected():
            self.collect()

    def times_ms(self, columns: int, position: int, repeats: int) -> torch.Tensor:
        """Milliseconds of `repeats` frames; the middle one is at `position`."""
        slots = self.begin(columns, max(position - repeats // 2 - 20, 0))
        times = times_ms(lambda: self.launch(slots), repeats)
        self.drain()
        return times


def graph_times_ms(
    kernel: MegakernelFrameDecoder, config: ModelConfig, tensors: dict, sampling: SamplingParams, programmatic: bool
) -> torch.Tensor:
    """Milliseconds of frames of a CUDA graph around position 200. Before, its first frame behind a prompt must have the
    kernel's logits."""
    greedy = GREEDY.over(config.sampling)
    temperature = sampling.temperature if sampling.do_sample else 0.0
    graph = GraphFrame(config, tensors, temperature=0.0, programmatic=programmatic)
    rows = torch.randn(20, config.talker.stack.hidden_size, device=graph.device).to(torch.bfloat16)
    kernel.start(0, Prompt(rows, rows[:1], rows[0]), greedy)
    _, logits = kernel.observe()
    kernel.launch([0])
    (codes,) = kernel.collect()
    kernel._launcher.observe(None, None, None)
    graph.seek(0)
    for row in rows[:-1].float():
        graph.row(row)
    graph.hidden[0] = rows[-1]
    graph.run()
    same = 0  # groups whose input codes are the same
    while same < len(codes) and int(graph.codes[same]) == int(codes[same]):
        same += 1
    vocab = config.talker.code_predictor.vocab_size  # code 0 has more, which are never drawn
    for group in range(min(same + 1, len(codes))):
        ours, theirs = logits[0, group, :vocab], graph.logits[group, :vocab]
        error = float((ours - theirs).norm() / ours.norm())
        assert error < 0.03, f"the graph's logits of group {group} differ from the kernel's by {error:.1%}"
    if temperature:
        graph = GraphFrame(config, tensors, temperature=temperature, programmatic=programmatic)
    repeats = 100
    graph.seek(200 - repeats // 2 - 20)
    assert 200 + repeats // 2 < POSITIONS
    return times_ms(graph.run, repeats)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--positions", type=positive, nargs="+", default=[50, 200, 1000, 2000])
    parser.add_argument("--columns", type=positive, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--frames", type=positive, default=200)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16")
    parser.add_argument("--stages", action="store_true", help="also the kernel's own clock, stage by stage")
    parser.add_argument("--graph", action="store_true", help="also a CUDA graph of ordinary kernels")
    parser.add_argument("--no-torch", action="store_true", help="leave out the PyTorch backend")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times the kernel: a CUDA GPU is needed")
    if args.graph and (args.size == "demo" or args.weights != "bf16"):
        parser.error("--graph: its kernels are for bf16 weights of 0.6b and 1.7b")
    device = torch.device("cuda")
    config = ModelConfig.from_folder(DEMO_FOLDER) if args.size == "demo" else synthetic_config(args.size)
    tensors = quantized(random_talker(config, device, seed=torch.seed() % 2**31), WEIGHTS[args.weights])
    sampling = (GREEDY if args.greedy else SamplingParams(seed=1)).over(config.sampling)
    limit = max(args.positions) + args.frames + 64
    kernel = MegakernelFrameDecoder(config, tensors, slots=max(args.columns), max_positions=limit)
    frames = Frames(kernel, config, sampling)
    talker_bytes, bytes_ = weight_bytes({name: t.nbytes for name, t in tensors.items()})
    floor, pass_floor = read_ms(bytes_), read_ms(talker_bytes)
    how = "greedy" if args.greedy else "sampled"
    print(f"{machine()}, commit {commit()}, {args.size}, {how}, weights {args.weights}")
    print(f"{'':36}  median ms   p95 ms  floor ms  of floor  frames/s  codes/s")
    results = {}

    def report(label: str, t: torch.Tensor, floor: float = floor, columns: int = 0) -> None:
        """columns: how many streams' frames were timed; 0: no frames were made."""
        row = results[label] = spread(t.tolist())
        median = row["p50"]
        row |= {"floor_ms": floor, "of_floor": floor / median}
        told = f"{label:36}  {median:9.3f}  {row['p95']:7.3f}  {floor:8.3f}  {floor / median:8.0%}"
        if columns:
            frames_s = row["frames_s"] = columns * 1000 / median
            told += f"  {frames_s:8,.0f} {16 * frames_s:8,.0f}"
        print(told)

    for columns in args.columns:
        for position in args.positions if columns == 1 else args.positions[:2]:
            times = frames.times_ms(columns, position, args.frames)
            report(f"kernel, columns {columns}, position {position}", times, columns=columns)

    slots = frames.begin(1, 200)
    host = []
    for _ in range(args.frames):
        start = time.perf_counter()
        kernel.launch(slots)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        there = time.perf_counter()
        frames.collect()
        host.append((launched - start + time.perf_counter() - there) * 1e3)
    report("host, launch and collect of a frame", torch.tensor(host), 0.03)

    data = torch.randn(40, config.talker.stack.hidden_size, device=device)

    def prefill(n: int) -> None:
        kernel._launcher.seek(0, 0, 0)
        kernel._launcher.prefill(0, data[:n])

    most = build.load_extension(device, parts_in(tensors)).MOST_COLUMNS  # rows of a launch
    for n in (1, 8, 10, 16, 40):
        report(
            f"kernel, prefill of {n} rows", times_ms(lambda n=n: prefill(n), args.frames), -(-n // most) * pass_floor
        )
    if args.stages:
        with build_with(DEFINES=(build.STAGE_CLOCK,)):
            clocked = MegakernelFrameDecoder(config, tensors, slots=max(args.columns), max_positions=limit)
        frames = Frames(clocked, config, sampling)
        for columns in args.columns:
            slots = frames.begin(columns, args.positions[0])
            stage_ns = torch.zeros(len(STAGES), dtype=torch.int64, device=device)
            clocked._launcher.observe(None, None, stage_ns)
            for _ in range(50):
                frames.launch(slots)
            frames.drain()
            stages = (stage_ns / 50 / 1000).tolist()
            print(f"stages of block 0, columns {columns}, position {args.positions[0]}")
            for name, us in zip(STAGES, stages, strict=True):
                print(f"  {name:26}  {us:9.1f} us  {us / sum(stages):6.1%}")
            results[f"stages_us, columns {columns}"] = dict(zip(STAGES, stages, strict=True))
    for programmatic in (False, True) if args.graph else ():
        label = "CUDA graph of kernels" + (", programmatic" if programmatic else "")
        report(label, graph_times_ms(kernel, config, tensors, sampling, programmatic), columns=1)
    if not args.no_torch:
        plain = dequantized(tensors, torch.bfloat16)
        backend = TorchFrameDecoder(config, plain, Embeddings(config.talker, plain), slots=1, max_positions=limit)
        backend.start(0, frames.prompt, sampling)

        def torch_frame() -> None:
            backend.launch([0])
            backend.collect()

        report("PyTorch bf16, CUDA graphs", times_ms(torch_frame, 50), columns=1)
    print(json.dumps(about(args.size) | {"greedy": args.greedy, "weights": args.weights, "results": results}))


if __name__ == "__main__":
    main()
