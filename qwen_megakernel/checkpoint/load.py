"""Find a checkpoint, check every tensor's name, shape and dtype, and load it. Safetensors only.

A checkpoint is a folder in the published Qwen3-TTS 12 Hz layout:

    config.json  generation_config.json
    vocab.json  merges.txt       or tokenizer.json, which wins
    model.safetensors            or model.safetensors.index.json with its shards; the single file wins
    speech_tokenizer/config.json  speech_tokenizer/model.safetensors

tensors.py derives the complete table of names and shapes from config.json. A tensor that is missing or misshaped is
refused by name before anything is computed with it. Tensors that are not in the table are left out (stored.py).
"""

import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from qwen_megakernel.checkpoint import foreign
from qwen_megakernel.checkpoint.adapters import Adapter, adapter_folders, merged
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.fingerprint import fingerprints_of
from qwen_megakernel.checkpoint.fp8 import SCALE, dequantize, flaw, part_of, parts_in, quantize_parts
from qwen_megakernel.checkpoint.stored import INDEX, Headers, Where, read_tensors
from qwen_megakernel.checkpoint.tensors import TEXT_TABLE, expected_tensors, talker_tensors
from qwen_megakernel.choices import DEMO, PUBLISHED
from qwen_megakernel.errors import CheckpointError, CheckpointNotFoundError
from spoken_text.files import read_file

log = logging.getLogger(__name__)

