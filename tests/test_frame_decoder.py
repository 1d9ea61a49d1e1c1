"""The PyTorch backend behind `FrameDecoder`: frames ahead, several slots, ends, refusals."""

import random
from collections import deque

import numpy as np
import pytest
import torch
from streams import PUBLISHED, SETTINGS, decoder_over, interleaved, same, say, start

from qwen_megakernel.backend.cuda_graphs import attended, clear
from qwen_megakernel.backend.interfaces import AHEAD, Watch
from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder
from qwen_megakernel.backend.sizes import TELLINGS, TOLD
from qwen_megakernel.checkpoint.config import TextHead
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.model.frame import Frame, SlotState, draws_of
from qwen_megakernel.model.prompt import Prompt
from qwen_megakernel.model.sampling import gumbel_noise
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.sampling_params import SamplingParams

POSITIONS = 100
EAGER_TO_END, NEVER_ENDING = 4.0, 0.0  # eos_gain of a checkpoint


@pytest.fixture(scope="module")
def decoder_for(tiny):
    """decoder_for(eos_gain) -> a decoder with three slots."""
    made = {}

    def get(eos_gain: float):
        if eos_gain not in made:
            made[eos_gain] = decoder_over(tiny("custom_voice", eos_gain=eos_gain), max_positions=POSITIONS)
        return made[eos_gain]

    return get


@pytest.fixture
def decoder(decoder_for):
    decoder = decoder_for(NEVER_ENDING)
    yield decoder
    while decoder._launches:
        decoder.collect()


