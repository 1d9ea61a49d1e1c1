"""How many callers at once? Open-loop Poisson arrivals, live listeners, and throughput, from the clients' side.

    python benchmarks/measure_load.py [--size 0.6b|1.7b|demo] [--rates 10 20 30] [--live 64 128 192] [--throughput 64]
                                      [--vocoder float32|tf32] [--seconds 20] [--json FILE]
    python benchmarks/measure_load.py --draw NAME FILE      (NAME-light.svg and NAME-dark.svg of what run_all.py wrote;
                                                             needs matplotlib)

Random weights at the published dims, sampling as published, end of speech suppressed: every utterance is 5.04 s long
(63 frames), its text 10 words. TTFC runs from the moment a request was due to its first chunk in the client's hands, so
a late client counts against us. A listener starts with the first chunk. If a later chunk comes too late, the listener
hears a gap: an underrun.

    rates       requests a second, at random times, however many are still open
    live        that many listeners, each with one utterance after the other, starting at random times
    throughput  that many utterances always open, without listeners: seconds of audio a second

The last line's "without_gap" is the share of requests that were answered and whose listener heard no gap.
"""

import argparse
import gc
import json
import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import charts
from common import about, above_0, commit, first_audio_floor_ms, machine, new_file, positive, quantile, random_model

from qwen_check.bench import sentence
from qwen_megakernel import EngineBusy, TTSEngine

FRAMES, FRAME_S = 63, 0.08
DRAWN_IF = 0.98  # of the callers hear no gap; beyond that, first audio takes seconds


class Client:
    """One request and what its listener gets. It does not keep the utterance: with thousands kept, the garbage
    collector stops all threads for 0.1 s, and listeners hear gaps (docs/log/2026-11-24.md#million-frames-256)."""

    def __init__(self, engine: TTSEngine, due: float):
        self.due, self.first, self.runs_out, self.gaps = due, None, 0.0, []
        self.heard: list[tuple[float, float]] = []  # when, seconds of audio
        self.refused, self.done = False, threading.Event()
        try:
            speaker = random.choice(engine.speakers)
            request = {"speaker": speaker, "max_frames": FRAMES, "runaway_guard": False}
            engine.submit(sentence(), self.hear, on_end=self.done.set, **request)
        except EngineBusy:
            self.refused = True
            self.done.set()

    def hear(self, chunk) -> None:
        now = time.perf_counter()
        if self.first is None:
            self.first = self.runs_out = now
        elif now > self.runs_out:
            self.gaps.append(now - self.runs_out)
            self.runs_out = now
        seconds = len(chunk.samples) / chunk.sample_rate
        self.runs_out += seconds
        self.heard.append((now, seconds))


def at(engine: TTSEngine, times: list[float]) -> list[Client]:
    """Start a client at each of these times, in seconds from now."""
    began, clients = time.perf_counter() + 0.1, []

    def come(due: float) -> None:
        clients.append(Client(engine, due))

    with ThreadPoolExecutor(8) as pool:
        coming = []
        for due in (began + t for t in times):
            time.sleep(max(0.0, due - time.perf_counter()))
            coming.append(pool.submit(come, due))
    for one in coming:
        one.result()  # raises what a client raised
    for client in clients:
        client.done.wait()
    return clients


def poisson(engine: TTSEngine, rate: float, seconds: float) -> list[Client]:
    times, now = [], 0.0
    while (now := now + random.expovariate(rate)) < seconds:
        times.append(now)
    if not times:
        raise SystemExit(f"no request came in {seconds:g} s at {rate:g} requests a second: give more --seconds")
    return at(engine, times)


def live(engine: TTSEngine, listeners: int, seconds: float) -> list[Client]:
    turns = 1 + math.ceil(seconds / (FRAMES * FRAME_S))  # one more: listeners arrive one by one
    starts = [random.uniform(0, FRAMES * FRAME_S) for _ in range(listeners)]
    return at(engine, sorted(start + turn * FRAMES * FRAME_S for start in starts for turn in range(turns)))


