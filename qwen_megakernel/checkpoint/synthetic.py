"""Checkpoints with random weights in the published layout, for tests and benchmarks.

They need no published file. The real sizes have exactly the published dims, ids and tensor names: a test checks the
file sizes to the byte. The tiny ones keep every structural feature (grouped queries, QK norm, 16 code groups, M-RoPE
sections, the 1.7B adapter) at toy widths. They have other ids, so that an id hard-coded anywhere shows up as a wrong
result. A tensor's values depend only on the seed and its name.

`qwen-megakernel synthetic FOLDER` writes one.
"""

import hashlib
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel

from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.tensors import Shapes, expected_tensors, talker_tensors, vocoder_tensors
from qwen_megakernel.choices import SYNTHETIC_SIZES, VARIANTS

NO_EOS = 0.0  # `eos_gain` that suppresses end of speech: its logit is then 0, far below the top-k of a random row

_ROLE_IDS = {"user": 872, "system": 8948, "assistant": 77091}  # in published vocabularies
_WORDS = (
    "assistant user system hello world the quick brown fox jumps over lazy dog speech is made of text and this "
    "sentence was written for a test how are you today I am fine thank it isn't don't we'll 12 345 guten morgen "
    "wie geht bonjour tout le monde hola buenos días привет мир "
    "你好 今天 天气 世界 こんにちは 안녕하세요 slowly warm low voice"
).split()


def write_checkpoint(
    folder: str | Path,
    *,
    size: str = "tiny",
    variant: str = "custom_voice",
    seed: int = 0,
    codec: str | None = None,
    eos_gain: float = 2.0,
    shards: int = 1,
) -> Path:
    """Write a whole checkpoint folder and return it. `size`: one of `SYNTHETIC_SIZES`. "tiny-adapter" has 1.7B's
    topology, with an adapter before the code predictor. "demo" has the demo voice's dims, for which the kernel is
    compiled too. `variant`: "base", "custom_voice" or "voice_design". `seed`: of every tensor. `codec`: "tiny" or
    "real" speech tokenizer; None follows the size. `eos_gain`: scales end of speech's row in the codec head. The larger
    it is, the earlier speech ends by chance; `NO_EOS` suppresses it. `shards`: split the main file into that many files
    with an index."""
    if size not in SYNTHETIC_SIZES or variant not in VARIANTS or codec not in (None, "tiny", "real"):
        raise ValueError(f"unknown size, variant or codec: {size!r}, {variant!r}, {codec!r}")
    folder = Path(folder)
    _write_configs(folder, size, variant, codec)
    config = ModelConfig.from_folder(folder)
    main, codec_shapes = expected_tensors(config)
    eos_row = config.talker.codec_eos_id

    def main_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = _normal(name, shape, seed, *main_spread(name, shape, config))
        if name == "talker.codec_head.weight":
            values[eos_row] *= eos_gain
        return torch.from_numpy(values).to(torch.bfloat16)

    # The published Base and speech tokenizer files have no metadata; the other two do.
    metadata = None if variant == "base" else {"format": "pt"}
    _write_shards(folder, main, main_tensor, shards, metadata)
    codec_tensors = {n: torch.from_numpy(_codec_values(n, s, seed)) for n, s in codec_shapes.items()}
    save_file(codec_tensors, folder / "speech_tokenizer" / "model.safetensors")
    return folder


