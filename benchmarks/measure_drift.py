"""Does a voice change in the course of a long text? Pace, pitch and loudness over minutes of speech.

    python benchmarks/measure_drift.py [--minutes 10] [--model MODEL] [--speaker NAME] [--file TEXT] [--piece 300]
    python benchmarks/measure_drift.py --draw NAME FILE     (NAME-light.svg and NAME-dark.svg of a last line; needs
                                                             matplotlib)

The text is cut as `speak --file` cuts it: pieces of --piece characters at most, each an utterance of its own, all with
one seed. With --piece 2000 an utterance fills a slot, which is where others report drift (vllm-omni's issues 4711 and
5100). Without --file the 50 test sentences of the demo voice are spoken, in a new order each time.

    pace      milliseconds a character, silence at a piece's ends left out
    pitch     Hz, the median of voiced windows of 40 ms, by autocorrelation
    loudness  LUFS, by ITU-R BS.1770

"drift" is a straight line through the pieces, its end against its beginning: pace in per cent, pitch in semitones,
loudness in LU; "error" is its standard error. "within" is the last third of a piece against its first third, the
median of all pieces.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import charts
import numpy as np
from common import about, above_0, commit, machine, positive
from loudness import integrated_loudness

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.choices import DEMO
from spoken_text.cutting import split_evenly

SENTENCES = Path(__file__).parents[1] / "tools" / "demo_voice" / "sent50.txt"
WINDOW_S, HOP_S = 0.04, 0.02
LOWEST_HZ, HIGHEST_HZ = 60, 400
VOICED = 0.5
"""Least share of a window's energy that its autocorrelation has at the pitch."""
NEARLY = 0.9
QUIET = 0.1
"""A window is silent below this share of the loudest one's amplitude."""
UNITS = {"pace": "ms a character", "pitch": "Hz", "loudness": "LUFS"}


def pieces_of(text: str | None, longest: int, seed: int) -> Iterator[str]:
    """Of a text, once; None: of the test sentences, for ever."""
    if text is not None:
        for paragraph in text.split("\n\n"):
            yield from split_evenly(" ".join(paragraph.split()), longest)
        return
    shuffled, sentences = random.Random(seed), SENTENCES.read_text(encoding="utf-8").split("\n")
    sentences = [sentence.strip() for sentence in sentences if sentence.strip()]
    while True:
        yield from split_evenly(" ".join(shuffled.sample(sentences, len(sentences))), longest)


def pitch_hz(samples: np.ndarray, rate: int) -> float | None:
    """The median pitch of fp32 [n]; None: nothing in it is voiced."""
    size, hop = round(WINDOW_S * rate), round(HOP_S * rate)
    if len(samples) < size:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(samples, size)[::hop]
    energy = (windows**2).sum(1)
    windows = windows[energy > QUIET**2 * energy.max()]
    windows = (windows - windows.mean(1, keepdims=True)) * np.hanning(size)
    spectrum = np.fft.rfft(windows, 2 * size)
    correlation = np.fft.irfft(spectrum * spectrum.conj())[:, :size]
    # The window itself makes later values smaller: they are divided by its own autocorrelation.
    window = np.fft.rfft(np.hanning(size), 2 * size)
    correlation /= np.maximum(np.fft.irfft(window * window.conj())[:size], 1e-9)
    shares = correlation / np.maximum(correlation[:, :1], 1e-12)
    shortest = round(rate / HIGHEST_HZ)
    shares = shares[:, shortest - 1 : round(rate / LOWEST_HZ) + 1]
    inner = shares[:, 1:-1]
    # Several periods are as alike as one: the first peak counts that is nearly as high as the highest.
    high = np.maximum(VOICED, NEARLY * inner.max(1, keepdims=True))
    peaks = (inner > high) & (inner >= shares[:, :-2]) & (inner > shares[:, 2:])
    lags = shortest + peaks.argmax(1)[peaks.any(1)]
    return float(rate / np.median(lags)) if len(lags) else None


def loudness_lufs(samples: np.ndarray, rate: int) -> float | None:
    """None: too short or too quiet for BS.1770."""
    try:
        measured = integrated_loudness(samples, rate)
    except ValueError:
        return None
    return float(measured) if np.isfinite(measured) else None


def measured(samples: np.ndarray, rate: int, characters: int, at_s: float) -> dict:
    """A piece, of which nothing is silent at the ends."""
    third = len(samples) // 3
    row = {"at_s": at_s, "seconds": len(samples) / rate, "characters": characters}
    row |= {"pace": 1000 * len(samples) / rate / characters}
    row |= {"pitch": pitch_hz(samples, rate), "loudness": loudness_lufs(samples, rate)}
    thirds = {"pitch": pitch_hz, "loudness": loudness_lufs}
    return row | {
        f"{name} by thirds": [of(samples[:third], rate), of(samples[-third:], rate)] for name, of in thirds.items()
    }


