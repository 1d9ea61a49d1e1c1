"""The benchmarks run, say what they say in one way, and tell when they cannot. What they measure is nobody's business
here."""

import datetime
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import common
import graph_frame
import measure_drift
import measure_listeners
import measure_loop
import numpy as np
import peers
import pytest
import run_all
import torch
from common import wait_until_ready
from measure_load import FRAMES
from pipecat.utils.string import match_endofsentence
from serving import running

from qwen_check import bench
from qwen_megakernel import BackendError, RequestError, SamplingParams, TTSEngine, cli
from qwen_megakernel.backend.card import find_nvcc
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.checkpoint.synthetic import random_talker, synthetic_config

BENCHMARKS = Path(__file__).parents[1]


@pytest.mark.slow
def test_bench_tells_a_table_and_a_block_to_paste(capsys):
    assert cli.main(["bench", "--device", "cpu"]) == 0
    table, block = re.fullmatch(r"(.*)\nTo paste.*?```json\n(.*)\n```\n", capsys.readouterr().out, flags=re.S).groups()
    told = json.loads(block)
    for name in ("read_gb_s", "gb_a_frame", "floor_ms", "frame_ms_1", "ttfc_ms_p50", "ttfc_ms_p95", "rtf_1", "rtf_8"):
        assert told[name] > 0, name
    assert told["model"] == "demo" and told["backend"] == "torch" and told["weights"] == "bf16"
    assert told["when"] == datetime.date.today().isoformat() and str(os.cpu_count()) in told["cpu"]
    assert told["floor_ms"] == pytest.approx(1000 * told["gb_a_frame"] / told["read_gb_s"], rel=0.01)
    assert f"{told['rtf_8']:.4f}" in table and "first audio (TTFC)" in table


@pytest.mark.slow
def test_bench_with_other_weights_reads_fewer_bytes(capsys):
    """Where the kernel reads them: PyTorch's backend widens them at load."""
    told = bench.run("demo", device="cpu", weights="fp8", tell=lambda _line: None)
    assert told["weights"] == "fp8" and told["backend"] == "torch"
    plain = sum(tensor.nbytes for tensor in Checkpoint.open("demo").talker(torch.device("cpu"), torch.float32).values())
    assert told["gb_a_frame"] * 1e9 > plain, "fp32, and the code predictor fifteen times"
    assert cli.main(["bench", "--model", "/no/such/model"]) == 1
    assert "no/such/model" in capsys.readouterr().err


def test_a_frame_reads_the_talker_once_and_the_code_predictor_fifteen_times():
    config = synthetic_config("tiny-adapter")
    sizes = {name: t.nbytes for name, t in random_talker(config, torch.device("cpu"), 1).items()}
    talker, frame = bench.weight_bytes(sizes)
    stack = sum(size for name, size in sizes.items() if name.startswith("talker.model.") and "embedding" not in name)
    heads = sum(size for name, size in sizes.items() if "lm_head" in name)
    predictor = sum(
        size for name, size in sizes.items() if "code_predictor" in name and not re.search("lm_head|embedding", name)
    )
    assert talker == stack and predictor > 0
    assert frame == stack + sizes["talker.codec_head.weight"] + heads + 15 * predictor


def test_a_sentence_ends_where_pipecat_ends_it():
    """Behind "I." it waits for one sentence more: 0.2 s in measure_e2e.py, whose LLM says a word in 20 ms."""
    for _ in range(200):
        words = bench.sentence()
        assert match_endofsentence(f"{words} And") == len(words), words


class Decoder:
    """Says end of speech where `ends` says so, a run of frames for a run."""

    def __init__(self, columns: int, ends=()):
        self.columns, self.ends, self.flying, self.seen, self.runs = columns, list(ends), 0, 0, 0

    def start(self, slot, prompt, sampling):
        assert len(prompt.rows) == 10 and self.flying == 0
        self.runs += slot == 0

    def launch(self, slots):
        self.flying += 1
        assert self.flying <= 4 and slots == list(range(self.columns))

    def collect(self):
        self.flying -= 1
        self.seen += 1
        ended = self.ends[self.runs - 1] if self.runs <= len(self.ends) else self.ends == ["always"]
        return [torch.zeros(16)] * (self.columns - 1) + [None if ended else torch.zeros(16)]


