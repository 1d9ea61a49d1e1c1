"""Finding, checking and loading checkpoints; what is broken is refused by name."""

import json
import shutil
import struct
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_megakernel import CheckpointError, CheckpointNotFoundError
from qwen_megakernel.checkpoint.codec_config import CodecConfig
from qwen_megakernel.checkpoint.config import ModelConfig, TalkerConfig
from qwen_megakernel.checkpoint.json_object import JsonObject
from qwen_megakernel.checkpoint.load import Checkpoint, find_checkpoint
from qwen_megakernel.checkpoint.synthetic import json_files
from qwen_megakernel.checkpoint.tensors import expected_tensors

CPU, NORM = torch.device("cpu"), "talker.model.norm.weight"


@pytest.fixture
def copy(tiny, tmp_path):
    """A private copy of a tiny checkpoint, to be broken."""

    def make(variant: str = "custom_voice", **options) -> Path:
        return Path(shutil.copytree(tiny(variant, **options), tmp_path / "checkpoint"))

    return make


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def safetensors_bytes(shapes: dict, item: int, dtype: str, metadata: dict | None) -> int:
    """Size of a safetensors file with these tensors: length word, JSON header padded to 8, data."""
    header, offset = ({"__metadata__": metadata} if metadata else {}), 0
    for name in sorted(shapes):
        size = item * torch.Size(shapes[name]).numel()
        header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [offset, offset + size]}
        offset += size
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-length // 8) * 8 + offset


@pytest.mark.parametrize(
    "size, variant, tensors, published",
    [
        ("0.6b", "base", 478, 1_829_344_272),
        ("0.6b", "custom_voice", 402, 1_811_626_576),
        ("1.7b", "base", 480, 3_857_413_744),
        ("1.7b", "custom_voice", 404, 3_833_402_552),
        ("1.7b", "voice_design", 404, 3_833_402_552),
    ],
)
def test_the_published_files_hold_exactly_these_names_and_shapes(tmp_path, size, variant, tensors, published):
    """The byte sizes of the published files follow from every name, shape and dtype."""
    (tmp_path / "speech_tokenizer").mkdir()
    for name, content in json_files(size, variant).items():
        (tmp_path / name).write_text(json.dumps(content))
    main, codec = expected_tensors(ModelConfig.from_folder(tmp_path))
    assert len(main) == tensors
    assert safetensors_bytes(main, 2, "BF16", None if variant == "base" else {"format": "pt"}) == published
    assert len(codec) == 496
    assert safetensors_bytes(codec, 4, "F32", None) == 682_293_092


