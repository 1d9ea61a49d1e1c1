"""The list of tensors in a safetensors file, read before the tensors themselves."""

import json
import struct
from pathlib import Path

from qwen_megakernel.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own bound


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of one safetensors file, whose length must agree with its header. Raises CheckpointError:
    it is no such file, or is cut off or padded. OSError: it cannot be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: not a safetensors file, or cut off ({size} bytes); get it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: (t["dtype"], tuple(t["shape"])) for name, t in header.items()}
            end = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise CheckpointError(f"{path}: broken safetensors header; get the file again") from None
    if size != end:
        raise CheckpointError(f"{path}: cut off or padded: {end} bytes expected, found {size}; get it again")
    return tensors
