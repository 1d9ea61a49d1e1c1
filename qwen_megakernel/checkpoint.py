"""Find a checkpoint, check every tensor's name, shape and dtype, and load it. Safetensors only.

A checkpoint is a folder in the published Qwen3-TTS 12 Hz layout:

    config.json  generation_config.json  vocab.json  merges.txt
    model.safetensors            or model.safetensors.index.json with its shards
    speech_tokenizer/config.json  speech_tokenizer/model.safetensors

`expected_tensors` derives the complete name table from config.json, so a tensor that is missing, extra
or misshaped is refused by name before anything is computed with it.
"""

import hashlib
import json
import logging
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen_megakernel.config import CodecConfig, ModelConfig, SpeakerEncoderConfig, StackConfig, TalkerConfig
from qwen_megakernel.errors import CheckpointError, CheckpointNotFoundError
from qwen_megakernel.fp8 import SCALE, dequantize, flaw, part_of, parts_in, quantize_parts

log = logging.getLogger(__name__)

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo_voice"
DEMO_NOTICE = "a tiny English voice for trying things out; use --model for a full-size one"

PUBLISHED = (
    "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
    "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
    "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
    "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
)
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "*.safetensors",
    "model.safetensors.index.json",
    "speech_tokenizer/config.json",
    "speech_tokenizer/*.safetensors",
    "speech_tokenizer/model.safetensors.index.json",
    # Read by the reference alone, which `qwen-megakernel verify` gives the same folder.
    "preprocessor_config.json",
    "tokenizer_config.json",
    "speech_tokenizer/preprocessor_config.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DTYPES = ("BF16", "F16", "F32")
_FP8 = "F8_E4M3"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own bound

Shapes = dict[str, tuple[int, ...]]


# ---------------------------------------------------------------- which tensors a config promises


