"""FP8 weights: how they are rounded, stored, refused and laid out for the kernel; on a GPU, what the kernel says.

A scale is a power of two, so that everything here can be asked for to the bit.
"""

import json
import math
import os
import random
import re
import shutil

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from qwen_megakernel import BackendError, CheckpointError, SamplingParams, TTSEngine, cli
from qwen_megakernel.backend.pack import block_rows, pack, row_parts
from qwen_megakernel.backend.sizes import MLP_PACKET, PACKET
from qwen_megakernel.backend.targets import BLOCKS
from qwen_megakernel.checkpoint import derive
from qwen_megakernel.checkpoint.fp8 import LARGEST, SCALE, dequantize, dequantized, name_of, part_of, quantize
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.checkpoint.synthetic import random_talker, synthetic_config
from qwen_megakernel.choices import PARTS, WEIGHTS, parts_of

CPU = torch.device("cpu")
FILE = "model.safetensors"
Q_PROJ = "talker.model.layers.0.self_attn.q_proj.weight"


def matrix(rows, k, spread=1.0):
    return (torch.randn(rows, k) * spread * torch.exp(torch.randn(rows, 1) * 3)).to(torch.bfloat16)


# ---------------------------------------------------------------- rounding


def test_every_weight_is_rounded_to_the_nearest_value_of_its_row():
    w = matrix(40, 300)
    w[3] = 0
    w[4] = 0
    w[4, 7] = -(2.0**-105)  # so little that its scale is the least one
    w[5, 0] = LARGEST  # needs no scale
    w[5, 1:] = torch.randn(299).clamp(-3, 3).to(torch.bfloat16)
    q, scale = quantize(w)
    assert q.dtype == torch.float8_e4m3fn and q.shape == w.shape and scale.dtype == torch.float32
    assert scale.shape == (40,) and scale[3] == 1 and scale[5] == 1
    assert all(math.frexp(s)[0] == 0.5 for s in scale.tolist()), "a power of two"
    assert scale[4] == 2.0**-100
    top = (w.float().abs().amax(1) / scale)[[i for i in range(40) if i not in (3, 4)]]
    assert top.max() <= LARGEST and top.min() > LARGEST / 2, "the smallest scale that holds the row"
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[grid.isfinite()]
    nearest = (w.float()[:, :, None] / scale[:, None, None] - grid).abs().amin(-1)
    assert torch.equal((w.float() / scale[:, None] - q.float()).abs(), nearest)
    exact = dequantize(q, scale, torch.float32)
    assert torch.equal(dequantize(q, scale, torch.bfloat16).float(), exact), "exact in bf16"
    again, same = quantize(exact)
    assert torch.equal(dequantize(again, same, torch.float32), exact), "what is on the grid stays"
    error = ((exact - w.float()).norm() / w.float().norm()).item()
    assert 0.015 < error < 0.04


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, 2.0**127.5])
def test_what_is_no_weight_is_not_quantised(wrong, bf16, tmp_path, capsys):
    """At load and by the command, which leaves nothing behind."""
    rewritten(bf16, lambda t: t[Q_PROJ][3, 5:6].fill_(wrong))
    with pytest.raises(CheckpointError, match=Q_PROJ):
        Checkpoint.open(bf16).talker(CPU, torch.float32, WEIGHTS["fp8"])
    before = sorted(tmp_path.iterdir())
    assert cli.main(["quantize", str(bf16), str(tmp_path / "out")]) == 1
    assert "not finite" in capsys.readouterr().err and sorted(tmp_path.iterdir()) == before


def test_parts_and_their_names():
    assert parts_of("fp8") == set(PARTS) and parts_of("bf16") == set() == parts_of([])
    assert parts_of(["talker", "lm_heads"]) == {"talker", "lm_heads"}
    assert [name_of(parts_of(name)) for name in WEIGHTS] == list(WEIGHTS)
    assert name_of(parts_of(["talker", "lm_heads"])) == ("lm_heads", "talker")
    for wrong in ("fp4", "FP8", "talker", ["vocoder"], [3], 3, True, torch.float8_e4m3fn, [["talker"]], object()):
        with pytest.raises(BackendError, match="fp8-predictor.*talker"):
            parts_of(wrong)
    tensors = random_talker(synthetic_config("tiny"), CPU, 1)
    found = {part: [name for name in tensors if part_of(name) == part] for part in PARTS}
    assert all(found.values())
    left = [name for name in tensors if part_of(name) is None]
    kinds = ("norm", "embedding", "text_projection", "small_to_mtp")
    assert all(any(kind in name for kind in kinds) for name in left), left


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_rounds_as_a_cpu_does():
    w = torch.cat([matrix(3000, 512), torch.ldexp(torch.randn(200, 512), torch.arange(-140, 60)[:, None]).bfloat16()])
    for a, b in zip(quantize(w), quantize(w.cuda()), strict=True):
        assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))


