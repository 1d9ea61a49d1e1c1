"""The sampler: processor order against transformers, the draw against torch's softmax, noise bit by bit."""

import math

import numpy as np
import pytest
import torch
import transformers.generation.logits_process as hf
from waiting import slow_case

from qwen_megakernel.checkpoint.config import TalkerConfig
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.errors import SamplingError
from qwen_megakernel.model.sampling import Code0Rules, Draw, gumbel_from_bits, gumbel_noise, key_schedule, philox
from qwen_megakernel.sampling_params import SamplingParams


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(v) for v in values)


@pytest.mark.parametrize(
    "counter, key, expected",
    [  # the published known answers of Random123's philox4x32, 10 rounds
        ((0, 0, 0, 0), 0, 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822, 0xD16CFE09),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert int(philox(words(*counter), key_schedule(key))) == expected


def test_gumbel_noise_equals_the_formula_in_double_precision():
    edges = torch.tensor([0, 1, 2, 2**24, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1])
    bits = torch.cat([edges, torch.randint(0, 2**32, (200_000,))])
    v = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    expected = -torch.log(-torch.log1p(-v))
    ours = gumbel_from_bits(bits)
    assert ours.isfinite().all()
    assert ((ours - expected).abs() <= 4e-7 * expected.abs().clamp(min=1)).all()


def test_noise_depends_on_seed_frame_group_and_candidate_alone():
    noise = gumbel_noise(7, 3, range(1, 16), 64, torch.device("cpu"))
    assert torch.equal(noise[4], gumbel_noise(7, 3, range(5, 6), 64, torch.device("cpu"))[0])
    assert torch.equal(noise[:, :10], gumbel_noise(7, 3, range(1, 16), 10, torch.device("cpu")))
    others = [gumbel_noise(s, f, range(1, 16), 64, torch.device("cpu")) for s, f in ((8, 3), (7, 4), (7 + 2**40, 3))]
    assert all(not torch.equal(noise, other) for other in others)
    assert len(noise.unique()) > 0.99 * noise.numel()


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """P(chi-square >= observed); cells below 5 expected draws are pooled."""
    expected = probabilities * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]]).double()
    expected = torch.cat([expected[~small], expected[small].sum()[None]]).double()
    keep = expected > 0
    assert counts[~keep].sum() == 0, "an id with probability 0 was drawn"
    if keep.sum() == 1:
        return 1.0
    statistic = ((counts - expected).square() / expected)[keep].sum()
    half_freedom = torch.tensor((int(keep.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


NUMBERS = [(0.9, 50, 1.0), (1.0, 0, 1.0), (0.7, 20, 0.8), (1.3, 0, 0.95), (0.9, 1, 1.0)]
DRAWS = [Draw(True, *numbers) for numbers in NUMBERS]


@pytest.mark.parametrize("draw", [DRAWS[0], *map(slow_case, DRAWS[1:])], ids=str)
def test_draws_follow_torchs_softmax(draw):
    """Fresh logits every time; 20,000 draws; a right sampler fails once in a million runs."""
    vocab, frames = 300, 20_000
    logits = torch.randn(vocab) * 3
    candidate, frame = torch.arange(vocab)[None], torch.arange(frames)[:, None]
    seed = int(torch.randint(2**62, ()))
    noise = gumbel_from_bits(philox((candidate, torch.tensor(0), frame, torch.tensor(0)), key_schedule(seed)))
    assert torch.equal(noise[5], gumbel_noise(seed, 5, range(1), vocab, torch.device("cpu"))[0])
    ids = (draw.filtered(logits) + noise).argmax(-1)
    assert int(draw(logits, noise[11])) == int(ids[11])
    counts = torch.bincount(ids, minlength=vocab)
    assert chi_square_p(counts, draw.filtered(logits).softmax(-1)) > 1e-6


@pytest.fixture
def talker(tiny) -> TalkerConfig:
    return Checkpoint.open(tiny("custom_voice")).config.talker


@pytest.mark.parametrize("trial", [*range(4), *map(slow_case, range(4, 8))])
def test_processors_equal_those_of_transformers(talker, trial):
    """The list that `generate` builds for the reference, in its order, on fresh logits with ties."""
    params = SamplingParams(
        do_sample=True,
        temperature=float(torch.empty(()).uniform_(0.3, 1.8)),
        top_k=int(torch.randint(1, 80, ())),
        top_p=[1.0, 0.9, 0.5, 0.05][trial % 4],
        repetition_penalty=float(torch.empty(()).uniform_(0.8, 1.6)),
    )
    frame = trial // 2
    history = torch.randint(0, talker.first_suppressed_id, (1, frame))
    logits = torch.randn(1, talker.vocab_size) * 3
    logits[0, :40] = logits[0, :40].round()  # ties
    suppressed = [i for i in range(talker.vocab_size - 1024, talker.vocab_size) if i != talker.codec_eos_id]
    processors = [
        hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        hf.MinNewTokensLengthLogitsProcessor(0, 2, [talker.codec_eos_id]),
        hf.SuppressTokensLogitsProcessor(suppressed),
        hf.TemperatureLogitsWarper(params.temperature),
        hf.TopKLogitsWarper(params.top_k),
    ]
    if params.top_p < 1:
        processors.append(hf.TopPLogitsWarper(params.top_p))
    expected = logits.clone()
    for processor in processors:
        expected = processor(history, expected)

    rules = Code0Rules(talker, params.repetition_penalty, torch.device("cpu"))
    for code in history[0]:
        rules.remember(code)
    ours = Draw.code0(params).filtered(rules(logits[0].clone(), frame))
    assert torch.equal(ours == -math.inf, expected[0] == -math.inf)
    assert torch.allclose(ours, expected[0], rtol=1e-6, atol=0)


def test_of_a_tie_greedy_takes_the_lowest_id_without_noise_and_top_k_keeps_all():
    assert int(Draw(False, 0.9, 50, 1.0)(torch.tensor([1.0, 5.0, 5.0, 2.0]), None)) == 1
    kept = Draw(True, 1.0, 2, 1.0).filtered(torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0])) > -math.inf
    assert kept.tolist() == [True, False, True, True, True]


def test_numbers_on_the_device_give_the_same_bits(talker):
    """Seed, frame, penalty, temperature and top-p as tensors, which is how a captured graph reads them."""
    cpu = torch.device("cpu")
    for frame in range(4):
        seed = int(torch.randint(2**62, ())) * 4 + frame
        counter = (torch.arange(500)[None], torch.arange(16)[:, None], torch.tensor(frame), torch.tensor(0))
        ours = gumbel_from_bits(philox(counter, torch.tensor(key_schedule(seed))))
        assert torch.equal(ours, gumbel_noise(seed, frame, range(16), 500, cpu))
        p, penalty = float(torch.empty(()).uniform_(0.05, 1)), float(torch.empty(()).uniform_(0.8, 1.6))
        logits = torch.randn(talker.vocab_size) * 3
        rules, restarted = Code0Rules(talker, penalty, cpu), Code0Rules(talker, 1.0, cpu)
        restarted.remember(torch.tensor(3))
        restarted.restart(penalty)
        for known in (rules, restarted):
            known.remember(torch.tensor(5))
        assert torch.equal(rules(logits, frame), restarted(logits, torch.tensor(frame)))
        for top_p in (1.0, p):
            draw = Draw(True, float(torch.empty(()).uniform_(0.3, 1.8)), 50, top_p)
            captured = Draw(True, 1.0, 50, 0.5 if top_p < 1 else 1.0)
            assert captured.shape == draw.shape
            numbers = torch.tensor(draw.numbers).unbind()
            assert torch.equal(captured.filtered(logits, numbers), draw.filtered(logits))


WRONG = {
    # Of 1e46 the reciprocal is 0 in fp32, and 0 times a barred id's -inf is no number.
    "temperature": (0.0, float("nan"), 1e46, 1e-39, 10**400, True),
    "subtalker_temperature": (-1,),
    "top_k": (-1, 2.5, 2**31),
    "top_p": (0.0,),
    "subtalker_top_p": (1.1,),
    "repetition_penalty": (0, 1e39, 1e-39),
    "seed": (-1, 2**64),
    "do_sample": ("yes", 1.0),
    "subtalker_dosample": (np.array([1, 2]),),
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(SamplingError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [0.001, 1000])
def test_the_most_extreme_values_still_draw_what_may_be_drawn(tiny, engine_for, value):
    """With top-k and top-p, so that the finest differences matter."""
    engine = engine_for(tiny("custom_voice", eos_gain=0.0))
    for sampling in (
        SamplingParams(temperature=value, subtalker_temperature=value, seed=1),
        SamplingParams(repetition_penalty=value, top_p=1e-9, seed=1),
    ):
        codes = engine.generate("Hello there.", sampling=sampling, max_frames=20).codes
        assert codes.min() >= 0 and codes.max() < 256
