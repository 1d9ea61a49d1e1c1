"""`qwen-audiobook`: chapters, paragraphs, pieces, subtitles, speakers, loudness, files by chapter."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from cases import reference_audio
from command import audiobook as speak
from hearing import spoken
from hypothesis import given
from hypothesis import strategies as st
from loudness import integrated_loudness

from qwen_audiobook.binding import HIGHEST_PEAK, Leveller
from qwen_audiobook.book import read_book
from qwen_audiobook.files import Cue, text_of
from qwen_megakernel import TextError, TTSEngine, cli
from qwen_megakernel.commands.narrate import Binder
from qwen_megakernel.commands.options import Pauses
from qwen_megakernel.commands.output import SpeechFile
from qwen_megakernel.commands.pieces import MAX_PIECE_CHARS, Break, Piece, read_pieces
from spoken_text.front_end import TextFrontEnd

pytestmark = pytest.mark.usefixtures("loads_once")

RATE = 24000
PLAIN, LATE = TextFrontEnd(), "It is late."
BOOK = """# One

Yes. "No!" he said.

[max] It is late.

## Two
So be it.
"""


def test_the_script_takes_the_words_of_its_command_line():
    said = subprocess.run([sys.executable, "-m", "qwen_audiobook", "--fiel", "x"], capture_output=True, text=True)
    assert said.returncode == 2 and "unknown option --fiel; did you mean --file?" in said.stderr


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    Path("book.md").write_text(BOOK, encoding="utf-8")
    return tmp_path


def samples_of(path: str) -> np.ndarray:
    return soundfile.read(path, dtype="float32")[0]


def piece(text: str = "x", behind: Break = Break.SENTENCE) -> Piece:
    return Piece(text, behind)


def files() -> set[str]:
    return {path.name for path in Path().iterdir()}


words = st.text("abcdef", min_size=1, max_size=12)
sentences = st.builds(
    lambda words, mark, gap: " ".join(words) + mark + gap,
    st.lists(words, min_size=1, max_size=40),
    st.sampled_from([".", "!", "?", ",", ""]),
    st.sampled_from([" ", "  ", "\n"]),
)
texts = st.lists(sentences, min_size=1, max_size=30).map("".join)


# ---------------------------------------------------------------- chapters, paragraphs, speakers


def cut(text: str, **options) -> list[tuple]:
    book = read_book(text, PLAIN, **options)
    return [(p.text, p.behind.name, p.chapter, p.speaker, p.line) for p in book.pieces]


def test_headings_begin_chapters():
    text = "Before.\n\n# One #\nText.\n### Deeper\n```\n# no heading\n```\n##Two\n## Two and more\r\n\r\nEnd."
    book = read_book(text, PLAIN)
    assert book.titles == [None, "One", "Two and more"]
    assert [(p.text, p.behind.name, p.chapter) for p in book.pieces] == [
        ("Before.", "CHAPTER", 0),
        ("One", "CHAPTER", 1),
        ("Text.", "PARAGRAPH", 1),
        ("Deeper", "PARAGRAPH", 1),
        ("```\n# no heading\n```\n##Two", "PARAGRAPH", 1),
        ("Two and more", "CHAPTER", 2),
        ("End.", "PARAGRAPH", 2),
    ]


@given(st.lists(texts, min_size=1, max_size=4), st.booleans())
def test_no_piece_crosses_a_paragraph_and_no_word_is_lost(paragraphs, by_sentence):
    paragraphs = [" ".join(text.split()) for text in paragraphs]
    book = read_book("\n \n".join(paragraphs), PLAIN, by_sentence=by_sentence)
    rest, breaks = iter(book.pieces), 0
    for paragraph in paragraphs:
        said = ""
        while "".join(said.split()) != "".join(paragraph.split()):
            piece = next(rest)
            breaks += piece.behind >= Break.PARAGRAPH
            said += piece.text
            assert len(piece.text) <= MAX_PIECE_CHARS
    assert next(rest, None) is None and breaks == len(paragraphs)


@given(st.lists(texts | st.sampled_from(["# One", "### Deep", "```", "[pause 1s] x", "  "]), min_size=1, max_size=9))
def test_speak_cuts_a_plain_text_into_the_same_pieces(paragraphs):
    text = "\n\n".join(paragraphs)
    book, (pieces, after_s) = read_book(text, PLAIN), read_pieces(text, PLAIN)
    assert [(p.text, p.behind, p.pause_s) for p in book.pieces] == [(p.text, p.behind, p.pause_s) for p in pieces]
    assert book.after_s == after_s


def test_a_long_sentence_is_one_sentence_of_several_pieces():
    long = "Word, " * 70 + "end."
    book = read_book(f"Short. {long} Last.", PLAIN, by_sentence=True)
    assert [piece.sentence for piece in book.pieces] == [0, 1, 1, 2] and book.sentences == ["Short.", long, "Last."]
    assert [piece.behind.name for piece in book.pieces] == ["CHAPTER", "SENTENCE", "CLAUSE", "SENTENCE"]


def test_names_in_brackets_speak_until_the_paragraph_ends():
    text = "[Ada] One.\nTwo.\n[max] Three. [ada] four.\n\nFive.\n[not me] Six.\n\n[max]\nSeven."
    assert cut(text, speakers=True) == [
        ("One.\nTwo.", "CHAPTER", 0, "ada", 1),
        ("Three. [ada] four.", "SENTENCE", 0, "max", 3),
        ("Five.\n[not me] Six.", "PARAGRAPH", 0, None, 5),
        ("Seven.", "PARAGRAPH", 0, "max", 8),
    ]
    assert all(speaker is None for *_, speaker, _ in cut(text)), "without --speakers they are words"


def test_the_front_end_reads_whole_paragraphs():
    """Code is left out, blank lines within it too; its pauses lie between pieces."""
    text = "# **One**\n\n```\nx = [pause 1s]\n\n# y\n```\n\nIt costs $5. [pause 500ms] Yes.\n\n***\n\n"
    text += "[pause 2s]\nNo. [pause 3s]"
    book = read_book(text, TextFrontEnd("english", "auto"))
    assert [(p.text, p.behind.name, p.pause_s) for p in book.pieces] == [
        ("One", "CHAPTER", 0),
        ("It costs five dollars.", "PARAGRAPH", 0),
        ("Yes.", "SENTENCE", 0.5),
        ("No.", "PARAGRAPH", 2),
    ]
    assert book.titles == ["**One**"] and book.after_s == 3
    with pytest.raises(TextError, match="line 3: "):
        read_book("One.\n\n[pause 99s] Two.", PLAIN)


# ---------------------------------------------------------------- sound


def speech(rng: np.random.Generator, lead: int, length: int, tail: int, level: float = 0.3) -> np.ndarray:
    """Noise with silence in front and behind, fp32 [lead + length + tail]."""
    sound = np.zeros(lead + length + tail, np.float32)
    sound[lead : lead + length] = level * rng.uniform(-1, 1, length)
    sound[[lead, lead + length - 1]] = level
    return sound


def test_a_piece_of_silence_harms_nothing():
    out: list[np.ndarray] = []
    binder = Binder(out.append, RATE, Pauses(0.1, 0.2, 0.3, 0.4), Leveller(-19, RATE).gain)
    for sound in (np.zeros(RATE, np.float32), np.full(RATE, 0.1, np.float32), np.zeros(0, np.float32)):
        binder.begin(piece())
        binder.add(sound)
        first, last = binder.end()
        assert 0 <= first <= last
    assert 1 < binder.seconds < 2.5


@pytest.mark.parametrize("target", [-30.0, -19.0])
def test_quiet_and_loud_pieces_come_out_equally_loud(target, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    out: list[np.ndarray] = []
    leveller = Leveller(target, RATE)
    binder = Binder(out.append, RATE, Pauses(0.15, 0.45, 0.9, 1.8), leveller.gain)
    for _ in range(12):
        binder.begin(piece())
        binder.add(speech(rng, 0, int(rng.integers(RATE, 4 * RATE)), 0, 10 ** rng.uniform(-2, 0)))
        binder.end()
    assert integrated_loudness(np.concatenate(out), RATE) == pytest.approx(target, abs=1.0)
    assert leveller.held_down == 0


def test_peaks_stay_below_1_dbfs_and_short_pieces_take_the_gain_before():
    leveller = Leveller(-10, RATE)
    sound = 0.05 * np.sin(np.arange(2 * RATE) * 0.3).astype(np.float32)
    gain = leveller.gain(sound)
    assert gain == pytest.approx(10 ** ((-10 - integrated_loudness(sound, RATE)) / 20)) and gain > 2
    assert leveller.gain(sound[: RATE // 4]) == leveller.gain(np.zeros(RATE, np.float32)) == gain
    assert leveller.held_down == 0
    sound[100] = 0.9
    assert leveller.gain(sound) * 0.9 == pytest.approx(HIGHEST_PEAK) and leveller.held_down == 1
    assert Leveller(-10, RATE).gain(sound[: RATE // 4]) == pytest.approx(HIGHEST_PEAK / 0.9, abs=0.1)


# ---------------------------------------------------------------- subtitles, options


def test_subtitles_escape_what_their_format_needs():
    cues = [Cue(0, 1.2345, "a --> b <i> & c"), Cue(3599.9996, 360_000, "end")]
    assert text_of(cues, ".srt") == (
        "1\n00:00:00,000 --> 00:00:01,234\na → b <i> & c\n\n2\n01:00:00,000 --> 100:00:00,000\nend\n"
    )
    assert text_of(cues, ".vtt") == (
        "WEBVTT\n\n1\n00:00:00.000 --> 00:00:01.234\na --&gt; b &lt;i&gt; &amp; c\n\n"
        "2\n01:00:00.000 --> 100:00:00.000\nend\n"
    )


@pytest.mark.parametrize(
    "args, told",
    [
        (["--split", "chapters", "-o", "-"], "name them with --output"),
        (["--split", "chapters", "--play"], "name them with --output"),
        (["--split", "chapters", "--play", "-o", "x.wav"], "--play plays one"),
        (["--split", "chapters", "-o", "folder.wav"], "'folder-01.wav' is a folder"),
        (["--subtitles", "x.txt"], "end it in .srt or .vtt"),
        (["--subtitles", "no/x.srt"], "--subtitles: no folder"),
        (["--voices", "."], "give both"),
        (["--speakers", "--voices", "nowhere"], "no folder 'nowhere'"),
        (["--max-streams", "0"], "--max-streams must be at least 1"),
        (["--model", "./nowhere", "-o", "x.m4b"], "no folder"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(args, told, monkeypatch, capsys):
    Path("folder-01.wav").mkdir()
    before = files()
    monkeypatch.setattr("qwen_megakernel.commands.output.player_for", lambda _ending: "player")
    assert speak("--file", "book.md", *args) == 1
    assert told in capsys.readouterr().err and files() == before


@pytest.mark.parametrize(
    "args", [["--pause", "x"], ["--pause", "1,2,3,4"], ["--pause", "11"], ["--pause", "nan"]]
    + [["--loudness", "-41"], ["--loudness", "nan"], ["--loudness", "loud"], ["--pause", "-1"]],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_their_range_are_refused(args, capsys):
    with pytest.raises(SystemExit):
        speak("--file", "book.md", f"{args[0]}={args[1]}")
    assert "expected" in capsys.readouterr().err


# ---------------------------------------------------------------- the command


def test_each_chapter_has_its_file_and_exact_subtitles():
    assert speak("--file", "book.md", "--speakers", "-o", "b.flac", "--split", "chapters", "--subtitles", "b.srt") == 0
    assert files() == {"book.md", "b-01.flac", "b-02.flac", "b-01.srt", "b-02.srt"}
    told = []
    for number in ("01", "02"):
        sound, cues = samples_of(f"b-{number}.flac"), Path(f"b-{number}.srt").read_text(encoding="utf-8")
        heard = [time for span in spoken(sound, RATE, 0.3) for time in span]
        times = re.findall(r"(\d\d):(\d\d):(\d\d),(\d{3})", cues)
        seconds = [int(h) * 3600 + int(m) * 60 + int(s) + int(ms) / 1000 for h, m, s, ms in times]
        told += [block.split("\n", 2)[2].strip() for block in cues.split("\n\n")]
        assert seconds == pytest.approx(heard, abs=0.05)
        for last, first in zip(seconds[1:-1:2], seconds[2::2], strict=True):
            assert min(abs(first - last - pause) for pause in (0.45, 0.9)) < 0.01
    assert told == ["One", "Yes.", '"No!" he said.', "It is late.", "Two", "So be it."]


def test_a_book_that_needs_nothing_of_a_book_sounds_as_speak_says_it():
    assert speak("--file", "book.md", "-o", "a.flac") == 0
    same = ["--file", "book.md", "-o", "b.flac", "--device", "cpu", "--threads", "1", "--seed", "3"]
    assert cli.main(["speak", *same]) == 0
    assert Path("a.flac").read_bytes() == Path("b.flac").read_bytes()


def test_a_tag_needs_a_file_that_has_tags(capsys):
    for args in (["--title", "Mine"], ["--author", "Ann", "-o", "x.wav"], ["--title", "Mine", "-o", "-"]):
        assert speak("--text", "Yes.", *args) == 1
        assert f"{args[0]} is a tag, and neither WAV nor raw PCM has tags: name another" in capsys.readouterr().err


def test_speakers_speak_their_lines(capsys):
    assert speak("--text", "[max] It is late.", "--speakers", "-o", "a.wav") == 0
    assert speak("--text", "It is late.", "--speaker", "max", "-o", "b.wav") == 0
    assert Path("a.wav").read_bytes() == Path("b.wav").read_bytes()
    assert speak("--text", "One.\n\n[nobody] It is late.", "--speakers", "-o", "c.wav") == 1
    assert "line 3: unknown speaker 'nobody'; known: ada, max" in capsys.readouterr().err
    assert not Path("c.wav").exists()


def test_saved_voices_speak_on_a_base_checkpoint(tiny, capsys):
    folder, names = tiny("base", eos_gain=6.0), ("me", "you")
    Path("voices").mkdir()
    with TTSEngine.load(folder, device="cpu", max_streams=1) as engine:
        for name, seconds in zip(names, (1.0, 2.0), strict=True):
            engine.create_voice((reference_audio(seconds), RATE)).save(Path("voices") / f"{name}.safetensors")
    base = ["--model", folder, "--speakers", "-o", "x.wav"]
    assert speak(*base, "--text", "[me] Yes.\n[you] No.", "--voices", "voices") == 0
    assert speak(*base, "--text", "[them] Yes.", "--voices", "voices") == 1
    assert "line 1: unknown speaker 'them'; known: me, you" in capsys.readouterr().err
    assert speak(*base, "--text", "[me] Yes.") == 1
    assert "known: none: name the folder of saved voices with --voices" in capsys.readouterr().err


def test_the_book_has_the_loudness_that_was_asked_for(capsys):
    # Without pauses: between short pieces they count as quiet.
    assert speak("--file", "book.md", "--speakers", "-o", "x.wav", "--loudness", "-24", "--pause", "0") == 0
    sound = samples_of("x.wav")
    assert integrated_loudness(sound, RATE) == pytest.approx(-24, abs=1.0)
    assert speak("--text", "It is late.", "-o", "y.wav", "--loudness", "-5") == 0
    assert "1 pieces stay below -5 LUFS" in capsys.readouterr().out
    assert np.abs(samples_of("y.wav")).max() == pytest.approx(HIGHEST_PEAK, abs=1e-3)


def test_a_chapter_that_was_whole_stays_and_the_next_is_absent(monkeypatch, capsys):
    write = SpeechFile.write

    def full(self, pcm):
        if self.path.name == "x-02.wav":
            raise KeyboardInterrupt
        write(self, pcm)

    monkeypatch.setattr(SpeechFile, "write", full)
    Path("x-02.wav").write_bytes(b"before")
    assert speak("--file", "book.md", "-o", "x.wav", "--split", "chapters", "--subtitles", "x.vtt") == 130
    assert files() == {"book.md", "x-01.wav", "x-01.vtt", "x-02.wav"} and Path("x-02.wav").read_bytes() == b"before"
    assert soundfile.info("x-01.wav").duration > 1
