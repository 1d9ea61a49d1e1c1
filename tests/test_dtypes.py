"""dtype and vocoder_dtype are taken by name and as torch dtypes; anything else is refused with what is possible."""

import pytest
import torch

from qwen_megakernel import BackendError, TTSEngine
from qwen_megakernel.checkpoint.dtypes import dtype_of, vocoder_dtype_of
from qwen_megakernel.speech.shared import acquire, release


@pytest.mark.parametrize("name, dtype", [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_name_and_its_torch_dtype_mean_the_same(name, dtype):
    assert dtype_of(name) is dtype_of(dtype) is dtype
    assert vocoder_dtype_of(name) == vocoder_dtype_of(dtype) == name


def test_the_vocoder_knows_tf32_and_the_model_does_not():
    assert vocoder_dtype_of("tf32") == "tf32"
    with pytest.raises(
        BackendError, match="^dtype must be 'float32', 'bfloat16', torch.float32 or torch.bfloat16, got"
    ):
        dtype_of("tf32")


@pytest.mark.parametrize(
    "wrong", ["float16", "fp32", "torch.float32", "", torch.float16, torch.float64, None, 32, [], float]
)
def test_anything_else_is_refused_with_what_came_and_what_to_do(wrong):
    for of, name in ((dtype_of, "dtype"), (vocoder_dtype_of, "vocoder_dtype")):
        with pytest.raises(BackendError) as caught:
            of(wrong)
        told = str(caught.value)
        assert told.startswith(f"{name} must be 'float32', 'bfloat16', ") and "torch.bfloat16, got " in told
        assert f"got {wrong!r}; leave it out for " in told


def test_an_engine_takes_both_for_both():
    memory = []
    for dtype in ("float32", "bfloat16", torch.bfloat16):
        with TTSEngine.load("demo", device="cpu", max_streams=1, dtype=dtype, vocoder_dtype=dtype) as engine:
            memory.append(engine.memory)
            assert len(engine.generate("Hello there.", max_frames=2).codes) == 2
    for part, count in memory[0].items():
        assert memory[1][part] == memory[2][part] < count, part


async def test_a_shared_engine_is_the_same_by_name_and_by_torch_dtype():
    engines = [
        await acquire("demo", device="cpu", max_streams=1, dtype=dtype, vocoder_dtype=dtype)
        for dtype in ("float32", torch.float32)
    ]
    for engine in engines:
        await release(engine)
    assert engines[0] is engines[1]


def test_an_engine_refuses_before_a_checkpoint_is_looked_for():
    for options in ({"dtype": "float16"}, {"vocoder_dtype": torch.float16}):
        with pytest.raises(BackendError, match=next(iter(options))):
            TTSEngine.load("./nowhere", device="cpu", **options)
    with pytest.raises(BackendError, match="vocoder_dtype='tf32' .*GPU"):
        TTSEngine.load("./nowhere", device="cpu", vocoder_dtype="tf32")
