"""`qwen-megakernel batch`: what is read, what is written, and that the same command goes on after any end."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import soundfile
from cases import reference_audio
from waiting import PATIENCE_S, until

from qwen_megakernel import RequestError, SamplingParams, TTSEngine
from qwen_megakernel.choices import FORMATS
from qwen_megakernel.cli import main, make_parser
from qwen_megakernel.commands import batch as command
from qwen_megakernel.commands.batch_input import Line, kind_of, read_lines
from qwen_megakernel.commands.manifest import Manifest
from qwen_megakernel.model.pcm import pcm16

pytestmark = pytest.mark.usefixtures("loads_once")

ROOT = Path(__file__).parents[1]
LINES = ["Yes.", "Hello there.", "How are you?", "No.", "It is late.", "Good day.", "Well then.", "So be it."]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to work in, and signals that work."""
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def batch(*args: object) -> int:
    return main(["batch", *map(str, args), "--device", "cpu", "--threads", "1"])


def write(name: str, text: str | bytes) -> str:
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def jsonl(name: str, *lines: dict) -> str:
    return write(name, "".join(json.dumps(line) + "\n" for line in lines))


def manifest(folder: str = "out") -> list[dict]:
    return [json.loads(line) for line in Path(folder, "manifest.jsonl").read_text(encoding="utf-8").splitlines()]


def contents(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def lines(text: str | bytes, kind: str) -> list[Line]:
    return list(read_lines(write("input", text), kind))


# ---------------------------------------------------------------- the input


def test_plain_lines():
    assert lines("\ufeffOne.\r\n\n  \n  Two, and more.\nThree", "text") == [
        Line(1, "000001", "One."),
        Line(4, "000004", "  Two, and more."),
        Line(5, "000005", "Three"),
    ]


def test_json_lines():
    said = {"text": "One.", "id": "a", "seed": 3, "speed": 2, "non_streaming_mode": False, "speaker": None}
    read = lines(json.dumps(said) + '\n\n{"text": "Two."}', "jsonl")
    assert read[0] == Line(1, "a", "One.", {"seed": 3, "speed": 2.0, "non_streaming_mode": False})
    assert read[1] == Line(3, "000003", "Two.") and len(read) == 2


def test_csv_rows():
    read = lines('Text, id ,seed,non_streaming_mode\n"One, and\nmore.",a,,\nTwo.,,7,TRUE\n\nThree.\n', "csv")
    assert read == [
        Line(1, "a", "One, and\nmore."),
        Line(2, "000002", "Two.", {"seed": 7, "non_streaming_mode": True}),
        Line(3, "000003", "Three."),
    ]


@pytest.mark.parametrize(
    "line, told",
    [
        ("{", "must be a JSON object"),
        ("[1]", "must be a JSON object, got '[1]'"),
        ("[" * 100_000, "JSON"),
        ("{}", "text is missing"),
        ('{"text": 1}', "text must be a string, got 1"),
        ('{"text": "x", "voise": "ada"}', "unknown field 'voise'; known: id, text, speaker"),
        ('{"text": "x", "seed": 1.5}', "seed must be an integer in 0..2**64-1, got 1.5"),
        ('{"text": "x", "seed": true}', "seed must be an integer in 0..2**64-1, got True"),
        ('{"text": "x", "speed": "fast"}', "speed must be a number from 0.25 to 4, got 'fast'"),
        ('{"text": "x", "non_streaming_mode": 1}', "non_streaming_mode must be true or false, got 1"),
        ('{"text": "x", "id": 7}', "id must be a string, got 7"),
        ("\xff\xfe".encode("latin-1"), "must be UTF-8"),
        ('{"text": "' + "x" * 2**20 + '"}', "longer than 1,048,576 bytes"),
    ],
)
def test_a_line_that_cannot_be_read_is_told_and_the_next_is_read(line, told):
    line = line if isinstance(line, bytes) else line.encode()
    bad, good = lines(line + b'\n{"text": "Two."}\n', "jsonl")
    assert told in bad.error and good == Line(2, "000002", "Two.")


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", ".x", "a/b", "/etc/x", "a\\b", "a\0b", "a\nb", "x" * 151, "é" * 76]
)
def test_an_id_is_never_a_path(name):
    wrong, right = lines(json.dumps({"id": name, "text": "x"}) + '\n{"id": "第一章 é-1_a.b", "text": "x"}', "jsonl")
    assert "id must be a plain name" in wrong.error and right.error is None


