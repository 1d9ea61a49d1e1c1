"""How much compute does a stream take? Compute time over audio time of a 10 s utterance, vocoder included.

    python benchmarks/measure_rtf.py [--size 0.6b|1.7b|demo] [--streams 1 4 8] [--chunks 1 8]

Random weights at the published dims, end of speech suppressed, sampling as published. With several streams at once the
figure is each stream's own; below 1 it keeps up with its listener. The floor is the time to read the weights of a frame
and of the vocoder, for all streams together. In the last rows the process's event loop computes in pure Python for 8 of
every 10 ms.
"""

import argparse
import contextlib
import json

from common import CLAIMED, about, busy_loop, commit, floors_ms, machine, positive, random_model, spread

from qwen_check.bench import sentence
from qwen_megakernel import TTSEngine

SECONDS, FRAME_S = 10, 0.08


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), default="0.6b")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 4, 8])
    parser.add_argument("--chunks", type=positive, nargs="+", default=[1, 8], help="frames of a chunk")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    results = {}
    with random_model(args.size) as folder:
        with TTSEngine.load(folder, device=args.device, max_streams=max(args.streams)) as engine:
            print(f"{machine()}, commit {commit()}, {args.size}, {engine.backend} backend")
            floors = floors_ms(engine.config)
            floor = (floors["frame"] + floors["vocoder"]) / (1000 * FRAME_S)
            print(f"{'':44} {'RTF':>8} {'x floor':>8} {'ms a frame':>11} {'least lead ms':>14}")
            engine.generate(sentence(), max_frames=20)
            cases = [(streams, chunk, False) for streams in args.streams for chunk in args.chunks]
            for streams, chunk, busy in cases + [(1, chunk, True) for chunk in args.chunks]:
                rtfs, leads = [], []
                with busy_loop() if busy else contextlib.nullcontext():
                    for _ in range(args.repeats):
                        request = {"chunk_frames": chunk, "max_frames": int(SECONDS / FRAME_S), "runaway_guard": False}
                        for utterance in [engine.submit(sentence(), **request) for _ in range(streams)]:
                            audio = utterance.result()
                            rtfs.append(audio.rtf)
                            leads.append(1000 * (audio.lead_s or 0.0))
                name = f"{streams} streams, chunks of {chunk}" + (", event loop at 80 %" if busy else "")
                results[name] = spread(rtfs) | {"worst": max(rtfs), "least_lead_ms": min(leads)}
                rtf = results[name]["p50"]
                print(f"{name:44} {rtf:8.4f} {rtf / floor:8.2f} {1000 * FRAME_S * rtf:11.2f} {min(leads):14.1f}")
    print(CLAIMED)
    print(json.dumps(about(args.size) | {"floor": floor, "results": results}))


if __name__ == "__main__":
    main()
