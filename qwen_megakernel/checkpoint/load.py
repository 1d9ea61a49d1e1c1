"""Find a checkpoint, check every tensor's name, shape and dtype, and load it. Safetensors only.

A checkpoint is a folder in the published Qwen3-TTS 12 Hz layout:

    config.json  generation_config.json  vocab.json  merges.txt
    model.safetensors            or model.safetensors.index.json with its shards; the single file wins
    speech_tokenizer/config.json  speech_tokenizer/model.safetensors

tensors.py derives the complete table of names and shapes from config.json. A tensor that is missing, extra or misshaped
is refused by name before anything is computed with it.
"""

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen_megakernel.checkpoint.adapters import Adapter, adapter_folders, merged
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.fp8 import SCALE, dequantize, flaw, part_of, parts_in, quantize_parts
from qwen_megakernel.checkpoint.json_object import read_header
from qwen_megakernel.checkpoint.tensors import TEXT_TABLE, Shapes, expected_tensors, talker_tensors
from qwen_megakernel.errors import CheckpointError, CheckpointNotFoundError

log = logging.getLogger(__name__)

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "demo_voice"
DEMO_NOTICE = "a tiny English voice for trying things out; use --model for a full-size one"

PUBLISHED = (
    "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
    "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
    "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
    "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
)
HUB_FILES = (
    *("config.json", "generation_config.json", "vocab.json", "merges.txt"),
    *("*.safetensors", "model.safetensors.index.json"),
    *(f"speech_tokenizer/{name}" for name in ("config.json", "*.safetensors", "model.safetensors.index.json")),
    # Only the reference implementation reads these; `qwen-megakernel verify` gives it the same folder.
    *("preprocessor_config.json", "tokenizer_config.json", "speech_tokenizer/preprocessor_config.json"),
)
INDEX = "model.safetensors.index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DTYPES = ("BF16", "F16", "F32")
_FP8 = "F8_E4M3"


def _safetensors_files(folder: Path) -> list[Path]:
    """The single file, or the shards that the index names. A name must be plain, so that no path leaves the folder.

    A fine-tune is saved as a single file into a copy of its Base, which may still hold shards and an index. So the
    single file wins, as in transformers.
    """
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
        hint = f"; {others[0]} is a pickle, which is never opened: convert it to safetensors" if others else ""
        raise CheckpointError(f"{folder}: neither model.safetensors nor {index.name} is there{hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a valid index: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: shard {name!r} must be the plain name of a .safetensors file")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: shard named by {index.name} is missing")
    return [folder / name for name in names]


def _check_tensors(folder: Path, expected: Shapes) -> dict[str, Path]:
    """Check names, shapes and dtypes. Returns name -> file for every tensor and the scales of quantised ones."""
    where: dict[str, Path] = {}
    headers = {path: read_header(path) for path in _safetensors_files(folder)}
    dtypes = {name: dtype for header in headers.values() for name, (dtype, _) in header.items()}
    quantized = {name for name, dtype in dtypes.items() if dtype == _FP8 and part_of(name)}
    parts = {part_of(name) for name in quantized}  # (fp8.PARTS); each is quantised as a whole or not at all
    for name in expected:
        if part_of(name) in parts and name in dtypes and name not in quantized:
            other = next(n for n in sorted(quantized) if part_of(n) == part_of(name))
            raise CheckpointError(
                f"{folder}: {other!r} is {_FP8} and {name!r} is {dtypes[name]}: quantise all of a part, or none"
            )
    expected = expected | {name + SCALE: expected[name][:1] for name in quantized & expected.keys()}
    for path, header in headers.items():
        for name, (dtype, shape) in sorted(header.items()):
            if name in where:
                raise CheckpointError(f"{path}: tensor {name!r} is also in {where[name].name}")
            if name not in expected:
                raise CheckpointError(f"{path}: tensor {name!r} is not expected with this config.json")
            if shape != expected[name]:
                raise CheckpointError(
                    f"{path}: tensor {name!r}: expected shape {list(expected[name])}, found {list(shape)}"
                )
            allowed = (_FP8,) if name in quantized else ("F32",) if name.endswith(SCALE) else _DTYPES
            if dtype not in allowed:
                raise CheckpointError(f"{path}: tensor {name!r}: expected dtype {' or '.join(allowed)}, found {dtype}")
            where[name] = path
    for name, shape in expected.items():
        if name not in where:
            raise CheckpointError(f"{folder}: tensor {name!r} {list(shape)} is missing")
    return where


