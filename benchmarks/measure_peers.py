"""How fast is it beside what one would otherwise take? Everything in one run, on one GPU, with the same random weights.

    python benchmarks/measure_peers.py [--size 0.6b|1.7b|demo] [--only NAME ...] [--python PYTHON]
                                       [--server NAME URL FIELDS] [--json FILE]
    python benchmarks/measure_peers.py --draw docs/peers FILE       (PNG and SVG of what --json wrote; needs matplotlib)

qwen_megakernel, its own PyTorch backend (CUDA graphs), qwen-tts-hf (eager, the reference) and faster-qwen3-tts (CUDA
graphs), each in a process of its own; --python has the last two installed (`make peers` makes one). A server with
OpenAI's speech API, vllm-omni's for example, is measured with `--server vllm-omni http://localhost:8091/v1/audio/speech
'{"model": "...", "voice": "vivian", "stream": true}'`: what it adds itself counts, and its memory is not seen.

A frame: codes alone, without the vocoder. TTFC: from the text to the first chunk of so many frames, PCM on the host.
RTF: of 5 s of speech, vocoder included. Texts of 10 words, sampling as published, end of speech held off; random
weights are as fast as any. Memory: what the GPU has less while the engine is there.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from common import READ_TB_S, commit, floors_ms, machine, random_model
from peers import CHUNKS, ENGINES, FRAME_MS

from qwen_megakernel.config import ModelConfig

OURS = ("qwen_megakernel", "qwen_megakernel, PyTorch")
KEYS = (*map(str, CHUNKS), "whole")


def ask(python: str, name: str, *options: str) -> dict | None:
    """What an engine's process says of itself; None, with its last words, where it cannot run."""
    command = [python, str(Path(__file__).with_name("peers.py")), name, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        print(f"{name:28}not measured: {error.strerror}: {python} (make peers)", flush=True)
        return None
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        print(f"{name:28}not measured: {words}", flush=True)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(name: str, told: dict, floor: float) -> str:
    frame = told["frame_ms"]
    cells = [f"{frame:9.2f}{floor / frame:6.0%}" if frame else f"{'':15}"]
    for values, form in ((told["ttfc_ms"], "8.1f"), (told["rtf"], "8.3f")):
        cells += [f"{values[key]:{form}}" if key in values else f"{'':8}" for key in KEYS]
    return f"{name:28}{''.join(cells)}" + (f"{told['memory_gb']:8.1f}" if told["memory_gb"] is not None else "")


def label(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def draw(target: str, file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    told = json.loads(Path(file).read_text())
    peers = list(told["peers"].items())[::-1]
    panels = {
        "a frame of 16 codes, ms": [peer["frame_ms"] for _, peer in peers],
        "text to first audio, ms": [min(peer["ttfc_ms"].values()) for _, peer in peers],
        "real-time factor, vocoder included": [peer["rtf"].get("1", peer["rtf"].get("whole")) for _, peer in peers],
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 0.7 + 0.45 * len(peers)), sharey=True)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        colours = ["#2563eb" if name == OURS[0] else "#9ca3af" for name, _ in peers]
        bars = axis.barh([name for name, _ in peers], [value or 0 for value in values], color=colours, height=0.62)
        axis.bar_label(bars, [label(value) for value in values], padding=3, fontsize=8)
        known = [value for value in values if value] or [1]
        axis.set(xscale="log", xlim=(min(known) / 3, max(known) * 8))
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8, length=0)
        axis.xaxis.set_visible(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0].axvline(told["floor_ms"], color="#dc2626", linewidth=1)
    card = told["machine"].split(",")[0]
    figure.suptitle(
        f"{told['size'].upper()}, one stream, {card}, random weights. Logarithmic, shorter is better; red: the floor",
        fontsize=9,
    )
    figure.tight_layout()
    for suffix in ("png", "svg"):
        figure.savefig(f"{target}.{suffix}", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="for --draw")
    parser.add_argument("--draw", metavar="PATH", help="PNG and SVG to make of what --json wrote, without suffix")
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--only", nargs="+", choices=[name for name in ENGINES if name != "server"])
    parser.add_argument("--python", default=".venv-peers/bin/python", help="that has the peers installed")
    parser.add_argument("--server", nargs=3, action="append", default=[], metavar=("NAME", "URL", "FIELDS"))
    parser.add_argument("--utterances", type=int, default=20)
    parser.add_argument("--json", help="where to write the results too")
    args = parser.parse_args()
    if args.draw:
        if args.file is None:
            parser.error("--draw needs a file that --json wrote")
        draw(args.draw, args.file)
        return
    names = args.only or (OURS if torch.cuda.is_available() else OURS[1:])
    if not args.only and torch.cuda.is_available():
        names = [name for name in ENGINES if name != "server"]
    with random_model(args.size) as folder:
        floor = floors_ms(ModelConfig.from_folder(Path(folder)))["frame"]
        print(f"{machine()}, commit {commit()}, {args.size}; floor of a frame {floor:.2f} ms at {READ_TB_S} TB/s")
        print(f"{'':28}{'a frame':>15}{'TTFC, ms, chunks of':>32}{'RTF, chunks of':>32}{'GPU':>8}")
        heads = [f"{key:>8}" for key in KEYS]
        print(f"{'':28}{'ms':>9}{'floor':>6}{''.join(heads)}{''.join(heads)}{'GB':>8}", flush=True)
        peers = {}
        counts = ("--utterances", str(args.utterances), "--repeats", "3" if torch.cuda.is_available() else "1")
        asked = [(sys.executable if name in OURS else args.python, name, "--model", folder) for name in names]
        for python, name, *options in asked:
            if (told := ask(python, name, *options, *counts)) is not None:
                peers[name] = told
                print(row(name, told, floor), flush=True)
        for name, url, fields in args.server:
            if (told := ask(sys.executable, "server", "--url", url, "--fields", fields, *counts)) is not None:
                peers[name] = told
                print(row(name, told, floor), flush=True)
    told = {"machine": machine(), "commit": commit(), "size": args.size, "floor_ms": floor, "frame_audio_ms": FRAME_MS}
    told |= {"peers": peers}
    if args.json:
        Path(args.json).write_text(json.dumps(told))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
