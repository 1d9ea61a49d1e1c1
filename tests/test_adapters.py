"""Tuned checkpoints: LoRA adapters, merged as PEFT merges them or refused by name; and what the reference's fine-tuning
script leaves, a Base turned into a speaker of its own."""

import json
import math
import re
import shutil
from pathlib import Path

import cases as shared
import numpy as np
import pytest
import torch
from lora import Q, edit_config, skeleton, write_adapter
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_megakernel import CheckpointError, TTSEngine
from qwen_megakernel.checkpoint import adapters as module_under_test
from qwen_megakernel.checkpoint.derive import quantize_checkpoint
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.checkpoint.tensors import talker_tensors
from qwen_megakernel.choices import WEIGHTS
from qwen_megakernel.cli import main
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.sampling_params import GREEDY
from qwen_megakernel.speech.shared import acquire, release

CPU = torch.device("cpu")
HALF_A_STEP = 2.0**-8
"""Of bf16: the largest relative error of rounding once."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
HEADS = r".*(codec_head|lm_head\.\d+|text_projection\.linear_fc[12]|small_to_mtp_projection)"


# ---------------------------------------------------------------- PEFT's side


def trained(folder: Path, out: Path, wrap: str = "talker", strength: float = 0.05, **config) -> dict[str, Tensor]:
    """Save a PEFT adapter of a checkpoint, "trained" by filling B, and return what PEFT's own merge makes of every
    tensor, in fp32. `wrap`: the module that is wrapped; "" is the whole model."""
    whole = skeleton(folder)
    wrapped = get_peft_model(whole.get_submodule(wrap), LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, strength)
    wrapped.save_pretrained(out)
    prefix = f"{wrap}." if wrap else ""
    merged = PeftModel.from_pretrained(skeleton(folder).get_submodule(wrap), out).merge_and_unload()
    tensors = {name: parameter.detach() for name, parameter in skeleton(folder).named_parameters()}
    return tensors | {prefix + name: parameter.detach() for name, parameter in merged.named_parameters()}


def assert_merged(ours: dict[str, Tensor], theirs: dict[str, Tensor], base: dict[str, Tensor]) -> set[str]:
    """Ours are PEFT's, rounded once to bf16. Returns the names that the adapters changed."""
    assert ours.keys() == theirs.keys()
    changed = {name for name in ours if not torch.equal(theirs[name], base[name])}
    for name in ours:
        if name not in changed:
            assert torch.equal(ours[name], base[name]), name
            continue
        assert torch.equal(ours[name], ours[name].bfloat16().float()), f"{name} is not of the checkpoint's dtype"
        error = (ours[name] - theirs[name]).abs()
        assert bool((error <= HALF_A_STEP * 1.001 * theirs[name].abs() + 1e-6).all()), (name, float(error.max()))
        assert (ours[name] - base[name]).abs().max() > 10 * error.max(), f"{name}: too weak an adapter to tell"
    return changed


@pytest.mark.parametrize("size", ["tiny", "tiny-adapter"])
@pytest.mark.parametrize("rank", [2, 8])
@pytest.mark.parametrize(
    "targets, wrap, options, layers",
    [
        (ATTENTION, "talker", {"task_type": "FEATURE_EXTRACTION"}, {"tiny": 20, "tiny-adapter": 20}),
        (MLP, "talker.model", {"use_rslora": True}, {"tiny": 9, "tiny-adapter": 9}),
        (HEADS, "", {"rank_pattern": {"codec_head": 3}, "alpha_pattern": {r".*linear_fc\d": 5}}, {"tiny": 18}),
    ],
    ids=["attention", "mlp", "heads"],
)
def test_a_merge_equals_pefts(tiny, tmp_path, size, rank, targets, wrap, options, layers):
    folder = tiny("custom_voice", size=size)
    theirs = trained(folder, tmp_path, wrap, target_modules=targets, r=rank, lora_alpha=16, **options)
    base = Checkpoint.open(folder).talker(CPU, torch.float32)
    changed = assert_merged(Checkpoint.open(folder, [tmp_path]).talker(CPU, torch.float32), theirs, base)
    assert len(changed) == layers.get(size, 19)  # 1.7B has one layer more, between its stacks


def test_several_adapters_are_added_and_rounded_once(tiny, tmp_path):
    folder, names = tiny("custom_voice"), ("one", "two", "three")
    base = Checkpoint.open(folder).talker(CPU, torch.float32)
    theirs = [
        trained(folder, tmp_path / name, target_modules=["q_proj", "codec_head"], r=4, strength=0.02) for name in names
    ]
    added = {name: base[name] + sum(one[name] - base[name] for one in theirs) for name in base}
    ours = Checkpoint.open(folder, [tmp_path / name for name in names]).talker(CPU, torch.float32)
    assert len(assert_merged(ours, added, base)) == 6