@pytest.mark.parametrize("columns", [1, 3])
def test_frames_are_counted_behind_the_warm_up_and_all_are_collected(columns):
    decoder = Decoder(columns, [True, False, True, True, False])
    assert bench.frame_ms(decoder, torch.zeros(8), SamplingParams(), columns, 40) > 0
    assert decoder.runs == 5, "a run in which a stream ended does not count"
    assert decoder.flying == 0 and decoder.seen == 5 * (20 + 4 + 3)


def test_a_model_that_always_ends_is_told():
    with pytest.raises(RequestError, match="timed"):
        bench.frame_ms(Decoder(1, ["always"]), torch.zeros(8), SamplingParams(), 1, 20)


def test_a_size_is_of_random_weights_alone(capsys):
    assert cli.main(["bench", "--device", "cpu", "--size", "1.7b"]) == 1
    assert cli.main(["bench", "--model", "demo", "--size", "0.6b"]) == 1
    assert capsys.readouterr().err.count("--size chooses random weights") == 2


@pytest.mark.slow
def test_a_checkpoint_without_speakers_is_measured_too(tiny):
    folder, lines = tiny("base", eos_gain=0.0), []
    told = bench.run(str(folder), device="cpu", tell=lines.append)
    assert told["rtf_8"] > 0
    assert told["model"] == folder.name and str(folder) not in "".join(lines), "it goes into an issue"


@pytest.mark.slow
def test_our_engine_is_measured_beside_its_peers(tmp_path):
    """By the script, in its process; a peer that is not installed is named, not left out in silence."""
    command = [sys.executable, str(BENCHMARKS / "measure_peers.py"), "--size", "demo", "--utterances", "1"]
    command += ["--only", "qwen_megakernel, PyTorch", "faster-qwen3-tts", "--python", sys.executable]
    done = subprocess.run([*command, "--json", str(tmp_path / "told.json")], capture_output=True, text=True)
    assert done.returncode == 1, "what was asked for by name is missing"
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == json.loads((tmp_path / "told.json").read_text())
    assert re.search(r"faster-qwen3-tts +not measured: .*No module named", done.stdout)
    assert "No module named" in told["not_measured"]["faster-qwen3-tts"]
    (ours,) = told["peers"].values()
    assert set(ours["ttfc_ms"]) == set(ours["rtf"]) == {"1", "4", "8"} and ours["frame_ms"] > 0
    assert ours["ttfc_ms"]["1"]["p50"] < ours["ttfc_ms"]["8"]["p50"], "eight frames come behind one"
    assert ours["ttfc_ms"]["1"]["n"] == 1 and ours["rtf"]["1"]["p95"] > 0


