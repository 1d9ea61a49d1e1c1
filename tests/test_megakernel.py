"""The kernel against its PyTorch twin in fp32: fresh random weights at real dims in every run. Needs a Hopper GPU."""

import pytest
import torch
import torch.nn.functional as F

from qwen_megakernel.config import GREEDY, SamplingParams
from qwen_megakernel.frame_decoder import TorchFrameDecoder
from qwen_megakernel.megakernel import MegakernelFrameDecoder
from qwen_megakernel.prompt import Prompt
from qwen_megakernel.sampling import Code0Rules, Draw, gumbel_noise
from qwen_megakernel.synthetic import random_talker, synthetic_config
from qwen_megakernel.transformer import Embeddings, KVCache, Transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs a Hopper GPU"
    ),
]
GPU = torch.device("cuda")
POSITIONS = 1100


class Twin:
    """Talker and code predictor in plain PyTorch, fed the codes that the kernel drew."""

    def __init__(self, config, tensors, dtype):
        tensors = {n: t.to(dtype) for n, t in tensors.items()}
        c, predictor = config.talker, "talker.code_predictor"
        self.dtype, self.config = dtype, c
        self.embed = Embeddings(c, tensors)
        self.talker = Transformer(c.stack, tensors, "talker.model", POSITIONS)
        self.predictor = Transformer(c.code_predictor.stack, tensors, f"{predictor}.model", 16)
        self.cache = KVCache(c.stack, POSITIONS, GPU, dtype)
        self.predictor_cache = KVCache(c.code_predictor.stack, 16, GPU, dtype)
        self.head = tensors["talker.codec_head.weight"]
        self.heads = [tensors[f"{predictor}.lm_head.{g}.weight"] for g in range(15)]
        adapter = [f"{predictor}.small_to_mtp_projection.{n}" for n in ("weight", "bias")]
        self.adapter = [tensors[n] for n in adapter if n in tensors]
        self.position = 0

    def rows(self, rows):
        """Talker rows -> hidden of the last one."""
        hidden = self.talker.forward(rows.to(self.dtype), self.position, self.cache)
        self.position += len(rows)
        return hidden[-1:]

    def frame(self, hidden, codes):
        """[16 rows of logits], with `codes` as what was drawn."""
        logits = [F.linear(hidden, self.head)[0].float()]
        rows = torch.cat([hidden, *(self.embed.code(g, codes[None, g]) for g in range(15))])
        rows = F.linear(rows, *self.adapter) if self.adapter else rows
        out = self.predictor.forward(rows, 0, self.predictor_cache)
        return logits + [F.linear(out[g], self.heads[g - 1]).float() for g in range(1, 16)]


def relative(x, reference) -> float:
    return float((x - reference).norm() / reference.norm())


@pytest.fixture(scope="module", params=["0.6b", "1.7b"])
def model(request):
    config = synthetic_config(request.param)
    seed = torch.seed() % 2**31
    tensors = random_talker(config, GPU, seed)
    return config, tensors, MegakernelFrameDecoder(config, tensors, slots=2, max_positions=POSITIONS)


