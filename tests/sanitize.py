"""A short run for compute-sanitizer, which slows every wait down:

compute-sanitizer --tool memcheck python tests/sanitize.py [demo|0.6b|1.7b]
compute-sanitizer --tool racecheck python tests/sanitize.py
"""

import sys

import torch

from qwen_megakernel import megakernel, vocoder_graphs
from qwen_megakernel.build import load_extension
from qwen_megakernel.checkpoint import DEMO_FOLDER, Checkpoint
from qwen_megakernel.config import ModelConfig, SamplingParams
from qwen_megakernel.prompt import Prompt
from qwen_megakernel.synthetic import random_talker, synthetic_config
from qwen_megakernel.transformer import Embeddings

megakernel.SPIN_LIMIT = vocoder_graphs.SPIN_LIMIT = 2**31
size = sys.argv[1] if len(sys.argv) > 1 else "demo"
config = ModelConfig.from_folder(DEMO_FOLDER) if size == "demo" else synthetic_config(size)
tensors = random_talker(config, torch.device("cuda"), seed=1)
kernel = megakernel.MegakernelFrameDecoder(config, tensors, slots=8, max_positions=320)
rows = torch.randn(300, config.talker.stack.hidden_size, device="cuda").to(torch.bfloat16)
for slots, prompt in (([0], 280), ([0, 1, 2], 9), (list(range(8)), 4)):
    for slot in slots:
        sampling = SamplingParams(seed=slot, top_p=0.9 if slot == 1 else None).over(config.sampling)
        kernel.start(slot, Prompt(rows[:prompt], rows[:1], rows[0]), sampling)
    for _ in range(2):
        kernel.launch(slots)
        print(slots, [None if codes is None else codes.tolist()[:3] for codes in kernel.collect()])
if size == "demo":
    checkpoint, gpu = Checkpoint.open("demo"), torch.device("cuda")
    talker, codec = checkpoint.talker(gpu, torch.bfloat16), checkpoint.vocoder(gpu, torch.float32)
    print(Embeddings(checkpoint.config.talker, talker, load_extension(gpu)).text(list(range(40))).float().norm())
    options = {"slots": 8, "recent_codes": kernel.recent_codes}
    vocoder = vocoder_graphs.GraphVocoder(load_extension(gpu), checkpoint.config.codec.vocoder, codec, **options)
    codes = torch.randint(0, 128, (8, 90, 16))
    for portion in vocoder.portions(codes[0]):
        vocoder.listen(0, portion)
    for slots, frames in (([0], 1), ([0, 1, 2], 2), ([3], 8), (list(range(8)), 1), (list(range(8)), 3)):
        print(slots, frames, vocoder.push(slots, codes[: len(slots), :frames]).norm())
    print(vocoder.follow([0, 1], [0, 0], 2)().norm())
