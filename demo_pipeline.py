"""Text in, WAV out: `python demo_pipeline.py --text "..." --output out.wav`, the same as `qwen-megakernel speak`."""

import sys

from qwen_megakernel.cli import main

if __name__ == "__main__":
    sys.exit(main(["speak", *sys.argv[1:]]))
