"""A checkpoint's configuration as frozen dataclasses.

Everything comes from the checkpoint's own config.json, generation_config.json and speech_tokenizer/config.json
(codec_config.py). The reference implementation's class defaults describe no published model (20 layers instead of 28).
So a missing dim is an error. Its other defaults are filled in: rotary base, RMSNorm's epsilon, the text's special ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from qwen_megakernel.checkpoint.codec_config import CODEC_TYPE, CodecConfig
from qwen_megakernel.checkpoint.foreign import check_format
from qwen_megakernel.checkpoint.json_object import MOST, MOST_LAYERS, JsonObject, read_json
from qwen_megakernel.choices import VARIANTS
from qwen_megakernel.errors import CheckpointError, SamplingError
from qwen_megakernel.sampling_params import SamplingParams

MODEL_TYPE = "qwen3_tts"

_SPECIAL_IDS = {"im_start_id": 151644, "im_end_id": 151645}
_SPECIAL_IDS |= {"tts_pad_id": 151671, "tts_bos_id": 151672, "tts_eos_id": 151673}
"""The reference implementation's defaults, which describe every published model."""

MIN_FRAMES = 2
"""End of speech is not allowed as the first or second code 0 (min_new_tokens of the reference implementation)."""


@dataclass(frozen=True)
class StackConfig:
    """Dims of one Qwen3 decoder stack (talker or code predictor)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def from_json(cls, js: JsonObject) -> "StackConfig":
        js.only("hidden_act", "silu")
        js.only("attention_bias", False)
        js.only("use_sliding_window", False)
        js.only("sliding_window", None)
        config = cls(
            **{key: js.size(key) for key in ("hidden_size", "intermediate_size", "head_dim")},
            num_layers=js.size("num_hidden_layers", most=MOST_LAYERS),
            num_heads=js.size("num_attention_heads"),
            num_kv_heads=js.size("num_key_value_heads"),
            rms_norm_eps=js.positive("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(js, js.size("head_dim")),
        )
        if config.num_heads % config.num_kv_heads or config.head_dim % 2:
            raise CheckpointError(
                f"{js.where}: num_attention_heads must be a multiple of num_key_value_heads and head_dim even, "
                f"found {config.num_heads}, {config.num_kv_heads}, {config.head_dim}"
            )
        if set(js.get("layer_types", list, [])) - {"full_attention"}:
            raise CheckpointError(f"{js.where}: layer_types must all be 'full_attention'")
        return config


_ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""The rotary settings: transformers 4 writes the first, transformers 5 the second."""


def _rope_settings(js: JsonObject) -> list[JsonObject]:
    return [js.child(key) for key in _ROPE_KEYS if js.get(key, dict, None) is not None]


def _rope_theta(js: JsonObject, head_dim: int) -> float:
    """The rotary base. It may stand beside the rotary settings or in them; the reference's default is 10,000. What is
    said twice must be the same."""
    said: dict[str, Any] = {"rope_theta": js.positive("rope_theta")} if "rope_theta" in js else {}
    for rope in _rope_settings(js):
        _check_rope(rope, head_dim)
        for key, value in rope.raw.items():
            value = rope.positive(key) if key == "rope_theta" else value
            if said.setdefault(key, value) != value:
                raise CheckpointError(
                    f"{js.where}: {key} is {said[key]!r} and, in {rope.where.rpartition(' ')[2]}, {value!r}: write the "
                    "one that the model was trained with"
                )
    return float(said.get("rope_theta", 10_000.0))


def _check_rope(rope: JsonObject, head_dim: int) -> None:
    """Accept only rotary settings under which all M-RoPE axes hold the same position.

    The model gives every row one position on all three axes. So sections that cover the head exactly are plain one-axis
    RoPE, bit for bit. Settings that would make the axes differ or rescale the angles are refused.
    """
    known = {"interleaved", "mrope_interleaved", "mrope_section", "rope_type", "type", "rope_theta", "factor"}
    for key in rope.raw:
        if key not in known:
            raise CheckpointError(f"{rope.where}: key {key!r} is not supported (known: {', '.join(sorted(known))})")
    rope.only("rope_type", "default")
    rope.only("type", "default")
    rope.only("factor", None, 1.0)
    if "mrope_section" in rope:
        sections = rope.sizes("mrope_section")
        if len(sections) != 3 or sum(sections) != head_dim // 2:
            raise CheckpointError(
                f"{rope.where}: mrope_section must be 3 sizes that add up to head_dim/2 = {head_dim // 2}, "
                f"found {list(sections)}: positions would differ between the axes"
            )


