"""The baseline of measure_decode.py: a frame of one stream as a CUDA graph of some 560 kernels (graph_frame.cu).

It has bf16 weights, one stream and at most 256 positions. Repetition penalty, top-p and end of speech are left out,
which favours it. `programmatic` lets each kernel load its weights while the one before it still computes.
"""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from qwen_megakernel.backend.card import find_nvcc, no_nvcc
from qwen_megakernel.checkpoint.config import ModelConfig, StackConfig
from qwen_megakernel.model.transformer import rope_tables

POSITIONS, HEADS, HEAD_DIM, GROUPS = 256, 16, 128, 16
TALKER, PREDICTOR = "talker.model", "talker.code_predictor.model"


@functools.cache
def compiled(capability: tuple[int, int]) -> ctypes.CDLL:
    """For a card's compute capability. Raises RuntimeError: no nvcc, a card before Hopper, or nvcc's complaint."""
    nvcc = find_nvcc()
    if nvcc is None or capability < (9, 0):
        raise RuntimeError(no_nvcc() if nvcc is None else "programmatic launches need compute capability 9.0")
    source = Path(__file__).with_suffix(".cu")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "graph_frame.so"
        arch = f"-arch=sm_{capability[0]}{capability[1]}"
        command = [nvcc, "-O3", "-std=c++17", arch, "-shared", "-Xcompiler", "-fPIC", "-o", target, source]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        return ctypes.CDLL(str(target))


