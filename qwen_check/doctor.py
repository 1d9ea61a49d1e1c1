"""`qwen-megakernel doctor`: what this machine can do, and what is known about the kernel on its GPUs."""

import json
import platform
import shutil
import subprocess

import torch

from qwen_megakernel import __version__
from qwen_megakernel.backend.build import Build
from qwen_megakernel.backend.card import Card, driver_version, find_ninja, find_nvcc, no_nvcc, why_no_gpu
from qwen_megakernel.backend.megakernel import TABLES_LEAVE, free_memory, table_bytes
from qwen_megakernel.backend.select import Backend
from qwen_megakernel.backend.targets import Target
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.choices import DEMO, DEMO_NOTICE, WEIGHTS
from qwen_megakernel.errors import BackendError
from qwen_megakernel.trust import auto, text_heads, verdicts
from qwen_megakernel.trust.selection import Decision, Selection
from qwen_megakernel.trust.verdicts import SIZES, Evidence, Key, Verdict, read, record_of


def run(*, check: bool, size: str, fp8: frozenset[str], as_json: bool) -> int:
    """Examine the machine, and print the findings. `check`: check the kernel now, as "auto" does at first use. `size`,
    `fp8`: what to check; see verdicts.SIZES and fp8.PARTS. `as_json`: one JSON object instead of lines of text. Returns
    the process's exit code: 1 if the check found something wrong, or could not be finished. Raises BackendError: the
    environment variable for "auto" has a value that is not in auto.MODES."""
    selection, verdict = Selection("auto"), None
    card = selection.card
    obstacle = card.obstacle if card else f"there is no GPU to check: {why_no_gpu()}"
    if check and card and obstacle is None:
        build = Build.of(card, fp8)
        verdict = auto.check(selection.device, build, Key.of(build, size))
    facts = examine(selection)
    if check:
        facts["check"] = f"none was made: {obstacle}" if verdict is None else _told(verdict)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0 if verdict is None or verdict.good else 1


def examine(selection: Selection) -> dict:
    """What an issue report asks for, by name. `selection`: what engines take by default."""
    nvcc, ninja, cards, device = find_nvcc(), find_ninja(), [], selection.device
    if torch.cuda.is_available():
        cards = [_card(Selection("auto", f"cuda:{i}")) for i in range(torch.cuda.device_count())]
    backend, reason = _taken(selection, cards)
    facts = {
        "qwen_megakernel": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_rocm": torch.version.hip,
        "cards": cards,
        "driver": _output_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "driver_cuda": ".".join(map(str, driver_version() or ("none",))),
        "nvcc": f"{_output_line([nvcc, '--version'], -2)} ({nvcc})" if nvcc else no_nvcc(),
        "ninja": _output_line([ninja or "ninja", "--version"]),
        "checkpoints": _cached_checkpoints(),
        "word_times": text_heads.told(),
        "auto": auto.mode(),
        "backend": backend,
        "device": str(device),
        "reason": reason,
    }
    if device.type == "cpu":
        demo = Backend("torch", Checkpoint.open(DEMO), device, torch.float32).load(slots=1, max_positions=16)
        facts["cpu"] = f"with the {DEMO} voice, {demo.cpu}"
    return facts


def _taken(selection: Selection, cards: list[dict]) -> tuple[str, str]:
    """(backend, why) that "auto" takes by default. On a GPU that can run the kernel it goes by the model's size."""
    by_size = cards[selection.device.index or 0].get("auto") if selection.card else None
    if not by_size:
        decision = selection.decide()
        return decision.backend, decision.reason
    sizes: dict[str, list[str]] = {}
    for size, told in by_size.items():
        sizes.setdefault(told.partition(":")[0], []).append(size)
    return " or ".join(sizes), "; ".join(f"{backend} for {', '.join(names)}" for backend, names in sizes.items())


def _card(selection: Selection) -> dict:
    properties, card = torch.cuda.get_device_properties(selection.device), selection.card
    assert card, "it is a GPU"

    def size(name: str, unit: int) -> float | None:
        value = getattr(properties, name, None)  # older torch lacks some of them
        return None if value is None else round(value / unit, 1)

    facts = {
        "name": card.name,
        "capability": f"{card.capability[:-1]}.{card.capability[-1]}",
        "multiprocessors": card.multiprocessors,
        "memory_gib": size("total_memory", 2**30),
        "l2_mib": size("L2_cache_size", 2**20),
        "shared_kib": size("shared_memory_per_multiprocessor", 2**10),
        "obstacle": card.obstacle,
    }
    if card.obstacle is None:
        record = record_of(card)
        assert card.target, "it has no obstacle"
        facts["launch"] = _launch(card.target)
        facts["record"] = None if record is None else str(record)
        facts["auto"] = {size: _auto(selection.decide(), size) for size in SIZES.values()}
        facts["tables"] = _tables(selection.device)
        facts["verdicts"] = [_told(verdict) for verdict in _verdicts(card)]
    return facts


