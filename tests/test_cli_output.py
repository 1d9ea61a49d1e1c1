"""Where the command line's speech goes, and what becomes of it if that fails: files, players, interrupts."""

import errno
import io
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import tomllib
import zlib
from pathlib import Path

import numpy as np
import pytest
import soundfile
from cases import reference_audio
from tqdm import tqdm
from waiting import PATIENCE_S

import demo_pipeline
from qwen_megakernel import RequestError, SamplingParams, TTSEngine, TTSError
from qwen_megakernel.choices import ENDINGS, FORMATS
from qwen_megakernel.cli import main
from qwen_megakernel.commands import narrate, output
from qwen_megakernel.commands.output import SpeechFile, new_file
from qwen_megakernel.engine.audio import Chunk
from qwen_megakernel.engine.utterance import ChunkStream
from qwen_megakernel.model.pcm import pcm16

pytestmark = pytest.mark.usefixtures("loads_once")

ROOT = Path(__file__).parents[1]
DEMO = [sys.executable, str(ROOT / "demo_pipeline.py")]
RATE = 24000
TEXT = "Hello there, it is late."


def speak(*args: object) -> int:
    return main(["speak", "--text", TEXT, "--device", "cpu", "--seed", "3", *map(str, args)])


def demo(*args: object) -> int:
    return demo_pipeline.main(["--text", TEXT, "--device", "cpu", "--seed", "3", *map(str, args)])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to work in, and a Ctrl-C that works, even where pytest runs in the background of a shell."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield folder
    signal.signal(signal.SIGINT, before)


def last_line(capsys) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.rstrip().splitlines()[-1]


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("ending", FORMATS)
def test_the_ending_says_the_format(ending, here):
    with SpeechFile(f"x{ending.upper()}", RATE) as file:
        for _ in range(3):
            file.write(pcm16(reference_audio(1.0)))
    info = soundfile.info(f"x{ending.upper()}")
    assert (info.format, info.subtype) == FORMATS[ending] and info.samplerate == RATE
    assert info.duration == pytest.approx(3.0, abs=0.1)
    assert np.abs(soundfile.read(f"x{ending.upper()}")[0]).max() > 0.01 and len(list(here.iterdir())) == 1


def test_speech_is_written_in_any_format(here):
    assert speak("-o", "a.opus") == 0 and speak("--stream", "-o", "b.mp3") == 0 and demo("-o", "c.flac") == 0
    for name in ("a.opus", "b.mp3", "c.flac"):
        assert soundfile.info(name).duration > 1.0 and np.abs(soundfile.read(name)[0]).max() > 0.01
    assert len(list(here.iterdir())) == 3


def test_a_format_that_this_libsndfile_cannot_write_is_refused(here, monkeypatch, capsys):
    monkeypatch.setattr(soundfile, "check_format", lambda kind, coding: kind != "MP3")
    for program in (speak, demo):
        assert program("-o", "x.mp3", "--model", "./nowhere") == 1
        told = last_line(capsys)
        assert soundfile.__libsndfile_version__ in told
        assert told.endswith("cannot write .mp3; here it writes .wav, .flac, .ogg, .opus")
        assert program("-o", "x.txt", "--model", "./nowhere") == 1
        assert last_line(capsys).endswith("end it in .wav, .flac, .ogg, .opus, .m4a, .m4b")


@pytest.mark.slow
def test_minutes_at_once_are_written(here):
    """libsndfile's Vorbis encoder ends the process if it gets them in one call."""
    with SpeechFile("x.ogg", RATE) as file:
        file.write(pcm16(reference_audio(300.0)))
    assert soundfile.info("x.ogg").duration == pytest.approx(300.0, abs=0.1)


# ---------------------------------------------------------------- whole or not at all


class FullDisk(io.FileIO):
    """A file on a disk that has room for little more."""

    def write(self, data) -> int:
        if self.tell() + len(data) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.fixture