class Stack:
    """A transformer's weights as the kernels read them, and its keys and values."""

    def __init__(self, config: StackConfig, tensors: Mapping[str, Tensor], prefix: str, positions: int, columns: int):
        device = tensors[f"{prefix}.norm.weight"].device

        def layer(i: int) -> dict[str, Tensor]:
            of = {name: tensors[f"{prefix}.layers.{i}.{name}.weight"] for name in NAMES}
            attention, mlp = ([of.pop(name) for name in names] for names in (NAMES[:3], NAMES[3:5]))
            return of | {"qkv": torch.cat(attention), "gate_up": torch.cat(mlp)}

        self.config, self.layers = config, [layer(i) for i in range(config.num_layers)]
        self.norm = tensors[f"{prefix}.norm.weight"]
        cos, sin = rope_tables(positions, HEAD_DIM, config.rope_theta, device, torch.float32)
        self.cos, self.sin = (table[:, : HEAD_DIM // 2].contiguous() for table in (cos, sin))
        shape = (config.num_layers, 2, config.num_kv_heads, positions, HEAD_DIM)
        self.kv = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.qkv = torch.zeros(columns, len(self.layers[0]["qkv"]), device=device)
        self.attended = torch.zeros(columns, HEADS * HEAD_DIM, device=device)
        self.mlp = torch.zeros(columns, config.intermediate_size, device=device)


NAMES = (
    *(f"self_attn.{n}_proj" for n in "qkv"),
    "mlp.gate_proj",
    "mlp.up_proj",
    "self_attn.o_proj",
    "mlp.down_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "input_layernorm",
    "post_attention_layernorm",
)


class GraphFrame:
    """`run()` queues a frame: input row `hidden` [1, hidden] in, `codes` int32 [16] and the next input out."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], *, temperature: float, programmatic: bool = True
    ):
        """`tensors`: every `talker.*` tensor, bf16 on a CUDA device. `temperature`: 0 is greedy. Raises RuntimeError:
        it cannot be compiled, CUDA refuses a launch, or there is no kernel of these sizes."""
        device = self.device = tensors[f"{TALKER}.norm.weight"].device
        self._library, self._programmatic = compiled(torch.cuda.get_device_capability(device)), programmatic
        self._tensors, self._config = tensors, config.talker
        self.inverse_temperature = 1 / temperature if temperature else 0.0
        self.talker = Stack(config.talker.stack, tensors, TALKER, POSITIONS, 1)
        self.predictor = Stack(config.talker.code_predictor.stack, tensors, PREDICTOR, GROUPS, 2)
        width, small = config.talker.stack.hidden_size, config.talker.code_predictor.stack.hidden_size
        self.hidden = torch.zeros(1, width, device=device)
        self.sum, self.next = torch.zeros(1, width, device=device), torch.zeros(2, width, device=device)
        self.adapted = torch.zeros(2, small, device=device) if small != width else self.next
        self.logits = torch.zeros(GROUPS, config.talker.vocab_size, device=device)
        self.text = torch.zeros(width, dtype=torch.bfloat16, device=device)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.codes = torch.zeros(GROUPS, dtype=torch.int32, device=device)
        bias = tensors.get("talker.code_predictor.small_to_mtp_projection.bias")
        self._bias = None if bias is None else bias.float()
        self._graphs = {part: self._captured(part) for part in (self._talk, self._frame)}

    def seek(self, position: int) -> None:
        self.position.fill_(position)

    def row(self, row: Tensor) -> None:
        """One row of a prompt through the talker: fp32 [hidden]."""
        self.hidden[0] = row
        self._graphs[self._talk].replay()
        self.position += 1

    def run(self) -> None:
        self._graphs[self._frame].replay()

    def _captured(self, part) -> torch.cuda.CUDAGraph:
        part()  # CUDA loads kernels at their first launch, which a capture does not allow
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            part()
        return graph

    def _call(self, name: str, *arguments) -> None:
        def plain(x):
            if x is None or isinstance(x, Tensor):
                return ctypes.c_void_p(None if x is None else x.data_ptr())
            return {bool: ctypes.c_bool, int: ctypes.c_int, float: ctypes.c_float}[type(x)](x)

        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        error = getattr(self._library, f"graph_{name}")(*map(plain, (*arguments, self._programmatic)), stream)
        if error:
            raise RuntimeError(f"graph_{name}: " + ("no kernel of this size" if error < 0 else f"CUDA error {error}"))

    def _product(
        self, x: Tensor, weights: Tensor, out: Tensor, columns=1, norm=None, bias=None, gated=False, add=False
    ):
        rows = len(weights) // 2 if gated else len(weights)
        self._call("product", weights.shape[1], gated, columns, x, norm, weights, bias, out, rows, add)

    def _through(self, stack: Stack, x: Tensor, columns: int, position: Tensor | None, start: int) -> None:
        positions = stack.kv.shape[3]
        for w, (keys, values) in zip(stack.layers, stack.kv, strict=True):
            self._product(x, w["qkv"], stack.qkv, columns, norm=w["input_layernorm"])
            norms = w["self_attn.q_norm"], w["self_attn.k_norm"]
            where = stack.cos, stack.sin, keys, values, positions, position, start, stack.attended
            self._call("attend", positions > GROUPS, columns, stack.qkv, *norms, *where)
            self._product(stack.attended, w["self_attn.o_proj"], x, columns, add=True)
            self._product(x, w["gate_up"], stack.mlp, columns, norm=w["post_attention_layernorm"], gated=True)
            self._product(stack.mlp, w["mlp.down_proj"], x, columns, add=True)

    def _draw(self, group: int, allowed: int) -> None:
        embedding = f"code_predictor.model.codec_embedding.{group - 1}" if group else "model.codec_embedding"
        table, logits = self._tensors[f"talker.{embedding}.weight"], self.logits[group]
        how = allowed, self.inverse_temperature, group, self.position
        after = self.hidden, self.talker.norm, self.text, self.sum, self.next, self.codes
        candidates = allowed if group else self._config.vocab_size
        self._call("draw", candidates, logits, *how, table, table.shape[1], *after)

    def _talk(self) -> None:
        self._through(self.talker, self.hidden, 1, self.position, 0)

    def _frame(self) -> None:
        self._talk()
        self._product(self.hidden, self._tensors["talker.codec_head.weight"], self.logits[0], norm=self.talker.norm)
        self._draw(0, self._config.first_suppressed_id)
        position, columns = 0, 2
        for group in range(1, GROUPS):
            if self._bias is not None:
                adapter = self._tensors["talker.code_predictor.small_to_mtp_projection.weight"]
                self._product(self.next, adapter, self.adapted, columns, bias=self._bias)
            self._through(self.predictor, self.adapted, columns, None, position)
            head = self._tensors[f"talker.code_predictor.lm_head.{group - 1}.weight"]
            self._product(self.adapted[columns - 1], head, self.logits[group], norm=self.predictor.norm)
            self._draw(group, len(head))
            position, columns = position + columns, 1
