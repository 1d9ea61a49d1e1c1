"""Which file of a checkpoint holds which tensor, checked by the files' headers before any weight is read.

A tensor that is needed must be there once, with the shape that config.json implies. Others are left out, as in the
reference implementation. Known kinds are counted in the log, unknown ones are named in a warning.
"""

import json
import logging
import os
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen_megakernel.checkpoint.foreign import kind_of_files, kind_of_tensors
from qwen_megakernel.checkpoint.fp8 import SCALE, part_of
from qwen_megakernel.checkpoint.json_object import MOST_TABLE_BYTES, read_json
from qwen_megakernel.checkpoint.tensors import Shapes
from qwen_megakernel.errors import CheckpointError
from spoken_text.files import open_file

log = logging.getLogger(__name__)

_DTYPES = ("BF16", "F16", "F32", "F64")
_FP8 = "F8_E4M3"
_PREFIX = "model."  # transformers strips it from every name, if they all have it

_PARTS = frozenset({"talker", "speaker_encoder", "speech_tokenizer", "encoder", "decoder"})
"""The parts of a model, which begin its tensors' names."""

_LEFT_OUT = {
    "buffers": r"(.*\.)?((original_)?inv_freq|cos_cached|sin_cached|position_ids|num_batches_tracked)",
    "of a training": r"(optimizer|lr_scheduler|scheduler|scaler|ema|rng_state)[._].*",
}
"""Kinds of tensors that speech does not need -> what their names look like."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_SHOWN = 5  # names in one line


MOST_HEADER_BYTES = 2**24  # of safetensors; the published ones have 100 KB


class StoredTensor(NamedTuple):
    """A tensor by its file's header."""

    path: Path
    name: str  # as the file spells it
    dtype: str
    shape: tuple[int, ...]
    begin: int  # of its bytes in the file


