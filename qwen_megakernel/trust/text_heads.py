"""Which head of a checkpoint's talker follows the text. An engine finds it once; it is kept beside the verdicts."""

import hashlib
import json
import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path

from qwen_megakernel.checkpoint.config import TextHead, text_head_of
from qwen_megakernel.checkpoint.json_object import read_json
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.engine.text_path import HeadFinder
from qwen_megakernel.errors import CheckpointError
from qwen_megakernel.files import check_own, own_folder
from qwen_megakernel.trust.verdicts import folder, write

log = logging.getLogger(__name__)


def finder_of(model: str, checkpoint: Checkpoint) -> HeadFinder:
    """Knows the head that the checkpoint names, or that was found before. Otherwise it looks for one, but not in random
    weights: their speech ends by chance. `model`: the checkpoint's name, for messages."""
    if checkpoint.config.text_head or checkpoint.config.random_weights:
        return HeadFinder(checkpoint.config.text_head)
    who = [checkpoint.fingerprint, *(str(adapter.folder) for adapter in checkpoint.adapters)]
    path = folder() / f"text_head_{hashlib.sha256(json.dumps(who).encode()).hexdigest()[:16]}.json"
    if kept := _read(path):
        log.info("word times of %s", _told(model, kept[1]))
        return HeadFinder(kept[1])
    return HeadFinder(keep=partial(_keep, path, model))


def told() -> list[str]:
    """What was found of each checkpoint, in words."""
    return [_told(*kept) for path in sorted(folder().glob("text_head_*.json")) if (kept := _read(path))]


def _told(model: str, head: TextHead | None) -> str:
    if not head:
        return f"{model}: estimated, because no head of its talker follows the text"
    where = f"head {head.head} of layer {head.layer} follows the text, which is heard {head.offset_s:.2f} s later"
    return f"{model}: measured, because {where}"


def _read(path: Path) -> tuple[str, TextHead | None] | None:
    """The checkpoint's name, and its head. None: there is no file, or it cannot be used, which a warning reports."""
    try:
        if not path.exists():
            return None
        with own_folder(path.parent) as own:
            check_own(own / path.name, path)
            js = read_json(own / path.name)
        return js.get("model", str), text_head_of(js.child("head")) if js.raw.get("head") else None
    except (CheckpointError, OSError) as error:
        log.warning("%s cannot be used and is ignored: %s", path, error)
        return None


def _keep(path: Path, model: str, head: TextHead | None) -> None:
    log.info("word times of %s", _told(model, head))
    try:
        with own_folder(path.parent) as own:
            write(own / path.name, json.dumps({"model": model, "head": asdict(head) if head else None}))
    except OSError as error:
        log.warning("%s cannot be saved, so the next engine looks for the head again: %s", path, error)
