"""Checkpoints as others save them: they load, or one sentence says what they are and what to take instead."""

import json
import logging
import re
import shutil
import struct
from pathlib import Path

import cases as shared
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from waiting import slow_case

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.checkpoint.derive import quantize_checkpoint
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.errors import CheckpointError, CheckpointNotFoundError
from qwen_megakernel.model.text import TextTokenizer

CASE = shared.OracleCase("tiny", "custom_voice", "english", True, "ryan", "english", frames=12)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return CASE.checkpoint(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def copy(plain, tmp_path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "copy"))


def codes(folder: Path) -> np.ndarray:
    with TTSEngine.load(folder, backend="torch", device="cpu", dtype=torch.float32, max_streams=1) as engine:
        return shared.ask(engine, CASE).codes


@pytest.fixture(scope="module")
def wanted(plain) -> np.ndarray:
    return codes(plain)


QUICK = {"speaker encoder kept", "tokenizer.json", "rope_parameters", "mixed"}


@pytest.mark.parametrize("name", [name if name in QUICK else slow_case(name) for name in shared.LAYOUTS])
def test_what_others_save_says_the_same(copy, wanted, name):
    """The reference says it too (`make oracle`)."""
    shared.LAYOUTS[name](copy)
    assert np.array_equal(codes(copy), wanted) == (name != "no rotary base")


def test_what_is_left_out_is_told(copy, caplog):
    names = ("speaker_encoder.fc.weight", "talker.model.rotary_emb.inv_freq", "decoder.x", "optimizer.step", "surprise")
    shared.with_tensors(*names)(copy)
    with caplog.at_level(logging.INFO):
        Checkpoint.open(copy)
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "1 buffers, 1 of a training, 2 of other parts" in told and "left out unknown tensors: surprise" in told


def test_unknown_names_are_told_where_one_is_missing(copy):
    path = copy / "model.safetensors"
    tensors = load_file(path)
    tensors["talker.model.final_norm.weight"] = tensors.pop("talker.model.norm.weight")
    save_file(tensors, path)
    with pytest.raises(
        CheckpointError, match=r"norm.weight' \[64\] is missing; it has others, such as 'talker.model.fin"
    ):
        Checkpoint.open(copy)


def test_a_copy_of_what_others_save_is_clean(copy, wanted, tmp_path):
    shared.LAYOUTS["a prefix"](copy)
    quantize_checkpoint(copy, tmp_path / "fp8", frozenset({"predictor"}))
    assert "talker.model.norm.weight" in load_file(tmp_path / "fp8" / "model.safetensors")


@pytest.mark.parametrize(
    "rope, said",
    [
        ({"rope_theta": 5.0}, "rope_theta is 1000000.0 and, in rope_parameters, 5.0"),
        ({"mrope_section": [8, 4, 4]}, r"mrope_section is \[6, 5, 5\] and, in rope_parameters, \[8, 4, 4\]"),
        ({"rope_type": "yarn"}, "rope_type must be 'default', found 'yarn'"),
        ({"factor": 4.0}, "factor"),
    ],
)
def test_two_rotary_settings_must_agree(copy, rope, said):
    path = copy / "config.json"
    config = json.loads(path.read_text())
    config["talker_config"]["rope_parameters"] = rope
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(copy)


# ---------------------------------------------------------------- tokenizers


def test_both_forms_of_a_tokenizer_give_the_same_ids(copy):
    """Special tokens are spelt out in both."""
    texts = [*shared.TEXTS.values(), "<|im_end|> and <|im_start|>", "helloWorld's 3/4\n\n x\u0301", "\U0001f642 ok"]
    before = TextTokenizer(copy, 10**6)
    shared.LAYOUTS["tokenizer.json"](copy)
    after = TextTokenizer(copy, 10**6)
    assert [after.encode(text) for text in texts] == [before.encode(text) for text in texts]


