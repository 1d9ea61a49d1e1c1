"""The cases that the oracle (`qwen_tts`) and this package both speak.

Shared by oracle.py, which runs in the oracle's environment, and tests/test_oracle.py, which does not need it.
"""

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_check.reference import Case, reference_audio
from qwen_check.verify import say
from qwen_megakernel.checkpoint.synthetic import NO_EOS, write_checkpoint
from qwen_megakernel.model.conditioning import AUTO, Conditioning
from qwen_megakernel.sampling_params import GREEDY

VECTORS = Path(__file__).parent / "vectors.safetensors"

TEXTS = {
    "english": "Hello there, how are you today? I've 12.5 helloWorld apples, isn't it fine?",
    "chinese": "你好，今天天气很好。",
    "mixed": "  Müller's cafe\u0301 sells 3 iPhones/day 🙂 — ここで。\n\nAnd a new line.",
    "newline": "\nA text that opens with a line break.",
    "short": "Yes.",
}
INSTRUCT = "Speak slowly, with a warm low voice."
REFERENCES = (
    (1.7, "this is the text of the reference."),
    (0.8, "Short."),
    (4.3, "今天 is a longer one, with numbers such as 3.5 and more words than the shorter texts have: isn't it?"),
)
"""What voices are cloned from: seconds of sound, and what it says."""


@dataclass(frozen=True)
class OracleCase:
    """A case, and the synthetic checkpoint that speaks it. `clone` is "", "xvector" or "icl"; speaker "" is none.
    `reference` counts `REFERENCES`."""

    size: str
    variant: str
    text: str
    non_streaming_mode: bool
    speaker: str | None = None
    language: str | None = None
    instruct: str | None = None
    clone: str = ""
    reference: int = 0
    frames: int = 200
    eos_gain: float = NO_EOS
    seed: int = 0

    @property
    def name(self) -> str:
        layout = "whole" if self.non_streaming_mode else "streaming"
        parts = (self.size, self.variant, self.text, layout, self.speaker, self.language, self.clone)
        parts += ("instruct" if self.instruct else "", f"eos{self.eos_gain:g}" if self.eos_gain else "")
        parts += (self.seed or "", f"reference{self.reference}" if self.reference else "")
        return "/".join(str(p) for p in parts if p)

    @property
    def case(self) -> Case:
        conditioning = Conditioning(self.speaker, self.language or AUTO, self.instruct)
        return Case(TEXTS[self.text], self.non_streaming_mode, conditioning, self.clone)

    def checkpoint(self, root: Path) -> Path:
        """The case's synthetic checkpoint below `root`, written at first use."""
        folder = root / f"{self.size}-{self.variant}-{self.eos_gain:g}-{self.seed}"
        if not (folder / "speech_tokenizer" / "model.safetensors").exists():
            write_checkpoint(folder, size=self.size, variant=self.variant, seed=self.seed, eos_gain=self.eos_gain)
        return folder


def cases(seed: int = 0, frames: int = 200) -> list[OracleCase]:
    """Every layout in both topologies with end of speech held off, then ends that come early and late."""
    out = []
    for size in ("tiny", "tiny-adapter"):
        for whole in (True, False):

            def add(variant: str, text: str, size=size, whole=whole, **request) -> None:
                out.append(OracleCase(size, variant, text, whole, frames=frames, seed=seed, **request))

            add("custom_voice", "english", speaker="Ryan", language="English")
            add("custom_voice", "mixed", speaker="vivian")
            add("custom_voice", "newline", speaker="", language="german")
            add("custom_voice", "short", speaker="eric")  # a dialect speaker, automatic language
            add("custom_voice", "chinese", speaker="dylan", language="chinese")
            add("custom_voice", "chinese", speaker="dylan", language="japanese")  # the dialect does not apply
            add("custom_voice", "english", speaker="serena", instruct=INSTRUCT)  # ignored by 0.6B
            add("voice_design", "english", language="english", instruct=INSTRUCT)
            add("voice_design", "mixed", instruct="")
            add("base", "english", clone="xvector", language="french")
            add("base", "english", clone="icl")  # more text than reference frames
            add("base", "short", clone="icl", language="english")  # less
            for reference in (1, 2):
                add("base", "english", clone="icl", reference=reference, language="english")
                add("base", "chinese", clone="icl", reference=reference)
                add("base", "mixed", clone="xvector", reference=reference)
    for size in ("tiny", "tiny-adapter"):
        for gain in (1.2, 4.0):
            for text, whole in (("english", True), ("english", False), ("short", False)):
                request = {"eos_gain": gain, "frames": frames, "seed": seed + 1}
                out.append(OracleCase(size, "custom_voice", text, whole, "ryan", **request))
    return out


