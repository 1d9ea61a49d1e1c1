"""The PyTorch backend on an NVIDIA GPU (`make test-gpu`); fp32 without TF32 unless said."""

import numpy as np
import pytest
import torch

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.checkpoint import Checkpoint
from qwen_megakernel.config import GREEDY
from qwen_megakernel.sampling import gumbel_noise
from qwen_megakernel.vocoder import Vocoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
TEXT = "Hello there, how are you today?"


def test_noise_is_the_same_bit_for_bit():
    for seed in torch.randint(2**62, (20,)).tolist():
        frame = seed % 1000
        ours = gumbel_noise(seed, frame, range(16), 3072, GPU)
        assert torch.equal(ours.cpu(), gumbel_noise(seed, frame, range(16), 3072, CPU))


def test_fp32_greedy_codes_equal_the_cpus(tiny):
    folder = tiny("custom_voice", size="tiny-adapter", eos_gain=0.0)
    said = []
    for device in ("cpu", "cuda"):
        with TTSEngine.load(folder, device=device, dtype=torch.float32, max_streams=1) as engine:
            said.append(engine.generate(TEXT, sampling=GREEDY, max_frames=100, runaway_guard=False))
    assert np.array_equal(said[0].codes, said[1].codes)
    assert np.abs(said[0].samples - said[1].samples).max() <= 1e-4


def test_bfloat16_is_the_default_and_repeats_itself():
    with TTSEngine.load("demo", max_streams=2) as engine:
        first, second = (engine.generate(TEXT, sampling=SamplingParams(seed=1)) for _ in range(2))
        assert np.array_equal(first.codes, second.codes) and np.array_equal(first.samples, second.samples)
        assert first.finish_reason == "eos" and np.isfinite(first.samples).all()


@pytest.mark.parametrize("model", ["tiny", "demo"])
def test_streaming_equals_one_shot(tiny, model):
    checkpoint = Checkpoint.open("demo" if model == "demo" else tiny("custom_voice"))
    config = checkpoint.config.codec.vocoder
    vocoder = Vocoder(config, checkpoint.vocoder(GPU, torch.float32), slots=2)
    codes = torch.randint(0, config.codebook_size, (1, 100, 16), device=GPU)
    whole = vocoder.push([0], codes)[0]
    sizes = [1, 1, 2, 4, 8, 8, 16, 60]
    parts = torch.cat([vocoder.push([1], part)[0] for part in codes.split(sizes, dim=1)])
    assert (parts - whole).abs().max() <= 2e-5


def test_voices_are_made_beside_a_gpu_engine(tiny):
    sound = np.sin(np.arange(30_000) / 20).astype(np.float32) * 0.3
    with TTSEngine.load(tiny("base", eos_gain=0.0), max_streams=1) as engine:
        voice = engine.create_voice((sound, 24000), "a tone")
        assert len(engine.generate(TEXT, voice=voice, max_frames=5).codes) == 5
