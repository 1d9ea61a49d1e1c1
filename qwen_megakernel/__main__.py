"""The script `qwen-megakernel`, and `python -m qwen_megakernel`: the command line, whose imports take seconds."""

import os
import signal
import sys
from collections.abc import Callable


def end_at_interrupt(at_once: bool) -> None:
    """Set what Ctrl-C does: end the process at once with "interrupted" and status 130, or raise KeyboardInterrupt.

    `at_once` is for imports: code that they run, such as a finalizer, may swallow a KeyboardInterrupt. If interrupts
    are ignored, as under nohup, or handled by others, nothing changes.
    """
    usual: Callable[..., object] = signal.default_int_handler
    before, after = (usual, _end) if at_once else (_end, usual)
    if signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, after)


def _end(*_args: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def main() -> int:
    end_at_interrupt(True)
    from qwen_megakernel.cli import function_of, make_parser, run

    args = make_parser().parse_args()
    function = function_of(args)
    end_at_interrupt(False)
    return run(args, function)


if __name__ == "__main__":
    sys.exit(main())
