"""The command, as a process would run it."""

from qwen_audiobook.cli import make_parser
from qwen_audiobook.command import narrate_book
from qwen_megakernel.cli import run


def audiobook(*args: object) -> int:
    """The exit code of `qwen-audiobook`, on a CPU."""
    words = [*map(str, args), "--device", "cpu", "--threads", "1", "--seed", "3"]
    return run(make_parser().parse_args(words), narrate_book)
