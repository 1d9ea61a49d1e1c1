"""What every benchmark says about itself."""

import platform
import subprocess

import torch


def machine() -> str:
    gpu = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU, {torch.get_num_threads()} CPU threads"
    )
    return f"{gpu}, torch {torch.__version__}, Python {platform.python_version()}"


def commit() -> str:
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return told or "unknown"