@dataclass(frozen=True)
class CodePredictorConfig:
    """The stack that writes codes 1..15 of a frame."""

    stack: StackConfig
    vocab_size: int


@dataclass(frozen=True)
class TalkerConfig:
    """The stack that writes code 0 of every frame, its vocabularies and its special ids."""

    stack: StackConfig
    code_predictor: CodePredictorConfig
    vocab_size: int
    text_vocab_size: int
    text_hidden_size: int
    num_code_groups: int
    codec_pad_id: int
    codec_bos_id: int
    codec_eos_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    languages: Mapping[str, int]
    speakers: Mapping[str, int]
    dialects: Mapping[str, str]
    """Speaker name -> the dialect that replaces Chinese and automatic language for that speaker."""

    @property
    def named_languages(self) -> tuple[str, ...]:
        """The languages that a request may name, sorted. A dialect belongs to its speaker and cannot be requested."""
        return tuple(sorted(name for name in self.languages if "dialect" not in name))

    @property
    def first_suppressed_id(self) -> int:
        """Ids from here on are never sampled as code 0, except end of speech."""
        return self.vocab_size - 1024

    def same_speaker(self, name: str) -> str | None:
        """The first speaker with the id of speaker `name`, or None if that is `name` itself."""
        first = next(other for other, number in self.speakers.items() if number == self.speakers[name])
        return None if first == name else first

    @classmethod
    def from_json(cls, js: JsonObject) -> "TalkerConfig":
        js.only("model_type", "qwen3_tts_talker")
        if not any("mrope_section" in rope for rope in _rope_settings(js)):
            raise CheckpointError(f"{js.where}: {' or '.join(_ROPE_KEYS)} must have mrope_section, found neither")
        predictor = js.child("code_predictor_config")
        predictor.only("model_type", "qwen3_tts_talker_code_predictor")
        groups = js.size("num_code_groups", most=MOST_LAYERS)
        predictor.only("num_code_groups", groups)
        vocab = js.size("vocab_size")
        if vocab <= 1024:
            raise CheckpointError(f"{js.where}: vocab_size must be above 1024, found {vocab}")
        speakers = _id_table(js, "spk_id", vocab)
        # The reference implementation lower-cases what the user asks for but not its own table, so mixed-case names
        # of fine-tunes never match there. Here both sides are lower case.
        languages = _id_table(js, "codec_language_id", vocab)
        listed = js.get("spk_is_dialect", dict, {})
        dialects = {name.lower(): value.lower() for name, value in listed.items() if isinstance(value, str)}
        for name, dialect in dialects.items():
            if dialect not in languages:
                raise CheckpointError(
                    f"{js.where}: spk_is_dialect[{name!r}] names {dialect!r}, which codec_language_id lacks"
                )
        tags = ("pad", "bos", "think", "nothink", "think_bos", "think_eos")
        keys = {f"codec_{tag}_id": f"codec_{tag}_id" for tag in tags} | {"codec_eos_id": "codec_eos_token_id"}
        return cls(
            stack=StackConfig.from_json(js),
            code_predictor=CodePredictorConfig(StackConfig.from_json(predictor), predictor.size("vocab_size")),
            vocab_size=vocab,
            text_vocab_size=js.size("text_vocab_size"),
            text_hidden_size=js.size("text_hidden_size"),
            num_code_groups=groups,
            languages=languages,
            speakers=speakers,
            dialects=dialects,
            **_ids(js, keys, vocab),
        )


def _ids(js: JsonObject, keys: Mapping[str, str], vocab: int, defaults: Mapping[str, int] = {}) -> dict[str, int]:
    """A config's fields, by name -> their ids, which are below `vocab`. `keys`: name -> key in the file."""
    ids = {name: js.get(key, int, defaults.get(name, ...)) for name, key in keys.items()}
    for name, value in ids.items():
        if not 0 <= value < vocab:
            raise CheckpointError(f"{js.where}: {name} must be in 0..{vocab - 1}, found {value}")
    return ids