def test_tokenizer_json_wins(copy):
    """As in the reference."""
    vocab = (copy / "vocab.json").read_text(), (copy / "merges.txt").read_text()
    shared.LAYOUTS["tokenizer.json"](copy)
    for name, text in zip(("vocab.json", "merges.txt"), vocab, strict=True):
        (copy / name).write_text(text)
    path = copy / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["model"]["merges"] = [" ".join(merge) for merge in stored["model"]["merges"][:5]]  # the older spelling
    path.write_text(json.dumps(stored))
    assert len(TextTokenizer(copy, 10**6).encode("something")) > 5


@pytest.mark.parametrize(
    "model, said",
    [
        ({"type": "Unigram", "vocab": {"a": 0}, "merges": []}, "type must be 'BPE'"),
        ({"type": "BPE", "vocab": {"a": 10**7}, "merges": []}, "id"),
        ({"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}, "tokenizer.json: "),
        ({"type": "BPE", "vocab": {"a": 0}, "merges": [7]}, "tokenizer.json: "),
        ({"type": "BPE", "vocab": {"a": 0}}, "'merges' is missing"),
    ],
)
def test_a_broken_tokenizer_is_refused(tmp_path, model, said):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    with pytest.raises(CheckpointError, match=said):
        TextTokenizer(tmp_path, 1000)


def test_no_tokenizer_is_said_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor vocab\.json"):
        TextTokenizer(tmp_path, 1000)


# ---------------------------------------------------------------- formats that are not read


@pytest.mark.parametrize(
    "key, value, tool",
    [
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes to 4 bits"),
        ("quantization_config", {"quant_method": "gptq", "bits": 8}, "GPTQ to 8 bits"),
        ("quantization_config", {"quant_method": "awq", "bits": 4}, "AWQ to 4 bits"),
        ("quantization_config", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ("quantization", {"group_size": 64, "bits": 4}, "MLX to 4 bits"),
    ],
)
def test_a_quantised_checkpoint_is_named(copy, key, value, tool):
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=f"quantised by {tool}, .*Qwen3-TTS-12Hz-0.6B-CustomVoice.*weights='fp8'"):
        Checkpoint.open(copy)


Q = "talker.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "name, said",
    [
        (f"{Q}.weight.absmax", "bitsandbytes"),
        (f"{Q}.qweight", "GPTQ or AWQ"),
        (f"{Q}.scales", "MLX"),
        (f"{Q}.base_layer.weight", "call merge_and_unload"),
        ("code_predictor.lm_head.weight", "transformers' own port"),
    ],
)
@pytest.mark.parametrize("config", ["whole", "foreign"])
def test_foreign_tensors_are_named(copy, name, said, config):
    """Also where config.json has other keys."""
    path = copy / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{Q}.weight"]
    save_file(tensors | {name: torch.zeros(2)}, path)
    if config == "foreign":
        (copy / "config.json").write_text('{"model_type": "qwen3_tts", "talker": {}}')
    with pytest.raises(CheckpointError, match=re.escape(said)):
        Checkpoint.open(copy)


def test_mlx_weights_are_named(copy):
    path = copy / "speech_tokenizer" / "model.safetensors"
    tensors = load_file(path)
    name = "decoder.pre_conv.conv.weight"
    save_file(tensors | {name: tensors[name].transpose(1, 2).contiguous()}, path, {"format": "mlx"})
    with pytest.raises(CheckpointError, match="MLX"):
        Checkpoint.open(copy)


@pytest.mark.parametrize("name, said", [("q4.gguf", "GGUF"), ("model.onnx", "ONNX"), ("pytorch_model.bin", "a pickle")])
def test_other_files_are_named(copy, name, said):
    (copy / "model.safetensors").rename(copy / name)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} is .*{said}"):
        Checkpoint.open(copy)


def test_a_gguf_file_or_folder_is_named(tmp_path):
    file = tmp_path / "model-q4.gguf"
    file.write_bytes(b"GGUF")
    for model in (file, tmp_path):
        with pytest.raises(CheckpointError, match=r"model-q4\.gguf is GGUF .*weights='fp8'"):
            Checkpoint.open(model)


# ---------------------------------------------------------------- folders around a checkpoint


