"""A short run for compute-sanitizer, which slows every wait down:

compute-sanitizer --tool memcheck python tests/sanitize.py [demo|0.6b|1.7b]
compute-sanitizer --tool racecheck python tests/sanitize.py
"""

import sys

import torch

from qwen_megakernel import megakernel
from qwen_megakernel.checkpoint import DEMO_FOLDER
from qwen_megakernel.config import ModelConfig, SamplingParams
from qwen_megakernel.prompt import Prompt
from qwen_megakernel.synthetic import random_talker, synthetic_config

megakernel.SPIN_LIMIT = 2**31
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