# ---------------------------------------------------------------- the kernel's ribbon


def widened(words: torch.Tensor) -> torch.Tensor:
    """widen_e4m3 of csrc/frame/fp8.cuh on the host: int64 words of four bytes -> [.., 2 registers, 2 halves] of bf16
    bits."""
    signs, rest = 0x80008000, 0x07F007F0
    registers = torch.stack([(words & signs) | (words >> 4 & rest), (words << 8 & signs) | (words << 4 & rest)], dim=-1)
    halves = torch.stack([registers & 0xFFFF, registers >> 16 & 0xFFFF], dim=-1)
    as_bf16 = halves.to(torch.uint16).view(torch.bfloat16)
    return (as_bf16.float() * 2.0**120).to(torch.bfloat16).view(torch.uint16)


@pytest.mark.parametrize(
    ("rows", "k", "packet", "of_block"),
    [
        (4096, 1024, PACKET, None),  # two tiles of 16 rows
        (1024, 2048, PACKET, None),  # 8 rows, an even number of steps
        (1024, 3072, MLP_PACKET, None),  # 6 pairs of steps, filled up to 8 units
        (6144, 256, PACKET, 48),  # one step
        (3072, 1024, PACKET, None),  # 24 rows: three tiles of 8
        (1000, 768, MLP_PACKET, None),  # rows that are nobody's, an odd number of steps
    ],
)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_ribbon_holds_what_a_bf16_ribbon_holds(rows, k, packet, of_block, blocks):
    q, _ = quantize(matrix(rows, k))
    of_block = of_block * 128 // blocks if of_block else block_rows(rows, blocks)
    parts = blocks * row_parts(of_block, k, blocks)  # each is filled up
    plain = pack(q.to(torch.bfloat16), blocks, packet, of_block).reshape(parts, -1).view(torch.uint16)
    packed = pack(q, blocks, packet, of_block).reshape(parts, -1)
    assert packed.shape[1] % (4 * 512 * 8) == 0
    # a lane's 16 bytes: two units of two words
    words = packed.view(torch.uint32).to(torch.int64).reshape(parts, -1, 512, 2, 2)
    units = widened(words).transpose(2, 3).reshape(parts, -1)
    assert torch.equal(units[:, : plain.shape[1]], plain)
    assert not units[:, plain.shape[1] :].to(torch.int32).any()
    assert packed.shape[1] <= plain.shape[1] / 2 * 2 * 4 / 3 + 4 * 512 * 8