@torch.inference_mode()
def run(model, prompt_rows: int, frames: int, slot: int = 0):
    """Error of the kernel and of PyTorch bf16 against fp32 over some frames, and the argmax agreement of each."""
    config, tensors, kernel = model
    hidden_size = config.talker.stack.hidden_size
    exact, rounded = (Twin(config, tensors, dtype) for dtype in (torch.float32, torch.bfloat16))
    rows = (torch.randn(prompt_rows, hidden_size, device=GPU) * 0.5).to(torch.bfloat16)
    text = (torch.randn(frames + 1, hidden_size, device=GPU) * 0.5).to(torch.bfloat16)
    kernel.start(slot, Prompt(rows, text[:-1], text[-1]), GREEDY.over(config.sampling))
    errors = {"hidden": [], "code 0": [], "codes": []}
    hits = {"kernel": 0, "bf16": 0, "of": 0}
    inputs = [rows, rows]
    s = kernel._slots[slot]
    for frame in range(frames):
        hidden_out = torch.full((hidden_size,), torch.nan, device=GPU)
        logits_out = torch.full((16, 3072), torch.nan, device=GPU)
        kernel._launch(s, s.row, hidden_out=hidden_out, logits_out=logits_out)
        assert int(kernel._fault) == 0
        codes = kernel._codes.long()
        s.position += 1
        s.frame += 1
        hidden = [twin.rows(x) for twin, x in zip((exact, rounded), inputs, strict=True)]
        logits = [twin.frame(h, codes) for twin, h in zip((exact, rounded), hidden, strict=True)]
        ours = [logits_out[g, : len(logits[0][g])] for g in range(16)]
        errors["hidden"].append((relative(hidden_out, hidden[0][0]), relative(hidden[1][0].float(), hidden[0][0])))
        errors["code 0"].append((relative(ours[0], logits[0][0]), relative(logits[1][0], logits[0][0])))
        for g in range(1, 16):
            errors["codes"].append((relative(ours[g], logits[0][g]), relative(logits[1][g], logits[0][g])))
            assert int(ours[g].argmax()) == int(codes[g]), "the kernel drew what its logits say"
            hits["of"] += 1
            hits["kernel"] += int(logits[0][g].argmax()) == int(codes[g])
            hits["bf16"] += int(logits[0][g].argmax()) == int(logits[1][g].argmax())
        inputs = [t.embed.frames(codes[None]) + text[frame].to(t.dtype) for t in (exact, rounded)]
    return {n: torch.tensor(e).mean(0).tolist() for n, e in errors.items()}, hits


@pytest.mark.parametrize("prompt_rows, frames", [(1, 4), (9, 40), (64, 4), (255, 4), (300, 6), (1000, 4)])
def test_the_kernel_is_as_close_to_fp32_as_pytorch_bf16(model, prompt_rows, frames, capsys):
    errors, hits = run(model, prompt_rows, frames)
    with capsys.disabled():
        ratios = ", ".join(f"{n} {a:.2e}/{b:.2e}={a / b:.2f}" for n, (a, b) in errors.items())
        print(f"\n  H={model[0].talker.stack.hidden_size} prompt {prompt_rows}: {ratios}; argmax {hits}")
    for name, (ours, theirs) in errors.items():
        assert ours <= theirs, name


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),  # as published: temperature 0.9, top-k 50, penalty 1.05
        SamplingParams(temperature=1.3, top_k=0, subtalker_temperature=1.1, subtalker_top_k=0, repetition_penalty=1.0),
        SamplingParams(temperature=2.0, top_k=3, subtalker_temperature=1.5, subtalker_top_k=1),
        SamplingParams(top_p=0.8, subtalker_top_p=0.5),
        SamplingParams(top_k=0, top_p=0.9, subtalker_top_k=0, subtalker_top_p=0.95, subtalker_temperature=0.7),
        SamplingParams(do_sample=False),
    ],
    ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}",
)
@torch.inference_mode()
def test_draws_equal_the_python_sampler_on_the_same_logits(model, sampling):
    """Every code of 100 frames: sampling.py on the kernel's own logits, on the CPU."""
    config, _, kernel = model
    sampling = SamplingParams(seed=int(torch.randint(2**62, ()))).over(sampling).over(config.sampling)
    rows = torch.randn(9, config.talker.stack.hidden_size, device=GPU).to(torch.bfloat16)
    kernel.start(0, Prompt(rows, rows[:3], rows[3]), sampling)
    cpu = torch.device("cpu")
    rules = Code0Rules(config.talker, sampling.repetition_penalty, cpu)
    draw0, draw = Draw.code0(sampling), Draw.predictor(sampling)
    s = kernel._slots[0]
    for frame in range(100):
        logits_out = torch.zeros(16, 3072, device=GPU)
        kernel._launch(s, s.row, logits_out=logits_out)
        s.position, s.frame = s.position + 1, s.frame + 1
        codes, logits = kernel._codes.cpu().long(), logits_out.cpu()
        noise = gumbel_noise(sampling.seed, frame, range(1), 3072, cpu)[0]
        expected = [draw0(rules(logits[0].clone(), frame), noise)]
        noise = gumbel_noise(sampling.seed, frame, range(1, 16), 2048, cpu)
        expected += [draw(logits[g, :2048], noise[g - 1]) for g in range(1, 16)]
        assert codes.tolist() == [int(e) for e in expected], frame
        if codes[0] == config.talker.codec_eos_id:
            break
        rules.remember(codes[0])


