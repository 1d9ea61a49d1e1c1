"""`qwen-megakernel voices`, and the options of other commands that are about voices."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from cases import reference_audio

from qwen_megakernel import TTSEngine, Voice
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.cli import main
from qwen_megakernel.model import voice as voice_module
from qwen_megakernel.server import app

pytestmark = pytest.mark.usefixtures("loads_once")

RATE = 24000


@pytest.fixture
def recordings(tmp_path) -> list[str]:
    paths = [tmp_path / f"{seed}.wav" for seed in range(2)]
    for seed, path in enumerate(paths):
        soundfile.write(path, reference_audio(seed=seed), RATE, subtype="FLOAT")
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def base(tiny) -> str:
    return str(tiny("base", size="tiny-adapter", eos_gain=4.0))


@pytest.fixture(scope="module")
def custom(tiny) -> str:
    return str(tiny("custom_voice", size="tiny-adapter", eos_gain=4.0))


@pytest.fixture(scope="module")
def voices(base, tmp_path_factory):
    """A folder with a voice in context, one of a vector alone, and one of a stranger's."""
    folder, fingerprint = tmp_path_factory.mktemp("voices"), Checkpoint.open(base).fingerprint
    hidden = Checkpoint.open(base).config.talker.stack.hidden_size
    codes = torch.zeros(125, 16, dtype=torch.int64)
    Voice(torch.ones(hidden), codes, "Hello \x1b[2J\nthere.", fingerprint, ("quiet",)).save(folder / "anna.safetensors")
    Voice(torch.ones(hidden), None, None, fingerprint).save(folder / "ben.safetensors")
    Voice(torch.ones(48), None, None, "0123456789abcdef").save(folder / "carl.safetensors")
    return folder


