"""`qwen-megakernel merge`: a checkpoint with LoRA adapters merged, in the published layout.

The new folder has the same files, tensors and dtypes. It speaks as the checkpoint does when it is loaded with the
adapters. A voice saved for one of the two fits the other.
"""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from qwen_megakernel.checkpoint.folder import new_folder
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.checkpoint.stored import INDEX, SINGLE


def merge_checkpoint(
    model: str | Path, adapters: Collection[str | Path], out: Path, tell: Callable[[str], None] = lambda _: None
) -> None:
    """Write the folder `out`, completely or not at all. It must not exist; its parent must. `tell` is called with a
    line about every adapter. Raises CheckpointError: the checkpoint or an adapter is unusable, or `out` exists or
    cannot be written."""
    checkpoint = Checkpoint.open(model, adapters)
    with new_folder(checkpoint, out) as made:
        main, _ = checkpoint.files
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
