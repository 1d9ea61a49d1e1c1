"""LoRA adapters in PEFT's format, merged into a checkpoint's weights while they are loaded. Safetensors only.

An adapter is the folder that PEFT's `save_pretrained` writes:

    adapter_config.json  adapter_model.safetensors

For a linear layer W [out, in] it holds A [r, in] and B [out, r]. The merged weight is W + alpha / r * B @ A, with
alpha / sqrt(r) where `use_rslora` is set. It is computed in fp32 on the CPU, so every device gets the same weights, and
rounded once to the checkpoint's own dtype.

Names in the file begin at the module that was wrapped: the whole model, its talker, its code predictor, or the
transformer of either. All names and shapes must fit one of these, and one alone.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from qwen_megakernel.checkpoint.json_object import JsonObject, read_json
from qwen_megakernel.checkpoint.stored import MOST_HEADER_BYTES, StoredTensor, opened, read_header
from qwen_megakernel.checkpoint.tensors import Shapes
from qwen_megakernel.errors import CheckpointError

MOST_RANK = 1024

_CONFIG, _TENSORS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_DTYPES = ("BF16", "F16", "F32")
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"

_ROOTS = {
    "": "Qwen3TTSForConditionalGeneration",
    "talker.": "Qwen3TTSTalkerForConditionalGeneration",
    "talker.model.": "Qwen3TTSTalkerModel",
    "talker.code_predictor.": "Qwen3TTSTalkerCodePredictorModelForConditionalGeneration",
    "talker.code_predictor.model.": "Qwen3TTSTalkerCodePredictorModel",
}
"""Modules that a trainer can have wrapped: where their names begin in a checkpoint -> their class in the reference."""

_Updates = dict[str, tuple[int, tuple[int, int]]]  # module as a file names it -> its rank, and the shape of B @ A

_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias"}
_IRRELEVANT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the file names its layers
    *("lora_dropout", "eva_config", "corda_config", "lora_ga_config"),  # concern the training or its start
    *("ensure_weight_tying", "megatron_core", "qalora_group_size"),  # belong to features that must be off
}
"""Fields that do not change the merged weights. Any other field must be off: null, false or empty."""

_PLAIN_STARTS = ("gaussian", "orthogonal", "eva")
"""Values of init_lora_weights, besides true and false, that leave the base weights as they are."""

_MOST_PATTERNS, _MOST_PATTERN_CHARS, _MOST_REPEATS, _MOST_CHOICES = 1024, 200, 2, 4
_INSTEAD = (
    "merge it where it was trained (PEFT's merge_and_unload), save the model's state_dict as model.safetensors into a "
    "copy of the base's folder, and load that (docs/voices.md)"
)


def adapter_folders(adapters: Collection[str | Path]) -> tuple[Path, ...]:
    """The absolute folders of `TTSEngine.load`'s `adapters`, in order. Raises CheckpointError: not a list of paths."""
    listed = isinstance(adapters, Collection) and not isinstance(adapters, (str, bytes, Mapping, set, frozenset))
    if not listed or not all(isinstance(path, (str, Path)) and str(path).strip() for path in adapters):
        raise CheckpointError(f"adapters must be a list of folders such as ['my-adapter'], got {adapters!r}")
    try:
        return tuple(Path(path).expanduser().resolve() for path in adapters)
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a NUL, of an unknown user
        raise CheckpointError(f"adapters {adapters!r} cannot be folders: {error}") from None


