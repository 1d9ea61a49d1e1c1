"""The tensors that a config.json implies: every name and shape of a checkpoint in the published layout.

With this table load.py refuses missing, extra or misshaped tensors by name, before anything is computed. The table adds
up to the published sizes of all five checkpoints, to the byte (tests/test_checkpoint.py).
"""

from qwen_megakernel.checkpoint.codec_config import CodecConfig
from qwen_megakernel.checkpoint.config import ModelConfig, SpeakerEncoderConfig, StackConfig, TalkerConfig

Shapes = dict[str, tuple[int, ...]]

TEXT_TABLE = "talker.model.text_embedding.weight"  # the text embeddings, which stay in the host's memory


def _layer(name: str, *shape: int, bias: bool = True, transposed: bool = False) -> Shapes:
    """A linear layer [out, in], or a convolution [out, in, taps]; transposed, it is [in, out, taps]."""
    out_channels = shape[1] if transposed else shape[0]
    return {f"{name}.weight": shape} | ({f"{name}.bias": (out_channels,)} if bias else {})


def _attention(layer: str, hidden: int, q: int, kv: int) -> Shapes:
    shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    return {f"{layer}.self_attn.{name}_proj.weight": shape for name, shape in shapes.items()}


def _gated_mlp(layer: str, hidden: int, intermediate: int) -> Shapes:
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    return {f"{layer}.mlp.{name}_proj.weight": shape for name, shape in shapes.items()}


