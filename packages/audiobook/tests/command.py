"""The command, as a process would run it."""

from qwen_audiobook.cli import RULES, parse
from qwen_audiobook.command import narrate_book
from qwen_megakernel.cli import run


def audiobook(*args: object) -> int:
    """The exit code of `qwen-audiobook`, on a CPU."""
    return run(parse([*map(str, args), "--device", "cpu", "--threads", "1", "--seed", "3"]), narrate_book, RULES)
