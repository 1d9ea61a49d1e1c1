"""How much load do more GPUs carry? Open-loop Poisson arrivals over HTTP, at one server and at Ray Serve replicas.

    python benchmarks/measure_replicas.py [--size 0.6b|1.7b|demo] [--replicas 0 1 2] [--rates 10 20 30] [--seconds 10]

Needs the extra [ray]. Each replica has its own GPU. 0 replicas: `qwen-megakernel serve`, without Ray. --rates are for
one replica; N replicas get 0.95 N times as many requests. They carry that if the time to first audio does not grow.
Random weights at the published dims, end of speech suppressed: every utterance is 5.04 s long (63 frames), its text six
words. Its listener starts with the first audio and hears a gap if more comes late. Clients run in their own processes.
TTFC runs from the moment a request was due to its first audio in the client's hands.
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import (
    about,
    above_0,
    commit,
    first_audio_floor_ms,
    free_port,
    machine,
    positive,
    random_model,
    server,
    wait_until_ready,
)
from measure_listeners import crowd, poisson
from measure_load import FRAMES

from qwen_megakernel.checkpoint.config import ModelConfig

POSITIONS = 128  # of a slot: the prompt and FRAMES
WORDS = 6  # of a text
SHARE = 0.95  # of N times one replica's rate
ENVIRONMENT = {  # as examples/ray/one_box.yaml has it; Ray reads it when it is imported
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "qwen_megakernel.serve_ray_proxy.middleware",
}


@contextmanager
def replicas(folder: str, device: str, slots: int, count: int) -> Iterator[str]:
    import ray
    from ray import serve

    from qwen_megakernel.serve_ray import Args, app

    port = free_port()
    args = Args(model=folder, device=device, max_streams=slots, max_positions=POSITIONS, min_replicas=count, drain_s=5)
    ray.init("local", include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(args))
        wait_until_ready(f"http://127.0.0.1:{port}/ready")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--replicas", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument(
        "--rates", type=above_0, nargs="*", default=[10, 20, 30], help="requests a second for each replica"
    )
    parser.add_argument("--seconds", type=above_0, default=10)
    parser.add_argument("--slots", type=positive, default=64, help="slots of each replica")
    parser.add_argument("--clients", type=positive, default=4, help="client processes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    results = []
    with random_model(args.size) as folder, multiprocessing.get_context("spawn").Pool(args.clients) as pool:
        print(f"{machine()}, {os.cpu_count()} CPUs, commit {commit()}, {args.size}, {args.slots} slots a replica")
        floor = first_audio_floor_ms(ModelConfig.from_folder(Path(folder)))
        heads = ("p50 ms", "p95 ms", "p99 ms", "x floor", "n", "refused", "underruns", "heard s", "said in s")
        print(f"{'':28}" + "".join(f"{head:>11}" for head in heads) + "  of each replica", flush=True)
        options = ("--max-streams", str(args.slots), "--max-positions", str(POSITIONS), "--device", args.device)
        for count in args.replicas:
            up = replicas(folder, args.device, args.slots, count) if count else server(folder, *options)
            with up as url:
                fields = {"model": Path(folder).name, "max_frames": FRAMES}
                asked = (pool, args.clients, "HTTP", f"{url}/v1/audio/speech", WORDS, fields)
                crowd(*asked, [0.0, *poisson(args.rates[0], 2)])  # warm-up: connections, and what is made once
                for one in args.rates:
                    rate = one if count < 2 else SHARE * count * one
                    row = crowd(*asked, poisson(rate, args.seconds))
                    row["x_floor"] = row["p50"] / floor
                    results.append({"replicas": count, "rate": rate, "rate_of_one": one} | row)
                    name = f"{count} on Ray, {rate:g}/s" if count else f"serve, {rate:g}/s"
                    shown = [f"{row[share]:11.1f}" for share in ("p50", "p95", "p99", "x_floor")]
                    shown += [f"{row[name]:11}" for name in ("n", "refused", "underruns")]
                    shown += [f"{row[name]:11.2f}" for name in ("heard_s", "said_s")]
                    print(f"{name:28}{''.join(shown)}  {row['answered']}", flush=True)
    print(json.dumps(about(args.size) | {"floor_ms": floor, "results": results}))


if __name__ == "__main__":
    main()