def _write_configs(folder: Path, size: str, variant: str, codec: str | None) -> None:
    """Everything but the weights."""
    (folder / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    files = json_files(size, variant, codec)
    for name, content in files.items():
        _dump(folder / name, content)
    _write_tokenizer(folder, files["config.json"]["im_start_token_id"] - 1)


def json_files(size: str, variant: str = "custom_voice", codec: str | None = None) -> dict[str, dict]:
    """The JSON files of a checkpoint, except vocab.json: path -> content. They are those of the published 0.6B with the
    changes that synthetic.json lists. The arguments are `write_checkpoint`'s."""
    data = json.loads(Path(__file__).with_name("synthetic.json").read_text(encoding="utf-8"))
    files: dict[str, dict] = data["published"]
    config, codec_config = files["config.json"], files["speech_tokenizer/config.json"]
    config |= {"tts_model_type": variant, "random_weights": True}
    talker = config["talker_config"]
    predictor = talker["code_predictor_config"]
    published_codes = predictor["vocab_size"]
    _change(config, data["sizes"][size])
    if codec == "tiny" or (codec is None and size not in ("0.6b", "1.7b")):
        _change(codec_config, data["tiny codec"])
    if variant != "custom_voice":
        dialects = set(talker["spk_is_dialect"].values())
        languages = {name: n for name, n in talker["codec_language_id"].items() if name not in dialects}
        talker |= {"codec_language_id": languages, "spk_id": {}, "spk_is_dialect": {}}
    if variant != "base":
        del config["speaker_encoder_config"]
    codes = predictor["vocab_size"]
    codec_config["decoder_config"]["codebook_size"] = codec_config["encoder_config"]["codebook_size"] = codes
    # The talker's ids of tags, languages and speakers follow the codes. The special tokens' ids follow those of text.
    ids = {key: value for key, value in talker.items() if key.startswith("codec_") or key in ("spk_id", "vocab_size")}
    talker |= _moved(ids, codes - published_codes)
    tokenizer = files["tokenizer_config.json"]
    tokens = enumerate(tokenizer["added_tokens_decoder"].values(), start=config["im_start_token_id"] - 1)
    tokenizer["added_tokens_decoder"] = {str(number): token for number, token in tokens}
    return files


def _change(values: dict, changes: dict) -> None:
    """Put `changes` into `values`, object by object."""
    for key, change in changes.items():
        if isinstance(change, dict):
            _change(values[key], change)
        else:
            values[key] = change


def _moved(ids: dict, by: int) -> dict:
    return {name: _moved(number, by) if isinstance(number, dict) else number + by for name, number in ids.items()}


def _dump(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def _write_shards(folder: Path, shapes: Shapes, make, shards: int, metadata: dict | None) -> None:
    names = list(shapes)
    if shards == 1:
        save_file({n: make(n, shapes[n]) for n in names}, folder / "model.safetensors", metadata)
        return
    weight_map: dict[str, str] = {}
    for k in range(shards):
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        save_file({n: make(n, shapes[n]) for n in names[k::shards]}, folder / file, metadata)
        weight_map |= {n: file for n in names[k::shards]}
    _dump(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


# ---------------------------------------------------------------- tokenizer


def _write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level BPE with `size` entries: the byte alphabet in GPT-2's order, then merges that build the words of
    `_WORDS` letter by letter. The role words come first, so that they are single tokens."""
    splitter, order = ByteLevel(add_prefix_space=False, use_regex=False), sorted(ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        for spelling in (word,) if word in _ROLE_IDS else (word, " " + word):
            ((letters, _),) = splitter.pre_tokenize_str(spelling)
            for n in range(1, len(letters)):
                pair = (letters[:n], letters[n])
                if pair not in merges:
                    merges.append(pair)
    merges = merges[: size - len(order)]
    pinned = _ROLE_IDS if size > max(_ROLE_IDS.values()) else {}
    vocab = dict(pinned)
    free = (i for i in range(size) if i not in pinned.values())
    for token in [*order, *dict.fromkeys(a + b for a, b in merges)]:
        if token not in vocab:
            vocab[token] = next(free)
    for i in free:
        vocab[f"\u2047{i}"] = i
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(m) for m in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")


# ---------------------------------------------------------------- values


def _normal(name: str, shape: tuple[int, ...], seed: int, std: float = 1.0, mean: float = 0.0) -> np.ndarray:
    """Normal values from NumPy's generator, which, unlike torch's, gives the same values on every processor."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    values += np.float32(mean)
    return values


def main_spread(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[float, float]:
    """(standard deviation, mean) of a main tensor. The gains keep residuals near 1 through 28 layers and give logits a
    deviation of about 3."""
    if name.endswith("norm.weight"):
        mean = 1.2 if "q_norm" in name or "k_norm" in name else 1.0
        return 0.1 * mean, mean
    if name.endswith(".bias"):
        return 0.02, 0.0
    if name.startswith("speaker_encoder."):
        gain = 0.2 if name in ("speaker_encoder.fc.weight", "speaker_encoder.blocks.0.conv.weight") else 1.3
        return gain / math.sqrt(shape[1] * shape[2]), 0.0
    if "text_embedding" in name:
        return 1.0, 0.0
    if "codec_embedding" in name:
        return 0.25, 0.0
    gain = 1.0
    if "codec_head" in name or "lm_head" in name:
        gain = 3.0
    elif "o_proj" in name or "down_proj" in name:
        stack = config.talker.code_predictor.stack if "code_predictor" in name else config.talker.stack
        gain = (3.0 if "down_proj" in name else 1.5) / math.sqrt(2 * stack.num_layers)
    return gain / math.sqrt(shape[1]), 0.0


def synthetic_config(size: str) -> ModelConfig:
    """The config that `write_checkpoint` would write, without any weights."""
    with tempfile.TemporaryDirectory() as name:
        _write_configs(Path(name), size, "custom_voice", None)
        return ModelConfig.from_folder(Path(name))


def random_talker(config: ModelConfig, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Every `talker.*` tensor, bf16, drawn on `device`: real dims take a second instead of half a minute. Speech does
    not end. The values differ from those of `write_checkpoint` for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in talker_tensors(config.talker).items():
        std, mean = main_spread(name, shape, config)
        tensors[name] = (torch.randn(shape, generator=generator, device=device) * std + mean).to(torch.bfloat16)
    tensors["talker.codec_head.weight"][config.talker.codec_eos_id] *= NO_EOS
    return tensors


def random_vocoder(config: ModelConfig, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Every `decoder.*` tensor of the speech tokenizer, fp32 on `device`, as `write_checkpoint` makes them."""
    shapes = vocoder_tensors(config.codec)
    return {name: torch.from_numpy(_codec_values(name, shape, seed)).to(device) for name, shape in shapes.items()}


_CONV_GAINS = {"decoder.decoder.6.conv": 0.12, "encoder.encoder.layers.0.conv": 4.0, ".conv2.conv": 0.35}
_CONV_GAINS |= {"decoder.decoder": 0.8, "": 1.1}
"""Parts of the codec's convolutions' names -> their gains. The first that fits counts."""


def _codec_values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values with gains that give audible, unclipped PCM (RMS about 0.1)."""
    if name.endswith("initialized"):
        return np.ones(shape, np.float32)
    if name.endswith("cluster_usage"):
        return np.abs(_normal(name, shape, seed, 5.0)) + np.float32(0.5)
    if name.endswith(("embedding_sum", "embed_sum")):
        usage = _codec_values(f"{name.rsplit('.', 1)[0]}.cluster_usage", shape[:1], seed)
        return _normal(name, shape, seed, 1.0 if ".layers.0." in name else 0.4) * usage[:, None]
    if name.endswith((".alpha", ".beta")):
        return _normal(name, shape, seed, 0.2)
    if name.endswith(("layer_scale.scale", ".gamma")):
        return _normal(name, shape, seed, 0.03, 0.3)
    if name.endswith("norm.weight"):
        return _normal(name, shape, seed, 0.1, 1.0)
    if name.endswith(".bias"):
        return _normal(name, shape, seed, 0.02)
    if name.startswith("decoder.upsample.") and ".0.conv" in name:  # transposed: [in, out, k], stride k
        return _normal(name, shape, seed, 1.0 / math.sqrt(shape[0]))
    if name.startswith("decoder.decoder.") and ".block.1.conv" in name:  # transposed: [in, out, 2r], stride r
        return _normal(name, shape, seed, 0.8 / math.sqrt(2 * shape[0]))
    gain = 1.0 if len(shape) == 2 else next(gain for part, gain in _CONV_GAINS.items() if part in name)
    return _normal(name, shape, seed, gain / math.sqrt(math.prod(shape[1:])))
