"""The JSON files of a synthetic checkpoint (synthetic.py), with the keys of the published ones."""

from dataclasses import dataclass
from typing import Any

REAL_SIZES = ("0.6b", "1.7b")
"""The sizes with published dims; the others are small, for tests."""

PUBLISHED_IDS = {"user": 872, "system": 8948, "assistant": 77091}
PUBLISHED_VOCAB = 151643
_LANGUAGE_OFFSETS = dict(
    chinese=7, english=2, german=5, italian=22, portuguese=23, spanish=6, japanese=10, korean=16, french=13, russian=21
)
_DIALECT_OFFSETS = {"beijing_dialect": 26, "sichuan_dialect": 14}
_SPEAKER_OFFSETS = dict(
    serena=1018, vivian=1017, uncle_fu=962, ryan=1013, aiden=813, ono_anna=825, sohee=816, eric=827, dylan=830
)
_SPEAKER_DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}


@dataclass(frozen=True)
class _Dims:
    """The dims in which the sizes differ."""

    talker: dict  # keys of the stack's config
    predictor: dict  # the same
    heads: dict  # keys of both stacks' configs; those of `predictor` win
    sections: list[int]  # M-RoPE's
    text_hidden: int
    text_vocab: int
    codes: int  # entries of a codebook
    special: int  # id of the first special token; all text tokens are below it

    @classmethod
    def of(cls, size: str) -> "_Dims":
        if size in REAL_SIZES:
            hidden = 1024 if size == "0.6b" else 2048
            return cls(
                talker={"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 28},
                predictor={"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5},
                heads={"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
                sections=[24, 20, 20],
                text_hidden=2048,
                text_vocab=151936,
                codes=2048,
                special=PUBLISHED_VOCAB,
            )
        if size == "demo":
            talker = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3}
            return cls(
                talker=talker,
                predictor=talker | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
                heads={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
                sections=[24, 20, 20],
                text_hidden=48,
                text_vocab=750,
                codes=128,
                special=700,
            )
        hidden = 96 if size == "tiny-adapter" else 64
        return cls(
            talker={"hidden_size": hidden, "intermediate_size": 160, "num_hidden_layers": 3},
            predictor={"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
            heads={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
            sections=[6, 5, 5],
            text_hidden=48,
            text_vocab=750,
            codes=256,
            special=700,
        )

    @property
    def stack(self) -> dict:
        """The keys that both stacks' configs share."""
        return self.heads | {
            "attention_bias": False,
            "attention_dropout": 0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "num_code_groups": 16,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_cache": True,
            "use_sliding_window": False,
        }


def main_config(size: str, variant: str) -> dict:
    """config.json of a size and a variant."""
    dims = _Dims.of(size)
    special = dims.special
    config: dict[str, Any] = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "assistant_token_id": PUBLISHED_IDS["assistant"],  # as published; nothing reads it
        "im_start_token_id": special + 1,
        "im_end_token_id": special + 2,
        "tts_pad_token_id": special + 28,
        "tts_bos_token_id": special + 29,
        "tts_eos_token_id": special + 30,
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        # The size label decides whether CustomVoice honours `instruct`.
        "tts_model_size": "1b7" if size in ("tiny-adapter", "1.7b") else "0b6",
        "tts_model_type": variant,
        "talker_config": _talker_config(dims, variant),
        "transformers_version": "4.57.3",
    }
    if variant == "base":
        config["speaker_encoder_config"] = {"enc_dim": dims.talker["hidden_size"], "sample_rate": 24000}
        if size not in REAL_SIZES:
            config["speaker_encoder_config"] |= {
                "enc_channels": [32, 32, 32, 32, 96],
                "enc_attention_channels": 16,
                "enc_se_channels": 16,
            }
    return config


def _talker_config(dims: _Dims, variant: str) -> dict:
    codes, custom = dims.codes, variant == "custom_voice"
    names = _LANGUAGE_OFFSETS | (_DIALECT_OFFSETS if custom else {})
    speakers = _SPEAKER_OFFSETS if custom else {}
    keys = {
        "code_predictor_config": _predictor_config(dims),
        "codec_pad_id": codes + 100,
        "codec_bos_id": codes + 101,
        "codec_eos_token_id": codes + 102,
        "codec_think_id": codes + 106,
        "codec_nothink_id": codes + 107,
        "codec_think_bos_id": codes + 108,
        "codec_think_eos_id": codes + 109,
        "codec_language_id": {name: codes + offset for name, offset in names.items()},
        "spk_id": {name: codes + offset for name, offset in speakers.items()},
        "spk_is_dialect": {name: _SPEAKER_DIALECTS.get(name, False) for name in speakers},
        "max_position_embeddings": 32768,
        "model_type": "qwen3_tts_talker",
        "position_id_per_seconds": 13,
        "rope_scaling": {
            "interleaved": True,
            "mrope_section": dims.sections,
            "rope_type": "default",
            "type": "default",
        },
        "text_hidden_size": dims.text_hidden,
        "text_vocab_size": dims.text_vocab,
        "vocab_size": codes + 1024,
    }
    return dims.stack | dims.talker | keys


def _predictor_config(dims: _Dims) -> dict:
    keys = {
        "layer_types": ["full_attention"] * dims.predictor["num_hidden_layers"],
        "max_length": 20,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "model_type": "qwen3_tts_talker_code_predictor",
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": dims.codes,
    }
    return dims.stack | dims.predictor | keys


def codec_config(real_dims: bool, codes: int) -> dict:
    """speech_tokenizer/config.json with the published dims or toy ones; `codes` are the entries of a codebook."""
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": 16,
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "decode_upsample_rate": 1920,
        "encode_downsample_rate": 1920,
        "decoder_config": _decoder_config(real_dims, codes),
        "encoder_config": _encoder_config(real_dims, codes),
        "transformers_version": "4.57.3",
    }


def _decoder_config(real_dims: bool, codes: int) -> dict:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "latent_dim": 1024 if real_dims else 32,
        "codebook_dim": 512 if real_dims else 32,
        "codebook_size": codes,
        "decoder_dim": 1536 if real_dims else 64,
        "hidden_act": "silu",
        "hidden_size": 512 if real_dims else 24,
        "intermediate_size": 1024 if real_dims else 48,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "head_dim": 64 if real_dims else 8,
        "num_attention_heads": 16 if real_dims else 4,
        "num_hidden_layers": 8 if real_dims else 2,
        "num_key_value_heads": 16 if real_dims else 4,
        "num_quantizers": 16,
        "num_semantic_quantizers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "semantic_codebook_size": 4096,
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "vector_quantization_hidden_dimension": 512 if real_dims else 32,
    }


def _encoder_config(real_dims: bool, codes: int) -> dict:
    return {
        "_frame_rate": 12.5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "audio_channels": 1,
        "codebook_dim": 256 if real_dims else 16,
        "codebook_size": codes,
        "compress": 2,
        "dilation_growth_rate": 2,
        "head_dim": 64 if real_dims else 8,
        "hidden_act": "gelu",
        "hidden_size": 512 if real_dims else 32,
        "initializer_range": 0.02,
        "intermediate_size": 2048 if real_dims else 64,
        "kernel_size": 7,
        "last_kernel_size": 3,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "norm_eps": 1e-05,
        "normalize": False,
        "num_attention_heads": 8 if real_dims else 4,
        "num_filters": 64 if real_dims else 4,
        "num_hidden_layers": 8 if real_dims else 2,
        "num_key_value_heads": 8 if real_dims else 4,
        "num_quantizers": 32,
        "num_residual_layers": 1,
        "num_semantic_quantizers": 1,
        "pad_mode": "constant",
        "residual_kernel_size": 3,
        "rope_theta": 10000.0,
        "sampling_rate": 24000,
        "sliding_window": 250,
        "trim_right_ratio": 1.0,
        "upsample_groups": 512 if real_dims else 32,
        "upsampling_ratios": [8, 6, 5, 4],
        "use_cache": False,
        "use_causal_conv": True,
        "use_conv_shortcut": False,
        "use_streaming": False,
        "vector_quantization_hidden_dimension": 256 if real_dims else 16,
    }


GENERATION = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_p": 1.0,
    "subtalker_top_k": 50,
    "max_new_tokens": 8192,
}
PREPROCESSOR = {
    "padding_side": "left",
    "padding_value": 0.0,
    "processor_class": "Qwen3TTSProcessor",
    "return_attention_mask": True,
}
CODEC_PREPROCESSOR = {
    "chunk_length_s": None,
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "overlap": None,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 24000,
}
