"""Names the kinds of checkpoints that this package does not read, so that an error says what to take instead.

Each is told by what its format always has: a key of config.json, a file's ending, names of tensors.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from qwen_megakernel.checkpoint.json_object import JsonObject
from qwen_megakernel.choices import PUBLISHED
from qwen_megakernel.errors import CheckpointError

_METHODS = {"gptq": "GPTQ", "awq": "AWQ"}
"""`quant_method` of config.json -> how people call it. Any other is shown as it stands."""

_ENDINGS = {"absmax": "bitsandbytes", "SCB": "bitsandbytes", "qweight": "GPTQ or AWQ", "weight_packed": "vLLM's tools"}
_ENDINGS |= {"scales": "MLX"}
"""Last parts of tensor names that only quantised checkpoints have -> what wrote them. The first found counts."""

_FILES = {".gguf": "GGUF (llama.cpp)", ".onnx": "ONNX", ".mlpackage": "Core ML", ".npz": "an archive of numpy or MLX"}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")

_PORT = ("decoder.quantizer.semantic_residual_vector_quantizer.", "code_predictor.lm_head.weight")
"""Parts of tensor names that only transformers' own port of the model has. It joins the code predictor's heads into one
matrix and gives the config other keys, so that it does not map one to one."""

_LABELS = [(size, kind) for size in ("0b6", "1b7") for kind in ("base", "custom_voice")] + [("1b7", "voice_design")]
_PUBLISHED = dict(zip(_LABELS, PUBLISHED, strict=True))
"""The labels in config.json of a checkpoint's size and kind -> the published one's hub id."""

_SMALL = "and weights='fp8' (--weights fp8) if memory is short"


def check_format(config: JsonObject) -> None:
    """Raises CheckpointError: config.json says that another tool has quantised the weights."""
    for key in ("quantization_config", "quantization"):
        if said := config.raw.get(key):
            tool = _tool(said if isinstance(said, dict) else {}, "MLX" if key == "quantization" else "an unknown tool")
            raise CheckpointError(
                f"{config.where}: the weights are quantised by {tool}, which is not read here; take the checkpoint "
                f"that they were made from{_published(config)}, {_SMALL}"
            )


def _tool(said: dict[str, Any], unnamed: str) -> str:
    """What quantised the weights, and to how many bits."""
    method = said.get("quant_method", unnamed)
    bits = 4 if said.get("load_in_4bit") else 8 if said.get("load_in_8bit") else said.get("bits")
    return _METHODS.get(method, str(method)[:40]) + (f" to {bits} bits" if isinstance(bits, int) else "")


def _published(config: JsonObject) -> str:
    """The published checkpoint of the same size and kind, if it has the labels of one."""
    labels = (str(config.raw.get("tts_model_size")), str(config.raw.get("tts_model_type")))
    return f", such as {_PUBLISHED[labels]}" if labels in _PUBLISHED else ""


def kind_of_files(folder: Path) -> str | None:
    """What a folder without safetensors holds instead, and what to do; None: nothing that is known."""
    kinds = (kind_of_file(path) for path in sorted(folder.iterdir()))
    return next((kind for kind in kinds if kind), None)


def kind_of_file(path: Path) -> str | None:
    """What a file is, by its name's ending, and what to do; None: nothing that is known."""
    if kind := _FILES.get(path.suffix):
        return f"{path.name} is {kind}, which is not read here; take the published safetensors, {_SMALL}"
    if path.suffix in _PICKLES:
        return f"{path.name} is a pickle, which is never opened; convert it to safetensors"
    return None


def kind_of_tensors(names: Collection[str], metadata: Mapping[str, str]) -> str | None:
    """What tensors that do not fit come from, and what to take instead; None: unknown. `metadata`: of their files."""
    ends = {name.rpartition(".")[2] for name in names}
    if tool := next((tool for end, tool in _ENDINGS.items() if end in ends), None):
        return f"the weights are quantised by {tool}; take the checkpoint that they were made from, {_SMALL}"
    if any(".base_layer." in name for name in names):
        return "an adapter of PEFT is in the weights, unmerged; call merge_and_unload before you save them"
    if metadata.get("format") == "mlx":
        return "MLX wrote the weights, in another layout; take the published checkpoint"
    if any(mark in name for name in names for mark in _PORT):
        return "this is the layout of transformers' own port of the model; take the published checkpoint"
    return None
