"""`qwen-megakernel quantize`: a checkpoint with FP8 weights in the published layout.

The new folder has the same files. The quantised tensors are F8_E4M3. Each one's scales, F32 [N], are stored under its
name plus `_scale`. A voice saved for one of the two checkpoints fits the other.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from qwen_megakernel.checkpoint.folder import new_folder
from qwen_megakernel.checkpoint.fp8 import quantize_parts
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.checkpoint.stored import INDEX, SINGLE
from qwen_megakernel.errors import CheckpointError


def quantize_checkpoint(
    model: str | Path, out: Path, fp8: frozenset[str], tell: Callable[[str], None] = lambda _: None
) -> None:
    """Write the folder `out`, completely or not at all. It must not exist; its parent must. `fp8` is the parts that
    become E4M3. `tell` is called with a line about every file. Raises CheckpointError: the checkpoint is unusable or
    already FP8, or `out` exists or cannot be written."""
    checkpoint = Checkpoint.open(model)
    if checkpoint.fp8:
        parts = ", ".join(sorted(checkpoint.fp8))
        raise CheckpointError(f"{model} has FP8 weights already ({parts}); quantise the one that it was made from")
    with new_folder(checkpoint, out) as made:
        _write(checkpoint, made, fp8, tell)


def _write(checkpoint: Checkpoint, out: Path, fp8: frozenset[str], tell: Callable[[str], None]) -> None:
    main, _ = checkpoint.files
    where: dict[str, str] = {}  # tensor -> file
    size = 0
    for path in main:
        with safe_open(path, framework="pt") as file:
            here = {name: place.name for name, place in checkpoint.main.items() if place.path == path}
            tensors = {name: file.get_tensor(stored) for name, stored in here.items()}
            quantize_parts(tensors, fp8)
            save_file(tensors, out / path.name, file.metadata())
        shutil.copymode(out / "config.json", out / path.name)  # safetensors makes files only their owner can read
        where |= dict.fromkeys(tensors, path.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        tell(f"{path.name}  {_size(path)} -> {_size(out / path.name)}")
    if len(main) > 1 or main[0].name != SINGLE:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
