"""The recipe of docs/voices.md, from training to a checkpoint, run as it is printed.

Shared by the tests and the oracle. The page names `qwen_tts`: the oracle has the real one, the tests put a stand-in
(lora.py) into `sys.modules`.
"""

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "voices.md"
SECTIONS = ("LoRA adapters", "Your own fine-tune")
MADE = ("my-adapter", "my-voice")
"""What it leaves beside `base`, in the order of the sections."""


def blocks(section: str) -> list[str]:
    """The Python blocks of a section of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def suited(block: str, base: Path) -> str:
    """A block for this Base: a tiny vocabulary ends before row 3000."""
    talker = json.loads((base / "config.json").read_text(encoding="utf-8"))["talker_config"]
    return block.replace("3000", str(min(3000, talker["vocab_size"] - 72)))


def follow(names: dict[str, Any]) -> dict[str, Any]:
    """Run every block in the current folder, which holds `base`. `names`: what the page has made before, and `train`.
    Returns all names."""
    printed = [block for section in SECTIONS for block in blocks(section)]
    assert len(printed) >= 3, f"{PAGE} has other sections now"
    for block in printed:
        exec(compile(suited(block, Path("base")), str(PAGE), "exec"), names)
    return names
