"""Everything that README and docs/ show of this machine, into benchmarks/results/CARD-COMMIT.json (`make bench`).

    python benchmarks/run_all.py [--minutes 10] [--only measure_ttfc ...] [--peers OPTIONS] [--output FOLDER]
    python benchmarks/run_all.py --into FILE [...]     what FILE left out, on the same card and commit

On a GPU: 0.6B and 1.7B with random weights at the published dims, written once. Without one: models of the demo voice's
size, to see that the benchmarks run; their figures say little. Parts run in order of importance. With --minutes a part
begins only if it should end in time, and is stopped if it does not; the file and the last lines say what was left out.
The file is written after each part. --peers: more options of measure_peers.py, such as "--python PYTHON".

A benchmark's output goes to the terminal; its last line, JSON, goes into the file. A failed benchmark is named in the
file and at the end; the exit code is then 1. `make figures` makes tables and charts of the file.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from common import MODELS, above_0, commit, commit_time

HERE = Path(__file__).parent
GPU = {
    "measure_decode": ("--size {size} --positions 200 2000 --columns 1 8 16 64 --graph --no-torch", 40),
    "measure_ttfc": ("--size {size} --utterances 50", 115),
    "measure_rtf": ("--size {size} --streams 1 8 --repeats 5", 15),
    "measure_load": (
        "--size {size} --slots 1024 --rates 10 20 60 100 150 --live 64 128 330 700 1000 --throughput 64 256 512"
        " --seconds 8",
        190,
    ),
    "measure_peers": ("--size {size} --utterances 20", 150),
    "measure_listeners": (
        "--size {size} --slots 1024 --front-processes 2 --rates 10 60 --live 64 330 550 --seconds 6",
        150,
    ),
    "measure_pipecat": ("--size {size} --pipelines 1 8 --rates 24000 --utterances 12", 35),
    "measure_decode, FP8": ("--size {size} --positions 200 --columns 1 8 16 --no-torch --weights fp8", 10),
    "measure_serving": ("--size {size} --requests 60", 25),
    "measure_e2e": ("--size {size} --turns 8", 60),
    "measure_fp8": ("--size {size} demo --frames 16", 90),
    "measure_clone": ("--size {size} --requests 10", 45),
    "measure_open": ("--size {size} --seconds 10", 45),
    "measure_batch": ("--size {size} --lines 500 --streams 64 --repeats 1", 60),
    "measure_book": ("--size {size} --hours 10 --streams 64", 180),
    "measure_neighbour": ("--size {size} --live 1 32 --duty 1 --seconds 6", 45),
}
"""By name: options, and seconds that one size takes on an H200. {size} is replaced by each size. The most important
ones come first; behind a comma stands what tells two parts of one benchmark apart."""
GPUS = {"measure_replicas": ("--size {size} --replicas 1 2 --rates 20 30 40 --clients 8", 150)}
"""On a machine with several GPUs, besides."""
CPU = {
    "measure_ttfc": ("--size {size} --utterances 5 --only plain tokens", 20),
    "measure_rtf": ("--size {size} --streams 1 --repeats 1", 15),
    "measure_load": ("--size {size} --rates 1 --live 1 --throughput 1 --slots 4 --seconds 8", 45),
    "measure_peers": ("--size {size} --utterances 3", 60),
    "measure_listeners": ("--size {size} --rates 1 --live 1 --slots 4 --clients 1 --seconds 4", 45),
    "measure_pipecat": ("--size {size} --pipelines 1 --rates 24000 --utterances 3", 20),
    "measure_serving": ("--size {size} --requests 5", 30),
    "measure_e2e": ("--size {size} --turns 2", 25),
    "measure_batch": ("--size {size} --lines 8 --streams 2 --repeats 1", 40),
    "measure_loop": ("", 60),
    "measure_fronts": ("", 100),
    "measure_drift": ("--minutes 10", 300),
}
ALL = GPU | GPUS | CPU
LATE = "not done in time"


def run(part: str, options: str, limit_s: float | None) -> dict:
    """A benchmark's last line, or {"failed": why} if there is none. It is stopped after `limit_s` seconds."""
    name = part.partition(",")[0]
    command = [sys.executable, str(HERE / f"{name}.py"), *shlex.split(options)]
    print(f"\n== {part} {options}", flush=True)
    began, last, late = time.monotonic(), "", threading.Event()
    # A group of its own: a benchmark that is stopped takes its servers along.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:

        def stop() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit_s or threading.TIMEOUT_MAX, stop)
        timer.daemon = True
        timer.start()
        try:
            for line in process.stdout:
                if not line.startswith("{"):
                    print(line, end="", flush=True)
                last = line
        except KeyboardInterrupt:
            stop()
            raise
        finally:
            timer.cancel()
    told = {"options": options, "seconds": round(time.monotonic() - began, 1)}
    if late.is_set():
        print(f"{part}: {LATE}", flush=True)
        return told | {"failed": LATE}
    if process.returncode or not last.startswith("{"):
        print(f"{part} failed with {process.returncode}", flush=True)
        return told | {"failed": f"exit code {process.returncode}"}
    return told | {"said": json.loads(last)}