def test_an_adapter_of_one_stack_alone_says_which(tiny, tmp_path):
    """Names of a wrapped code predictor, `model.layers.0...`, are those of a wrapped talker too."""
    folder = tiny("custom_voice")
    for wrap in ("talker.code_predictor", "talker.code_predictor.model"):
        out = tmp_path / wrap
        theirs = trained(folder, out, wrap, target_modules=["gate_proj"], r=4)  # whose shapes differ in the talker
        base = Checkpoint.open(folder).talker(CPU, torch.float32)
        ours = Checkpoint.open(folder, [out]).talker(CPU, torch.float32)
        assert assert_merged(ours, theirs, base) == {
            f"talker.code_predictor.model.layers.{layer}.mlp.gate_proj.weight" for layer in range(2)
        }


def test_names_that_fit_two_places_are_refused_until_the_class_is_named(tiny, tmp_path):
    folder = tiny("custom_voice")
    trained(folder, tmp_path, "talker.code_predictor", target_modules=["q_proj"], r=4)
    refused(folder, [tmp_path], "may mean talker.model.* or talker.code_predictor.model.*base_model_class")
    name = "Qwen3TTSTalkerCodePredictorModelForConditionalGeneration"
    edit_config(tmp_path, auto_mapping={"base_model_class": name, "parent_library": "x"})
    (adapter,) = Checkpoint.open(folder, [tmp_path]).adapters
    assert set(adapter.scales) == {
        f"talker.code_predictor.model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)
    }


# ---------------------------------------------------------------- our side


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), path)


