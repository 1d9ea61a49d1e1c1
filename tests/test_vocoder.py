"""The stateful vocoder: any push schedule, any company, equals one decode of the whole."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qwen_megakernel.backend.interfaces import PUSH_FRAMES
from qwen_megakernel.backend.sizes import PUSH_ROWS, TRANSFORMER_RESIDUALS
from qwen_megakernel.backend.vocoder_graphs import graph_rooms, why_no_graphs
from qwen_megakernel.backend.vocoder_weights import halves, packed
from qwen_megakernel.checkpoint.codec_config import CodecConfig
from qwen_megakernel.checkpoint.json_object import JsonObject
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.checkpoint.synthetic import json_files
from qwen_megakernel.checkpoint.tensors import vocoder_tensors
from qwen_megakernel.model.vocoder import TorchVocoder

FRAMES = 100  # more than the attention window of 72


@pytest.fixture(scope="module")
def make(tiny):
    checkpoint = Checkpoint.open(tiny("custom_voice"))

    def make_vocoder(slots: int = 1, dtype: torch.dtype = torch.float32) -> TorchVocoder:
        return TorchVocoder(
            checkpoint.config.codec.vocoder, checkpoint.vocoder(torch.device("cpu"), dtype), slots=slots
        )

    return make_vocoder


def random_codes(streams: int = 1, frames: int = FRAMES) -> torch.Tensor:
    return torch.randint(0, 256, (streams, frames, 16))


def random_schedule(frames: int) -> list[int]:
    rng, sizes = np.random.default_rng(torch.randint(2**31, ()).item()), []
    while sum(sizes) < frames:
        sizes.append(int(min(rng.choice([1, 1, 2, 3, 4, 8, 25]), frames - sum(sizes))))
    return sizes


def push_all(vocoder: TorchVocoder, slot: int, codes: torch.Tensor, schedule: list[int]) -> torch.Tensor:
    return torch.cat([vocoder.push([slot], part[None])[0] for part in codes.split(schedule)])


@pytest.mark.parametrize("trial", range(4))
def test_streaming_equals_one_shot(make, trial):
    codes, schedule = random_codes()[0], random_schedule(FRAMES) if trial else [1] * FRAMES
    whole = make().push([0], codes[None])[0]
    assert whole.shape == (FRAMES * 1920,) and whole.std() > 0.01
    assert (push_all(make(), 0, codes, schedule) - whole).abs().max() <= 2e-5, schedule


def test_streaming_is_exact_in_double_precision(make):
    codes = random_codes()[0]
    whole = make(dtype=torch.float64).push([0], codes[None])[0]
    # RoPE's angles are fp32 by definition, so the bound is not machine epsilon of fp64.
    assert (push_all(make(dtype=torch.float64), 0, codes, random_schedule(FRAMES)) - whole).abs().max() < 1e-9


def test_streams_in_batches_with_different_pasts_equal_each_alone(make):
    """Streams join and leave at random; every push takes a random subset of them."""
    rng, codes = np.random.default_rng(torch.randint(2**31, ()).item()), random_codes(streams=4)
    vocoder, done = make(slots=6), [0] * 4
    slots = [int(s) for s in rng.permutation(6)[:4]]
    parts: list[list[torch.Tensor]] = [[] for _ in range(4)]
    while min(done) < FRAMES:
        group = [i for i in rng.permutation(4) if done[i] < FRAMES][: int(rng.integers(1, 5))]
        size = int(min(rng.choice([1, 2, 4, 8]), *(FRAMES - done[i] for i in group)))
        pcm = vocoder.push([slots[i] for i in group], torch.stack([codes[i, done[i] : done[i] + size] for i in group]))
        for i, samples in zip(group, pcm, strict=True):
            parts[i].append(samples)
            done[i] += size
    for i in range(4):
        alone = make().push([0], codes[i : i + 1])[0]
        assert (torch.cat(parts[i]) - alone).abs().max() <= 2e-5


def test_reset_forgets_the_stream_and_touches_no_other(make):
    codes, other, schedule = random_codes()[0], random_codes()[0], [4] * 25
    fresh = push_all(make(), 0, codes, schedule)
    vocoder = make(slots=2)
    before = vocoder.push([1], other[None, :40])
    push_all(vocoder, 0, other, schedule)
    vocoder.reset(0)
    assert torch.equal(push_all(vocoder, 0, codes, schedule), fresh)
    after = vocoder.push([1], other[None, 40:])
    whole = make().push([0], other[None])
    assert (torch.cat([before, after], dim=1) - whole).abs().max() <= 2e-5


def test_published_dims_have_1298496_values_of_state_per_stream():
    config = CodecConfig.from_json(JsonObject(json_files("0.6b")["speech_tokenizer/config.json"], "codec"))
    tensors = {n: torch.empty(s, device="meta") for n, s in vocoder_tensors(config).items()}
    vocoder = TorchVocoder(config.vocoder, tensors, slots=3)
    assert sum(t[0].numel() for t in vocoder._state.values()) == 1_298_496


def test_a_restored_state_goes_on_as_the_saved_one(make):
    vocoder, codes = make(slots=2), random_codes(frames=3)
    vocoder.push([0], codes[:, :2])
    vocoder.restore(1, vocoder.save(0))
    assert torch.equal(vocoder.push([1], codes[:, 2:]), vocoder.push([0], codes[:, 2:]))


@pytest.mark.parametrize(
    "slots, shape",
    [([0], (1, 0, 16)), ([0], (1, 3, 15)), ([0], (2, 3, 16)), ([0, 0], (2, 3, 16)), ([0], (3, 16)), ([-1], (1, 3, 16))],
)
def test_wrong_shapes_are_refused(make, slots, shape):
    with pytest.raises(ValueError, match="codes|slots"):
        make(slots=2).push(slots, torch.zeros(shape, dtype=torch.long))


# ---------------------------------------------------------------- the kernels' vocoder: halves, sizes of graphs


def test_two_halves_keep_22_bits():
    x = torch.randn(1000, 64) * 10 ** torch.empty(1000, 1).uniform_(-3, 3)
    high, low = (half.double() for half in halves(x))
    assert ((high + low / 2048 - x).abs() <= x.abs() * 2.0**-22 + 2.0**-36).all()
    assert (high - x).abs().max() <= x.abs().max() * 2.0**-11


def test_values_beyond_fp16_become_its_largest():
    high, low = halves(torch.tensor([65504.0, -65520.0, 1e30, -torch.inf]))
    assert high.tolist() == [65504, -65504, 65504, -65504] and low.tolist() == [0, -32768, 65504, -65504]


def test_a_packed_matrix_has_every_half_where_the_kernels_look_for_it():
    taps, channels, columns = 2, 96, 40
    matrix = torch.randn(taps, channels, columns)
    high, low = halves(matrix)
    flat = packed(matrix).flatten()
    for tap, channel, column in itertools.product(range(taps), range(channels), range(columns)):
        for lies_behind, half in ((0, high), (4, low)):
            chunk = (channel % 32 // 8 + lies_behind) ^ (column % 8)
            row = (tap * (channels // 32) + channel // 32) * columns + column
            assert flat[row * 64 + chunk * 8 + channel % 8] == half[tap, channel, column]


def test_a_product_of_halves_is_as_exact_as_fp32():
    """The kernel's arithmetic: three products of 32 channels, whose sums are added in fp32."""
    x, w = torch.randn(64, 7168), torch.randn(7168, 64) / 85
    (high, low), (w_high, w_low) = halves(x), halves(w)
    total = torch.zeros(64, 64)
    for at in range(0, 7168, 32):
        a, b, c, d = (
            part.float()
            for part in (high[:, at : at + 32], low[:, at : at + 32], w_high[at : at + 32], w_low[at : at + 32])
        )
        total += a @ c + (b @ c + a @ d) / 2048
    exact = x.double() @ w.double()
    ratio = exact.square().sum() / (total - exact).square().sum()
    assert 10 * torch.log10(ratio) > 120


