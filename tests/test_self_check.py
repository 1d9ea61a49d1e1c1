"""What "auto" takes by evidence: records, the self-check's process, verdicts, what voids them, what doctor says.

On a CPU the process is a small script, and the card is pretended. On a GPU (`make test-gpu`) the process is the real
one, with kernels that are made wrong on purpose.
"""

import errno
import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from probes import ProbedBackend, fail, probed
from waiting import PATIENCE_S, slow_case, until

from qwen_check import self_check
from qwen_check.teacher_forcing import teacher_forced_logits, teacher_forced_talker
from qwen_megakernel import EngineClosed, KernelFault, TTSEngine, cli
from qwen_megakernel.backend import build, select
from qwen_megakernel.backend.build import Build
from qwen_megakernel.backend.card import Card
from qwen_megakernel.backend.select import Backend
from qwen_megakernel.backend.targets import TARGETS
from qwen_megakernel.backend.torch_decoder import TorchFrameDecoder
from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.load import DEMO_FOLDER, Checkpoint
from qwen_megakernel.checkpoint.synthetic import random_talker, synthetic_config
from qwen_megakernel.choices import WEIGHTS
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.errors import BackendError
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.model.vocoder import TorchVocoder
from qwen_megakernel.trust import auto, verdicts
from qwen_megakernel.trust.selection import Selection
from qwen_megakernel.trust.verdicts import Evidence, FramePart, Key, Part, Verdict

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CARD = ((8, 9), 128, "NVIDIA GeForce RTX 4090")
DEMO = ModelConfig.from_folder(DEMO_FOLDER)
FRAME = FramePart(True, "it is right", kernel_ms=2.0, torch_ms=12.0, launches=1000, error_ratio=0.31)
VOCODER = Part(True, "it is right", kernel_ms=1.0, torch_ms=4.0)
WRONG = FramePart(False, "a sequence has other codes beside 3 others than alone", launches=50)


def said(frame: FramePart | None = FRAME, vocoder: Part | None = VOCODER) -> str:
    """A script that prints these parts."""
    lines = [{"done": 0.35, "what": "comparing codes"}]
    lines += [{"frame": asdict(frame)}] if frame else []
    lines += [{"vocoder": asdict(vocoder)}] if vocoder else []
    return "\n".join(f"print({json.dumps(line)!r}, flush=True)" for line in lines)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No verdict is known, and no test sees one of this machine's own."""
    monkeypatch.setattr(verdicts, "_HELD", {})
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path / "verdicts")
    monkeypatch.delenv(auto.VARIABLE, raising=False)


@pytest.fixture
def card(machine):
    """A card without a record."""
    machine(*CARD)
    return known("demo").key


@pytest.fixture
def child(monkeypatch):
    """child(script): what the check's process runs. `child.runs` counts."""
    runs = []

    def use(script: str, program: str = sys.executable) -> None:
        def command(_device, key: Key) -> list[str]:
            runs.append(key)
            return [program, "-c", script]

        monkeypatch.setattr(auto, "command", command)

    monkeypatch.setattr(Build, "load", lambda _build: None)
    use("raise SystemExit('no test wants a check here')")
    use.runs = runs
    return use


def decide(backend: str, device: torch.device, dtype=None, config=None, **options) -> tuple[str, str]:
    """(backend, why) that is taken."""
    return Selection(backend, device, dtype).decide(config, **options)[:2]


def take(**options) -> tuple[str, str]:
    """What "auto" takes for the demo voice, as an engine's load asks."""
    return decide("auto", GPU, torch.bfloat16, DEMO, may_check=True, **options)


def known(size: str) -> Evidence:
    """Of bf16 weights on the GPU."""
    return Evidence.of(Build.of(Card.of(GPU)), size)


def restart(monkeypatch) -> None:
    """As a new process begins."""
    monkeypatch.setattr(verdicts, "_HELD", {})


# ---------------------------------------------------------------- records


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_a_card_with_a_record_starts_at_once_and_doctor_tells_it(name, machine, child, capsys):
    machine((9, 0), 132, name)
    for fp8 in WEIGHTS.values():
        backend, reason = take(fp8=fp8)
        assert backend == "megakernel" and "we ran the kernel on an H" in reason and "1.7b 1." in reason
    assert not child.runs and known("demo").vocoder_obstacle is None
    if name == "NVIDIA H200":
        assert "we ran the kernel on an H200: a frame of one stream takes 0.6b 0.99 ms, 1.7b 1.41 ms" in doctor(capsys)


@pytest.mark.parametrize(
    "capability, multiprocessors, name",
    [
        ((9, 0), 114, "NVIDIA H100 PCIe"),
        ((9, 0), 60, "NVIDIA H100 80GB HBM3 MIG 3g.40gb"),
        ((9, 0), 132, "NVIDIA GH200 480GB"),
        ((9, 0), 132, "NVIDIA H800"),
        ((10, 0), 132, "NVIDIA H200"),
        CARD,
    ],
)
def test_other_cards_have_none(capability, multiprocessors, name, machine):
    machine(capability, multiprocessors, name)
    assert verdicts.record_of(Card.of(GPU)) is None