def _id_table(js: JsonObject, key: str, vocab: int) -> dict[str, int]:
    table: dict[str, int] = {}
    for name, value in js.get(key, dict).items():
        if type(value) is not int or not 0 <= value < vocab:
            raise CheckpointError(f"{js.where}: {key}[{name!r}] must be an id in 0..{vocab - 1}, found {value!r}")
        if table.setdefault(name.lower(), value) != value:
            raise CheckpointError(f"{js.where}: {key} has {name.lower()!r} twice; names must differ by more than case")
    return table


@dataclass(frozen=True)
class SpeakerEncoderConfig:
    """ECAPA-TDNN dims (Base checkpoints only). The published files name `enc_dim` alone. The other values are the class
    defaults of the reference implementation, which do describe the published speaker encoders."""

    enc_dim: int
    sample_rate: int
    mel_dim: int
    channels: tuple[int, ...]
    kernel_sizes: tuple[int, ...]
    dilations: tuple[int, ...]
    attention_channels: int
    res2net_scale: int
    se_channels: int

    @classmethod
    def from_json(cls, js: JsonObject) -> "SpeakerEncoderConfig":
        config = cls(
            enc_dim=js.size("enc_dim"),
            sample_rate=js.size("sample_rate", 24000),
            mel_dim=js.size("mel_dim", 128),
            channels=js.sizes("enc_channels", [512, 512, 512, 512, 1536]),
            kernel_sizes=js.sizes("enc_kernel_sizes", [5, 3, 3, 3, 1]),
            dilations=js.sizes("enc_dilations", [1, 2, 3, 4, 1]),
            attention_channels=js.size("enc_attention_channels", 128),
            res2net_scale=js.size("enc_res2net_scale", 8, most=MOST_LAYERS),
            se_channels=js.size("enc_se_channels", 128),
        )
        blocks = len(config.channels)
        if not blocks == len(config.kernel_sizes) == len(config.dilations) or blocks < 3:
            raise CheckpointError(
                f"{js.where}: enc_channels, enc_kernel_sizes and enc_dilations must be equally long, at least 3"
            )
        if sum(config.channels[1:-1]) != config.channels[-1]:
            raise CheckpointError(f"{js.where}: the last of enc_channels must be the sum of those it aggregates")
        return config


_DRAWS = SamplingParams.for_both(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05)
_FALLBACK_SAMPLING = replace(_DRAWS, do_sample=True, subtalker_dosample=True)
"""The defaults of the reference implementation, for a key that generation_config.json does not have."""


@dataclass(frozen=True)
class TextHead:
    """A head of the talker whose attention goes through the text as the text is spoken."""

    layer: int
    head: int
    offset_s: float  # seconds by which a token is heard later than the attention gets to it


