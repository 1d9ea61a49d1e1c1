"""How many callers do N GPUs behind Ray Serve carry? A simulation, fed with what one GPU was measured to do.

    python benchmarks/simulate_fleet.py [--replicas-json FILE] [--gpus 1 2 4 ... 1000] [--rates 20 60 100] [--rated 100]
    python benchmarks/simulate_fleet.py --check FILE

FILE is measure_replicas.py's last line, or a file of run_all.py with that part. --check puts the model beside it: look
at that first. Calls come at random times (Poisson), however many are still open. Each is one utterance of --seconds.
What is assumed:

  * With n streams open a GPU makes so many seconds of audio a second, shared equally. That is measured with a few n
    (measure_rtf.py, and measure_load.py --throughput); between them it lies on a straight line, above them it stays.
  * First audio comes after a time that is drawn anew for each call. Its p50, p95 and p99 grow along straight lines with
    the number of open streams. The lines are fitted: at each rate one simulated GPU has the percentiles that were
    measured of one. Without --replicas-json this is the engine alone; with it HTTP and Ray's own time are in it.
  * Replicas do not disturb each other, and neither CPUs, network nor proxies are ever short.
  * A load balancer gives each call to the proxy of a random machine. As Ray Serve 2.60 does, the proxy draws two of its
    own machine's replicas and takes the one with fewer open calls; if both are full it draws two of the whole fleet. If
    those are full too, the call waits and draws again, after 25 ms, then twice as long each time, at most 0.5 s. If 512
    wait in a proxy, it refuses. Proxies know how many calls are open; Ray's may be up to 10 s behind.
  * A replica takes as many calls as it has slots. Nothing breaks.
"""

