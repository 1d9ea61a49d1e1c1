"""What does HTTP cost under load? N requests always open: first audio, and seconds of audio a second.

    python benchmarks/measure_open.py [--size 0.6b|1.7b|demo] [--open 64] [--seconds 15] [--device cpu]

`qwen-megakernel serve` runs in its own process, on loopback. A client without a library keeps N requests open: when one
ends, it sends the next. Each is 5.04 s of speech (63 frames). The server's own `first audio` is what its engine counts
from the call to the first chunk: the rest is HTTP's. Then the same through an engine in this process.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from urllib.parse import urlsplit

from common import about, commit, machine, positive, random_model, server, spread
from measure_load import FRAME_S, FRAMES, Client

from qwen_check.bench import sentence
from qwen_megakernel import TTSEngine

_WARM_S = 3.0


async def over_http(port: int, model: str, count: int, seconds: float) -> dict[str, float]:
    firsts: list[float] = []
    spoken = 0.0
    begin = time.perf_counter() + _WARM_S
    end = begin + seconds

    async def one_after_the_other() -> None:
        nonlocal spoken
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (asked := time.perf_counter()) < end:
            fields = {"model": model, "input": sentence(), "response_format": "pcm", "max_frames": FRAMES}
            body = json.dumps(fields | {"seed": random.randrange(2**31)}).encode()
            head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status = await reader.readuntil(b"\r\n\r\n")
            assert status.startswith(b"HTTP/1.1 200"), status
            first = True
            while size := int(await reader.readuntil(b"\r\n"), 16):
                await reader.readexactly(size + 2)
                now = time.perf_counter()
                if first and begin < asked:
                    firsts.append(1000 * (now - asked))
                first = False
                spoken += size / 48000 if begin < now < end else 0
            await reader.readexactly(2)
        writer.close()

    await asyncio.gather(*(one_after_the_other() for _ in range(count)))
    return spread(firsts) | {"audio_s": spoken / seconds}


def in_process(engine: TTSEngine, count: int, seconds: float) -> dict[str, float]:
    begin = time.perf_counter() + _WARM_S
    end = begin + seconds
    clients = [Client(engine, time.perf_counter()) for _ in range(count)]
    over: list[Client] = []
    while time.perf_counter() < end:
        for place, client in enumerate(clients):
            if client.done.is_set():
                over.append(client)
                clients[place] = Client(engine, time.perf_counter())
        time.sleep(0.0005)
    firsts = [1000 * (one.first - one.due) for one in (*over, *clients) if one.first and one.due > begin]
    spoken = sum(s for one in (*over, *clients) for at, s in one.heard if begin < at < end)
    return spread(firsts) | {"audio_s": spoken / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--open", type=positive, default=64)
    parser.add_argument("--slots", type=positive, help="of the engine; default: as many as are open")
    parser.add_argument("--seconds", type=positive, default=15)
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    slots = args.slots or args.open
    device = ("--device", args.device) if args.device else ()
    results = {}
    with random_model(args.size) as folder:
        with server(folder, "--max-streams", str(slots), *device) as url:
            port = urlsplit(url).port
            results["HTTP"] = asyncio.run(over_http(port, Path(folder).name, args.open, args.seconds))
        with TTSEngine.load(folder, device=args.device, max_streams=slots) as engine:
            results["in this process"] = in_process(engine, args.open, args.seconds)
            backend = engine.backend
    print(f"{machine()}, commit {commit()}, {args.size}, {backend} backend, {args.open} open, {slots} slots")
    print(f"{'':18}first audio p50 ms      p95   s of audio a second, of {args.open * FRAMES * FRAME_S:.0f} s open")
    for way, row in results.items():
        print(f"{way:18}{row['p50']:18.1f}{row['p95']:9.1f}{row['audio_s']:22.1f}")
    print(json.dumps(about(args.size) | {"open": args.open, "slots": slots, "results": results}))


if __name__ == "__main__":
    main()
