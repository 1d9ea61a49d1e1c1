"""Every benchmark that this machine can run, one by one, into benchmarks/results/<machine>.json (`make bench`).

    python benchmarks/run_all.py [--quick] [--only measure_ttfc ...] [--output FOLDER]

On a GPU: 0.6B and 1.7B with random weights at the published dims, written once. Without one: models of the demo voice's
size, to see that the benchmarks run; their figures say little. A benchmark's output goes to the terminal; its last
line, JSON, goes into the file. Earlier results of the same machine and commit stay; others are replaced. A failed
benchmark is named in the file and at the end; the exit code is then 1.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import MODELS, commit, machine

HERE = Path(__file__).parent
# By name: options, then those for --quick. {size} is replaced by each size.
GPU = {
    "measure_decode": ("--size {size} --positions 200 1000", "--size {size} --positions 200 --columns 1 8 --no-torch"),
    "measure_ttfc": ("--size {size}", "--size {size} --utterances 30 --only plain busy eight tokens vocoder"),
    "measure_rtf": ("--size {size}", "--size {size} --streams 1 8 --repeats 3"),
    "measure_e2e": ("--size {size}", "--size {size} --turns 5"),
    "measure_pipecat": ("--size {size}", "--size {size} --pipelines 1 8 --rates 24000 --utterances 10"),
    "measure_serving": ("--size {size}", "--size {size} --requests 50"),
    "measure_load": ("--size {size}", "--size {size} --rates 10 20 30 40 --live 128 --throughput 64 --seconds 10"),
    "measure_open": ("--size {size}", "--size {size} --seconds 10"),
    "measure_clone": ("--size {size}", "--size {size} --requests 5"),
    "measure_batch": ("--size {size}", "--size {size} --lines 500 --streams 64 --repeats 1"),
    "measure_fp8": ("--size {size}", "--size {size} --frames 16"),
    "measure_peers": ("--size {size}", "--size {size} --utterances 10"),
}
CPU = {
    "measure_ttfc": ("--size demo --utterances 5 --only plain tokens",) * 2,
    "measure_rtf": ("--size demo --streams 1 --repeats 1",) * 2,
    "measure_e2e": ("--size demo --turns 2",) * 2,
    "measure_pipecat": ("--size demo --pipelines 1 --rates 24000 --utterances 3",) * 2,
    "measure_serving": ("--size demo --requests 5",) * 2,
    "measure_load": ("--size demo --rates 1 --live 1 --throughput 1 --slots 4 --seconds 8",) * 2,
    "measure_batch": ("--size demo --lines 8 --streams 2 --repeats 1",) * 2,
    "measure_peers": ("--size demo --utterances 3",) * 2,
}


def run(name: str, options: str) -> dict:
    """A benchmark's last line, or {"failed": its exit code} if there is none."""
    command = [sys.executable, str(HERE / f"{name}.py"), *options.split()]
    print(f"\n== {name} {options}", flush=True)
    began, last = time.monotonic(), ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if not line.startswith("{"):
                print(line, end="", flush=True)
            last = line
    told = {"options": options, "seconds": round(time.monotonic() - began, 1)}
    if process.returncode or not last.startswith("{"):
        print(f"{name} failed with {process.returncode}", flush=True)
        return told | {"failed": process.returncode}
    return told | {"said": json.loads(last)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and cases")
    parser.add_argument("--only", nargs="+", choices=GPU, help="default: all")
    parser.add_argument("--sizes", nargs="+", choices=("0.6b", "1.7b"), default=["0.6b", "1.7b"])
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    table, sizes = (GPU, args.sizes) if cuda else (CPU, ["demo"])
    card = torch.cuda.get_device_name() if cuda else f"cpu-{os.cpu_count()}-cores"
    path = args.output / f"{re.sub('[^a-z0-9]+', '-', card.lower()).strip('-')}.json"
    if unfit := set(args.only or ()) - table.keys():
        parser.error(f"{', '.join(sorted(unfit))}: not for this machine, which has no CUDA GPU")
    if args.output.exists() and not args.output.is_dir():
        parser.error(f"--output: {args.output} is not a folder")
    args.output.mkdir(parents=True, exist_ok=True)
    told = {"machine": machine(), "commit": commit(), "when": datetime.date.today().isoformat(), "benchmarks": {}}
    try:
        before = json.loads(path.read_text()) if path.exists() else told
        if (before["commit"], before["machine"]) == (told["commit"], told["machine"]):
            told["benchmarks"] = before["benchmarks"]
        else:
            print(f"replaces the results of {before['machine']} at commit {before['commit']}")
    except (ValueError, LookupError, TypeError) as error:
        parser.error(f"{path} is cut off or was changed ({error!r}): delete it")
    with tempfile.TemporaryDirectory() as models:
        os.environ.setdefault(MODELS, models)
        for name in args.only or table:
            options = table[name][args.quick]
            for size in sizes:
                told["benchmarks"].setdefault(name, {})[size] = run(name, options.format(size=size))
            whole = path.with_suffix(".new")  # keeps the results if the next benchmark never ends
            whole.write_text(json.dumps(told, indent=1) + "\n")
            whole.replace(path)
    failed = [name for name, rows in told["benchmarks"].items() if any("failed" in row for row in rows.values())]
    print(f"\nwrote {path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
