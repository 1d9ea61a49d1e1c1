"""The PyTorch backend behind `FrameDecoder`: frames ahead, several slots, ends, refusals."""

import pytest
import torch

from qwen_megakernel import SamplingParams
from qwen_megakernel.checkpoint import Checkpoint
from qwen_megakernel.config import GREEDY
from qwen_megakernel.frame_decoder import AHEAD, TorchFrameDecoder
from qwen_megakernel.prompt import Prompt
from qwen_megakernel.transformer import Embeddings

POSITIONS = 100
EAGER_TO_END, NEVER_ENDING = 4.0, 0.0  # eos_gain of a checkpoint
PUBLISHED = SamplingParams(True, 0.9, 50, 1.0, 1.05, True, 0.9, 50, 1.0, seed=0)


@pytest.fixture(scope="module")
def decoder_for(tiny):
    """decoder_for(eos_gain) -> a decoder with three slots."""
    made = {}

    def get(eos_gain: float):
        if eos_gain not in made:
            checkpoint = Checkpoint.open(tiny("custom_voice", eos_gain=eos_gain))
            tensors = checkpoint.talker(torch.device("cpu"), torch.float32)
            embeddings = Embeddings(checkpoint.config.talker, tensors)
            made[eos_gain] = TorchFrameDecoder(checkpoint.config, tensors, embeddings, slots=3, max_positions=POSITIONS)
        return made[eos_gain]

    return get


@pytest.fixture
def decoder(decoder_for):
    decoder = decoder_for(NEVER_ENDING)
    yield decoder
    while decoder._launches:
        decoder.collect()


def start(decoder, slot: int, *, stream: int = 0, sampling: SamplingParams = GREEDY, rows: int = 9) -> None:
    """Every `stream` is another prompt, with three rows of trailing text."""
    generator = torch.Generator().manual_seed(stream)
    hidden = decoder._config.stack.hidden_size
    rows = torch.randn(rows, hidden, generator=generator)
    prompt = Prompt(rows, torch.randn(3, hidden, generator=generator), torch.zeros(hidden))
    decoder.start(slot, prompt, sampling.over(PUBLISHED))


def say(decoder, slot: int, frames: int) -> list[torch.Tensor | None]:
    """One frame after the other."""
    said = []
    for _ in range(frames):
        decoder.launch([slot])
        said += decoder.collect()
    return said


def same(ours, theirs) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def test_frames_launched_ahead_are_the_frames_one_by_one(decoder):
    start(decoder, 0, sampling=SamplingParams(seed=3))
    expected = say(decoder, 0, 12)
    start(decoder, 1, sampling=SamplingParams(seed=3))
    said = []
    for _ in range(12 // AHEAD):
        for _ in range(AHEAD):
            decoder.launch([1])
        for _ in range(AHEAD):
            said += decoder.collect()
    assert same(said, expected)
    assert said[0].dtype == torch.int64 and said[0].shape == (16,) and not torch.equal(said[0], said[1])


def test_a_launch_of_several_slots_gives_each_its_own_in_order(decoder):
    expected = {}
    for slot in (0, 1, 2):
        start(decoder, slot, stream=slot, sampling=SamplingParams(seed=slot))
        expected[slot] = say(decoder, slot, 3)
        start(decoder, slot, stream=slot, sampling=SamplingParams(seed=slot))
    said = {slot: [] for slot in expected}
    launches = [[2, 0], [1], [0, 1, 2], [2, 1, 0]]
    for slots in launches:
        decoder.launch(slots)
    for slots in launches:
        for slot, codes in zip(slots, decoder.collect(), strict=True):
            said[slot].append(codes)
    assert all(same(said[slot], expected[slot]) for slot in expected)


def test_frames_behind_the_end_are_none_and_the_others_go_on(decoder_for):
    decoder = decoder_for(EAGER_TO_END)
    start(decoder, 0)
    alone = say(decoder, 0, 80)
    end = alone.index(None)
    assert 2 <= end < 70 and not any(codes is not None for codes in alone[end:])
    start(decoder, 0)
    start(decoder, 1, stream=1)
    beside = say(decoder, 1, end + AHEAD)
    start(decoder, 1, stream=1)
    for _ in range(end):
        decoder.launch([0, 1])
        decoder.collect()
    for _ in range(AHEAD):
        decoder.launch([1, 0])
    both = [decoder.collect() for _ in range(AHEAD)]
    assert same([codes for codes, _ in both], beside[end:])
    assert [codes for _, codes in both] == [None] * AHEAD


def test_a_restarted_slot_forgets_what_was_launched_before(decoder):
    start(decoder, 0)
    expected = say(decoder, 0, 2)
    start(decoder, 0, stream=1)
    decoder.launch([0])
    decoder.launch([0])
    start(decoder, 0)
    decoder.launch([0])
    decoder.launch([0])
    assert same([codes for _ in range(4) for codes in decoder.collect()], [None, None, *expected])


def test_a_slot_is_used_to_its_last_position_and_no_further(decoder):
    start(decoder, 0, rows=POSITIONS - 2)
    assert None not in say(decoder, 0, 3)
    with pytest.raises(ValueError, match=f"slot 0 is full: its stream used all {POSITIONS} positions"):
        decoder.launch([0])


@pytest.mark.parametrize(
    "slots, message",
    [
        ([], "1 to 8 different slots, got \\[\\]"),
        (range(9), "1 to 8 different slots"),
        ([0, 0], "different slots, got \\[0, 0\\]"),
        ([0, 7], "slot 7 holds no stream: start"),
        ([-1], "slot -1 holds no stream"),
    ],
    ids=str,
)
def test_wrong_slots_are_refused_and_queue_nothing(decoder, slots, message):
    start(decoder, 0)
    with pytest.raises(ValueError, match=message):
        decoder.launch(slots)
    with pytest.raises(RuntimeError, match="nothing is launched"):
        decoder.collect()


def test_only_so_many_launches_may_wait(decoder):
    start(decoder, 0)
    for _ in range(AHEAD):
        decoder.launch([0])
    with pytest.raises(RuntimeError, match=f"{AHEAD} launches may be uncollected and are: collect"):
        decoder.launch([0])
    assert len([decoder.collect() for _ in range(AHEAD)]) == AHEAD


@pytest.mark.parametrize("slot, rows", [(3, 9), (-1, 9), (0, POSITIONS + 1)])
def test_a_start_that_cannot_be_is_refused(decoder, slot, rows):
    with pytest.raises(ValueError, match="slot must be in 0..2 and the prompt of 1..100 rows"):
        start(decoder, slot, rows=rows)
