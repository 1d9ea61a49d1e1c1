"""`qwen-megakernel quantize` and `merge`: write a checkpoint that is made from another one, in the published layout.

Quantised tensors are F8_E4M3. Each one's scales, F32 [N], are stored under its name plus `_scale`. A merged checkpoint
has the same files, tensors and dtypes as its base. It speaks as the base does when it is loaded with the adapters. A
voice saved for a checkpoint fits the one made from it, and the other way round.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qwen_megakernel.checkpoint.fp8 import quantize_parts
from qwen_megakernel.checkpoint.load import CODEC_FOLDER, Checkpoint
from qwen_megakernel.checkpoint.stored import INDEX, SINGLE
from qwen_megakernel.errors import CheckpointError

_COPIED = (
    *("config.json", "configuration.json", "generation_config.json", "preprocessor_config.json"),
    *("tokenizer_config.json", "tokenizer.json", "vocab.json", "merges.txt", "README.md", "LICENSE"),
)
"""The files of a checkpoint and its speech tokenizer, except tensors. Other files are not copied."""


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
    main, _ = checkpoint.files
    where: dict[str, str] = {}  # tensor -> file
    size = 0
    with _new_folder(checkpoint, out) as made:
        for path in main:
            with safe_open(path, framework="pt") as file:
                here = {name: place.name for name, place in checkpoint.main.items() if place.path == path}
                tensors = {name: file.get_tensor(stored) for name, stored in here.items()}
                quantize_parts(tensors, fp8)
                save_file(tensors, made / path.name, file.metadata())
            shutil.copymode(made / "config.json", made / path.name)  # safetensors makes files for their owner alone
            where |= dict.fromkeys(tensors, path.name)
            size += sum(tensor.nbytes for tensor in tensors.values())
            tell(f"{path.name}  {_size(path)} -> {_size(made / path.name)}")
        if main[0].name != SINGLE:
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
            (made / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def merge_checkpoint(
    model: str | Path, adapters: Collection[str | Path], out: Path, tell: Callable[[str], None] = lambda _: None
) -> None:
    """Write the folder `out`, completely or not at all. It must not exist; its parent must. `tell` is called with a
    line about every adapter. Raises CheckpointError: the checkpoint or an adapter is unusable, or `out` exists or
    cannot be written."""
    checkpoint = Checkpoint.open(model, adapters)
    main, _ = checkpoint.files
    with _new_folder(checkpoint, out) as made:
        index = [checkpoint.folder / INDEX] if main[0].name != SINGLE else []
        for path in main + index:
            shutil.copyfile(path, made / path.name)
        for name, weight in checkpoint.adapted():  # one at a time; dtype and shape stay, so it fits its old place
            place = checkpoint.main[name]
            with (made / place.path.name).open("r+b") as file:
                file.seek(place.begin)
                file.write(weight.contiguous().view(torch.uint8).numpy().data)
        for adapter in checkpoint.adapters:
            tell(f"merged  {adapter.folder} into {len(adapter.scales)} layers")


@contextmanager
def _new_folder(checkpoint: Checkpoint, out: Path) -> Iterator[Path]:
    """Yields a folder beside `out` with everything but the main model's tensors and their index, which the caller adds.
    Afterwards it is checked as a checkpoint and gets the name `out`. Raises CheckpointError: `out` exists or cannot be
    written."""
    try:
        if os.path.lexists(out):
            raise CheckpointError(f"{out} exists already; name a new folder")
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out.parent) as unfinished:
            made = Path(unfinished) / out.name
            made.mkdir()
            _copy(checkpoint, made)
            yield made
            Checkpoint.open(made)  # check that the written files fit together
            made.rename(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _copy(checkpoint: Checkpoint, out: Path) -> None:
    (_, codec), tokenizer = checkpoint.files, Path(CODEC_FOLDER)
    (out / tokenizer).mkdir()
    copied = [tokenizer / path.name for path in codec] + [tokenizer / INDEX]
    copied += [folder / name for folder in (Path(), tokenizer) for name in _COPIED]
    for path in copied:
        if (checkpoint.folder / path).is_file():
            shutil.copyfile(checkpoint.folder / path, out / path)


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