@pytest.mark.parametrize("inside", ["", "snapshots"])
def test_a_folder_of_the_hub_cache_is_its_snapshot(plain, wanted, tmp_path, inside):
    cache = tmp_path / "models--Qwen--X"
    shutil.copytree(plain, cache / "snapshots" / "0a1b")
    assert Checkpoint.open(cache / inside).folder == cache / "snapshots" / "0a1b"
    shutil.copytree(plain, cache / "snapshots" / "ffff")
    with pytest.raises(CheckpointNotFoundError, match="'0a1b' or 'ffff'"):
        Checkpoint.open(cache / inside)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("ffff\n")
    assert Checkpoint.open(cache / inside).folder.name == "ffff"
    (cache / "refs" / "main").write_text("../../etc")
    with pytest.raises(CheckpointNotFoundError):
        Checkpoint.open(cache / inside)


def test_a_training_folder_names_the_checkpoints_in_it(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run" / "checkpoint-500")
    with pytest.raises(CheckpointNotFoundError, match="no config.json.*'checkpoint-500'"):
        Checkpoint.open(tmp_path / "run")


def test_an_adapter_as_model_is_said_so(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="LoRA adapter"):
        Checkpoint.open(tmp_path)


# ---------------------------------------------------------------- voices keep


@pytest.fixture
def base(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny("base"), tmp_path / "base"))


def changed(folder: Path, where: str, name: str) -> None:
    path = folder / where
    tensors = load_file(path)
    tensors[name] = tensors[name] + 0.25
    save_file(tensors, path)


def test_a_fingerprint_is_of_what_makes_a_voice(base):
    before = Checkpoint.open(base)
    path = base / "config.json"
    config = json.loads(path.read_text())
    config |= {"transformers_version": "5.99"}
    config["talker_config"]["codec_language_id"]["vietnamese"] = 270
    path.write_text(json.dumps(config, indent=7))
    shared.cast_to(torch.float32)(base)
    after = Checkpoint.open(base)
    assert after.fingerprint == before.fingerprint and after.old_fingerprint != before.old_fingerprint
    assert before.origin(before.old_fingerprint) == "made by this checkpoint, with a version before 0.3"
    assert after.origin(before.old_fingerprint) is None
    changed(base, "model.safetensors", "talker.model.norm.weight")
    tuned = Checkpoint.open(base)
    assert "a fine-tune" in tuned.origin(before.fingerprint) and "a fine-tune" in before.origin(tuned.fingerprint)


@pytest.mark.parametrize(
    "where, name",
    [
        ("model.safetensors", "speaker_encoder.fc.bias"),
        ("model.safetensors", "speaker_encoder.blocks.1.tdnn1.conv.weight"),
        ("speech_tokenizer/model.safetensors", "encoder.downsample.conv.weight"),
    ],
)
def test_other_encoders_are_another_checkpoint(base, where, name):
    before = Checkpoint.open(base)
    changed(base, where, name)
    assert Checkpoint.open(base).origin(before.fingerprint) is None


def test_a_voice_of_a_fine_tune_speaks_on_its_base(base, tmp_path, caplog):
    tuned = Path(shutil.copytree(base, tmp_path / "tuned"))
    changed(tuned, "model.safetensors", "talker.model.norm.weight")
    sound, text = shared.reference_of(1, 0)
    options = {"backend": "torch", "device": "cpu", "max_streams": 1}
    with TTSEngine.load(tuned, **options) as engine:
        voice = engine.create_voice((sound, 24000), text)
    with TTSEngine.load(base, **options) as engine, caplog.at_level(logging.INFO):
        for _ in range(2):
            engine.generate("Hi.", voice=voice, max_frames=3, sampling=SamplingParams(seed=1))
    assert caplog.text.count("made by another checkpoint with the same encoders") == 1


def test_a_header_is_checked_before_weights_are_read(copy):
    """A tensor that is left out cannot make the file longer than it is."""
    path = copy / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    end = max(t["data_offsets"][1] for name, t in header.items() if name != "__metadata__")
    header["extra"] = {"dtype": "F32", "shape": [2**40], "data_offsets": [end, end + 2**42]}
    fresh = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(fresh)) + fresh + data[8 + length :])
    with pytest.raises(CheckpointError):
        Checkpoint.open(copy)