import argparse
import heapq
import json
import math
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import above_0, commit, positive

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
UTTERANCE_S = 5.04  # of measure_load.py and measure_replicas.py
PROXY_QUEUE = 512  # Limits.connections of the server
FIRST_WAIT_S, LONGEST_WAIT_S = 0.025, 0.5  # of Ray Serve's router
FITS = 6  # rounds of `fitted`: then p50 and p95 of one H200 are within 6 % of the measured ones
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Curve:
    """What one replica was measured to do."""

    speeds: dict[float, float]  # seconds of audio a second, by open streams
    rows: list[dict]  # of Poisson arrivals at one replica: rate, p50, p95, p99 in ms

    def speed(self, streams: np.ndarray) -> np.ndarray:
        known = sorted(self.speeds.items())
        return np.interp(streams, [0, *(n for n, _ in known)], [0, *(speed for _, speed in known)])

    def mean_open(self, rate: float, slots: int = 256) -> float:
        """Streams open on average. Exact for equal shares and random arrivals, whatever the lengths are."""
        streams = np.arange(1, slots + 1)
        weights = np.cumsum(np.log(rate * UTTERANCE_S / self.speed(streams)))
        weights = np.exp(np.concatenate([[0.0], weights]) - max(0.0, weights.max()))
        return float((weights[1:] * streams).sum() / weights.sum())

    def ttfc_ms(self, streams: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A time to first audio for each call that makes the open streams so many, itself among them."""
        rows = sorted(self.rows, key=lambda row: row["rate"])
        opens = np.array([1 + self.mean_open(row["rate"]) for row in rows])
        p50, p95, p99 = (_line(streams, opens, np.array([row[share] for row in rows])) for share in SHARES)
        low, middle, high = (-math.log(1 - share) for share in SHARES.values())
        drawn = rng.exponential(size=len(streams))  # a share as the tail of an exponential: lines between p50, p95, p99
        below = p50 + (p95 - p50) * (drawn - low) / (middle - low)
        return np.where(drawn < middle, np.maximum(0, below), p95 + (p99 - p95) * (drawn - middle) / (high - middle))


def _line(x: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Between known points straight, below the first one constant, above the last two straight on."""
    inside = np.interp(x, known, values)
    if len(known) < 2:
        return inside
    slope = max(0.0, (values[-1] - values[-2]) / (known[-1] - known[-2]))
    return inside + slope * np.maximum(0, x - known[-1])


class Replica:
    """Streams that share one GPU. It computes what happened since it was last looked at."""

    def __init__(self, speeds: list[float], ended: np.ndarray):
        self.speeds, self.ended = speeds, ended
        self.now = self.made = 0.0  # made: seconds of audio of a stream that was always open
        self.open: list[tuple[float, int]] = []  # a heap: where `made` is when a call ends, and the call

    def busy(self, now: float) -> int:
        """Open streams."""
        while self.open:
            pace = self.speeds[len(self.open)] / len(self.open)
            end = self.now + (self.open[0][0] - self.made) / pace
            if end > now:
                self.made += (now - self.now) * pace
                break
            self.now = end
            self.made, call = heapq.heappop(self.open)
            self.ended[call] = end
        self.now = now
        return len(self.open)

    def take(self, call: int, seconds: float) -> None:
        """Right after `busy`."""
        heapq.heappush(self.open, (self.made + seconds, call))


@dataclass
class Fleet:
    """Replicas behind Ray Serve's proxies. `choices`: 2, or 1 to draw a replica blindly."""

    curve: Curve
    gpus: int
    slots: int = 64
    gpus_a_machine: int = 8
    choices: int = 2
    replicas: list[Replica] = field(init=False)

    @property
    def machines(self) -> int:
        return -(-self.gpus // self.gpus_a_machine)

    def run(self, due: np.ndarray, seconds: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Of each call: `begun`, when a replica took it (NaN: refused); `streams`, how many were open then, itself
        among them; `ended`, when all of it was made."""
        calls, draw = len(due), random.Random(seed)
        begun, ended, streams = np.full(calls, np.nan), np.full(calls, np.nan), np.zeros(calls, int)
        speeds = self.curve.speed(np.arange(self.slots + 1)).tolist()
        self.replicas = [Replica(speeds, ended) for _ in range(self.gpus)]
        waiting = [deque() for _ in range(self.machines)]
        again: list[tuple[float, int, int]] = []  # a heap: when a machine's proxy draws again, its machine, how often
        due_s, seconds, call = due.tolist(), seconds.tolist(), 0
        while call < calls or again:
            if call < calls and not (again and again[0][0] < due_s[call]):
                now, machine, tries = due_s[call], draw.randrange(self.gpus) // self.gpus_a_machine, 0
                refused = len(waiting[machine]) >= PROXY_QUEUE
                call += 1
                if refused:
                    continue
                waiting[machine].append(call - 1)
            else:
                now, machine, tries = heapq.heappop(again)
            replica = self._route(machine, now, draw, local=not tries)
            if replica is None:
                wait = min(FIRST_WAIT_S * 2**tries, LONGEST_WAIT_S)
                heapq.heappush(again, (now + wait, machine, tries + 1))
                continue
            one = waiting[machine].popleft()  # whoever has waited longest
            replica.take(one, seconds[one])
            begun[one], streams[one] = now, len(replica.open)
        for replica in self.replicas:
            replica.busy(math.inf)
        return {"begun": begun, "ended": ended, "streams": streams}

    def _route(self, machine: int, now: float, draw: random.Random, local: bool) -> Replica | None:
        """A replica with room, or None."""
        start, everywhere = machine * self.gpus_a_machine, (0, self.gpus)
        own = (start, min(self.gpus_a_machine, self.gpus - start))
        for first, count in (own, everywhere) if local and own != everywhere else (everywhere,):
            number = int(draw.random() * count)
            replica = self.replicas[first + number]
            busy = replica.busy(now)
            if self.choices == 2 and count > 1:
                another = self.replicas[first + (number + 1 + int(draw.random() * (count - 1))) % count]
                if another.busy(now) < busy:
                    replica, busy = another, len(another.open)
            if busy < self.slots:
                return replica
        return None


def arrivals(rate: float, calls: int, rng: np.random.Generator) -> np.ndarray:
    """Times at which calls are due: Poisson."""
    return np.cumsum(rng.exponential(1 / rate, calls))


def load(fleet: Fleet, rate: float, seconds: float, seed: int) -> dict:
    """A row like measure_replicas.py's. It starts with as many open calls as the rate leads to; of those, and of the
    first fifth of the others, nothing counts."""
    rng = np.random.default_rng(seed)
    calls = max(20_000, 150 * fleet.gpus)
    streams = np.arange(fleet.slots + 1)
    speed = fleet.curve.speed(streams)
    there = fleet.gpus * int(np.interp(rate * seconds / fleet.gpus, speed, streams))
    full = rate * seconds > fleet.gpus * speed[-1]  # more than the fleet can make: its queues are full soon
    queued = PROXY_QUEUE * fleet.machines if full else 0  # within the first wait, or all would draw again in step
    due = np.concatenate([np.zeros(there), rng.uniform(0, LONGEST_WAIT_S, queued), arrivals(rate, calls, rng)])
    lengths = np.concatenate([rng.uniform(0, seconds, there), np.full(queued + calls, seconds)])
    counts = np.arange(len(due)) >= there + queued + calls // 5
    order = np.argsort(due, kind="stable")
    due, lengths, counts = due[order], lengths[order], counts[order]
    told = fleet.run(due, lengths, seed)
    ttfc = 1000 * (told["begun"] - due) + fleet.curve.ttfc_ms(told["streams"], rng)
    heard = counts & np.isfinite(ttfc)
    row = {name: float(np.quantile(ttfc[heard], share)) for name, share in SHARES.items()}
    row |= {"refused": float(1 - heard.sum() / counts.sum()), "open": float(told["streams"][heard].mean())}
    return row | {"said_s": float(np.median((told["ended"] - due)[heard]))}


def fitted(curve: Curve, seed: int) -> Curve:
    """The same, but its rows are such that one simulated GPU has their percentiles. Without that the model's p95 of one
    H200 is 1.1 to 1.3 times the measured one: the open streams of a rate vary, and above the mean times grow fast."""
    rows = [dict(row) for row in curve.rows]
    for _ in range(FITS):
        for row, measured in zip(rows, curve.rows, strict=True):
            model = load(Fleet(Curve(curve.speeds, rows), 1), row["rate"], UTTERANCE_S, seed)
            times = np.maximum.accumulate([row[share] * measured[share] / model[share] for share in SHARES])
            row.update(zip(SHARES, times.tolist(), strict=True))
    return Curve(curve.speeds, rows)


def largest_rate(fleet: Fleet, target_ms: float, seconds: float, seed: int) -> float:
    """Calls a second that the fleet carries with a p95 of `target_ms`, none refused."""
    low, high = 0.0, float(fleet.curve.speed(np.array([fleet.slots]))[0]) / seconds * fleet.gpus
    while high - low > 0.005 * high:
        middle = (low + high) / 2
        row = load(fleet, middle, seconds, seed)
        fits = row["p95"] <= target_ms and not row["refused"]
        low, high = (middle, high) if fits else (low, middle)
    return low


def said(path: Path, size: str, name: str) -> dict:
    """What benchmark `name` said of a model: path is its last line, or a file of run_all.py."""
    try:
        told = json.loads(path.read_text())
        told = told["benchmarks"][name][size]["said"] if "benchmarks" in told else told
        if told["size"] != size or not told["results"]:
            raise SystemExit(f"{path} is of size {told['size']}: give --size, or a file of size {size}")
        return told
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"{path} is not what {name}.py or run_all.py wrote of {size} ({error!r})") from None


def read_curve(card: Path, size: str, replicas: Path | None) -> Curve:
    rows = said(card, size, "measure_load")["results"]
    speeds = {row["throughput"]: row["audio_s_per_s"] for row in rows if "throughput" in row}
    if "benchmarks" in json.loads(card.read_text()):
        for name, row in said(card, size, "measure_rtf")["results"].items():
            streams, rest = name.split(" ", 1)
            if rest == "streams, chunks of 8":
                speeds[int(streams)] = int(streams) / row["p50"]
    if not speeds or min(speeds) > 1:
        raise SystemExit(
            f"{card} lacks the speed of one stream; measure_load.py --throughput 1 8 64 --json FILE tells it"
        )
    if replicas:
        rows = [row for row in said(replicas, size, "measure_replicas")["results"] if row["replicas"] == 1]
    most = 0.8 * max(speeds.values()) / UTTERANCE_S  # calls a second; beyond, times grow faster than a straight line
    rows = [row for row in rows if "p50" in row and row.get("rate", math.inf) < most]
    if not rows:
        raise SystemExit(f"{replicas or card} has no row of random arrivals at one replica, with p50, p95 and p99")
    return Curve(speeds, rows)


HEADS = "".join(f"{head:>9}" for head in ("p50 ms", "p95 ms", "p99 ms", "refused", "open", "said s"))


def shown(row: dict) -> str:
    times = "".join(f"{row[share]:9.1f}" for share in SHARES)
    return f"{times}{row['refused']:9.2%}{row['open']:9.1f}{row['said_s']:9.2f}"


def check(curve: Curve, told: dict, options: dict, seed: int) -> list[dict]:
    """The model beside the rows of measure_replicas.py, but for those without Ray."""
    print(f"{'':28}{HEADS}")
    results = []
    for row in (row for row in told["results"] if row["replicas"]):
        model = load(Fleet(curve, row["replicas"], **options), row["rate"], UTTERANCE_S, seed)
        ratio = {share: model[share] / row[share] for share in SHARES}
        name = f"{row['replicas']} on Ray, {row['rate']:g}/s"
        print(f"{name + ', model':28}{shown(model)}")
        print(f"{'  measured':28}" + "".join(f"{row[share]:9.1f}" for share in SHARES))
        print(f"{'  model / measured':28}" + "".join(f"{ratio[share]:9.2f}" for share in SHARES), flush=True)
        results.append({"replicas": row["replicas"], "rate": row["rate"], "model": model, "ratio": ratio})
    return results


def ask(curve: Curve, args: argparse.Namespace, options: dict) -> dict:
    """What fleets do at --rates of one GPU, then what they carry."""
    results, carried = [], []
    print(f"{'GPUs x calls a second each':28}{HEADS}")
    for gpus in args.gpus:
        for one in args.rates:
            row = load(Fleet(curve, gpus, **options), one * gpus, args.seconds, args.seed)
            results.append({"replicas": gpus, "rate": one * gpus, "rate_of_one": one} | row)
            print(f"{f'{gpus} x {one:g}':28}{shown(row)}", flush=True)
    target = load(Fleet(curve, 1, **options), args.rated, args.seconds, args.seed)["p95"]
    print(f"\nthe largest rate with a p95 of {target:.1f} ms, that of one GPU at {args.rated:g} calls a second:")
    print(f"{'GPUs':>8}{'calls/s':>12}{'listeners':>12}{'of each':>10}")
    for gpus in args.gpus:
        rate = largest_rate(Fleet(curve, gpus, **options), target, args.seconds, args.seed)
        carried.append({"replicas": gpus, "rate": rate, "listeners": rate * args.seconds})
        print(f"{gpus:8}{rate:12.0f}{rate * args.seconds:12.0f}{rate / gpus:10.1f}", flush=True)
    return {"target_p95_ms": target, "results": results, "carried": carried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", type=Path, default=RESULTS / "nvidia-h200-782f47f.json", help="what run_all.py wrote")
    parser.add_argument("--size", default="0.6b", help="of the model")
    parser.add_argument("--replicas-json", type=Path, help="first audio through Ray: a file of measure_replicas.py")
    parser.add_argument("--check", type=Path, help="the same, to compare the model with; then ends")
    parser.add_argument("--gpus", type=positive, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000])
    parser.add_argument("--gpus-a-machine", type=positive, default=8)
    parser.add_argument("--rates", type=above_0, nargs="*", default=[20, 60, 100], help="calls a second, of one GPU")
    parser.add_argument("--rated", type=above_0, default=100, help="calls a second of one GPU, whose p95 is the target")
    parser.add_argument("--seconds", type=above_0, default=UTTERANCE_S, help="of audio of a call")
    parser.add_argument("--slots", type=positive, default=256, help="of one replica")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    options = {"slots": args.slots, "gpus_a_machine": args.gpus_a_machine}
    curve = fitted(read_curve(args.card, args.size, args.check or args.replicas_json), args.seed)
    replicas = args.check or args.replicas_json
    of = said(replicas, args.size, "measure_replicas") if replicas else said(args.card, args.size, "measure_load")
    print(f"simulated with what {of['machine']} did at commit {of['commit']}; {args.size}, commit {commit()}")
    speeds = ", ".join(f"{streams}: {speed:.0f}" for streams, speed in sorted(curve.speeds.items()))
    print(f"seconds of audio a second, by open streams: {speeds}")
    about = {"measured_on": of["machine"], "measured_at": of["commit"], "commit": commit(), "size": args.size} | options
    told = {"check": check(curve, of, options, args.seed)} if args.check else ask(curve, args, options)
    print(json.dumps(about | told))


if __name__ == "__main__":
    main()