@pytest.mark.slow
def test_a_run_that_measured_nothing_fails_and_says_why():
    command = [sys.executable, str(BENCHMARKS / "measure_peers.py"), "--size", "demo", "--only", "qwen-tts-hf"]
    command += ["--server", "theirs", "http://127.0.0.1:9/v1/audio/speech", "{}"]
    done = subprocess.run([*command, "--python", "no/such/python"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "not measured: No such file or directory: no/such/python (make peers)" in done.stdout
    assert re.search("theirs +not measured: .*refused", done.stdout)
    assert set(json.loads(done.stdout.splitlines()[-1])["not_measured"]) == {"qwen-tts-hf", "theirs"}


@pytest.mark.slow
def test_a_server_is_measured_through_its_api(capsys, monkeypatch):
    with running(lambda: TTSEngine.load("demo", device="cpu", max_streams=2), model="demo") as server:
        wait_until_ready(f"{server.url}/ready")
        fields = json.dumps({"model": "demo", "voice": "ada", "seed": 5})
        url = f"{server.url}/v1/audio/speech"
        monkeypatch.setattr(sys, "argv", ["peers.py", "server", "--url", url, "--fields", fields, "--repeats", "2"])
        peers.main()
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        samples = sum(peers.Server(url, fields).speak("Hello there.", 0, None))
        assert samples == len(
            server.service.engine.generate("Hello there.", speaker="ada", sampling=SamplingParams(seed=5)).samples
        )
    assert told["rtf"]["whole"]["p50"] > 0 and told["frame_ms"] is None


def test_what_a_server_says_of_a_request_it_refuses_is_told(monkeypatch):
    with running(lambda: TTSEngine.load("demo", device="cpu", max_streams=1), model="demo") as server:
        wait_until_ready(f"{server.url}/ready")
        peer = peers.Server(f"{server.url}/v1/audio/speech", '{"model": "demo", "voice": "nobody"}')
        with pytest.raises(SystemExit, match="HTTP 400: .*nobody"):
            list(peer.speak("Hello there.", 0, None))


@pytest.mark.parametrize(
    "command, why",
    [
        ("measure_peers --utterances 0", "must be 1 or more, got 0"),
        ("measure_peers --json no/such/folder/x.json", "'no/such/folder/x.json' cannot be written"),
        ("measure_peers --draw chart missing.json", "missing.json is not what --json wrote"),
        ("measure_peers --draw chart half.json", "half.json is not what --json wrote"),
        ("measure_peers --draw chart none.json", "nothing was measured"),
        ("measure_load --rates -1", "must be above 0, got -1"),
        ("measure_load --rates 0", "must be above 0, got 0"),
        ("measure_neighbour --duty 0", "must be above 0, got 0"),
        ("measure_load --draw chart", "--draw needs a file"),
        ("measure_listeners --rates 0", "must be above 0, got 0"),
        ("measure_listeners --ways pigeon", "invalid choice: 'pigeon'"),
        ("run_all --minutes 0", "must be above 0, got 0"),
        ("measure_load --draw chart none.json", "none.json is not what run_all.py wrote"),
        ("measure_rtf --repeats 0", "must be 1 or more"),
        ("measure_e2e --llm-ms -100", "must be above 0"),
        ("measure_pipecat --utterances 0", "must be 1 or more"),
        ("measure_serving --requests x", "invalid positive value"),
        ("measure_fp8 --device banana", "banana"),
        ("measure_endings --utterances 0", "must be 1 or more"),
        ("measure_batch --lines 1", "--lines must be at least 2"),
        ("run_all --output half.json", "is not a folder"),
    ],
)
def test_what_a_benchmark_cannot_do_is_told_before_it_measures(command, why, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "half.json").write_text('{"peers": {')
    (tmp_path / "none.json").write_text('{"peers": {}}')
    name, *options = command.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(BackendError if name == "measure_fp8" else SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert why in f"{ended.value}{capsys.readouterr().err}"
    assert not isinstance(ended.value, SystemExit) or ended.value.code


@pytest.mark.slow
def test_endings_are_told_in_tables_and_one_line():
    command = [sys.executable, str(BENCHMARKS / "measure_endings.py"), "--utterances", "4", "--suppressed", "1"]
    command += ["--seed", "108"]  # short texts
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [row["utterances"] for row in told["as_it_is"].values()] == [1] * 4
    assert sum(sum(row["ends"].values()) for row in told["suppressed"].values()) == 1
    assert "false ends" in done.stdout and "seconds behind" in done.stdout


@pytest.mark.slow
def test_listeners_of_a_server_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(measure_listeners, "FRAMES", 10)  # not the 63 of what is published
    command = "measure_listeners --size demo --device cpu --rates --live 1 --seconds 0.5 --slots 2 --clients 1"
    monkeypatch.setattr(sys, "argv", command.split())
    measure_listeners.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(row["way"], row["live"], row["n"]) for row in rows] == [("HTTP", 1, 2), ("WebSocket", 1, 2)]
    for row in rows:
        assert row["heard_s"] == pytest.approx(0.8), "a socket's numbers of contexts are no sound"
        assert 0 <= row["without_gap"] <= 1 and row["p95"] >= row["p50"] > 0


@pytest.mark.slow
def test_fronts_speak_over_a_pretended_gpu():
    command = [sys.executable, str(BENCHMARKS / "measure_fronts.py"), *"--fronts 1 --live 1 --seconds 1".split()]
    done = subprocess.run([*command, "--clients", "1"], capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert row["refused"] == 0 and row["n"] > 0 and row["heard_s"] == pytest.approx(FRAMES * 0.08)


def test_the_loop_decides_the_same_with_the_guard_and_in_every_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", "measure_loop --open 1 3 --width 2 --frames 60 --rounds 1".split())
    told = []
    for _ in range(2):
        measure_loop.main()
        told.append(json.loads(capsys.readouterr().out.splitlines()[-1])["results"])
    for row, again in zip(*told, strict=True):
        assert row["plain_us"] > 0 and row["guarded_us"] > 0
        assert row["decided"] == again["decided"] and len(set(row["decided"])) == 1
    assert [row["open"] for row in told[0]] == [1, 3] and told[0][0]["decided"] != told[0][1]["decided"]


@pytest.mark.ray
def test_replicas_answer_whole_utterances():
    """An utterance that fills its slot is cut and told as an error: then the benchmark would measure nothing."""
    pytest.importorskip("ray")
    command = [sys.executable, str(BENCHMARKS / "measure_replicas.py"), "--size", "demo", "--device", "cpu"]
    command += ["--replicas", "1", "--rates", "2", "--seconds", "5", "--slots", "16", "--clients", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert row["heard_s"] == pytest.approx(63 * 0.08)
    assert row["answered"] == [row["n"] - row["refused"]], "a busy CPU may refuse"


def test_a_voice_that_changes_is_told(fresh_seed):
    """Of tones whose pitch, pace and loudness are known."""
    rng, rate = np.random.default_rng(fresh_seed), 24000
    rows, at_s = [], 0.0
    for i in range(20):
        hz, seconds = 150 * 2 ** (i / 19 / 12), 3 * 1.1 ** (i / 19)  # a semitone higher, a tenth slower, 6 dB softer
        time = np.arange(int(seconds * rate)) / rate
        tone = sum(np.sin(2 * np.pi * k * hz * time) / k for k in range(1, 6)) * 0.2 * 0.5 ** (i / 19)
        samples = (tone + rng.normal(0, 1e-3, len(time))).astype(np.float32)
        rows.append(measure_drift.measured(samples, rate, 50, at_s))
        at_s += seconds
    assert rows[0]["pitch"] == pytest.approx(150, rel=0.01)
    told = measure_drift.changes(rows)
    assert told["drift"]["pitch"] == pytest.approx(1, abs=0.15)
    assert told["drift"]["pace"] == pytest.approx(9.5, abs=0.5) and told["drift"]["loudness"] == pytest.approx(
        -6, abs=0.3
    )
    assert told["error"]["loudness"] < 0.2 and told["within"]["pitch"] == pytest.approx(0, abs=0.1)


def test_the_text_of_a_drift_is_cut_as_books_are():
    sentences = list(islice(measure_drift.pieces_of(None, 120, 1), 60))
    assert max(map(len, sentences)) <= 120 and len(set(sentences)) == 60, "in a new order each time"
    assert list(measure_drift.pieces_of("One.\nTwo.\n\nThree.", 300, 1)) == ["One. Two.", "Three."]


@pytest.mark.slow
def test_a_drift_is_told_in_a_table_and_one_line():
    command = [sys.executable, str(BENCHMARKS / "measure_drift.py"), "--device", "cpu"]
    done = subprocess.run([*command, *"--minutes 0.1 --piece 60".split()], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["seconds"] >= 6 and set(told["results"]["drift"]) == {"pace", "pitch", "loudness"}
    assert "minutes of speech" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_says_so():
    command = [sys.executable, str(BENCHMARKS / "run_all.py"), "--only", "measure_decode"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "CUDA GPU" in done.stderr


def test_results_are_no_change_of_what_is_measured(tmp_path, monkeypatch):
    """run_all.py writes them one by one into a file that is committed."""
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks")
    monkeypatch.setattr(common, "__file__", str(tmp_path / "benchmarks/common.py"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    assert common.commit() == "unknown"
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    name = common.commit()
    (next((tmp_path / "benchmarks/results").glob("*.json"))).write_text("{}")
    assert common.commit() == name and re.fullmatch("[0-9a-f]+", name)
    (tmp_path / "benchmarks/common.py").write_text("")
    assert common.commit() == f"{name}-dirty"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """run_all.py with these options, in a folder of benchmarks that the test writes; its exit code."""
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(run_all.torch.cuda, "is_available", lambda: False)

    def ask(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["run_all.py", *options])
        return run_all.main()

    return ask


def test_all_benchmarks_are_run_and_a_failed_one_is_named(tmp_path, asked, capsys):
    (tmp_path / "measure_rtf.py").write_text("print('a table'); print('{\"said\": 1}')")
    (tmp_path / "measure_e2e.py").write_text("raise SystemExit('broken')")
    (tmp_path / "measure_load.py").write_text("print('no last line of JSON')")
    assert asked("--only", "measure_rtf", "measure_e2e", "measure_load", "--output", str(tmp_path)) == 1
    (file,) = tmp_path.glob("*.json")
    told = json.loads(file.read_text())
    assert (
        file.stem == f"cpu-{os.cpu_count()}-cores-{told['commit']}" and told["card"] == f"CPU, {os.cpu_count()} cores"
    )
    assert told["torch"] == torch.__version__ and told["date"] == datetime.date.today().isoformat()
    said = told["benchmarks"]
    assert said["measure_rtf"]["demo"]["said"] == {"said": 1}
    assert said["measure_e2e"]["demo"]["failed"] == "exit code 1"
    assert said["measure_load"]["demo"]["failed"] == "exit code 0"
    assert "a table" in capsys.readouterr().out.splitlines()
    (tmp_path / "measure_load.py").write_text("print('{}')")
    assert asked("--only", "measure_load", "--into", str(file)) == 1, (
        "what failed before at the same commit still counts"
    )
    assert "failed: measure_e2e demo\n" in capsys.readouterr().out
    again = json.loads(file.read_text())["benchmarks"]
    assert again["measure_load"]["demo"]["said"] == {}
    assert again["measure_rtf"] == said["measure_rtf"] and again["measure_e2e"] == said["measure_e2e"]


def test_a_budget_says_what_it_left_out_and_another_call_goes_on(tmp_path, asked, monkeypatch, capsys):
    parts = {"measure_ttfc": ("", 0), "measure_rtf, again": ("", 0), "measure_e2e": ("", 600), "measure_load": ("", 0)}
    monkeypatch.setattr(run_all, "CPU", parts)
    hangs = "import subprocess; print('{}'); subprocess.run(['sleep', '1000'])"
    for name, text in {
        "ttfc": "print('{\"one\": 1}')",
        "rtf": hangs,
        "e2e": "print('{}')",
        "load": "print('{}')",
    }.items():
        (tmp_path / f"measure_{name}.py").write_text(text)
    assert asked("--minutes", "0.05", "--output", str(tmp_path)) == 0, "what was left out has not failed"
    shown = capsys.readouterr().out
    assert "measure_e2e demo: no time, it takes about 600 s" in shown
    assert "left out: measure_rtf, again demo, measure_e2e demo, measure_load demo\n" in shown, (
        "the one that hung is stopped"
    )
    (file,) = tmp_path.glob("*.json")
    told = json.loads(file.read_text())
    assert told["left_out"] == ["measure_rtf, again demo", "measure_e2e demo", "measure_load demo"]
    (tmp_path / "measure_ttfc.py").write_text("raise SystemExit('it is there already')")
    (tmp_path / "measure_rtf.py").write_text("print('{}')")
    assert asked("--into", str(file)) == 0
    told = json.loads(file.read_text())
    assert told["left_out"] == [] and told["benchmarks"]["measure_ttfc"]["demo"]["said"] == {"one": 1}
    assert "left out" not in capsys.readouterr().out


def test_a_file_of_another_machine_or_commit_is_not_continued(tmp_path, asked, monkeypatch, capsys):
    monkeypatch.setattr(run_all, "CPU", {"measure_ttfc": ("", 0)})
    (tmp_path / "measure_ttfc.py").write_text("print('{}')")
    asked("--output", str(tmp_path))
    (file,) = tmp_path.glob("*.json")
    told = json.loads(file.read_text())
    for text, why in (
        (json.dumps(told | {"commit": "0123abc"}), "is of CPU, .* at 0123abc, this is"),
        (json.dumps(told | {"card": "NVIDIA H200"}), "is of NVIDIA H200 at"),
        ("{", "is not what run_all.py wrote"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit):
            asked("--into", str(file))
        assert re.search(why, capsys.readouterr().err)
    with pytest.raises(SystemExit):
        asked("--output", str(tmp_path))
    assert "goes on with what it left out; or delete it" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_the_graph_of_kernels_compiles_and_refuses_what_it_has_no_kernel_for():
    library = graph_frame.compiled((9, 0))
    assert library.graph_product(1000, False, 1, *[None] * 5, 8, False, True, None) == -1
    with pytest.raises(RuntimeError, match="compute capability 9.0"):
        graph_frame.compiled((8, 9))


def test_every_benchmark_is_in_the_list_of_all():
    there = {path.stem for path in BENCHMARKS.glob("measure_*.py")}
    assert there - {part.partition(",")[0] for part in run_all.ALL} == {"measure_endings"}, "it measures no time"