def test_shards_load_like_a_single_file(tiny):
    single, sharded = (Checkpoint.open(tiny("custom_voice", shards=n)) for n in (1, 3))
    assert len(list(sharded.folder.glob("model-*.safetensors"))) == 3
    a, b = (c.talker(CPU, torch.float32) for c in (single, sharded))
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda t: t.pop(NORM), rf"'{NORM}' \[64\] is missing"),
        (lambda t: t.update({NORM: torch.zeros(65).bfloat16()}), rf"'{NORM}': expected shape \[64\], found \[65\]"),
        (lambda t: t.update({NORM: torch.zeros(64).char()}), f"'{NORM}': expected dtype .*found I8"),
    ],
    ids=["missing", "shape", "dtype"],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_wrong_tensor_is_refused_by_name(copy, break_it, message, shards):
    folder = copy(shards=shards)
    file = sorted(folder.glob("*.safetensors"))[0]
    for candidate in folder.glob("*.safetensors"):
        if NORM in load_file(candidate):
            file = candidate
    tensors = load_file(file)
    break_it(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_a_wrong_codec_tensor_is_refused_by_name(copy):
    folder = copy()
    file = folder / "speech_tokenizer" / "model.safetensors"
    tensors = load_file(file)
    del tensors["decoder.pre_conv.conv.bias"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="decoder.pre_conv.conv.bias"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("shard", ["../escape.safetensors", "/etc/passwd", "model.bin", 7])
def test_an_index_cannot_name_a_path(copy, shard):
    folder = copy(shards=2)
    edit(folder / "model.safetensors.index.json", lambda v: v["weight_map"].update(x=shard))
    with pytest.raises(CheckpointError, match="model.safetensors.index.json"):
        Checkpoint.open(folder)


def talker(**values):
    return lambda js: js["talker_config"].update(values)


def inside(part, **values):
    return lambda js: js["talker_config"][part].update(values)


rope = partial(inside, "rope_scaling")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda js: js.update(model_type="qwen2"), "model_type must be 'qwen3_tts', found 'qwen2'"),
        (lambda js: js.update(tokenizer_type="qwen3_tts_tokenizer_25hz"), "tokenizer_type"),
        (lambda js: js.update(tts_model_type="singing"), "tts_model_type"),
        (lambda js: js.pop("tts_pad_token_id"), "tts_pad_id must be in 0..749, found 151671"),
        (lambda js: js.update(tts_pad_token_id=10**9), "tts_pad_id"),
        (lambda js: js.pop("talker_config"), "'talker_config' is missing"),
        (talker(head_dim="32"), "head_dim must be int, found '32'"),
        (talker(num_hidden_layers=0), "num_hidden_layers must be in 1..1024"),
        (talker(num_key_value_heads=3), "multiple of num_key_value_heads"),
        (talker(hidden_act="gelu"), "hidden_act must be 'silu', found 'gelu'"),
        (talker(attention_bias=True), "attention_bias"),
        (talker(sliding_window=128), "sliding_window"),
        (talker(rms_norm_eps=float("nan")), "rms_norm_eps"),
        (talker(vocab_size=1024), "vocab_size"),
        (talker(codec_eos_token_id=5000), "codec_eos_id"),
        (talker(spk_id={"ada": 10**6}), "spk_id"),
        (talker(spk_is_dialect={"eric": "klingon_dialect"}), "klingon_dialect"),
        (rope(mrope_section=[6, 5, 4]), "mrope_section .*16"),
        (rope(mrope_section=[16]), "mrope_section"),
        (rope(rope_type="yarn"), "rope_type must be 'default', found 'yarn'"),
        (rope(factor=4.0), "factor must be None or 1.0, found 4.0"),
        (rope(beta_fast=32), "'beta_fast' is not supported"),
        (talker(rope_scaling=None), "rope_scaling"),
        (talker(rope_parameters={"rope_type": "yarn"}), "rope_parameters: rope_type"),
        (talker(model_type="qwen2"), "model_type must be 'qwen3_tts_talker'"),
        (inside("code_predictor_config", model_type="x"), "code_predictor_config: model_type"),
        (inside("code_predictor_config", layer_types=["sliding_attention"] * 2), "layer_types"),
        (rope(rope_theta=5.0), "rope_theta is 1000000.0 and, in rope_scaling, 5.0"),
        (talker(num_hidden_layers=4), "layers.3.*is missing"),
        (talker(num_hidden_layers=3_000_000), "num_hidden_layers"),
        (talker(intermediate_size=10**12), "intermediate_size"),
        (talker(rms_norm_eps=10**400), "rms_norm_eps"),
        (talker(rms_norm_eps=-1e-6), "rms_norm_eps .*0"),
        (talker(rope_theta=0), "rope_theta .*0"),
        (talker(num_code_groups=2000), "num_code_groups must be in 1..1024"),
    ],
)
def test_a_tampered_config_is_refused(copy, change, message):
    folder = copy()
    edit(folder / "config.json", change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


SPEAKER = "config.json", "speaker_encoder_config"
ENCODER = "speech_tokenizer/config.json", "encoder_config"
DECODER = "speech_tokenizer/config.json", "decoder_config"
COUNTED = "hidden_layers", "quantizers", "residual_layers", "semantic_quantizers", "labels"


@pytest.mark.parametrize(
    "where, key, value, message",
    [
        (SPEAKER, "sample_rate", 16000, "sample_rate must be .*24000, found 16000"),
        (SPEAKER, "enc_res2net_scale", 0, "enc_res2net_scale"),
        (SPEAKER, "enc_res2net_scale", 2000, "enc_res2net_scale must be in 1..1024"),
        (SPEAKER, "enc_channels", [4] * 17, "enc_channels .*16"),
        (SPEAKER, "enc_dim", 32, "enc_dim"),
        (ENCODER, "compress", 0, "compress"),
        (ENCODER, "num_filters", None, "num_filters"),
        (ENCODER, "upsampling_ratios", 3, "upsampling_ratios"),
        (ENCODER, "upsampling_ratios", [2] * 17, "upsampling_ratios"),
        *[(ENCODER, f"num_{of}", 2000, f"num_{of}") for of in COUNTED],
        (ENCODER, "num_attention_heads", 2**24 + 1, "num_attention_heads"),
        (ENCODER, "head_dim", "x" * 99, "head_dim"),  # times a number it would be a long text
        (ENCODER, "upsample_groups", 2**24 + 1, "upsample_groups"),
        (DECODER, "num_quantizers", 2000, "num_quantizers must be in 1..1024"),
        (DECODER, "sliding_window", 1, "sliding_window"),
        (DECODER, "sliding_window", 10**12, "sliding_window"),
        (DECODER, "rms_norm_eps", 0, "rms_norm_eps"),
        (DECODER, "upsample_rates", [8] * 5000, "upsample_rates"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else str(value)[:20],
)
def test_a_tampered_encoder_or_vocoder_is_refused(copy, where, key, value, message):
    """By the key that is wrong."""
    folder, (file, part) = copy("base"), where
    edit(folder / file, lambda js: js[part].update({key: value}))
    with pytest.raises(CheckpointError, match=f"{part}: {message}" if where == ENCODER else message):
        Checkpoint.open(folder)


@pytest.mark.parametrize("dtype, offsets", [("I64", [0, 4]), ("F32", [-4, 0]), ("F32", [4, 8])])
def test_a_header_that_contradicts_itself_is_refused(copy, dtype, offsets):
    """Of a tensor that is read to tell one checkpoint from another."""
    file = copy() / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    entry = header[NORM]
    entry["data_offsets"] = [entry["data_offsets"][0] + offsets[0], entry["data_offsets"][1] + offsets[1]]
    entry["dtype"] = dtype
    fresh = json.dumps(header).encode().ljust(length)
    file.write_bytes(struct.pack("<Q", len(fresh)) + fresh + data[8 + length :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Checkpoint.open(file.parent)


BROKEN_OFFSETS = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, "x"]}}).encode()


@pytest.mark.parametrize(
    "beginning, message",
    [
        (struct.pack("<Q", 2**63), "safetensors"),
        (struct.pack("<Q", len(BROKEN_OFFSETS)) + BROKEN_OFFSETS, "header"),
        *[(keep, r"model\.safetensors") for keep in (0, 5, 8, 2000, -1)],
    ],
    ids=["length", "offsets", *["truncated"] * 5],
)
def test_truncated_weights_and_a_hostile_header_are_refused(copy, beginning, message):
    file = copy() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:beginning] if isinstance(beginning, int) else beginning + bytes(4))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(file.parent)