def throughput(engine: TTSEngine, streams: int, seconds: float) -> tuple[list[Client], float]:
    """(clients, seconds of audio a second). The first second, when streams run in step, does not count."""
    began, clients = time.perf_counter(), []

    def one_after_the_other() -> None:
        while time.perf_counter() - began < seconds:
            clients.append(Client(engine, time.perf_counter()))
            clients[-1].done.wait()

    threads = [threading.Thread(target=one_after_the_other) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heard = [audio_s for client in clients for when, audio_s in client.heard if 1 <= when - began < seconds]
    return clients, sum(heard) / (seconds - 1)


def summary(clients: list[Client]) -> dict:
    heard = [client for client in clients if client.first is not None]
    ttfc = [1000 * (client.first - client.due) for client in heard]
    gaps = [gap for client in heard for gap in client.gaps]
    row = {f"p{int(100 * share)}": quantile(ttfc, share) for share in (0.5, 0.95, 0.99)} if heard else {}
    counts = {"n": len(clients), "refused": sum(client.refused for client in clients)}
    underruns = sum(bool(client.gaps) for client in heard)
    counts |= {"underruns": underruns, "without_gap": (len(heard) - underruns) / len(clients)}
    return row | counts | {"gaps": len(gaps), "worst_gap_ms": 1000 * max(gaps, default=0.0)}


def time_collections() -> list[float]:
    """Milliseconds of every garbage collection from now on. Each stops all threads of the process."""
    times, began = [], 0.0

    def hear(phase: str, _info: dict) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            times.append(1000 * (time.perf_counter() - began))

    gc.callbacks.append(hear)
    return times


def draw(target: str, told: dict) -> None:
    """Of a file of run_all.py: sizes measured on one machine at one commit."""
    sizes = {size: row["said"] for size, row in told["benchmarks"]["measure_load"].items() if "said" in row}
    charts.draw(target, lambda pyplot, colours: paint(pyplot, colours, told, sizes))


def paint(pyplot: ModuleType, colours: dict[str, str], told: dict, sizes: dict[str, dict]):
    """The figure for `charts.draw`."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    kinds = {"rate": "requests a second at random times, 5 s of speech each", "live": "live listeners"}
    for axes, (kind, label) in zip(panels, kinds.items(), strict=True):
        for (size, said), use in zip(sizes.items(), ("ours", "mark"), strict=False):
            rows = [row for row in said["results"] if kind in row and row["without_gap"] >= DRAWN_IF]
            rows.sort(key=lambda row: row[kind])
            counts = [row[kind] for row in rows]
            for share, style, place in (("p95", "-", "bottom"), ("p50", ":", "top")) if rows else ():
                times = [row[share] for row in rows]
                axes.plot(counts, times, style, marker="o", color=colours[use])
                end = {"xytext": (8, 0), "textcoords": "offset points", "va": place}
                axes.annotate(f"{size.upper()}, {share}", (counts[-1], times[-1]), color=colours[use], **end)
        axes.set(xlabel=label, xlim=(0, 1.2 * axes.get_xlim()[1]))
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="time to first audio, ms", ylim=0)
    figure.suptitle(f"One {told['card']}, commit {told['commit']}, random weights", fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="results for --draw")
    parser.add_argument("--draw", metavar="NAME", help="make NAME-light.svg and NAME-dark.svg of what run_all.py wrote")
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--rates", type=above_0, nargs="*", default=[10, 20, 30])
    parser.add_argument("--live", type=positive, nargs="*", default=[64, 128])
    parser.add_argument("--throughput", type=positive, nargs="*", default=[64])
    parser.add_argument("--vocoder", choices=("float32", "tf32"), default="float32")
    parser.add_argument("--slots", type=positive, default=256)
    parser.add_argument("--seconds", type=above_0, default=20)
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--json", type=new_file, help="where to write the results too")
    args = parser.parse_args()
    if args.throughput and args.seconds <= 2:
        parser.error("--throughput takes half of --seconds and drops its first second: give more than 2")
    if args.draw:
        if args.file is None:
            parser.error("--draw needs a file that run_all.py wrote")
        try:
            told = json.loads(Path(args.file).read_text())
            draw(args.draw, told)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise SystemExit(f"{args.file} is not what run_all.py wrote: {error!r}") from None
        return
    results = []
    with random_model(args.size) as folder:
        queue = max([64, *args.throughput])  # who is always open must not be refused: it would ask again at once
        options = {"max_streams": args.slots, "max_positions": 512, "max_queue": queue, "vocoder_dtype": args.vocoder}
        with TTSEngine.load(folder, device=args.device, **options) as engine:
            gc.collect()  # as the services do: a full collection scans all of torch, some 100 ms
            gc.freeze()
            sustained = engine.health()["sustained"]
            print(f"{machine()}, commit {commit()}, {args.size}, {engine.backend} backend, {args.vocoder} vocoder")
            print(f"{args.slots} slots of 512 positions, {sustained} at once; utterances of {FRAMES} frames")
            floor = first_audio_floor_ms(engine.config)
            heads = ("p50 ms", "p95 ms", "p99 ms", "x floor", "n", "refused", "underruns", "worst gap", "audio s/s")
            print(f"{'':24}" + "".join(f"{head:>11}" for head in heads), flush=True)

            def add(name: str, clients: list[Client], spoken_s: float, **key) -> None:
                row = key | summary(clients) | {"audio_s_per_s": spoken_s}
                row |= {"x_floor": row["p50"] / floor} if "p50" in row else {}
                results.append(row)
                shown = [f"{row.get(share, math.nan):11.1f}" for share in ("p50", "p95", "p99", "x_floor")]
                shown += [f"{row[count]:11}" for count in ("n", "refused", "underruns")]
                print(f"{name:24}{''.join(shown)}{row['worst_gap_ms']:11.1f}{spoken_s:11.1f}", flush=True)

            collections = time_collections()
            cases = [("rate", rate, poisson) for rate in args.rates] + [("live", n, live) for n in args.live]
            for kind, count, run in cases:
                began = time.perf_counter()
                clients = run(engine, count, args.seconds)
                spoken = sum(client.first is not None for client in clients) * FRAMES * FRAME_S
                unit = "requests/s" if kind == "rate" else "live listeners"
                add(f"{count:g} {unit}", clients, spoken / (time.perf_counter() - began), **{kind: count})
            for streams in args.throughput:
                clients, spoken_s = throughput(engine, streams, args.seconds / 2)
                add(f"{streams} always open", clients, spoken_s, throughput=streams)
            print(f"longest garbage collection: {max(collections, default=0.0):.1f} ms")
    told = about(args.size) | {"vocoder": args.vocoder, "slots": args.slots, "sustained": sustained}
    told |= {"floor_ms": floor, "results": results}
    if args.json:
        args.json.write_text(json.dumps(told))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
