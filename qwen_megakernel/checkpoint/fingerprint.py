"""Tells which checkpoint made a voice, so that no voice is used with encoders that did not make it."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwen_megakernel.checkpoint.codec_config import ENCODER_KEYS
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.json_object import MOST_CONFIG_BYTES, read_text
from qwen_megakernel.checkpoint.stored import Where, opened

_HEX = 16  # digits of each part
_TALKER = ("talker.model.norm.weight", "talker.model.codec_embedding.weight")
_ROWS = 8  # first rows of each of them


def fingerprints_of(folder: Path, config: ModelConfig, main: Where, codec: Where) -> tuple[str, str]:
    """A checkpoint's fingerprint, and the one that versions before 0.3 gave it.

    The first has two parts: of what makes a voice (speaker encoder, codec encoder, their sizes), and of the talker, in
    which fine-tunes differ. The second is over config.json's bytes and the talker. `main`, `codec`: where tensors are.
    Values count as fp32, so that a copy in another dtype that holds them exactly is the same checkpoint. Raises
    CheckpointError: a file cannot be read."""
    speaker = config.speaker_encoder
    sizes: dict[str, Any] = {"groups": config.talker.num_code_groups, "hidden": config.talker.stack.hidden_size}
    sizes |= {"speaker": asdict(speaker) if speaker else None, "rate": config.codec.sample_rate}
    sizes |= {key: config.codec.encoder[key] for key in ENCODER_KEYS}
    encoders, talker = hashlib.sha256(repr(sorted(sizes.items())).encode()), hashlib.sha256()
    for part in _values(main, sorted(n for n in main if n.startswith("speaker_encoder."))):
        encoders.update(part)
    # Three slices of each: all of the codec encoder's 166 MB would take 0.2 s at each load.
    for part in _values(codec, sorted(n for n in codec if n.startswith("encoder.")), slices=True):
        encoders.update(part)
    old = hashlib.sha256(read_text(folder / "config.json", MOST_CONFIG_BYTES).encode())
    for part in _values(main, _TALKER, rows=_ROWS):
        talker.update(part)
        old.update(part)
    of_encoders, of_talker, before = (digest.hexdigest()[:_HEX] for digest in (encoders, talker, old))
    return f"{of_encoders}.{of_talker}", before


def _values(where: Where, names: Iterable[str], *, slices: bool = False, rows: int | None = None) -> Iterator[bytes]:
    """Values of tensors: all, or their first rows, or the first, the middle and the last one."""
    for name in names:
        with opened(where[name].path) as file:
            tensor = file.get_slice(where[name].name)
            size = (tensor.get_shape() or [1])[0]
            cuts = sorted({0, size // 2, size - 1}) if slices else [0]
            for first in cuts:
                part = tensor[first : first + 1 if slices else rows]
                yield part.float().numpy().tobytes()