def test_what_was_found_wrong_on_a_card_counts_more_than_its_record(machine):
    machine((9, 0), 132, "NVIDIA H200")
    verdicts.keep(Verdict(known("demo").key, WRONG, VOCODER))
    assert take()[0] == "torch"
    assert decide("auto", GPU, config=synthetic_config("tiny"))[0] == "torch", "dims that no kernel has"


# ---------------------------------------------------------------- the check's process


def test_a_good_kernel_is_taken_and_its_card_is_checked_once(card, child, caplog, monkeypatch):
    child("print('a library says hello')\nprint('[1, 2]')\n" + said())
    with caplog.at_level(logging.INFO, "qwen_megakernel"):
        backend, reason = take()
    assert backend == "megakernel" and child.runs == [card]
    first, last = caplog.messages
    assert first == (
        "checking the kernel on this NVIDIA GeForce RTX 4090, once, in up to 60 s; "
        "QWEN_MEGAKERNEL_AUTO=torch skips this check"
    )
    for part in ("4090, demo, bf16: kernel correct, faster", "2.00 ms", "12.00 ms", "1,000 launches", "0.31 times"):
        assert part in last and part in reason
    caplog.clear()
    restart(monkeypatch)
    assert take() == (backend, reason) and len(child.runs) == 1 and not caplog.messages
    kept = json.loads(verdicts.file_of(card).read_text())
    assert kept == {"key": asdict(card), "frame": asdict(FRAME), "vocoder": asdict(VOCODER)}
    assert not list(verdicts.folder().glob(".*")), "nothing half-written stays"


def test_every_size_and_choice_of_weights_has_a_check_of_its_own(card, child):
    child(said())
    for fp8 in WEIGHTS.values():
        assert take(fp8=fp8)[0] == "megakernel"
    assert auto.checked(GPU, known("0.6b")).frame[0]
    assert len(set(child.runs)) == 4 == len(list(verdicts.folder().glob("*.json")))


def test_a_slower_kernel_and_a_slower_vocoder_are_left_alone(card, child):
    child(said(replace(FRAME, kernel_ms=13.0), replace(VOCODER, kernel_ms=4.0)))
    backend, reason = take()
    assert backend == "torch" and "correct, not faster than PyTorch: a frame takes 13.00 ms" in reason
    assert "`qwen-megakernel doctor --check` tries it again" in reason
    assert "not faster" in known("demo").vocoder_obstacle


ENDS = {
    "not started": ("", "its process could not be started: ", False),
    "wrong": (said(WRONG), "wrong: a sequence has other codes beside 3 others than alone (50 launches)", True),
    "no number": (
        said(replace(FRAME, error_ratio=float("nan"))),
        "cannot be read: the self-check: frame: error_ratio",
        False,
    ),
    "cut off": ('print(\'{"frame": {"corr\')', "its process ended with code 0 and no result", False),
    "raises": ("raise SystemExit('no such module')", "code 1 and no result: no such module", False),
    "no memory": ('print(\'{"unfinished": "CUDA out of memory"}\')', "CUDA out of memory", False),
    "crash": ("import os; os.kill(os.getpid(), 11)", "its process was ended by SIGSEGV", True),
    "killed": ("import os; os.kill(os.getpid(), 9)", "its process was ended by SIGKILL", False),
    "terminated": ("import os; os.kill(os.getpid(), 15)", "its process was ended by SIGTERM", False),
}


@pytest.mark.parametrize("how", ENDS)
def test_however_the_process_ends_pytorch_speaks_and_one_line_says_why(how, card, child, caplog, monkeypatch):
    script, told, kept = ENDS[how]
    child(script, *["/no/such/python"] * (how == "not started"))
    backend, reason = take()
    assert backend == "torch" and told in reason
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and told in warnings[0] and "doctor --check` tries it again" in warnings[0]
    assert verdicts.file_of(card).exists() == kept
    assert take() == (backend, reason) and len(child.runs) == 1, "not again in this process"
    restart(monkeypatch)
    assert take()[0] == "torch" and len(child.runs) == (1 if kept else 2)


