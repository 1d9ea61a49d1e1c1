"""What do listeners of a server get? Open-loop arrivals and live listeners, over HTTP and over the WebSocket.

    python benchmarks/measure_listeners.py [--size 0.6b|1.7b|demo] [--ways HTTP WebSocket] [--rates 10 40 60]
                                           [--live 64 128 330] [--seconds 10] [--device cpu]
                                           [--front-processes 2]

`qwen-megakernel serve` runs in its own process, on loopback; clients run in others. Random weights at the published
dims, end of speech suppressed: every utterance is 5.04 s long (63 frames), its text 10 words. First audio runs from the
moment a request was due to its first audio in the client's hands. A listener starts with the first audio and hears a
gap if more comes late. "without_gap" is the share of requests that were answered and whose listener heard no gap
("C100" where others count it).

    rates  requests a second, at random times, however many are still open
    live   that many listeners, each with one utterance after the other, starting at random times

A socket is open before its request is due, as in bots; so is an HTTP connection that an earlier request has left.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import aiohttp
from common import (
    about,
    above_0,
    commit,
    first_audio_floor_ms,
    machine,
    positive,
    quantile,
    random_model,
    server,
    spread,
)
from measure_load import FRAME_S, FRAMES

from qwen_check.bench import sentence
from qwen_megakernel.checkpoint.config import ModelConfig

BYTES_A_SECOND = 2 * 24_000
EARLY_S = 0.5  # a socket is opened so long before its request is due


class Refused(Exception):
    """The server said no."""


async def wait_for(due: float) -> None:
    await asyncio.sleep(due - time.perf_counter())


async def over_http(session: aiohttp.ClientSession, url: str, fields: dict, due: float) -> AsyncIterator[bytes]:
    """The audio of a request that is sent at `due`; the first item is the name of the replica that answers."""
    await wait_for(due)
    async with session.post(url, json=fields | {"response_format": "pcm"}) as response:
        if response.status != 200:
            raise Refused(f"HTTP {response.status}")
        yield response.headers.get("X-Replica", "").encode()
        async for data in response.content.iter_any():
            yield data


async def over_websocket(session: aiohttp.ClientSession, url: str, fields: dict, due: float) -> AsyncIterator[bytes]:
    """The same through the socket, which names no replica."""
    await wait_for(due - EARLY_S)
    async with session.ws_connect(f"{url}/socket") as line:
        await line.receive()  # hello
        await wait_for(due)
        text = {"type": "text", "context": "one", "text": fields["input"], "end": True}
        await line.send_json(text | {"seed": fields["seed"], "max_frames": fields["max_frames"]})
        yield b""
        async for message in line:
            if message.type == aiohttp.WSMsgType.BINARY:
                yield message.data[4:]  # behind the number of its context
                continue
            told = json.loads(message.data)
            if told["type"] == "error":
                raise Refused(str(told))
            if told["type"] == "end":
                return
        raise Refused("the socket closed")


WAYS: dict[str, Callable] = {"HTTP": over_http, "WebSocket": over_websocket}


async def listen(audio: AsyncIterator[bytes], due: float) -> dict:
    """One request: seconds from `due` to its first audio and to its end, seconds of audio, and the longest gap."""
    first = runs_out = gap = heard = 0.0
    try:
        async with aclosing(audio):
            replica = (await anext(audio)).decode()
            async for data in audio:
                now = time.perf_counter()
                if not first:
                    first = runs_out = now
                gap, runs_out = max(gap, now - runs_out), max(now, runs_out)
                runs_out += len(data) / BYTES_A_SECOND
                heard += len(data) / BYTES_A_SECOND
    except Refused as error:
        return {"refused": str(error)}
    told = {"replica": replica, "ttfc": first - due, "end": time.perf_counter() - due}
    return told | {"heard": heard, "gap": gap}


async def visit(way: str, url: str, words: int, fields: dict, dues: list[float]) -> list[dict]:
    def request() -> dict:
        text = " ".join(sentence().split()[:words])
        return fields | {"input": text, "seed": random.randrange(2**31)}

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(listen(WAYS[way](session, url, request(), due), due) for due in dues))


def visitor(*arguments) -> list[dict]:
    random.seed()
    return asyncio.run(visit(*arguments))


def poisson(rate: float, seconds: float) -> list[float]:
    dues, now = [], 0.0
    while (now := now + random.expovariate(rate)) < seconds:
        dues.append(now)
    return dues


def live(listeners: int, seconds: float) -> list[float]:
    """One utterance more than `seconds` ask for: listeners arrive one by one."""
    length = FRAMES * FRAME_S
    starts = [random.uniform(0, length) for _ in range(listeners)]
    return [start + turn * length for start in starts for turn in range(1 + math.ceil(seconds / length))]


def crowd(pool, processes: int, way: str, url: str, words: int, fields: dict, times: list[float]) -> dict:
    """What requests got that were due at these times, in seconds from now, `words` of a sentence each."""
    began, dues = time.perf_counter() + 1, [[] for _ in range(processes)]
    for one in times:
        random.choice(dues).append(began + one)
    told = sum(pool.starmap(visitor, [(way, url, words, fields, mine) for mine in dues]), [])
    good = [one for one in told if "refused" not in one]
    if not good:
        raise SystemExit(f"none of {len(told)} requests was answered with audio: {told[:3]}; give more --seconds")
    times_ms = [1000 * one["ttfc"] for one in good]
    underruns = sum(one["gap"] > 0 for one in good)
    replicas: dict[str, int] = {}
    for one in good:
        replicas[one["replica"]] = replicas.get(one["replica"], 0) + 1
    row = spread(times_ms) | {"p99": quantile(times_ms, 0.99), "n": len(told), "refused": len(told) - len(good)}
    row |= {"underruns": underruns, "without_gap": (len(good) - underruns) / len(told)}
    row |= {name: quantile([one[of] for one in good], 0.5) for name, of in (("heard_s", "heard"), ("said_s", "end"))}
    return row | {"answered": sorted(replicas.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rates", type=above_0, nargs="*", default=[10, 40, 60])
    parser.add_argument("--live", type=positive, nargs="*", default=[64, 128, 330])
    parser.add_argument("--seconds", type=above_0, default=10, help="of a row")
    parser.add_argument("--slots", type=positive, default=256, help="slots of the server")
    parser.add_argument("--front-processes", type=int, default=0, help="of the server; default: %(default)s")
    parser.add_argument("--clients", type=positive, default=4, help="client processes")
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    cases = [("rate", rate, lambda rate=rate: poisson(rate, args.seconds)) for rate in args.rates]
    cases += [("live", count, lambda count=count: live(count, args.seconds)) for count in args.live]
    options = ["--max-streams", str(args.slots), "--max-positions", "512"]
    options += ["--device", args.device] if args.device else []
    options += ["--front-processes", str(args.front_processes)]
    results = []
    with (
        random_model(args.size) as folder,
        multiprocessing.get_context("spawn").Pool(args.clients) as pool,
        server(folder, *options) as url,
    ):
        floor = first_audio_floor_ms(ModelConfig.from_folder(Path(folder)))
        print(f"{machine()}, commit {commit()}, {args.size}, {args.slots} slots")
        heads = ("p50 ms", "p95 ms", "p99 ms", "n", "refused", "without gap")
        print(f"{'':32}" + "".join(f"{head:>12}" for head in heads), flush=True)
        speech, fields = f"{url}/v1/audio/speech", {"model": Path(folder).name, "max_frames": FRAMES}
        for way in args.ways:
            crowd(pool, args.clients, way, speech, 10, fields, [0.0])  # what is made once
            for kind, count, times in cases:
                row = crowd(pool, args.clients, way, speech, 10, fields, times())
                results.append({"way": way, kind: count} | row)
                name = f"{way}, {count:g} {'requests/s' if kind == 'rate' else 'live listeners'}"
                shown = "".join(f"{row[share]:12.1f}" for share in ("p50", "p95", "p99"))
                print(f"{name:32}{shown}{row['n']:12}{row['refused']:12}{row['without_gap']:12.1%}", flush=True)
    told = about(args.size) | {"floor_ms": floor, "slots": args.slots, "front_processes": args.front_processes}
    print(json.dumps(told | {"results": results}))


if __name__ == "__main__":
    main()
