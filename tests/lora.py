"""LoRA adapters made by hand, as a trainer would leave them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

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
