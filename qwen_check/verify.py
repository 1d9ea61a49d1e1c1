"""qwen-megakernel verify: does what we claim hold for this checkpoint, on this machine?

    ours, fp32, greedy ───── prompt rows, codes, PCM ─┐
    qwen_tts, fp32, greedy ─ the same ────────────────┴─ compared, each under its bound of docs/verification.md
    the kernel's logits ──── no further from a teacher-forced pass in fp32 than those of PyTorch bf16
    ours and qwen_tts as people use them ─ takes, timed
    -> a table, report.json, and index.html to listen to: where both spoke, without knowing which is which

`qwen_tts` is the reference implementation (reference.py). If it is not installed, our codes are compared with a
teacher-forced pass (teacher_forcing.py), which computes them in another way. Then only ours are timed and heard.
"""

import logging
import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from types import ModuleType
from typing import Any, Unpack, cast

import numpy as np
import torch
from torch import Tensor

from qwen_check.bench import free_memory
from qwen_check.reference import (
    INSTALL,
    REF_TEXT,
    Case,
    Reference,
    ReferenceOutput,
    cases_of,
    reference_audio,
    reference_module,
)
from qwen_check.report import Report, new_folder
from qwen_check.teacher_forcing import errors, observed, teacher_forced
from qwen_megakernel import Audio, SamplingParams, TTSEngine, __version__
from qwen_megakernel.backend.megakernel import MegakernelFrameDecoder
from qwen_megakernel.backend.select import Backend
from qwen_megakernel.checkpoint.fp8 import dequantized, name_of
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.choices import VERIFIED_FRAMES
from qwen_megakernel.errors import RequestError
from qwen_megakernel.model.prompt import Prompt, PromptBuilder
from qwen_megakernel.model.recording import load_recording
from qwen_megakernel.model.sampling import Code0Rules
from qwen_megakernel.model.text import TextTokenizer
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.voice import Voice, check_ref_options, text_of
from qwen_megakernel.sampling_params import GREEDY
from qwen_megakernel.speech.options import RequestOptions
from qwen_megakernel.trust.selection import Selection

log = logging.getLogger("qwen_megakernel.verify")  # shown as the package's own

MOST_FRAMES = 1000  # of an utterance: as many as fit a slot beside any reference audio
ROWS, VECTOR, PCM, PCM_GPU = 1e-5, 1e-4, 1e-5, 2e-5
"""Largest allowed differences: prompt rows (for values up to 1), speaker vectors, and PCM on a CPU and on a GPU."""


def request_of(case: Case) -> RequestOptions:
    """A case as a request to our engines."""
    how = case.conditioning
    return {
        "speaker": how.speaker,
        "language": how.language,
        "instruct": how.instruct,
        "voice": how.voice,
        "non_streaming_mode": case.non_streaming_mode,
    }


def say(engine: TTSEngine, case: Case, frames: int, **options: Unpack[RequestOptions]) -> Audio:
    """A case, spoken by one of our engines in at most `frames` frames."""
    request: RequestOptions = {**request_of(case), **options, "max_frames": frames}
    return engine.generate(case.text, **request)


def unspoken(engine: TTSEngine, text: str, audio: Audio) -> str:
    """What of a text was not spoken, at its end or before, by the talker's attention, although the model said end of
    speech. Empty: nothing, or it is not measured."""
    if audio.token_s is None or audio.finish_reason != "eos":
        return ""
    tokens = engine.tokens(text).text
    left_out = sorted({*audio.lost, *range(len(audio.token_s), len(tokens))})
    words = "".join(engine.spelt([tokens[i] for i in left_out])).strip()
    return words if any(map(str.isalnum, words)) else ""


@dataclass(frozen=True)
class EngineOutput:
    """A case with our voice, and our engine's output for it in fp32, greedy."""

    case: Case
    prompt: Prompt
    audio: Audio

    @property
    def voice(self) -> Voice | None:
        return self.case.conditioning.voice


