"""The JSON files of a synthetic checkpoint (synthetic.py), with the keys of the published ones."""

from dataclasses import dataclass
from typing import Any

REAL_SIZES = ("0.6b", "1.7b")  # the sizes with published dims; the others are small, for tests

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
        talker = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
        predictor = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        small = {"text_hidden": 48, "text_vocab": 750, "special": 700}
        if size in REAL_SIZES:
            hidden = 1024 if size == "0.6b" else 2048
            talker = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 28}
            predictor = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5}
            heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
            large = {"text_hidden": 2048, "text_vocab": 151936, "special": PUBLISHED_VOCAB}
            return cls(talker, predictor, heads, sections=[24, 20, 20], codes=2048, **large)
        if size == "demo":
            talker = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3}
            predictor = talker | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
            return cls(talker, predictor, heads | {"head_dim": 128}, sections=[24, 20, 20], codes=128, **small)
        if size == "tiny-adapter":
            talker["hidden_size"] = 96
        return cls(talker, predictor, heads, sections=[6, 5, 5], codes=256, **small)

    @property
    def stack(self) -> dict:
        """The keys that both stacks' configs share."""
        keys = {"attention_bias": False, "attention_dropout": 0, "hidden_act": "silu", "initializer_range": 0.02}
        keys |= {"num_code_groups": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "sliding_window": None}
        return self.heads | keys | {"use_cache": True, "use_sliding_window": False}


def main_config(size: str, variant: str) -> dict:
    """config.json of a size and a variant."""
    dims = _Dims.of(size)
    # As published; nothing reads the assistant's id.
    ids = {"assistant_token_id": PUBLISHED_IDS["assistant"]}
    for name, offset in (("im_start", 1), ("im_end", 2), ("tts_pad", 28), ("tts_bos", 29), ("tts_eos", 30)):
        ids[f"{name}_token_id"] = dims.special + offset
    config: dict[str, Any] = {"architectures": ["Qwen3TTSForConditionalGeneration"], "model_type": "qwen3_tts"}
    config |= ids | {"tokenizer_type": "qwen3_tts_tokenizer_12hz", "transformers_version": "4.57.3"}
    # The size label decides whether CustomVoice honours `instruct`.
    config |= {"tts_model_size": "1b7" if size in ("tiny-adapter", "1.7b") else "0b6", "tts_model_type": variant}
    config["talker_config"] = _talker_config(dims, variant)
    if variant == "base":
        encoder = {"enc_dim": dims.talker["hidden_size"], "sample_rate": 24000}
        small = {"enc_channels": [32, 32, 32, 32, 96], "enc_attention_channels": 16, "enc_se_channels": 16}
        config["speaker_encoder_config"] = encoder if size in REAL_SIZES else encoder | small
    return config


def _talker_config(dims: _Dims, variant: str) -> dict:
    codes, custom = dims.codes, variant == "custom_voice"
    names = _LANGUAGE_OFFSETS | (_DIALECT_OFFSETS if custom else {})
    speakers = _SPEAKER_OFFSETS if custom else {}
    tags = {"pad_id": 100, "bos_id": 101, "eos_token_id": 102, "think_id": 106, "nothink_id": 107}
    tags |= {"think_bos_id": 108, "think_eos_id": 109}
    rope = {"interleaved": True, "mrope_section": dims.sections, "rope_type": "default", "type": "default"}
    keys: dict[str, Any] = {f"codec_{name}": codes + offset for name, offset in tags.items()}
    keys["codec_language_id"] = {name: codes + offset for name, offset in names.items()}
    keys["spk_id"] = {name: codes + offset for name, offset in speakers.items()}
    keys["spk_is_dialect"] = {name: _SPEAKER_DIALECTS.get(name, False) for name in speakers}
    keys |= {"max_position_embeddings": 32768, "model_type": "qwen3_tts_talker", "position_id_per_seconds": 13}
    keys |= {"text_hidden_size": dims.text_hidden, "text_vocab_size": dims.text_vocab, "vocab_size": codes + 1024}
    keys |= {"rope_scaling": rope, "code_predictor_config": _predictor_config(dims)}
    return dims.stack | dims.talker | keys


def _predictor_config(dims: _Dims) -> dict:
    layers = ["full_attention"] * dims.predictor["num_hidden_layers"]
    keys = {"layer_types": layers, "max_length": 20, "max_position_embeddings": 65536, "max_window_layers": 28}
    keys |= {"model_type": "qwen3_tts_talker_code_predictor", "rope_scaling": None, "tie_word_embeddings": False}
    return dims.stack | dims.predictor | keys | {"vocab_size": dims.codes}


