"""qwen-megakernel verify: does what we claim hold for this checkpoint, on this machine?

    ours, fp32, greedy ───── prompt rows, codes, PCM ─┐
    qwen_tts, fp32, greedy ─ the same ────────────────┴─ compared, each under its bound of docs/verification.md
    the kernel's logits ──── no further from an fp32 twin than those of PyTorch bf16
    both as people use them ─ takes, timed
    -> a table, report.json, and index.html to listen to both without knowing which is which

Where the reference (reference.py) is not installed, ours is compared with a twin that computes it in another way.
"""

import gc
import json
import logging
import platform
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from qwen_megakernel import Audio, SamplingParams, TTSEngine, Voice, __version__
from qwen_megakernel.backend.select import make_decoder, make_embeddings, select_backend, select_device
from qwen_megakernel.check.reference import (
    INSTALL,
    REF_TEXT,
    Reference,
    Request,
    Said,
    reference_audio,
    reference_module,
    requests_of,
)
from qwen_megakernel.check.twin import forced_logits, forced_talker
from qwen_megakernel.checkpoint.config import GREEDY, ModelConfig
from qwen_megakernel.checkpoint.fp8 import dequantized, name_of, parts_of
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.errors import RequestError, SpeechError
from qwen_megakernel.model.prompt import Prompt, PromptBuilder
from qwen_megakernel.model.sampling import Code0Rules
from qwen_megakernel.model.text import TextTokenizer
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.voice import check_reference, load_audio

log = logging.getLogger(__name__)

FRAMES, MOST_FRAMES = 125, 1000
"""Of an utterance at most, unless told otherwise: 10 s; with any reference audio the most still fit a slot."""
ROWS, VECTOR, PCM, PCM_GPU = 1e-5, 1e-4, 1e-5, 2e-5
TIE = 1e-5
"""Of the largest logit, or of 1: where the two best are closer, codes may part. Two implementations sum in different
orders, which moves logits by up to 2.5e-6 of that (docs/verification.md)."""


@contextmanager
def prompts_of(engine: TTSEngine) -> Iterator[list[Prompt]]:
    """Collects every prompt that the engine hands to its frame decoder."""
    decoder, prompts = engine._decoder, []
    start = decoder.start
    decoder.start = lambda slot, prompt, sampling: (prompts.append(prompt), start(slot, prompt, sampling))
    try:
        yield prompts
    finally:
        del decoder.start


def say(engine: TTSEngine, request: Request, voice: Voice | None, frames: int, **options) -> Audio:
    """A request, said by one of our engines."""
    voicing = {"speaker": request.speaker, "language": request.language, "instruct": request.instruct, "voice": voice}
    options |= {"non_streaming_mode": request.whole, "max_frames": frames}
    return engine.generate(request.text, **voicing, **options)


def parting(ours: np.ndarray, theirs: np.ndarray) -> tuple[int, int] | None:
    """(frame, group) at which codes [frames, 16] part, or None; (n, 0) where the shorter one ends after n frames."""
    n = min(len(ours), len(theirs))
    frames, groups = np.nonzero(ours[:n] != theirs[:n])
    if len(frames):
        return int(frames[0]), int(groups[0])
    return None if len(ours) == len(theirs) else (n, 0)


def gap(logits: Tensor) -> float:
    """Between the two best candidates of a draw."""
    return abs(float(logits.topk(2).values.diff()))


def tie(logits: Tensor) -> tuple[float, float]:
    """The gap, and below which gap the draw is a tie."""
    return gap(logits), TIE * max(1.0, float(logits.nan_to_num(0.0, 0.0, 0.0).abs().max()))