def speak_in_fp32(
    model: str, device: torch.device, cases: list[Case], sound: np.ndarray, ref_text: str | None, frames: int
) -> list[EngineOutput]:
    """Speak every case with our engine. Base checkpoints clone `sound`, fp32 [n] at the engine's rate."""
    with TTSEngine.load(model, backend="torch", device=device, dtype=torch.float32, max_streams=1) as engine:
        voices: dict[str, Voice | None] = {"": None}
        outputs = []
        for case in cases:
            if case.clone not in voices:
                text = ref_text if case.clone == "icl" else None
                # Untrimmed, as the reference implementation takes it.
                voices[case.clone] = engine.create_voice((sound, engine.sample_rate), text, trim=False)
            case = case.with_voice(voices[case.clone])
            prompt = engine.prompt(case.text, **request_of(case))
            audio = say(engine, case, frames, sampling=GREEDY, runaway_guard=False)
            outputs.append(EngineOutput(case, prompt, audio))
    return outputs


def voices_of_reference(report: Report, reference: Reference, outputs: list[EngineOutput], sound: np.ndarray) -> dict:
    """A voice of the reference implementation for every kind of clone, compared with ours."""
    voices = {}
    for ours in outputs:
        kind, voice = ours.case.clone, ours.voice
        if voice is not None and kind not in voices:
            voices[kind] = theirs = reference.voice(sound, voice.ref_text)
            report.near(f"{kind}: speaker vector", voice.speaker_embedding, theirs.ref_spk_embedding.float(), VECTOR)
            if theirs.ref_code is not None:
                report.near(f"{kind}: reference codes", voice.ref_codes, theirs.ref_code, 0.0)
    return voices


def compare_with_reference(report: Report, reference: Reference, ours: EngineOutput, theirs: ReferenceOutput) -> None:
    """Compare prompt rows, codes, and the PCM that both make from our codes."""
    name, codes = ours.case.name, theirs.codes.numpy()
    for what, a, b in (
        ("prompt rows", ours.prompt.rows, theirs.rows),
        ("trailing rows", ours.prompt.trailing, theirs.trailing),
    ):
        report.near(f"{name}: {what}", a, b, ROWS * max(1.0, float(b.abs().max())))
    report.same_codes(
        f"{name}: codes", ours.audio.codes, codes, lambda f, group: reference.decided(f, group, codes[:f, 0].tolist())
    )
    frames = torch.from_numpy(ours.audio.codes)
    if ours.voice is not None and ours.voice.ref_codes is not None:
        frames = torch.cat([ours.voice.ref_codes, frames])
    pcm = reference.decode(frames)[-len(ours.audio.samples) :]
    bound = PCM_GPU if ours.prompt.rows.is_cuda else PCM
    report.near(f"{name}: PCM of the same codes", ours.audio.samples, pcm, bound)


def ask_reference(
    report: Report,
    load: Callable[[torch.dtype], Reference],
    dtype: torch.dtype,
    outputs: list[EngineOutput],
    sound: np.ndarray,
    frames: int,
    seed: int,
) -> None:
    """Let the reference implementation speak every case: in fp32, to compare; then in `dtype`, as people use it."""
    log.info("the reference in fp32, greedy")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        reference = load(torch.float32)
        voices = voices_of_reference(report, reference, outputs, sound)
        for row, ours in enumerate(outputs, start=len(outputs)):
            voice = voices.get(ours.case.clone)
            if voice is not None and ours.voice is not None:  # ours: `voices_of_reference` has compared them
                voice = replace(voice, ref_spk_embedding=ours.voice.speaker_embedding, ref_code=ours.voice.ref_codes)
            theirs = reference.speak(ours.case, frames, voice)
            report.wav(row, "reference", theirs.samples)
            compare_with_reference(report, reference, ours, theirs)
    if dtype != torch.float32:
        del reference
        free_memory()
        reference = load(dtype)
        case = outputs[0].case
        reference.speak(case, 4, voices.get(case.clone), seed)  # the first utterance costs more than the others
    log.info("the reference as people use it")
    for row, ours in enumerate(outputs):
        theirs = reference.speak(ours.case, frames, voices.get(ours.case.clone), seed)
        report.take(row, "reference", theirs.samples, theirs.seconds)