def test_every_value_is_widened_exactly():
    values = torch.arange(256, dtype=torch.uint8)
    values = values[(values & 0x7F) != 0x7F]
    values = torch.cat([values, values[:2]]).reshape(-1, 4).to(torch.int64)
    words = values[:, 1] << 8 | values[:, 3] << 24 | values[:, 0] | values[:, 2] << 16
    expected = values[:, [1, 3, 0, 2]].to(torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    assert torch.equal(widened(words).reshape(-1, 4), expected.view(torch.uint16))


# ---------------------------------------------------------------- checkpoints


@pytest.fixture
def bf16(tiny, tmp_path):
    """A checkpoint that may be changed, stored in bf16 as the published ones."""
    folder = tmp_path / "bf16"
    shutil.copytree(tiny("custom_voice", size="tiny", eos_gain=2.0), folder)
    tensors = {n: t.to(torch.bfloat16) for n, t in load_file(folder / FILE).items()}
    save_file(tensors, folder / FILE)
    return folder


@pytest.fixture
def fp8(bf16, tmp_path):
    assert cli.main(["quantize", str(bf16), str(tmp_path / "fp8")]) == 0
    return tmp_path / "fp8"


def spoken(folder, **options):
    with TTSEngine.load(folder, device="cpu", max_streams=1, max_positions=256, **options) as engine:
        said = engine.generate("Hello there.", max_frames=12, sampling=SamplingParams(seed=3), speaker="")
        return engine.weights, said.codes.tolist()


@pytest.mark.parametrize("weights", ["fp8", "fp8-predictor"])
def test_quantised_once_or_at_load_it_says_the_same(bf16, tmp_path, weights):
    out = tmp_path / weights
    assert cli.main(["quantize", str(bf16), str(out), "--weights", weights]) == 0
    assert Checkpoint.open(out).fp8 == WEIGHTS[weights] and Checkpoint.open(bf16).fp8 == set()
    assert Checkpoint.open(out).fingerprint == Checkpoint.open(bf16).fingerprint, "saved voices fit both"
    name, stored = spoken(out)
    assert name == weights
    assert stored == spoken(bf16, weights=weights)[1]
    assert stored != spoken(bf16)[1], "it is not the same model"
    # asked for in bf16, it is what the kernel multiplies with
    plain = dequantized(Checkpoint.open(out).talker(CPU, torch.bfloat16, WEIGHTS[weights]), torch.bfloat16)
    widened_again = Checkpoint.open(out).talker(CPU, torch.bfloat16)
    assert plain.keys() == widened_again.keys() and all(torch.equal(plain[n], widened_again[n]) for n in plain)
    name, widened_codes = spoken(out, weights="bf16")
    assert name == "bf16" and widened_codes == stored


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640)])
def test_every_file_of_a_quantised_checkpoint_obeys_the_umask(bf16, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        assert cli.main(["quantize", str(bf16), str(tmp_path / "out")]) == 0
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert tmp_path / "out" / FILE in files
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}


def test_sizes_that_are_told_differ_where_files_do(tmp_path, capsys):
    assert cli.main(["quantize", "demo", str(tmp_path / "out")]) == 0
    told = re.search(r"model.safetensors  ([\d.]+) MB -> ([\d.]+) MB", capsys.readouterr().out)
    assert float(told[2]) == pytest.approx((tmp_path / "out" / FILE).stat().st_size / 1e6, abs=0.05)
    assert float(told[1]) > float(told[2])


def test_what_is_not_quantised_stays_to_the_bit(bf16, fp8):
    before, after = load_file(bf16 / FILE), load_file(fp8 / FILE)
    changed = {name for name in before if part_of(name)}
    assert set(after) == set(before) | {name + SCALE for name in changed}
    assert all(torch.equal(after[name], before[name]) for name in set(before) - changed)
    assert all(after[name].dtype == torch.float8_e4m3fn for name in changed)
    with safe_open(bf16 / FILE, "pt") as a, safe_open(fp8 / FILE, "pt") as b:
        assert a.metadata() == b.metadata()
    for path in bf16.rglob("*"):
        if path.is_file() and path != bf16 / FILE:
            assert (fp8 / path.relative_to(bf16)).read_bytes() == path.read_bytes(), path.name


def test_only_what_belongs_to_a_checkpoint_is_copied(bf16, tmp_path):
    """Not what lies beside it or leads out of it; through links, as the hub's cache has them."""
    (tmp_path / "secret").write_text("secret")
    (bf16 / "notes.txt").symlink_to(tmp_path / "secret")
    (bf16 / "pytorch_model.bin").write_bytes(b"pickle")
    (bf16 / ".git").mkdir()
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    bf16.rename(blobs)
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert cli.main(["quantize", str(snapshot), str(tmp_path / "out")]) == 0
    extra = {"notes.txt", "pytorch_model.bin", ".git"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in blobs.iterdir()} - extra
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_symlink()]


