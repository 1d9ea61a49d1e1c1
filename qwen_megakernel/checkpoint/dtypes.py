"""The dtypes that a caller may ask for, by name or as a `torch.dtype`."""

import torch

from qwen_megakernel.errors import BackendError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of talker and code predictor: "float32", "bfloat16" or the `torch.dtype` of that name. Raises
    BackendError for anything else."""
    name = _name_of(dtype)
    if name not in _DTYPES:
        raise BackendError(
            f"dtype must be 'float32', 'bfloat16', torch.float32 or torch.bfloat16, got {dtype!r}; leave it out for "
            "bfloat16 on a GPU and float32 on a CPU"
        )
    return _DTYPES[name]


def vocoder_dtype_of(dtype: str | torch.dtype) -> str:
    """The vocoder's dtype by the backend's name: "float32", "bfloat16" or "tf32". "tf32" is fp32 with TF32 products and
    has no `torch.dtype`. A `torch.dtype` gives its name. Raises BackendError for anything else."""
    name = _name_of(dtype)
    if name not in (*_DTYPES, "tf32"):
        raise BackendError(
            "vocoder_dtype must be 'float32', 'bfloat16', 'tf32', torch.float32 or torch.bfloat16, "
            f"got {dtype!r}; leave it out for float32"
        )
    return name


def _name_of(dtype: object) -> str:
    """A dtype's name; empty for what is neither a name nor a `torch.dtype`."""
    if isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    return dtype if isinstance(dtype, str) else ""