def full_disk(monkeypatch):
    monkeypatch.setattr(output, "open", FullDisk, raising=False)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_full_disk_is_told_and_leaves_nothing(ending, here, full_disk):
    """Sound that is encoded in memory touches the disk once it is whole."""
    for how in ({"keep_partial": True}, {"in_memory": True}):
        with pytest.raises(RequestError, match=f"no space .*{re.escape(str(here))}"):
            with SpeechFile(f"x{ending}", RATE, **how) as file:
                file.write(pcm16(reference_audio(3.0)))
                assert "in_memory" not in how or not list(here.iterdir())
        assert not list(here.iterdir())


def test_hours_of_sound_get_the_same_bytes_from_an_encoder_in_its_own_process(here):
    sound = pcm16(reference_audio(3.3))
    for long in (False, True):
        tags = {"title": "Öne", "artist": "Two", "language": "en"}
        with SpeechFile("x.m4b", RATE, long=long, tags=tags, cover=picture()) as file:
            for second in (0.0, 1.5):
                file.mark_chapter(second, f"“{second}”")
                file.write(sound)
        assert [place.name for place in here.iterdir()] == ["x.m4b"]
        Path("x.m4b").rename(here.parent / f"{long}.m4b")
    assert (here.parent / "False.m4b").read_bytes() == (here.parent / "True.m4b").read_bytes()