@torch.inference_mode()
def compare_with_teacher_forcing(
    report: Report, checkpoint: Checkpoint, device: torch.device, outputs: list[EngineOutput]
) -> None:
    """Compare our codes, made frame by frame, with the best codes of one teacher-forced pass over them."""
    config, talker = checkpoint.config, checkpoint.config.talker
    tensors, penalty = checkpoint.talker(device, torch.float32), GREEDY.over(config.sampling).repetition_penalty
    for ours in outputs:
        codes = torch.from_numpy(ours.audio.codes).to(device)
        _, *logits = teacher_forced(talker, tensors, ours.prompt, codes)
        rules = Code0Rules(talker, penalty or 1.0, device)
        for frame, code0 in enumerate(codes[:, 0]):
            logits[0][frame] = rules(logits[0][frame], frame)
            rules.remember(code0)
        report.teacher_forced_codes(f"{ours.case.name}: codes, by frames and in one pass", ours.audio.codes, logits)


@torch.inference_mode()
def compare_kernel(report: Report, plan: Backend, case: Case, frames: int) -> None:
    """Let the kernel speak the case, greedy. Compare its hidden states and logits with teacher-forced passes over its
    codes: they must be no further from fp32 than bf16 is."""
    config = plan.checkpoint.config
    stored = plan.checkpoint.talker(plan.device, torch.bfloat16, plan.fp8)
    tokenizer = TextTokenizer(plan.checkpoint.folder, config.talker.text_vocab_size)

    def prompt(embeddings: Embeddings) -> Prompt:
        builder = PromptBuilder(config, tokenizer, embeddings)
        return builder.build(case.text, case.conditioning, non_streaming_mode=case.non_streaming_mode)

    embeddings, kernel = plan.frame_decoder(stored, slots=1, max_positions=2048)
    kernel = cast(MegakernelFrameDecoder, kernel)  # of this plan
    codes, hidden, logits = observed(kernel, 0, prompt(embeddings), GREEDY.over(config.sampling), frames)

    def forced(dtype: torch.dtype) -> list[Tensor]:
        plain = {name: tensor.to(dtype) for name, tensor in dequantized(stored, dtype).items()}
        return teacher_forced(config.talker, plain, prompt(Embeddings(config.talker, plain)), codes)

    exact, rounded = forced(torch.float32), forced(torch.bfloat16)
    for name, error, usual in errors(hidden, logits, rounded, exact):
        figure = f"{error:.1e}, of PyTorch bf16 {usual:.1e}: {error / usual:.2f}"
        report.check(f"kernel, {len(codes)} frames: error of {name}", figure, "ratio at most 1", error <= usual)