@pytest.mark.parametrize(
    "text", ["", "id,speaker\na,b\n", "text,text\na,b\n", "text,voise\na,b\n", "Hello there.\n", '"text\n']
)
def test_a_csv_whose_header_is_wrong_is_refused(text):
    with pytest.raises(RequestError, match="columns"):
        lines(text, "csv")


def test_a_row_with_too_many_cells_is_told():
    bad, good = lines("text\nOne, two\nThree\n", "csv")
    assert "row 1: has 2 cells, but the header has 1" in bad.error and good.text == "Three"


def test_the_name_tells_what_an_input_holds():
    assert [kind_of(name, None) for name in ("a.JSONL", "b.csv", "c.txt")] == ["jsonl", "csv", "text"]
    assert kind_of("-", "csv") == "csv"
    for name, told in (("-", "standard input does not tell"), ("x.doc", "'x.doc' does not tell")):
        with pytest.raises(RequestError, match=told):
            kind_of(name, None)


# ---------------------------------------------------------------- what is made


def test_each_line_is_what_the_engine_says(capsys):
    said = [{"text": text, "id": f"line {n}", "seed": n, "speaker": "ada"} for n, text in enumerate(LINES[:4])]
    said[1] |= {"speed": 1.5}
    assert batch(jsonl("in.jsonl", *said), "-o", "out") == 0
    assert "4 lines spoken" in capsys.readouterr().out
    entries = manifest()
    assert [entry["id"] for entry in entries] == [line["id"] for line in said]
    with TTSEngine.load("demo", device="cpu", threads=1, max_streams=1, max_positions=1024) as engine:
        for line, entry in zip(said, entries, strict=True):
            sampling = SamplingParams(seed=line["seed"])
            options = {"speaker": "ada", "speed": line.get("speed", 1.0), "chunk_frames": 8, "reproducible": True}
            audio = engine.generate(line["text"], sampling=sampling, **options)
            pcm, rate = soundfile.read(Path("out", entry["file"]), dtype="int16")
            assert rate == engine.sample_rate and pcm.tobytes() == pcm16(audio.samples)
            assert entry["seconds"] == pytest.approx(audio.duration_s, abs=1e-3) and entry["seed"] == line["seed"]
            assert (entry["finish_reason"], entry["attempts"], entry["error"]) == ("eos", 1, None)


def test_failed_lines_are_listed_and_the_others_are_spoken(capsys):
    said = [{"text": "Yes."}, {"text": "No.", "speaker": "nobody"}, {"text": " "}, {"text": "So.", "speed": 9}]
    said += [{"text": "x", "id": "000001"}, {"text": "x", "id": "a/b"}, {"voice": "x", "text": "x"}]
    assert batch(jsonl("in.jsonl", *said), "-o", "out") == 1
    told = capsys.readouterr().err
    for words in (
        "line 2 (000002): unknown speaker",
        "line 3 (000003): text must not be blank",
        "line 4: speed must be a number from 0.25 to 4, got 9",
        "line 1 has the id '000001' already",
        "line 6 (a/b): id must be a plain name",
        "unknown voice 'x'; known: none: name their folder with --voices",
    ):
        assert words in told
    entries = manifest()
    assert [entry["line"] for entry in entries] == [1, 2, 3, 4, 5, 6, 7]
    assert [entry["error"] is None for entry in entries].count(True) == 1
    assert sorted(contents("out")) == ["000001.wav", "manifest.jsonl"]


