"""LoRA adapters made by hand, as a trainer would leave them; and modules of the reference's names for PEFT to wrap."""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qwen_megakernel.checkpoint.load import Checkpoint

Q = "talker.model.layers.1.self_attn.q_proj"
"""A layer [128, 64] of the tiny checkpoint."""


def edit_config(folder: Path, **changes) -> None:
    """Change keys of adapter_config.json, which may be missing so far."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | changes))


def write_adapter(folder: Path, layers=((Q, 128, 64),), rank: int = 4, strength: float = 0.05, **config) -> Path:
    """Write the folder of an adapter and return it.

    Args:
        layers: (name, height, width) of every layer.
        strength: the deviation of B's values; 0 changes nothing.
        config: further keys of adapter_config.json.
    """
    folder.mkdir(exist_ok=True)
    edit_config(folder, peft_type="LORA", r=rank, lora_alpha=8, bias="none", **config)
    tensors = {}
    for name, height, width in layers:
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, width)
        tensors[f"base_model.model.{name}.lora_B.weight"] = strength * torch.randn(height, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class Whole(nn.Module):
    """A module of the shape of the reference's, as far as PEFT looks at it: the same names, no arithmetic."""


def skeleton(folder: Path | str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Every tensor of a checkpoint but the codec's; those of linear layers in `nn.Linear`."""
    checkpoint, cpu, root = Checkpoint.open(folder), torch.device("cpu"), Whole()
    tensors = checkpoint.talker(cpu, dtype) | checkpoint.speaker_encoder(cpu, dtype)
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        modules.setdefault(module, {})[kind] = tensor
    for name, parameters in modules.items():
        *parents, last = name.split(".")
        parent = root
        for one in parents:
            if one not in dict(parent.named_children()):
                parent.add_module(one, nn.Module())
            parent = getattr(parent, one)
        shape = parameters["weight"].shape
        made = nn.Module()
        if len(shape) == 2:
            made = nn.Embedding(*shape) if "embedding" in name else nn.Linear(shape[1], shape[0], "bias" in parameters)
        for kind, tensor in parameters.items():
            setattr(made, kind, nn.Parameter(tensor.clone()))
        parent.add_module(last, made)
    return root


def stand_in() -> ModuleType:
    """`qwen_tts`, as far as docs/voices.md needs it."""
    module = ModuleType("qwen_tts")
    module.Qwen3TTSModel = SimpleNamespace(
        from_pretrained=lambda folder, dtype: SimpleNamespace(model=skeleton(folder, dtype))
    )
    return module


def train(model: nn.Module) -> None:
    """Stands for a training of adapters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
