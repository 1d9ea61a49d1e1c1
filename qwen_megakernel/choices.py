"""What options may be: names, ranges and defaults, for the code that acts on them and for the help that shows them.

Help needs no more than this module and the tables of options, so it is there before torch would be imported.
"""

from collections.abc import Collection

from qwen_megakernel.errors import BackendError
from spoken_text.choices import LONGEST_PAUSE_S as LONGEST_PAUSE_S
from spoken_text.choices import NORMALIZE as NORMALIZE

DEMO = "demo"
DEMO_NOTICE = "a tiny English voice for trying things out; use --model for a full-size one"

PUBLISHED = (
    "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
    "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
    "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
    "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
)
"""Hub ids of the published checkpoints."""

VARIANTS = ("base", "custom_voice", "voice_design")  # kinds of checkpoints
SYNTHETIC_SIZES = ("tiny", "tiny-adapter", "demo", "0.6b", "1.7b")  # of checkpoints with random weights
MODEL_SIZES = ("0.6b", "1.7b", "demo")  # that the kernel is compiled for

BACKENDS = ("auto", "megakernel", "torch")
KEPT_VOICES = 16  # how many openings a `PromptBuilder` keeps: those that were used last

PARTS = ("talker", "predictor", "codec_head", "lm_heads")
"""The parts that can be quantised independently: the layers' projections of both stacks, and their heads. They are in
the order of QMK_FP8's bits (csrc/frame/dims.cuh)."""

WEIGHTS = {"bf16": frozenset(), "fp8": frozenset(PARTS), "fp8-predictor": frozenset({"predictor", "lm_heads"})}
"""The usual choices of parts by name."""

TRIMS = ("none", "start", "end", "both")  # where silence may be cut
LONGEST_S = 2.0  # seconds of silence that may be left there at most
SLOWEST, FASTEST = 0.25, 4.0
"""Times as fast as the model speaks. A frame of 80 ms then always yields sound: a hop takes 3 to 50 ms of it."""
MOST_CHUNK = 100_000  # frames

FORMATS = {
    ".wav": ("WAV", "PCM_16"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".opus": ("OGG", "OPUS"),
}
"""Ending of a file's name -> libsndfile's names of format and coding."""

MPEG4 = (".m4a", ".m4b")
"""Endings of MPEG-4 files: AAC with chapter marks."""

ENDINGS = (*FORMATS, *MPEG4)
"""The endings of all files that can be written."""

OUT = "out.wav"  # the command line's output file

SOCKET_PATH = "/v1/audio/speech/socket"
"""Where a server takes text in pieces, in contexts, over a WebSocket."""
MOST_CONTEXT_NAME = 64  # characters of the name of such a context

AUDIOBOOK = "qwen-audiobook (in the checkout: pip install -e packages/audiobook)"
"""The package for books, as messages name it."""

PLAYERS = {
    "aplay": (["-q"], {".wav"}),
    "paplay": ([], {".wav", ".flac", ".ogg"}),
    "ffplay": (["-nodisp", "-autoexit", "-loglevel", "error"], set(ENDINGS)),
    "afplay": ([], {".wav", ".mp3", ".flac"}),
}
"""Program -> its options before a file, and the formats that every version of it plays."""

MANIFEST = "manifest.jsonl"  # of a batch
VERIFIED_FRAMES = 125  # most of an utterance of `verify`: 10 s

OPENAI_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "gpt-4o-mini-tts-2025-12-15")
"""OpenAI's own model names. Clients send one of them by default, and get the served model."""

OPENAI_VOICES = "alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse".split()  # November 2026

LOG_FORMATS = ("text", "json")

TOKEN = "QWEN_MEGAKERNEL_TOKEN"
"""Environment variable with a server's token, because every user of a machine can read command lines."""


def parts_of(weights: str | Collection[str]) -> frozenset[str]:
    """The parts to make FP8, from a name in `WEIGHTS` or a list from `PARTS`. Raises BackendError: it is neither."""
    if isinstance(weights, str) and weights in WEIGHTS:
        return WEIGHTS[weights]
    listed = isinstance(weights, Collection) and not isinstance(weights, str)
    if not listed or not all(isinstance(part, str) and part in PARTS for part in weights):
        choices = f"one of {', '.join(WEIGHTS)}, or a list of some of {', '.join(PARTS)}"
        raise BackendError(f"weights must be {choices}, got {weights!r}")
    return frozenset(weights)
