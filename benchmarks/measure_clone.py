"""How soon does a voice speak that a request brings along? First audio of a new recording and of a known one.

    python benchmarks/measure_clone.py [--size 0.6b|1.7b|tiny] [--requests 10] [--seconds 5] [--device cpu]

`qwen-megakernel serve --allow-clone --allow-upload` runs in its own process, on loopback, with random weights of a
Base checkpoint. Recordings are noise of `--seconds` s, with a text. Before, a client had to upload a voice and then
name it. The second use of a voice finds its prompt kept, if the engine has had the time.
"""

import argparse
import base64
import http.client
import io
import json
import random
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import soundfile
from common import about, commit, machine, positive, random_model, server, spread

from qwen_check.bench import sentence

_TEXT = "A sentence of some ten words, which the recording says."


def recording(seconds: float) -> str:
    samples = np.random.default_rng().uniform(-0.3, 0.3, int(24000 * seconds)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 24000, format="WAV", subtype="PCM_16")
    return base64.b64encode(file.getvalue()).decode()


def first_audio_ms(line: http.client.HTTPConnection, fields: dict, also: float = 0.0) -> float:
    """`also`: seconds that were needed before."""
    body = json.dumps({"input": sentence(), "response_format": "pcm", "max_frames": 8} | fields)
    began = time.perf_counter()
    line.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"})
    answer = line.getresponse()
    assert answer.status == 200, answer.read()
    answer.read(2)
    took = time.perf_counter() - began
    answer.read()
    return 1000 * (took + also)


def uploaded(line: http.client.HTTPConnection, name: str, sound: str) -> float:
    """Seconds to make a named voice."""
    body = json.dumps({"name": name, "audio": sound, "text": _TEXT})
    began = time.perf_counter()
    line.request("POST", "/v1/voices", body, {"Content-Type": "application/json"})
    answer = line.getresponse()
    assert answer.status == 201, answer.read()
    answer.read()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "tiny"), default="0.6b")
    parser.add_argument("--requests", type=positive, default=10)
    parser.add_argument("--seconds", type=positive, default=5, help="of each recording")
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    device = ("--device", args.device) if args.device else ()
    times: dict[str, list[float]] = {"upload, then name": [], "in one request": [], "saved": [], "the same again": []}
    with random_model(args.size, "base") as folder, server(folder, "--allow-clone", "--allow-upload", *device) as url:
        line = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port)
        for turn in range(args.requests + 1):
            sound, other, name = recording(args.seconds), recording(args.seconds), f"v{random.randrange(2**31)}"
            made_s = uploaded(line, name, other)
            clone = {"ref_audio": sound, "ref_text": _TEXT}
            asked = [({"voice": name}, made_s), (clone, 0.0), ({"voice": name}, 0.0), (clone, 0.0)]
            took = [first_audio_ms(line, fields, also) for fields, also in asked]
            if turn:  # the first one loads the encoders
                for way, one in zip(times, took, strict=True):
                    times[way].append(one)
    print(f"{machine()}, commit {commit()}, {Path(folder).name}, {args.requests} recordings of {args.seconds} s")
    print(f"{'first audio':20}  p50 ms     max")
    for way, took in times.items():
        print(f"{way:20}{spread(took)['p50']:8.1f}{max(took):8.1f}")
    print(json.dumps(about(args.size) | {"results": {way: spread(took) for way, took in times.items()}}))


if __name__ == "__main__":
    main()