# ---------------------------------------------------------------- what comes of it


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Where the folder or a file in it cannot be made: RequestError."""
    try:
        yield
    except (OSError, soundfile.SoundFileError) as error:
        raise RequestError(
            f"--output: cannot write in {str(folder)!r} ({error}); make room there, or name another folder"
        ) from error


class Report:
    """What was compared and timed, printed as it comes, and the files.

    Raises:
        RequestError: the folder or a file in it cannot be written.
    """

    def __init__(self, folder: Path, rate: int, asked: list[Request]):
        self._folder, self._rate = folder, rate
        self.checks: list[dict] = []
        self.takes: list[dict] = []
        told = [{"request": r.name, "text": r.text, "instruct": r.instruct} for r in asked]
        self._pairs = [one | {"kind": kind, "files": {}} for kind in ("sampled", "greedy") for one in told]
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):  # a folder that was there may be read-only
                pass

    @property
    def failed(self) -> int:
        return sum(not check["holds"] for check in self.checks)

    def check(self, what: str, figure: str, bound: str, holds: bool) -> None:
        self.checks.append({"what": what, "figure": figure, "bound": bound, "holds": holds})
        print(f"{'ok' if holds else 'FAILS':6} {what:60} {figure:24} {bound}", flush=True)

    def near(self, what: str, ours, theirs, bound: float) -> None:
        """The largest difference; what is no number is not near."""
        ours, theirs = torch.as_tensor(ours).cpu(), torch.as_tensor(theirs).cpu()
        if ours.shape != theirs.shape:
            self.check(what, f"{list(ours.shape)} and {list(theirs.shape)}", "the same shape", False)
        else:
            figure = float((ours - theirs).abs().max())
            self.check(what, f"{figure:.1e}", f"at most {bound:.1e}", figure <= bound)

    def same_codes(
        self, what: str, ours: np.ndarray, theirs: np.ndarray, decided: Callable[[int, int], Tensor]
    ) -> None:
        """Of two that each heard what they said themselves: behind the first parting they say different things.

        `decided`: by which logits the draw of (frame, group) was decided.
        """
        part = parting(ours, theirs)
        if part is None:
            self.check(what, f"{len(ours)} frames equal", "equal", True)
        else:
            between, bound = tie(decided(*part))
            figure = f"part at frame {part[0]} of {len(ours)} and {len(theirs)}, group {part[1]}, gap {between:.1e}"
            figure += " (what follows was not compared)"
            self.check(what, figure, f"equal, or a tie: a gap below {bound:.1e}", between < bound)

    def forced_codes(self, what: str, ours: np.ndarray, logits: list[Tensor]) -> None:
        """`logits`: of each group, [frames, candidates], drawn behind our codes: every code is compared."""
        best = torch.stack([group.argmax(-1) for group in logits], dim=1).cpu().numpy()
        parts = np.argwhere(ours != best).tolist()
        if not parts:
            self.check(what, f"{len(ours)} frames equal", "equal", True)
            return
        told = [(*part, *tie(logits[part[1]][part[0]])) for part in parts]
        frame, group, between, bound = next((one for one in told if not one[2] < one[3]), told[0])
        figure = f"{len(told)} of {ours.size} differ; at frame {frame}, group {group}: gap {between:.1e}"
        self.check(what, figure, f"equal, or each a tie: a gap below {bound:.1e}", between < bound)

    def take(self, row: int, by: str, samples: np.ndarray, compute_s: float, ttfc_s: float | None = None) -> None:
        request, audio_s = self._pairs[row]["request"], len(samples) / self._rate
        if not audio_s:
            self.check(f"{request}: audio of {by}", "none", "some", False)
            return
        rtf = compute_s / audio_s
        take = {"request": request, "by": by, "audio_s": audio_s, "compute_s": compute_s, "rtf": rtf, "ttfc_s": ttfc_s}
        self.takes.append(take)
        ttfc = "" if ttfc_s is None else f", TTFC {1000 * ttfc_s:.1f} ms"
        print(f"time   {request:48} {by:11} {audio_s:.2f} s of audio in {compute_s:.2f} s, RTF {rtf:.3f}{ttfc}")
        self.wav(row, by, samples)

    def wav(self, row: int, by: str, samples: np.ndarray) -> None:
        """One side of a pair: requests as people make them come first, then the greedy ones."""
        name = f"{row + 1:02}-{by}.wav"
        with writing(self._folder):
            soundfile.write(self._folder / name, samples, self._rate, "PCM_16")
        self._pairs[row]["files"][by] = name

    def write(self, about: dict) -> None:
        told = about | {"checks": self.checks, "takes": self.takes}
        told = json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False)
        # Nothing without a "<" ends the script element that it stands in.
        data = json.dumps({"model": about["model"], "pairs": self._pairs}, allow_nan=False).replace("<", "\\u003c")
        page = Path(__file__).with_name("verify_page.html").read_text(encoding="utf-8")
        with writing(self._folder):
            (self._folder / "report.json").write_text(told, encoding="utf-8")
            (self._folder / "index.html").write_text(page.replace("{{data}}", data), encoding="utf-8")


# ---------------------------------------------------------------- the comparisons


@dataclass(frozen=True)
class Heard:
    """A request, and what our engine made of it in fp32, greedy."""

    request: Request
    voice: Voice | None
    prompt: Prompt
    audio: Audio


def speak_in_fp32(
    model: str, device: torch.device, asked: list[Request], sound: np.ndarray, ref_text: str | None, frames: int
) -> list[Heard]:
    with TTSEngine.load(model, backend="torch", device=device, dtype=torch.float32, max_streams=1) as engine:
        voices, heard = {"": None}, []
        for request in asked:
            if request.clone not in voices:
                text = ref_text if request.clone == "icl" else None
                voices[request.clone] = engine.create_voice((sound, engine.sample_rate), text)
            voice = voices[request.clone]
            with prompts_of(engine) as prompts:
                audio = say(engine, request, voice, frames, sampling=GREEDY, runaway_guard=False)
            heard.append(Heard(request, voice, prompts[0], audio))
    return heard


def voices_of_reference(report: Report, reference: Reference, heard: list[Heard], sound: np.ndarray) -> dict:
    """Its voice for every kind of clone, compared with ours."""
    voices = {"": None}
    for one in heard:
        kind = one.request.clone
        if kind not in voices:
            voices[kind] = reference.voice(sound, one.voice.ref_text)
            vector, codes = voices[kind].ref_spk_embedding.float(), voices[kind].ref_code
            report.near(f"{kind}: speaker vector", one.voice.speaker_embedding, vector, VECTOR)
            if codes is not None:
                report.near(f"{kind}: reference codes", one.voice.ref_codes, codes, 0.0)
    return voices


def compare_with_reference(report: Report, reference: Reference, one: Heard, said: Said) -> None:
    name, codes = one.request.name, said.codes.numpy()
    for rows, ours, theirs in (
        ("prompt rows", one.prompt.rows, said.rows),
        ("trailing rows", one.prompt.trailing, said.trailing),
    ):
        report.near(f"{name}: {rows}", ours, theirs, ROWS * max(1.0, float(theirs.abs().max())))
    report.same_codes(
        f"{name}: codes", one.audio.codes, codes, lambda f, group: reference.decided(f, group, codes[:f, 0].tolist())
    )
    frames = torch.from_numpy(one.audio.codes)
    if one.voice is not None and one.voice.ref_codes is not None:
        frames = torch.cat([one.voice.ref_codes, frames])
    pcm = reference.decode(frames)[-len(one.audio.samples) :]
    bound = PCM_GPU if one.prompt.rows.is_cuda else PCM
    report.near(f"{name}: PCM of the same codes", one.audio.samples, pcm, bound)


def ask_reference(
    report: Report,
    load: Callable[[torch.dtype], Reference],
    dtype: torch.dtype,
    heard: list[Heard],
    sound: np.ndarray,
    frames: int,
    seed: int,
) -> None:
    """In fp32, to compare; then in `dtype`, as people use it."""
    log.info("the reference in fp32, greedy")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        reference = load(torch.float32)
        voices = voices_of_reference(report, reference, heard, sound)
        for row, one in enumerate(heard, start=len(heard)):
            voice = voices[one.request.clone]
            if voice is not None:  # ours: where they differ was told already
                voice = replace(voice, ref_spk_embedding=one.voice.speaker_embedding, ref_code=one.voice.ref_codes)
            said = reference.speak(one.request, frames, voice)
            report.wav(row, "reference", said.samples)
            compare_with_reference(report, reference, one, said)
    if dtype != torch.float32:
        del reference
        _free()
        reference = load(dtype)
        reference.speak(heard[0].request, 4, voices[heard[0].request.clone], seed)  # what only the first one costs
    log.info("the reference as people use it")
    for row, one in enumerate(heard):
        said = reference.speak(one.request, frames, voices[one.request.clone], seed)
        report.take(row, "reference", said.samples, said.seconds)


@torch.inference_mode()
def compare_with_twin(report: Report, config: ModelConfig, tensors: dict[str, Tensor], one: Heard) -> None:
    codes = torch.from_numpy(one.audio.codes).to(one.prompt.rows.device)
    logits = forced_logits(config.talker, tensors, forced_talker(config.talker, tensors, one.prompt, codes), codes)
    rules = Code0Rules(config.talker, GREEDY.over(config.sampling).repetition_penalty, codes.device)
    for frame, code0 in enumerate(codes[:, 0]):
        logits[0][frame] = rules(logits[0][frame], frame)
        rules.remember(code0)
    report.forced_codes(f"{one.request.name}: codes, by frames and in one pass", one.audio.codes, logits)


@torch.inference_mode()
def compare_kernel(
    report: Report, checkpoint: Checkpoint, fp8: frozenset[str], device: torch.device, one: Heard, frames: int
) -> None:
    """The kernel speaks the request, greedy; twins in fp32 and in bf16 hear its codes."""
    config, request = checkpoint.config, one.request
    stored = checkpoint.talker(device, torch.bfloat16, fp8)
    tokenizer = TextTokenizer(checkpoint.folder, config.talker.text_vocab_size)

    def prompt(embeddings: Embeddings) -> Prompt:
        voicing = {"language": request.language, "speaker": request.speaker, "instruct": request.instruct}
        builder = PromptBuilder(config, tokenizer, embeddings)
        return builder.build(request.text, voice=one.voice, non_streaming_mode=request.whole, **voicing)

    embeddings = make_embeddings("megakernel", config, stored)
    kernel = make_decoder("megakernel", config, stored, embeddings, slots=1, max_positions=2048)
    hidden, logits = kernel.observe()
    kernel.start(0, prompt(embeddings), GREEDY.over(config.sampling))
    said = []
    while len(said) < frames:
        kernel.launch([0])
        drawn = kernel.collect()[0]
        if isinstance(drawn, SpeechError):
            raise drawn
        if drawn is None:
            break
        said.append((drawn, hidden[0].clone(), logits[0].clone()))
    codes, behind, drawn_from = (torch.stack(part).to(device) for part in zip(*said, strict=True))

    def twin(dtype: torch.dtype) -> list[Tensor]:
        plain = {name: tensor.to(dtype) for name, tensor in dequantized(stored, dtype).items()}
        behind = forced_talker(config.talker, plain, prompt(Embeddings(config.talker, plain)), codes)
        return [behind.float(), *forced_logits(config.talker, plain, behind, codes)]

    exact, rounded = twin(torch.float32), twin(torch.bfloat16)
    ours = [behind, *(drawn_from[:, group, : row.shape[1]] for group, row in enumerate(exact[1:]))]

    def error(said: list[Tensor], part: slice) -> float:
        pairs = zip(said[part], exact[part], strict=True)
        return float(torch.stack([(x - y).norm(dim=1) / y.norm(dim=1) for x, y in pairs]).mean())

    for name, part in (("hidden", slice(1)), ("logits of code 0", slice(1, 2)), ("other logits", slice(2, None))):
        a, b = error(ours, part), error(rounded, part)
        figure = f"{a:.1e}, of PyTorch bf16 {b:.1e}: {a / b:.2f}"
        report.check(f"kernel, {len(codes)} frames: error of {name}", figure, "ratio at most 1", a <= b)


# ---------------------------------------------------------------- the command


def verify(
    model: str,
    *,
    output: str | None = None,
    backend: str = "auto",
    device: str | None = None,
    weights: str | Collection[str] | None = None,
    frames: int = FRAMES,
    seed: int = 0,
    ref_audio: str | None = None,
    ref_text: str | None = None,
) -> bool:
    """Compare, time, print, and write a folder.

    Args:
        output: a folder that is empty or not there; None: "verify-" and the model's name.
        backend, device, weights: as `TTSEngine.load` takes them; backend and weights of the takes and of what is
            compared with fp32.
        frames: of every utterance at most.
        seed: of the takes.
        ref_audio, ref_text: Base: whose voice to clone, and what is said there; None: a synthetic sound.

    Returns:
        Does everything hold?

    Raises:
        TTSError: by kind (errors.py).
    """
    check_reference(ref_audio, ref_text)
    folder = _new_folder(output, model)
    device, module, sampling = select_device(device), reference_module(), SamplingParams(seed=seed)
    fp8 = frozenset() if weights is None else parts_of(weights)
    checkpoint = Checkpoint.open(model)
    config = checkpoint.config
    if checkpoint.fp8:
        raise RequestError("the reference has no FP8 weights: verify the bf16 checkpoint, with --weights")
    if ref_audio is not None and config.variant != "base":
        raise RequestError(f"--ref-audio is for Base checkpoints, this one is {config.variant}")
    if not 1 <= frames <= MOST_FRAMES:
        raise RequestError(f"--frames must be 1 to {MOST_FRAMES}, got {frames}")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen, reason = select_backend(backend, device, dtype, config)
    sound = reference_audio() if ref_audio is None else load_audio(ref_audio, config.codec.sample_rate)
    ref_text = REF_TEXT if ref_audio is None else ref_text
    asked = requests_of(config, in_context=ref_text is not None)

    versions = {"qwen_megakernel": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    if module:
        versions |= {"qwen_tts": module.__version__, "transformers": version("transformers")}
    print(f"{model}: {config.variant}, {config.size}, on {device}; at most {frames} frames")
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    if not module:
        print(f"note   qwen_tts, the reference, is not installed here and is not asked. To ask it:\n       {INSTALL}")
    if config.variant == "base" and ref_audio is None:
        print("note   without --ref-audio the voice that is cloned is a synthetic sound, nobody's")
    if config.variant == "base" and ref_text is None:
        print("note   without --ref-text nothing is cloned in context")

    report = Report(folder, config.codec.sample_rate, asked)  # refuses the folder before anything is computed
    log.info("ours in fp32, greedy")
    heard = speak_in_fp32(model, device, asked, sound, ref_text, frames)
    for row, one in enumerate(heard, start=len(asked)):
        report.wav(row, "ours", one.audio.samples)
    _free()
    if module:
        load = partial(Reference, module, str(checkpoint.folder), device)
        ask_reference(report, load, dtype, heard, sound, frames, seed)
    else:
        tensors = checkpoint.talker(device, torch.float32)
        for one in heard:
            compare_with_twin(report, config, tensors, one)
        del tensors
    _free()
    if chosen == "megakernel":
        compare_kernel(report, checkpoint, fp8, device, heard[0], frames)
        _free()
    else:
        print(f"note   no fast path to compare with fp32: {reason}")
    log.info("ours as people use it")
    with TTSEngine.load(model, backend=backend, device=device, weights=weights, max_streams=1) as engine:
        say(engine, asked[0], heard[0].voice, 4)  # what only the first utterance costs
        for row, one in enumerate(heard):
            audio = say(engine, one.request, one.voice, frames, sampling=sampling)
            report.take(row, "ours", audio.samples, audio.compute_s, audio.ttfc_s)

    about = {"model": model, "fingerprint": checkpoint.fingerprint, "variant": config.variant, "size": config.size}
    about |= {"device": str(device), "backend": chosen, "weights": name_of(fp8), "frames": frames, "seed": seed}
    report.write(about | {"versions": versions, "reference": bool(module), "holds": not report.failed})
    print(f"wrote  {folder.resolve()}: report.json, and index.html to listen to")
    count, unasked = len(report.checks), "" if module else "; the reference was not asked"
    print(f"FAILS: {report.failed} of {count}" if report.failed else f"HOLDS: all {count} that were compared{unasked}")
    return not report.failed


def _new_folder(output: str | None, model: str) -> Path:
    """Where to write: there is nothing yet, and nothing is made yet."""
    folder = Path(output or f"verify-{Path(model).expanduser().resolve().name}")
    with writing(folder):  # a name may be too long to look for
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken:
        raise RequestError(f"--output: {str(folder)!r} is there; nothing is overwritten, name an empty or a new folder")
    return folder


def _free() -> None:
    """Give back what the device held for what is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
