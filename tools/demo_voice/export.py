#!/usr/bin/env python3
"""export.py TTS.pt CODEC.pt TOKENIZER_DIR OUT_DIR [temperature top_k sub_temperature sub_top_k]:
write the checkpoint folder, with the pace of its speakers."""

import json
import shutil
import sys
from pathlib import Path

import make_tokenizer
import torch
import word_pace
from codec import CFG
from safetensors.torch import save_file
from teacher import SPEAKERS
from tts import CB, CP, IDS, LANG, TALKER, G

tts, cod, tokdir, out = sys.argv[1:5]
T, K, ST, SK = [float(a) for a in sys.argv[5:9]] if len(sys.argv) > 5 else (0.6, 20, 0.6, 20)
out = Path(out)
(out / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
for f in ("vocab.json", "merges.txt", "tokenizer_config.json"):
    shutil.copy(f"{tokdir}/{f}", out / f)
S = make_tokenizer.special(tokdir)
SPK_ID = {n: CB + 900 + i for i, n in enumerate(SPEAKERS)}
SPK_ID["oliver"] = SPK_ID["max"]  # a speaker of the voice before this one: requests that name it go on
VT = -(-S["size"] // 16) * 16


def dump(p, d):
    return (out / p).write_text(json.dumps(d, indent=2) + "\n")


# ---------------------------------------------------------------- main model
common = dict(
    attention_bias=False,
    attention_dropout=0,
    hidden_act="silu",
    initializer_range=0.02,
    num_code_groups=G,
    rms_norm_eps=1e-06,
    rope_theta=1000000,
    sliding_window=None,
    use_cache=True,
    use_sliding_window=False,
)
cp = dict(
    common,
    **CP,
    layer_types=["full_attention"] * CP["num_hidden_layers"],
    max_length=20,
    max_position_embeddings=65536,
    max_window_layers=28,
    model_type="qwen3_tts_talker_code_predictor",
    rope_scaling=None,
    tie_word_embeddings=False,
)
talker = dict(
    common,
    **TALKER,
    code_predictor_config=cp,
    **IDS,
    codec_language_id=LANG,
    spk_id=SPK_ID,
    spk_is_dialect=dict.fromkeys(SPK_ID, False),
    max_position_embeddings=32768,
    model_type="qwen3_tts_talker",
    position_id_per_seconds=13,
    rope_scaling=dict(interleaved=True, mrope_section=[24, 20, 20], rope_type="default", type="default"),
    text_vocab_size=VT,
)
dump(
    "config.json",
    dict(
        architectures=["Qwen3TTSForConditionalGeneration"],
        assistant_token_id=S["assistant"],
        im_end_token_id=S["im_end"],
        im_start_token_id=S["im_start"],
        tts_bos_token_id=S["bos"],
        tts_eos_token_id=S["eos"],
        tts_pad_token_id=S["pad"],
        model_type="qwen3_tts",
        tokenizer_type="qwen3_tts_tokenizer_12hz",
        tts_model_size="0b6",
        tts_model_type="custom_voice",
        talker_config=talker,
        transformers_version="4.57.3",
    ),
)
dump(
    "generation_config.json",
    dict(
        do_sample=True,
        repetition_penalty=1.0,
        temperature=T,
        top_p=1.0,
        top_k=int(K),
        subtalker_dosample=True,
        subtalker_temperature=ST,
        subtalker_top_p=1.0,
        subtalker_top_k=int(SK),
        max_new_tokens=512,
    ),
)
dump(
    "preprocessor_config.json",
    dict(
        padding_side="left",
        padding_value=0.0,
        processor_class="Qwen3TTSProcessor",
        return_attention_mask=True,
    ),
)
sd = torch.load(tts)["net"]
used = set(range(CB)) | set(IDS.values()) | set(LANG.values()) | set(talker["spk_id"].values())
unused = torch.tensor([i for i in range(TALKER["vocab_size"]) if i not in used])
sd["model.codec_embedding.weight"][unused] = 0
head = sd["codec_head.weight"]
head[[i for i in range(len(head)) if i >= CB and i != IDS["codec_eos_token_id"]]] = 0
e = sd["model.text_embedding.weight"]
sd["model.text_embedding.weight"] = torch.cat([e, e.new_zeros(VT - len(e), e.shape[1])])
save_file(
    {"talker." + k: v.to(torch.bfloat16).contiguous() for k, v in sd.items()},
    str(out / "model.safetensors"),
    metadata={"format": "pt"},
)

# ---------------------------------------------------------------- codec
ck = torch.load(cod)
dec = {}
for k, v in ck["dec"].items():
    if k == "output_proj.weight":
        for g in ("first", "rest"):
            dec[f"decoder.quantizer.rvq_{g}.output_proj.weight"] = v.clone()
            dec[f"decoder.quantizer.rvq_{g}.input_proj.weight"] = torch.zeros(v.shape[1], v.shape[0], 1)
    else:
        dec["decoder." + k] = v
for j in range(16):
    p = (
        "decoder.quantizer.rvq_first.vq.layers.0._codebook"
        if j == 0
        else f"decoder.quantizer.rvq_rest.vq.layers.{j - 1}._codebook"
    )
    dec[p + ".cluster_usage"], dec[p + ".embedding_sum"] = torch.ones(CB), ck["books"][j]
enc = dict(
    _frame_rate=12.5,
    attention_bias=False,
    attention_dropout=0.0,
    audio_channels=1,
    codebook_dim=8,
    codebook_size=CB,
    compress=2,
    dilation_growth_rate=2,
    head_dim=8,
    hidden_act="gelu",
    hidden_size=32,
    initializer_range=0.02,
    intermediate_size=32,
    kernel_size=7,
    last_kernel_size=3,
    layer_scale_initial_scale=0.01,
    max_position_embeddings=8000,
    norm_eps=1e-05,
    normalize=False,
    num_attention_heads=4,
    num_filters=4,
    num_hidden_layers=1,
    num_key_value_heads=4,
    num_quantizers=16,
    num_residual_layers=1,
    num_semantic_quantizers=1,
    pad_mode="constant",
    residual_kernel_size=3,
    rope_theta=10000.0,
    sampling_rate=24000,
    sliding_window=250,
    trim_right_ratio=1.0,
    upsample_groups=32,
    upsampling_ratios=[8, 6, 5, 4],
    use_cache=False,
    use_causal_conv=True,
    use_conv_shortcut=False,
    use_streaming=False,
    vector_quantization_hidden_dimension=8,
)
dump(
    "speech_tokenizer/config.json",
    dict(
        architectures=["Qwen3TTSTokenizerV2Model"],
        model_type="qwen3_tts_tokenizer_12hz",
        dtype="float32",
        encoder_valid_num_quantizers=16,
        input_sample_rate=24000,
        output_sample_rate=24000,
        decode_upsample_rate=1920,
        encode_downsample_rate=1920,
        decoder_config=dict(
            CFG,
            attention_bias=False,
            attention_dropout=0.0,
            hidden_act="silu",
            layer_scale_initial_scale=0.01,
            max_position_embeddings=8000,
            num_semantic_quantizers=1,
            semantic_codebook_size=CB,
            vector_quantization_hidden_dimension=CFG["codebook_dim"],
        ),
        encoder_config=enc,
        transformers_version="4.57.3",
    ),
)
dump(
    "speech_tokenizer/preprocessor_config.json",
    dict(
        chunk_length_s=None,
        feature_extractor_type="EncodecFeatureExtractor",
        feature_size=1,
        overlap=None,
        padding_side="right",
        padding_value=0.0,
        return_attention_mask=True,
        sampling_rate=24000,
    ),
)
(out / "speech_tokenizer/configuration.json").write_text(
    json.dumps({"framework": "pytorch", "task": "feature-extraction", "allow_remote": True})
)
# The encoder half is a placeholder (constant seed, untrained): custom_voice never calls it, the
# official classes want the tensors.
g = torch.Generator().manual_seed(0)


def r(*s):
    return torch.randn(*s, generator=g) * (s[1:] and torch.tensor(s[1:]).prod().item() or 1) ** -0.5


f, idx, E = enc["num_filters"], 0, {}


def conv(n, o, i, k):
    E[n + ".conv.weight"], E[n + ".conv.bias"] = r(o, i, k), torch.zeros(o)


conv("encoder.layers.0", f, 1, 7)
idx = 1
for s in reversed(enc["upsampling_ratios"]):
    conv(f"encoder.layers.{idx}.block.1", f // 2, f, 3)
    conv(f"encoder.layers.{idx}.block.3", f, f // 2, 1)
    conv(f"encoder.layers.{idx + 2}", 2 * f, f, 2 * s)
    idx += 3
    f *= 2
conv(f"encoder.layers.{idx + 1}", 32, f, 3)
for i in range(1):
    L = f"encoder_transformer.layers.{i}"
    for n in ("input_layernorm", "post_attention_layernorm"):
        E[f"{L}.{n}.weight"], E[f"{L}.{n}.bias"] = torch.ones(32), torch.zeros(32)
    for n in "qkvo":
        E[f"{L}.self_attn.{n}_proj.weight"] = r(32, 32)
    E[f"{L}.mlp.fc1.weight"], E[f"{L}.mlp.fc2.weight"] = r(32, 32), r(32, 32)
    for n in ("self_attn", "mlp"):
        E[f"{L}.{n}_layer_scale.scale"] = torch.full((32,), 0.01)
E["downsample.conv.weight"] = r(32, 32, 4)
for q, n in (("semantic", 1), ("acoustic", 15)):
    p = f"quantizer.{q}_residual_vector_quantizer"
    E[p + ".input_proj.weight"], E[p + ".output_proj.weight"] = r(8, 32, 1), r(32, 8, 1)
    for i in range(n):
        (
            E[f"{p}.layers.{i}.codebook.initialized"],
            E[f"{p}.layers.{i}.codebook.cluster_usage"],
            E[f"{p}.layers.{i}.codebook.embed_sum"],
        ) = torch.ones(1), torch.ones(CB), r(CB, 8)
dec.update({"encoder." + k: v for k, v in E.items()})
save_file(
    {k: v.to(torch.float16).contiguous() for k, v in dec.items()},
    str(out / "speech_tokenizer/model.safetensors"),
    metadata={"format": "pt"},
)
word_pace.write(out)
tot = 0
for p in sorted(out.rglob("*")):
    if p.is_file():
        tot += p.stat().st_size
        print(f"{p.stat().st_size:10d} {p.relative_to(out)}")
print(f"{tot:10d} all files")