def _auto(decision: Decision, size: str) -> str:
    """What "auto" takes for a size with bf16 weights, and why. `decision`: for any size."""
    backend, reason, evidence = decision
    if evidence is not None:
        taken, reason = Evidence.of(evidence.build, size).frame
        backend = "megakernel" if taken else "torch"
    return f"{backend}: {reason}"


def _launch(target: Target) -> str:
    """How many streams share a launch."""
    narrow = max(target.columns, target.wide)
    if not target.batch:
        return f"up to {narrow} streams share one; {target.name} has no graphs for more"
    return f"up to {narrow} streams share one, and up to {target.batch} where many are open"


def _tables(device: torch.device) -> str:
    """Where the kernel looks up a part of a frame in tables, and what they take."""
    sizes = ", ".join(f"{table_bytes(width) / 2**20:.0f} MiB for {size}" for width, size in SIZES.items())
    return (
        f"{sizes}, if they leave {TABLES_LEAVE / 2**30:.0f} GiB free beside the model; "
        f"{free_memory(device) / 2**30:.1f} GiB are free now"
    )


def _verdicts(card: Card) -> list[Verdict]:
    """The kept verdicts of a card, for the usual choices of weights."""
    try:
        builds = [Build.of(card, fp8) for fp8 in WEIGHTS.values()]
    except BackendError:  # the kernel's sources are missing, which "auto" reports
        return []
    return [verdict for size in SIZES.values() for build in builds if (verdict := read(Key.of(build, size)))]


def _told(verdict: Verdict) -> dict:
    return verdict.to_json() | {"finished": verdict.finished, "told": str(verdict)}


def _print(facts: dict) -> None:
    built_for = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or '- (CPU build)'}"
    rows = [
        ("qwen-megakernel", f"{facts['qwen_megakernel']}, Python {facts['python']}, {facts['platform']}"),
        ("torch", f"{facts['torch']}, built for {built_for}"),
    ]
    rows += [("GPU", _line_of(card)) for card in facts["cards"]]
    if not facts["cards"]:
        rows.append(("GPU", f"none that torch can use: {why_no_gpu()}"))
    rows += [(name, facts[name]) for name in ("driver", "nvcc", "ninja", "checkpoints")]
    rows.append(("backend", f"auto takes {facts['backend']} on {facts['device']}: {facts['reason']}"))
    for card in facts["cards"]:
        rows += [(f"auto, {size}", told) for size, told in card.get("auto", {}).items()]
        rows += [("launch", card["launch"])] if "launch" in card else []
        rows += [("tables", card["tables"])] if "tables" in card else []
        rows += [("verdict", verdict["told"]) for verdict in card.get("verdicts", ())]
    if any(card.get("verdicts") for card in facts["cards"]):
        rows.append(("kept in", str(verdicts.folder())))
    rows += [("word times", told) for told in facts["word_times"]]
    if "cpu" in facts:
        rows.append(("CPU", facts["cpu"]))
    if "check" in facts:
        rows.append(("check", facts["check"] if isinstance(facts["check"], str) else facts["check"]["told"]))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def _line_of(card: dict) -> str:
    """A line about a GPU, with the reason if PyTorch serves it."""
    parts = [card["name"], f"sm_{card['capability'].replace('.', '')}", f"{card['multiprocessors']} multiprocessors"]
    for name, unit in (("memory_gib", "GiB"), ("l2_mib", "MiB of L2"), ("shared_kib", "KiB of shared memory each")):
        if card[name] is not None:
            parts.append(f"{card[name]:g} {unit}")
    return ", ".join(parts) + (f"; PyTorch speaks: {card['obstacle']}" if card["obstacle"] else "")


def _output_line(command: list[str], line: int = 0) -> str:
    """One line of a program's output, or why there is none."""
    if not shutil.which(command[0]):
        return f"{command[0]} not found"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return (done.stdout or done.stderr).strip().splitlines()[line].strip()
    except (OSError, subprocess.TimeoutExpired, IndexError) as error:
        return f"{command[0]} failed: {error!r}"


def _cached_checkpoints() -> str:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = [r.repo_id for r in scan_cache_dir().repos if "qwen3-tts" in r.repo_id.lower()]
    except CacheNotFound:
        cached = []
    listed = ", ".join(sorted(cached)) if cached else "none in the hub cache"
    return f"{DEMO} (bundled, {DEMO_NOTICE}); {listed} ({constants.HF_HUB_CACHE})"