def verify(
    model: str,
    *,
    output: str | None = None,
    backend: str = "auto",
    device: str | None = None,
    weights: str | Collection[str] | None = None,
    frames: int = VERIFIED_FRAMES,
    seed: int = 0,
    ref_audio: str | None = None,
    ref_text: str | None = None,
) -> bool:
    """Compare, time, print, and write a folder. `output`: a folder that is empty or does not exist; None: "verify-" and
    the model's name. `backend`, `device`, `weights`: as `TTSEngine.load` takes them. Backend and weights apply to the
    takes and to the kernel's comparison with fp32. `frames`: most frames of an utterance. `seed`: of the takes.
    `ref_audio`, `ref_text`: for Base: the voice to clone, and its transcript; None: a synthetic sound. Returns
    whether every comparison held. Raises TTSError: by kind (errors.py)."""
    check_ref_options(ref_audio, ref_text)
    folder = new_folder(output, model)
    selection = Selection(backend, device, weights=weights)
    module, sampling = reference_module(), SamplingParams(seed=seed)
    checkpoint = Checkpoint.open(model)
    config = checkpoint.config
    _refuse_what_cannot_be_verified(checkpoint, ref_audio, frames)
    plan = selection.choose(checkpoint)
    where = plan.device
    if ref_audio is None:
        sound, ref_text = reference_audio(), REF_TEXT
    else:
        sound, ref_text = load_recording(ref_audio, config.codec.sample_rate, trim=False).samples, text_of(ref_text)
    cases = cases_of(config, in_context=ref_text is not None)

    print(f"{model}: {config.variant}, {config.size}, on {where}; at most {frames} frames")
    versions = _tell_versions(module)
    if config.variant == "base" and ref_audio is None:
        print("note   without --ref-audio a synthetic sound is cloned, nobody's voice")
    if config.variant == "base" and ref_text is None:
        print("note   without --ref-text in-context cloning is not compared")

    report = Report(folder, config.codec.sample_rate, cases)  # fails early if the folder cannot be written
    log.info("ours in fp32, greedy")
    outputs = speak_in_fp32(model, where, cases, sound, ref_text, frames)
    for row, ours in enumerate(outputs, start=len(cases)):
        report.wav(row, "ours", ours.audio.samples)
    free_memory()
    if module:
        load = partial(Reference, module, str(checkpoint.folder), where)
        ask_reference(report, load, plan.dtype, outputs, sound, frames, seed)
    else:
        compare_with_teacher_forcing(report, checkpoint, where, outputs)
    free_memory()
    if plan.name == "megakernel":
        compare_kernel(report, plan, outputs[0].case, frames)
        free_memory()
    else:
        print(f"note   the kernel does not run here and is not compared with fp32: {plan.reason}")
    log.info("ours as people use it")
    with TTSEngine.load(model, backend=backend, device=where, weights=weights, max_streams=1) as engine:
        say(engine, outputs[0].case, 4)  # the first utterance costs more than the others
        for row, ours in enumerate(outputs):
            audio = say(engine, ours.case, frames, sampling=sampling)
            report.take(row, "ours", audio.samples, audio.compute_s, audio.ttfc_s)
            if skipped := unspoken(engine, ours.case.text, audio):
                print(f"note   {ours.case.name}: the speech left out {skipped!r}")

    about: dict[str, Any] = {"model": model, "fingerprint": checkpoint.fingerprint, "variant": config.variant}
    about |= {"size": config.size, "device": str(where), "backend": plan.name, "weights": name_of(plan.fp8)}
    about |= {"frames": frames, "seed": seed, "versions": versions}
    about |= {"reference": bool(module), "holds": not report.failed}
    report.write(about)
    print(f"wrote  {folder.resolve()}: report.json, and index.html to listen to")
    count, unasked = len(report.checks), "" if module else "; the reference did not run"
    print(f"FAILS: {report.failed} of {count}" if report.failed else f"HOLDS: all {count} comparisons{unasked}")
    return not report.failed


def _refuse_what_cannot_be_verified(checkpoint: Checkpoint, ref_audio: str | None, frames: int) -> None:
    if checkpoint.fp8:
        raise RequestError("the reference has no FP8 weights: verify the bf16 checkpoint with --weights")
    if ref_audio is not None and checkpoint.config.variant != "base":
        raise RequestError(
            f"--ref-audio is for Base checkpoints, but this one is {checkpoint.config.variant}: leave it out"
        )
    if not 1 <= frames <= MOST_FRAMES:
        raise RequestError(f"--frames must be 1 to {MOST_FRAMES}, got {frames}")


def _tell_versions(module: ModuleType | None) -> dict[str, str]:
    """Print versions by name and return them. `module`: the reference implementation, if it is installed."""
    versions = {"qwen_megakernel": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    if module:
        versions |= {"qwen_tts": module.__version__, "transformers": version("transformers")}
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    if not module:
        print(f"note   qwen_tts, the reference, is not installed, so it does not run. To install it:\n       {INSTALL}")
    return versions