def _stack_tensors(prefix: str, c: StackConfig) -> Shapes:
    """One Qwen3 decoder stack without its embeddings and heads."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: Shapes = {f"{prefix}.norm.weight": (c.hidden_size,)}
    for i in range(c.num_layers):
        layer = f"{prefix}.layers.{i}"
        shapes |= {f"{layer}.input_layernorm.weight": (c.hidden_size,)} | _attention(layer, c.hidden_size, q, kv)
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (c.head_dim,) for name in "qk"}
        shapes |= {f"{layer}.post_attention_layernorm.weight": (c.hidden_size,)}
        shapes |= _gated_mlp(layer, c.hidden_size, c.intermediate_size)
    return shapes


def talker_tensors(c: TalkerConfig) -> Shapes:
    """Talker, code predictor, embeddings and heads. A code's embedding has the talker's width in both."""
    hidden, text = c.stack.hidden_size, c.text_hidden_size
    predictor = "talker.code_predictor"
    width = c.code_predictor.stack.hidden_size
    shapes = _stack_tensors("talker.model", c.stack)
    shapes |= {TEXT_TABLE: (c.text_vocab_size, text), "talker.model.codec_embedding.weight": (c.vocab_size, hidden)}
    shapes |= _layer("talker.text_projection.linear_fc1", text, text)
    shapes |= _layer("talker.text_projection.linear_fc2", hidden, text)
    shapes |= _layer("talker.codec_head", c.vocab_size, hidden, bias=False)
    shapes |= _stack_tensors(f"{predictor}.model", c.code_predictor.stack)
    for group in range(c.num_code_groups - 1):
        shapes[f"{predictor}.model.codec_embedding.{group}.weight"] = (c.code_predictor.vocab_size, hidden)
        shapes[f"{predictor}.lm_head.{group}.weight"] = (c.code_predictor.vocab_size, width)
    if width != hidden:
        shapes |= _layer(f"{predictor}.small_to_mtp_projection", width, hidden)
    return shapes


def speaker_encoder_tensors(c: SpeakerEncoderConfig) -> Shapes:
    """The ECAPA-TDNN of a Base checkpoint."""
    p = "speaker_encoder"
    shapes = _layer(f"{p}.blocks.0.conv", c.channels[0], c.mel_dim, c.kernel_sizes[0])
    for b in range(1, len(c.channels) - 1):
        before, width, group = c.channels[b - 1], c.channels[b], c.channels[b] // c.res2net_scale
        shapes |= _layer(f"{p}.blocks.{b}.tdnn1.conv", width, before, 1)
        for r in range(c.res2net_scale - 1):
            shapes |= _layer(f"{p}.blocks.{b}.res2net_block.blocks.{r}.conv", group, group, c.kernel_sizes[b])
        shapes |= _layer(f"{p}.blocks.{b}.tdnn2.conv", width, width, 1)
        shapes |= _layer(f"{p}.blocks.{b}.se_block.conv1", c.se_channels, width, 1)
        shapes |= _layer(f"{p}.blocks.{b}.se_block.conv2", width, c.se_channels, 1)
    last = c.channels[-1]
    shapes |= _layer(f"{p}.mfa.conv", last, last, c.kernel_sizes[-1])
    shapes |= _layer(f"{p}.asp.tdnn.conv", c.attention_channels, 3 * last, 1)
    shapes |= _layer(f"{p}.asp.conv", last, c.attention_channels, 1)
    return shapes | _layer(f"{p}.fc", c.enc_dim, 2 * last, 1)


def _layer_scaled_attention(layer: str, hidden: int, q: int, kv: int) -> Shapes:
    names = ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn_layer_scale.scale")
    return _attention(layer, hidden, q, kv) | {
        f"{layer}.{name}": (hidden,) for name in (*names, "mlp_layer_scale.scale")
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
    shapes |= _layer("decoder.pre_conv.conv", c.latent_dim, c.codebook_dim, 3)
    pre, width = "decoder.pre_transformer", c.num_heads * c.head_dim
    shapes |= _layer(f"{pre}.input_proj", c.hidden_size, c.latent_dim)
    shapes |= _layer(f"{pre}.output_proj", c.latent_dim, c.hidden_size)
    shapes[f"{pre}.norm.weight"] = (c.hidden_size,)
    for i in range(c.num_layers):
        layer = f"{pre}.layers.{i}"
        shapes |= _layer_scaled_attention(layer, c.hidden_size, width, width)
        shapes |= _gated_mlp(layer, c.hidden_size, c.intermediate_size)
    latent = c.latent_dim
    for i, ratio in enumerate(c.upsampling_ratios):
        block = f"decoder.upsample.{i}"
        shapes |= _layer(f"{block}.0.conv", latent, latent, ratio, transposed=True)
        shapes |= _layer(f"{block}.1.dwconv.conv", latent, 1, 7)
        shapes |= _layer(f"{block}.1.pwconv1", 4 * latent, latent) | _layer(f"{block}.1.pwconv2", latent, 4 * latent)
        shapes |= {f"{block}.1.{name}": (latent,) for name in ("gamma", "norm.weight", "norm.bias")}
    channels = c.decoder_dim
    shapes |= _layer("decoder.decoder.0.conv", channels, latent, 7)
    for i, rate in enumerate(c.upsample_rates, start=1):
        block = f"decoder.decoder.{i}.block"
        shapes |= {f"{block}.0.{name}": (channels,) for name in ("alpha", "beta")}
        shapes |= _layer(f"{block}.1.conv", channels, channels // 2, 2 * rate, transposed=True)
        channels //= 2
        for unit in (2, 3, 4):
            for act in ("act1", "act2"):
                shapes |= {f"{block}.{unit}.{act}.{name}": (channels,) for name in ("alpha", "beta")}
            shapes |= _layer(f"{block}.{unit}.conv1.conv", channels, channels, 7)
            shapes |= _layer(f"{block}.{unit}.conv2.conv", channels, channels, 1)
    last = len(c.upsample_rates) + 1
    shapes |= {f"decoder.decoder.{last}.{name}": (channels,) for name in ("alpha", "beta")}
    return shapes | _layer(f"decoder.decoder.{last + 1}.conv", 1, channels, 7)


def codec_encoder_tensors(codec: CodecConfig) -> Shapes:
    """The speech tokenizer's encoder half: a Mimi model without its upsampling and decoder parts."""
    e = codec.encoder
    shapes: Shapes = {}
    width, index = e["num_filters"], 1
    shapes |= _layer("encoder.encoder.layers.0.conv", width, e["audio_channels"], e["kernel_size"])
    for ratio in reversed(e["upsampling_ratios"]):
        inner = width // e["compress"]
        for _ in range(e["num_residual_layers"]):
            block = f"encoder.encoder.layers.{index}.block"
            shapes |= _layer(f"{block}.1.conv", inner, width, e["residual_kernel_size"])
            shapes |= _layer(f"{block}.3.conv", width, inner, 1)
            index += 1
        index += 1  # an ELU, which has no tensors
        shapes |= _layer(f"encoder.encoder.layers.{index}.conv", 2 * width, width, 2 * ratio)
        index, width = index + 1, 2 * width
    index += 1  # the last ELU
    hidden = e["hidden_size"]
    shapes |= _layer(f"encoder.encoder.layers.{index}.conv", hidden, width, e["last_kernel_size"])
    q, kv = e["num_attention_heads"] * e["head_dim"], e["num_key_value_heads"] * e["head_dim"]
    for i in range(e["num_hidden_layers"]):
        layer = f"encoder.encoder_transformer.layers.{i}"
        shapes |= _layer_scaled_attention(layer, hidden, q, kv) | {
            f"{layer}.input_layernorm.bias": (hidden,),
            f"{layer}.post_attention_layernorm.bias": (hidden,),
            f"{layer}.mlp.fc1.weight": (e["intermediate_size"], hidden),
            f"{layer}.mlp.fc2.weight": (hidden, e["intermediate_size"]),
        }
    shapes |= _layer("encoder.downsample.conv", hidden, hidden, 4, bias=False)
    semantic, inner = e["num_semantic_quantizers"], e["vector_quantization_hidden_dimension"]
    for name, layers in (("semantic", semantic), ("acoustic", e["num_quantizers"] - semantic)):
        q_name = f"encoder.quantizer.{name}_residual_vector_quantizer"
        shapes |= _layer(f"{q_name}.input_proj", inner, hidden, 1, bias=False)
        shapes |= _layer(f"{q_name}.output_proj", hidden, inner, 1, bias=False)
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
