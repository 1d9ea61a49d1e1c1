"""What tables and charts show: each cell's place in the files of benchmarks/results/. tools/figures.py writes them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import measure_drift
import measure_load
import measure_peers

OLD = ("nvidia-h100-80gb-hbm3-d5cd581",)
"""Files that pages show although speed has changed since. Measure anew until none is left."""

CARDS = ("H200", "H100")
SIZES = ("0.6b", "1.7b")


@dataclass(frozen=True)
class Table:
    """Rows and columns by their labels. Each holds fields; together they give a cell its `card`, its `path` (PART >
    SIZE > key > ..., with fields in braces) and its `form`. `comparison`: with others, so never old. `timed`: a
    change of speed makes it old."""

    head: str
    columns: dict[str, dict]
    rows: dict[str, dict]
    path: str = ""
    form: str = ".2f"
    comparison: bool = False
    timed: bool = True


@dataclass(frozen=True)
class Chart:
    """Of the newest file that has this part of `run_all.py`. `size`: that it must have measured; None: any. `timed`: a
    change of speed makes it old."""

    part: str
    alt: str
    draw: Callable[[str, dict], None]
    size: str | None = None
    comparison: bool = False
    timed: bool = True


def models(**fields) -> dict[str, dict]:
    """A row for each card and size."""
    return {f"{card}, {size.upper()}": {"card": card, "size": size, **fields} for card, size in product(CARDS, SIZES)}


def on_cards(field: str, cases: dict[str, object]) -> dict[str, dict]:
    """A row for each card and case, with the case's value in `field`."""
    pairs = product(CARDS, cases.items())
    return {f"{card}, {case}": {"card": card, field: value} for card, (case, value) in pairs}


def with_cases(cases: dict[str, dict]) -> dict[str, dict]:
    """A row for each card, size and case."""
    pairs = product(models().items(), cases.items())
    return {f"{model}, {case}" if case else model: fields | more for (model, fields), (case, more) in pairs}


FRAME = "measure_decode{weights} > {size} > results > kernel, columns {streams}, position {position} > {of}"
FRAME_OF_ONE = {"weights": "", "streams": 1, "position": 200, "of": "p50"}
BF16, FP8 = {"weights": ""}, {"weights": ", FP8"}
FIRST_AUDIO = "measure_ttfc > {size} > results > {case} > {of}"
RTF = "measure_rtf > {size} > results > {streams} streams, chunks of {chunk} > {of}"
LOAD = {
    "in one process": "measure_load > {size} > results > {who} > {of}",
    "HTTP": "measure_listeners > {size} > results > way=HTTP, {who} > {of}",
    "WebSocket": "measure_listeners > {size} > results > way=WebSocket, {who} > {of}",
}
CALLERS = {f"{rate} a second": {"who": f"rate={rate}"} for rate in (10, 20, 60, 100, 150)}
CALLERS |= {f"{count} live": {"who": f"live={count}"} for count in (64, 128, 330, 550, 700, 1000)}
PEER = "measure_peers > {size} > peers > {peer}"
PEERS = {
    "qwen_megakernel": {"peer": "qwen_megakernel", "chunk": "1", "package": "torch"},
    "its PyTorch backend, CUDA graphs": {"peer": "qwen_megakernel, PyTorch", "chunk": "1", "package": "torch"},
    "faster-qwen3-tts, CUDA graphs": {"peer": "faster-qwen3-tts", "chunk": "1", "package": "faster-qwen3-tts"},
    "qwen-tts-hf, eager, whole utterances": {"peer": "qwen-tts-hf", "chunk": "whole", "package": "qwen-tts-hf"},
}