def fine_tune(base: Path, folder: Path, speaker: str, vector: Tensor, state: Mapping[str, Tensor]) -> Path:
    """What the reference's fine-tuning script (finetuning/sft_12hz.py) leaves of a Base checkpoint.

    Args:
        base, folder: a Base checkpoint, and where to write.
        vector: the new speaker's, [hidden].
        state: the trained model's state dict.
    """
    shutil.copytree(base, folder, dirs_exist_ok=True)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    talker, table = config["talker_config"], "talker.model.codec_embedding.weight"
    row = min(3000, talker["vocab_size"] - 72)  # a tiny vocabulary ends before 3000
    config["tts_model_type"] = "custom_voice"
    talker["spk_id"], talker["spk_is_dialect"] = {speaker: row}, {speaker: False}
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    state = {name: t.detach().cpu().clone() for name, t in state.items() if not name.startswith("speaker_encoder")}
    state[table][row] = vector.to(state[table].dtype)
    save_file(state, folder / "model.safetensors")
    return folder


def _of_config(**values) -> Callable[[Path], None]:
    """Set keys of both stacks' configs; `...` removes one."""

    def write(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        talker = config["talker_config"]
        for stack in (talker, talker["code_predictor_config"]):
            stack |= values
            for key in [key for key, value in stack.items() if value is ...]:
                del stack[key]
        path.write_text(json.dumps(config), encoding="utf-8")

    return write


def _of_tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, {"format": "pt"})

    return write


def with_tensors(*names: str) -> Callable[[Path], None]:
    return _of_tensors(lambda tensors: tensors | {name: torch.zeros(3) for name in names})


def _rope_parameters(folder: Path) -> None:
    """As transformers 5 saves a config: the rotary settings under another key, the base in them."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    talker = config["talker_config"]
    for stack in (talker, talker["code_predictor_config"]):
        stack["rope_parameters"] = (stack.pop("rope_scaling") or {}) | {"rope_theta": stack.pop("rope_theta")}
    path.write_text(json.dumps(config), encoding="utf-8")


def _tokenizer_json(folder: Path) -> None:
    """As transformers 5 saves a processor: one file for the tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    tokenizer.save_pretrained(folder)


def cast_to(*dtypes: torch.dtype) -> Callable[[Path], None]:
    kinds = itertools.cycle(dtypes)
    return _of_tensors(lambda tensors: {name: tensor.to(next(kinds)) for name, tensor in tensors.items()})


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "speaker encoder kept": with_tensors("speaker_encoder.fc.weight", "speaker_encoder.fc.bias"),
    "buffers": with_tensors("talker.model.rotary_emb.inv_freq", "talker.code_predictor.model.rotary_emb.inv_freq"),
    "a training's leftovers": with_tensors("optimizer.state.0.exp_avg", "ema.decay"),
    "unknown tensors": with_tensors("talker.model.extra", "notes"),
    "a prefix": _of_tensors(lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()}),
    "fp32": cast_to(torch.float32),
    "fp16": cast_to(torch.float16),
    "mixed": cast_to(torch.float32, torch.bfloat16, torch.float64),
    "tokenizer.json": _tokenizer_json,
    "rope_parameters": _rope_parameters,
    "no epsilon": _of_config(rms_norm_eps=...),
    "no rotary base": _of_config(rope_theta=...),
}
"""What others save -> how a synthetic checkpoint gets it. The codes stay, but for the last one's. The reference does
not read `rope_parameters` of a file, though its own `config.save_pretrained` writes it."""


def reference_of(number: int, seed: int) -> tuple[np.ndarray, str]:
    """Sound and text of one of `REFERENCES`; each number sounds like another speaker."""
    seconds, text = REFERENCES[number]
    return reference_audio(seconds, seed=seed + number), text


def with_voice(engine, case: OracleCase) -> Case:
    """The case with its voice, which one of our engines clones."""
    voice = None
    if case.clone:
        sound, text = reference_of(case.reference, case.seed)
        voice = engine.create_voice((sound, 24000), text if case.clone == "icl" else None, trim=False)
    return case.case.with_voice(voice)


def ask(engine, case: OracleCase):
    """The case, said by one of our engines: greedy, with the guard against loops off."""
    return say(engine, with_voice(engine, case), case.frames, sampling=GREEDY, runaway_guard=False)


def vocoder_codes(codebook_size: int, frames: int = 110, seed: int = 0) -> np.ndarray:
    """int64 [frames, 16]; more frames than the transformer's window."""
    return np.random.Generator(np.random.PCG64(seed)).integers(0, codebook_size, (frames, 16))
