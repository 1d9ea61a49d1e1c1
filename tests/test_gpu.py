"""The PyTorch backend on an NVIDIA GPU (`make test-gpu`); fp32 without TF32 unless said."""

import hashlib
import os
import random
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from streams import PUBLISHED, SETTINGS, decoder_over, interleaved, same, say, start
from waiting import run_all, until

from qwen_megakernel import SamplingParams, TTSEngine, cli
from qwen_megakernel.backend import vocoder_weights
from qwen_megakernel.backend.build import load_extension
from qwen_megakernel.backend.cuda_graphs import KEPT
from qwen_megakernel.backend.interfaces import AHEAD, PUSH_FRAMES, RECENT_FRAMES
from qwen_megakernel.backend.vocoder_graphs import GraphVocoder
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.model.sampling import gumbel_noise
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.vocoder import TorchVocoder
from qwen_megakernel.sampling_params import GREEDY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
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


@hopper
@pytest.mark.parametrize("weights", ["fp8", "fp8-predictor"])
def test_the_kernel_speaks_with_fp8_weights(tmp_path, weights):
    """Quantised at load or before; alone and in company; other words than bf16's for the same seed."""
    assert cli.main(["quantize", "demo", str(tmp_path / "stored"), "--weights", weights]) == 0

    def said(model, **options):
        with TTSEngine.load(model, backend="megakernel", max_streams=16, max_positions=512, **options) as engine:
            one = engine.generate(TEXT, sampling=SamplingParams(seed=1))
            company = [engine.submit(TEXT, sampling=SamplingParams(seed=seed % 3)) for seed in range(16)]
            many = [utterance.result() for utterance in company]
            assert engine.health()["status"] == "ok"
        assert one.finish_reason == "eos"
        assert all(np.array_equal(one.codes, many[i].codes) for i in range(1, 16, 3))
        assert all(audio.finish_reason == "eos" for audio in many)
        return engine.weights, one

    name, at_load = said("demo", weights=weights)
    stored_name, stored = said(tmp_path / "stored")
    assert name == stored_name == weights
    assert np.array_equal(at_load.codes, stored.codes) and np.array_equal(at_load.samples, stored.samples)
    assert not np.array_equal(at_load.codes, said("demo")[1].codes)


@hopper
def test_who_shares_memory_says_what_is_said_with_a_slot_each(fresh_seed):
    """64 at once, some in pieces and some cancelled, in the memory of five slots."""
    options = {"backend": "megakernel", "max_streams": 64, "max_positions": 512, "max_queue": 64, "queue_timeout": 600}
    said, memory = [], None
    for _ in range(2):
        rng = random.Random(fresh_seed)
        with TTSEngine.load("demo", kv_memory=memory, **options) as engine:
            stack, utterances = engine.config.talker.stack, []
            for seed in range(100):
                text, in_pieces = TEXT * rng.randint(1, 3), rng.random() < 0.3
                utterance = engine.submit(None if in_pieces else text, sampling=SamplingParams(seed=seed))
                if in_pieces:
                    utterance.push_text(text)
                    utterance.end_text()
                utterances.append(utterance)
            gone = rng.sample(utterances, 10)
            for utterance in gone:
                utterance.cancel()
            audios = [utterance.result() for utterance in utterances]
            assert {audio.finish_reason for audio in audios} <= {"eos", "cancelled", "runaway"}
            said.append([a for u, a in zip(utterances, audios, strict=True) if u not in gone])
            until(lambda: engine.snapshot().at_rest)
            pages = engine.snapshot().pages
        assert pages == (64 if memory is None else 5) * 8
        memory = 5.01 * 512 * 4 * stack.num_layers * stack.num_kv_heads * stack.head_dim / 2**30
    assert all(
        np.array_equal(a.codes, b.codes) and np.array_equal(a.samples, b.samples) for a, b in zip(*said, strict=True)
    )


@pytest.mark.parametrize("model", ["tiny", "demo"])
def test_streaming_equals_one_shot(tiny, model):
    checkpoint = Checkpoint.open("demo" if model == "demo" else tiny("custom_voice"))
    config = checkpoint.config.codec.vocoder
    vocoder = TorchVocoder(config, checkpoint.vocoder(GPU, torch.float32), slots=2)
    codes = torch.randint(0, config.codebook_size, (1, 100, 16), device=GPU)
    whole = vocoder.push([0], codes)[0]
    sizes = [1, 1, 2, 4, 8, 8, 16, 60]
    parts = torch.cat([vocoder.push([1], part)[0] for part in codes.split(sizes, dim=1)])
    assert (parts - whole).abs().max() <= 2e-5


