"""What do FP8 weights cost, and what do they save? A ledger for bf16, fp8-predictor and fp8.

    python benchmarks/measure_fp8.py [--size 0.6b 1.7b demo] [--model MODEL] [--frames 40] [--sentences 24]

speed     (GPU) a frame's time by columns, its floor, its weights alone (a kernel that reads and multiplies), and memory
error     an utterance drawn in fp32 with the stored weights, its codes fed to other weights (teacher forcing): relative
          error of the weights, of the talker's hidden state layer by layer, of both kinds of logits; KL of the
          distributions that are drawn from, and the share of the true one that they leave out; how often the likeliest
          code, and the code drawn with the same noise, is the same. For the row "bf16" PyTorch computes the stored
          weights in bf16, as everybody runs them; the other rows are computed in fp32
channels  the same, with some input channels of every matrix 8 to 50 times as large
speech    (needs a recognisable voice: the demo's, or --model) where it ends, how long it is, and what a recogniser
          understands, beside the same requests with bf16 weights

Random weights at the published dims test the arithmetic, not how a trained model sounds. For that, run
`--model MODEL --speaker NAME` with published weights.
"""

import argparse
import dataclasses
import json
import math
import random
import re
import statistics
from pathlib import Path

import torch
from common import build_with, commit, machine, positive, read_ms, spread
from measure_decode import Frames, times_ms
from recogniser import INSTALLED, heard_words
from torch import Tensor

from qwen_check.bench import weight_bytes
from qwen_check.teacher_forcing import teacher_forced_logits, teacher_forced_talker
from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.backend import build
from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder
from qwen_megakernel.backend.select import select_device
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.fp8 import dequantized, part_of, quantized
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.checkpoint.synthetic import random_talker, synthetic_config
from qwen_megakernel.choices import PARTS, WEIGHTS
from qwen_megakernel.model.conditioning import Conditioning
from qwen_megakernel.model.frame import Frame, SlotState, draws_of
from qwen_megakernel.model.prompt import Prompt, PromptBuilder
from qwen_megakernel.model.sampling import Draw, gumbel_noise
from qwen_megakernel.model.text import TextTokenizer
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.sampling_params import GREEDY
from qwen_megakernel.trust.selection import Selection

PROMPT_ROWS = 12
Tensors = dict[str, Tensor]


# ---------------------------------------------------------------- error


@dataclasses.dataclass
class Forced:
    """The results of a teacher-forced pass over an utterance."""

    layers: list[Tensor]  # after every talker layer, with the last norm: [frames, hidden]
    logits: list[Tensor]  # of every group: [frames, codes]


def as_plain(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: t.to(dtype) for name, t in dequantized(tensors, dtype).items()}


def prompt_of(config: ModelConfig, exact: Tensors, folder: Path | None, speaker: str | None) -> Prompt:
    """A sentence for a checkpoint, random rows for random weights."""
    if folder is None:
        norm = exact["talker.model.norm.weight"]
        rows = torch.randn(PROMPT_ROWS + 1, len(norm), device=norm.device) * 0.5
        return Prompt(rows[:-1], rows[-1:], rows[-1])
    tokenizer = TextTokenizer(folder, config.talker.text_vocab_size)
    builder = PromptBuilder(config, tokenizer, Embeddings(config.talker, exact))
    return builder.build(SENTENCES[1], Conditioning(speaker or next(iter(builder.speakers), None)))


