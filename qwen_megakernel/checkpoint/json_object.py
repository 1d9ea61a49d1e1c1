"""Reads the JSON files of a checkpoint. Errors name the key that is missing or wrong."""

import json
import math
import reprlib
from pathlib import Path
from typing import Any

from qwen_megakernel.errors import CheckpointError
from spoken_text.files import read_file

MOST, MOST_LAYERS, MOST_LISTED = 2**24, 1024, 16
"""Limits for a checkpoint: the largest dim, the largest count of layers or the like, the longest list of sizes. They
keep a file's bogus numbers from allocating memory."""

MOST_CONFIG_BYTES, MOST_TABLE_BYTES = 2**20, 2**25
"""Limits of a JSON file: one of settings (the published ones have 5 KB), and one of tokens or of tensors' names (the
largest has 11 MB)."""


class JsonObject:
    """A JSON object that knows its file, so that an error can name the file and the key.

    Methods that read a key raise CheckpointError: the key is missing without a default, or its value is of the wrong
    kind or out of range.
    """

    def __init__(self, value: Any, where: str):
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: expected an object, found {type(value).__name__}")
        self.raw: dict = value
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.raw

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        if key not in self.raw:
            if default is ...:
                raise CheckpointError(f"{self.where}: key {key!r} is missing")
            return default
        value = self.raw[key]
        if value is None and default is None:
            return None
        number = kind in (int, float)
        if isinstance(value, bool) and number:
            raise CheckpointError(f"{self.where}: {key} must be a number, found {value}")
        if kind is float and isinstance(value, int) and abs(value) < 2**63:
            value = float(value)
        if not isinstance(value, kind):
            raise CheckpointError(f"{self.where}: {key} must be {kind.__name__}, found {reprlib.repr(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(f"{self.where}: {key} must be finite, found {value!r}")
        return value

    def size(self, key: str, default: Any = ..., least: int = 1, most: int = MOST) -> int:
        value = self.get(key, int, default)
        if not least <= value <= most:
            raise CheckpointError(f"{self.where}: {key} must be in {least}..{most}, found {value}")
        return value

    def sizes(self, key: str, default: Any = ...) -> tuple[int, ...]:
        value = self.get(key, list, default)
        if not 1 <= len(value) <= MOST_LISTED or not all(type(v) is int and 0 < v <= MOST for v in value):
            wanted = f"1 to {MOST_LISTED} integers in 1..{MOST}"
            raise CheckpointError(
                f"{self.where}: {key} must list {wanted}, found {len(value)}: {value[:MOST_LISTED]!r}"
            )
        return tuple(value)

    def positive(self, key: str, default: Any = ...) -> float:
        value = self.get(key, float, default)
        if not value > 0:
            raise CheckpointError(f"{self.where}: {key} must be above 0, found {value}")
        return value

    def child(self, key: str) -> "JsonObject":
        return JsonObject(self.get(key, dict), f"{self.where}: {key}")

    def require_model_type(self, expected: str) -> None:
        """Refuse the config of another kind of model."""
        self.get("model_type", str)
        self.only("model_type", expected)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a setting that this implementation does not follow. A key that is missing is fine."""
        if key in self.raw and self.raw[key] not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise CheckpointError(f"{self.where}: {key} must be {wanted}, found {reprlib.repr(self.raw[key])}")


def read_text(path: Path, most: int) -> str:
    """Read a file of a checkpoint, of at most `most` bytes in UTF-8. Raises CheckpointError: it is missing, unreadable
    or too large."""
    try:
        return read_file(path, "a checkpoint's text", most).decode("utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file is missing; a checkpoint folder needs every published file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def read_json(path: Path, most: int = MOST_CONFIG_BYTES) -> JsonObject:
    """Read one JSON file of a checkpoint, which must hold an object. Raises CheckpointError: as `read_text`, or it is
    invalid JSON or holds something else."""
    text = read_text(path, most)
    try:
        return JsonObject(json.loads(text), str(path))
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
