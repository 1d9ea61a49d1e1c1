"""A short run for compute-sanitizer, which slows every wait down:

compute-sanitizer --tool memcheck python tests/sanitize.py [demo|0.6b|1.7b|text|vocoder ...]
compute-sanitizer --tool racecheck python tests/sanitize.py demo --columns 16 --frames 1 --empty-tables
compute-sanitizer --tool racecheck python tests/sanitize.py 0.6b --columns 3 --frames 1 --layers 2 --empty-tables

racecheck keeps what it saw in host memory, 5 GB a launch of the demo voice. Give it a launch of each width in a process
of its own, of 0.6B a few layers, and not the many launches that fill the tables.
"""

import argparse
import dataclasses

import torch

from qwen_megakernel.backend import megakernel, vocoder_graphs, vocoder_recorder
from qwen_megakernel.backend.build import load_extension
from qwen_megakernel.backend.interfaces import RECENT_FRAMES
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.load import DEMO_FOLDER, Checkpoint
from qwen_megakernel.checkpoint.synthetic import random_talker, synthetic_config
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.sampling_params import SamplingParams

megakernel.SPIN_LIMIT = vocoder_recorder.SPIN_LIMIT = 2**31
GPU = torch.device("cuda")


PROMPTS = {1: 280, 3: 9, 8: 4, 16: 14, 24: 130}  # rows before the first frame, by columns of a launch


def decode(config: ModelConfig, widths: list[int], frames: int) -> None:
    tensors = random_talker(config, GPU, seed=1)
    if args.empty_tables:
        load_extension(GPU).Launcher.fill_tables = lambda _launcher: None
    kernel = megakernel.MegakernelFrameDecoder(config, tensors, slots=24, max_positions=320, tables=True)
    if args.empty_tables:
        for name in [name for name in kernel.buffers if name.startswith("tables.")]:
            kernel.buffers[name].zero_()
    rows = torch.randn(300, config.talker.stack.hidden_size, device=GPU).to(torch.bfloat16)
    for columns in widths:
        slots = list(range(columns))
        prompt = PROMPTS[columns]
        for slot in slots:
            sampling = SamplingParams(seed=slot, top_p=0.9 if slot == 1 else None).over(config.sampling)
            kernel.start(slot, Prompt(rows[:prompt], rows[:1], rows[0]), sampling)
        for _ in range(frames):
            kernel.launch(slots)
            print(slots, [None if codes is None else codes.tolist()[:3] for codes in kernel.collect()])


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    """With so many layers in the talker, and in the code predictor."""
    replace = dataclasses.replace
    talker = config.talker
    predictor = replace(talker.code_predictor, stack=replace(talker.code_predictor.stack, num_layers=layers))
    stack = replace(talker.stack, num_layers=layers)
    return replace(config, talker=replace(talker, stack=stack, code_predictor=predictor))


def text() -> None:
    checkpoint = Checkpoint.open("demo")
    embeddings = Embeddings(checkpoint.config.talker, checkpoint.talker(GPU, torch.bfloat16), load_extension(GPU))
    print(embeddings.text(list(range(40))).float().norm())


def vocode() -> None:
    checkpoint = Checkpoint.open("demo")
    codec = checkpoint.vocoder(GPU, torch.float32)
    recent = torch.randint(0, 128, (20, RECENT_FRAMES, 16), device=GPU).int()
    config = checkpoint.config.codec.vocoder
    options = {"slots": 20, "recent_codes": recent}
    vocoder = vocoder_graphs.GraphVocoder(load_extension(GPU), config, codec, **options)
    codes = torch.randint(0, 128, (20, 90, 16))
    for portion in vocoder.portions(codes[0]):
        vocoder.listen(0, portion)
    for count, frames in ((1, 1), (3, 2), (1, 8), (8, 1), (8, 3), (20, 8)):
        print(count, frames, vocoder.push(range(count), codes[:count, :frames]).norm())
    print(torch.cat(vocoder.follow([0, 1, 2], [0, 0, 15], [2, 8, 5])()).norm())


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("parts", nargs="*", default=["demo", "text", "vocoder"])
parser.add_argument("--columns", type=int, nargs="+", choices=PROMPTS, default=list(PROMPTS))
parser.add_argument("--frames", type=int, default=2)
parser.add_argument("--layers", type=int, help="of the talker and of the code predictor; default: all")
parser.add_argument("--empty-tables", action="store_true", help="zeros, which no launch has to fill")
args = parser.parse_args()
for part in args.parts:
    if part == "text":
        text()
    elif part == "vocoder":
        vocode()
    else:
        config = ModelConfig.from_folder(DEMO_FOLDER) if part == "demo" else synthetic_config(part)
        decode(cut(config, args.layers) if args.layers else config, args.columns, args.frames)
