"""Every target's path of the frame kernel on a Hopper GPU: are its codes sm_90a's, and how long does a frame take?

    python benchmarks/emulate.py [--sizes 0.6b 1.7b demo] [--weights bf16 fp8] [--targets 80 86 89 120a]

A target's defines and its PTX, compiled for sm_90: the same branches, ring, columns and blocks as on its cards. Their
machine code, caches, memory and speed are not tried. Exit code 1 where codes differ or a target fails.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from contextlib import nullcontext

import torch
from common import build_with, commit, machine
from measure_decode import Frames

from qwen_megakernel.backend import build
from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder
from qwen_megakernel.checkpoint.config import ModelConfig, SamplingParams
from qwen_megakernel.checkpoint.fp8 import WEIGHTS, quantized
from qwen_megakernel.checkpoint.load import DEMO_FOLDER
from qwen_megakernel.checkpoint.synthetic import random_talker, synthetic_config
from qwen_megakernel.model.prompt import Prompt

PTX = {"80": "compute_80", "86": "compute_86", "89": "compute_89", "90a": None, "120a": "compute_90"}
"""What stands in for a target's own code. sm_100a has sm_90a's path."""
FRAMES = 8


def say(kernel: MegakernelFrameDecoder, config: ModelConfig, rows: torch.Tensor) -> list[list[int]]:
    """Codes of short and long prompts, alone and two together."""
    said = []
    for prompt in (9, 300):
        sampling = SamplingParams(seed=prompt).over(config.sampling)
        for slots in ([0], [0, 1]):
            for slot in slots:
                kernel.start(slot, Prompt(rows[: prompt + slot], rows[:1], rows[0]), sampling)
            for _ in range(FRAMES):
                kernel.launch(slots)
                said += [[-1] if codes is None else codes.tolist() for codes in kernel.collect()]
    return said


def child(target: str, cases: list[tuple[str, str]]) -> None:
    """Builds that target's path, waits for a line of standard input, and prints a line of JSON for each case."""
    build.architecture = lambda _device: target
    with nullcontext() if PTX[target] is None else build_with(f"-gencode=arch={PTX[target]},code=sm_90"):
        for weights in {weights for weights, _ in cases}:
            build.load_extension(torch.device("cuda"), WEIGHTS[weights])
        sys.stdin.readline()
        for weights, size in cases:
            print(json.dumps(measure(size, weights)), flush=True)


def begin(target: str, cases: list[tuple[str, str]]) -> subprocess.Popen:
    command = [sys.executable, __file__, "--child", target, json.dumps(cases)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@torch.inference_mode()
def measure(size: str, weights: str) -> dict:
    """A hash of the codes, and the median of 60 frames around position 190."""
    device = torch.device("cuda")
    config = ModelConfig.from_folder(DEMO_FOLDER) if size == "demo" else synthetic_config(size)
    tensors = quantized(random_talker(config, device, seed=3), WEIGHTS[weights])
    kernel = MegakernelFrameDecoder(config, tensors, slots=2, max_positions=512)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(301, config.talker.stack.hidden_size, generator=generator).to(device).to(torch.bfloat16)
    said = hashlib.sha1(json.dumps(say(kernel, config, rows)).encode()).hexdigest()
    frames = Frames(kernel, config, SamplingParams(seed=1).over(config.sampling), checked=False)
    return {"codes": said, "ms": float(frames.times_ms(1, 190, 60).median())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["0.6b", "1.7b", "demo"], choices=("0.6b", "1.7b", "demo"))
    parser.add_argument("--weights", nargs="+", default=["bf16", "fp8"], choices=WEIGHTS)
    parser.add_argument("--targets", nargs="+", default=[t for t in PTX if t != "90a"], choices=PTX)
    parser.add_argument("--child", nargs=2, metavar=("TARGET", "CASES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], json.loads(args.child[1]))
        return 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("it needs a Hopper GPU")
    print(f"{machine()}, commit {commit()}")
    print(f"{'target':8}{'model':8}{'weights':9}{'a frame':>10}  codes")
    cases = [(weights, size) for weights in args.weights for size in args.sizes]
    targets = ["90a", *(t for t in args.targets if t != "90a")]
    children = {target: begin(target, cases) for target in targets}  # they build at once and measure one by one
    expected, wrong, results = {}, 0, []
    for target, process in children.items():
        printed, complaint = process.communicate("\n")
        lines = printed.splitlines()
        for i, (weights, size) in enumerate(cases):
            result, told = {}, ""
            if i < len(lines):
                result = json.loads(lines[i])
                if target == "90a":
                    expected[weights, size] = result["codes"]
                same = result["codes"] == expected.get((weights, size))
                verdict, told = "sm_90a's" if same else "DIFFERENT", f"{result['ms']:.3f} ms"
            else:
                verdict = ([line for line in complaint.splitlines() if line] or [f"exit code {process.returncode}"])[-1]
            wrong += verdict != "sm_90a's"
            results.append({"target": target, "size": size, "weights": weights, "verdict": verdict, **result})
            print(f"sm_{target:5}{size:8}{weights:9}{told:>10}  {verdict}", flush=True)
    print(json.dumps({"machine": machine(), "commit": commit(), "results": results}))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
