"""How long does one frame of 16 codes take, and how far is that from the hardware's floor?

    python benchmarks/measure_decode.py [--size 0.6b|1.7b] [--positions 200 2000] [--frames 200] [--stages] [--greedy]

Random weights at the published dims, sampling as published for both models (or --greedy), one stream. The floor is the
bytes of a frame (talker once, code predictor 15 times, heads) over the card's measured read bandwidth, 4.67 TB/s on an
H200.
"""

import argparse
import json
import subprocess

import torch

from qwen_megakernel.config import GREEDY, SamplingParams
from qwen_megakernel.frame_decoder import TorchFrameDecoder
from qwen_megakernel.megakernel import STAGES, MegakernelFrameDecoder
from qwen_megakernel.prompt import Prompt
from qwen_megakernel.synthetic import random_talker, synthetic_config
from qwen_megakernel.transformer import Embeddings

READ_TB_S = 4.67  # bulk copies of 16 KB by 128 blocks


def frame_bytes(tensors: dict) -> int:
    talker = predictor = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if "embedding" in name or "text_projection" in name:
            continue
        if "code_predictor" not in name:
            talker += size
        elif "lm_head" in name:
            predictor += size
        else:
            predictor += 15 * size
    return talker + predictor


def times_ms(step, frames: int) -> torch.Tensor:
    for _ in range(20):
        step()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(frames)]
    for start, end in events:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return torch.tensor([a.elapsed_time(b) for a, b in events])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b"), default="0.6b")
    parser.add_argument("--positions", type=int, nargs="+", default=[50, 200, 1000, 2000])
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--stages", action="store_true", help="also the kernel's own clock, stage by stage")
    args = parser.parse_args()
    device = torch.device("cuda")
    config = synthetic_config(args.size)
    tensors = random_talker(config, device, seed=torch.seed() % 2**31)
    sampling = (GREEDY if args.greedy else SamplingParams(seed=1)).over(config.sampling)
    limit = max(args.positions) + 64
    kernel = MegakernelFrameDecoder(config, tensors, slots=1, max_positions=limit)
    rows = torch.randn(2, config.talker.stack.hidden_size, device=device).to(torch.bfloat16)
    prompt = Prompt(rows, rows[:1], rows[0])
    floor = frame_bytes(tensors) / READ_TB_S * 1e-9
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    how = "greedy" if args.greedy else "sampled"
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit or 'unknown'}, {args.size}, {how}"
    )
    print(f"floor {floor:.3f} ms\n{'':28}  median ms   p95 ms   x floor")
    results = {}

    def report(label: str, t: torch.Tensor) -> None:
        median, p95 = float(t.median()), float(t.quantile(0.95))
        results[label] = {"median_ms": median, "p95_ms": p95, "x_floor": median / floor}
        print(f"{label:28}  {median:9.3f}  {p95:7.3f}  {median / floor:8.2f}")

    slot = kernel._slots[0]
    for position in args.positions:
        kernel.start(0, prompt, sampling)
        slot.position, slot.frame = position, 5
        slot.seen[: config.talker.first_suppressed_id] = 1  # a full history: every code is penalised
        report(f"kernel, position {position}", times_ms(lambda: kernel._launch(slot, slot.row), args.frames))
        assert int(kernel._fault) == 0 and 0 <= int(kernel._codes.min()) and int(kernel._codes.max()) < 3072
    if args.stages:
        stage_ns = torch.zeros(len(STAGES), dtype=torch.int64, device=device)
        for _ in range(args.frames):
            kernel._launch(slot, slot.row, stage_ns=stage_ns)
        stages = (stage_ns / args.frames / 1000).tolist()
        for name, us in zip(STAGES, stages, strict=True):
            print(f"  {name:26}  {us:9.1f} us  {us / sum(stages):6.1%}")
        results["stages_us"] = dict(zip(STAGES, stages, strict=True))
    report("kernel, prefill of one row", times_ms(lambda: kernel._launch(slot, slot.row, prefill=True), args.frames))
    eager = TorchFrameDecoder(config, tensors, Embeddings(config.talker, tensors), slots=1, max_positions=limit)
    eager.start(0, prompt, SamplingParams(seed=1).over(sampling))
    report("eager PyTorch bf16", times_ms(lambda: eager.decode(0), 15))
    print(
        json.dumps({"size": args.size, "floor_ms": floor, "commit": commit, "greedy": args.greedy, "results": results})
    )


if __name__ == "__main__":
    main()