def driver_and_clocks() -> dict:
    """What nvidia-smi says of the first GPU; {} if it cannot be asked, which is printed."""
    asked = {
        "driver": "driver_version",
        "sm_mhz": "clocks.max.sm",
        "memory_mhz": "clocks.max.mem",
        "watts": "power.limit",
    }
    command = ["nvidia-smi", f"--query-gpu={','.join(asked.values())}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        print(f"the driver and clocks stay unknown: {error!r}")
        return {}
    return dict(zip(asked, told.split(", "), strict=True))


def about_this_machine(gpus: int) -> dict:
    cuda, cores = torch.cuda.is_available(), os.cpu_count()
    card = torch.cuda.get_device_name() if cuda else f"CPU, {cores} cores"
    told = {"card": f"{gpus} x {card}" if gpus > 1 else card, "commit": commit()}
    told |= {"committed": commit_time(), "date": datetime.date.today().isoformat(), "source": "benchmarks/run_all.py"}
    told |= {"torch": torch.__version__, "python": platform.python_version(), "cores": cores}
    return told | (driver_and_clocks() if cuda else {})


def left_out(told: dict, asked: list[tuple[str, str]]) -> list[str]:
    """Parts that the file has no result of."""
    there = told["benchmarks"]
    return [f"{part} {size}" for part, size in asked if "said" not in there.get(part, {}).get(size, {})]


def continued(path: Path, now: dict, parser: argparse.ArgumentParser) -> dict:
    """What --into names, if it is of this card and commit."""
    try:
        before = json.loads(path.read_text())
        if (before["card"], before["commit"]) != (now["card"], now["commit"]):
            parser.error(
                f"{path} is of {before['card']} at {before['commit']}, this is {now['card']} at {now['commit']}"
            )
        return before | {"benchmarks": dict(before["benchmarks"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"{path} is not what run_all.py wrote ({error!r})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=above_0, help="end before so many; default: all that was asked for")
    parser.add_argument("--only", nargs="+", choices=ALL, metavar="PART", help=f"of {'; '.join(ALL)}; default: all")
    parser.add_argument("--sizes", nargs="+", choices=("0.6b", "1.7b"), default=["0.6b", "1.7b"])
    parser.add_argument("--peers", default="", help="options for measure_peers.py")
    parser.add_argument("--into", type=Path, metavar="FILE", help="go on with what this file left out")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of a new file")
    args = parser.parse_args()
    began = time.monotonic()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    table, sizes = (GPU if gpus == 1 else GPU | GPUS, args.sizes) if gpus else (CPU, ["demo"])
    if unfit := set(args.only or ()) - table.keys():
        parser.error(f"{', '.join(sorted(unfit))}: not for this machine, which has {gpus or 'no'} CUDA GPU(s)")
    told = about_this_machine(gpus) | {"left_out": [], "benchmarks": {}}
    path = args.into or args.output / f"{re.sub('[^a-z0-9]+', '-', told['card'].lower())}-{told['commit']}.json"
    asked = [(part, size) for part in table for size in sizes]
    if args.into:
        told = continued(args.into, told, parser)
        todo = [(part, size) for part, size in asked if f"{part} {size}" in left_out(told, asked)]
    else:
        if args.output.exists() and not args.output.is_dir():
            parser.error(f"--output: {args.output} is not a folder")
        if path.exists():
            parser.error(f"{path} is there: --into {path} goes on with what it left out; or delete it")
        args.output.mkdir(parents=True, exist_ok=True)
        todo = asked
    if args.only:
        todo = [(part, size) for part, size in asked if part in args.only]

    def write() -> None:
        told["left_out"] = left_out(told, asked)
        whole = path.with_suffix(".new")  # keeps the results if the next benchmark never ends
        whole.write_text(json.dumps(told, indent=1) + "\n")
        whole.replace(path)

    with tempfile.TemporaryDirectory() as models:
        os.environ.setdefault(MODELS, models)
        for part, size in todo:
            options, seconds = table[part]
            options = options.format(size=size) + (f" {args.peers}" if part == "measure_peers" else "")
            left_s = 60 * args.minutes - (time.monotonic() - began) if args.minutes else None
            if left_s is not None and left_s < seconds:
                print(f"\n== {part} {size}: no time, it takes about {seconds} s and {max(0.0, left_s):.0f} are left")
                continue
            told["benchmarks"].setdefault(part, {})[size] = run(part, options, left_s)
            write()
    write()
    rows = [(f"{part} {size}", row) for part, sizes in told["benchmarks"].items() for size, row in sizes.items()]
    failed = [name for name, row in rows if row.get("failed", LATE) != LATE]
    print(f"\nwrote {path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if told["left_out"]:
        print(f"left out: {', '.join(told['left_out'])}\n--into {path} goes on with them")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