@pytest.mark.parametrize("at", ["the start", "the frame kernel", "the vocoder"])
def test_a_process_that_does_not_end_is_ended(at, card, child, monkeypatch, tmp_path):
    """By a clock that jumps as soon as the process hangs where it should."""
    now, hear, pid = [0.0], auto._Said.hear, tmp_path / "pid"

    def hear_and_wait_long(self, line, bar) -> None:
        hear(self, line, bar)
        if self.frame or at != "the vocoder":
            now[0] = 1e6

    monkeypatch.setattr(auto._Said, "hear", hear_and_wait_long)
    monkeypatch.setattr(auto, "time", SimpleNamespace(monotonic=lambda: now[0]))
    before = said(None if at == "the frame kernel" else FRAME, None)
    before = "print('hello', flush=True)" if at == "the start" else before
    begin = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\n"
    child(begin + before + "\nwhile True: time.sleep(1)")
    took = take()[0]
    assert not Path(f"/proc/{pid.read_text()}").exists(), "it is gone"
    verdict = verdicts.read(card)
    assert "it did not end within 60 s" in (verdict.vocoder if at == "the vocoder" else verdict.frame).reason
    assert took == ("megakernel" if at == "the vocoder" else "torch") and not verdict.vocoder.taken
    assert verdict.finished == verdicts.file_of(card).exists() == (at != "the start")


def test_a_process_that_is_killed_at_the_vocoder_leaves_the_kernel_for_now(card, child):
    child(said(vocoder=None) + "\nimport os; os.kill(os.getpid(), 9)")
    assert take()[0] == "megakernel" and not verdicts.file_of(card).exists()
    assert "ended by SIGKILL" in known("demo").vocoder_obstacle


def test_what_cannot_be_compiled_is_not_checked(card, child, monkeypatch, caplog):
    def none(_build):
        raise BackendError("the kernel could not be compiled in /x: no g++")

    monkeypatch.setattr(Build, "load", none)
    backend, reason = take()
    assert backend == "torch" and "no g++" in reason and not child.runs and not verdicts.file_of(card).exists()
    assert len(caplog.messages) == 1 and "no g++" in caplog.messages[0]


