"""Does `qwen-megakernel batch` keep the engine busy? Its seconds of audio a second, beside those of the engine alone.

    python benchmarks/measure_batch.py [--size 0.6b|1.7b|demo] [--lines 2000] [--streams 32 64] [--repeats 3]

The engine alone: that many threads speak the same texts, one after the other, and keep nothing. Its first second and
what is spoken after the last text was taken do not count. The command gets one line; once its file is there, the model
is loaded. It then gets the others, and all its time until it has ended counts. Both run by turns, each time in a new
process or engine, and medians count: with the demo voice one process can be a third faster than the next one, because
the host limits it. The demo voice ends its own speech. Random weights do not, so their checkpoint's own limit ends it
after 5 s.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from common import about, commit, machine, positive, random_model

from qwen_check.bench import sentence
from qwen_megakernel import Chunk, SamplingParams, TTSEngine
from qwen_megakernel.choices import DEMO

FRAMES = 63  # of an utterance of random weights: as in measure_load.py


@contextlib.contextmanager
def limited_model(size: str, frames: int = FRAMES) -> Iterator[str]:
    """A checkpoint folder with random weights whose generation config limits utterances to so many frames."""
    with random_model(size) as whole, tempfile.TemporaryDirectory() as folder:
        for path in Path(whole).iterdir():
            Path(folder, path.name).symlink_to(path.resolve())
        limits = Path(folder, "generation_config.json")
        told = json.loads(limits.read_text())
        limits.unlink()
        limits.write_text(json.dumps(told | {"max_new_tokens": frames}))
        yield folder


def always_open(engine: TTSEngine, texts: list[str], streams: int) -> float:
    """Seconds of audio a second."""
    heard, lock, began = [], threading.Lock(), time.perf_counter()
    left, last = iter(enumerate(texts)), began

    def take() -> tuple[int, str] | None:
        nonlocal last
        with lock:
            if item := next(left, None):
                last = time.perf_counter()
            return item

    def hear(chunk: Chunk) -> None:
        heard.append((time.perf_counter(), len(chunk.samples) / chunk.sample_rate))

    def one_after_the_other() -> None:
        while item := take():
            seed, text = item
            engine.submit(text, hear, sampling=SamplingParams(seed=seed), chunk_frames=8).result()

    threads = [threading.Thread(target=one_after_the_other) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = min(began + 1, (began + last) / 2)
    return sum(seconds for when, seconds in heard if first <= when < last) / (last - first)


def batch(model: str, texts: list[str], streams: int, device: str | None) -> float:
    """Seconds of audio that the command makes a second, of all texts but the first."""
    with tempfile.TemporaryDirectory() as folder:
        spoken = Path(folder, "spoken")
        command = [sys.executable, "-m", "qwen_megakernel.cli", "batch", "-", "--input-format", "text"]
        command += ["--output", str(spoken), "--model", model, "--max-streams", str(streams)]
        command += ["--device", device] if device else []
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            process.stdin.write(texts[0] + "\n")
            process.stdin.flush()
            while process.poll() is None and not any(spoken.glob("*.wav")):
                time.sleep(0.01)
            began = time.perf_counter()
            process.communicate("\n".join(texts[1:]))
            took = time.perf_counter() - began
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        entries = [json.loads(line) for line in (spoken / "manifest.jsonl").read_text().splitlines()]
        return sum(entry["seconds"] for entry in entries[1:]) / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--lines", type=positive, default=2000)
    parser.add_argument("--streams", type=positive, nargs="+", default=[32, 64], help="utterances at once")
    parser.add_argument("--repeats", type=positive, default=3, help="turns of each")
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    if args.lines < 2:
        parser.error("--lines must be at least 2: the first line only waits for the model")
    random.seed(0)
    texts = [sentence() for _ in range(args.lines)]
    results = []
    weights = contextlib.nullcontext(DEMO) if args.size == "demo" else limited_model(args.size)
    with weights as model:
        print(f"{machine()}, commit {commit()}, {args.size}, {args.lines} lines; seconds of audio a second")
        print(f"{'at once':>8}{'engine alone':>14}{'batch':>8}{'share':>8}", flush=True)
        for streams in args.streams:
            options = {"max_streams": streams, "max_positions": 1024, "max_queue": streams, "queue_timeout": 3600}
            alone, rates = [], []
            for _ in range(args.repeats):
                with TTSEngine.load(model, device=args.device, **options) as engine:
                    alone.append(always_open(engine, texts, streams))
                rates.append(batch(model, texts, streams, args.device))
                print(f"{streams:8}{alone[-1]:14.1f}{rates[-1]:8.1f}", flush=True)
            share = statistics.median(rates) / statistics.median(alone)
            print(f"  median{statistics.median(alone):14.1f}{statistics.median(rates):8.1f}{share:8.1%}", flush=True)
            results.append({"streams": streams, "engine": alone, "batch": rates, "share": share})
    print(json.dumps(about(args.size) | {"lines": args.lines, "results": results}))


if __name__ == "__main__":
    main()