class Utterance:
    """An utterance drawn in fp32 with the stored weights."""

    @torch.inference_mode()
    def __init__(self, config: ModelConfig, tensors: Tensors, frames: int, folder: Path | None, speaker: str | None):
        self.config = config
        exact = as_plain(tensors, torch.float32)
        self.sampling = SamplingParams(seed=random.randrange(2**31)).over(config.sampling)
        prompt = self.prompt = prompt_of(config, exact, folder, speaker)
        positions = len(prompt.rows) + frames
        last = len(prompt.rows) - 1
        text = torch.cat([prompt.trailing, prompt.pad.expand(frames, -1)])
        frame = Frame(config.talker, exact, Embeddings(config.talker, exact), positions)
        state = SlotState(config.talker, positions, text.device, torch.float32)
        state.start(prompt.rows[-1:], last, self.sampling)
        if last:
            frame.prefill(prompt.rows[:-1], state)
        codes = []
        for k in range(frames):
            state.text.copy_(text[k])
            frame.step(state, draws_of(self.sampling), last + k)
            if int(state.codes[0]) == config.talker.codec_eos_id:
                break
            codes.append(state.codes.clone())
        self.codes = torch.stack(codes)

    @torch.inference_mode()
    def force(self, tensors: Tensors, dtype: torch.dtype) -> Forced:
        """Run the same codes through other weights."""
        c = self.config.talker
        plain = as_plain(tensors, dtype)
        few = [
            dataclasses.replace(c, stack=dataclasses.replace(c.stack, num_layers=n + 1))
            for n in range(c.stack.num_layers)
        ]
        hidden = [teacher_forced_talker(config, plain, self.prompt, self.codes) for config in few]
        return Forced([h.float() for h in hidden], teacher_forced_logits(c, plain, hidden[-1], self.codes))

    def compare(self, ours: Forced, exact: Forced) -> dict:
        """Averages over frames, and over codes 1..15."""
        by_group = [self._compare(g, ours.logits[g], exact.logits[g]) for g in range(16)]
        told = {"hidden": relative(ours.layers[-1], exact.layers[-1])}
        told["layers"] = [relative(a, b) for a, b in zip(ours.layers, exact.layers, strict=True)]
        for name, groups in (("code 0", by_group[:1]), ("codes", by_group[1:])):
            told |= {f"{name} {key}": statistics.mean(group[key] for group in groups) for key in groups[0]}
        return told

    def _compare(self, group: int, ours: Tensor, exact: Tensor) -> dict:
        draw = Draw.predictor(self.sampling) if group else Draw.code0(self.sampling)
        kl = []
        lost = []
        same = []
        for frame in range(len(self.codes)):
            q, p = (draw.filtered(logits[frame]).softmax(-1) for logits in (ours, exact))
            both = (p > 0) & (q > 0)
            p_in = p[both] / p[both].sum()
            q_in = q[both] / q[both].sum()
            kl.append(float((p_in * (p_in / q_in).log()).sum()))
            lost.append(1.0 - float(p[both].sum()))
            noise = gumbel_noise(self.sampling.seed, frame, range(group, group + 1), len(p), p.device)[0]
            same.append(int(draw(ours[frame], noise)) == int(draw(exact[frame], noise)))
        top = (ours.argmax(-1) == exact.argmax(-1)).float().mean()
        told = {"error": relative(ours, exact), "KL": statistics.mean(kl), "left out": statistics.mean(lost)}
        return told | {"top-1": float(top), "same draw": statistics.mean(same)}


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x - reference).norm() / reference.norm())


def with_channels(tensors: Tensors) -> Tensors:
    """Make three input channels of every projection 8 times as large; for attention's output projection, 50 times."""
    tensors = {name: t.clone() if part_of(name) in ("talker", "predictor") else t for name, t in tensors.items()}
    for name in [name for name in tensors if part_of(name) in ("talker", "predictor")]:
        tensors[name][:, torch.randperm(tensors[name].shape[1])[:3].tolist()] *= 50 if "o_proj" in name else 8
    return tensors


def weight_errors(tensors: Tensors) -> dict[str, float]:
    plain = dequantized(quantized(tensors, WEIGHTS["fp8"]), torch.float32)
    told = {}
    for part in PARTS:
        names = [name for name in tensors if part_of(name) == part]
        wrong = sum(float((plain[n] - tensors[n].float()).square().sum()) for n in names)
        told[part] = math.sqrt(wrong / sum(float(tensors[n].float().square().sum()) for n in names))
    return told


