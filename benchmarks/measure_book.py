"""How long does `qwen-audiobook` take for a whole book?

    python benchmarks/measure_book.py [--size 0.6b|1.7b|demo] [--hours 10] [--streams 32 64] [--repeats 1]

A new process speaks a book of so many hours into an .m4b with chapters and equal loudness. All of its time counts: the
start, the model, speech, AAC and the file. The demo voice ends its own speech. Random weights do not, so their
checkpoint's own limit ends each piece after 15 s, which is the pace of a narrator for such a piece.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import av
from common import about, above_0, commit, machine, positive
from measure_batch import limited_model

from qwen_check.bench import sentence
from qwen_megakernel.choices import DEMO
from qwen_megakernel.commands.pieces import MAX_PIECE_CHARS

PIECE_S = 15  # of speech; 188 frames
FRAMES = 188
PIECES = 40  # of a chapter


def book(hours: float, most: int) -> str:
    """A book in Markdown whose paragraphs are one piece each, of a sentence or up to `most` characters."""
    chapters: list[str] = []
    for number in range(max(2, round(3600 * hours / PIECE_S))):
        if number % PIECES == 0:
            chapters.append(f"# Chapter {len(chapters) + 1}")
        paragraph = sentence()
        while len(longer := f"{paragraph} {sentence()}") <= most:
            paragraph = longer
        chapters[-1] += f"\n\n{paragraph}"
    return "\n\n".join(chapters)


def speak(model: str, text: str, streams: int, device: str | None) -> tuple[float, float]:
    """Seconds of sound, and seconds that the command took."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "book.m4b")
        command = [sys.executable, "-m", "qwen_audiobook", "--file", "-", "--model", model, "--output", str(path)]
        command += ["--loudness", "-19", "--max-streams", str(streams), *(["--device", device] if device else [])]
        began = time.perf_counter()
        subprocess.run(command, input=text.encode(), stdout=subprocess.DEVNULL, check=True)
        took = time.perf_counter() - began
        with av.open(str(path)) as file:
            return file.duration / av.time_base, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--hours", type=above_0, default=10.0, help="of speech")
    parser.add_argument("--streams", type=positive, nargs="+", default=[32, 64], help="pieces at once")
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    random.seed(0)
    # With random weights a longer paragraph might need more than their limit of frames, and become several pieces.
    text, results = book(args.hours, MAX_PIECE_CHARS if args.size == "demo" else 0), []
    weights = contextlib.nullcontext(DEMO) if args.size == "demo" else limited_model(args.size, FRAMES)
    with weights as model:
        print(f"{machine()}, commit {commit()}, {args.size}, a book of about {args.hours:g} h")
        print(f"{'at once':>8}{'sound, h':>10}{'took, min':>11}{'RTF':>9}", flush=True)
        for streams in args.streams:
            for _ in range(args.repeats):
                sound, took = speak(model, text, streams, args.device)
                print(f"{streams:8}{sound / 3600:10.2f}{took / 60:11.2f}{took / sound:9.5f}", flush=True)
                results.append({"streams": streams, "sound_s": sound, "took_s": took, "rtf": took / sound})
    print(json.dumps(about(args.size) | {"hours": args.hours, "results": results}))


if __name__ == "__main__":
    main()