def test_makes_a_voice_that_speak_and_the_engine_take(base, recordings, tmp_path, capsys, engine_for):
    file = tmp_path / "me.safetensors"
    both = [option for path in recordings for option in ("--ref-audio", path)]
    assert main(["voices", "make", "--model", base, *both, "--ref-text", "this is it", "-o", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    expected = engine_for(base).create_voice(recordings, "this is it")
    assert Voice.load(file).digest == expected.digest and Voice.load(file).notes == expected.notes
    said = ["speak", "--model", base, "--text", "Hello.", "--seed", "3", "--device", "cpu", "--output"]
    assert main([*said, str(tmp_path / "a.wav"), "--voice", str(file)]) == 0
    assert main([*said, str(tmp_path / "b.wav"), *both, "--ref-text", "this is it"]) == 0
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()


@pytest.mark.slow
def test_no_trim_keeps_the_recording_whole(base, tmp_path, engine_for):
    path = tmp_path / "padded.wav"
    soundfile.write(path, np.concatenate([np.zeros(RATE), reference_audio()]), RATE, subtype="FLOAT")
    made = []
    for extra in ([], ["--no-trim"]):
        command = ["voices", "make", "--model", base, "--ref-audio", str(path), "--ref-text", "it", *extra]
        assert main([*command, "--output", str(tmp_path / "v.safetensors")]) == 0
        made.append(len(Voice.load(tmp_path / "v.safetensors").ref_codes))
    assert made[1] - made[0] == pytest.approx(0.9 * 12.5, abs=1)


def test_lists_a_folder_as_a_table_and_as_json(voices, base, capsys):
    fingerprint = Checkpoint.open(base).fingerprint
    assert main(["voices", "list", str(voices)]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        ["name", "reference", "checkpoint", "text"],
        ["anna", "10.0 s", fingerprint, "yes"],
        ["ben", "none", fingerprint, "no"],
        ["carl", "none", "0123456789abcdef", "no"],
    ]
    assert main(["voices", "list", "--json", str(voices)]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert first == {"name": "anna", "reference_s": 10.0, "fingerprint": fingerprint, "has_text": True}


def test_an_empty_folder_and_one_with_what_is_no_voice_are_told(tmp_path, capsys):
    assert main(["voices", "list", str(tmp_path)]) == 0
    assert "holds no *.safetensors" in capsys.readouterr().out
    Voice(torch.ones(48), None, None, "0123").save(tmp_path / "ben.safetensors")
    (tmp_path / "a\x1b[2J.safetensors").write_bytes(b"no voice")
    assert main(["voices", "list", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "ben " in printed and "not a voice: " in printed and "cannot be read as a voice" in printed
    assert "\x1b" not in printed
    assert main(["voices", "list", "--json", str(tmp_path)]) == 1
    assert "cannot be read" in json.loads(capsys.readouterr().out)[0]["error"]


def test_shows_what_is_in_a_file_and_no_commands_for_the_terminal(voices, base, capsys):
    assert main(["voices", "show", str(voices / "anna.safetensors")]) == 0
    printed = capsys.readouterr().out
    lines = dict(line.split(None, 1) for line in printed.splitlines())
    assert lines["reference"] == "125 frames, 10.00 s" and lines["note"] == "quiet"
    assert lines["text"] == "Hello \\x1b[2J\\nthere." and "\x1b" not in printed
    voice = Voice.load(voices / "anna.safetensors")
    assert lines["digest"] == voice.digest.hex() and lines["checkpoint"] == voice.fingerprint
    size = len(voice.speaker_embedding)
    assert lines["vector"] == f"{size} numbers, norm {size**0.5:.3g}"
    assert main(["voices", "show", "--json", str(voices / "anna.safetensors")]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["text"] == voice.ref_text and about["notes"] == ["quiet"] and about["reference_frames"] == 125
    assert main(["voices", "show", str(voices / "ben.safetensors")]) == 0
    assert "none: it speaks by its vector alone" in capsys.readouterr().out


def test_list_and_show_open_no_checkpoint(voices, monkeypatch):
    def refuse(*_args):
        raise AssertionError("a checkpoint was opened")

    monkeypatch.setattr(Checkpoint, "open", refuse)
    monkeypatch.setattr(TTSEngine, "load", refuse)
    monkeypatch.setattr(voice_module, "VoiceEncoder", refuse)
    assert main(["voices", "list", str(voices)]) == 0
    assert main(["voices", "show", str(voices / "anna.safetensors")]) == 0


@pytest.mark.parametrize(
    "file, model, extra, reason",
    [
        ("anna", "base", [], None),
        ("ben", "base", [], None),
        ("carl", "base", [], "made by another checkpoint, with other encoders (0123456789abcdef"),
        ("anna", "custom", [], "needs a Base checkpoint; this one is custom_voice. As an experiment"),
        ("anna", "custom", ["--allow-foreign-voice"], None),
        ("carl", "custom", ["--allow-foreign-voice"], "speaker vector has 48 numbers, but this checkpoint needs"),
    ],
)
def test_checks_whether_a_voice_fits(file, model, extra, reason, voices, request, capsys):
    voice, model = str(voices / f"{file}.safetensors"), request.getfixturevalue(model)
    command = ["voices", "check", voice, "--model", model, *extra]
    assert main(command) == (0 if reason is None else 1)
    printed = capsys.readouterr()
    assert "fits" in printed.out if reason is None else reason in printed.err and not printed.out
    assert main([*command, "--json"]) == (0 if reason is None else 1)
    about = json.loads(capsys.readouterr().out)
    assert about["fits"] == (reason is None) and (reason or "") in (about["reason"] or "")


@pytest.mark.parametrize(
    "args, message",
    [
        (["list", "nowhere"], "no folder 'nowhere'; `voices show` looks at one file"),
        (["show", "nowhere.safetensors"], "cannot be read as a voice"),
        (["show", __file__], "cannot be read as a voice"),
        (["check", __file__, "--model", "demo"], "cannot be read as a voice"),
        (["make", "--model", "demo", "--ref-audio", __file__, "-o", "x"], "made from audio by a Base checkpoint"),
        (["make", "--model", "nowhere", "--ref-audio", "x.wav", "-o", "x"], "no recording 'x.wav': No such file"),
        (["make", "--model", "demo", "--ref-audio", __file__, "-o", "no/such/x"], "--output: no folder"),
        (["make", "--model", "demo", "--ref-audio", __file__, "--ref-text", "x" * 10_001, "-o", "x"], "got 10001"),
        (["make", "--model", "demo", *["--ref-audio", "x"] * 11, "-o", "x"], "made from 1 to 10 recordings, got 11"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["voices", *args]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "ACTION"),
        (["list"], "DIR"),
        (["list", ".", "--jsno"], "unknown option --jsno; did you mean --json?"),
        (["delete", "x"], "invalid choice: 'delete'"),
        (["show", "a", "b"], "unexpected words: b"),
        (["make", "--model", "demo", "-o", "x"], "--ref-audio"),
    ],
)
def test_wrong_words_print_the_usage_of_their_command(args, message, capsys):
    with pytest.raises(SystemExit):
        main(["voices", *args])
    printed = capsys.readouterr().err
    assert message in printed and "usage: qwen-megakernel voices" in printed


def test_a_stranger_tries_cloning_without_a_download(tmp_path, monkeypatch, capsys):
    """By the commands of docs/voices.md, in an empty folder. `serve` would not end."""
    page = (Path(__file__).parents[1] / "docs" / "voices.md").read_text(encoding="utf-8")
    block = page.split("### Without a download", 1)[1].split("```sh\n", 1)[1].split("```", 1)[0]
    lines = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert [line[0] for line in lines] == ["synthetic", "speak", "voices", "voices", "speak", "serve"]
    monkeypatch.chdir(tmp_path)
    for line in lines[:-1]:
        assert main(line) == 0, line
    assert "noise" in capsys.readouterr().out and soundfile.info("hello.wav").duration > 0.1
    assert main(["synthetic", "noise"]) == 1
    assert "noise cannot be written: File exists; name a new folder" in capsys.readouterr().err
    served = []
    monkeypatch.setattr(app, "serve", lambda served_app, listener: served.append(served_app) or listener.close() or 0)
    assert main([*lines[-1], "--port", "0"]) == 0 and served[0].state.service.voice_names() == ["try"]


def test_verbose_may_stand_anywhere(voices, capsys):
    for place in (1, 2, 4):
        command = ["voices", "list", "--json", str(voices)]
        command.insert(place, "-v")
        assert main(command) == 0


# ---------------------------------------------------------------- other commands


def test_a_foreign_voice_speaks_on_the_command_line(base, custom, recordings, tmp_path, capsys):
    file = str(tmp_path / "me.safetensors")
    assert main(["voices", "make", "--model", base, "--ref-audio", recordings[0], "-o", file]) == 0
    speak = ["speak", "--model", custom, "--text", "Hello.", "--device", "cpu", "--seed", "3", "--voice", file]
    speak += ["--instruct", "Slowly.", "--output", str(tmp_path / "a.wav")]
    assert main(speak) == 1
    assert "--allow-foreign-voice" in capsys.readouterr().err
    assert main([*speak, "--allow-foreign-voice"]) == 0
    assert soundfile.info(tmp_path / "a.wav").frames > 0


def test_the_option_needs_voices_and_foreign_voices_need_the_option(custom, voices, capsys):
    """A server tells it before it listens."""
    assert main(["speak", "--text", "Hello.", "--allow-foreign-voice"]) == 1
    assert "--allow-foreign-voice needs a saved voice: give --voice too" in capsys.readouterr().err
    for server in ("serve", "wyoming"):
        assert main([server, "--allow-foreign-voice"]) == 1
        assert "--allow-foreign-voice needs the voices of --voices" in capsys.readouterr().err
        assert main([server, "--model", custom, "--device", "cpu", "--voices", str(voices)]) == 1
        assert "saved voices need a Base checkpoint" in (error := capsys.readouterr().err) and "allow_foreign" in error


@pytest.mark.parametrize("whose", ["--voice", "--voices"])
def test_a_batch_takes_foreign_voices_where_that_is_allowed(whose, base, custom, tmp_path):
    hidden = Checkpoint.open(base).config.talker.stack.hidden_size
    (tmp_path / "v").mkdir()
    file = tmp_path / "v" / "anna.safetensors"
    Voice(torch.randn(hidden), None, None, "of a Base checkpoint").save(file)
    line = {"id": "a", "text": "Hello."} | ({"voice": "anna"} if whose == "--voices" else {})
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    command = ["batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"), "--model", custom, "--device", "cpu"]
    command += [whose, str(file if whose == "--voice" else file.parent)]
    assert main(command) == 1
    assert main([*command, "--allow-foreign-voice"]) == 0
    assert soundfile.info(tmp_path / "out" / "a.wav").frames > 0


def test_a_voice_is_looked_for_by_its_name_in_the_folder_of_voices(voices, base, tmp_path, capsys):
    said = ["speak", "--model", base, "--text", "Hello.", "--seed", "3", "--device", "cpu", "-o"]
    assert main([*said, str(tmp_path / "a.wav"), "--voice", str(voices / "ben.safetensors")]) == 0
    assert main([*said, str(tmp_path / "b.wav"), "--voice", "Ben", "--voices", str(voices)]) == 0
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()
    (tmp_path / "in.txt").write_text("Hello.")
    batch = ["batch", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out"), "--model", base, "--device", "cpu"]
    assert main([*batch, "--voice", "ben", "--voices", str(voices)]) == 0
    capsys.readouterr()
    assert main([*said, str(tmp_path / "c.wav"), "--voice", "bea", "--voices", str(voices)]) == 1
    assert "--voice 'bea' is neither a voice in --voices" in (error := capsys.readouterr().err)
    assert "voices there: anna, ben, carl" in error


def test_a_check_of_foreign_voices_is_for_a_checkpoint_that_may_take_them(voices, base, capsys):
    check = ["voices", "check", str(voices / "ben.safetensors"), "--model", base]
    assert main(check) == 0 and main([*check, "--allow-foreign-voice"]) == 1
    assert "--allow-foreign-voice is for CustomVoice checkpoints" in capsys.readouterr().err
