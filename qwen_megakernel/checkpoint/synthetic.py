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

from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.synthetic_config import (
    CODEC_PREPROCESSOR,
    GENERATION,
    PREPROCESSOR,
    PUBLISHED_IDS,
    PUBLISHED_VOCAB,
    REAL_SIZES,
    codec_config,
    main_config,
)
from qwen_megakernel.checkpoint.tensors import Shapes, expected_tensors, talker_tensors, vocoder_tensors
from qwen_megakernel.choices import SYNTHETIC_SIZES, VARIANTS

NO_EOS = 0.0  # `eos_gain` that suppresses end of speech: its logit is then 0, far below the top-k of a random row

_SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> "
    "<tts_text_eod> <tts_text_bos_single> <|audio_pad|>"
).split()
_NOT_SPECIAL = range(14, 26)  # indices in the list above: tokens, but not "special" ones
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
    topology, with an adapter before the code predictor. "demo" has the demo voice's dims, for which the kernel is compiled too.
    `variant`: "base", "custom_voice" or "voice_design". `seed`: of every tensor. `codec`: "tiny" or "real" speech
    tokenizer; None follows the size. `eos_gain`: scales end of speech's row in the codec head. The larger it is, the
    earlier speech ends by chance; `NO_EOS` suppresses it. `shards`: split the main file into that many files with an
    index."""
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
    tokenizer = folder / "speech_tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    real = size in REAL_SIZES
    config = main_config(size, variant)
    _dump(folder / "config.json", config | {"random_weights": True})
    codes = config["talker_config"]["code_predictor_config"]["vocab_size"]
    _dump(tokenizer / "config.json", codec_config(codec == "real" or (real and codec is None), codes))
    _dump(folder / "generation_config.json", GENERATION)
    _dump(folder / "preprocessor_config.json", PREPROCESSOR)
    _dump(tokenizer / "preprocessor_config.json", CODEC_PREPROCESSOR)
    _dump(tokenizer / "configuration.json", {"framework": "pytorch", "task": "feature-extraction"})
    _write_tokenizer(folder, config["im_start_token_id"] - 1)


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
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet |= {b: chr(256 + n) for n, b in enumerate(sorted(set(range(256)) - set(printable)))}
    order = [alphabet[b] for b in printable] + [alphabet[b] for b in range(256) if b not in printable]
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        for spelling in (word,) if word in PUBLISHED_IDS else (word, " " + word):
            letters = [alphabet[b] for b in spelling.encode()]
            for n in range(1, len(letters)):
                pair = ("".join(letters[:n]), letters[n])
                if pair not in merges:
                    merges.append(pair)
    merges = merges[: size - len(order)]
    pinned = PUBLISHED_IDS if size == PUBLISHED_VOCAB else {}
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
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    tokens = [{"content": token, **plain, "special": n not in _NOT_SPECIAL} for n, token in enumerate(_SPECIAL_TOKENS)]
    special = [t for n, t in enumerate(_SPECIAL_TOKENS) if n and n not in _NOT_SPECIAL]
    config = {"tokenizer_class": "Qwen2Tokenizer", "errors": "replace", "model_max_length": 131072}
    config |= {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    off = ("add_bos_token", "add_prefix_space", "clean_up_tokenization_spaces", "split_special_tokens")
    config |= dict.fromkeys(off, False) | {"additional_special_tokens": special}
    config["added_tokens_decoder"] = {str(size + n): token for n, token in enumerate(tokens)}
    _dump(folder / "tokenizer_config.json", config)


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


def synthetic_config(size: str, variant: str = "custom_voice") -> ModelConfig:
    """The config that `write_checkpoint` would write, without any weights."""
    with tempfile.TemporaryDirectory() as name:
        _write_configs(Path(name), size, variant, None)
        return ModelConfig.from_folder(Path(name))


def random_talker(config: ModelConfig, device: torch.device, seed: int, eos_gain: float = NO_EOS) -> dict:
    """Every `talker.*` tensor, bf16, drawn on `device`: real dims take a second instead of half a minute. The values
    differ from those of `write_checkpoint` for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in talker_tensors(config.talker).items():
        std, mean = main_spread(name, shape, config)
        tensors[name] = (torch.randn(shape, generator=generator, device=device) * std + mean).to(torch.bfloat16)
    tensors["talker.codec_head.weight"][config.talker.codec_eos_id] *= eos_gain
    return tensors


def random_vocoder(config: ModelConfig, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Every `decoder.*` tensor of the speech tokenizer, fp32 on `device`, as `write_checkpoint` makes them."""
    shapes = vocoder_tensors(config.codec)
    return {name: torch.from_numpy(_codec_values(name, shape, seed)).to(device) for name, shape in shapes.items()}


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
    fan_in = math.prod(shape[1:])
    if len(shape) == 2:
        gain = 1.0
    elif name == "decoder.decoder.6.conv.weight":
        gain = 0.12
    elif name == "encoder.encoder.layers.0.conv.weight":
        gain = 4.0
    elif ".conv2.conv" in name:
        gain = 0.35
    else:
        gain = 0.8 if name.startswith("decoder.decoder") else 1.1
    return _normal(name, shape, seed, gain / math.sqrt(fan_in))