@dataclass(frozen=True)
class Adapter:
    """An adapter whose config, names, shapes, dtypes and values were checked against a checkpoint's table."""

    folder: Path  # holds its two files
    scales: Mapping[str, float]  # name of a checkpoint's weight -> alpha / r, or alpha / sqrt(r)
    _root: str = field(repr=False)

    @classmethod
    def open(cls, folder: Path, table: Shapes) -> "Adapter":
        """Check the adapter in `folder`. `table` has the shapes of the checkpoint's `talker.*` tensors. Raises
        CheckpointError: it cannot be merged; the message says what is wrong and what to do."""
        tensors = folder / _TENSORS
        config = _read_config(folder)
        weights = {name.removesuffix(".weight"): shape for name, shape in table.items() if name.endswith(".weight")}
        linears: Shapes = {n: shape for n, shape in weights.items() if len(shape) == 2 and "_embedding" not in n}
        try:
            if not tensors.is_file():
                pickle = (folder / _PICKLE).is_file()
                told = f"; {_PICKLE} is a pickle, which is never opened: save as safetensors" if pickle else ""
                raise CheckpointError(f"{folder}: {_TENSORS} is missing{told}")
            most = MOST_HEADER_BYTES + 4 * MOST_RANK * sum(sum(shape) for shape in linears.values())
            if (size := tensors.stat().st_size) > most:
                raise CheckpointError(f"{tensors}: an adapter of this model has at most {most} bytes, found {size}")
            updates = _updates(tensors, read_header(tensors))
        except OSError as error:
            raise CheckpointError(f"{tensors}: cannot be read: {error.strerror}") from None
        root = _root_of(tensors, config, updates, linears)
        scales = _scales(config, updates)
        with opened(tensors) as file:
            for name in file.keys():
                if not bool(torch.isfinite(file.get_tensor(name).float()).all()):
                    raise CheckpointError(f"{tensors}: tensor {name!r} is not finite; train it again")
        return cls(folder, {f"{root}{name}.weight": scale for name, scale in scales.items()}, root)

    def update(self, weight: str) -> Tensor:
        """scale * B @ A for one weight of `scales`, fp32 [out, in]."""
        module = _PREFIX + weight.removeprefix(self._root).removesuffix(".weight")
        with opened(self.folder / _TENSORS) as file:
            return file.get_tensor(module + _B).float() @ file.get_tensor(module + _A).float() * self.scales[weight]


def merged(weights: Iterable[tuple[str, Tensor]], adapters: Collection[Adapter]) -> Iterator[tuple[str, Tensor]]:
    """Add the adapters' updates to weights by name, as stored and on the CPU. They are added in fp32, in the order
    given. The sum is rounded once to the weight's dtype. Raises CheckpointError: a file cannot be read any more, or a
    merged weight exceeds its dtype."""
    for name, weight in weights:
        total = weight.float()
        for adapter in adapters:
            if name in adapter.scales:
                total = total + adapter.update(name)
        rounded = total.to(weight.dtype)
        if not bool(torch.isfinite(rounded).all()):
            folders = ", ".join(str(adapter.folder) for adapter in adapters)
            raise CheckpointError(f"tensor {name!r} with {folders} merged is not finite; train the adapter again")
        yield name, rounded