def refused(folder: Path, adapters, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder, adapters)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', found 'IA3'"),
        ({"use_dora": True}, "use_dora must be off, found 'True'; merge it where it was trained"),
        ({"bias": "all"}, "bias must be 'none', found 'all'"),
        ({"modules_to_save": ["codec_embedding"]}, "modules_to_save must be off, found .*codec_embedding"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out must be off"),
        ({"lora_bias": True}, "lora_bias must be off"),
        ({"layer_replication": [[0, 2]]}, "layer_replication must be off"),
        ({"of_next_year": 0.5}, "of_next_year must be off, found '0.5'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' has changed .*path_initial_model"),
        ({"r": 0}, "r must be in 1..1024, found 0"),
        ({"r": 10**9}, "r must be in 1..1024"),
        ({"r": 8}, "rank 8 by r and rank_pattern, but 4 by its tensors"),
        ({"rank_pattern": {"q_proj": 2}}, "rank 2 by r and rank_pattern, but 4 by its tensors"),
        ({"lora_alpha": "8"}, "lora_alpha must be float, found '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be finite"),
        ({"use_rslora": "yes"}, "use_rslora must be bool"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern: q_proj must be float"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern: the pattern .* is not simple enough"),
        ({"alpha_pattern": {".*.*.*q_proj": 1}}, "is not simple enough"),
        ({"alpha_pattern": {"(q_proj": 1}}, "'.q_proj' is not a regular expression"),
        ({"alpha_pattern": dict.fromkeys(map(str, range(2000)), 1)}, "at most 1024 keys, found 2000"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_followed_is_refused_by_its_key(tiny, tmp_path, config, message):
    folder = write_adapter(tmp_path)
    edit_config(folder, **config)
    refused(tiny("custom_voice"), [folder], rf"adapter_config\.json.*{message}")


A = f"base_model.model.{Q}.lora_A.weight"
B = f"base_model.model.{Q}.lora_B.weight"


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        (A, torch.full((4, 64), torch.nan), f"tensor '{A}' is not finite"),
        (B, torch.full((128, 4), torch.inf), f"tensor '{B}' is not finite"),
        (B, torch.full((128, 4), 1e38), f"tensor '{Q}.weight' with .* merged is not finite"),
        (B, None, f"tensor '{B}' is missing"),
        (A, None, f"tensor '{A}' is missing"),
        (A, torch.zeros(4, 65), rf"'{Q}' is for a layer \[128, 65\], but {Q} is \[128, 64\]"),
        (B, torch.zeros(96, 4), rf"'{Q}' is for a layer \[96, 64\]"),
        (A, torch.zeros(3, 64), "must share a rank of 1 to 1024"),
        (A, torch.zeros(4, 64, 1), "expected 2 dims"),
        (A, torch.zeros(4, 64, dtype=torch.int32), "expected 2 dims of BF16 or F16 or F32, found .* of I32"),
        (
            "base_model.model.x.lora_magnitude_vector",
            torch.zeros(4),
            "x.lora_magnitude_vector' is not a linear layer's",
        ),
        (f"{Q}.lora_A.weight", torch.zeros(4, 64), "is not a linear layer's in LoRA"),
        (f"base_model.model.{Q}.lora_A.default.weight", torch.zeros(4, 64), "is not a linear layer's in LoRA"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(tiny, tmp_path, name, tensor, message):
    change(write_adapter(tmp_path), name, tensor)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tiny("custom_voice"), [tmp_path]).talker(CPU, torch.float32)


@pytest.mark.parametrize(
    "layer, message",
    [
        (("talker.model.layers.9.self_attn.q_proj", 128, 64), r"'talker.model.layers.9.self_attn.q_proj' is no"),
        (("talker.model.codec_embedding", 1280, 64), "'talker.model.codec_embedding' is not a linear layer"),
        (("talker.model.norm", 64, 1), "'talker.model.norm' is not a linear layer"),
        (("speaker_encoder.fc", 64, 96), "'speaker_encoder.fc' is not a linear layer"),
        (("model.talker.codec_head", 1280, 64), "'model.talker.codec_head' is not a linear layer"),
        (("..", 64, 64), "'..' is not a linear layer"),
    ],
)
def test_a_module_that_does_not_exist_is_refused_by_name(tiny, tmp_path, layer, message):
    refused(tiny("custom_voice"), [write_adapter(tmp_path, [(Q, 128, 64), layer])], message)


def test_files_that_are_missing_broken_or_too_large_are_refused(tiny, tmp_path, monkeypatch):
    folder, file = tiny("custom_voice"), tmp_path / "adapter_model.safetensors"
    refused(folder, [tmp_path / "nowhere"], "nowhere: no adapter_config.json; an adapter is a folder")
    write_adapter(tmp_path / "saved-inside")
    refused(folder, [tmp_path], "there is one in 'saved-inside' inside it")
    write_adapter(tmp_path)
    refused(folder, [file], "is a file; an adapter is the folder")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    refused(folder, [tmp_path], "cut off or padded")
    file.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr(module_under_test, "MOST_HEADER_BYTES", -(10**9))
        refused(folder, [tmp_path], "an adapter of this model has at most")
    file.rename(tmp_path / "adapter_model.bin")
    refused(folder, [tmp_path], r"adapter_model\.safetensors is missing; adapter_model\.bin is a pickle")
    save_file({}, file)
    refused(folder, [tmp_path], "it has no tensors")
    edit_config(tmp_path, padding="x" * 2**20)
    refused(folder, [tmp_path], r"adapter_config\.json: .* at most 1048576 bytes")
    (tmp_path / "adapter_config.json").write_text("{")
    refused(folder, [tmp_path], r"adapter_config\.json: not valid JSON")


@pytest.mark.parametrize("adapters", ["my-adapter", [""], [3], {"a": 1}, None, 7, ["a\0b"]])
def test_adapters_are_a_list_of_folders(tiny, adapters):
    refused(tiny("custom_voice"), adapters, "adapters")


def test_a_rank_stabilised_alpha_is_divided_by_the_root(tiny, tmp_path):
    plain, stable = (write_adapter(tmp_path / str(on), use_rslora=on) for on in (False, True))
    scales = [Checkpoint.open(tiny("custom_voice"), [one]).adapters[0].scales for one in (plain, stable)]
    assert scales == [{f"{Q}.weight": 8 / 4}, {f"{Q}.weight": 8 / math.sqrt(4)}]


def with_weights(folder: Path, out: Path, tensors: dict[str, Tensor]) -> Path:
    """A copy of a checkpoint with other weights."""
    shutil.copytree(folder, out)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    return out


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_what_is_quantised_is_the_merged_weight_as_stored(tiny, tmp_path, stored):
    """Whatever the engine's dtype is: a merged checkpoint on disk would be quantised to the same."""
    base = Checkpoint.open(tiny("custom_voice")).talker(CPU, torch.float32)
    noisy = {name: (tensor * (1 + 1e-3 * torch.randn_like(tensor))).to(stored) for name, tensor in base.items()}
    folder = with_weights(tiny("custom_voice"), tmp_path / "base", noisy)
    adapted = Checkpoint.open(folder, [write_adapter(tmp_path / "adapter", strength=0.2)])
    on_disk = with_weights(folder, tmp_path / "merged", adapted.talker(CPU, stored))
    expected, ours = (one.talker(CPU, torch.bfloat16, WEIGHTS["fp8"]) for one in (Checkpoint.open(on_disk), adapted))
    assert expected.keys() == ours.keys()
    assert all(torch.equal(ours[name].float(), expected[name].float()) for name in expected)


def test_a_weight_that_is_stored_as_fp8_takes_no_adapter(tiny, tmp_path):
    folder, adapter = tiny("custom_voice"), write_adapter(tmp_path / "adapter")
    quantize_checkpoint(folder, tmp_path / "fp8", WEIGHTS["fp8"])
    refused(tmp_path / "fp8", [adapter], rf"'{re.escape(Q)}\.weight' is FP8 .* and weights='fp8'")
    quantize_checkpoint(folder, tmp_path / "heads", frozenset({"codec_head"}))  # not what the adapter changes
    assert Checkpoint.open(tmp_path / "heads", [adapter]).adapters[0].scales


# ---------------------------------------------------------------- engines


def codes(folder: Path, **options) -> np.ndarray:
    with TTSEngine.load(folder, backend="torch", device="cpu", max_streams=1, **options) as engine:
        voice = engine.placeholder_voice()
        return engine.generate("Hello there.", voice=voice, sampling=GREEDY, max_frames=8).codes


def test_an_engine_speaks_with_the_merged_weights(tiny, tmp_path):
    folder = tiny("custom_voice", eos_gain=0.0)
    shapes = talker_tensors(Checkpoint.open(folder).config.talker)
    everywhere = [(name.removesuffix(".weight"), *shape) for name, shape in shapes.items() if "_proj.weight" in name]
    adapter = write_adapter(tmp_path, everywhere, strength=0.1)
    said, plain = codes(folder, adapters=[adapter]), codes(folder)
    assert np.array_equal(said, codes(folder, adapters=[str(adapter)])) and not np.array_equal(said, plain)
    nothing = write_adapter(tmp_path / "untrained", strength=0.0)
    assert np.array_equal(codes(folder, adapters=[nothing]), plain)


def test_a_voice_of_the_base_fits_it_with_an_adapter(tiny, tmp_path):
    folder, adapter = tiny("base"), write_adapter(tmp_path, strength=0.2)
    with_it, without = Checkpoint.open(folder, [adapter]), Checkpoint.open(folder)
    assert with_it.fingerprint == without.fingerprint
    voice = Voice.nobody(64, without.fingerprint)
    with TTSEngine.load(folder, backend="torch", device="cpu", max_streams=1, adapters=[adapter]) as engine:
        assert engine.generate("Hello there.", voice=voice, max_frames=3).samples.size


def test_a_broken_adapter_leaves_nothing_loaded(tiny, tmp_path, monkeypatch):
    """Of two the second is broken: no weight of the checkpoint is read."""
    whole, broken = write_adapter(tmp_path / "whole"), write_adapter(tmp_path / "broken")
    change(broken, A, torch.full((4, 64), torch.nan))
    monkeypatch.setattr(Checkpoint, "talker", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match="broken"):
        TTSEngine.load(tiny("custom_voice"), device="cpu", adapters=[whole, broken])


def test_the_command_line_takes_adapters(tiny, tmp_path, capsys):
    folder, adapter, out = tiny("custom_voice"), write_adapter(tmp_path / "adapter"), tmp_path / "out.wav"
    speak = f"speak --model {folder} --device cpu --text Hello. --output {out} --seed 7".split()
    assert main([*speak, "--adapter", str(adapter), "--adapter", str(adapter)]) == 0 and out.stat().st_size > 44
    assert main([*speak, "--adapter", str(adapter), "--adapter", str(tmp_path)]) == 1
    assert "error: " in (told := capsys.readouterr().err) and "no adapter_config.json" in told
    for server in ("serve", "wyoming"):  # before it listens
        assert main([server, "--model", str(folder), "--device", "cpu", "--adapter", str(tmp_path)]) == 1
        assert "no adapter_config.json" in capsys.readouterr().err


async def test_a_shared_engine_is_known_by_its_adapters(tiny, tmp_path, monkeypatch):
    write_adapter(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    options = {"device": "cpu", "backend": "torch", "max_streams": 1, "max_positions": 256}
    which = [["one"], (tmp_path / "one",), ["one", "one"], []]
    engines = [await acquire(str(tiny("custom_voice")), adapters=adapters, **options) for adapters in which]
    for engine in engines:
        await release(engine)
    assert [engine is engines[0] for engine in engines] == [True, True, False, False]


# ---------------------------------------------------------------- a fine-tuned Base


NAME = "Ada Lovelace"
SIZES = ["tiny", "tiny-adapter"]


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """made(size, trained) -> a Base in shards, the fine-tune of it, and the speaker's vector. `trained`: how far its
    weights went."""

    def make(size: str, trained: float = 0.0) -> tuple[Path, Path, torch.Tensor]:
        base, folder = tiny("base", size=size, shards=2, eos_gain=0.0), tmp_path_factory.mktemp("fine-tune")
        state = {name: t for path in base.glob("model-*.safetensors") for name, t in load_file(path).items()}
        hidden = state["talker.model.norm.weight"].shape[0]
        state["talker.codec_head.weight"] = (1 + trained) * state["talker.codec_head.weight"]
        vector = torch.randn(hidden).bfloat16()
        return base, shared.fine_tune(base, folder, NAME, vector, state), vector.float()

    return make


def engine_of(folder: Path) -> TTSEngine:
    return TTSEngine.load(folder, backend="torch", device="cpu", max_streams=1)


@pytest.mark.parametrize("size", SIZES)
def test_it_speaks_as_its_base_does_with_the_same_vector(made, size):
    """Before any training: the row of the table is the vector, in the same place of the prompt."""
    base, folder, vector = made(size)
    how = {"language": "english", "non_streaming_mode": True}
    request = how | {"sampling": GREEDY, "max_frames": 12}
    with engine_of(base) as engine:
        voice = Voice(vector, None, None, Checkpoint.open(base).fingerprint)
        expected = engine.prompt("Hello there.", voice=voice, **how)
        codes = engine.generate("Hello there.", voice=voice, **request).codes
    with engine_of(folder) as engine:
        assert (engine.variant, engine.speakers) == ("custom_voice", ("ada lovelace",))
        for speaker in (NAME, "ada lovelace", None):
            assert torch.equal(engine.prompt("Hello there.", speaker=speaker, **how).rows, expected.rows)
            assert np.array_equal(engine.generate("Hello there.", speaker=speaker, **request).codes, codes)
        without = engine.prompt("Hello there.", speaker="", **how)
        assert len(without.rows) == len(expected.rows) - 1, "the speaker has a row of its own"


@pytest.mark.parametrize("size", SIZES)
def test_the_trained_file_wins_over_shards_that_the_copy_brought(made, size, tmp_path):
    base, folder, _ = made(size, trained=0.5)
    assert (folder / "model.safetensors.index.json").exists() and len(list(folder.glob("model-*.safetensors"))) == 2
    checkpoint = Checkpoint.open(folder)
    assert [path.name for path in checkpoint.files[0]] == ["model.safetensors"]
    head = "talker.codec_head.weight"
    trained, untrained = (one.talker(CPU, torch.float32)[head] for one in (checkpoint, Checkpoint.open(base)))
    assert torch.allclose(trained, 1.5 * untrained, rtol=2**-7)
    quantize_checkpoint(folder, tmp_path / "fp8", WEIGHTS["fp8"])
    assert [path.name for path in (tmp_path / "fp8").glob("*.safetensors*")] == ["model.safetensors"]
    assert Checkpoint.open(tmp_path / "fp8").config.talker.speakers.keys() == {"ada lovelace"}


def test_the_command_line_lists_it_and_speaks_with_it(made, tmp_path, capsys):
    _, folder, _ = made("tiny")
    config = json.loads((folder / "generation_config.json").read_text()) | {"max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(config))
    speak = ["speak", "--model", str(folder), "--device", "cpu"]
    assert main([*speak, "--list-speakers"]) == 0
    assert "custom_voice\n  ada lovelace\n" in capsys.readouterr().out
    said = ["--text", "Hello there.", "--output", str(tmp_path / "out.wav")]
    assert main([*speak, *said, "--speaker", NAME]) == 0 and (tmp_path / "out.wav").stat().st_size > 8 * 1920
    assert main([*speak, *said, "--speaker", "Charles"]) == 1
    assert "unknown speaker 'Charles'; known: ada lovelace" in capsys.readouterr().err


def test_it_has_a_fingerprint_and_no_encoder_of_its_own(made):
    base, folder, _ = made("tiny")
    assert Checkpoint.open(folder).fingerprint != Checkpoint.open(base).fingerprint
    assert Checkpoint.open(folder).config.speaker_encoder is None


def test_names_that_differ_by_case_alone_are_refused(made):
    _, folder, _ = made("tiny")
    config = json.loads((folder / "config.json").read_text())
    config["talker_config"]["spk_id"]["ADA lovelace"] = 7
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="spk_id .*'ada lovelace'"):
        Checkpoint.open(folder)
