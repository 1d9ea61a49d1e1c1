"""Every target's path of the frame kernel on a Hopper GPU: are its codes sm_90a's, and how long does a frame take?

    python benchmarks/emulate.py [--sizes 0.6b 1.7b demo] [--weights bf16 fp8] [--targets sm_86x64 ...] [--tests]

emulation.py says what this shows and what it does not. If a green context can confine it, a frame is also timed on as
many multiprocessors as the target's smallest card has. --tests also runs the kernel's and the engine's tests on every
target (an hour). The exit code is 1 if codes differ, a test fails, or a target cannot run.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from common import commit, machine
from emulation import EMULATED, confined, pretend
from measure_decode import Frames

from qwen_megakernel.backend import build
from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder
from qwen_megakernel.backend.targets import TARGETS
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.fp8 import quantized
from qwen_megakernel.checkpoint.load import DEMO_FOLDER
from qwen_megakernel.checkpoint.synthetic import random_talker, synthetic_config
from qwen_megakernel.choices import WEIGHTS
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.sampling_params import SamplingParams

OURS = "sm_90ax128"
FRAMES = 8
TESTS = ("test_megakernel.py", "test_vocoder.py", "test_fp8.py", "test_gpu.py", "test_follow.py", "test_pieces.py")
"""Files in tests/: what the kernels must do on every target."""


def say(kernel: MegakernelFrameDecoder, config: ModelConfig, rows: torch.Tensor) -> list[list[int]]:
    """Codes for short and long prompts, alone and two together."""
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


def child(name: str, cases: list[tuple[str, str]]) -> None:
    """Build that target's path, wait for a line on standard input, and print a line of JSON for each case."""
    target = pretend(name)
    for weights in {weights for weights, _ in cases}:
        build.load_extension(torch.device("cuda"), WEIGHTS[weights])
    sys.stdin.readline()
    for weights, size in cases:
        print(json.dumps(measure(size, weights, target.columns, target.multiprocessors)), flush=True)


def begin(name: str, cases: list[tuple[str, str]]) -> subprocess.Popen:
    command = [sys.executable, __file__, "--child", name, json.dumps(cases)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@torch.inference_mode()
def measure(size: str, weights: str, columns: int, multiprocessors: int) -> dict:
    """A hash of the codes, and the median of 60 frames around position 190. It is taken for one stream, for a full
    launch, and for one stream on the card's number of multiprocessors."""
    device = torch.device("cuda")
    config = ModelConfig.from_folder(DEMO_FOLDER) if size == "demo" else synthetic_config(size)
    tensors = quantized(random_talker(config, device, seed=3), WEIGHTS[weights])
    kernel = MegakernelFrameDecoder(config, tensors, slots=columns, max_positions=512)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(301, config.talker.stack.hidden_size, generator=generator).to(device).to(torch.bfloat16)
    said = hashlib.sha1(json.dumps(say(kernel, config, rows)).encode()).hexdigest()
    frames = Frames(kernel, config, SamplingParams(seed=1).over(config.sampling), checked=False)
    result = {"codes": said, "ms": float(frames.times_ms(1, 190, 60).median())}
    result |= {"columns": columns, "full_ms": float(frames.times_ms(columns, 190, 60).median())}
    torch.cuda.synchronize()
    with confined(multiprocessors) as is_confined:
        result["confined_ms"] = float(frames.times_ms(1, 190, 60).median()) if is_confined else None
    return result


def run_tests(name: str) -> str:
    """pytest's last line for the tests on a target's path."""
    folder = Path(__file__).parents[1] / "tests"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "ignore", *(str(folder / t) for t in TESTS)]
    done = subprocess.run(command, env=os.environ | {"EMULATE": name}, capture_output=True, text=True)
    return ([line for line in done.stdout.splitlines() if line] or [done.stderr])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["0.6b", "1.7b", "demo"], choices=("0.6b", "1.7b", "demo"))
    parser.add_argument("--weights", nargs="+", default=["bf16", "fp8"], choices=WEIGHTS)
    parser.add_argument("--targets", nargs="+", default=[name for name in EMULATED if name != OURS], choices=EMULATED)
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("TARGET", "CASES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], json.loads(args.child[1]))
        return 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("it needs a Hopper GPU")
    print(f"{machine()}, commit {commit()}")
    print(f"{'target':12}{'model':7}{'weights':9}{'1 stream':>10}{'full launch':>18}{'confined to':>20}  codes")
    cases = [(weights, size) for weights in args.weights for size in args.sizes]
    # They build at once and measure one by one.
    children = {name: begin(name, cases) for name in (OURS, *(t for t in args.targets if t != OURS))}
    expected, wrong, results = {}, 0, []
    for name, process in children.items():
        printed, complaint = process.communicate("\n")
        lines, target = printed.splitlines(), TARGETS[name]
        for i, (weights, size) in enumerate(cases):
            result, told = {}, ""
            if i < len(lines):
                result = json.loads(lines[i])
                if name == OURS:
                    expected[weights, size] = result["codes"]
                verdict = "sm_90a's" if result["codes"] == expected.get((weights, size)) else "DIFFERENT"
                alone = f"{result['confined_ms']:.3f} ms" if result["confined_ms"] else "cannot"
                told = f"{result['ms']:7.3f} ms{result['columns']:5} in {result['full_ms']:7.3f} ms"
                told += f"{target.multiprocessors:8}: {alone:>10}"
            else:
                verdict = ([line for line in complaint.splitlines() if line] or [f"exit code {process.returncode}"])[-1]
            wrong += verdict != "sm_90a's"
            results.append({"target": name, "size": size, "weights": weights, "verdict": verdict, **result})
            print(f"{name:12}{size:7}{weights:9}{told:48}  {verdict}", flush=True)
    tests = {name: run_tests(name) for name in children} if args.tests else {}
    for name, said in tests.items():
        wrong += "passed" not in said or "failed" in said or "error" in said
        print(f"{name:12}tests: {said}", flush=True)
    print(json.dumps({"machine": machine(), "commit": commit(), "results": results, "tests": tests}))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