Where = Mapping[str, StoredTensor]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file by name. The file's length must agree with its header. Raises
    CheckpointError: it cannot be read, is no such file, or is cut off or padded."""
    try:
        with open_file(path, "safetensors") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
                raise CheckpointError(f"{path}: not a safetensors file, or cut off ({size} bytes); get it again")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    begin = 8 + length
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(path, name, t["dtype"], tuple(t["shape"]), begin + t["data_offsets"][0])
            for name, t in header.items()
        }
        end = begin + max((t["data_offsets"][1] for t in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise CheckpointError(f"{path}: broken safetensors header; get the file again") from None
    if size != end:
        raise CheckpointError(f"{path}: cut off or padded: {end} bytes expected, found {size}; get it again")
    return tensors


@contextmanager
def opened(path: Path, device: str = "cpu") -> Iterator[Any]:
    """A safetensors file whose tensors can be read onto `device`. Raises CheckpointError, here or where a tensor is
    read: it cannot be read."""
    try:
        with safe_open(path, framework="pt", device=device) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Headers:
    """The tensors of a folder by the headers of its safetensors files."""

    folder: Path
    tensors: dict[str, StoredTensor]

    @classmethod
    def read(cls, folder: Path) -> "Headers":
        """Raises CheckpointError: a file is missing or broken, or two hold the same tensor."""
        tensors: dict[str, StoredTensor] = {}
        for path in _safetensors_files(folder):
            for name, tensor in read_header(path).items():
                if name in tensors:
                    raise CheckpointError(f"{path}: tensor {name!r} is also in {tensors[name].path.name}")
                tensors[name] = tensor
        if tensors and all(name.startswith(_PREFIX) for name in tensors):
            tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
        return cls(folder, tensors)

    @property
    def kind(self) -> str | None:
        """The known foreign format that they are of; None: there is none."""
        metadata: dict[str, str] = {}
        for path in {tensor.path for tensor in self.tensors.values()}:
            with suppress(CheckpointError), opened(path) as file:
                metadata |= file.metadata() or {}
        return kind_of_tensors(self.tensors, metadata)

    def check(self, expected: Shapes) -> Where:
        """The tensors that are needed, and the scales of quantised ones. Raises CheckpointError: one
        is missing, misshaped or of another dtype."""
        try:
            return self._check(expected)
        except CheckpointError as error:
            if kind := self.kind:
                raise CheckpointError(f"{self.folder}: {kind}") from error
            raise

    def _check(self, expected: Shapes) -> Where:
        quantized = {name for name, tensor in self.tensors.items() if tensor.dtype == _FP8 and part_of(name)}
        parts = {part_of(name) for name in quantized}  # (fp8.PARTS); each is quantised as a whole or not at all
        for name in expected:
            if part_of(name) in parts and name in self.tensors and name not in quantized:
                other = next(n for n in sorted(quantized) if part_of(n) == part_of(name))
                raise CheckpointError(
                    f"{self.folder}: {other!r} is {_FP8} and {name!r} is {self.tensors[name].dtype}: quantise all of a "
                    "part, or none"
                )
        expected = expected | {name + SCALE: expected[name][:1] for name in quantized & expected.keys()}
        parts_read = {name.partition(".")[0] for name in expected}
        extra = {name: _left_out(name, parts_read) for name in sorted(self.tensors.keys() - expected.keys())}
        missing = [name for name in expected if name not in self.tensors]
        if missing:
            more = f" is missing, and {len(missing) - 1} more" if len(missing) > 1 else " is missing"
            unknown = [name for name, kind in extra.items() if kind is None]
            others = f"; it has others, such as {unknown[0]!r}" if unknown else ""
            raise CheckpointError(f"{self.folder}: tensor {missing[0]!r} {list(expected[missing[0]])}{more}{others}")
        for name, shape in expected.items():
            found = self.tensors[name]
            if found.shape != shape:
                raise CheckpointError(
                    f"{found.path}: tensor {name!r}: expected shape {list(shape)}, found {list(found.shape)}"
                )
            allowed = (_FP8,) if name in quantized else ("F32",) if name.endswith(SCALE) else _DTYPES
            if found.dtype not in allowed:
                raise CheckpointError(
                    f"{found.path}: tensor {name!r}: expected dtype {' or '.join(allowed)}, found {found.dtype}"
                )
        if scale := next((n for n in extra if n.removesuffix(SCALE) in expected), None):
            raise CheckpointError(f"{self.folder}: {scale!r} is there, but its weight is not {_FP8}: quantise it again")
        self._tell(extra)
        return {name: self.tensors[name] for name in expected}

    def _tell(self, extra: Mapping[str, str | None]) -> None:
        """Log what is left out: tensor -> its kind."""
        counts = Counter(kind for kind in extra.values() if kind)
        if counts:
            told = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            log.info("%s: left out tensors that speech does not need: %s", self.folder, told)
        unknown = [name for name, kind in extra.items() if kind is None]
        if unknown:
            more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
            log.warning("%s: left out unknown tensors: %s%s", self.folder, ", ".join(unknown[:_SHOWN]), more)


def _left_out(name: str, parts_read: Collection[str]) -> str | None:
    """The kind of a tensor that speech is known not to need; None: unknown. `parts_read`: of _PARTS."""
    if name.partition(".")[0] in _PARTS.difference(parts_read):
        return "of other parts"
    return next((kind for kind, form in _LEFT_OUT.items() if re.fullmatch(form, name)), None)


def _safetensors_files(folder: Path) -> list[Path]:
    """The single file, or the shards that the index names. A name must be plain, so that no path leaves the folder.

    A fine-tune is saved as a single file into a copy of its Base, which may still hold shards and an index. So the
    single file wins, as in transformers.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        kind = kind_of_files(folder) if folder.is_dir() else None
        raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX} is there" + (f"; {kind}" if kind else ""))
    try:
        names = sorted(set(read_json(index, MOST_TABLE_BYTES).get("weight_map", dict).values()))
    except TypeError:  # names of several kinds, or lists
        raise CheckpointError(f"{index}: not a valid index: weight_map must hold names of files") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: shard {name!r} must be the plain name of a .safetensors file")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: shard named by {index.name} is missing")
    return [folder / name for name in names]


def read_tensors(
    where: Where, names: Iterable[str], device: torch.device, dtype: torch.dtype, as_stored: Collection[str] = ()
) -> dict[str, Tensor]:
    """Read tensors by name. `dtype`: of all that are not in `as_stored`. On a CPU they are copied: a mapped file would
    be read at first use, and whoever writes over it would change what is spoken, or end the process by SIGBUS. Raises
    CheckpointError: a file cannot be read."""
    tensors: dict[str, Tensor] = {}
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(where[name].path, []).append(name)
    for path, in_file in by_file.items():
        with opened(path, str(device)) as file:
            for name in in_file:
                tensor = file.get_tensor(where[name].name)
                tensors[name] = tensor.to(tensor.dtype if name in as_stored else dtype, copy=device.type == "cpu")
    return tensors
