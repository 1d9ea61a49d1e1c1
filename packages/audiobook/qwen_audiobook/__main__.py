"""The script `qwen-audiobook`, and `python -m qwen_audiobook`."""

import sys

from qwen_megakernel.__main__ import end_at_interrupt


def main() -> int:
    end_at_interrupt(True)
    from qwen_audiobook.cli import make_parser
    from qwen_megakernel.cli import run

    args = make_parser().parse_args()
    from qwen_audiobook.command import narrate_book  # its imports take seconds

    end_at_interrupt(False)
    return run(args, narrate_book)


if __name__ == "__main__":
    sys.exit(main())
