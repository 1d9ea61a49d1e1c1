"""What speech_tokenizer/config.json says: the codec that turns codes into PCM and reference audio into codes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qwen_megakernel.checkpoint.json_object import MOST, MOST_LAYERS, JsonObject
from qwen_megakernel.errors import CheckpointError

CODEC_TYPE = "qwen3_tts_tokenizer_12hz"

_VOCODER_DIMS = "codebook_size codebook_dim latent_dim hidden_size intermediate_size head_dim decoder_dim".split()
_ENCODER_COUNTS = ("num_hidden_layers", "num_quantizers", "num_residual_layers", "num_semantic_quantizers")
_ENCODER_DIMS = (
    "audio_channels codebook_dim codebook_size compress head_dim hidden_size intermediate_size kernel_size "
    "last_kernel_size num_attention_heads num_filters num_key_value_heads residual_kernel_size "
    "vector_quantization_hidden_dimension"
).split()
"""The keys of `encoder_config` that decide the names and shapes of its tensors."""
ENCODER_KEYS = (*_ENCODER_COUNTS, *_ENCODER_DIMS, "upsampling_ratios")

_ENCODER_SETTINGS: dict[str, type] = {
    **dict.fromkeys(("norm_eps", "rope_theta", "layer_scale_initial_scale", "trim_right_ratio", "frame_rate"), float),
    **dict.fromkeys(("sampling_rate", "dilation_growth_rate", "upsample_groups", "max_position_embeddings"), int),
    **dict.fromkeys(("use_causal_conv", "use_conv_shortcut", "attention_bias"), bool),
}
"""Further keys of `encoder_config` that change what the encoder computes."""


@dataclass(frozen=True)
class VocoderConfig:
    """Dims of the vocoder, the decoder half of the speech tokenizer: codes to 24 kHz PCM."""

    codebook_size: int
    codebook_dim: int
    num_quantizers: int
    latent_dim: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int
    decoder_dim: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)

    @classmethod
    def from_json(cls, js: JsonObject) -> "VocoderConfig":
        js.only("hidden_act", "silu")
        js.only("attention_bias", False)
        js.only("num_semantic_quantizers", 1)
        js.only("num_key_value_heads", js.size("num_attention_heads"))
        return cls(
            **{key: js.size(key) for key in _VOCODER_DIMS},
            num_quantizers=js.size("num_quantizers", most=MOST_LAYERS),
            num_layers=js.size("num_hidden_layers", most=MOST_LAYERS),
            num_heads=js.size("num_attention_heads"),
            rms_norm_eps=js.positive("rms_norm_eps"),
            rope_theta=js.positive("rope_theta"),
            sliding_window=js.size("sliding_window", least=2, most=65536),
            upsample_rates=js.sizes("upsample_rates"),
            upsampling_ratios=js.sizes("upsampling_ratios"),
        )


@dataclass(frozen=True)
class CodecConfig:
    """The whole speech tokenizer. The encoder half is transformers' Mimi and keeps its own config."""

    sample_rate: int
    vocoder: VocoderConfig
    encoder: Mapping[str, Any] = field(hash=False)
    """Of `encoder_config`: the keywords that `transformers.MimiConfig` gets."""

    @classmethod
    def from_json(cls, js: JsonObject) -> "CodecConfig":
        js.require_model_type(CODEC_TYPE)
        vocoder = VocoderConfig.from_json(js.child("decoder_config"))
        for key in ("decode_upsample_rate", "encode_downsample_rate"):
            if js.size(key) != vocoder.samples_per_frame:
                raise CheckpointError(
                    f"{js.where}: {key} must be {vocoder.samples_per_frame}, the product of the decoder's rates, "
                    f"found {js.size(key)}"
                )
        rate = js.size("output_sample_rate", least=8000, most=192_000)
        js.only("input_sample_rate", rate)
        js.only("encoder_valid_num_quantizers", vocoder.num_quantizers)
        return cls(sample_rate=rate, vocoder=vocoder, encoder=_encoder_config(js.child("encoder_config")))


def _encoder_config(js: JsonObject) -> Mapping[str, Any]:
    """The sizes and settings of the encoder, and no other keys. transformers would follow more than we know: some name
    code to fetch."""
    for key in _ENCODER_COUNTS:
        js.size(key, most=MOST_LAYERS)
    for key in _ENCODER_DIMS:
        js.size(key)
    js.sizes("upsampling_ratios")
    js.size("num_labels", 2, most=MOST_LAYERS)  # the reference implementation makes a name for each label
    for key, value in js.raw.items():
        if isinstance(value, int) and abs(value) > MOST:
            raise CheckpointError(f"{js.where}: {key} must be at most {MOST}, found {value}")
    js.only("hidden_act", "gelu")
    js.only("pad_mode", "constant", "replicate")
    settings = {key: js.get(key, kind) for key, kind in _ENCODER_SETTINGS.items() if js.raw.get(key) is not None}
    if js.get("rope_parameters", dict, None) is not None:  # where transformers 5 writes the rotary base
        rope = js.child("rope_parameters")
        rope.only("rope_type", "default")
        settings["rope_theta"] = rope.positive("rope_theta")
    words = {key: js.raw[key] for key in ("hidden_act", "pad_mode") if key in js}
    return {key: js.raw[key] for key in ENCODER_KEYS} | settings | words