def test_shards_keep_their_index(bf16, tmp_path):
    tensors = load_file(bf16 / FILE)
    (bf16 / FILE).unlink()
    halves = [sorted(tensors)[::2], sorted(tensors)[1::2]]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, half in zip(names, halves, strict=True):
        save_file({n: tensors[n] for n in half}, bf16 / name)
    where = {n: name for name, half in zip(names, halves, strict=True) for n in half}
    (bf16 / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    save_file({n: torch.zeros_like(t) for n, t in tensors.items()}, bf16 / "old.safetensors")  # nobody names it
    assert cli.main(["quantize", str(bf16), str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "old.safetensors").exists()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"][Q_PROJ + SCALE] == index["weight_map"][Q_PROJ] == where[Q_PROJ]
    assert spoken(tmp_path / "out")[1] == spoken(bf16, weights="fp8")[1]


def rewritten(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.pop(Q_PROJ + SCALE), "missing"),
        (lambda t: t.update({Q_PROJ + SCALE: t[Q_PROJ + SCALE][:-1].clone()}), "shape"),
        (lambda t: t.update({Q_PROJ + SCALE: t[Q_PROJ + SCALE][:, None].clone()}), "shape"),
        (lambda t: t.update({Q_PROJ + SCALE: t[Q_PROJ + SCALE].bfloat16()}), "F32"),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.bfloat16), Q_PROJ + SCALE: t.pop(Q_PROJ + SCALE)}), "all of"),
        (lambda t: (t.update({Q_PROJ: t[Q_PROJ].to(torch.bfloat16)}), t.pop(Q_PROJ + SCALE)), "all of a part"),
        (lambda t: t["talker.codec_head.weight" + SCALE][:1].fill_(math.nan), "finite"),
        (lambda t: t["talker.codec_head.weight" + SCALE][:1].fill_(math.inf), "finite"),
        (lambda t: t["talker.codec_head.weight" + SCALE][:1].fill_(0.0), "above 0"),
        (lambda t: t["talker.codec_head.weight" + SCALE][:1].fill_(-1.0), "above 0"),
        (lambda t: t["talker.codec_head.weight" + SCALE][:1].fill_(1e38), "too large"),
        (lambda t: t[Q_PROJ].view(torch.uint8)[3, 5:6].fill_(0xFF), "not a number"),
        (lambda t: t.update({"talker.model.norm.weight": t["talker.model.norm.weight"].to(torch.float8_e4m3fn)}), "F8"),
        (lambda t: t.update({"talker.model.norm.weight" + SCALE: torch.ones(1)}), "its weight is not F8_E4M3"),
    ],
)  # fmt: skip
def test_a_quantised_checkpoint_that_does_not_hold_together_is_refused(fp8, change, word):
    rewritten(fp8, change)
    with pytest.raises(CheckpointError, match=word):
        Checkpoint.open(fp8).talker(CPU, torch.float32, frozenset(random.sample(PARTS, 2)))


def test_other_scales_than_ours_are_taken_as_they_are(fp8):
    rewritten(fp8, lambda t: t[Q_PROJ + SCALE].mul_(0.7))
    tensors = Checkpoint.open(fp8).talker(CPU, torch.float32)
    stored = load_file(fp8 / FILE)
    assert torch.equal(tensors[Q_PROJ], stored[Q_PROJ].float() * stored[Q_PROJ + SCALE][:, None])


def test_quantize_overwrites_nothing(bf16, fp8, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for source, out, word in (
        (bf16, "fp8", "exists already"),
        (bf16, "bf16", "exists already"),
        (bf16, "file", "exists already"),
        (bf16, "dangling", "exists already"),
        (bf16, ".", "exists already"),
        (bf16, "..", "exists already"),
        (bf16, "file/out", "cannot be written"),
        (bf16, "no/such/out", "cannot be written"),
        (bf16, "n" * 300, "cannot be written"),
        (fp8, "again", "already"),
    ):
        assert cli.main(["quantize", str(source), out]) == 1
        assert word in capsys.readouterr().err, out
    assert cli.main(["quantize", str(bf16), "out", "--weights", "bf16"]) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_nothing(bf16, tmp_path, monkeypatch, capsys):
    def full(*_args) -> None:
        raise SafetensorError("no space left")

    monkeypatch.setattr(derive, "save_file", full)
    before = sorted(tmp_path.iterdir())
    assert cli.main(["quantize", str(bf16), str(tmp_path / "out")]) == 1
    assert "no space left" in capsys.readouterr().err and sorted(tmp_path.iterdir()) == before


def test_single_parts_by_the_command(bf16, tmp_path, capsys):
    assert cli.main(["quantize", str(bf16), str(tmp_path / "out"), "--weights", "talker,lm_heads"]) == 0
    assert Checkpoint.open(tmp_path / "out").fp8 == {"talker", "lm_heads"}
    assert spoken(tmp_path / "out")[0] == ("lm_heads", "talker")
    with pytest.raises(SystemExit):
        cli.main(["quantize", str(bf16), str(tmp_path / "other"), "--weights", "talkr"])
    assert "expected bf16, fp8" in capsys.readouterr().err


def test_wrong_weights_are_refused_before_a_checkpoint_is_looked_for():
    for wrong in ("int8", 3):
        with pytest.raises(BackendError, match="weights"):
            TTSEngine.load("no/such-model", weights=wrong)