TABLES = {
    "speed": Table(
        head="one stream, random weights",
        columns=models(),
        rows={
            "a frame (80 ms of audio), without the vocoder, ms": {"path": FRAME, **FRAME_OF_ONE},
            "text to first audio, p50, p95, ms": {"path": FIRST_AUDIO, "case": "plain", "of": "p50 & p95"},
            "real-time factor, chunks of one frame": {
                "path": RTF,
                "streams": 1,
                "chunk": 1,
                "of": "p50",
                "form": ".3f",
            },
        },
    ),
    "peers": Table(
        head="engine",
        columns={
            "version": {"path": f"{PEER} > versions > {{package}}", "form": ""},
            "a frame, ms": {"path": f"{PEER} > frame_ms"},
            "first audio, p50, p95, ms": {"path": f"{PEER} > ttfc_ms > {{chunk}} > p50 & p95", "form": ",.1f"},
            "RTF": {"path": f"{PEER} > rtf > {{chunk}} > p50", "form": ".3f"},
            "GPU memory, GB": {"path": f"{PEER} > memory_gb", "form": ".1f"},
        },
        rows=with_cases(PEERS),
        comparison=True,
    ),
    "graphs": Table(
        head="a frame of one stream, ms",
        path="measure_decode > {size} > results > {how} > p50",
        columns={
            "this kernel": {"how": "kernel, columns 1, position 200"},
            "a CUDA graph of kernels, programmatic launches": {"how": "CUDA graph of kernels, programmatic"},
            "without those": {"how": "CUDA graph of kernels"},
        },
        rows=models(),
        comparison=True,
    ),
    "frames": Table(
        head="ms",
        path=FRAME,
        form=".3f",
        columns={
            "1 stream": {"streams": 1, "of": "p50"},
            "8": {"streams": 8, "of": "p50"},
            "16": {"streams": 16, "of": "p50"},
            "64": {"streams": 64, "of": "p50"},
            "floor": {"streams": 1, "of": "floor_ms"},
        },
        rows=with_cases(
            {
                "": {"position": 200, **BF16},
                "[FP8](fp8.md)": {"position": 200, **FP8},
                "position 2,000": {"position": 2000, **BF16},
            }
        ),
    ),
    "prompts": Table(
        head="prompt, ms",
        path="measure_decode > {size} > results > kernel, prefill of {rows} rows > p50",
        form=".3f",
        columns={f"{rows} rows": {"rows": rows} for rows in (8, 10, 16, 40)},
        rows=models(),
    ),
    "first audio": Table(
        head="p50, p95, p99, ms",
        path=FIRST_AUDIO,
        columns={size.upper(): {"size": size, "of": "p50 & p95 & p99"} for size in SIZES},
        rows=on_cards(
            "case",
            {
                "one after the other": "plain",
                "the first utterance after load": "the first utterance after load",
                "after 5 s of doing nothing": "after 5 s idle",
                "beside an event loop at 80 % load": "event loop at 80 % load",
                "eight at once": "eight at once",
                "text by tokens, from the first settled row": "text by tokens, after the first row settled",
                "cloned voice (5 s of reference), first sentence": "clone of 5 s, first sentence in that voice",
                "cloned voice, later sentences": "clone of 5 s, later sentences",
                "the vocoder alone, 1 frame of 1 stream": "vocoder, 1 frame of 1 streams",
                "the vocoder alone, 1 frame of 8 streams": "vocoder, 1 frame of 8 streams",
            },
        ),
    ),
    "real-time factor": Table(
        head="RTF",
        path=RTF,
        form=".4f",
        columns={
            "chunks of 1 frame": {"chunk": 1, "of": "p50"},
            "of 8": {"chunk": 8, "of": "p50"},
            "least [lead](architecture.md#words), chunks of 1, ms": {"chunk": 1, "of": "least_lead_ms", "form": ".0f"},
            "of 8, ms": {"chunk": 8, "of": "least_lead_ms", "form": ".0f"},
        },
        rows=with_cases({"one stream": {"streams": 1}, "eight at once, each": {"streams": 8}}),
    ),
    "end to end": Table(
        head="p50, p95, ms",
        path="measure_e2e > {size} > results > {mode} > {of} > p50 & p95",
        form=".1f",
        columns={"the user waits": {"of": "wait"}, "ours and Pipecat's": {"of": "ours"}},
        rows=with_cases({"by sentences": {"mode": "sentence"}, "by tokens": {"mode": "token"}}),
    ),
    "callers": Table(
        head="first audio, p50, p95, ms",
        form=".1f",
        columns={label: {"of": "p50 & p95", **who} for label, who in CALLERS.items()},
        rows=with_cases({way: {"path": path} for way, path in LOAD.items()}),
    ),
    "without a gap": Table(
        head="answered, and without a gap",
        form=".1%",
        columns={label: {"of": "without_gap", **who} for label, who in CALLERS.items()},
        rows=with_cases({way: {"path": path} for way, path in LOAD.items()}),
    ),
    "full load": Table(
        head="seconds of audio a second",
        form=".0f",
        columns={
            f"{count} open": {"path": f"measure_load > {{size}} > results > throughput={count} > audio_s_per_s"}
            for count in (64, 256, 512)
        }
        | {"64 open over HTTP": {"path": "measure_open > {size} > results > HTTP > audio_s"}},
        rows=models(),
    ),
    "serving": Table(
        head="ms",
        path="measure_serving > {size} > results > {way} > {of}",
        columns={"first sound, p50, p95": {"of": "p50 & p95"}, "added to the engine's, p50": {"of": "added_p50"}},
        rows=with_cases(
            {
                way: {"way": way}
                for way in (
                    "in this process",
                    "HTTP",
                    "HTTP, MP3",
                    "WebSocket",
                    "WebSocket, in pieces",
                    "vLLM-Omni's socket",
                )
            }
        ),
    ),
    "replicas": Table(
        head="0.6B, first audio, p50, p95, p99, ms",
        path="measure_replicas > 0.6b > results > replicas={count}, rate_of_one={rate} > p50 & p95 & p99",
        form=".1f",
        columns={f"{rate} a second for each": {"rate": rate} for rate in (20, 30, 40)},
        rows=on_cards("count", {"one replica": 1, "two": 2}),
    ),
    "pipecat": Table(
        head="ms",
        path="measure_pipecat > {size} > results > pipelines={count}, rate=24000 > {of}",
        form=".1f",
        columns={
            f"{size.upper()}, {count} pipeline{'s' * (count > 1)}": {"size": size, "count": count}
            for size in SIZES
            for count in (1, 8)
        },
        rows=on_cards(
            "of",
            {
                "first audio, p50, p95, p99": "first audio > p50 & p95 & p99",
                "loop stall, p99, max": "loop stall > p99 & max",
                "interruption to silence, at most": "interruption to last piece > max",
                "interruption to a free slot, at most": "interruption to free slot > max",
                "gaps that listeners heard": "gaps",
            },
        ),
    ),
    "change of voice": Table(
        head="demo voice, CPU",
        path="measure_drift > demo > results > {of} > {what}",
        form="+.2f",
        columns={
            "from beginning to end": {"of": "drift"},
            "standard error": {"of": "error", "form": ".2f"},
            "within an utterance": {"of": "within"},
        },
        rows={
            label: {"card": "CPU", "what": what}
            for label, what in {"pace, %": "pace", "pitch, semitones": "pitch", "loudness, LU": "loudness"}.items()
        },
        timed=False,
    ),
}

CHARTS = {
    f"peers-{size}": Chart(
        "measure_peers",
        f"{size.upper()} beside its peers",
        lambda target, told, size=size: measure_peers.draw(target, told["benchmarks"]["measure_peers"][size]["said"]),
        size=size,
        comparison=True,
    )
    for size in SIZES
}
CHARTS["load"] = Chart("measure_load", "first audio by requests a second and by live listeners", measure_load.draw)
CHARTS["drift"] = Chart(
    "measure_drift",
    "pace, pitch and loudness over ten minutes of speech",
    lambda target, told: measure_drift.draw(target, told["benchmarks"]["measure_drift"]["demo"]["said"]),
    timed=False,
)