@pytest.mark.parametrize("ending", [ending[1:] for ending in FORMATS])
def test_files_have_the_format_that_was_asked_for(ending):
    assert batch(write("in.txt", "Yes.\n"), "-o", "out", "--format", ending) == 0
    assert soundfile.info(f"out/000001.{ending}").format == FORMATS[f".{ending}"][0]


def test_standard_input_is_read(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"id,text\na,Yes.\n")))
    assert batch("-", "--input-format", "csv", "-o", "out") == 0 and Path("out/a.wav").exists()


def test_lines_may_name_saved_voices(tiny):
    folder = tiny("base", eos_gain=6.0)
    Path("voices").mkdir()
    with TTSEngine.load(folder, device="cpu", max_streams=1) as engine:
        engine.create_voice((reference_audio(), 24000)).save(Path("voices") / "me.safetensors")
    source = jsonl("in.jsonl", {"text": "Yes.", "voice": "me"}, {"text": "Yes.", "voice": "../voices/me"})
    assert batch(source, "-o", "out", "--model", folder, "--voices", "voices") == 1
    assert [entry["error"] for entry in manifest()] == [None, "unknown voice '../voices/me'; known: me"]


@pytest.mark.slow
def test_long_text_becomes_one_file():
    text = "This is a sentence of some length, and there are many of them. " * 5
    assert batch(write("in.txt", text), "-o", "out") == 0
    assert soundfile.info("out/000001.wav").duration > 10


# ---------------------------------------------------------------- again, and after an end


@pytest.mark.slow
def test_however_many_slots_the_files_are_the_same():
    source = write("in.txt", "\n".join(LINES))
    for slots in (1, 2, 5):
        assert batch(source, "-o", f"out{slots}", "--max-streams", slots) == 0
    assert contents("out1") == contents("out2") == contents("out5") and len(contents("out1")) == len(LINES) + 1


@pytest.mark.slow
def test_what_is_done_is_not_done_again(capsys):
    said = [{"id": name, "text": "Yes."} for name in "abc"]
    assert batch(jsonl("in.jsonl", *said), "-o", "out") == 0
    before = {name: os.stat(f"out/{name}.wav").st_mtime_ns for name in "abc"}
    Path("out/b.wav").unlink()
    said[2]["text"] = "No."
    capsys.readouterr()
    assert batch(jsonl("in.jsonl", *said), "-o", "out") == 0
    assert "2 lines spoken" in (told := capsys.readouterr().out) and "1 were there already" in told
    after = {name: os.stat(f"out/{name}.wav").st_mtime_ns for name in "abc"}
    assert [before[name] == after[name] for name in "abc"] == [True, False, False]
    assert batch("in.jsonl", "-o", "out", "--seed", 5) == 0 and "3 lines spoken" in capsys.readouterr().out


