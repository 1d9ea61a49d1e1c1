"""The command line, in this process and as a stranger would call it."""

import argparse
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from cases import reference_audio

import demo_pipeline
from qwen_megakernel import TTSEngine, Voice, bot_page, cli
from qwen_megakernel.choices import DEMO_NOTICE, PUBLISHED
from qwen_megakernel.cli import main

pytestmark = pytest.mark.usefixtures("loads_once")

ROOT = Path(__file__).parents[1]


def speak(*args: object) -> int:
    return main(["speak", *map(str, args), "--device", "cpu"])


def test_speaks_the_demo_voice_into_a_wav_and_reports(tmp_path, capsys, caplog):
    out = tmp_path / "hello.wav"
    assert speak("--text", "Hello there.", "--output", out, "--seed", 3) == 0
    samples, rate = soundfile.read(out)
    printed = capsys.readouterr().out
    assert rate == 24000 and len(samples) % 1920 == 0 and np.abs(samples).max() > 0.01
    for part in (str(out), f"{len(samples) // 1920} frames", "TTFC", "RTF", "seed 3", DEMO_NOTICE):
        assert part in printed


def test_the_same_seed_writes_the_same_file_with_and_without_stream(tmp_path, capsys):
    for name, extra in (("a", []), ("b", []), ("c", ["--stream"])):
        assert speak("--text", "Hello there.", "--output", tmp_path / f"{name}.wav", "--seed", 3, *extra) == 0
    a, b, c = (soundfile.read(tmp_path / f"{n}.wav", dtype="int16")[0] for n in "abc")
    assert np.array_equal(a, b) and np.array_equal(a, c)
    assert "1 frames" in capsys.readouterr().err


def pcm_of(path: Path) -> bytes:
    return soundfile.read(path, dtype="int16")[0].tobytes()


def test_a_file_says_again_what_ended_badly(tmp_path, monkeypatch, capsys):
    begin, seeds = TTSEngine.begin, []

    def bad_at_first(self, text, request, *args):
        seeds.append(request.seed)
        return begin(self, text, replace(request, max_frames=4) if len(seeds) < 3 else request, *args)

    monkeypatch.setattr(TTSEngine, "begin", bad_at_first)
    assert speak("--text", "Hello there.", "--output", tmp_path / "a.wav", "--seed", 1, "--retries", 4) == 0
    assert seeds == [1, 2, 3] and "retries 2, because speech did not find its end" in capsys.readouterr().out
    assert speak("--text", "Hello there.", "--output", tmp_path / "b.wav", "--seed", 3) == 0
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()