def _read_config(folder: Path) -> JsonObject:
    path = folder / _CONFIG
    try:
        if folder.is_file():
            raise CheckpointError(f"{folder} is a file; an adapter is the folder that holds {_CONFIG}")
        if not path.is_file():
            inside = sorted(found.parent.name for found in folder.glob(f"*/{_CONFIG}"))
            told = f"; there is one in {inside[0]!r} inside it" if inside else ""
            raise CheckpointError(f"{folder}: no {_CONFIG}; an adapter is a folder that PEFT has saved{told}")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    config = read_json(path)
    kind = config.get("peft_type", str)
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type must be 'LORA', found {kind!r}; {_INSTEAD}")
    if config.get("bias", str, "none") != "none":
        raise CheckpointError(f"{path}: bias must be 'none', found {config.get('bias', str)!r}; {_INSTEAD}")
    start = config.raw.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or start in _PLAIN_STARTS):
        raise CheckpointError(
            f"{path}: init_lora_weights {start!r} has changed the base weights too; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    for key, value in config.raw.items():
        if key not in _READ | _IRRELEVANT and value not in (None, False) and value != {} and value != []:
            raise CheckpointError(f"{path}: {key} must be off, found {str(value)[:99]!r}; {_INSTEAD}")
    return config


def _scales(config: JsonObject, updates: _Updates) -> dict[str, float]:
    """Module as the file names it -> its scale."""
    rank, alpha = config.size("r", most=MOST_RANK), config.get("lora_alpha", float)
    stable = config.get("use_rslora", bool, False)
    ranks, alphas = (_patterns(config, key) for key in ("rank_pattern", "alpha_pattern"))
    scales = {}
    for name, (stored, _) in updates.items():
        key = _match(ranks, name)
        r = rank if key is None else ranks.size(key, most=MOST_RANK)
        if r != stored:
            raise CheckpointError(
                f"{config.where}: {name} has rank {r} by r and rank_pattern, but {stored} by its tensors; "
                "take both files from one save"
            )
        key = _match(alphas, name)
        scales[name] = (alpha if key is None else alphas.get(key, float)) / (math.sqrt(r) if stable else r)
    return scales


def _patterns(config: JsonObject, field_name: str) -> JsonObject:
    """rank_pattern or alpha_pattern. Its keys are regular expressions from a file. Most kinds are refused, so that none
    can run forever."""
    patterns = JsonObject(config.get(field_name, dict, None) or {}, f"{config.where}: {field_name}")
    if len(patterns.raw) > _MOST_PATTERNS:
        raise CheckpointError(f"{patterns.where}: at most {_MOST_PATTERNS} keys, found {len(patterns.raw)}")
    for key in patterns.raw:
        plain = len(key) <= _MOST_PATTERN_CHARS and re.fullmatch(r"[\w.^$|()*+\\]+", key, re.ASCII)
        repeats, choices = len(re.findall(r"[*+]", key)), key.count("|")
        if not plain or repeats > _MOST_REPEATS or choices > _MOST_CHOICES or re.search(r"\)[*+]", key):
            raise CheckpointError(
                f"{patterns.where}: the pattern {key[:99]!r} is not simple enough; name layers by their ends, such as "
                "'q_proj', or one by one"
            )
        try:
            re.compile(key)
        except re.error as error:
            raise CheckpointError(f"{patterns.where}: {key!r} is not a regular expression: {error}") from None
    return patterns


def _match(patterns: JsonObject, module: str) -> str | None:
    """The first key that is the module's name or its end, as PEFT matches them."""
    return next((key for key in patterns.raw if re.match(rf"(.*\.)?({key})$", module)), None)


def _updates(path: Path, header: Mapping[str, StoredTensor]) -> _Updates:
    """What a file updates. Each module must have an A and a B."""
    for name, (_, _, dtype, shape, _) in sorted(header.items()):
        if not name.startswith(_PREFIX) or not name.endswith((_A, _B)):
            wanted = f"{_PREFIX}...{_A} or {_B}"
            raise CheckpointError(f"{path}: tensor {name!r} is not a linear layer's in LoRA ({wanted}); {_INSTEAD}")
        if dtype not in _DTYPES or len(shape) != 2:
            wanted = f"2 dims of {' or '.join(_DTYPES)}"
            raise CheckpointError(f"{path}: tensor {name!r}: expected {wanted}, found {list(shape)} of {dtype}")
    updates = {}
    for module in dict.fromkeys(name.removesuffix(_A).removesuffix(_B) for name in header):
        for name in (module + _A, module + _B):
            if name not in header:
                raise CheckpointError(f"{path}: tensor {name!r} is missing; save the adapter again")
        (rank, width), (height, same) = header[module + _A].shape, header[module + _B].shape
        if rank != same or not 1 <= rank <= MOST_RANK:
            raise CheckpointError(
                f"{path}: tensors {module + _A!r} [{rank}, {width}] and {_B!r} [{height}, {same}] must share a rank of "
                f"1 to {MOST_RANK}"
            )
        updates[module.removeprefix(_PREFIX)] = (rank, (height, width))
    if not updates:
        raise CheckpointError(f"{path}: it has no tensors; save the adapter again")
    return updates


def _root_of(path: Path, config: JsonObject, updates: _Updates, linears: Shapes) -> str:
    """Where the file's names begin in the checkpoint."""
    wrapped = (config.get("auto_mapping", dict, None) or {}).get("base_model_class")
    named = [root for root, name in _ROOTS.items() if name == wrapped]
    misfits = {root: _misfits(root, updates, linears) for root in named or _ROOTS}
    fitting = [root for root, wrong in misfits.items() if not wrong]
    if not fitting:
        nearest = min(misfits, key=lambda root: len(misfits[root]))
        raise CheckpointError(f"{path}: {misfits[nearest][0]}; use an adapter with the checkpoint it was trained on")
    if len(fitting) > 1:
        module = next(iter(updates))
        places = " or ".join(f"{root}{module}" for root in fitting)
        raise CheckpointError(
            f"{path}: {module!r} may mean {places}, and no other name decides; say in {_CONFIG} what was wrapped: "
            f"auto_mapping with a base_model_class of {' or '.join(_ROOTS[root] for root in fitting)}"
        )
    return fitting[0]


def _misfits(root: str, updates: _Updates, linears: Shapes) -> list[str]:
    """What does not fit this checkpoint, if the names begin at `root`."""
    wrong = []
    for module, (_, updated) in updates.items():
        shape = linears.get(root + module)
        if shape is None:
            wrong.append(f"{module!r} is not a linear layer of this checkpoint's talker or code predictor")
        elif shape != updated:
            wrong.append(f"{module!r} is for a layer {list(updated)}, but {root}{module} is {list(shape)}")
    return wrong