@pytest.mark.parametrize("ends", ["killed", "full"])
def test_an_encoder_process_that_fails_is_told_and_leaves_nothing(ends, here):
    told = {"killed": (TTSError, "status -9.*run the same"), "full": (RequestError, "File too large; name another")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if ends == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(told[ends][0], match=told[ends][1]), SpeechFile("x.m4b", RATE, long=True) as file:
            if ends == "killed":
                file._encoder._process.kill()
            while True:
                file.write(pcm16(reference_audio(1.0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(here.iterdir())


def picture() -> bytes:
    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head, pixel = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0), zlib.compress(bytes(2))
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", pixel) + part(b"IEND", b"")


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_wav_is_what_libsndfile_writes(in_memory, here):
    samples = np.random.default_rng().integers(-(2**15), 2**15, 2 * RATE + 1, dtype=np.int16)
    with SpeechFile("x.wav", RATE, in_memory=in_memory) as file:
        file.write(samples[:1000].tobytes())
        file.write(samples[1000:].tobytes())
    soundfile.write("y.wav", samples, RATE, subtype="PCM_16")
    assert Path("x.wav").read_bytes() == Path("y.wav").read_bytes()


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
@pytest.mark.parametrize("end", [None, KeyboardInterrupt])
def test_a_disk_that_is_full_at_the_very_end_leaves_what_was_there(number, end, here, monkeypatch, capsys):
    """And does not say that what was said so far is kept."""

    def full(_descriptor):
        raise OSError(number, os.strerror(number))

    Path("x.wav").write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", full)
    whole = SpeechFile("x.wav", RATE, keep_partial=end is not None)
    with pytest.raises(RequestError, match="no space"), whole as file:
        file.write(pcm16(reference_audio(1.0)))
        if end:
            raise end
    assert Path("x.wav").read_bytes() == b"before" and len(list(here.iterdir())) == 1
    assert "kept" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "program, extra",
    [(speak, []), (speak, ["--stream"]), (speak, ["--keep-partial"]), (demo, [])],
    ids=["speak", "stream", "keep-partial", "demo"],
)
def test_on_a_full_disk_it_fails_in_order(program, extra, here, full_disk, capsys):
    Path("x.wav").write_bytes(b"before")
    assert program("-o", "x.wav", *extra) == 1
    assert last_line(capsys).startswith(f"error: --output {here / 'x.wav'}: no space left on {here}; make room")
    assert Path("x.wav").read_bytes() == b"before" and len(list(here.iterdir())) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
def test_a_full_device_is_told():
    with pytest.raises(RequestError, match="no space .*/dev/full"), SpeechFile("/dev/full", RATE) as file:
        file.write(pcm16(reference_audio(1.0)))


def test_a_pipe_gets_the_whole_file_and_stays_a_pipe(here):
    os.mkfifo("pipe.wav")
    got = []
    reader = threading.Thread(target=lambda: got.append(Path("pipe.wav").read_bytes()))
    reader.start()
    with SpeechFile("pipe.wav", RATE) as file:
        file.write(pcm16(reference_audio(1.0)))
    reader.join()
    assert Path("pipe.wav").is_fifo() and len(soundfile.read(io.BytesIO(got[0]))[0]) == RATE


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_file_keeps_its_link_and_its_mode_and_a_new_one_obeys_the_umask(in_memory, here):
    Path("private.wav").write_bytes(b"before")
    Path("private.wav").chmod(0o600)
    Path("link.wav").symlink_to("private.wav")
    Path("nowhere.wav").symlink_to("linked.wav")
    before = os.umask(0o027)
    try:
        for name in ("link.wav", "new.wav", "nowhere.wav"):
            with SpeechFile(name, RATE, in_memory=in_memory) as file:
                file.write(pcm16(reference_audio(1.0)))
                assert name == "nowhere.wav" or not Path("new.wav").exists(), "it is not whole yet"
    finally:
        os.umask(before)
    assert Path("link.wav").is_symlink() and soundfile.info("private.wav").frames == RATE
    assert Path("nowhere.wav").is_symlink() and soundfile.info("linked.wav").frames == RATE
    modes = [Path(name).stat().st_mode & 0o777 for name in ("private.wav", "new.wav", "linked.wav")]
    assert modes == [0o600, 0o640, 0o640]


# ---------------------------------------------------------------- interrupted


def test_halves_of_killed_processes_are_deleted_and_those_of_others_are_not(here):
    killed, new = here / ".speech-0.part", here / ".speech-1.part"
    killed.touch()
    new.touch()
    os.utime(new, (2**33, 2**33))
    with new_file(here / "other.wav"):
        (held,) = set(here.glob(".speech-*")) - {killed, new}
        for path in (killed, held):
            os.utime(path, (0, 0))
        assert speak("-o", "x.wav") == 0
        assert {path.name for path in here.iterdir()} == {held.name, new.name, "x.wav"}


@pytest.fixture
def interrupted(monkeypatch):
    """The user stops the speech after some chunks, which this collects."""
    heard, take = [], ChunkStream.__next__

    def until_interrupted(self):
        if len(heard) == 3:
            raise KeyboardInterrupt
        chunk = take(self)
        heard.append(chunk.samples)
        return chunk

    monkeypatch.setattr(ChunkStream, "__next__", until_interrupted)
    return heard


@pytest.mark.parametrize("extra", [[], ["--stream"]], ids=str)
def test_interrupted_it_leaves_nothing_or_what_was_said_if_asked(extra, here, interrupted, capsys):
    assert speak("-o", "x.wav", *extra) == 130
    assert last_line(capsys) == "interrupted" and len(interrupted) == 3 and not list(here.iterdir())
    interrupted.clear()
    assert speak("-o", "x.flac", "--keep-partial", *extra) == 130
    assert f"kept    {here / 'x.flac'}: what was said so far" in capsys.readouterr().err
    samples = soundfile.read("x.flac", dtype="int16")[0]
    assert samples.tobytes() == pcm16(np.concatenate(interrupted)) and len(list(here.iterdir())) == 1


def test_an_interrupt_while_libsndfile_writes_is_not_lost(here, monkeypatch):
    write = output._Target.write

    def interrupt(self, data):
        monkeypatch.setattr(output._Target, "write", write)
        signal.raise_signal(signal.SIGINT)
        return write(self, data)

    with pytest.raises(KeyboardInterrupt), SpeechFile("x.wav", RATE) as file:
        monkeypatch.setattr(output._Target, "write", interrupt)
        while True:
            file.write(pcm16(reference_audio(1.0)))
    assert not list(here.iterdir())


def test_the_demo_interrupted_leaves_nothing(here, monkeypatch, capsys):
    write = demo_pipeline.SoundOutput.write_audio_frame

    async def interrupt(self, frame):
        if self.first_audio is None:
            signal.raise_signal(signal.SIGINT)
        return await write(self, frame)

    monkeypatch.setattr(demo_pipeline.SoundOutput, "write_audio_frame", interrupt)
    assert demo("-o", "x.wav") == 130
    assert last_line(capsys) == "interrupted" and not list(here.iterdir())


@pytest.mark.parametrize(
    "module, command",
    [("torch", [sys.executable, "-m", "qwen_megakernel", "doctor"]), ("loguru", [*DEMO, "--text", "Hello."])],
    ids=["command line", "demo"],
)
def test_interrupted_in_the_first_second_it_says_so(module, command, here):
    """While it imports, even where somebody swallows the exception."""
    import_it = ["import time", "print('importing', flush=True)", "try:", f"    time.sleep({PATIENCE_S})"]
    import_it += ["except BaseException:", "    pass"]
    (here / f"{module}.py").write_text("\n".join(import_it))
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(ROOT)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and error == "interrupted\n"


def test_the_script_is_the_door_that_knows_of_early_interrupts():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"qwen-megakernel": "qwen_megakernel.__main__:main"}


# ---------------------------------------------------------------- players


@pytest.fixture
def player(tmp_path, monkeypatch):
    """Puts a player on an otherwise empty PATH. It copies what it plays to the file "heard"."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(name: str, status: int = 0) -> None:
        script = folder / name
        script.write_text(f'#!/bin/sh\nfor played; do :; done\n/bin/cp "$played" {tmp_path}/heard\nexit {status}\n')
        script.chmod(0o755)

    return install


@pytest.mark.slow
def test_it_plays_and_leaves_no_file(here, player, tmp_path, capsys):
    player("aplay")
    for program in (speak, demo):
        assert program("--play") == 0
        assert soundfile.info(tmp_path / "heard").duration > 1.0 and not list(here.iterdir())
        (tmp_path / "heard").unlink()
        assert "wrote" not in capsys.readouterr().out


def test_it_plays_what_it_wrote(here, player, tmp_path):
    player("aplay")
    player("ffplay")
    assert speak("--play", "-o", "x.mp3") == 0, "aplay plays no MP3"
    assert (tmp_path / "heard").read_bytes() == Path("x.mp3").read_bytes()


def test_a_player_that_fails_is_told_and_the_file_stays(here, player, capsys):
    player("aplay", status=3)
    assert speak("--play", "-o", "x.wav") == 1
    assert last_line(capsys) == "error: --play: aplay could not play it (status 3); its own message is above"
    assert soundfile.info("x.wav").duration > 1.0


@pytest.mark.parametrize(
    "args, told",
    [
        (["--play"], "no program here plays .wav; install one of aplay, paplay, ffplay, afplay"),
        (["--play", "-o", "x.opus"], "no program here plays .opus; install one of ffplay"),
        (["-o", "-"], "standard output is a terminal: pipe it"),
    ],
    ids=str,
)
def test_where_there_is_no_player_or_pipe_it_names_what_there_may_be(args, told, here, player, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for program in (speak, demo):
        assert program(*args, "--model", "./nowhere") == 1
        assert told in last_line(capsys) and not list(here.iterdir())


def test_there_is_nothing_partial_to_keep_without_a_file(player, capsys):
    player("aplay")
    assert speak("--play", "--keep-partial", "--model", "./nowhere") == 1
    assert "name it with --output" in last_line(capsys)


# ---------------------------------------------------------------- sampling, progress, wrong options


def test_sampling_options_reach_both_kinds_of_codes(here, monkeypatch):
    asked, begin = [], TTSEngine.begin

    def listen(self, piece, request, *listeners):
        asked.append(request.sampling)
        return begin(self, piece, request, *listeners)

    monkeypatch.setattr(TTSEngine, "begin", listen)
    options = ["--temperature", 0.8, "--top-k", 20, "--top-p", 0.95, "--repetition-penalty", 1.1, "--seed", 5]
    assert speak(*options) == 0
    wanted = SamplingParams.for_both(temperature=0.8, top_k=20, top_p=0.95, repetition_penalty=1.1, seed=5)
    assert asked == [wanted.over(asked[0])]


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_progress_grows_with_the_text_and_is_whole_at_the_end_alone(monkeypatch, speed):
    """However much longer than their letters promise the pieces take, at any speed."""

    class Bar(tqdm):
        def __init__(self, **options):
            super().__init__(**options | {"disable": False})

        def update(self, n=1):
            super().update(n)
            shown.append((self.format_dict["n"] / self.format_dict["total"], str(self)))

    shown, second = [], Chunk(np.zeros(int(RATE / speed), np.float32), np.zeros((12, 16), np.int64), RATE)
    monkeypatch.setattr(narrate, "tqdm", Bar)
    with narrate.Progress(["A first piece of text.", "And the second one."], speed) as progress:
        for _ in range(2):
            progress.chunk(second)
            first = shown[-1][0]
            for _ in range(20):
                progress.chunk(second)
            progress.piece_ends()
    parts, texts = zip(*shown, strict=True)
    assert list(parts) == sorted(parts) and 0 < parts[0] < 0.55 < first < 1.0 and round(parts[-1], 9) == 0.99
    percents = [int(re.search(r"(\d+) %", text)[1]) for text in texts]
    assert max(percents) == 99 and "left, by the text's length, piece 1 of 2" in texts[0] and "2 of 2" in texts[-1]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_drawn_in_terminals_only(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    told.isatty = lambda: terminal
    with narrate.Progress(["A text."], 1.0) as progress:
        progress.chunk(Chunk(np.zeros(RATE, np.float32), np.zeros((12, 16), np.int64), RATE))
        progress.piece_ends()
    assert ("speaking" in told.getvalue()) == terminal and bool(told.getvalue()) == terminal


@pytest.mark.parametrize(
    "args, told",
    [
        (["speak", "--txt", "x"], "unknown option --txt; did you mean --text?"),
        (["speak", "--outptu=x.wav"], "unknown option --outptu; did you mean --output?"),
        (["speak", "--qqqq"], "unknown option --qqqq\n"),
        (["speak", "-q"], "unknown option -q"),
        (["speak", "Hello."], "unexpected words: Hello.; put them behind an option, such as --text"),
        (["verify", "--modell", "demo"], "unknown option --modell; did you mean --model?"),
        (["serve", "--prot", "8000"], "unknown option --prot; did you mean --port?"),
    ],
    ids=str,
)
def test_a_mistyped_option_shows_the_usage_of_its_command(args, told, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        main(args)
    error = capsys.readouterr().err
    assert error.startswith(f"usage: qwen-megakernel {args[0]} ") and told in error
    with pytest.raises(SystemExit, match="^2$"):
        demo("--sead", "1")
    assert "unknown option --sead; did you mean --seed?" in capsys.readouterr().err


def test_an_option_may_be_cut_short_and_a_text_may_begin_with_dashes(here):
    assert main(["speak", "--out", "x.wav", "--text", "-- and so on", "--dev", "cpu"]) == 0
    assert Path("x.wav").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=str)
def test_who_is_ended_leaves_nothing_half_written(number, tmp_path):
    command = [sys.executable, "-m", "qwen_megakernel", "speak", "--text", "Hello there. " * 60, "--stream"]
    process = subprocess.Popen([*command, "-o", "x.wav"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if " frames" in line:  # the first chunk
            break
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 130 and "interrupted" in process.stderr.read()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    process.stderr.close()


@pytest.mark.slow
def test_an_interrupted_demo_ends_at_once_and_leaves_nothing(tmp_path):
    """It does not say the rest first."""
    script = Path(__file__).parents[1] / "demo_pipeline.py"
    command = [sys.executable, str(script), "-v", "--text", "Hello there. " * 200, "-o", "x.wav"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "RTF" in line:  # a first sentence is said
            break
    process.send_signal(signal.SIGINT)
    said = process.stderr.read()
    assert process.wait(PATIENCE_S) == 130 and said.rstrip().endswith("interrupted")
    assert said.count("RTF") < 100 and not [path for path in tmp_path.rglob("*") if path.is_file()]
    process.stderr.close()
