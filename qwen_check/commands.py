"""`qwen-megakernel verify`, `bench` and `doctor`."""

import argparse

from qwen_check import bench as benchmark
from qwen_check import doctor as examination
from qwen_check.verify import verify as verify_checkpoint
from qwen_megakernel.choices import parts_of
from qwen_megakernel.errors import RequestError


def verify(args: argparse.Namespace) -> int:
    names = ("backend", "device", "weights", "output", "frames", "seed", "ref_audio", "ref_text")
    return 0 if verify_checkpoint(args.model, **{name: getattr(args, name) for name in names}) else 1


def bench(args: argparse.Namespace) -> int:
    benchmark.run(args.model, size=args.size, backend=args.backend, device=args.device, weights=args.weights)
    return 0


def doctor(args: argparse.Namespace) -> int:
    if not args.check and (args.size is not None or args.weights is not None):
        raise RequestError("--size and --weights need --check: give --check too")
    fp8 = parts_of(args.weights or "bf16")
    return examination.run(check=args.check, size=args.size or "0.6b", fp8=fp8, as_json=args.json)
