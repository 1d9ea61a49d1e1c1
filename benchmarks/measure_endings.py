"""Does speech end where it should? The demo voice as it is, then with its end of speech suppressed.

    python benchmarks/measure_endings.py [--utterances 10000] [--suppressed 1000] [--cut 1000] [--streams 32]

Random texts (a word, a sentence, several), whole and in pieces, speakers, layouts and seeds, in turn with four sampling
settings. As it is: an utterance that the runaway guard ends is repeated without the guard. If it then ends by itself,
the guard's end was false. "lost": the model has left out some of the text (`Audio.lost`). Lengths are given as
multiples of what the text should take (engine/runaway.py). Suppressed: the guard or the frame limit must end each
utterance. Its length is compared with that of the same utterance as it is. The difference is speech after the text.
Cut: the model sees no more than a random part of each text, with its end, and without it.
"""

import argparse
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import about, commit, machine, positive, quantile

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.backend.select import select_device
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.engine.audio import FRAME_S, Audio
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.engine.runaway import HELD_SLACK, HELD_TIMES, LETTER_FRAMES, letters_of
from qwen_megakernel.model.prompt import Prompt, Tokens
from qwen_megakernel.sampling_params import GREEDY
from qwen_megakernel.trust.selection import Selection

SETTINGS = {
    "its own": SamplingParams(),
    "as published": SamplingParams.for_both(temperature=0.9, top_k=50),
    "hot": SamplingParams.for_both(temperature=1.2, top_k=50),
    "greedy": GREEDY,
}
VOICE = Path(__file__).parents[1] / "tools/demo_voice"
FILES = ("sent50.txt", "held_out.txt", "as_typed.txt")
LINES = [line for name in FILES for line in (VOICE / name).read_text("utf-8").splitlines()]
SENTENCES = [line.replace("\\n", "\n") for line in LINES if line and not line.startswith("#")]
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
        how |= {"pieces": rng.randint(1, 40) if rng.random() < 0.3 else 0}
        drawn.append((name, text, how | {"sampling": replace(SETTINGS[name], seed=rng.randrange(2**63))}))
    return drawn


def without_end(engine: TTSEngine, device: torch.device, streams: int) -> TTSEngine:
    """The demo voice with an end-of-speech id that it never says. The true id is suppressed like any other tag."""
    checkpoint = Checkpoint.open("demo")
    talker = checkpoint.config.talker
    config = replace(checkpoint.config, talker=replace(talker, codec_eos_id=talker.vocab_size - 5))
    plan = Selection(engine.backend, device).choose(replace(checkpoint, config=config))
    options = EngineOptions(max_streams=streams, max_queue=streams, queue_timeout=600)
    return TTSEngine("demo", plan.checkpoint, plan, options)


def cut_texts(engine: TTSEngine) -> None:
    """From now on the model sees a random part of each text, and then nothing but the text's end, again and again. The
    engine knows the whole text."""
    build, end = engine._prompts.build, engine.config.tts_eos_id

    def build_cut(tokens: Tokens, *args: Any, **options: Any) -> Prompt:
        kept = random.Random(sum(tokens.text)).randint(1, len(tokens.text))
        return build(tokens._replace(text=tokens.text[:kept] + [end] * (len(tokens.text) - kept)), *args, **options)

    engine._prompts.build = build_cut


def say(engine: TTSEngine, text: str, pieces: int, **how: Any) -> Audio:
    """`pieces`: of so many characters; 0: whole."""
    if not pieces:
        return engine.generate(text, **how)
    utterance = engine.submit(**how | {"non_streaming_mode": False})
    for start in range(0, len(text), pieces):
        utterance.push_text(text[start : start + pieces])
    utterance.end_text()
    return utterance.result()


def say_all(engine: TTSEngine, drawn: list[tuple[str, str, dict]], streams: int) -> list[Audio]:
    """Say all requests, `streams` at once."""
    with ThreadPoolExecutor(streams) as callers:
        return list(callers.map(lambda request: say(engine, request[1], **request[2]), drawn))


def as_it_is(engine: TTSEngine, drawn: list[tuple[str, str, dict]], said: list[Audio]) -> dict:
    """By sampling setting: how utterances ended, and how long they are for their text."""
    results = {}
    head = f"{'as it is':14} {'utterances':>10} {'false ends':>11} {'endless':>8} {'lost':>5} {'held back':>10}"
    print(head + "   times its text: p50, p99, most")
    for name in SETTINGS:
        mine = [(request, audio) for request, audio in zip(drawn, said, strict=True) if request[0] == name]
        ended = [request for request, audio in mine if audio.finish_reason != "eos"]
        alone = Counter(say(engine, text, **how, runaway_guard=False).finish_reason for _, text, how in ended)
        lost = [request[1] for request, audio in mine if audio.lost]
        should = [LETTER_FRAMES * letters_of(request[1]) for request, _ in mine]
        times = [audio.frames / frames for (_, audio), frames in zip(mine, should, strict=True)]
        held = sum(a.frames > HELD_TIMES * f + HELD_SLACK for (_, a), f in zip(mine, should, strict=True))
        spread = [quantile(times, share) for share in (0.5, 0.99, 1.0)]
        results[name] = {"utterances": len(mine), "false_ends": alone["eos"], "endless": alone["length"], "held": held}
        results[name]["lost"] = lost
        results[name]["times_its_text"] = spread
        row = f"{name:14} {len(mine):10} {alone['eos']:11} {alone['length']:8} {len(lost):5} {held:10}"
        print(row + "   " + ", ".join(f"{value:.2f}" for value in spread))
    return results


def cut(drawn: list[tuple[str, str, dict]], said: list[Audio]) -> dict:
    """How utterances ended whose texts were cut."""
    ends = Counter(f"{audio.finish_reason}, text lost" if audio.lost else audio.finish_reason for audio in said)
    print(f"cut: {len(drawn)} utterances: " + ", ".join(f"{why} {count}" for why, count in sorted(ends.items())))
    return {"ends": dict(ends), "seconds": quantile([audio.duration_s for audio in said], 0.5)}


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


def runaways(engine: TTSEngine) -> dict[str, int]:
    """Those that the guard has ended since the last call, by their kind."""
    found = {name: count for name, count in engine.metrics().items() if name.startswith("runaway_")}
    engine.reset_metrics()
    print(", ".join(f"{name} {count}" for name, count in found.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utterances", type=positive, default=10_000)
    parser.add_argument("--suppressed", type=positive, default=1_000, help="how many of them to say without an end too")
    parser.add_argument("--cut", type=positive, default=1_000, help="how many of them to say with a cut text too")
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
        told = {"as_it_is": as_it_is(engine, drawn, said), "runaways": {"as it is": runaways(engine)}}
        drawn = drawn[: max(args.suppressed, args.cut)]
        whole = [(name, text, how | {"pieces": 0}) for name, text, how in drawn[: args.cut]]
        with without_end(engine, device, streams) as other:
            endless = say_all(other, drawn[: args.suppressed], streams)
            told["suppressed"] = suppressed(drawn[: args.suppressed], said[: args.suppressed], endless)
            told["runaways"]["suppressed"] = runaways(other)
            cut_texts(other)
            told["cut, suppressed"] = cut(whole, say_all(other, whole, streams))
            told["runaways"]["cut, suppressed"] = runaways(other)
        cut_texts(engine)
        told["cut"] = cut(whole, say_all(engine, whole, streams))
    print(json.dumps(about("demo") | {"results": told}))


if __name__ == "__main__":
    main()