def _load(
    where: Mapping[str, Path],
    names: Iterable[str],
    device: torch.device,
    dtype: torch.dtype,
    as_stored: Collection[str] = (),
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(where[name], []).append(name)
    for path, in_file in by_file.items():
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in in_file:
                    tensor = file.get_tensor(name)
                    tensors[name] = tensor if name in as_stored else tensor.to(dtype)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None
    return tensors


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose names, shapes and dtypes were checked; tensors are read on demand.

    Attributes:
        folder: holds its files.
        config: the content of its JSON files.
        fp8: parts (fp8.PARTS) that are stored as E4M3.
        fingerprint: 16 hex digits over config.json, the talker's final norm and some embedding rows. A saved `Voice`
            carries it, so that a voice is not used with another model. Adapters do not change it, because they leave
            the speaker encoder and the speech tokenizer alone, which make a voice.
        adapters: LoRA adapters that are merged into the result of `talker`, in this order.
    """

    folder: Path
    config: ModelConfig
    fp8: frozenset[str]
    fingerprint: str
    _main: Mapping[str, Path] = field(repr=False)
    _codec: Mapping[str, Path] = field(repr=False)
    adapters: tuple[Adapter, ...] = ()

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
        config = ModelConfig.from_folder(folder)
        main, codec = expected_tensors(config)
        main_files = _check_tensors(folder, main)
        codec_files = _check_tensors(folder / "speech_tokenizer", codec)
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for name in ("talker.model.norm.weight", "talker.model.codec_embedding.weight"):
            try:
                with safe_open(main_files[name], framework="pt") as file:
                    digest.update(file.get_slice(name)[:8].float().numpy().tobytes())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{main_files[name]}: {error}") from None
        return cls(folder, config, parts_in(main_files), digest.hexdigest()[:16], main_files, codec_files)

    def talker(self, device: torch.device, dtype: torch.dtype, fp8: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """Every `talker.*` tensor by name. The text embeddings stay on the CPU, because they are a third of all bytes
        and a text needs only a few rows. They are copied, because a mapped file would read rows from disk at first use.
        Adapters are merged before anything is quantised. `dtype`: of everything that is not FP8. Stored FP8 tensors
        that are not in `fp8` are dequantised into it. `fp8`: parts (fp8.PARTS) that are returned as float8_e4m3fn with
        scales. They are quantised now unless they are stored that way. Raises CheckpointError: a stored scale or FP8
        weight is not finite, or a weight cannot be quantised or merged."""
        table, cpu = TEXT_TABLE, torch.device("cpu")
        names = [name for name in self._main if name.startswith("talker.") and name not in (table, *self._adapted)]
        parts = fp8 | self.fp8
        as_stored = {name for name in names if part_of(name.removesuffix(SCALE)) in parts}
        tensors = _load(self._main, names, device, dtype, as_stored)
        for name in [name.removesuffix(SCALE) for name in names if name.endswith(SCALE)]:
            wrong = flaw(tensors[name], tensors[name + SCALE])
            if wrong:
                raise CheckpointError(f"{self._main[name]}: tensor {name!r}: {wrong}")
            if part_of(name) not in fp8:
                tensors[name] = dequantize(tensors[name], tensors.pop(name + SCALE), dtype)
        for name, weight in self.adapted():
            tensors[name] = weight.to(device, weight.dtype if part_of(name) in fp8 else dtype)
        quantize_parts(tensors, fp8)
        text = _load(self._main, [table], cpu, dtype)[table]
        mapped = device.type != "cpu" and dtype == torch.bfloat16  # otherwise the conversion has already copied it
        return tensors | {table: text.clone() if mapped else text}

    def adapted(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that adapters change, by name: merged one by one, on the CPU, in the dtype that is stored. Raises
        CheckpointError: one cannot be read or merged."""
        cpu, names = torch.device("cpu"), sorted(self._adapted)
        stored = ((name, _load(self._main, [name], cpu, torch.float32, [name])[name]) for name in names)
        return merged(stored, self.adapters)

    @property
    def _adapted(self) -> set[str]:
        return {name for adapter in self.adapters for name in adapter.scales}

    @property
    def files(self) -> tuple[list[Path], list[Path]]:
        """The files with tensors of the main model, and those of the speech tokenizer."""
        return sorted(set(self._main.values())), sorted(set(self._codec.values()))

    def speaker_encoder(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every `speaker_encoder.*` tensor (Base checkpoints; empty for the others)."""
        return _load(self._main, (n for n in self._main if n.startswith("speaker_encoder.")), device, dtype)

    def vocoder(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every `decoder.*` tensor of the speech tokenizer."""
        return _load(self._codec, (n for n in self._codec if n.startswith("decoder.")), device, dtype)

    def codec_encoder(self) -> dict[str, Tensor]:
        """Every `encoder.*` tensor of the speech tokenizer, fp32 on the CPU, without the prefix."""
        names = [n for n in self._codec if n.startswith("encoder.")]
        tensors = _load(self._codec, names, torch.device("cpu"), torch.float32)
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
        return path
    if found:
        raise CheckpointNotFoundError(f"{path} is a file; a checkpoint is a folder that holds config.json")
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise CheckpointNotFoundError(
            f"no folder {str(model)!r}. Give a checkpoint folder, {DEMO!r}, or a hub id such as {PUBLISHED[1]!r}"
        )
    return None


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
        reason = str(error).partition("\n")[0]
        raise CheckpointNotFoundError(
            f"{repo_id!r} is not a folder here, and not in the hub cache {constants.HF_HUB_CACHE}, and could not be "
            f"downloaded{offline}: {reason}. On a machine with a network, run: hf download {repo_id}"
        ) from error
    except (HfHubHTTPError, OSError) as error:  # no such repository, no access, no space
        raise CheckpointNotFoundError(
            f"{repo_id!r} is not a folder here, and its download into {constants.HF_HUB_CACHE} failed: {error}"
        ) from error