@pytest.fixture(scope="module")
def codec(tiny):
    """codec(name) -> (config, fp32 tensors on the GPU): the demo voice's, or random ones at the published dims."""
    made = {}

    def get(name: str):
        if name not in made:
            checkpoint = Checkpoint.open("demo" if name == "demo" else tiny("custom_voice", codec="real"))
            made[name] = checkpoint.config.codec.vocoder, checkpoint.vocoder(GPU, torch.float32)
        return made[name]

    return get


def check_any_schedule_and_mix(config, tensors, slots: int = 8):
    """Streams that come, pause and go, slots that change hands, pushes of every size. Samples are within 2e-5 of the
    eager vocoder's, and their bits depend neither on the cut into pushes nor on the company."""
    graphs = GraphVocoder(load_extension(GPU), config, tensors, slots=slots)
    alone = GraphVocoder(load_extension(GPU), config, tensors, slots=1)
    eager = TorchVocoder(config, tensors, slots=1)
    rng = np.random.default_rng(torch.randint(2**31, ()).item())
    for _ in range(2):
        codes = torch.randint(0, config.codebook_size, (slots, 100, 16))
        at, parts = [0] * slots, [[] for _ in range(slots)]
        for slot in range(slots):
            graphs.reset(slot)
        while min(at) < 100:
            frames = int(rng.choice([1, 1, 1, 2, 3, 4, 8, 25]))
            waiting = [slot for slot in range(slots) if at[slot] < 100]
            frames = min(frames, *(100 - at[slot] for slot in waiting))
            some = [int(s) for s in rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)]]
            pushed = graphs.push(some, torch.stack([codes[s, at[s] : at[s] + frames] for s in some]))
            for slot, sound in zip(some, pushed, strict=True):
                parts[slot].append(sound)
                at[slot] += frames
        for slot in range(slots):
            eager.reset(0)
            whole = eager.push([0], codes[slot][None])[0].cpu()
            said = torch.cat(parts[slot])
            assert (said - whole).abs().max() <= 2e-5 and whole.std() > 0.01
            alone.reset(0)
            assert torch.equal(said, alone.push([0], codes[slot][None])[0])


@hopper
@pytest.mark.parametrize("model", ["demo", "published"])
@pytest.mark.parametrize("trial", range(3))
def test_graphs_equal_the_eager_vocoder_for_any_schedule_and_mix(codec, model, trial):
    check_any_schedule_and_mix(*codec(model))


@hopper
@pytest.mark.parametrize("model", ["demo", "published"])
def test_graphs_of_many_slots_equal_the_eager_vocoder(codec, model):
    """Pushes of up to 128 frames, which reuse buffers within a block."""
    config, tensors = codec(model)
    check_any_schedule_and_mix(config, tensors, slots=20)
    graphs = GraphVocoder(load_extension(GPU), config, tensors, slots=20)
    codes = torch.randint(0, config.codebook_size, (20, 8, 16))
    together = graphs.push(range(20), codes)
    for slot in range(20):
        graphs.reset(slot)
        alone = graphs.push([slot], codes[slot : slot + 1])
        assert torch.equal(together[slot], alone[0])


@hopper
@pytest.mark.parametrize(
    "model, multiprocessors, shared_kb",
    [
        ("published", 24, 99),  # RTX 4060
        ("published", 46, 99),  # RTX 3070
        ("published", 128, 99),  # RTX 4090
        ("published", 108, 163),  # A100
        ("published", 78, 227),  # H20
        ("demo", 24, 99),
        ("demo", 24, 40),  # less than any card has: the demo voice's products are cut too
    ],
)
def test_graphs_of_smaller_gpus_equal_the_eager_vocoder(codec, monkeypatch, model, multiprocessors, shared_kb):
    """The transformer's kernel with the blocks and the shared memory of other cards; pushes of up to 128 rows."""
    monkeypatch.setattr(vocoder_weights, "transformer_room", lambda _device: (multiprocessors, shared_kb * 1024))
    check_any_schedule_and_mix(*codec(model), slots=20)


@hopper
def test_graphs_equal_the_cpus_decode(codec):
    config, tensors = codec("published")
    graphs = GraphVocoder(load_extension(GPU), config, tensors, slots=1)
    codes = torch.randint(0, config.codebook_size, (1, 40, 16))
    whole = TorchVocoder(config, {n: t.cpu() for n, t in tensors.items()}, slots=1).push([0], codes)[0]
    sizes = [1, 1, 2, 4, 8, 1, 3, 8, 8, 4]
    parts = torch.cat([graphs.push([0], part)[0] for part in codes.split(sizes, dim=1)])
    assert (parts - whole).abs().max() <= 2e-5 and whole.std() > 0.01