def _stack_tensors(prefix: str, c: StackConfig) -> Shapes:
    """One Qwen3 decoder stack without its embeddings and heads."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: Shapes = {f"{prefix}.norm.weight": (c.hidden_size,)}
    for i in range(c.num_layers):
        layer = f"{prefix}.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (c.hidden_size,),
            f"{layer}.self_attn.q_proj.weight": (q, c.hidden_size),
            f"{layer}.self_attn.k_proj.weight": (kv, c.hidden_size),
            f"{layer}.self_attn.v_proj.weight": (kv, c.hidden_size),
            f"{layer}.self_attn.o_proj.weight": (c.hidden_size, q),
            f"{layer}.self_attn.q_norm.weight": (c.head_dim,),
            f"{layer}.self_attn.k_norm.weight": (c.head_dim,),
            f"{layer}.post_attention_layernorm.weight": (c.hidden_size,),
            f"{layer}.mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
            f"{layer}.mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            f"{layer}.mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }
    return shapes


def talker_tensors(c: TalkerConfig) -> Shapes:
    """Talker, code predictor, embeddings and heads. A code's embedding has the talker's width in both."""
    hidden, text = c.stack.hidden_size, c.text_hidden_size
    predictor = "talker.code_predictor"
    width = c.code_predictor.stack.hidden_size
    shapes = _stack_tensors("talker.model", c.stack) | {
        "talker.model.text_embedding.weight": (c.text_vocab_size, text),
        "talker.model.codec_embedding.weight": (c.vocab_size, hidden),
        "talker.text_projection.linear_fc1.weight": (text, text),
        "talker.text_projection.linear_fc1.bias": (text,),
        "talker.text_projection.linear_fc2.weight": (hidden, text),
        "talker.text_projection.linear_fc2.bias": (hidden,),
        "talker.codec_head.weight": (c.vocab_size, hidden),
    }
    shapes |= _stack_tensors(f"{predictor}.model", c.code_predictor.stack)
    for group in range(c.num_code_groups - 1):
        shapes[f"{predictor}.model.codec_embedding.{group}.weight"] = (c.code_predictor.vocab_size, hidden)
        shapes[f"{predictor}.lm_head.{group}.weight"] = (c.code_predictor.vocab_size, width)
    if width != hidden:
        shapes[f"{predictor}.small_to_mtp_projection.weight"] = (width, hidden)
        shapes[f"{predictor}.small_to_mtp_projection.bias"] = (width,)
    return shapes


def _conv(name: str, *shape: int, bias: bool = True, transposed: bool = False) -> Shapes:
    out_channels = shape[1] if transposed else shape[0]
    return {f"{name}.weight": shape} | ({f"{name}.bias": (out_channels,)} if bias else {})


def speaker_encoder_tensors(c: SpeakerEncoderConfig) -> Shapes:
    p = "speaker_encoder"
    shapes = _conv(f"{p}.blocks.0.conv", c.channels[0], c.mel_dim, c.kernel_sizes[0])
    for b in range(1, len(c.channels) - 1):
        before, width, group = c.channels[b - 1], c.channels[b], c.channels[b] // c.res2net_scale
        shapes |= _conv(f"{p}.blocks.{b}.tdnn1.conv", width, before, 1)
        for r in range(c.res2net_scale - 1):
            shapes |= _conv(f"{p}.blocks.{b}.res2net_block.blocks.{r}.conv", group, group, c.kernel_sizes[b])
        shapes |= _conv(f"{p}.blocks.{b}.tdnn2.conv", width, width, 1)
        shapes |= _conv(f"{p}.blocks.{b}.se_block.conv1", c.se_channels, width, 1)
        shapes |= _conv(f"{p}.blocks.{b}.se_block.conv2", width, c.se_channels, 1)
    last = c.channels[-1]
    shapes |= _conv(f"{p}.mfa.conv", last, last, c.kernel_sizes[-1])
    shapes |= _conv(f"{p}.asp.tdnn.conv", c.attention_channels, 3 * last, 1)
    shapes |= _conv(f"{p}.asp.conv", last, c.attention_channels, 1)
    return shapes | _conv(f"{p}.fc", c.enc_dim, 2 * last, 1)


def _layer_scaled_attention(layer: str, hidden: int, q: int, kv: int) -> Shapes:
    return {
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (q, hidden),
        f"{layer}.self_attn.k_proj.weight": (kv, hidden),
        f"{layer}.self_attn.v_proj.weight": (kv, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, q),
        f"{layer}.self_attn_layer_scale.scale": (hidden,),
        f"{layer}.mlp_layer_scale.scale": (hidden,),
    }


def vocoder_tensors(codec: CodecConfig) -> Shapes:
    """The speech tokenizer's decoder half. `input_proj` is stored but never used when decoding."""
    c = codec.vocoder
    shapes: Shapes = {}
    for quantizer, layers in (("rvq_first", 1), ("rvq_rest", c.num_quantizers - 1)):
        q = f"decoder.quantizer.{quantizer}"
        shapes[f"{q}.input_proj.weight"] = (c.codebook_dim // 2, c.codebook_dim, 1)
        shapes[f"{q}.output_proj.weight"] = (c.codebook_dim, c.codebook_dim // 2, 1)
        for i in range(layers):
            shapes[f"{q}.vq.layers.{i}._codebook.cluster_usage"] = (c.codebook_size,)
            shapes[f"{q}.vq.layers.{i}._codebook.embedding_sum"] = (c.codebook_size, c.codebook_dim // 2)
    shapes |= _conv("decoder.pre_conv.conv", c.latent_dim, c.codebook_dim, 3)
    pre, width = "decoder.pre_transformer", c.num_heads * c.head_dim
    shapes |= _conv(f"{pre}.input_proj", c.hidden_size, c.latent_dim)
    shapes |= _conv(f"{pre}.output_proj", c.latent_dim, c.hidden_size)
    shapes[f"{pre}.norm.weight"] = (c.hidden_size,)
    for i in range(c.num_layers):
        layer = f"{pre}.layers.{i}"
        shapes |= _layer_scaled_attention(layer, c.hidden_size, width, width) | {
            f"{layer}.mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
            f"{layer}.mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            f"{layer}.mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }
    latent = c.latent_dim
    for i, ratio in enumerate(c.upsampling_ratios):
        block = f"decoder.upsample.{i}"
        shapes |= _conv(f"{block}.0.conv", latent, latent, ratio, transposed=True)
        shapes |= _conv(f"{block}.1.dwconv.conv", latent, 1, 7)
        shapes |= _conv(f"{block}.1.pwconv1", 4 * latent, latent) | _conv(f"{block}.1.pwconv2", latent, 4 * latent)
        shapes |= {f"{block}.1.{name}": (latent,) for name in ("gamma", "norm.weight", "norm.bias")}
    channels = c.decoder_dim
    shapes |= _conv("decoder.decoder.0.conv", channels, latent, 7)
    for i, rate in enumerate(c.upsample_rates, start=1):
        block = f"decoder.decoder.{i}.block"
        shapes |= {f"{block}.0.{name}": (channels,) for name in ("alpha", "beta")}
        shapes |= _conv(f"{block}.1.conv", channels, channels // 2, 2 * rate, transposed=True)
        channels //= 2
        for unit in (2, 3, 4):
            for act in ("act1", "act2"):
                shapes |= {f"{block}.{unit}.{act}.{name}": (channels,) for name in ("alpha", "beta")}
            shapes |= _conv(f"{block}.{unit}.conv1.conv", channels, channels, 7)
            shapes |= _conv(f"{block}.{unit}.conv2.conv", channels, channels, 1)
    last = len(c.upsample_rates) + 1
    shapes |= {f"decoder.decoder.{last}.{name}": (channels,) for name in ("alpha", "beta")}
    return shapes | _conv(f"decoder.decoder.{last + 1}.conv", 1, channels, 7)


def codec_encoder_tensors(codec: CodecConfig) -> Shapes:
    """The speech tokenizer's encoder half: a Mimi model without its upsampling and decoder parts."""
    e = codec.encoder
    shapes: Shapes = {}
    width, index = e["num_filters"], 1
    shapes |= _conv("encoder.encoder.layers.0.conv", width, e["audio_channels"], e["kernel_size"])
    for ratio in reversed(e["upsampling_ratios"]):
        inner = width // e["compress"]
        for _ in range(e["num_residual_layers"]):
            block = f"encoder.encoder.layers.{index}.block"
            shapes |= _conv(f"{block}.1.conv", inner, width, e["residual_kernel_size"])
            shapes |= _conv(f"{block}.3.conv", width, inner, 1)
            index += 1
        index += 1  # an ELU, which has no tensors
        shapes |= _conv(f"encoder.encoder.layers.{index}.conv", 2 * width, width, 2 * ratio)
        index, width = index + 1, 2 * width
    index += 1  # the last ELU
    hidden = e["hidden_size"]
    shapes |= _conv(f"encoder.encoder.layers.{index}.conv", hidden, width, e["last_kernel_size"])
    q, kv = e["num_attention_heads"] * e["head_dim"], e["num_key_value_heads"] * e["head_dim"]
    for i in range(e["num_hidden_layers"]):
        layer = f"encoder.encoder_transformer.layers.{i}"
        shapes |= _layer_scaled_attention(layer, hidden, q, kv) | {
            f"{layer}.input_layernorm.bias": (hidden,),
            f"{layer}.post_attention_layernorm.bias": (hidden,),
            f"{layer}.mlp.fc1.weight": (e["intermediate_size"], hidden),
            f"{layer}.mlp.fc2.weight": (hidden, e["intermediate_size"]),
        }
    shapes |= _conv("encoder.downsample.conv", hidden, hidden, 4, bias=False)
    semantic, inner = e["num_semantic_quantizers"], e["vector_quantization_hidden_dimension"]
    for name, layers in (("semantic", semantic), ("acoustic", e["num_quantizers"] - semantic)):
        q_name = f"encoder.quantizer.{name}_residual_vector_quantizer"
        shapes |= _conv(f"{q_name}.input_proj", inner, hidden, 1, bias=False)
        shapes |= _conv(f"{q_name}.output_proj", hidden, inner, 1, bias=False)
        for i in range(layers):
            shapes[f"{q_name}.layers.{i}.codebook.initialized"] = (1,)
            shapes[f"{q_name}.layers.{i}.codebook.cluster_usage"] = (e["codebook_size"],)
            shapes[f"{q_name}.layers.{i}.codebook.embed_sum"] = (e["codebook_size"], e["codebook_dim"])
    return shapes


def expected_tensors(config: ModelConfig) -> tuple[Shapes, Shapes]:
    """Every tensor name and shape of (the main file, the speech tokenizer file)."""
    main = talker_tensors(config.talker)
    if config.speaker_encoder:
        main |= speaker_encoder_tensors(config.speaker_encoder)
    return main, vocoder_tensors(config.codec) | codec_encoder_tensors(config.codec)


# ---------------------------------------------------------------- files


def _safetensors_files(folder: Path) -> list[Path]:
    """The single file, or the shards that the index names (names only: no path may leave the folder)."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
        hint = f"; {others[0]} is a pickle and is never opened, convert it to safetensors" if others else ""
        raise CheckpointError(f"{folder}: neither model.safetensors nor {index.name} is there{hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a valid index: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: shard {name!r} must be the plain name of a .safetensors file")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: shard named by {index.name} is missing")
    return [folder / name for name in names]


def _read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of one safetensors file; the file's length must agree with its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: not a safetensors file, or cut off ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: (t["dtype"], tuple(t["shape"])) for name, t in header.items()}
            end = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise CheckpointError(f"{path}: broken safetensors header") from None
    if size != end:
        raise CheckpointError(f"{path}: cut off or padded: {end} bytes expected, found {size}")
    return tensors


def _check_tensors(folder: Path, expected: Shapes) -> dict[str, Path]:
    """Name -> file, after every name, shape and dtype was compared; scales of quantised tensors are among them."""
    where: dict[str, Path] = {}
    headers = {path: _read_header(path) for path in _safetensors_files(folder)}
    dtypes = {name: dtype for header in headers.values() for name, (dtype, _) in header.items()}
    quantized = {name for name, dtype in dtypes.items() if dtype == _FP8 and part_of(name)}
    _check_parts(folder, expected, dtypes, quantized)
    expected = expected | {name + SCALE: expected[name][:1] for name in quantized & expected.keys()}
    for path, header in headers.items():
        for name, (dtype, shape) in sorted(header.items()):
            if name in where:
                raise CheckpointError(f"{path}: tensor {name!r} is also in {where[name].name}")
            if name not in expected:
                raise CheckpointError(f"{path}: tensor {name!r} is not expected with this config.json")
            if shape != expected[name]:
                raise CheckpointError(
                    f"{path}: tensor {name!r}: expected shape {list(expected[name])}, found {list(shape)}"
                )
            allowed = (_FP8,) if name in quantized else ("F32",) if name.endswith(SCALE) else _DTYPES
            if dtype not in allowed:
                raise CheckpointError(f"{path}: tensor {name!r}: expected dtype {' or '.join(allowed)}, found {dtype}")
            where[name] = path
    for name, shape in expected.items():
        if name not in where:
            raise CheckpointError(f"{folder}: tensor {name!r} {list(shape)} is missing")
    return where


def _check_parts(folder: Path, expected: Shapes, dtypes: Mapping[str, str], quantized: set[str]) -> None:
    """A part (fp8.PARTS) is quantised as a whole or not at all."""
    parts = {part_of(name) for name in quantized}
    for name in expected:
        if part_of(name) in parts and name in dtypes and name not in quantized:
            other = next(n for n in sorted(quantized) if part_of(n) == part_of(name))
            raise CheckpointError(
                f"{folder}: {other!r} is {_FP8} and {name!r} is {dtypes[name]}: quantise all of a part, or none"
            )


def _load(
    where: Mapping[str, Path],
    names: Iterable[str],
    device: torch.device,
    dtype: torch.dtype,
    as_stored: Collection[str] = (),
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(where[name], []).append(name)
    for path, in_file in by_file.items():
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in in_file:
                    tensor = file.get_tensor(name)
                    tensors[name] = tensor if name in as_stored else tensor.to(dtype)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None
    return tensors


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose names, shapes and dtypes were checked; tensors are read on demand.

    Attributes:
        folder: where it lies.
        config: what its JSON files say.
        fp8: parts (fp8.PARTS) that it holds as E4M3.
        fingerprint: 16 hex digits over config.json, the talker's final norm and some embedding rows; a saved
            `Voice` carries it, so that a voice is not used with another model.
    """

    folder: Path
    config: ModelConfig
    fp8: frozenset[str]
    fingerprint: str
    _main: Mapping[str, Path] = field(repr=False)
    _codec: Mapping[str, Path] = field(repr=False)

    @classmethod
    def open(cls, model: str | Path) -> "Checkpoint":
        """Find `model` (folder, hub id or "demo") and check it; no tensor is read yet.

        Raises:
            CheckpointNotFoundError: nothing is there under that name.
            CheckpointError: what is there does not hold together; the first offending name is given.
        """
        folder = find_checkpoint(model)
        try:
            return cls._open_folder(folder)
        except CheckpointError as error:
            if str(model) == DEMO or Path(model).expanduser().is_dir():
                raise
            raise CheckpointError(
                f"{error}. This is the hub cache's copy of {model}; "
                f"if its download was interrupted: hf download {model}"
            ) from error

    @classmethod
    def _open_folder(cls, folder: Path) -> "Checkpoint":
        config = ModelConfig.from_folder(folder)
        main, codec = expected_tensors(config)
        main_files = _check_tensors(folder, main)
        codec_files = _check_tensors(folder / "speech_tokenizer", codec)
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for name in ("talker.model.norm.weight", "talker.model.codec_embedding.weight"):
            try:
                with safe_open(main_files[name], framework="pt") as file:
                    digest.update(file.get_slice(name)[:8].float().numpy().tobytes())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{main_files[name]}: {error}") from None
        return cls(folder, config, parts_in(main_files), digest.hexdigest()[:16], main_files, codec_files)

    def talker(self, device: torch.device, dtype: torch.dtype, fp8: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """Every `talker.*` tensor. The text's embeddings, a third of all bytes of which a text needs a few rows, stay
        on the CPU; copied there, because rows of a mapped file would be read when they are first spoken.

        Args:
            dtype: of what is not FP8; stored FP8 tensors that are not in `fp8` are dequantised into it.
            fp8: parts (fp8.PARTS) that come as float8_e4m3fn with their scales, quantised unless they are stored so.

        Raises:
            CheckpointError: a stored scale or FP8 weight is no number, or a weight cannot be quantised.
        """
        table, cpu = "talker.model.text_embedding.weight", torch.device("cpu")
        names = [name for name in self._main if name.startswith("talker.") and name != table]
        parts = fp8 | self.fp8
        as_stored = {name for name in names if part_of(name.removesuffix(SCALE)) in parts}
        tensors = _load(self._main, names, device, dtype, as_stored)
        for name in [name.removesuffix(SCALE) for name in names if name.endswith(SCALE)]:
            wrong = flaw(tensors[name], tensors[name + SCALE])
            if wrong:
                raise CheckpointError(f"{self._main[name]}: tensor {name!r}: {wrong}")
            if part_of(name) not in fp8:
                tensors[name] = dequantize(tensors[name], tensors.pop(name + SCALE), dtype)
        quantize_parts(tensors, fp8)
        text = _load(self._main, [table], cpu, dtype)[table]
        mapped = device.type != "cpu" and dtype == torch.bfloat16  # else the conversion has copied it
        return tensors | {table: text.clone() if mapped else text}

    @property
    def files(self) -> tuple[list[Path], list[Path]]:
        """With the tensors that were checked: of the main model, of the speech tokenizer."""
        return sorted(set(self._main.values())), sorted(set(self._codec.values()))

    def speaker_encoder(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every `speaker_encoder.*` tensor (Base checkpoints; empty for the others)."""
        return _load(self._main, (n for n in self._main if n.startswith("speaker_encoder.")), device, dtype)

    def vocoder(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every `decoder.*` tensor of the speech tokenizer."""
        return _load(self._codec, (n for n in self._codec if n.startswith("decoder.")), device, dtype)

    def codec_encoder(self) -> dict[str, Tensor]:
        """Every `encoder.*` tensor of the speech tokenizer, fp32 on the CPU, without the prefix."""
        names = [n for n in self._codec if n.startswith("encoder.")]
        tensors = _load(self._codec, names, torch.device("cpu"), torch.float32)
        return {name.removeprefix("encoder."): tensor for name, tensor in tensors.items()}


# ---------------------------------------------------------------- where a checkpoint lies


def find_checkpoint(model: str | Path) -> Path:
    """The folder of `model`: "demo" (bundled), an existing folder, or a hub id, which is downloaded.

    Downloads go through huggingface_hub: its cache, its progress bars and its variables (HF_HOME,
    HF_HUB_OFFLINE, HF_TOKEN) apply. Only JSON, tokenizer text and safetensors files are fetched.

    Raises:
        CheckpointNotFoundError: says what was looked for, where, and which command gets it.
    """
    return _local(model) or _download(model)


def find_cached(model: str | Path) -> Path | None:
    """The folder of `model` if it is on this machine, without asking the network.

    Raises:
        CheckpointNotFoundError: it is neither a folder nor a hub id.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = _local(model)
    if folder is None:
        config = try_to_load_from_cache(model, "config.json")
        folder = Path(config).parent if isinstance(config, str) else None
    return folder


def _local(model: str | Path) -> Path | None:
    """A folder or the bundled voice; None for what looks like a hub id."""
    if not isinstance(model, (str, Path)) or not str(model).strip():
        raise CheckpointNotFoundError(f"model must be a folder, a hub id or {DEMO!r}, got {model!r}")
    if str(model) == DEMO:
        return DEMO_FOLDER
    try:
        path = Path(model).expanduser()
        found, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a NUL, of an unknown user
        raise CheckpointNotFoundError(f"model {str(model)[:99]!r} cannot be a folder: {error}") from None
    if is_folder:
        return path
    if found:
        raise CheckpointNotFoundError(f"{path} is a file; a checkpoint is a folder that holds config.json")
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise CheckpointNotFoundError(
            f"no folder {str(model)!r}. Give a checkpoint folder, {DEMO!r}, or a hub id such as {PUBLISHED[1]!r}"
        )
    return None


def _download(repo_id: str) -> Path:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(HUB_FILES)))
    except HFValidationError as error:
        raise CheckpointNotFoundError(f"{repo_id!r} is neither a folder nor a valid hub id: {error}") from None
    except LocalEntryNotFoundError as error:
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        reason = str(error).partition("\n")[0]
        raise CheckpointNotFoundError(
            f"{repo_id!r} is not a folder here, and not in the hub cache {constants.HF_HUB_CACHE}, and could not be "
            f"downloaded{offline}: {reason}. On a machine with a network: hf download {repo_id}"
        ) from error
    except (HfHubHTTPError, OSError) as error:  # no such repository, no access, no space
        raise CheckpointNotFoundError(
            f"{repo_id!r} is not a folder here, and its download into {constants.HF_HUB_CACHE} failed: {error}"
        ) from error
