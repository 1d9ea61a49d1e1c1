"""`qwen-megakernel build`, `quantize`, `merge` and `synthetic`."""

import argparse
import time
from pathlib import Path

from safetensors import SafetensorError

from qwen_megakernel.backend.build import load_extension
from qwen_megakernel.backend.select import select_device
from qwen_megakernel.checkpoint.derive import merge_checkpoint, quantize_checkpoint
from qwen_megakernel.checkpoint.synthetic import write_checkpoint
from qwen_megakernel.choices import parts_of
from qwen_megakernel.errors import BackendError, CheckpointError


def build(args: argparse.Namespace) -> int:
    device, start = select_device("cuda"), time.monotonic()
    folder = Path(str(load_extension(device, parts_of(args.weights)).__file__)).parent
    print(f"ready   in {time.monotonic() - start:.1f} s\ncached  in {folder}")
    return 0


def quantize(args: argparse.Namespace) -> int:
    fp8 = parts_of(args.weights)
    if not fp8:
        raise BackendError("--weights bf16 quantises nothing: give fp8, or parts of it")
    quantize_checkpoint(args.model, args.output, fp8, print)
    print(f"wrote   {args.output.resolve()}")
    return 0


def merge(args: argparse.Namespace) -> int:
    merge_checkpoint(args.model, args.adapters, args.output, print)
    print(f"wrote   {args.output.resolve()}")
    return 0


def synthetic(args: argparse.Namespace) -> int:
    folder = args.output
    try:
        folder.mkdir()
        # Its speech ends after about a second.
        write_checkpoint(folder, size=args.size, variant=args.variant, seed=args.seed, eos_gain=4.0)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{folder} cannot be written: {why}; name a new folder") from None
    print(f"wrote   {folder.resolve()}: random weights, so what it says is noise")
    return 0