@hopper
def test_graphs_repeat_themselves_and_go_on_from_a_saved_state(codec):
    config, tensors = codec("published")
    graphs = GraphVocoder(load_extension(GPU), config, tensors, slots=3)
    codes = torch.randint(0, config.codebook_size, (1, 40, 16))
    graphs.push([1], codes[:, :20])
    state = graphs.save(1)
    rest = graphs.push([1], codes[:, 20:])
    graphs.push([2], codes.flip(1))
    graphs.restore(2, state)
    assert torch.equal(graphs.push([2], codes[:, 20:]), rest)
    for bad in (([0, 0], codes.expand(2, -1, -1)), ([3], codes), ([0], codes[:, :0]), ([0], codes[..., :8])):
        with pytest.raises(ValueError):
            graphs.push(*bad)


@hopper
@pytest.mark.parametrize("model", ["demo", "published"])
@pytest.mark.parametrize("frames", [1, 9, 10, 11, 63, 150])
def test_a_reference_is_skimmed_and_leaves_what_decoding_it_leaves(codec, model, frames):
    config, tensors = codec(model)
    graphs = GraphVocoder(load_extension(GPU), config, tensors, slots=2)
    codes = torch.randint(0, config.codebook_size, (1, frames + 20, 16))
    whole = TorchVocoder(config, tensors, slots=1).push([0], codes)[0, frames * 1920 :].cpu()
    graphs.push([1], codes[:, :5])  # somebody else's
    graphs.reset(1)
    portions = graphs.portions(codes[0, :frames])
    assert torch.equal(torch.cat([portion.codes for portion in portions]), codes[0, :frames])
    assert sum(len(portion.codes) for portion in portions if portion.whole) <= 10
    for portion in portions:
        graphs.listen(1, portion)
    after = torch.cat([graphs.push([1], codes[:, [frames + i]])[0] for i in range(20)])
    assert (after - whole).abs().max() <= 2e-5 and whole.std() > 0.01


@hopper
@pytest.mark.parametrize("model", ["demo", "published"])
@pytest.mark.parametrize("slots", [3, 20])
def test_codes_that_never_leave_the_gpu_sound_the_same_in_any_company(codec, fresh_seed, model, slots):
    """Frames of a ring of 16. Every sequence gives each push another number of frames; the last is one behind the end
    of speech."""
    rng = random.Random(fresh_seed)
    config, tensors = codec(model)
    recent = torch.zeros(slots, RECENT_FRAMES, 16, dtype=torch.int32, device=GPU)
    graphs = GraphVocoder(load_extension(GPU), config, tensors, slots=slots, recent_codes=recent)
    codes = torch.randint(0, config.codebook_size, (slots, 60, 16))
    expected = torch.cat([graphs.push([slot], codes[slot : slot + 1]) for slot in range(slots)])
    for slot in range(slots):
        graphs.reset(slot)
    written, at, heard = [0] * slots, [0] * slots, [[] for _ in range(slots)]
    while min(at) < 60:
        pushed, frames, room = [], [], graphs.most_frames
        for slot in rng.sample(range(slots), slots):
            while written[slot] < min(60, at[slot] + RECENT_FRAMES) and rng.random() < 0.9:
                recent[slot, written[slot] % RECENT_FRAMES] = codes[slot, written[slot]].to(GPU, torch.int32)
                written[slot] += 1
            if (count := min(written[slot] - at[slot], rng.randint(1, PUSH_FRAMES), room)) and rng.random() < 0.7:
                pushed.append(slot)
                frames.append(count)
                room -= count
        if not pushed:
            continue
        for slot, count, sound in zip(
            pushed, frames, graphs.follow(pushed, [at[s] for s in pushed], frames)(), strict=True
        ):
            assert len(sound) == count * 1920
            heard[slot].append(sound)
            at[slot] += count
    assert all(torch.equal(torch.cat(parts), whole) for parts, whole in zip(heard, expected, strict=True))
    graphs.reset(0)
    recent[0, 0], recent[0, 1] = codes[0, 0].to(GPU, torch.int32), 2150
    (last,) = graphs.follow([0], [0], [2])()
    assert torch.equal(last[:1920], expected[0, :1920]), "noise comes after the sound"
    graphs.reset(0)
    graphs.reset(1)
    recent[1, 0] = codes[1, 0].to(GPU, torch.int32)
    graphs._memory.of_slot[0][0].fill_(torch.nan)
    broken, sound = graphs.follow([0, 1], [0, 0], [1, 1])()
    assert broken is None and torch.equal(sound, expected[1, :1920]), "only its own samples are not finite"
    for bad in (([0], [0], [9]), ([0], [0], [0]), ([slots], [0], [1])):
        with pytest.raises(RuntimeError):
            graphs.follow(*bad)


