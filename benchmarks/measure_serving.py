"""What does it cost to have the engine elsewhere? Time to first sound: in this process, over HTTP, over both sockets.

    python benchmarks/measure_serving.py [--size 0.6b|1.7b|demo] [--requests 100] [--device cpu]

`qwen-megakernel serve` runs in its own process, on loopback, with the same random weights. This process has an engine
too. Every round asks each way for the same text, one after the other, so that the differences are paired. Times run
from the request to its first sound in the client's hands: PCM, or the first bytes of an MP3. Connections stay open, as
in bots.
"""

import argparse
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from common import about, commit, first_audio_floor_ms, machine, positive, quantile, random_model, server, spread
from websockets.sync.client import connect

from qwen_check.bench import sentence
from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.speech.encoders import missing


def in_process(engine: TTSEngine) -> Callable[[str, int], float]:
    def ask(text: str, seed: int) -> float:
        first, began = threading.Event(), time.perf_counter()
        heard: list[float] = []

        def hear(_chunk) -> None:
            heard.append(time.perf_counter())
            first.set()

        utterance = engine.submit(text, hear, sampling=SamplingParams(seed=seed))
        first.wait()
        utterance.cancel()
        return 1000 * (heard[0] - began)

    return ask


def over_http(port: int, model: str, response_format: str = "pcm") -> Callable[[str, int], float]:
    line = http.client.HTTPConnection("127.0.0.1", port)
    line.connect()
    line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(text: str, seed: int) -> float:
        body = json.dumps({"model": model, "input": text, "response_format": response_format, "seed": seed})
        began = time.perf_counter()
        line.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"})
        response = line.getresponse()
        first = response.read(2)
        took = 1000 * (time.perf_counter() - began)
        if response.status != 200 or not first:
            raise RuntimeError(f"{response_format}: HTTP {response.status}: {(first + response.read(500)).decode()}")
        line.close()  # cancels the rest
        line.connect()
        line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return took

    return ask


def over_websocket(line, *, whole: bool) -> Callable[[str, int], float]:
    """`whole`: the text's end comes with it, not in a message of its own."""
    line.recv()  # hello

    def ask(text: str, seed: int) -> float:
        name = str(random.random())
        message = json.dumps({"type": "text", "context": name, "text": text, "end": whole, "seed": seed})
        began, took = time.perf_counter(), None
        line.send(message)
        if not whole:
            line.send(json.dumps({"type": "end", "context": name}))
        while True:
            told = line.recv()
            if isinstance(told, bytes):
                if took is None:
                    took = 1000 * (time.perf_counter() - began)
                    line.send(json.dumps({"type": "cancel", "context": name}))
            elif json.loads(told)["type"] in ("end", "error"):
                assert took is not None, told
                return took

    return ask


def over_stream_socket(line) -> Callable[[str, int], float]:
    """vLLM-Omni's protocol. It cannot cancel an utterance, so each has a few frames."""

    line.send(json.dumps({"type": "session.config", "response_format": "pcm", "max_new_tokens": 4}))

    def ask(text: str, _seed: int) -> float:
        began, took = time.perf_counter(), None
        line.send(json.dumps({"type": "input.text", "text": text}))
        line.send(json.dumps({"type": "input.done"}))
        while True:
            told = line.recv()
            if isinstance(told, bytes):
                took = took or 1000 * (time.perf_counter() - began)
            elif json.loads(told)["type"] in ("session.done", "error"):
                assert took is not None, told
                return took

    return ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--requests", type=positive, default=100)
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    with random_model(args.size) as folder:
        device = ("--device", args.device) if args.device else ()
        with server(folder, "--max-streams", "8", *device) as url, TTSEngine.load(folder, device=args.device) as engine:
            measure(engine, urlsplit(url).port, Path(folder).name, args)


def measure(engine: TTSEngine, port: int, model: str, args: argparse.Namespace) -> None:
    url = f"ws://127.0.0.1:{port}/v1/audio/speech"
    with connect(f"{url}/socket") as line, connect(f"{url}/socket") as other, connect(f"{url}/stream") as stream:
        ways = {
            "in this process": in_process(engine),
            "HTTP": over_http(port, model),
            "WebSocket": over_websocket(line, whole=True),
            "WebSocket, in pieces": over_websocket(other, whole=False),
            "vLLM-Omni's socket": over_stream_socket(stream),
        }
        if why := missing("mp3"):
            print(why)
        else:
            ways["HTTP, MP3"] = over_http(port, model, "mp3")
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(args.requests + 5):
            text, seed = sentence(), random.randrange(2**31)
            for way in random.sample(sorted(ways), len(ways)):
                time.sleep(random.random() * 0.03)
                took = ways[way](text, seed)
                if turn >= 5:
                    times[way].append(took)
    print(f"{machine()}, commit {commit()}, {args.size}, {engine.backend} backend, {args.requests} requests each")
    floor = first_audio_floor_ms(engine.config)
    print(f"{'first sound':20}  p50 ms  p95 ms  p99 ms  x floor  added, p50 of the pairs")
    results = {}
    base = times["in this process"]
    for way, took in times.items():
        added = quantile([mine - theirs for mine, theirs in zip(took, base, strict=True)], 0.5)
        row = spread(took) | {"p99": quantile(took, 0.99), "added_p50": added}
        row["x_floor"] = row["p50"] / floor
        results[way] = row
        print(f"{way:20}" + "".join(f"  {row[share]:6.2f}" for share in ("p50", "p95", "p99")), end="")
        print(f"  {row['x_floor']:7.1f}  {added:6.2f}")
    print(json.dumps(about(args.size) | {"floor_ms": floor, "results": results}))


if __name__ == "__main__":
    main()