def test_text_comes_from_an_option_a_file_or_standard_input(tmp_path, monkeypatch):
    """A byte order mark is no text. A WAV may be named in capitals, or without an ending."""
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfHello.")
    said = set()
    for name, source in (
        ("a.wav", ["--text", "Hello."]),
        ("b.WAV", ["--file", tmp_path / "bom.txt"]),
        ("c", []),
        ("d.wav", ["--file", "-"]),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello.")))
        assert speak(*source, "--output", tmp_path / name, "--seed", 3) == 0
        said.add((tmp_path / name).read_bytes())
    assert len(said) == 1


@pytest.fixture
def spoken(monkeypatch):
    """The pieces of text that the engine gets; each is cut after two frames."""
    pieces, begin = [], TTSEngine.begin

    def say_little(self, piece, request, *listeners):
        pieces.append(str(piece))
        return begin(self, piece, replace(request, max_frames=2), *listeners)

    monkeypatch.setattr(TTSEngine, "begin", say_little)
    return pieces


@pytest.mark.parametrize("text", ["This is one sentence of a long text. " * 12, "ﷺ" * 300], ids=["long", "tokens"])
def test_text_longer_than_a_piece_is_spoken_piece_by_piece(tmp_path, spoken, text):
    """Also few characters, each of which is read as 29 letters."""
    assert speak("--text", text, "--output", tmp_path / "long.wav", "--seed", 1) == 0
    assert len(spoken) > 1 and max(map(len, spoken)) <= 300
    assert "".join("".join(spoken).split()) == "".join(text.split())
    assert soundfile.info(tmp_path / "long.wav").frames > 0


@pytest.mark.slow
def test_the_demos_pcm_on_standard_output_is_its_wav(tmp_path, monkeypatch, capsysbinary):
    command = ["--text", "Hello.", "--seed", "4", "--device", "cpu", "--output"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert demo_pipeline.main([*command, "-"]) == 0
    piped = capsysbinary.readouterr()
    assert DEMO_NOTICE.encode() in piped.err
    assert demo_pipeline.main([*command, str(tmp_path / "x.wav")]) == 0
    assert piped.out == pcm_of(tmp_path / "x.wav")


def test_lists_speakers_and_languages(tiny, capsys):
    assert speak("--list-speakers") == 0
    printed = capsys.readouterr().out
    assert "ada" in printed and "english" in printed and DEMO_NOTICE in printed
    assert speak("--list-speakers", "--model", tiny("custom_voice")) == 0
    printed = capsys.readouterr().out
    assert "eric (sichuan_dialect)" in printed and "languages: auto, chinese (zh), english (en), french (fr)" in printed
    assert speak("--list-speakers", "--model", tiny("base")) == 0
    assert "--ref-audio" in capsys.readouterr().out


def test_a_speaker_with_another_s_id_is_told_to_be_the_same(tiny, tmp_path, capsys, caplog):
    folder = shutil.copytree(tiny("custom_voice"), tmp_path / "voice")
    config = json.loads((folder / "config.json").read_text())
    ids = config["talker_config"]["spk_id"]
    ids["zoe"] = ids["ryan"]
    (folder / "config.json").write_text(json.dumps(config))
    assert speak("--list-speakers", "--model", folder) == 0
    assert "\n  zoe (another name of ryan)\n" in capsys.readouterr().out
    told = []
    for name in ("Zoe", "ryan"):
        caplog.clear()
        command = ["--text", "Hello.", "--seed", 1, "--max-frames", 4, "--speaker", name]
        speak("--model", folder, *command, "-o", tmp_path / f"{name}.wav")
        told.append("speaker 'zoe' is another name of 'ryan'" in caplog.text)
    assert told == [True, False]
    assert pcm_of(tmp_path / "Zoe.wav") == pcm_of(tmp_path / "ryan.wav")


@pytest.mark.slow
def test_a_voice_is_kept_and_speaks_again(tiny, tmp_path):
    """By `speak` and by the demo, which say with the file what was said with the recording."""
    soundfile.write(tmp_path / "ref.wav", reference_audio(), 24000)
    model = ["--model", str(tiny("base", eos_gain=4.0)), "--text", "Hello.", "--seed", "3", "--device", "cpu"]
    cloned = ["--ref-audio", tmp_path / "ref.wav", "--ref-text", "this is it"]
    assert speak(*model, *cloned, "--output", tmp_path / "a.wav", "--save-voice", tmp_path / "me.safetensors") == 0
    assert speak(*model, "--voice", tmp_path / "me.safetensors", "--output", tmp_path / "b.wav") == 0
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()
    for name, whose in (("c", cloned), ("d", ["--voice", tmp_path / "me.safetensors"])):
        assert demo_pipeline.main([*model, *map(str, whose), "--output", str(tmp_path / f"{name}.wav")]) == 0
    assert (tmp_path / "c.wav").read_bytes() == (tmp_path / "d.wav").read_bytes()


def test_the_demo_looks_for_its_recording_before_it_loads(capsys):
    for audio, words in (("y.wav", "no recording 'y.wav'"), ("http://a.b/y.wav", "'http://a.b/y.wav' is an address")):
        assert demo_pipeline.main(["--text", "x", "--model", "./nowhere", "--ref-audio", audio]) == 1
        assert words in capsys.readouterr().err


def test_the_demo_reads_what_is_secret_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("THE_KEY", "secret")
    stt = ["--stt", "types:SimpleNamespace", "--stt-options"]
    args = demo_pipeline.make_parser(None).parse_args([*stt, '{"api_key": "$THE_KEY", "model": "x"}'])
    made = demo_pipeline.make_stt(args)
    assert vars(made) == {"api_key": "secret", "model": "x"}
    assert demo_pipeline.main([*stt, '{"api_key": "$NO_SUCH_KEY"}']) == 1
    assert "the environment variable NO_SUCH_KEY is not set" in capsys.readouterr().err
    assert demo_pipeline.main([*stt, '["secret"]']) == 1


@pytest.mark.parametrize(
    "args, message",
    [
        (["--text", " "], "blank"),
        (["--text", "..."], "nothing to speak"),
        (["--text", "x", "--speaker", "bob"], "known: ada"),
        (["--text", "x", "--speaker", "bob", "--stream"], "known: ada"),
        (["--text", "x", "--language", "klingon"], "known: auto"),
        (["--text", "x", "--output", "."], "--output: '.' is a folder; name a file, such as 'out.wav'"),
        (["--text", "x", "--output", ""], "is a folder; name a file"),
        (["--text", "x", "--model", "./nowhere"], "no folder"),
        (["--text", "x", "--output", "no/such/folder/x.wav"], "--output: no folder 'no/such/folder'; make it first"),
        (["--text", "x", "--output", "x" * 300], "File name too long"),
        (["--text", "x", "--output", "x.txt"], "end it in .wav, .mp3, .flac, .ogg, .opus"),
        (["--text", "x", "--output", "-", "--play"], "give one of the two"),
        (["--text", "x", "--output", "-", "--keep-partial"], "name it with --output"),
        (["--text", "x", "--ref-text", "y"], "give both"),
        (["--text", "x", "--ref-audio", __file__, "--ref-text", "y" * 10_001], "at most 10000 characters, got 10001"),
        (["--text", "x", "--ref-audio", __file__], "Base checkpoint"),
        (["--text", "x", "--model", "./nowhere", "--ref-audio", "y.wav"], "no recording 'y.wav': No such file"),
        (
            ["--text", "x", "--model", "./nowhere", "--ref-audio", "https://a.b/y.wav"],
            "'https://a.b/y.wav' is an address",
        ),
        (["--text", "x", "--ref-audio", ""], "no recording '': No such file"),
        (["--text", "x", "--voice", "nowhere.safetensors"], "cannot be read as a voice"),
        (["--text", "x", "--voice", __file__], "cannot be read as a voice"),
        (["--text", "x", "--speaker", "ada", "--ref-audio", "y.wav"], "give one of them"),
        (["--text", "x", "--save-voice", "v.safetensors"], "give both"),
        (["--text", "x", "--ref-audio", __file__, "--save-voice", "no/such/v"], "--save-voice: no folder"),
        (["--text", "x", "--seed", "-1"], "--seed must be"),
        (["--text", "x", "--temperature", "0"], "error: --temperature must be a number in 0.001..1000"),
        (["--text", "x", "--top-k", "-1"], "error: --top-k must be"),
        (["--text", "x", "--top-p", "1.5"], "--top-p must be in (0, 1]"),
        (["--text", "x", "--repetition-penalty", "nan"], "--repetition-penalty must be"),
        (["--text", "x", "--speed", "5"], "--speed must be a number from 0.25 to 4"),
        (["--text", "x", "--speed", "nan"], "speed must be a number"),
        (["--text", "x", "--retries", "-1"], "--retries must be an integer from 0 to 100, got -1"),
        (["--text", "x", "--retries", "1", "--stream"], "needs a file: leave out --stream"),
        (["--text", "x", "--retries", "1", "--output", "-"], "name the file with --output"),
        (["--text", "x", "--backend", "megakernel"], "megakernel"),
        (
            ["--text", "x", "--chunk-frames", "a"],
            "--chunk-frames must be frames of 80 ms per chunk: a number, or several",
        ),
        (["--text", "x", "--max-positions", "3"], "--max-positions must be an integer of at least 16, got 3"),
        (
            ["--text", "x", "--model", "BASE"],
            "needs a voice: give a saved one with --voice FILE, or make one of a recording",
        ),
        (["--text", "x", "--model", "BASE", "--speaker", "ada"], "--speaker must be left out, got 'ada'"),
        (["--text", "[pause 1s]"], "it needs words"),
        (
            ["--text", "x", "--lexicon", "nowhere.json"],
            "nowhere.json: a lexicon must be a readable file in UTF-8: No such",
        ),
        (["--file", "nowhere.txt"], "--file nowhere.txt cannot be read: No such file or directory; name a file"),
        (["--file", "."], "--file .: a text is a regular file, but this is a folder"),
        (["--file", os.devnull], "--file /dev/null: a text is a regular file, but this is something else"),
    ],
)
def test_errors_are_one_readable_line(args, message, capsys, tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    assert speak(*(str(tiny("base")) if arg == "BASE" else arg for arg in args)) == 1
    error = capsys.readouterr().err
    last = error.rstrip().splitlines()[-1]
    assert last.startswith("error: ") and message in last and "Traceback" not in error
    assert not list(tmp_path.iterdir()), "a failed command leaves no file"


def test_the_demo_says_what_to_do_next_and_nothing_that_reads_like_an_error(tmp_path):
    command = [sys.executable, str(ROOT / "demo_pipeline.py"), "--text", "Hello.", "--output", "my demo.wav"]
    command += ["--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0
    assert "'my demo.wav'" in done.stdout and "demo_pipeline.py --bot" in done.stdout and PUBLISHED[1] in done.stdout
    assert not re.search(r"error|warn|need|missing|install|INFO|megakernel:", done.stdout + done.stderr, re.I)


@pytest.mark.slow
def test_a_bot_whose_port_is_taken_says_so_before_it_loads_the_model():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for script in ("demo_pipeline.py --bot", "examples/two_bots.py"):
            command = [sys.executable, *script.split(), "--port", port]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
            assert done.returncode == 1 and f"error: cannot listen on localhost:{port}: " in done.stderr, done.stderr
            assert "choose another --port" in done.stderr and "Traceback" not in done.stderr
            assert "backend" not in done.stderr and "slots" not in done.stderr, "nothing was loaded"


@pytest.mark.parametrize(
    "options, refused", [("--port 99999", True), ("--port -5", True), ("--port 0", False), ("-d --port 99999", False)]
)
def test_a_port_that_is_none_is_refused_where_one_is_used(monkeypatch, options, refused):
    monkeypatch.setattr(sys, "argv", ["bot.py", *options.split()])
    with pytest.raises(SystemExit, match="cannot listen on localhost:") if refused else nullcontext():
        bot_page.check_port()


def test_a_bot_without_its_packages_says_how_to_get_them(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pipecat.runner.run", None)
    assert demo_pipeline.main(["--bot"]) == 1
    assert "make bot" in capsys.readouterr().err


def test_a_device_that_is_not_taken_is_told_which_are(capsys):
    assert main(["speak", "--text", "x", "--device", "banana"]) == 1
    assert capsys.readouterr().err == "error: --device must be 'cpu' or 'cuda[:n]', got 'banana'\n"


@pytest.mark.slow
@pytest.mark.parametrize("stdout, told", [("/dev/full", "standard output cannot be written: No space left"), ("", "")])
@pytest.mark.parametrize("program", [["-m", "qwen_megakernel", "speak"], ["demo_pipeline.py"]], ids=["speak", "demo"])
def test_standard_output_that_cannot_be_written_ends_it_in_order(program, stdout, told):
    """A full disk, a closed pipe. Python itself would try once more at its exit, and complain."""
    command = [sys.executable, *program, "--text", "Hello.", "--output", "-", "--device", "cpu"]
    if stdout:
        out = os.open(stdout, os.O_WRONLY)
    else:
        read, out = os.pipe()
        os.close(read)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options = {"stderr": subprocess.PIPE, "text": True, "timeout": 120, "env": buffered, "cwd": ROOT}
    with os.fdopen(out, "wb") as file:
        done = subprocess.run(command, stdout=file, **options)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "ignored" not in done.stderr, done.stderr
    assert (f"error: --output -: {told}" if told else "") in done.stderr and ("error" in done.stderr) == bool(told)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--max-streams", "0"], "--max-streams must be an integer of at least 1"),
        (["--max-positions", "3"], "--max-positions must be an integer of at least 16"),
        (["--device", "cuda"], "torch can use no CUDA GPU"),
        (["--device", "banana"], "device must be 'cpu' or 'cuda[:n]'"),
        (["--backend", "megakernel"], "the megakernel cannot run here"),
        (["--voices", "junk"], "cannot be read as a voice"),
        (["--voices", "empty", "--model", "BASE"], "is a Base checkpoint and needs saved voices"),
        (["--model", "BASE"], "is a Base checkpoint and needs saved voices"),
        (["--voices", "good"], "saved voices need a Base checkpoint; demo is custom_voice"),
        (["--model", "./nowhere"], "no folder"),
        (["--model", "empty"], "config.json: file is missing"),
        (["--model", "BROKEN"], "neither model.safetensors nor"),
    ],
    ids=str,
)
def test_a_server_that_can_never_be_ready_does_not_listen(args, message, tiny, tmp_path, monkeypatch, capsys):
    from qwen_megakernel.server import app as serve

    monkeypatch.setattr(serve, "serve", lambda *args: pytest.fail("it listens"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for name in ("junk", "empty", "good"):
        Path(name).mkdir()
    Path("junk/anna.safetensors").write_bytes(b"no voice")
    Voice.nobody(8, "0123").save("good/anna.safetensors")
    shutil.copytree(tiny("base"), "broken")
    Path("broken/model.safetensors").unlink()
    args = [{"BASE": str(tiny("base")), "BROKEN": "broken"}.get(arg, arg) for arg in args]
    assert main(["serve", *args]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_base_server_whose_voices_clients_make_listens(tiny, monkeypatch):
    from qwen_megakernel.server import app as serve

    listened = []
    monkeypatch.setattr(serve, "serve", lambda _app, listener: listened.append(listener.close()) or 0)
    command = ["serve", "--model", str(tiny("base")), "--allow-upload", "--device", "cpu", "--port", "0"]
    assert main(command) == 0 and listened


def test_doctor_says_what_this_machine_can_do(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for part in ("torch", "GPU", "driver", "nvcc", "checkpoints", "backend", DEMO_NOTICE):
        assert part in printed


@pytest.mark.parametrize(
    "command, module, package, told",
    [
        ("serve", "app", "fastapi", "serving needs fastapi: in the checkout, pip install -e '.[serve]'"),
        ("wyoming", "wyoming", "wyoming", "in the checkout, pip install -e '.[wyoming]'"),
    ],
)
def test_without_its_packages_a_server_prints_the_command(command, module, package, told, monkeypatch, capsys):
    import qwen_megakernel.server

    ours = f"qwen_megakernel.server.{module}"
    for name in [name for name in sys.modules if name.startswith(ours) or name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(qwen_megakernel.server, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert main([command]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "wyoming"])
@pytest.mark.parametrize(
    "port, why", [("taken", "Address already in use"), ("99999", "no such port"), ("-5", "no such")]
)
def test_a_port_that_cannot_be_had_is_told_before_anything_else(command, port, why, monkeypatch, capsys):
    pytest.importorskip("wyoming")
    monkeypatch.setattr(TTSEngine, "load", lambda *_args: pytest.fail("it loads"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1]) if port == "taken" else port
        assert main([command, "--port", port, "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot listen on 127.0.0.1:{port}: ") and why in error and error.count("\n") == 1
    assert "choose another --port" in error


HEAVY = "torch transformers pipecat numpy fastapi uvicorn soundfile regex num2words huggingface_hub asyncio".split()


def test_help_and_words_about_wrong_options_import_nothing_that_takes_long():
    """Of every command and of the demo. A process of its own: here all is imported."""
    code = f"""
import contextlib, runpy, sys
from qwen_megakernel import cli
def told(call, status):
    try:
        call()
    except SystemExit as end:
        assert end.code == status, end.code
def demo(*words):
    sys.argv = ["demo_pipeline.py", *words]
    runpy.run_path({str(ROOT / "demo_pipeline.py")!r}, run_name="__main__")
lines = []
def walk(parser, words):
    lines.append([*words, "--help"])
    for action in parser._actions:
        for name, inner in (action.choices or {{}}).items() if hasattr(action, "_parser_class") else ():
            walk(inner, [*words, name])
walk(cli.make_parser(), [])
assert len(lines) > 16, lines
with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
    for line in [["--version"], *lines]:
        told(lambda: cli.main(line), 0)
    for line in ([], ["speek"], ["speak", "--txt"], ["speak", "--speed", "x"], ["serve", "--port", "x"], ["voices"]):
        told(lambda: cli.main(line), 2)
    told(lambda: demo("--help"), 0)
    told(lambda: demo("--seeed", "3"), 2)
print(*(set({HEAVY}) & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0 and done.stdout == "\n", done.stdout + done.stderr


def parsers(parser, words=()):
    """A command line's parsers, by the words before their options."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from parsers(inner, (*words, name))


def test_every_command_has_a_function_that_runs_it():
    runs = [parser.get_default("run") for words, parser in parsers(cli.make_parser()) if words not in ((), ("voices",))]
    assert len(runs) > 14 and all(callable(cli.function_of(argparse.Namespace(run=run))) for run in runs)


def test_help_speaks_of_values_that_an_option_has_there():
    """Not of those that it has in Python, as True or [1, 2]."""
    for words, parser in parsers(cli.make_parser()):
        for action in parser._actions:
            about = action.help or ""
            foreign = re.search(r"\b(true|True|false|False|None|null)\b|\d, \d", about)
            assert not foreign, (words, action.option_strings, about)
            if action.choices and "default: " in about and not isinstance(action, argparse._SubParsersAction):
                default = about.split("default: ")[1] % {"default": action.default}
                assert any(str(choice) in default for choice in action.choices) or "by the name" in default, about


def test_a_served_folder_is_known_by_its_own_name(tmp_path, monkeypatch):
    from qwen_megakernel.checkpoint.load import name_of_model

    (tmp_path / "my-voice").mkdir()
    monkeypatch.chdir(tmp_path / "my-voice")
    assert name_of_model(".") == name_of_model("../my-voice/") == "my-voice"
    assert name_of_model("Qwen/Qwen3-TTS-12Hz-0.6B-Base") == "Qwen/Qwen3-TTS-12Hz-0.6B-Base"