def run(*args: object) -> subprocess.Popen:
    words = [sys.executable, "-m", "qwen_megakernel", "batch", *map(str, args), "--device", "cpu", "--threads", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wavs() -> int:
    return len(list(Path("out").glob("*.wav")))


@pytest.mark.slow
def test_killed_at_random_moments_and_run_again_the_bytes_are_the_same(fresh_seed):
    source, rng = write("in.txt", "\n".join(LINES * 2)), random.Random(fresh_seed)
    assert batch(source, "-o", "whole") == 0
    for _ in range(2):
        running = run(source, "-o", "out")
        made = wavs() + rng.randint(0, 4)
        until(lambda running=running, made=made: running.poll() is not None or wavs() >= made)
        time.sleep(rng.random() / 2)
        running.kill()
        running.communicate()
    assert batch(source, "-o", "out") == 0
    assert contents("out") == contents("whole")


@pytest.mark.slow
def test_ctrl_c_leaves_whole_files_and_says_how_to_go_on():
    running = run(write("in.txt", "\n".join(LINES * 30)), "-o", "out")
    until(lambda: wavs() > 1)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130 and b"run the same command again to go on" in told and b"Traceback" not in told
    assert {entry["file"] for entry in manifest()} <= {path.name for path in Path("out").iterdir()}
    assert not list(Path("out").glob(".speech*")) and all(soundfile.info(p).frames for p in Path("out").glob("*.wav"))


def test_a_full_disk_ends_it_at_once(monkeypatch, capsys):
    written = []

    class Full:
        def __init__(self, path, _rate, in_memory):
            written.append(path)

        def __enter__(self):
            raise RequestError("--output out: no space left on out; make room there, or name another place")

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(command, "SpeechFile", Full)
    assert batch(write("in.txt", "\n".join(LINES * 9)), "-o", "out") == 1
    told = capsys.readouterr().err
    assert "no space left" in told and "run the same command again" in told and len(written) < 9
    monkeypatch.undo()


def test_behind_a_slow_disk_files_are_written_side_by_side(monkeypatch):
    fsync, writing, several = os.fsync, set(), threading.Event()

    def slow(descriptor):
        if threading.current_thread().name.startswith("qwen_megakernel write"):
            writing.add(threading.get_ident())
            if len(writing) > 1:
                several.set()
            assert several.wait(PATIENCE_S)
        fsync(descriptor)

    monkeypatch.setattr(command, "_BACKLOG", 1)
    monkeypatch.setattr(os, "fsync", slow)
    assert batch(write("in.txt", "\n".join(LINES)), "-o", "out") == 0 and wavs() == len(LINES)


def test_an_entry_that_was_being_written_is_written_again():
    source = write("in.txt", "Yes.\nNo.\n")
    assert batch(source, "-o", "out") == 0
    before, path = contents("out"), Path("out/manifest.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    assert batch(source, "-o", "out") == 0 and contents("out") == before


def test_a_manifest_is_read_after_each_of_several_kills(here):
    """Each kill leaves an incomplete line. An id means the same file in upper and lower case."""
    for number in range(3):
        manifest = Manifest(here)
        entry = {"id": f"Line {number}", "line": number, "error": None, "request": "x", "threads": 1}
        manifest.add(entry)
        manifest.close()
        with Path("manifest.jsonl").open("ab") as file:
            file.write(b'{"id": "Li')
    manifest = Manifest(here)
    assert [manifest.entry(f"LINE {number}")["line"] for number in range(3)] == [0, 1, 2]
    manifest.close()


def test_other_adapters_and_another_seed_make_other_speech():
    engine = SimpleNamespace(variant="custom_voice", request=lambda **options: options)

    def asked(*more: str, seed: int = 0) -> command._Batch:
        args = make_parser().parse_args(["batch", "in.txt", "-o", "out", *more])
        return command._Batch(args, engine, None, {"seed": seed}, {})

    line = Line(1, "a", "Yes.")
    digests = [asked(*more)._digest(line) for more in ((), ("--adapter", "one"), ("--adapter", "two"), ())]
    assert digests[0] == digests[3] and len(set(digests)) == 3
    assert len({asked(seed=seed)._request(line)["seed"] for seed in range(3)}) == 3
    assert asked(seed=3)._request(Line(1, "a", "Yes.", {"seed": 7}))["seed"] == 7


def test_two_batches_do_not_write_into_one_folder(capsys, here):
    manifest = Manifest(here / "out")
    assert batch(write("in.txt", "Yes.\n"), "-o", "out") == 1
    assert "another batch writes there" in capsys.readouterr().err
    manifest.close()


@pytest.mark.parametrize(
    "args, told",
    [
        (["missing.txt"], "'missing.txt' cannot be read: No such file"),
        (["in.txt", "--max-streams", "0"], "--max-streams must be at least 1, got 0"),
        (["in.txt", "--voices", "nowhere"], "--voices: no folder 'nowhere'"),
        (["in.txt", "-o", "in.txt"], "--output in.txt: manifest.jsonl cannot be written"),
    ],
)
def test_what_cannot_be_is_refused(args, told, capsys):
    write("in.txt", "Yes.\n")
    assert batch(*args, *([] if "-o" in args else ["-o", "out"])) == 1
    assert told in capsys.readouterr().err