@hopper
def test_the_text_projection_equals_pytorchs(tiny):
    """In bf16 both; as far from fp32 as PyTorch is, and the same for a text that comes in pieces."""
    for size in ("tiny", "demo"):
        checkpoint = Checkpoint.open("demo" if size == "demo" else tiny("custom_voice"))
        tensors = checkpoint.talker(GPU, torch.bfloat16)
        ours = Embeddings(checkpoint.config.talker, tensors, load_extension(GPU))
        theirs = Embeddings(checkpoint.config.talker, tensors)
        exact = {n: t.float() for n, t in tensors.items()}
        exact = Embeddings(checkpoint.config.talker, exact)
        ids = torch.randint(0, checkpoint.config.talker.text_vocab_size, (37,)).tolist()
        rows, truth = ours.text(ids), exact.text(ids)
        error, usual = ((r.float() - truth).norm() for r in (rows, theirs.text(ids)))
        assert error <= 1.05 * usual
        assert torch.equal(rows, torch.cat([ours.text(ids[:1]), ours.text(ids[1:20]), ours.text(ids[20:])]))


@hopper
def test_tf32_is_close_and_fp32_closer(codec, capsys):
    """Signal to noise against fp64."""
    config, tensors = codec("published")
    codes = torch.randint(0, config.codebook_size, (1, 60, 16))
    exact = TorchVocoder(config, {n: t.double() for n, t in tensors.items()}, slots=1).push([0], codes)[0].cpu()
    ratios = {}
    for name, vocoder in {
        "fp32": GraphVocoder(load_extension(GPU), config, tensors, slots=1),
        "eager fp32": TorchVocoder(config, tensors, slots=1),
        "tf32": GraphVocoder(load_extension(GPU), config, tensors, slots=1, exact=False),
        "bfloat16": TorchVocoder(config, tensors, slots=1, dtype=torch.bfloat16),
    }.items():
        noise = vocoder.push([0], codes)[0].cpu().double() - exact
        ratios[name] = float(10 * torch.log10(exact.square().sum() / noise.square().sum()))
    with capsys.disabled():
        print("\n[vocoder against fp64: " + ", ".join(f"{n} {db:.1f} dB" for n, db in ratios.items()) + "]")
    assert ratios["fp32"] > 100 and ratios["fp32"] > ratios["eager fp32"] - 3 and ratios["fp32"] > ratios["tf32"] > 40


def test_voices_are_made_beside_a_gpu_engine(tiny):
    sound = np.sin(np.arange(30_000) / 20).astype(np.float32) * 0.3
    with TTSEngine.load(tiny("base", eos_gain=0.0), max_streams=1) as engine:
        voice = engine.create_voice((sound, 24000), "a tone")
        assert len(engine.generate(TEXT, voice=voice, max_frames=5).codes) == 5


SPEAK = """
import hashlib, os
if target := os.environ.get("EMULATE"):
    from emulation import pretend
    pretend(target)
from qwen_megakernel import SamplingParams, TTSEngine, cli
with TTSEngine.load("demo") as engine:
    request = {"speaker": "max", "sampling": SamplingParams(seed=5), "max_frames": 60}
    audio = engine.generate("Hello there, how are you today?", **request)
    print(engine.backend, hashlib.sha256(audio.codes.tobytes() + audio.samples.tobytes()).hexdigest())
"""


def test_a_request_says_the_same_after_a_restart():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    told = {"env": environment, "capture_output": True, "text": True, "check": True}
    runs = [subprocess.run([sys.executable, "-c", SPEAK], **told) for _ in range(2)]
    with TTSEngine.load("demo") as engine:
        engine.generate("Something else before.", max_frames=20)
        audio = engine.generate(TEXT, speaker="max", sampling=SamplingParams(seed=5), max_frames=60)
    said = hashlib.sha256(audio.codes.tobytes() + audio.samples.tobytes()).hexdigest()
    assert [run.stdout.split()[-1] for run in runs] == [said, said]


# ---------------------------------------------------------------- CUDA graphs