@pytest.mark.parametrize("interactive", [False, True])
def test_the_process_finds_what_this_one_finds(interactive, card, child, monkeypatch, tmp_path):
    """An interactive one finds what lies in its working directory too."""
    (tmp_path / "only_here.py").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "torch.py").write_text("raise SystemExit('the wrong torch')")
    monkeypatch.setattr(sys, "path", ["" if interactive else str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path if interactive else tmp_path / "elsewhere")
    argv = real_command(GPU, card)
    assert argv[1:4] == ["-P", "-m", "qwen_check.self_check"] and argv[4:] == ["0", "demo", "bf16"]
    monkeypatch.setattr(auto, "command", lambda *_: [*argv[:2], "-c", "import only_here\n" + said()])
    assert take()[0] == "megakernel"


real_command = auto.command


def test_without_a_gpu_the_real_process_says_so():
    command = [sys.executable, "-m", "qwen_check.self_check", "0", "demo", "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0 and "unfinished" in json.loads(done.stdout.splitlines()[-1]), done.stderr


# ---------------------------------------------------------------- who may check


def test_nothing_is_checked_before_an_engine_is_loaded(card, child, capsys):
    from qwen_megakernel.server import process

    assert decide("auto", GPU) == ("megakernel", "it can run here; the self-check at the first load decides")
    assert decide("auto", GPU, torch.bfloat16, DEMO)[0] == "megakernel"
    process.check_model("demo", EngineOptions(max_streams=1, max_positions=64))
    assert cli.main(["doctor"]) == 0
    assert not child.runs


def test_what_is_asked_for_by_name_is_not_checked(card, child):
    chosen = Selection("torch").choose(Checkpoint.open("demo"))
    assert "have not been checked on this card" in chosen.vocoder_obstacle and chosen.void is None
    verdicts.keep(Verdict(card, WRONG, Part(False, "wrong too")))
    assert decide("megakernel", GPU, torch.bfloat16, DEMO, may_check=True) == ("megakernel", "asked for")
    assert decide("torch", GPU, torch.bfloat16, DEMO, may_check=True) == ("torch", "asked for")
    assert Selection("megakernel").choose(Checkpoint.open("demo")).vocoder_obstacle is None
    assert "wrong too" in Selection("torch").choose(Checkpoint.open("demo")).vocoder_obstacle
    assert not child.runs


def test_fp32_and_other_dims_are_not_checked(card, child):
    assert decide("auto", GPU, torch.float32, DEMO, may_check=True)[0] == "torch"
    assert decide("auto", GPU, torch.bfloat16, synthetic_config("tiny"), may_check=True)[0] == "torch"
    assert not child.runs


@pytest.mark.parametrize("value, taken", [("megakernel", "megakernel"), ("torch", "torch")])
def test_the_environment_decides_without_a_check(value, taken, card, child, machine, monkeypatch):
    monkeypatch.setenv(auto.VARIABLE, value)
    assert take() == (taken, f"QWEN_MEGAKERNEL_AUTO={value} asks for it")
    chosen = Selection().choose(Checkpoint.open("demo"))
    assert (chosen.name, chosen.vocoder_obstacle is None) == (taken, taken == "megakernel")
    machine((7, 5), 40, "Tesla T4")
    assert decide("auto", GPU)[0] == decide("auto", CPU)[0] == "torch"
    assert not child.runs


def test_the_environment_may_say_nothing_else(monkeypatch, capsys):
    monkeypatch.setenv(auto.VARIABLE, "yes")
    told = "QWEN_MEGAKERNEL_AUTO must be one of check, megakernel, torch, got 'yes'"
    with pytest.raises(BackendError, match=told):
        decide("auto", CPU)
    assert decide("torch", CPU) == ("torch", "asked for")
    assert cli.main(["doctor"]) == 1 and told in capsys.readouterr().err


# ---------------------------------------------------------------- files


def spoilt(key: Key) -> dict[str, str]:
    good = Verdict(key, FRAME, VOCODER).to_json()
    return {
        "cut off": json.dumps(good)[:-40],
        "empty": "",
        "no object": "[]",
        "another card's": json.dumps(good | {"key": asdict(replace(key, multiprocessors=127))}),
        "another torch's": json.dumps(good | {"key": asdict(replace(key, torch="2.7"))}),
        "without figures": json.dumps({"key": asdict(key)}),
        "other types": json.dumps(good | {"frame": asdict(FRAME) | {"correct": "yes"}}),
        "no numbers": json.dumps(good | {"frame": asdict(FRAME) | {"kernel_ms": float("nan")}}),
        "long": json.dumps(good | {"more": "x" * verdicts.MOST_BYTES}),
        "deep": "[" * 50_000,
        "no text": "\udcff\udcfe",
    }


@pytest.mark.parametrize("how", spoilt(Key("", 0, "", "", "", "", "")))
def test_a_file_that_is_no_verdict_of_this_card_is_made_anew(how, card, child, caplog):
    path = verdicts.file_of(card)
    path.parent.mkdir()
    path.write_bytes(spoilt(card)[how].encode(errors="surrogateescape"))
    child(said())
    assert take()[0] == "megakernel" and len(child.runs) == 1
    warned = {record.message for record in caplog.records if record.levelno == logging.WARNING}
    assert len(warned) == 1 and re.match(rf"the verdict {re.escape(str(path))} cannot be used", warned.pop())
    assert json.loads(path.read_text())["frame"] == asdict(FRAME)


@pytest.mark.parametrize("what", ["card", "multiprocessors", "driver", "torch", "build", "size", "weights"])
def test_a_verdict_holds_for_one_card_driver_torch_and_build(what, card):
    verdicts.keep(Verdict(card, FRAME, VOCODER))
    other = replace(card, **{what: 1 if what == "multiprocessors" else "1"})
    assert verdicts.file_of(other) != verdicts.file_of(card) and verdicts.read(other) is None


def test_the_folder_is_beside_the_builds(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert verdicts.folder() == tmp_path / "qwen_megakernel_verdicts"
    assert verdicts.folder().parent == build.cache_folder(TARGETS["sm_89x128"]).parent


@pytest.mark.parametrize("told", ["holds for this process alone", "No space left on device"])
def test_a_folder_that_cannot_be_written_costs_a_warning_and_one_check_a_process(
    told, card, child, monkeypatch, tmp_path, caplog
):
    def full(*_args) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").touch()
    if disk_is_full := "space" in told:
        monkeypatch.setattr(os, "replace", full)
    else:
        monkeypatch.setattr(verdicts, "folder", lambda: tmp_path / "file" / "verdicts")
    child(said())
    assert take()[0] == take()[0] == "megakernel" and len(child.runs) == 1
    assert any(told in message for message in caplog.messages)
    assert not disk_is_full or [path.suffix for path in verdicts.folder().iterdir()] == [".lock"]


PROCESS = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
import pytest, torch
from machines import pretend
from qwen_megakernel.backend.build import Build
from qwen_megakernel.backend.card import Card
from qwen_megakernel.trust import auto, verdicts

pretend(pytest.MonkeyPatch(), {card})
verdicts.folder = lambda: Path({folder!r})
Build.load = lambda _build: None
auto.command = lambda *_: [sys.executable, "-c", {child!r}]
gpu = torch.device("cuda")
print(auto.checked(gpu, verdicts.Evidence.of(Build.of(Card.of(gpu)), "demo")).frame[0])
"""


@pytest.mark.slow
def test_processes_that_start_at_once_check_once(tmp_path):
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')\nimport time; time.sleep(1)\n"  # a slow check
    card = ", ".join(map(repr, CARD))
    told = {"tests": str(Path(__file__).parent), "card": card, "folder": str(tmp_path / "v"), "child": count + said()}
    argv = [sys.executable, "-c", PROCESS.format(**told)]
    processes = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=PATIENCE_S)[0] for process in processes] == ["True\n"] * 3
    assert (tmp_path / "count").read_text() == "x"


def test_another_process_that_never_finishes_its_check_is_not_waited_for_without_end(card, child, monkeypatch):
    monkeypatch.setattr(auto, "LOCK_S", 0.2)
    with build.alone(verdicts.file_of(card).with_suffix(".lock"), "checks", 0.0):
        backend, reason = take()
    assert backend == "torch" and "another process has held" in reason
    assert not child.runs and not verdicts.file_of(card).exists()


# ---------------------------------------------------------------- voiding


def test_a_voided_verdict_keeps_its_figures_and_auto_takes_pytorch(card, child, caplog, monkeypatch):
    verdicts.keep(Verdict(card, FRAME, VOCODER))
    chosen = Selection("auto").choose(Checkpoint.open("demo"))
    assert chosen.name == "megakernel" and chosen.vocoder_obstacle is None
    chosen.void()
    assert "two kernel faults in service" in caplog.messages[-1] and "doctor --check" in caplog.messages[-1]
    restart(monkeypatch)
    verdict = verdicts.read(card)
    assert not verdict.frame.correct and not verdict.vocoder.correct and verdict.frame.kernel_ms == FRAME.kernel_ms
    assert take()[0] == "torch" and not child.runs
    assert known("demo").vocoder_obstacle


def test_what_was_never_checked_is_voided_too(card, child):
    Selection("megakernel").choose(Checkpoint.open("demo")).void()
    assert take()[0] == "torch" and not child.runs and verdicts.file_of(card).exists()


def test_nothing_is_voided_where_no_evidence_stands_in_question(machine):
    checkpoint = Checkpoint.open("demo")
    assert Selection("torch", "cpu").choose(checkpoint).void is None
    machine((9, 0), 132, "NVIDIA H200")
    assert Selection("megakernel").choose(checkpoint).void is None
    machine(*CARD)
    assert Selection("torch").choose(checkpoint).void is None, "the vocoder's kernels are not checked, so not used"
    kernel = Selection("megakernel").choose(checkpoint)
    assert kernel.void and kernel.spare().void is None and kernel.spare().spare() is None


class OnTrial(ProbedBackend):
    """PyTorch stands in for kernels that the self-check alone speaks for."""

    voided = 0

    @property
    def void(self):
        return self._void

    def _void(self) -> None:
        self.voided += 1

    def spare(self):
        return self.real


FAULT = KernelFault("a wait gave up")


@pytest.mark.parametrize("spare", [True, False])
def test_two_faults_in_service_void_the_verdict_and_pytorch_takes_over_if_it_may(tiny, spare):
    with probed(tiny("custom_voice"), max_streams=2, fallback="torch" if spare else None, wrap=OnTrial) as engine:
        fail(engine.probes.decoder, "collect", FAULT, times=9)
        for _ in range(2):
            with pytest.raises(KernelFault):
                engine.generate("Hello.", max_frames=3)
        if spare:
            assert engine.generate("Hello.", max_frames=3).frames
            assert engine.backend == "torch" and engine.metrics()["kernel_faults"] == 2
        else:
            until(lambda: engine.health()["status"] == "dead")
            with pytest.raises(EngineClosed):
                engine.generate("Hello.")
        assert engine.probes.voided == 1


def test_a_kernel_that_faults_at_load_gives_way_at_load(tiny):
    with probed(tiny("custom_voice"), max_streams=2, fallback="torch", wrap=OnTrial) as engine:
        fail(engine.probes.decoder, "collect", FAULT, times=9)
        engine._warm_up()
        assert engine.backend == "torch" and engine.probes.voided == 1


@pytest.mark.parametrize("backend, fallback", [("auto", "torch"), ("megakernel", None)])
def test_on_trial_auto_has_a_spare(backend, fallback, card, child, monkeypatch):
    verdicts.keep(Verdict(card, FRAME, VOCODER))
    seen = []
    monkeypatch.setattr(TTSEngine, "__init__", lambda _self, *args: seen.append(args[-1].fallback))
    monkeypatch.setattr(TTSEngine, "_warm_up", lambda *_: None)
    TTSEngine.load("demo", backend=backend)
    assert seen == [fallback]


# ---------------------------------------------------------------- the vocoder


def test_a_vocoder_that_must_not_be_taken_is_pytorchs(card, monkeypatch, caplog):
    monkeypatch.setattr(select, "GraphVocoder", lambda *_args, **_options: pytest.fail("it is taken"))
    tensors = Checkpoint.open("demo").vocoder(CPU, torch.float32)
    monkeypatch.setattr(Checkpoint, "vocoder", lambda *_: tensors)
    plan = Backend("torch", Checkpoint.open("demo"), GPU, torch.bfloat16, build=known("demo").build)
    vocoder = replace(plan, vocoder_obstacle="it was found wrong").vocoder(slots=1)
    assert isinstance(vocoder, TorchVocoder) and "it was found wrong" in caplog.messages[0]


# ---------------------------------------------------------------- doctor


def doctor(capsys, *args: str, code: int = 0) -> str:
    assert cli.main(["doctor", *args]) == code
    return capsys.readouterr().out


def test_doctor_tells_verdicts_and_what_auto_would_take(card, child, capsys):
    printed = doctor(capsys)
    assert "128 multiprocessors" in printed and printed.count("the self-check at the first load decides") == 3
    assert re.search(r"backend +auto takes megakernel on cuda: megakernel for 0.6b, 1.7b, demo$", printed, re.M)
    verdicts.keep(Verdict(card, FRAME, VOCODER))
    verdicts.keep(Verdict(replace(card, size="0.6b"), WRONG, VOCODER))
    printed = doctor(capsys)
    assert re.search(r"auto, demo +megakernel: self-check on this NVIDIA GeForce RTX 4090, demo, bf16: kernel", printed)
    assert re.search(r"auto, 0.6b +torch: .*wrong: a sequence has other codes", printed)
    assert re.search(r"auto, 1.7b +megakernel: it can run here", printed)
    told = "auto takes torch or megakernel on cuda: torch for 0.6b; megakernel for 1.7b, demo"
    assert re.search(rf"backend +{told}$", printed, re.M)
    assert str(verdicts.folder()) in printed and len(re.findall(r"^verdict ", printed, re.M)) == 2
    assert not child.runs


def test_doctors_json_is_one_object_with_everything(card, child, capsys):
    verdicts.keep(Verdict(card, FRAME, VOCODER))
    facts = json.loads(doctor(capsys, "--json"))
    (found,) = facts["cards"]
    assert found["name"] == CARD[2] and found["multiprocessors"] == 128 and found["record"] is None
    assert re.fullmatch(
        r"336 MiB for 0.6b, 448 MiB for 1.7b, .* leave 4 GiB .*; 100.0 GiB are free now", found["tables"]
    )
    assert found["verdicts"][0]["frame"] == asdict(FRAME) and found["auto"]["demo"].startswith("megakernel")
    for name in ("torch", "driver", "driver_cuda", "nvcc", "ninja", "backend", "reason", "platform"):
        assert facts[name]


@pytest.mark.parametrize(
    "said_by, sentence",
    [
        (((7, 5), 40, "Tesla T4"), "this Tesla T4 is sm_75"),
        (((8, 6), 20, "RTX A2000 Laptop"), "needs at least 32 multiprocessors"),
        ((*CARD, None), "nvcc was not found"),
    ],
)
def test_doctor_tells_why_pytorch_serves(said_by, sentence, machine, child, capsys):
    machine(*said_by)
    printed = doctor(capsys, "--check")
    assert re.search(rf"GPU .*PyTorch speaks: .*{sentence}", printed)
    assert re.search(rf"check +none was made: .*{sentence}", printed)
    assert re.search(r"backend +auto takes torch on cuda: no megakernel", printed) and not child.runs


def test_doctor_knows_rocm(machine, monkeypatch, child, capsys):
    machine((9, 0), 132, "AMD Instinct MI300X")
    monkeypatch.setattr(torch.version, "hip", "6.4", raising=False)
    printed = doctor(capsys, "--check")
    assert "built for ROCm 6.4" in printed and "it needs an NVIDIA GPU, and torch" in printed
    assert json.loads(doctor(capsys, "--json"))["cards"][0]["obstacle"] and not child.runs


def test_doctor_without_a_gpu_says_that_there_is_nothing_to_check(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.search(r"check +none was made: there is no GPU to check: ", doctor(capsys, "--check"))
    facts = json.loads(doctor(capsys, "--check", "--json"))
    assert facts["cards"] == [] and facts["check"].startswith("none was made") and facts["backend"] == "torch"


def test_doctor_checks_again(card, child, capsys):
    verdicts.keep(Verdict(card, WRONG, VOCODER))
    child(said())
    printed = doctor(capsys, "--check", "--size", "demo")
    assert re.search(r"check +self-check on this .*: kernel correct, faster", printed)
    assert child.runs == [card] and take()[0] == "megakernel" and len(child.runs) == 1
    doctor(capsys, "--check", "--weights", "fp8")
    assert (child.runs[1].size, child.runs[1].weights) == ("0.6b", "fp8")


@pytest.mark.parametrize(
    "script, told",
    [
        (said(WRONG), "wrong: a sequence has other codes"),
        (said(FRAME, Part(False, "its samples differ")), "vocoder wrong: its samples differ"),
        ("raise SystemExit(3)", "could not be finished"),
    ],
)
def test_doctors_exit_code_says_that_a_check_failed(script, told, card, child, capsys):
    child(script)
    assert told in doctor(capsys, "--check", code=1)
    found = json.loads(doctor(capsys, "--check", "--json", code=1))["check"]
    assert told in found["told"]


def test_options_of_a_check_need_one(capsys):
    assert cli.main(["doctor", "--size", "demo"]) == 1
    assert "give --check too" in capsys.readouterr().err


# ---------------------------------------------------------------- what the process does, on a CPU


class StandIn(TorchFrameDecoder):
    """PyTorch in fp32 in the kernel's place, with columns."""

    launches, ribbon = 0, None

    def __init__(self, config: ModelConfig, tensors, *, slots: int, max_positions: int, extension):
        exact = {name: tensor.float() for name, tensor in tensors.items()}
        self.ribbon = exact["talker.model.layers.0.mlp.down_proj.weight"]
        super().__init__(config, exact, Embeddings(config.talker, exact), slots=slots, max_positions=max_positions)
        self.width, self._config, self._exact, self._seen = slots, config, exact, None

    def launch(self, slots) -> None:
        self.launches += 1
        self._slot = slots[0]
        super().launch(slots)

    def observe(self):
        talker = self._config.talker
        self._seen = torch.zeros(2, talker.stack.hidden_size), torch.zeros(2, 16, talker.vocab_size)
        self._spoken: list[list] = [[], []]
        self._model = SimpleNamespace(config=self._config, device=CPU)
        return self._seen

    def collect(self):
        said_now = super().collect()
        if self._seen:
            self._spoken[self._slot] += said_now
            self._look(self._slot, torch.from_numpy(np.stack(self._spoken[self._slot])))
        return said_now

    def _look(self, slot: int, codes) -> None:
        """The last frame's hidden state and logits go to column 0."""
        prompt = self_check.make_prompt(self._model, slot)
        hidden = teacher_forced_talker(self._config.talker, self._exact, prompt, codes)
        logits = teacher_forced_logits(self._config.talker, self._exact, hidden, codes)
        self._seen[0][0] = hidden[-1]
        for group, row in enumerate(logits):
            self._seen[1][0, group, : row.shape[1]] = row[-1]


class Wrong(StandIn):
    """In one way."""

    way = ""

    def __init__(self, *args, **options):
        if self.way == "no room":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        super().__init__(*args, **options)
        self.ribbon[3, 5] *= 2.0**100 if self.way == "one weight" else 1

    def launch(self, slots) -> None:
        if self.way == "lost":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
        self.ribbon *= -1 if self.way == "race" and self.launches == 37 else 1
        super().launch(slots)

    def collect(self):
        if self.way == "fault" and self.launches > 20:
            raise KernelFault("a wait inside the kernel took longer than its limit")
        return super().collect()


@pytest.fixture
def small_check(monkeypatch):
    """small_check(way, if it is wrong) -> what the check says of a frame kernel, with few and small launches."""
    small = {"LAUNCHES": 24, "FRAMES": 8, "POSITIONS": 64, "PROMPT_ROWS": (5, 9, 1, 3), "COMPARED": 3}
    for name, value in small.items():
        monkeypatch.setattr(self_check, name, value)
    sizes = SimpleNamespace(COLUMNS=2, MOST_COLUMNS=3, BATCH_COLUMNS=0)
    monkeypatch.setattr(self_check, "load_extension", lambda _device, _fp8: None)
    monkeypatch.setattr(self_check, "frame_ms", lambda decoder, *_: 1.0 if isinstance(decoder, StandIn) else 2.0)
    config = synthetic_config("tiny")

    def check(way: str | None = None) -> FramePart:
        monkeypatch.setattr(Wrong, "way", way)
        monkeypatch.setattr(self_check, "MegakernelFrameDecoder", Wrong if way else StandIn)
        tensors = random_talker(config, CPU, seed=torch.seed() % 2**31)
        return self_check.check_frame(self_check.Model(config, tensors, CPU, sizes))

    return check


def test_the_check_finds_a_good_kernel_good(small_check, capsys):
    part = small_check()
    assert part.correct, part.reason
    assert part.taken and part.launches >= 24 and part.error_ratio < 0.1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["done"] for line in told] == sorted(line["done"] for line in told) and told[-1]["done"] < 1


@pytest.mark.parametrize(
    "way, reason",
    [
        slow_case("one weight", r"its error of hidden is|logits are not finite"),
        ("race", r"a sequence has other codes .* than alone, from frame \d+ on"),
        ("fault", "a wait inside the kernel took longer than its limit"),
        ("lost", "^RuntimeError: CUDA error: an illegal memory access was encountered$"),
    ],
)
def test_the_check_finds_a_wrong_kernel_wrong(way, reason, small_check):
    part = small_check(way)
    assert not part.correct and re.search(reason, part.reason), part


def test_no_memory_says_nothing_of_the_kernel(small_check, monkeypatch, capsys):
    with pytest.raises(torch.OutOfMemoryError):
        small_check("no room")
    monkeypatch.setattr(self_check, "make_model", lambda *_: SimpleNamespace(device=CPU))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(self_check.signal, "alarm", lambda _seconds: None)
    monkeypatch.setattr(self_check, "check_frame", lambda _model: Wrong())
    self_check.main("0", "demo", "bf16")
    assert "out of memory" in json.loads(capsys.readouterr().out.splitlines()[-1])["unfinished"]


class StandInVocoder(TorchVocoder):
    """PyTorch in the place of the vocoder's kernels, right or wrong in one way."""

    way = ""

    def __init__(self, _extension, config, tensors, *, slots: int, recent_codes):
        super().__init__(config, tensors, slots=slots)
        self.recent = recent_codes

    def push(self, slots, codes):
        if self.way == "fault":
            raise KernelFault("a wait inside the vocoder's kernel took longer than its limit")
        wrong = {"off": 1e-3, "no numbers": float("nan"), "restless": 1e-6 * torch.rand(1)}
        return super().push(slots, codes) + wrong.get(self.way, 0.0)

    def follow(self, slots, first, frames):
        assert list(first) == [0] * len(slots)
        parts = [self.recent[slot, :count].long() for slot, count in zip(slots, frames, strict=True)]
        return lambda: [self.push([slot], codes[None])[0] for slot, codes in zip(slots, parts, strict=True)]


@pytest.mark.parametrize(
    "way, reason",
    [
        ("", None),
        slow_case("off", "differ from PyTorch's by 1.0e-03, more than 2e-05"),
        ("no numbers", "gave other samples the second time"),
        slow_case("restless", "gave other samples the second time"),
        ("fault", "a wait inside the vocoder's kernel took longer than its limit"),
    ],
)
def test_the_check_of_the_vocoder(way, reason, monkeypatch):
    monkeypatch.setattr(StandInVocoder, "way", way)
    monkeypatch.setattr(self_check, "GraphVocoder", StandInVocoder)
    monkeypatch.setattr(self_check, "why_no_graphs", lambda _config, _device: None)
    part = self_check.check_vocoder(self_check.Model(synthetic_config("tiny"), {}, CPU, None))
    assert part.correct == (reason is None), part
    assert part.kernel_ms and part.torch_ms if reason is None else reason in part.reason


def test_a_vocoder_whose_kernels_cannot_run_is_not_wrong():
    part = self_check.check_vocoder(self_check.Model(synthetic_config("tiny"), {}, CPU, None))
    assert part.correct and not part.taken and part.reason.startswith("not checked: the vocoder's kernels need")


# ---------------------------------------------------------------- on a GPU


SABOTAGED = Path(__file__).with_name("sabotaged_check.py")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 8, reason="needs the kernel's GPU"
    ),
]