def test_broken_files_are_named(copy):
    folder = copy()
    for content in ("{", "[" * 100_000, '{"x": ' + "9" * 5000 + "}"):
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"generation_config\.json.*JSON"):
            Checkpoint.open(folder)
    (folder / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*missing"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # one of them is how each file is stored
def test_weights_stay_whatever_is_written_over_their_files(copy, dtype):
    folder, cpu = copy("base"), torch.device("cpu")
    checkpoint = Checkpoint.open(folder)
    read = checkpoint.talker(cpu, dtype) | checkpoint.vocoder(cpu, dtype) | checkpoint.codec_encoder()
    before = {name: tensor.clone() for name, tensor in read.items()}
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in read.items())


def test_generation_config_gives_the_defaults(copy):
    folder = copy()
    edit(folder / "generation_config.json", lambda v: (v.clear(), v.update(top_k=7, max_new_tokens=41)))
    config = Checkpoint.open(folder).config
    assert config.sampling.top_k == 7 and config.sampling.temperature == 0.9 and config.max_frames == 40
    edit(folder / "generation_config.json", lambda v: v.update(temperature=-1))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature"):
        Checkpoint.open(folder)


def test_ids_come_from_the_checkpoint():
    published = TalkerConfig.from_json(JsonObject(json_files("1.7b")["config.json"]["talker_config"], "x"))
    assert (published.codec_eos_id, published.codec_pad_id, published.first_suppressed_id) == (2150, 2148, 2048)
    assert published.speakers["vivian"] == 3065 and published.languages["german"] == 2053
    assert published.dialects == {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
    demo = Checkpoint.open("demo").config
    assert demo.talker.codec_eos_id == 230 and demo.im_start_id == 1371


def test_codec_rates_must_agree():
    codec = json_files("tiny")["speech_tokenizer/config.json"] | {"decode_upsample_rate": 960}
    with pytest.raises(CheckpointError, match="decode_upsample_rate .*1920"):
        CodecConfig.from_json(JsonObject(codec, "x"))


# ---------------------------------------------------------------- names


NOWHERE = "./nowhere", "/nowhere/at/all", "just-a-name", Path("org/name"), "a b/c", "", None, 7
NO_PATH = "a" * 5000, "a/" + "b" * 5000, "~nobody_here/x", "a\0b"


@pytest.mark.parametrize("name", [*NOWHERE, *NO_PATH], ids=lambda name: str(name)[:20])
def test_what_is_neither_folder_nor_hub_id_is_said_to_be(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=None if name in NO_PATH else "no folder|model must be"):
        Checkpoint.open(name)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """A hub cache of our own, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def download(hub_cache: Path, size_and_variant: str, source: Path, without: str = "") -> Path:
    """The snapshot of a published checkpoint in the cache."""
    repo = hub_cache / f"models--Qwen--Qwen3-TTS-12Hz-{size_and_variant}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123abc")
    return Path(shutil.copytree(source, repo / "snapshots" / "0123abc", ignore=shutil.ignore_patterns(without)))


def test_a_hub_id_is_taken_from_the_cache_without_a_network(tiny, hub_cache):
    snapshot = download(hub_cache, "0.6B-CustomVoice", tiny("custom_voice"))
    checkpoint = Checkpoint.open("Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice")
    assert checkpoint.folder == snapshot
    assert checkpoint.fingerprint == Checkpoint.open(tiny("custom_voice")).fingerprint


def test_a_fingerprint_depends_on_the_first_the_middle_and_the_last_of_an_encoders_rows(copy):
    folder = copy("base")
    path = folder / "speech_tokenizer" / "model.safetensors"
    tensors, found = load_file(path), {Checkpoint.open(folder).fingerprint}
    rows = next(tensor for name, tensor in sorted(tensors.items()) if name.startswith("encoder.") and len(tensor) > 4)
    for row in (0, len(rows) // 2, -1):
        rows[row] += 1
        save_file(tensors, path)
        found.add(Checkpoint.open(folder).fingerprint)
    assert len(found) == 4


def test_an_interrupted_download_names_the_command(tiny, hub_cache):
    download(hub_cache, "0.6B-Base", tiny("base"), without="model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*hf download Qwen/Qwen3-TTS-12Hz-0.6B-Base"):
        Checkpoint.open("Qwen/Qwen3-TTS-12Hz-0.6B-Base")


def test_a_missing_hub_id_says_what_where_and_which_command(hub_cache):
    with pytest.raises(CheckpointNotFoundError) as error:
        find_checkpoint("Qwen/Qwen3-TTS-12Hz-1.7B-Base")
    for part in ("Qwen/Qwen3-TTS-12Hz-1.7B-Base", str(hub_cache), "hf download Qwen/Qwen3-TTS-12Hz-1.7B-Base"):
        assert part in str(error.value)
    assert "HF_HUB_OFFLINE" in str(error.value)


def test_only_data_files_are_asked_of_the_hub(monkeypatch, tiny):
    import huggingface_hub

    seen = {}
    download = lambda repo, **kw: (seen.update(kw, repo=repo), str(tiny("base")))[1]  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_checkpoint("someone/a-finetune") == tiny("base")
    patterns = seen["allow_patterns"]
    assert seen["repo"] == "someone/a-finetune" and "*.safetensors" in patterns
    assert not any(p.endswith((".bin", ".pt", ".py")) or p == "*" for p in patterns)
    there = {str(path.relative_to(tiny("base"))) for path in tiny("base").rglob("*") if path.is_file()}
    unasked = {name for name in there if not any(fnmatch(name, pattern) for pattern in patterns)}
    assert unasked == {"speech_tokenizer/configuration.json"}, "which nobody reads, the reference neither"
