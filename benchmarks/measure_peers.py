"""How fast is it beside the alternatives? Everything runs on one GPU in one run, with the same random weights.

    python benchmarks/measure_peers.py [--size 0.6b|1.7b|demo] [--only NAME ...] [--python PYTHON]
                                       [--server NAME URL FIELDS] [--json FILE]
    python benchmarks/measure_peers.py --draw NAME FILE     (NAME-light.svg and NAME-dark.svg of what --json wrote;
                                                                needs matplotlib)

qwen_megakernel, its own PyTorch backend (CUDA graphs), qwen-tts-hf (eager, the reference) and faster-qwen3-tts (CUDA
graphs), each in its own process. --python is an interpreter with the last two installed (`make peers` makes one). A
server with OpenAI's speech API, for example vllm-omni, is measured with
`--server vllm-omni http://localhost:8091/v1/audio/speech '{"model": "...", "voice": "vivian", "stream": true}'`.
Its own overhead counts; its memory is not seen.

A frame: codes alone, without the vocoder. TTFC: from the text to the first chunk of that many frames, PCM on the host.
RTF: for 5 s of speech, vocoder included. Texts of 10 words, sampling as published, end of speech suppressed; random
weights are as fast as any. Memory: how much GPU memory the engine takes.

Engines that could not be measured are reported, also in the JSON ("not_measured"). The exit code is 1 if one of them
was requested by name, or if nothing could be measured.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import charts
import torch
from common import about, commit, floors_ms, machine, new_file, positive, random_model, read_tb_s
from peers import CHUNKS, ENGINES, FRAME_MS

from qwen_megakernel.checkpoint.config import ModelConfig

OURS = ("qwen_megakernel", "qwen_megakernel, PyTorch")
KEYS = (*map(str, CHUNKS), "whole")


def ask(python: str, name: str, *options: str) -> dict | str:
    """The results of an engine's process, or its last line of output if it cannot run."""
    command = [python, str(Path(__file__).with_name("peers.py")), name, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"{error.strerror}: {python} (make peers)"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(name: str, told: dict, floor: float) -> str:
    frame = told["frame_ms"]
    cells = [f"{frame:9.2f}{floor / frame:6.0%}" if frame else f"{'':15}"]
    for values, form in ((told["ttfc_ms"], "8.1f"), (told["rtf"], "8.3f")):
        cells += [f"{values[key]['p50']:{form}}" if key in values else f"{'':8}" for key in KEYS]
    return f"{name:28}{''.join(cells)}" + (f"{told['memory_gb']:8.1f}" if told["memory_gb"] is not None else "")


def label(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def draw(target: str, told: dict) -> None:
    """Of a last line."""
    peers = list(told["peers"].items())[::-1]
    if not peers:
        raise SystemExit("nothing was measured")
    charts.draw(target, lambda pyplot, colours: paint(pyplot, colours, told, peers))


def paint(pyplot: ModuleType, colours: dict[str, str], told: dict, peers: list[tuple[str, dict]]):
    """The figure for `charts.draw`; the last of `peers` is at the top."""
    panels = {
        "a frame of 16 codes, ms": [peer["frame_ms"] for _, peer in peers],
        "text to first audio, ms": [min(row["p50"] for row in peer["ttfc_ms"].values()) for _, peer in peers],
        "real-time factor, vocoder included": [
            peer["rtf"].get("1", peer["rtf"].get("whole"))["p50"] for _, peer in peers
        ],
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 0.8 + 0.42 * len(peers)), sharey=True)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        fills = [colours["ours" if name == OURS[0] else "other"] for name, _ in peers]
        bars = axis.barh([name for name, _ in peers], [value or 0 for value in values], color=fills, height=0.62)
        axis.bar_label(bars, [label(value) for value in values], padding=3)
        known = [value for value in values if value] or [1]
        axis.set(xscale="log", xlim=(min(known) / 3, max(known) * 8))
        axis.set_title(title)
        axis.tick_params(length=0)
        axis.xaxis.set_visible(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0].axvline(told["floor_ms"], color=colours["mark"], linewidth=1.5)
    card = told["machine"].split(",")[0]
    figure.suptitle(
        f"{told['size'].upper()}, one stream, {card}, commit {told['commit']}, random weights\n"
        "Logarithmic, shorter is better; the line is the floor"
    )
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="results for --draw")
    parser.add_argument("--draw", metavar="NAME", help="make NAME-light.svg and NAME-dark.svg of what --json wrote")
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--only", nargs="+", choices=[name for name in ENGINES if name != "server"])
    parser.add_argument("--python", default=".venv-peers/bin/python", help="Python that has the peers installed")
    parser.add_argument("--server", nargs=3, action="append", default=[], metavar=("NAME", "URL", "FIELDS"))
    parser.add_argument("--utterances", type=positive, default=20)
    parser.add_argument("--json", type=new_file, help="where to write the results too")
    args = parser.parse_args()
    if args.draw:
        if args.file is None:
            parser.error("--draw needs a file that --json wrote")
        try:
            told = json.loads(Path(args.file).read_text())
            draw(args.draw, told)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise SystemExit(f"{args.file} is not what --json wrote: {error!r}") from None
        return 0
    names = [name for name in ENGINES if name != "server"] if torch.cuda.is_available() else OURS[1:]
    with random_model(args.size) as folder:
        floor = floors_ms(ModelConfig.from_folder(Path(folder)))["frame"]
        print(f"{machine()}, commit {commit()}, {args.size}; floor of a frame {floor:.2f} ms at {read_tb_s():.3g} TB/s")
        print(f"{'':28}{'a frame':>15}{'TTFC, ms, chunks of':>32}{'RTF, chunks of':>32}{'GPU':>8}")
        heads = [f"{key:>8}" for key in KEYS]
        print(f"{'':28}{'ms':>9}{'floor':>6}{''.join(heads)}{''.join(heads)}{'GB':>8}", flush=True)
        peers, not_measured = {}, {}
        counts = ("--utterances", str(args.utterances), "--repeats", "3" if torch.cuda.is_available() else "1")
        asked = {
            name: (sys.executable if name in OURS else args.python, name, "--model", folder)
            for name in args.only or names
        }
        for name, url, fields in args.server:
            asked[name] = (sys.executable, "server", "--url", url, "--fields", fields)
        for name, command in asked.items():
            told = ask(*command, *counts)
            if isinstance(told, str):
                not_measured[name] = told
                print(f"{name:28}not measured: {told}", flush=True)
            else:
                peers[name] = told
                print(row(name, told, floor), flush=True)
    told = about(args.size) | {"floor_ms": floor, "frame_audio_ms": FRAME_MS}
    told |= {"peers": peers, "not_measured": not_measured}
    if args.json:
        args.json.write_text(json.dumps(told))
    print(json.dumps(told))
    by_name = {*(args.only or ()), *(name for name, *_ in args.server)}
    return 1 if by_name & not_measured.keys() or not peers else 0


if __name__ == "__main__":
    sys.exit(main())