def test_frames_launched_ahead_are_the_frames_one_by_one(decoder):
    start(decoder, 0, sampling=PUBLISHED, seed=3)
    expected = say(decoder, 0, 12)
    start(decoder, 1, sampling=PUBLISHED, seed=3)
    said = []
    for _ in range(12 // AHEAD):
        for _ in range(AHEAD):
            decoder.launch([1])
        for _ in range(AHEAD):
            said += decoder.collect()
    assert same(said, expected)
    assert said[0].dtype == np.int64 and said[0].shape == (16,) and not np.array_equal(said[0], said[1])


def test_a_launch_of_several_slots_gives_each_its_own_in_order(decoder):
    expected = {}
    for slot in (0, 1, 2):
        start(decoder, slot, stream=slot, sampling=PUBLISHED, seed=slot)
        expected[slot] = say(decoder, slot, 3)
        start(decoder, slot, stream=slot, sampling=PUBLISHED, seed=slot)
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
    end = next(i for i, codes in enumerate(alone) if codes is None)
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
    assert all(codes is not None for codes in say(decoder, 0, 3))
    with pytest.raises(ValueError, match=f"slot 0 .*{POSITIONS} positions"):
        decoder.launch([0])


@pytest.mark.parametrize(
    "slots, message",
    [
        ([], "1 to 16 different slots, got \\[\\]"),
        (range(17), "1 to 16 different slots"),
        ([0, 0], "different slots, got \\[0, 0\\]"),
        ([0, 7], "slot 7 holds no sequence: start"),
        ([-1], "slot -1 holds no sequence"),
    ],
    ids=str,
)
def test_wrong_slots_are_refused_and_queue_nothing(decoder, slots, message):
    start(decoder, 0)
    with pytest.raises(ValueError, match=message):
        decoder.launch(slots)
    with pytest.raises(RuntimeError, match="launched"):
        decoder.collect()


def test_only_so_many_launches_may_wait(decoder):
    start(decoder, 0)
    for _ in range(AHEAD):
        decoder.launch([0])
    with pytest.raises(RuntimeError, match=f"{AHEAD} launches .*collect"):
        decoder.launch([0])
    assert len([decoder.collect() for _ in range(AHEAD)]) == AHEAD


@pytest.mark.parametrize("slot, rows", [(3, 9), (-1, 9), (0, POSITIONS + 1)])
def test_a_start_that_cannot_be_is_refused(decoder, slot, rows):
    with pytest.raises(ValueError, match="slot .*0..2 .*1..100 rows"):
        start(decoder, slot, rows=rows)


# ---------------------------------------------------------------- the kernel's decoder, whose launcher is pretended


class Launcher:
    """Tells of a frame when somebody waits for that: the slot, the frame's number, and what it knew of the text."""

    def __init__(self):
        self.watched, self.frames, self.queued, self.untold = {}, {}, deque(), []

    def begin(self, slot, *_args):
        self.watched.pop(slot, None)
        self.frames[slot] = 0

    def watch(self, slot, queries, told, first_head, text_at):
        self.watched[slot] = told, first_head, text_at

    def enter(self, *_args):
        pass

    set_sampling = set_text = enter

    def decode(self, slots, texts):
        assert texts or not self.watched.keys() & set(slots)
        launched = []
        for i, slot in enumerate(slots):
            if slot in self.watched:
                told, *watched = self.watched[slot]
                row = torch.tensor([slot, self.frames[slot], *texts[2 * i : 2 * i + 2], *watched])
                launched.append((told[self.frames[slot] % TELLINGS, 0], row))
            self.frames[slot] += 1
        self.queued.append((len(slots), launched))

    def collect(self):
        self.await_told()
        count, self.untold = self.queued.popleft()
        return torch.ones(count, 17, dtype=torch.int32) * torch.tensor([1] * 16 + [0], dtype=torch.int32)

    def await_told(self):
        for told, row in self.untold:
            told[: len(row)] = row
        self.untold = []


def test_the_kernel_tells_of_every_frame_once_and_in_order(fresh_seed):
    """Launched ahead; streams that are watched or not, join and leave."""
    rng, slots = random.Random(fresh_seed), 5
    decoder = MegakernelFrameDecoder.__new__(MegakernelFrameDecoder)
    decoder.slots, decoder.width, decoder.max_positions, decoder._pages = slots, 4, 600, 10
    decoder._launcher, decoder._sequences, decoder._launches, decoder._untold = Launcher(), {}, deque(), []
    decoder._eos_id, decoder._fault, decoder._heads, decoder._of_slot = 0, torch.zeros(1), (28, 16), [()] * slots
    decoder._watching = [(torch.zeros(0), torch.full((TELLINGS, 1, TOLD), -1.0)) for _ in range(slots)]
    decoder._nothing, decoder.prefixes = torch.zeros(8), {}
    expected, queued, frames = {}, deque(), {}

    def begin(slot):
        watch = Watch(rng.randrange(9), [0] * rng.randint(1, 9), TextHead(rng.randrange(28), rng.randrange(16), 0.0))
        watch = watch if rng.random() < 0.8 else None
        prompt = Prompt(torch.zeros(3, 8), torch.zeros(1, 8), torch.zeros(8))
        decoder.start(slot, prompt, SamplingParams().over(PUBLISHED), watch=watch)
        expected[slot], frames[slot] = [], 0

    def collect():
        decoder.collect()
        for slot, sequence, row in queued.popleft():
            if row and decoder._sequences[slot] is sequence:
                expected[slot].append(row)

    for slot in range(slots):
        begin(slot)
    for _ in range(300):
        now = rng.sample(range(slots), rng.randint(1, 4))
        queued.append([])
        for slot in now:
            sequence = decoder._sequences[slot]
            row = None
            if watch := sequence.watch:
                watch.first = rng.randrange(9)
                head = watch.head.layer * 16 + watch.head.head
                row = [slot, frames[slot], watch.first, len(watch.text), head, watch.text_at]
            queued[-1].append((slot, sequence, row))
            frames[slot] += 1
        decoder.launch(now)
        while len(queued) > rng.randint(0, AHEAD - 1):
            collect()
        if rng.random() < 0.5:
            slot = rng.randrange(slots)
            assert [told[0, 0, :6].tolist() for told in decoder.told(slot)] == expected[slot]
            expected[slot] = []
        if rng.random() < 0.05:
            begin(rng.randrange(slots))


# ---------------------------------------------------------------- what a CUDA graph captures


class Uncaptured:
    """In the place of `FrameGraphs`: the step that it captures, run on a CPU. As in a graph, the first request of a
    shape leaves its draws behind for every later one."""

    def __init__(self, decoder):
        self.frame, self.positions, self.draws = decoder._frame, decoder.max_positions, {}
        clear(decoder._states)

    @torch.inference_mode()
    def launch(self, jobs):
        said = []
        for state, draws, positions, tell in jobs:
            draws = self.draws.setdefault(tuple(draw.shape for draw in draws), draws)
            self.frame.step(state, draws, state.position, attended(positions, self.positions))
            said.append((state.codes.clone(), tell()))
        return said.__getitem__


@pytest.fixture(scope="module", params=["tiny", "tiny-adapter"])
def pair(request, tiny):
    """The eager decoder, and one that runs the step as a graph would."""
    eager, static = (decoder_over(tiny("custom_voice", size=request.param, eos_gain=0.0)) for _ in range(2))
    static._graphs = Uncaptured(static)
    return eager, static


@pytest.mark.slow
def test_what_a_graph_captures_says_what_the_eager_frame_says(pair):
    """Eight frames of three slots in turn, from inside one length of attention into the next, for every setting; the
    settings come one behind the other, so that each finds what another left behind."""
    eager, static = pair
    for name, sampling in SETTINGS.items():
        expected = {}
        for slot, rows in enumerate((252, 508, 9)):
            for decoder in pair:
                watch = Watch(rows - 5, range(9), (None, TextHead(1, 0, 0.0), None)[slot])
                start(decoder, slot, stream=slot, rows=rows, sampling=sampling, seed=2**63 + slot, watch=watch)
            expected[slot] = say(eager, slot, 8)
        said = interleaved(static, [0, 1, 2], 8, ahead=AHEAD)
        assert all(same(said[slot], expected[slot]) for slot in expected), name
        for slot in expected:  # a graph's told attention is the eager frame's
            told, eagerly = static.told(slot), eager.told(slot)
            assert len(told) == len(eagerly) == 8 and static.told(slot) == []
            assert np.allclose(told, eagerly, atol=1e-4), name
    assert len(static._graphs.draws) == len(SETTINGS) - 1, "two settings have one shape"


@torch.inference_mode()
def test_a_frames_noise_is_that_of_its_seed_and_number(decoder):
    seed = int(torch.randint(2**62, ())) * 4 + 3
    start(decoder, 0, sampling=PUBLISHED, seed=seed)
    say(decoder, 0, 2)
    frame, cpu = decoder._frame, torch.device("cpu")
    noise = frame._noise(decoder._states[0])
    assert torch.equal(noise[0], gumbel_noise(seed, 2, range(1), len(noise[0]), cpu)[0])
    assert torch.equal(torch.stack(noise[1:]), gumbel_noise(seed, 2, range(1, 16), len(noise[1]), cpu))


@torch.inference_mode()
def test_a_frame_never_asks_the_device_for_a_value(tiny):
    """Which a capture would refuse. On the device "meta" tensors have none, and asking for one raises."""
    checkpoint, meta = Checkpoint.open(tiny("custom_voice", eos_gain=0.0)), torch.device("meta")
    config = checkpoint.config.talker
    tensors = {n: t.to(meta) for n, t in checkpoint.talker(torch.device("cpu"), torch.float32).items()}
    frame = Frame(config, tensors, Embeddings(config, tensors), 600)
    state = SlotState(config, 600, meta, torch.float32)
    for sampling in SETTINGS.values():
        frame.step(state, draws_of(sampling.over(PUBLISHED)), state.position, 256)
    state.cache.told(9, slice(None), slice(None), slice(2, 7), 1)
    with pytest.raises(RuntimeError, match="meta"):
        int(state.frame)


def test_attention_grows_by_doubling_up_to_the_whole_cache():
    lengths = [attended(n, 2000) for n in (1, 256, 257, 512, 513, 1025, 2000)]
    assert lengths == [256, 256, 512, 512, 1024, 2000, 2000]
    assert attended(1, 100) == 100