def scaled(name: str, value: float) -> float:
    """Differences of such values are per cent (of small changes), semitones or LU."""
    if name == "pace":
        return 100 * math.log(value)
    return 12 * math.log2(value) if name == "pitch" else value


def changes(rows: list[dict]) -> dict[str, dict[str, float]]:
    """ "drift", its "error", and "within": see above."""
    told: dict[str, dict[str, float]] = {"drift": {}, "error": {}, "within": {}}
    for name in UNITS:
        known = [(row["at_s"], scaled(name, row[name])) for row in rows if row[name] is not None]
        at, values = np.array(known).T
        slope, start = np.polyfit(at, values, 1)
        span, left = at[-1] - at[0], values - start - slope * at
        told["drift"][name] = float(slope * span)
        told["error"][name] = float(span * np.sqrt((left**2).sum() / max(1, len(at) - 2) / len(at)) / at.std())
    for name in ("pitch", "loudness"):
        pairs = [row[f"{name} by thirds"] for row in rows if None not in row[f"{name} by thirds"]]
        told["within"][name] = statistics.median(scaled(name, last) - scaled(name, first) for first, last in pairs)
    return told


def draw(target: str, said: dict) -> None:
    """Of a last line."""
    charts.draw(target, lambda pyplot, colours: paint(pyplot, colours, said))


def paint(pyplot: ModuleType, colours: dict[str, str], said: dict):
    """The figure for `charts.draw`: a point for each piece, and the straight line through them."""
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 5), sharex=True)
    rows = said["results"]["pieces"]
    for axis, (name, unit) in zip(axes, UNITS.items(), strict=True):
        known = [row for row in rows if row[name] is not None]
        at, values = [row["at_s"] / 60 for row in known], [row[name] for row in known]
        axis.plot(at, values, "o", markersize=3, color=colours["other"])
        slope, start = np.polyfit(at, values, 1)
        axis.plot([at[0], at[-1]], [start + slope * at[0], start + slope * at[-1]], color=colours["ours"])
        axis.set(ylabel=f"{name}, {unit}", xlim=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("minutes of speech")
    figure.suptitle(f"{said['model']}, {said['speaker']}, utterances of up to {said['longest']} characters")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("told", nargs="?", type=Path, metavar="FILE", help="a last line for --draw")
    parser.add_argument("--draw", metavar="NAME", help="make NAME-light.svg and NAME-dark.svg of FILE")
    parser.add_argument("--minutes", type=above_0, default=10, help="of speech")
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--speaker", help="default: the model's first")
    parser.add_argument("--file", type=Path, help="a text, its paragraphs with a blank line between")
    parser.add_argument("--piece", type=positive, default=300, help="most characters of an utterance")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    if args.draw:
        if args.told is None:
            parser.error("--draw needs a file with a last line")
        draw(args.draw, json.loads(args.told.read_text()))
        return
    text = args.file.read_text(encoding="utf-8") if args.file else None
    rows: list[dict] = []
    with TTSEngine.load(args.model, device=args.device, max_streams=1) as engine:
        print(f"{machine()}, commit {commit()}, {args.model}, {engine.backend} backend")
        speaker, at_s, began = args.speaker or engine.speakers[0], 0.0, time.monotonic()
        for piece in pieces_of(text, args.piece, args.seed):
            sampling = SamplingParams(seed=args.seed)
            audio = engine.generate(piece, speaker=speaker, sampling=sampling, chunk_frames=8, trim="both")
            row = measured(audio.samples, audio.sample_rate, len(piece), at_s)
            rows.append(row | {"ended": audio.finish_reason})
            at_s += rows[-1]["seconds"]
            if at_s >= 60 * args.minutes:
                break
        took = time.monotonic() - began
    if len(rows) < 2:
        parser.error(f"{len(rows)} piece was spoken, a drift needs two: give a longer text or more --minutes")
    found = changes(rows)
    print(f"{len(rows)} utterances, {at_s / 60:.1f} minutes of speech in {took:.0f} s")
    print(f"{'':10}{'median':>10}{'p5':>10}{'p95':>10}   drift, its error; within an utterance")
    for name, unit in UNITS.items():
        values = [row[name] for row in rows if row[name] is not None]
        low, high = np.quantile(values, (0.05, 0.95))
        shown = f"{found['drift'][name]:+.2f}, {found['error'][name]:.2f}"
        shown += f"; {found['within'][name]:+.2f}" if name in found["within"] else ""
        print(f"{name:10}{statistics.median(values):10.1f}{low:10.1f}{high:10.1f}   {shown}   ({unit})")
    told = about("demo" if args.model == DEMO else Path(args.model).name)
    told |= {"model": told["size"], "speaker": speaker, "longest": args.piece, "seconds": at_s, "took_s": took}
    print(json.dumps(told | {"results": found | {"pieces": rows}}))


if __name__ == "__main__":
    main()
