"""Writes a checkpoint that was made from another one, as a folder of its own in the published layout."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from qwen_megakernel.checkpoint.load import CODEC_FOLDER, Checkpoint
from qwen_megakernel.checkpoint.stored import INDEX
from qwen_megakernel.errors import CheckpointError

_COPIED = (
    *("config.json", "configuration.json", "generation_config.json", "preprocessor_config.json"),
    *("tokenizer_config.json", "tokenizer.json", "vocab.json", "merges.txt", "README.md", "LICENSE"),
)
"""The files of a checkpoint and its speech tokenizer, except tensors. Other files are not copied."""


@contextmanager
def new_folder(checkpoint: Checkpoint, out: Path) -> Iterator[Path]:
    """Write the folder `out`, completely or not at all. It must not exist; its parent must. Yields a folder beside it
    with everything but the main model's tensors and their index, which the caller adds. Afterwards it is checked as a
    checkpoint and gets its name. Raises CheckpointError: `out` exists or cannot be written."""
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
