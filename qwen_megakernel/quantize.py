"""`qwen-megakernel quantize`: a checkpoint with FP8 weights in the published layout.

The same folder with the same files; the quantised tensors are F8_E4M3, and each has its scales [N] beside it, F32,
under its own name and `_scale`. Voices saved for one of the two checkpoints fit the other.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from qwen_megakernel.checkpoint import Checkpoint
from qwen_megakernel.errors import CheckpointError
from qwen_megakernel.fp8 import SCALE, part_of, quantize

_INDEX = "model.safetensors.index.json"


def quantize_checkpoint(
    model: str | Path, out: Path, fp8: frozenset[str], tell: Callable[[str], None] = lambda _: None
) -> None:
    """Write `out`, a folder that is not there yet, or nothing.

    Args:
        model: folder, hub id or "demo".
        fp8: the parts that become E4M3 (`fp8.parts_of`).
        tell: hears of every file.

    Raises:
        CheckpointError: the checkpoint is unusable, has FP8 weights already, or `out` is there or cannot be written.
    """
    checkpoint = Checkpoint.open(model)
    if checkpoint.fp8:
        raise CheckpointError(f"{model} has FP8 weights already ({', '.join(sorted(checkpoint.fp8))})")
    if out.exists():
        raise CheckpointError(f"{out} is there already; name a folder that is not")
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        _write(checkpoint.folder, unfinished, fp8, tell)
        unfinished.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(folder: Path, out: Path, fp8: frozenset[str], tell: Callable[[str], None]) -> None:
    where: dict[str, str] = {}  # tensor -> file
    size = 0
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in files:
        target = out / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.parent != folder or path.suffix != ".safetensors":
            shutil.copyfile(path, target)
            continue
        tensors = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                if part_of(name) in fp8:
                    tensors[name], tensors[name + SCALE] = quantize(tensor)
                else:
                    tensors[name] = tensor
            save_file(tensors, target, file.metadata())
        where |= dict.fromkeys(tensors, path.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        tell(f"{path.name}  {path.stat().st_size / 1e9:.2f} -> {target.stat().st_size / 1e9:.2f} GB")
    if (out / _INDEX).is_file():
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        (out / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
