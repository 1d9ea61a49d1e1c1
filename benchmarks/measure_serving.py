"""What does it cost to have the engine elsewhere? Time to first sound: in this process, over HTTP, over both sockets.

    python benchmarks/measure_serving.py [--size 0.6b|1.7b|demo] [--requests 100] [--device cpu] [--traces]

`qwen-megakernel serve` runs in its own process, on loopback, with the same random weights. This process has an engine
too. Every round asks each way for the same text, one after the other, so that the differences are paired. Times run
from the request to its first sound in the client's hands: PCM, or the first bytes of an MP3. Connections stay open, as
in bots.

With --traces: what do traces and a log as JSON cost? Two servers on one device, one with them and one without, are
asked by turns. A stand-in for a collector takes the traces.
"""

import argparse
import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    parser.add_argument("--traces", action="store_true", help="what traces and a log as JSON cost, by turns")
    args = parser.parse_args()
    with random_model(args.size) as folder:
        options = ["--max-streams", "8", *(("--device", args.device) if args.device else ())]
        if args.traces:
            measure_traces(folder, options, args)
            return
        with server(folder, *options) as url, TTSEngine.load(folder, device=args.device) as engine:
            measure(engine, urlsplit(url).port, Path(folder).name, args)


@contextlib.contextmanager
def collector(taken: list[int]) -> Iterator[str]:
    """The address of a stand-in for a collector of traces. `taken`: bytes of each request to it."""

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}"
        listener.shutdown()


def measure_traces(folder: str, options: list[str], args: argparse.Namespace) -> None:
    model, taken = Path(folder).name, list[int]()
    times: dict[str, tuple[list[float], list[float]]] = {"HTTP": ([], []), "WebSocket": ([], [])}
    with collector(taken) as address:
        more = ("--log-format", "json", "--otlp-endpoint", address)
        with (
            server(folder, *options) as plain,
            server(folder, *options, *more) as traced,
            contextlib.ExitStack() as stack,
        ):
            ports = [urlsplit(url).port for url in (plain, traced)]
            lines = [stack.enter_context(connect(f"ws://127.0.0.1:{port}/v1/audio/speech/socket")) for port in ports]
            ways = {
                "HTTP": [over_http(port, model) for port in ports],
                "WebSocket": [over_websocket(line, whole=True) for line in lines],
            }
            for turn in range(args.requests + 5):
                text, seed = sentence(), random.randrange(2**31)
                for way, which in random.sample([(way, which) for way in ways for which in (0, 1)], 4):
                    time.sleep(random.random() * 0.03)
                    took = ways[way][which](text, seed)
                    if turn >= 5:
                        times[way][which].append(took)
    if not taken:
        raise RuntimeError("no traces came to the collector: pip install -e '.[traces]'")
    print(f"{machine()}, commit {commit()}, {args.size}, {args.requests} requests each, {sum(taken)} bytes of traces")
    print(f"{'first sound':20}  p50 ms: without  with traces and JSON  added, p50 of the pairs")
    results = {}
    for way, (without, traced_ms) in times.items():
        added = quantile([mine - theirs for mine, theirs in zip(traced_ms, without, strict=True)], 0.5)
        row = {"without": spread(without), "traces": spread(traced_ms), "added_p50": added}
        row["added_percent"] = 100 * added / row["without"]["p50"]
        results[way] = row
        print(f"{way:20}  {row['without']['p50']:15.2f}  {row['traces']['p50']:20.2f}  {added:5.2f}", end="")
        print(f" ({row['added_percent']:.1f} %)")
    print(json.dumps(about(args.size) | {"results": results}))


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