@dataclass(frozen=True)
class ModelConfig:
    """Everything a checkpoint folder says about itself."""

    variant: str  # "base" (clones a voice), "custom_voice" (named speakers) or "voice_design" (described voice)
    size: str  # the checkpoint's own label, "0b6" or "1b7"
    im_start_id: int
    im_end_id: int
    tts_pad_id: int
    tts_bos_id: int
    tts_eos_id: int
    talker: TalkerConfig
    speaker_encoder: SpeakerEncoderConfig | None
    codec: CodecConfig
    sampling: SamplingParams
    max_frames: int  # one fewer than max_new_tokens: the last code 0 never becomes a frame
    random_weights: bool  # synthetic.py wrote it, so its speech ends by chance, if at all
    seconds_per_letter: Mapping[str, float]  # speaker -> the pace to begin with (speech/words.py); the published: none
    text_head: TextHead | None  # tells when words are spoken (engine/text_path.py); the published: none

    @property
    def honours_instruct(self) -> bool:
        """Does the model take `instruct`? VoiceDesign does; Base does not; CustomVoice does from 1.7B up. For 0.6B the
        reference implementation drops it."""
        if self.variant == "custom_voice":
            return self.size not in "0b6"  # "0b6" or any part of it, as the reference implementation tests it
        return self.variant == "voice_design"

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read the three JSON files of a checkpoint folder. Raises CheckpointError: a file is missing or broken, a key
        is missing or of the wrong kind, or the checkpoint is of a model that this package does not implement."""
        js = read_json(folder / "config.json")
        js.require_model_type(MODEL_TYPE)
        check_format(js)
        kind = js.get("tokenizer_type", str, CODEC_TYPE)
        if kind != CODEC_TYPE:
            raise CheckpointError(
                f"{js.where}: tokenizer_type must be {CODEC_TYPE!r} (the 12 Hz family), found {kind!r}"
            )
        variant = js.get("tts_model_type", str)
        if variant not in VARIANTS:
            raise CheckpointError(f"{js.where}: tts_model_type must be one of {VARIANTS}, found {variant!r}")
        talker = TalkerConfig.from_json(js.child("talker_config"))
        keys = {name: name.replace("_id", "_token_id") for name in _SPECIAL_IDS}
        special = _ids(js, keys, talker.text_vocab_size, _SPECIAL_IDS)
        encoder = SpeakerEncoderConfig.from_json(js.child("speaker_encoder_config")) if variant == "base" else None
        if encoder and encoder.enc_dim != talker.stack.hidden_size:
            raise CheckpointError(
                f"{js.where}: speaker_encoder_config.enc_dim must equal the talker's hidden_size "
                f"{talker.stack.hidden_size}, found {encoder.enc_dim}"
            )
        codec = CodecConfig.from_json(read_json(folder / "speech_tokenizer" / "config.json"))
        if encoder and encoder.sample_rate != codec.sample_rate:
            raise CheckpointError(
                f"{js.where}: speaker_encoder_config.sample_rate must be the speech tokenizer's {codec.sample_rate}, "
                f"found {encoder.sample_rate}"
            )
        if codec.vocoder.num_quantizers != talker.num_code_groups:
            raise CheckpointError(
                f"{js.where}: num_code_groups is {talker.num_code_groups}, but the speech tokenizer has "
                f"{codec.vocoder.num_quantizers} quantizers"
            )
        sizes = (talker.first_suppressed_id, talker.code_predictor.vocab_size, codec.vocoder.codebook_size)
        if len(set(sizes)) != 1:
            raise CheckpointError(
                f"{js.where}: talker vocab_size - 1024, code predictor vocab_size and codebook_size must be equal, "
                f"found {sizes}"
            )
        sampling, max_frames = _read_generation(folder / "generation_config.json")
        return cls(
            variant=variant,
            size=js.get("tts_model_size", str),
            talker=talker,
            speaker_encoder=encoder,
            codec=codec,
            sampling=sampling,
            max_frames=max_frames,
            random_weights=js.get("random_weights", bool, False),
            seconds_per_letter=_paces(js, talker),
            text_head=text_head_of(js.child("text_head"), talker.stack) if "text_head" in js else None,
            **special,
        )


def _paces(js: JsonObject, talker: TalkerConfig) -> dict[str, float]:
    table = JsonObject(js.get("seconds_per_letter", dict, {}), f"{js.where}: seconds_per_letter")
    paces = {name.lower(): table.positive(name) for name in table.raw}
    if any(name not in talker.speakers or not 0.01 <= pace <= 1 for name, pace in paces.items()):
        raise CheckpointError(f"{table.where} must give speakers of spk_id 0.01 to 1 seconds, found {table.raw!r}")
    return paces


def text_head_of(js: JsonObject, stack: StackConfig | None = None) -> TextHead:
    """Raises CheckpointError: a value is missing, or a talker of this size has no such head."""
    layers, heads = (stack.num_layers, stack.num_heads) if stack else (MOST_LAYERS, MOST)
    head = js.size("layer", least=0, most=layers - 1), js.size("head", least=0, most=heads - 1)
    return TextHead(*head, js.get("offset_s", float))


def _read_generation(path: Path) -> tuple[SamplingParams, int]:
    js = read_json(path)
    known = {f.name for f in fields(SamplingParams)} - {"seed"}
    values = {name: value for name, value in js.raw.items() if name in known}
    try:
        sampling = SamplingParams(**values).over(_FALLBACK_SAMPLING)
    except SamplingError as error:
        raise CheckpointError(f"{path}: {error}") from None
    tokens = js.get("max_new_tokens", int, 2048)
    if tokens < 2:
        raise CheckpointError(f"{path}: max_new_tokens must be at least 2 (one frame), found {tokens}")
    return sampling, tokens - 1
