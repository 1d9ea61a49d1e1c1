"""The reference implementation, `qwen_tts`, if it is installed, with the rows that it hands to its talker.

Used by `qwen-megakernel verify` and tests/oracle; the rest of this package does not need it.
"""

import importlib.machinery
import importlib.util
import reprlib
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.json_object import read_json
from qwen_megakernel.checkpoint.load import CODEC_FOLDER
from qwen_megakernel.errors import BackendError, CheckpointError
from qwen_megakernel.model.conditioning import AUTO, UNCONDITIONED, Conditioning
from qwen_megakernel.model.voice import Voice

_ATTENTIONS = (None, "eager", "sdpa", "flash_attention_2")

INSTALL = (
    'pip install "transformers==5.15.1" librosa einops accelerate onnxruntime && '
    "pip install --no-deps qwen-tts-hf==0.1.1.post1"
)
"""Installs it without its own dependencies. The 12 Hz models do not need gradio, torchaudio or sox. It would also allow
later versions of transformers 5, some of which break it."""

_TEXTS = (
    "Good morning! The train to Cologne leaves at 9:45, doesn't it?",
    "I thought it was over. Then, quietly, somebody laughed.",
    "早上好，请问去上海的火车几点开？",
)
_INSTRUCT = "A warm, low voice that takes its time."
REF_TEXT = "This is what nobody said."  # the transcript for `reference_audio`, which holds no words


