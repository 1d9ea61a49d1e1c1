"""Does speech end where it should? The demo voice as it is, then with its end of speech suppressed.

    python benchmarks/measure_endings.py [--utterances 10000] [--suppressed 1000] [--streams 32]

Random texts (a word, a sentence, several), speakers, layouts and seeds, in turn with four sampling settings. As it is:
an utterance that the runaway guard ends is repeated without the guard. If it then ends by itself, the guard's end was
false. Lengths are given as multiples of what the text should take (engine/runaway.py). Suppressed: the guard or the
frame limit must end each utterance. Its length is compared with that of the same utterance as it is. The difference is
speech after the text.
"""

import argparse
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from common import about, commit, machine, positive, quantile

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.backend.select import select_device
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.engine.audio import FRAME_S, Audio
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.engine.runaway import HELD_SLACK, HELD_TIMES, LETTER_FRAMES, letters_of
from qwen_megakernel.sampling_params import GREEDY
from qwen_megakernel.trust.selection import Selection

SETTINGS = {
    "its own": SamplingParams(),
    "as published": SamplingParams.for_both(temperature=0.9, top_k=50),
    "hot": SamplingParams.for_both(temperature=1.2, top_k=50),
    "greedy": GREEDY,
}
SENTENCES = (Path(__file__).parents[1] / "tools/demo_voice/sent50.txt").read_text().split("\n")[:50]
SHORT = (
    "Yes.",
    "No!",
    "Hello there.",
    "OK.",
    "Seven.",
    "2026",
    "W.",
    "One, two, three.",
    "Well... I do not know. Or not.",
)


def requests(count: int, speakers: tuple[str, ...], seed: int) -> list[tuple[str, str, dict]]:
    """For each request the name of the sampling setting, the text, and how to say it."""
    rng, drawn = random.Random(seed), []
    for number in range(count):
        name = list(SETTINGS)[number % len(SETTINGS)]
        kind = rng.random()
        text = (
            rng.choice(SHORT) if kind < 0.2 else " ".join(rng.sample(SENTENCES, 1 if kind < 0.8 else rng.randint(2, 4)))
        )
        how = {"speaker": rng.choice(speakers), "non_streaming_mode": rng.random() < 0.5}
        drawn.append((name, text, how | {"sampling": replace(SETTINGS[name], seed=rng.randrange(2**63))}))
    return drawn


def without_end(engine: TTSEngine, device: torch.device, streams: int) -> TTSEngine:
    """The demo voice with an end-of-speech id that it never says. The true id is suppressed like any other tag."""
    checkpoint = Checkpoint.open("demo")
    talker = checkpoint.config.talker
    config = replace(checkpoint.config, talker=replace(talker, codec_eos_id=talker.vocab_size - 5))
    plan = Selection(engine.backend, device).choose(replace(checkpoint, config=config))
    return TTSEngine("demo", plan.checkpoint, plan, EngineOptions(streams, max_queue=streams))


def say_all(engine: TTSEngine, drawn: list[tuple[str, str, dict]], streams: int) -> list[Audio]:
    """Say all requests, `streams` at once."""
    with ThreadPoolExecutor(streams) as callers:
        return list(callers.map(lambda request: engine.generate(request[1], **request[2]), drawn))


def as_it_is(engine: TTSEngine, drawn: list[tuple[str, str, dict]], said: list[Audio]) -> dict:
    """By sampling setting: how utterances ended, and how long they are for their text."""
    results = {}
    head = f"{'as it is':14} {'utterances':>10} {'false ends':>11} {'endless':>8} {'held back':>10}"
    print(head + "   times its text: p50, p99, most")
    for name in SETTINGS:
        mine = [(request, audio) for request, audio in zip(drawn, said, strict=True) if request[0] == name]
        ended = [request for request, audio in mine if audio.finish_reason != "eos"]
        alone = Counter(engine.generate(text, **how, runaway_guard=False).finish_reason for _, text, how in ended)
        should = [LETTER_FRAMES * letters_of(request[1]) for request, _ in mine]
        times = [audio.frames / frames for (_, audio), frames in zip(mine, should, strict=True)]
        held = sum(a.frames > HELD_TIMES * f + HELD_SLACK for (_, a), f in zip(mine, should, strict=True))
        spread = [quantile(times, share) for share in (0.5, 0.99, 1.0)]
        results[name] = {"utterances": len(mine), "false_ends": alone["eos"], "endless": alone["length"], "held": held}
        results[name]["times_its_text"] = spread
        row = f"{name:14} {len(mine):10} {alone['eos']:11} {alone['length']:8} {held:10}"
        print(row + "   " + ", ".join(f"{value:.2f}" for value in spread))
    return results


def suppressed(drawn: list[tuple[str, str, dict]], said: list[Audio], endless: list[Audio]) -> dict:
    """By sampling setting: how utterances ended, and how much a listener heard after the text."""
    results = {}
    print(f"{'suppressed':14} {'utterances':>10}   {'ended by':40} seconds behind: p50, p90, most")
    for name in SETTINGS:
        mine = [i for i, request in enumerate(drawn) if request[0] == name]
        ends = Counter(endless[i].finish_reason for i in mine)
        cut = [i for i in mine if endless[i].finish_reason != "eos"]  # the others drew the code in its place
        behind = [FRAME_S * (endless[i].frames - said[i].frames) for i in cut]
        if not behind:
            continue
        spread = [quantile(behind, share) for share in (0.5, 0.9, 1.0)]
        results[name] = {"utterances": len(mine), "ends": dict(ends), "seconds_behind": spread}
        results[name]["above_3_s"] = sum(seconds > 3 for seconds in behind)
        told = ", ".join(f"{why} {count}" for why, count in sorted(ends.items()))
        print(f"{name:14} {len(mine):10}   {told:40} " + ", ".join(f"{value:.2f}" for value in spread))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utterances", type=positive, default=10_000)
    parser.add_argument("--suppressed", type=positive, default=1_000, help="how many of them to say without an end too")
    parser.add_argument("--streams", type=positive, help="utterances at once; default: 32 on a GPU, else 1")
    parser.add_argument("--seed", type=int, default=0, help="seed of texts and requests; default: %(default)s")
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    device = select_device(args.device)
    streams = args.streams or (32 if device.type == "cuda" else 1)
    with TTSEngine.load("demo", device=device, max_streams=streams, max_queue=streams, queue_timeout=600) as engine:
        print(f"{machine()}, commit {commit()}, demo voice, {engine.backend} backend")
        drawn = requests(args.utterances, engine.speakers, args.seed)
        said = say_all(engine, drawn, streams)
        told = {"as_it_is": as_it_is(engine, drawn, said)}
        drawn = drawn[: args.suppressed]
        with without_end(engine, device, streams) as other:
            endless = say_all(other, drawn, streams)
            told["suppressed"] = suppressed(drawn, said[: len(drawn)], endless)
            told["runaways"] = {name: count for name, count in other.metrics().items() if name.startswith("runaway_")}
    print(", ".join(f"{name} {count}" for name, count in told["runaways"].items()))
    print(json.dumps(about("demo") | {"results": told}))


if __name__ == "__main__":
    main()