@pytest.fixture(scope="module")
def pair(tiny):
    """A decoder that replays graphs, and an eager one."""
    folder = tiny("custom_voice", size="tiny-adapter", eos_gain=0.0)
    graphs, eager = (decoder_over(folder, device="cuda") for _ in range(2))
    eager._graphs = None
    return graphs, eager


def captured(graphs, slot: int) -> int:
    return len(graphs._graphs._graphs[graphs._states[slot]])


@pytest.mark.parametrize("name", SETTINGS)
def test_graphs_say_what_the_eager_frame_says(pair, name):
    """From one length of attention into the next, three slots in turn, ahead of what was collected."""
    graphs, eager = pair
    expected = {}
    for slot, rows in enumerate((230, 480, 9)):
        for decoder in pair:
            start(decoder, slot, stream=slot, rows=rows, sampling=SETTINGS[name], seed=2**63 + slot)
        expected[slot] = say(eager, slot, 60)
    said = interleaved(graphs, [0, 1, 2], 60, ahead=AHEAD)
    assert all(same(said[slot], expected[slot]) for slot in expected)


def test_a_graph_serves_every_request_of_its_shape_and_few_are_kept(tiny):
    graphs = decoder_over(tiny("custom_voice", eos_gain=0.0), device="cuda", slots=1)
    for seed, name in enumerate(("as published", "other numbers", "as published")):
        start(graphs, 0, stream=seed, sampling=SETTINGS[name], seed=seed)
        say(graphs, 0, 3)
    assert captured(graphs, 0) == 1
    start(graphs, 0, sampling=PUBLISHED)
    expected = say(graphs, 0, 5)
    for top_k in range(1, KEPT + 3):
        start(graphs, 0, sampling=SamplingParams(top_k=top_k))
        say(graphs, 0, 2)
    assert captured(graphs, 0) == KEPT
    start(graphs, 0, sampling=PUBLISHED)
    assert same(say(graphs, 0, 5), expected), "captured anew"


def test_frames_behind_the_end_are_none(tiny):
    graphs = decoder_over(tiny("custom_voice", eos_gain=4.0), device="cuda", slots=1)
    start(graphs, 0)
    said = interleaved(graphs, [0], 80, ahead=AHEAD)[0]
    end = next(i for i, codes in enumerate(said) if codes is None)
    assert 2 <= end < 70 and all(codes is None for codes in said[end:])
    start(graphs, 0)
    assert same(say(graphs, 0, 80), said), "what ran behind the end is forgotten"


def test_a_restarted_slot_forgets_what_was_launched_before(pair):
    graphs, _ = pair
    start(graphs, 0, sampling=PUBLISHED)
    expected = say(graphs, 0, 2)
    start(graphs, 0, stream=1, sampling=PUBLISHED)
    graphs.launch([0])
    graphs.launch([0])
    start(graphs, 0, sampling=PUBLISHED)
    graphs.launch([0])
    graphs.launch([0])
    assert same([codes for _ in range(4) for codes in graphs.collect()], [None, None, *expected])


def test_the_last_position_of_a_slot_is_used(tiny):
    """And a length of attention that is no round number."""
    folder = tiny("custom_voice", eos_gain=0.0)
    graphs, eager = (decoder_over(folder, device="cuda", slots=1, max_positions=301) for _ in range(2))
    eager._graphs = None
    for decoder in (graphs, eager):
        start(decoder, 0, rows=290)
    assert same(say(graphs, 0, 12), say(eager, 0, 12))
    with pytest.raises(ValueError, match="slot 0"):
        graphs.launch([0])


def test_graphs_are_captured_while_other_threads_and_engines_use_the_gpu(tiny):
    """Prompts are built on the GPU in their callers' threads, and every engine captures in a thread of its own."""
    folder = tiny("custom_voice", eos_gain=0.0)
    requests = {k: SamplingParams(top_k=k, seed=k) for k in range(2, 8)}
    said = {}

    def speak(engine, k: int) -> None:
        said[engine, k] = engine.generate(TEXT, sampling=requests[k], max_frames=12).codes

    with (
        TTSEngine.load(folder, device="cuda", dtype=torch.float32, max_streams=6) as first,
        TTSEngine.load(folder, device="cuda", dtype=torch.float32, max_streams=6) as second,
    ):
        run_all(*[partial(speak, engine, k) for k in requests for engine in (first, second)])
        assert all(np.array_equal(said[first, k], said[second, k]) for k in requests)
        for k in requests:
            again = first.generate(TEXT, sampling=requests[k], max_frames=12)
            assert np.array_equal(again.codes, said[first, k])