def reference_module() -> ModuleType | None:
    """`qwen_tts`, or None if it is not installed. Its 25 Hz half imports torchaudio and sox, which its 12 Hz half does
    not use. Empty modules replace them if they are missing. Raises BackendError: it is installed but cannot be
    imported."""
    if importlib.util.find_spec("qwen_tts") is None:
        return None
    for names in (("sox",), ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")):
        if importlib.util.find_spec(names[0]) is None:
            for name in names:
                sys.modules[name] = ModuleType(name)
                sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
            for name in names[1:]:  # `import a.b as c` reads a's attribute
                parent, _, child = name.rpartition(".")
                setattr(sys.modules[parent], child, sys.modules[name])
    try:
        return importlib.import_module("qwen_tts")
    except (ImportError, OSError) as error:  # OSError: torchaudio was built for another torch
        raise BackendError(
            f"qwen_tts is installed but cannot be imported ({error}); these versions work: {INSTALL} (torchaudio and "
            "sox are not needed: uninstall what fails)"
        ) from error


@dataclass(frozen=True)
class Case:
    """A text that both implementations are asked to speak."""

    text: str
    non_streaming_mode: bool  # True is the layout with the whole text in the prompt
    conditioning: Conditioning = UNCONDITIONED
    clone: str = ""  # with a Base checkpoint the kind of voice, "xvector" or "icl"

    @property
    def name(self) -> str:
        how = self.conditioning
        parts = (how.speaker, self.clone, how.language, how.instruct and "instruct")
        return ", ".join(filter(None, (*parts, "whole text" if self.non_streaming_mode else "text beside frames")))

    def with_voice(self, voice: Voice | None) -> "Case":
        """The same case, spoken with our voice of its kind."""
        return replace(self, conditioning=replace(self.conditioning, voice=voice))


def cases_of(config: ModelConfig, in_context: bool) -> list[Case]:
    """Two to four cases that suit the checkpoint. `in_context`: the reference audio has a transcript, so a Base
    checkpoint can clone in context too."""
    first, second, chinese = _TEXTS
    languages = config.talker.named_languages
    named = "english" if "english" in languages else next(iter(languages), AUTO)
    if config.variant == "voice_design":
        both = (Conditioning(instruct=_INSTRUCT), Conditioning(language=named, instruct=_INSTRUCT))
        return [Case(first, True, both[0]), Case(second, False, both[1])]
    if config.variant == "base":
        icl = [Case(second, False, Conditioning(language=named), "icl"), Case(first, True, clone="icl")]
        return [Case(first, True, clone="xvector"), *(icl if in_context else ())]
    speakers = list(config.talker.speakers) or [""]
    cases = [Case(first, True, Conditioning(speakers[0])), Case(second, False, Conditioning(speakers[-1], named))]
    if config.honours_instruct:
        cases.append(Case(first, True, Conditioning(speakers[0], instruct=_INSTRUCT)))
    return cases + [Case(chinese, False, Conditioning(name)) for name in list(config.talker.dialects)[:1]]


def reference_audio(seconds: float = 1.7, rate: int = 24000, seed: int = 0) -> np.ndarray:
    """A synthetic sound to clone, fp32 [n]: harmonics with vibrato, like a vowel, and some noise."""
    t = np.arange(int(seconds * rate)) / rate
    noise = np.random.Generator(np.random.PCG64(seed)).standard_normal(len(t))
    phase = 2 * np.pi * (140 + 10 * seed) * t + 2 * np.sin(2 * np.pi * 5 * t)
    tone = sum(np.sin(k * phase) / k for k in range(1, 12)) * (0.6 + 0.4 * np.sin(2 * np.pi * 2.3 * t))
    return (0.15 * tone + 0.01 * noise).astype(np.float32)


@dataclass(frozen=True, eq=False)
class ReferenceOutput:
    """The reference implementation's output for a case. Tensors are on the CPU."""

    rows: Tensor  # [n, hidden], its prompt's rows
    trailing: Tensor  # [n, hidden], its trailing rows
    codes: Tensor  # int64 [frames, 16]
    samples: np.ndarray  # fp32 [n]
    seconds: float  # how long it took


def _refuse_foreign_code(folder: Path) -> None:
    """transformers follows every key of a config, and takes the name of an attention for a kernel to download."""
    for path in sorted((*folder.glob("*config.json"), *(folder / CODEC_FOLDER).glob("*config.json"))):
        inside: list[Any] = [read_json(path).raw]
        while inside:
            one = inside.pop()
            inside += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
            for key, value in one.items() if isinstance(one, dict) else ():
                if key.strip("_").startswith("attn_implementation") and value not in _ATTENTIONS:
                    raise CheckpointError(
                        f"{path}: {key} is {reprlib.repr(value)}, which transformers may fetch as code: delete this key"
                    )


class Reference:
    """The reference implementation with one checkpoint."""

    def __init__(self, module: ModuleType, model: str, device: torch.device, dtype: torch.dtype):
        """`module`: `reference_module()`. `model`: a folder. Raises BackendError: it cannot load the checkpoint.
        CheckpointError: a config there names code to fetch."""
        _refuse_foreign_code(Path(model))
        where = {} if device.type == "cpu" else {"device_map": str(device)}
        try:
            self.api = module.Qwen3TTSModel.from_pretrained(model, dtype=dtype, **where)
        except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise BackendError(f"qwen_tts cannot load {model}: {error!r}; these versions work: {INSTALL}") from error
        self.model = self.api.model
        talker = self.model.config.talker_config
        # It looks names up in lower case, so it would not find names with capitals in a fine-tune's tables.
        talker.spk_id, talker.spk_is_dialect = (
            {name.lower(): value for name, value in (table or {}).items()}
            for table in (talker.spk_id, talker.spk_is_dialect)
        )
        self.logits: list[Tensor] = []  # raw, of every draw of the last greedy case: 16 per frame
        self._seen: dict[str, Tensor] = {}
        self._greedy = False
        talker_generate, generate = self.model.talker.generate, self.model.generate

        def spy_talker(**kwargs):
            self._seen |= {"rows": kwargs["inputs_embeds"][0], "trailing": kwargs["trailing_text_hidden"][0]}
            return talker_generate(**kwargs)

        def spy(**kwargs):
            codes, hidden = generate(**kwargs)
            self._seen["codes"] = codes[0]
            return codes, hidden

        def spy_head(_module, _input, out: Tensor) -> None:
            if self._greedy:
                self.logits.append(out[0, -1].clone())

        self.model.talker.generate, self.model.generate = spy_talker, spy
        for head in (self.model.talker.codec_head, *self.model.talker.code_predictor.lm_head):
            head.register_forward_hook(spy_head)

    def voice(self, samples: np.ndarray, ref_text: str | None):
        """A voice in its own format, from 24 kHz samples: `ref_spk_embedding` and, with a text, `ref_code`."""
        options = {"ref_text": ref_text, "x_vector_only_mode": ref_text is None}
        return self.api.create_voice_clone_prompt((samples, 24000), **options)[0]

    @torch.inference_mode()
    def speak(self, case: Case, frames: int, voice=None, seed: int | None = None) -> ReferenceOutput:
        """Speak a case. `frames`: the most to make. `voice`: with a Base checkpoint: the result of `voice`. The case's
        own voice is ours and is not read. `seed`: sample as published; None: greedy."""
        how = case.conditioning
        self._greedy = seed is None
        self.logits.clear()
        options = {"text": case.text, "non_streaming_mode": case.non_streaming_mode}
        options["language"] = None if how.language == AUTO else how.language
        options["max_new_tokens"] = frames + 1  # the last one never becomes a frame
        if seed is None:
            options |= {"do_sample": False, "subtalker_dosample": False}
        else:
            torch.manual_seed(seed)
        variant, began = self.model.tts_model_type, time.perf_counter()
        if variant == "custom_voice":
            options |= {"speaker": how.speaker, "instruct": how.instruct}
            wavs, _ = self.api.generate_custom_voice(**options)
        elif variant == "voice_design":
            wavs, _ = self.api.generate_voice_design(instruct=how.instruct, **options)
        else:
            wavs, _ = self.api.generate_voice_clone(voice_clone_prompt=[voice], **options)
        seconds = time.perf_counter() - began
        seen = {name: tensor.to("cpu", copy=True) for name, tensor in self._seen.items()}
        return ReferenceOutput(samples=wavs[0], seconds=seconds, **seen)

    def decided(self, frame: int, group: int, history: list[int]) -> Tensor:
        """The logits that decided one draw of the last greedy case, fp32 [candidates]. For code 0, repetition penalty
        (`history`: the codes 0 before it), minimum length and suppressed ids are applied."""
        logits = self.logits[16 * frame + group].float().clone()
        if group == 0:
            talker = self.model.config.talker_config
            penalty = self.api.generate_defaults.get("repetition_penalty", 1.05)
            for code in set(history):
                logits[code] = logits[code] * penalty if logits[code] < 0 else logits[code] / penalty
            eos = logits[talker.codec_eos_token_id].clone()
            logits[talker.vocab_size - 1024 :] = -torch.inf
            if frame >= 2:
                logits[talker.codec_eos_token_id] = eos
        return logits

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> np.ndarray:
        """Codes [frames, 16] -> PCM, fp32 [n], all at once: its own `decode` approximates beyond 300 frames."""
        decoder = self.model.speech_tokenizer.model.decoder
        return decoder(codes.T[None].to(self.api.device))[0, 0].float().cpu().numpy()