DEMO_FOLDER = Path(__file__).parents[1] / "demo_voice"
CODEC_FOLDER = "speech_tokenizer"
HUB_FILES = (
    *("config.json", "generation_config.json", "vocab.json", "merges.txt", "tokenizer.json"),
    *("*.safetensors", INDEX),
    *(f"{CODEC_FOLDER}/{name}" for name in ("config.json", "*.safetensors", INDEX)),
    # Only the reference implementation reads these; `qwen-megakernel verify` gives it the same folder.
    *("preprocessor_config.json", "tokenizer_config.json", f"{CODEC_FOLDER}/preprocessor_config.json"),
)
_MOST_NAME_BYTES = 1000  # of the file that names a snapshot
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose names, shapes and dtypes were checked; tensors are read on demand."""

    folder: Path  # holds its files
    config: ModelConfig  # the content of its JSON files
    fp8: frozenset[str]  # parts (fp8.PARTS) that are stored as E4M3
    fingerprint: str
    """A saved `Voice` carries it, so that a voice is not used with other encoders. Adapters do not change it, because
    they leave the encoders alone."""
    old_fingerprint: str  # what versions before 0.3 wrote into voices
    main: Where = field(repr=False)  # where each tensor of the main model is stored
    codec: Where = field(repr=False)  # where each tensor of the speech tokenizer is stored
    adapters: tuple[Adapter, ...] = ()  # LoRA adapters that are merged into the result of `talker`, in this order

    @classmethod
    def open(cls, model: str | Path, adapters: Collection[str | Path] = ()) -> "Checkpoint":
        """Find `model` (folder, hub id or "demo") and check it, then check the adapters, which are folders of LoRA
        adapters (adapters.py). Its tensors are not read yet. Raises CheckpointNotFoundError: there is nothing under
        that name. CheckpointError: its files or an adapter do not fit; the message names the first misfit."""
        folder = find_checkpoint(model)
        try:
            checkpoint = cls._open_folder(folder)
        except CheckpointError as error:
            if str(model) == DEMO or Path(model).expanduser().is_dir():
                raise
            raise CheckpointError(
                f"{error}. This is the hub cache's copy of {model}; "
                f"if its download was interrupted, run: hf download {model}"
            ) from error
        return checkpoint.with_adapters(adapters)

    def with_adapters(self, adapters: Collection[str | Path]) -> "Checkpoint":
        """The same checkpoint with these LoRA adapters instead of its own. Raises CheckpointError: one does not fit."""
        folders = adapter_folders(adapters)
        table = talker_tensors(self.config.talker) if folders else {}
        opened = tuple(Adapter.open(folder, table) for folder in folders)
        for adapter in opened:
            for name in adapter.scales:
                if part_of(name) in self.fp8:
                    raise CheckpointError(
                        f"{adapter.folder}: {name!r} is FP8 in {self.folder}, and an adapter cannot be merged into "
                        "FP8 weights; load the bf16 checkpoint with the adapter and weights='fp8'"
                    )
            log.debug("adapter %s: merged into %d layers", adapter.folder, len(adapter.scales))
        return replace(self, adapters=opened)

    @classmethod
    def _open_folder(cls, folder: Path) -> "Checkpoint":
        try:
            config = ModelConfig.from_folder(folder)
        except CheckpointError as error:
            if kind := _kind_of(folder):
                raise CheckpointError(f"{folder}: {kind}") from error
            raise
        main, codec = expected_tensors(config)
        places = Headers.read(folder).check(main)
        codec_places = Headers.read(folder / CODEC_FOLDER).check(codec)
        now, old = fingerprints_of(folder, config, places, codec_places)
        return cls(folder, config, parts_in(places), now, old, places, codec_places)

    def origin(self, fingerprint: str) -> str | None:
        """Where a voice with this fingerprint comes from, in words. None: from a checkpoint with other encoders."""
        if fingerprint == self.fingerprint:
            return "made by this checkpoint"
        if fingerprint == self.old_fingerprint:
            return "made by this checkpoint, with a version before 0.3"
        if fingerprint.partition(".")[0] == self.fingerprint.partition(".")[0]:
            return "made by another checkpoint with the same encoders, such as a fine-tune"
        return None

    def talker(self, device: torch.device, dtype: torch.dtype, fp8: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """Every `talker.*` tensor by name. The text embeddings stay on the CPU, because they are a third of all bytes
        and a text needs only a few rows. Adapters are merged before anything is quantised. `dtype`: of everything that
        is not FP8. Stored FP8 tensors that are not in `fp8` are dequantised into it. `fp8`: parts (fp8.PARTS) that are
        returned as float8_e4m3fn with scales. They are quantised now unless they are stored that way. Raises
        CheckpointError: a stored scale or FP8 weight is not finite, or a weight cannot be quantised or merged."""
        table, cpu = TEXT_TABLE, torch.device("cpu")
        names = [name for name in self.main if name.startswith("talker.") and name not in (table, *self._adapted)]
        parts = fp8 | self.fp8
        as_stored = {name for name in names if part_of(name.removesuffix(SCALE)) in parts}
        tensors = read_tensors(self.main, names, device, dtype, as_stored)
        for name in [name.removesuffix(SCALE) for name in names if name.endswith(SCALE)]:
            wrong = flaw(tensors[name], tensors[name + SCALE])
            if wrong:
                raise CheckpointError(f"{self.main[name].path}: tensor {name!r}: {wrong}")
            if part_of(name) not in fp8:
                tensors[name] = dequantize(tensors[name], tensors.pop(name + SCALE), dtype)
        for name, weight in self.adapted():
            tensors[name] = weight.to(device, weight.dtype if part_of(name) in fp8 else dtype)
        quantize_parts(tensors, fp8)
        return tensors | read_tensors(self.main, [table], cpu, dtype)

    def adapted(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that adapters change, by name: merged one by one, on the CPU, in the dtype that is stored. Raises
        CheckpointError: one cannot be read or merged."""
        cpu, names = torch.device("cpu"), sorted(self._adapted)
        stored = ((name, read_tensors(self.main, [name], cpu, torch.float32, [name])[name]) for name in names)
        return merged(stored, self.adapters)

    @property
    def _adapted(self) -> set[str]:
        return {name for adapter in self.adapters for name in adapter.scales}

    @property
    def files(self) -> tuple[list[Path], list[Path]]:
        """The files with tensors of the main model, and those of the speech tokenizer."""
        main, codec = (sorted({place.path for place in where.values()}) for where in (self.main, self.codec))
        return main, codec

    def speaker_encoder(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every `speaker_encoder.*` tensor (Base checkpoints; empty for the others)."""
        return read_tensors(self.main, (n for n in self.main if n.startswith("speaker_encoder.")), device, dtype)

    def vocoder(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every `decoder.*` tensor of the speech tokenizer."""
        return read_tensors(self.codec, (n for n in self.codec if n.startswith("decoder.")), device, dtype)

    def codec_encoder(self) -> dict[str, Tensor]:
        """Every `encoder.*` tensor of the speech tokenizer, fp32 on the CPU, without the prefix."""
        names = [n for n in self.codec if n.startswith("encoder.")]
        tensors = read_tensors(self.codec, names, torch.device("cpu"), torch.float32)
        return {name.removeprefix("encoder."): tensor for name, tensor in tensors.items()}


def find_checkpoint(model: str | Path) -> Path:
    """The folder of `model`: "demo" (bundled), an existing folder, or a hub id, which is downloaded.

    Downloads go through huggingface_hub: its cache, its progress bars and its variables (HF_HOME,
    HF_HUB_OFFLINE, HF_TOKEN) apply. Only JSON, tokenizer text and safetensors files are fetched. Raises
    CheckpointNotFoundError, which says what was looked for, where, and which command gets it.
    """
    return _local(model) or _download(str(model))


def find_cached(model: str | Path) -> Path | None:
    """The folder of `model` if it is on this machine, else None. Uses no network. Raises CheckpointNotFoundError: it is
    neither a folder nor a hub id."""
    folder = _local(model)
    if folder is None:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(str(model), "config.json")
        folder = Path(config).parent if isinstance(config, str) else None
    return folder


def name_of_model(model: str) -> str:
    """The name to show: a folder's name without the path, or the hub id, or "demo"."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _local(model: str | Path) -> Path | None:
    """The folder of a path or of the bundled voice; None for a hub id."""
    if not isinstance(model, (str, Path)) or not str(model).strip():
        raise CheckpointNotFoundError(f"model must be a folder, a hub id or {DEMO!r}, got {model!r}")
    if str(model) == DEMO:
        return DEMO_FOLDER
    try:
        path = Path(model).expanduser()
        found, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a NUL, of an unknown user
        raise CheckpointNotFoundError(f"model {str(model)[:99]!r} cannot be a folder: {error}") from None
    if is_folder:
        return _with_config(path)
    if found:
        kind = foreign.kind_of_file(path)
        raise CheckpointNotFoundError(kind or f"{path} is a file; a checkpoint is a folder that holds config.json")
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise CheckpointNotFoundError(
            f"no folder {str(model)!r}. Give a checkpoint folder, {DEMO!r}, or a hub id such as {PUBLISHED[1]!r}"
        )
    return None


def _with_config(folder: Path) -> Path:
    """The folder itself, or the snapshot in it, if it is the hub cache's folder of a model. Raises
    CheckpointNotFoundError: it has no config.json, but something in it or beside it says what was meant."""
    try:
        if (folder / "config.json").is_file():
            return folder
        snapshots = folder / "snapshots" if (folder / "snapshots").is_dir() else folder
        inside = sorted(path.parent for path in snapshots.glob("*/config.json") if path.parent.name != CODEC_FOLDER)
        main = snapshots.parent / "refs" / "main"
        if snapshots.name == "snapshots" and len(inside) > 1 and main.is_file():
            named = read_file(main, "a name of a revision", _MOST_NAME_BYTES).decode(errors="replace").strip()
            inside = [path for path in inside if path.name == named] or inside
        if (folder / "adapter_config.json").is_file():
            raise CheckpointNotFoundError(
                f"{folder} is a LoRA adapter: give its base as model, and this folder as adapter (adapters=[...])"
            )
    except OSError as error:
        raise CheckpointNotFoundError(f"{folder} cannot be read: {error.strerror}") from None
    if snapshots.name == "snapshots" and len(inside) == 1:
        return inside[0]
    if inside:
        names = " or ".join(repr(path.name) for path in inside[:3])
        raise CheckpointNotFoundError(f"{folder} has no config.json; name the checkpoint inside it: {names}")
    return folder


def _download(repo_id: str) -> Path:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(HUB_FILES)))
    except HFValidationError as error:
        raise CheckpointNotFoundError(f"{repo_id!r} is neither a folder nor a valid hub id: {error}") from None
    except LocalEntryNotFoundError as error:
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise CheckpointNotFoundError(
            f"{repo_id!r} is not a folder here, and not in the hub cache {constants.HF_HUB_CACHE}, and could not be "
            f"downloaded{offline}: {reason}. Check the name. On a machine with a network, run: hf download {repo_id}"
        ) from error
    except (HfHubHTTPError, OSError) as error:  # no such repository, no access, no space
        raise CheckpointNotFoundError(
            f"{repo_id!r} is not a folder here, and its download into {constants.HF_HUB_CACHE} failed: {error}"
        ) from error


def _kind_of(folder: Path) -> str | None:
    """The foreign format of a folder whose config.json is not ours; None: unknown."""
    try:
        return Headers.read(folder).kind
    except CheckpointError:  # there are none
        return foreign.kind_of_files(folder)
    except OSError:
        return None