COLUMNS = ["hidden", "code 0 error", "code 0 KL", "code 0 top-1", "code 0 same draw"]
COLUMNS += ["codes error", "codes KL", "codes left out", "codes top-1", "codes same draw"]


def show_errors(label: str, config: ModelConfig, tensors: Tensors, *utterance) -> dict:
    utterance = Utterance(config, tensors, *utterance)
    exact = utterance.force(tensors, torch.float32)
    print(f"\n{label}: {len(utterance.codes)} frames")
    of_weights = weight_errors(tensors)
    print("  relative error of the weights: " + ", ".join(f"{part} {e:.2%}" for part, e in of_weights.items()))
    print(f"  {'':16}" + "".join(f"{column:>17}" for column in COLUMNS))
    results: dict = {"frames": len(utterance.codes), "weights": of_weights}
    for weights, parts in WEIGHTS.items():
        dtype = torch.float32 if parts else torch.bfloat16
        row = results[weights] = utterance.compare(utterance.force(quantized(tensors, parts), dtype), exact)
        print(f"  {weights:16}" + "".join(f"{row[column]:17.4f}" for column in COLUMNS))
    for weights in WEIGHTS:
        layers = results[weights]["layers"]
        shown = [f"{i + 1}: {layers[i]:.4f}" for i in range(0, len(layers), max(1, len(layers) // 7))]
        print(f"  {weights:16} behind layer {', '.join(shown)}")
    return results


# ---------------------------------------------------------------- speed


def weights_alone_ms(config: ModelConfig, stored: Tensors) -> float:
    """A frame's time in which the kernel does nothing but read and multiply its weights."""
    sources = tuple(name.replace("frame/frame.cu", "frame/weights_alone.cu") for name in build.SOURCES)
    with build_with(SOURCES=sources):
        kernel = MegakernelFrameDecoder(config, stored, slots=1, max_positions=512)
    frames = Frames(kernel, config, GREEDY.over(config.sampling), checked=False)
    # At position 0 there are no old keys and values to read; a prompt of one row computes none either.
    frames.prompt = dataclasses.replace(frames.prompt, rows=frames.prompt.rows[:1])
    slots = frames.begin(1, 0)

    def frame() -> None:
        kernel._launcher.seek(0, 0, 5)
        frames.launch(slots)

    times = times_ms(frame, 200)
    frames.drain()
    return float(times.median())


@torch.inference_mode()
def show_speed(label: str, config: ModelConfig, columns: list[int], device: torch.device) -> dict:
    """Uses random weights, which never end their speech."""
    tensors = random_talker(config, device, seed=torch.seed() % 2**31)
    print(f"\n{label}: a frame at position 200, sampled; and its weights alone, read and multiplied")
    heads = [f"{count} stream{'s' * (count > 1)}" for count in columns]
    heads += ["floor ms", "of floor", "weights alone", "GB a frame", "GB in memory"]
    print(f"  {'':16}" + "".join(f"{head:>14}" for head in heads))
    results: dict = {}
    for weights, parts in (*WEIGHTS.items(), ("bf16 again", frozenset())):
        stored = quantized(tensors, parts)
        sampling = SamplingParams(seed=1).over(config.sampling)
        kernel = MegakernelFrameDecoder(config, stored, slots=max(columns), max_positions=512)
        frames = Frames(kernel, config, sampling)
        ms = [spread(frames.times_ms(count, 200, 200).tolist()) for count in columns]
        memory = kernel.weight_bytes
        alone = weights_alone_ms(config, stored)
        _, read = weight_bytes({name: t.nbytes for name, t in stored.items()})
        floor = read_ms(read)
        results[weights] = {"ms": dict(zip(columns, ms, strict=True)), "alone_ms": alone, "floor_ms": floor}
        results[weights] |= {"bytes": read, "memory": memory}
        medians = [row["p50"] for row in ms]
        shown = "".join(f"{value:14.3f}" for value in (*medians, floor)) + f"{floor / medians[0]:14.0%}{alone:14.3f}"
        print(f"  {weights:16}{shown}{read / 1e9:14.2f}{memory / 1e9:14.2f}", flush=True)
        del kernel, frames
        torch.cuda.empty_cache()
    return results


# ---------------------------------------------------------------- speech

SENTENCES = [
    "One two three four five.",
    "The children are playing in the garden.",
    "Good morning, how are you today?",
    "The train leaves at nine in the morning.",
    "She opened the window and looked at the sea.",
    "We will meet again next year.",
    "My brother has a new house near the river.",
    "It was a cold and rainy day.",
]


def show_speech(model: str, speaker: str | None, count: int, device: torch.device) -> dict:
    print(f"\n{model}: {count} sentences, each with the same seed for all weights")
    print(f"  {'':16}{'ended':>9}{'seconds':>9}{'longest / bf16':>16}{'shortest / bf16':>17}{'words heard':>13}")
    requests = [(SENTENCES[i % len(SENTENCES)], i) for i in range(count)]
    options = {"max_positions": 1024, "max_queue": count, "queue_timeout": 3600}
    results = {}
    base = None
    for weights in WEIGHTS:
        with TTSEngine.load(model, device=device, weights=weights, **options) as engine:
            said = [
                engine.submit(t, sampling=SamplingParams(seed=s), speaker=speaker, max_frames=400) for t, s in requests
            ]
            audio = [utterance.result() for utterance in said]
        base = base or audio
        ratios = [a.duration_s / b.duration_s for a, b in zip(audio, base, strict=True)]
        wanted = heard = 0
        for (text, _), one in zip(requests, audio, strict=True):
            words = re.findall("[a-z]+", text.lower())
            listed = heard_words(one.samples, one.sample_rate) if INSTALLED else []
            wanted += len(words)
            heard += sum(word in listed for word in words)
        row = {"ended": sum(a.finish_reason == "eos" for a in audio), "seconds": sum(a.duration_s for a in audio)}
        row |= {"longest": max(ratios), "shortest": min(ratios), "heard": heard / wanted if INSTALLED else None}
        results[weights] = row
        shown = f"{heard / wanted:13.0%}" if INSTALLED else f"{'no recogniser':>13}"
        print(
            f"  {weights:16}{row['ended']:9}{row['seconds']:9.1f}{row['longest']:16.2f}{row['shortest']:17.2f}{shown}"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("0.6b", "1.7b", "demo"), nargs="*", default=["0.6b", "1.7b", "demo"])
    parser.add_argument("--model", help="a checkpoint with trained weights: its errors, and how it speaks")
    parser.add_argument("--speaker", help="who speaks there; default: its first")
    parser.add_argument("--frames", type=positive, default=40)
    parser.add_argument("--sentences", type=positive, default=24)
    parser.add_argument("--columns", type=positive, nargs="*", default=[1, 8])
    parser.add_argument("--device", help="default: a GPU if there is one")
    args = parser.parse_args()
    device = select_device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{machine()}, commit {commit()}, on {device.type}")
    results: dict = {}
    models = [args.model] if args.model else args.size
    for name in models:
        if name in ("0.6b", "1.7b"):
            config = synthetic_config(name)
            folder = None
            tensors = random_talker(config, device, seed=torch.seed() % 2**31)
        else:
            checkpoint = Checkpoint.open(name)
            config = checkpoint.config
            folder = checkpoint.folder
            tensors = checkpoint.talker(device, torch.bfloat16)
        results[name] = told = {}
        if Selection("auto", device, "bfloat16").decide(config).backend == "megakernel":
            told["speed"] = show_speed(name, config, args.columns, device)
        utterance = (args.frames, folder, args.speaker)
        told["error"] = show_errors(name, config, tensors, *utterance)
        told["channels"] = show_errors(f"{name}, some channels large", config, with_channels(tensors), *utterance)
        if name not in ("0.6b", "1.7b"):
            told["speech"] = show_speech(name, args.speaker, args.sentences, device)
    print(json.dumps({"machine": machine(), "commit": commit(), "results": results}))


if __name__ == "__main__":
    main()