@pytest.mark.parametrize("slots", [1, 3, 8, 16, 17, 64])
@pytest.mark.parametrize("hidden_columns", [4, 8, 22])
def test_any_push_finds_a_graph_with_room(slots, hidden_columns):
    rooms = graph_rooms(slots, hidden_columns)
    assert rooms == sorted(set(rooms)) and rooms[0] == 1 and rooms[-1] >= PUSH_FRAMES
    assert rooms[-1] == PUSH_ROWS or slots <= 16 or hidden_columns > 4
    assert rooms[-1] * hidden_columns <= TRANSFORMER_RESIDUALS and rooms[-1] <= slots * PUSH_FRAMES
    assert all(room <= 1.5 * (before + 1) for before, room in itertools.pairwise(rooms))


# ---------------------------------------------------------------- the kernels' vocoder: the GPUs it fits


@pytest.fixture
def obstacle(monkeypatch):
    """obstacle(model, multiprocessors, shared KB a block may have): what keeps it from such a GPU."""

    def ask(model: str, multiprocessors: int, shared_kb: int) -> str | None:
        config = CodecConfig.from_json(JsonObject(json_files("0.6b")["speech_tokenizer/config.json"], "codec")).vocoder
        if model == "demo":
            config = Checkpoint.open("demo").config.codec.vocoder
        numbers = {"multi_processor_count": multiprocessors, "shared_memory_per_block_optin": shared_kb * 1024}
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(**numbers))
        return why_no_graphs(config, torch.device("cuda"))

    return ask


@pytest.mark.parametrize("model", ["published", "demo"])
@pytest.mark.parametrize(
    "card, multiprocessors, shared_kb",
    [
        ("RTX 3090", 82, 99),
        ("RTX 3070", 46, 99),
        ("RTX 4060", 24, 99),
        ("RTX 4090", 128, 99),
        ("L4", 58, 99),
        ("A100", 108, 163),
        ("A30", 56, 163),
        ("H100 PCIe", 114, 227),
        ("H20", 78, 227),
        ("H200", 132, 227),
        ("RTX 5090", 170, 99),
    ],
)
def test_every_card_has_room_for_the_kernels(obstacle, model, card, multiprocessors, shared_kb):
    assert obstacle(model, multiprocessors, shared_kb) is None, card


def test_a_card_without_room_for_the_kernels_is_told_why(obstacle):
    said = obstacle("published", 23, 227)
    assert "of width 512 needs 24 multiprocessors, and its kernel can use 23 of this GPU" in said
    assert obstacle("published", 24, 83) is None
    assert "needs 83 KB of shared memory a block, but this GPU has 82" in obstacle("published", 132, 82)
