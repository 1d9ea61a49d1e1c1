"""`qwen-megakernel voices`: list saved voices, check whether they fit a checkpoint, and make one."""

import argparse
import json
from pathlib import Path
from typing import Any

from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.commands.options import shown
from qwen_megakernel.commands.output import check_writable
from qwen_megakernel.engine.audio import FRAME_S
from qwen_megakernel.errors import RequestError, VoiceError
from qwen_megakernel.model.voice import Voice, VoiceEncoder, check_ref_options
from qwen_megakernel.speech.request import fitting_voice

_ENDING = ".safetensors"
_COLUMNS = ("name", "reference", "checkpoint", "text")


def list_voices(args: argparse.Namespace) -> int:
    if not args.folder.is_dir():
        raise RequestError(f"no folder {str(args.folder)!r}; `voices show` looks at one file")
    entries = [_entry(path) for path in sorted(args.folder.glob("*" + _ENDING))]
    if args.json:
        print(json.dumps(entries, indent=2))
    elif not entries:
        print(f"no voices: {args.folder} holds no *{_ENDING}")
    else:
        _print_table(entries)
    return 1 if any("error" in entry for entry in entries) else 0


def _entry(path: Path) -> dict[str, Any]:
    """What `list` shows for a file; if it is no voice, the reason."""
    try:
        voice = Voice.load(path)
    except VoiceError as error:
        return {"name": path.stem, "error": str(error)}
    about = {"reference_s": _seconds(voice), "fingerprint": voice.fingerprint, "has_text": voice.ref_text is not None}
    return {"name": path.stem} | about


def _print_table(entries: list[dict[str, Any]]) -> None:
    rows = [_COLUMNS]
    for entry in entries:
        if "error" not in entry:
            seconds = entry["reference_s"]
            reference = "none" if seconds is None else f"{seconds:.1f} s"
            text = "yes" if entry["has_text"] else "no"
            rows.append((shown(entry["name"]), reference, entry["fingerprint"] or "unknown", text))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for entry in entries:
        if "error" in entry:
            print(f"not a voice: {shown(entry['error'])}")


def show_voice(args: argparse.Namespace) -> int:
    about = _about(Voice.load(args.file))
    if args.json:
        print(json.dumps({"file": str(args.file)} | about, indent=2))
        return 0
    frames = about["reference_frames"]
    reference = f"{frames} frames, {about['reference_s']:.2f} s" if frames else "none: it speaks by its vector alone"
    lines = [
        ("file", str(args.file)),
        ("checkpoint", about["fingerprint"] or "unknown"),
        ("vector", f"{about['vector_size']} numbers, norm {about['vector_norm']:.3g}"),
        ("reference", reference),
        ("text", "none" if about["text"] is None else about["text"]),
        *(("note", note) for note in about["notes"]),
        ("digest", about["digest"]),
    ]
    for name, value in lines:
        print(f"{name:<11} {shown(value)}")
    return 0


def _about(voice: Voice) -> dict[str, Any]:
    return {
        "fingerprint": voice.fingerprint,
        "vector_size": len(voice.speaker_embedding),
        "vector_norm": float(voice.speaker_embedding.norm()),
        "reference_frames": 0 if voice.ref_codes is None else len(voice.ref_codes),
        "reference_s": _seconds(voice),
        "text": voice.ref_text,
        "notes": list(voice.notes),
        "digest": voice.digest.hex(),
    }


def _seconds(voice: Voice) -> float | None:
    """Length of the reference recording that its prompts begin with."""
    return None if voice.ref_codes is None else round(len(voice.ref_codes) * FRAME_S, 2)


def make_voice(args: argparse.Namespace) -> int:
    check_ref_options(args.ref_audio, args.ref_text)
    check_writable("--output", args.output)
    encoder = VoiceEncoder(Checkpoint.open(args.model))  # only the encoders, because nothing is spoken
    voice = encoder.encode(args.ref_audio, args.ref_text, trim=not args.no_trim)
    voice.save(args.output)
    print(f"wrote   {Path(args.output).resolve()}")
    return 0


def check_voice(args: argparse.Namespace) -> int:
    voice, checkpoint = Voice.load(args.file), Checkpoint.open(args.model)
    if args.allow_foreign_voice and checkpoint.config.variant != "custom_voice":
        why = f"is for CustomVoice checkpoints; {args.model} is {checkpoint.config.variant}"
        raise RequestError(f"--allow-foreign-voice {why}: leave it out")
    try:
        fitting_voice(voice, checkpoint, allow_foreign=args.allow_foreign_voice)
    except VoiceError as error:
        if not args.json:
            raise
        print(json.dumps({"fits": False, "reason": str(error)}, indent=2))
        return 1
    origin = checkpoint.origin(voice.fingerprint) or "made by another checkpoint; its speaker vector alone is used"
    if args.json:
        print(json.dumps({"fits": True, "reason": None, "origin": origin}, indent=2))
    else:
        print(f"{args.file} fits {args.model}: {origin}")
    return 0