@torch.inference_mode()
def test_a_slot_says_the_same_whatever_the_other_did(model):
    config, _, kernel = model
    rows = torch.randn(12, config.talker.stack.hidden_size, device=GPU).to(torch.bfloat16)
    sampling = GREEDY.over(config.sampling)

    def say(slot: int, n: int = 12):
        kernel.start(slot, Prompt(rows, rows[:3], rows[3]), sampling)
        return torch.stack([kernel.decode(slot) for _ in range(n)])

    first = say(0)
    kernel.start(1, Prompt(rows.flip(0), rows[:1], rows[0]), sampling)
    kernel.decode(1)
    assert torch.equal(say(0), first) and torch.equal(say(1), first)
    kernel._epoch = 2**32 - 150  # the epoch wraps within a frame
    assert torch.equal(say(0), first)


@torch.inference_mode()
def test_a_wait_that_gives_up_is_a_fault_and_can_be_recovered_from(model):
    from qwen_megakernel.errors import KernelFault

    config, _, kernel = model
    rows = torch.randn(3, config.talker.stack.hidden_size, device=GPU).to(torch.bfloat16)
    kernel.start(0, Prompt(rows, rows[:1], rows[0]), GREEDY.over(config.sampling))
    kernel._fault.fill_(1)  # as if another block had given up
    with pytest.raises(KernelFault):
        kernel.decode(0)
    kernel.recover()
    kernel.start(0, Prompt(rows, rows[:1], rows[0]), GREEDY.over(config.sampling))
    assert kernel.decode(0) is not None


def test_the_engine_speaks_through_it(tmp_path):
    from qwen_megakernel import TTSEngine
    from qwen_megakernel.synthetic import write_checkpoint

    folder = write_checkpoint(tmp_path, size="0.6b", codec="real", eos_gain=0.0)
    with TTSEngine.load(folder, backend="megakernel", max_streams=2, max_positions=128) as engine:
        said = [engine.generate("Hello there.", sampling=SamplingParams(seed=s), max_frames=20) for s in (1, 1, 2)]
        assert (said[0].codes == said[1].codes).all() and (said[0].codes != said[2].codes).any()
        assert len(said[0].samples) == 20 * 1920
    with TTSEngine.load(folder, max_streams=1, max_positions=64) as engine:
        assert engine.backend == "megakernel", "auto takes it where it can run"


def test_greedy_frames_equal_the_torch_backends_mostly(model, capsys):
    """Free-running, so the first near-tie ends the agreement: printed, and never none."""
    config, tensors, kernel = model
    embeddings = Embeddings(config.talker, {n: t.float() for n, t in tensors.items()})
    torch_decoder = TorchFrameDecoder(
        config, {n: t.float() for n, t in tensors.items()}, embeddings, slots=1, max_positions=64
    )
    rows = (torch.randn(9, config.talker.stack.hidden_size, device=GPU) * 0.5).to(torch.bfloat16)
    sampling = GREEDY.over(config.sampling)
    kernel.start(0, Prompt(rows, rows[:1], rows[0]), sampling)
    torch_decoder.start(0, Prompt(rows.float(), rows[:1].float(), rows[0].float()), sampling)
    equal = 0
    for _ in range(20):
        if not torch.equal(kernel.decode(0), torch_decoder.decode(0)):
            break
        equal += 1
    with capsys.disabled():
        print(f"\n  {equal} of 20 free-running greedy frames equal the fp32 twin's")
