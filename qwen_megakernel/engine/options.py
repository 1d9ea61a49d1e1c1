"""What an engine is loaded with. No torch is imported here, because the command line's help shows these options."""

import numbers
import reprlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from qwen_megakernel.choices import KEPT_VOICES
from qwen_megakernel.errors import BackendError

if TYPE_CHECKING:
    from torch import device as Device
    from torch import dtype as DType
else:
    Device = DType = object

DAY = 86_400

_LEAST = {"max_streams": 1, "max_positions": 16, "max_queue": 0, "kept_voices": 1}


@dataclass(frozen=True)
class Patience:
    """Seconds that things may take before the watchdog ends them. The defaults are choices, not measurements.

    Attributes:
        device_s: one turn of the engine's thread. Turns take milliseconds on a GPU, so 30 s is a thousand times more;
            the driver itself gives up on a lost GPU after some seconds. None: 30 on a GPU, 300 on a CPU, where one long
            prompt may take minutes.
        callback_s: one call of `on_chunk`.
        look_s: between two looks: far shorter than the others, but long enough that looks cost nothing.

    Raises:
        BackendError: one is not above 0.
    """

    device_s: float | None = None
    callback_s: float = 30.0
    look_s: float = 0.5

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if name == "device_s" and seconds is None:
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
                raise BackendError(f"{name} must be seconds above 0, got {reprlib.repr(seconds)}")


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is loaded with besides its model: the arguments of `TTSEngine.load`. The line beside a type is its
    help on a command line, and in an editor (`EngineArguments`).

    Attributes:
        backend: "torch", "megakernel" (published dims, bfloat16, a GPU of targets.py's TARGETS) or "auto", which takes
            the megakernel where it is known to be right and faster. An untried card is checked once, for up to a
            minute. A log line says what was taken and why.
        device: None takes a CUDA GPU if there is one, else the CPU.
        dtype: of talker and code predictor: "float32", "bfloat16" or the torch.dtype of that name; None is bfloat16 on
            a GPU and float32 on a CPU.
        weights: which weights are E4M3: "bf16" (none), "fp8", "fp8-predictor", or a list of some of fp8.PARTS. They are
            quantised now unless the checkpoint has them so; the rest has `dtype`. None: as the checkpoint has them.
            PyTorch computes with the same weights, dequantised, and saves no memory. More: docs/fp8.md.
        adapters: folders of LoRA adapters in PEFT's format, merged in this order, before anything is quantised.
        max_streams: utterances at once, each in its own slot. Fewer run if the device sustains fewer for live
            listeners, which is measured (`health()["sustained"]`).
        max_positions: rows of one slot: the prompt's and one per frame.
        kv_memory: GiB of keys and values, which all utterances share (megakernel only). An utterance gets a slot once
            there is room for all that it can need. None: enough for `max_streams` times `max_positions`.
        max_queue: further utterances that may wait for a slot; any more fail at once with `EngineBusy`.
        queue_timeout: seconds that an utterance waits for a slot before it fails with `EngineBusy`.
        kept_voices: how many voices (with language and instruct) are kept, the latest used: keys and values of the
            prompt's opening, and the vocoder's state after the reference. For 0.6B a voice takes about 8 MB; with a
            transcribed reference of 10 s about 30 MB for each text layout.
        vocoder_dtype: "float32", "tf32" (GPU only), "bfloat16" (slow: not through our kernels), or the torch.dtype of
            such a name.
        threads: CPU threads to compute frames with, and as many to compute sound. None measures now and takes the
            fewest that are about as fast as any, at most `torch.get_num_threads()`. That number itself stays as it is.
        fallback: "torch": PyTorch takes over, many times slower, after three faults of our kernels in a row (two on a
            card that was only checked). None: the engine then dies. On such a card backend="auto" implies "torch".
        allow_foreign_voice: an experiment: a Base checkpoint's voice speaks on CustomVoice (docs/voices.md).
        patience: how long the watchdog waits.

    Raises:
        BackendError: one has the wrong type or is out of range.
    """

    backend: Annotated[str, "auto, megakernel or torch"] = "auto"
    device: Annotated[str | Device | None, "cpu, cuda, cuda:1; default: a GPU if there is one"] = None
    dtype: Annotated[str | DType | None, "float32 or bfloat16; default: bfloat16 on a GPU"] = None
    weights: Annotated[str | Collection[str] | None, "which weights are FP8"] = None
    adapters: Annotated[Collection[str | Path], "a LoRA adapter of the model, a folder in PEFT's format"] = ()
    max_streams: Annotated[int, "utterances at once"] = 8
    max_positions: Annotated[int, "positions of a slot: an utterance's prompt and frames"] = 2048
    kv_memory: Annotated[float | None, "GiB of keys and values for all utterances; default: full slots"] = None
    max_queue: Annotated[int, "utterances that may wait for a slot"] = 8
    queue_timeout: Annotated[float, "seconds that an utterance may wait for a slot"] = 5.0
    kept_voices: Annotated[int, "voices whose beginnings are kept"] = KEPT_VOICES
    vocoder_dtype: Annotated[str | DType, "float32, tf32 or bfloat16"] = "float32"
    threads: Annotated[int | None, "CPU threads to compute with; default: the fastest number, measured"] = None
    fallback: Annotated[str | None, "torch: PyTorch takes over if the kernels fail"] = None
    allow_foreign_voice: Annotated[
        bool, "an experiment: CustomVoice speaks with a Base checkpoint's voice (docs/voices.md)"
    ] = False
    patience: Annotated[Patience, "how long the watchdog waits"] = Patience()

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < least:
                raise BackendError(f"{name} must be an integer of at least {least}, got {count!r}")
        memory = self.kv_memory
        if memory is not None and (isinstance(memory, bool) or not isinstance(memory, numbers.Real) or not memory > 0):
            raise BackendError(f"kv_memory must be GiB above 0, got {memory!r}")
        timeout = self.queue_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not 0 <= timeout <= DAY:
            raise BackendError(f"queue_timeout must be 0 to {DAY} seconds, got {timeout!r}")
        if self.fallback is not None and not (isinstance(self.fallback, str) and self.fallback == "torch"):
            raise BackendError(f"fallback must be None or 'torch', got {self.fallback!r}")
        if not isinstance(self.allow_foreign_voice, bool):
            raise BackendError(f"allow_foreign_voice must be True or False, got {self.allow_foreign_voice!r}")
        if not isinstance(self.patience, Patience):
            raise BackendError(f"patience must be a Patience, got {type(self.patience).__name__}")


class EngineArguments(TypedDict, total=False):
    """Fields of `EngineOptions` as arguments, for type checkers and editors."""

    # fields: `python tools/options_table.py` writes them
    backend: str
    """auto, megakernel or torch"""
    device: str | Device | None
    """cpu, cuda, cuda:1; default: a GPU if there is one"""
    dtype: str | DType | None
    """float32 or bfloat16; default: bfloat16 on a GPU"""
    weights: str | Collection[str] | None
    """which weights are FP8"""
    adapters: Collection[str | Path]
    """a LoRA adapter of the model, a folder in PEFT's format"""
    max_streams: int
    """utterances at once"""
    max_positions: int
    """positions of a slot: an utterance's prompt and frames"""
    kv_memory: float | None
    """GiB of keys and values for all utterances; default: full slots"""
    max_queue: int
    """utterances that may wait for a slot"""
    queue_timeout: float
    """seconds that an utterance may wait for a slot"""
    kept_voices: int
    """voices whose beginnings are kept"""
    vocoder_dtype: str | DType
    """float32, tf32 or bfloat16"""
    threads: int | None
    """CPU threads to compute with; default: the fastest number, measured"""
    fallback: str | None
    """torch: PyTorch takes over if the kernels fail"""
    allow_foreign_voice: bool
    """an experiment: CustomVoice speaks with a Base checkpoint's voice (docs/voices.md)"""
    patience: Patience
    """how long the watchdog waits"""
    # end