@pytest.fixture
def real_check(monkeypatch):
    """real_check(kind, size) -> the verdict of the real process, sabotaged like this. This one's CUDA context must
    live on."""

    def check(kind: str, size: str = "demo") -> Verdict:
        before = torch.arange(1000, device=GPU)
        argv = [sys.executable, str(SABOTAGED), kind]
        monkeypatch.setattr(auto, "command", lambda device, key: [*argv, *real_command(device, key)[4:]])
        device, found = torch.device("cuda", torch.cuda.current_device()), known(size)
        verdict = auto.check(device, found.build, found.key)
        assert int((before + torch.ones(1000, device=GPU)).sum()) == 500_500
        torch.cuda.synchronize()
        return verdict

    return check


class TestOnAGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("size", ["demo", "0.6b", "1.7b"])
    def test_the_kernel_is_right(self, size, real_check, capsys):
        verdict = real_check("no_sabotage", size)
        with capsys.disabled():
            print(f"\n  {verdict}")
        assert verdict.finished and verdict.frame.correct and verdict.vocoder.correct, str(verdict)
        assert verdict.frame.launches >= 100 and verdict.frame.error_ratio <= 1.0 and verdict.frame.taken
        assert verdicts.read(verdict.key) == verdict

    @pytest.mark.parametrize(
        "kind, reason",
        [
            ("one_weight", "its error of|not finite"),
            ("race", "a sequence has other codes"),
            ("lost_packets", "a wait inside the kernel took longer than its limit"),
            ("illegal_access", "illegal memory access|CUDA error"),
        ],
    )
    def test_a_wrong_kernel_is_found_wrong(self, kind, reason, real_check):
        verdict = real_check(kind)
        assert verdict.finished and not verdict.frame.correct and re.search(reason, verdict.frame.reason), str(verdict)
        assert verdicts.read(verdict.key) == verdict and not known("demo").frame[0]

    def test_a_kernel_that_hangs_is_ended(self, real_check):
        verdict = real_check("hang")
        assert verdict.finished and "it did not end within 60 s" in verdict.frame.reason, str(verdict)