def codec_config(real_dims: bool, codes: int) -> dict:
    """speech_tokenizer/config.json with the published dims or toy ones; `codes` are the entries of a codebook."""
    config: dict[str, Any] = {"architectures": ["Qwen3TTSTokenizerV2Model"], "model_type": "qwen3_tts_tokenizer_12hz"}
    config |= {"encoder_valid_num_quantizers": 16, "input_sample_rate": 24000, "output_sample_rate": 24000}
    config |= {"decode_upsample_rate": 1920, "encode_downsample_rate": 1920, "transformers_version": "4.57.3"}
    shared = {"attention_bias": False, "attention_dropout": 0.0, "codebook_size": codes, "num_semantic_quantizers": 1}
    shared |= {"layer_scale_initial_scale": 0.01, "max_position_embeddings": 8000}
    config["decoder_config"] = shared | _DECODER | (_REAL_DECODER if real_dims else _TOY_DECODER)
    config["encoder_config"] = shared | _ENCODER | (_REAL_ENCODER if real_dims else _TOY_ENCODER)
    return config


_DECODER: dict[str, Any] = {"hidden_act": "silu", "num_quantizers": 16, "rms_norm_eps": 1e-05, "rope_theta": 10000}
_DECODER |= {"semantic_codebook_size": 4096, "sliding_window": 72}
_DECODER |= {"upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2]}

_REAL_DECODER = {"latent_dim": 1024, "codebook_dim": 512, "decoder_dim": 1536, "hidden_size": 512}
_REAL_DECODER |= {"intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 16, "num_hidden_layers": 8}
_REAL_DECODER |= {"num_key_value_heads": 16, "vector_quantization_hidden_dimension": 512}

_TOY_DECODER = {"latent_dim": 32, "codebook_dim": 32, "decoder_dim": 64, "hidden_size": 24}
_TOY_DECODER |= {"intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4, "num_hidden_layers": 2}
_TOY_DECODER |= {"num_key_value_heads": 4, "vector_quantization_hidden_dimension": 32}

_ENCODER: dict[str, Any] = {"_frame_rate": 12.5, "audio_channels": 1, "compress": 2, "dilation_growth_rate": 2}
_ENCODER |= {"hidden_act": "gelu", "initializer_range": 0.02, "kernel_size": 7, "last_kernel_size": 3}
_ENCODER |= {"norm_eps": 1e-05, "normalize": False, "num_quantizers": 32, "num_residual_layers": 1}
_ENCODER |= {"pad_mode": "constant", "residual_kernel_size": 3, "rope_theta": 10000.0, "sampling_rate": 24000}
_ENCODER |= {"sliding_window": 250, "trim_right_ratio": 1.0, "upsampling_ratios": [8, 6, 5, 4], "use_cache": False}
_ENCODER |= {"use_causal_conv": True, "use_conv_shortcut": False, "use_streaming": False}

_REAL_ENCODER = {"codebook_dim": 256, "head_dim": 64, "hidden_size": 512, "intermediate_size": 2048}
_REAL_ENCODER |= {"num_attention_heads": 8, "num_filters": 64, "num_hidden_layers": 8, "num_key_value_heads": 8}
_REAL_ENCODER |= {"upsample_groups": 512, "vector_quantization_hidden_dimension": 256}

_TOY_ENCODER = {"codebook_dim": 16, "head_dim": 8, "hidden_size": 32, "intermediate_size": 64}
_TOY_ENCODER |= {"num_attention_heads": 4, "num_filters": 4, "num_hidden_layers": 2, "num_key_value_heads": 4}
_TOY_ENCODER |= {"upsample_groups": 32, "vector_quantization_hidden_dimension": 16}

_DRAWS = {"temperature": 0.9, "top_p": 1.0, "top_k": 50}
GENERATION = {"do_sample": True, "repetition_penalty": 1.05, "subtalker_dosample": True, "max_new_tokens": 8192}
GENERATION |= _DRAWS | {f"subtalker_{name}": value for name, value in _DRAWS.items()}

_PADDING = {"padding_value": 0.0, "return_attention_mask": True}
PREPROCESSOR = _PADDING | {"padding_side": "left", "processor_class": "Qwen3TTSProcessor"}
CODEC_PREPROCESSOR = _PADDING | {"padding_side": "right", "feature_size": 1, "sampling_rate": 24000, "overlap": None}
CODEC_PREPROCESSOR |= {"feature_extractor_type": "EncodecFeatureExtractor", "chunk_length_s": None}
