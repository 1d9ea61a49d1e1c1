"""`speak` with long texts: chapters, paragraphs, pieces, pauses, subtitles, speakers, loudness, files by chapter."""

import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import regex
import soundfile
from cases import reference_audio
from hearing import spoken
from hypothesis import given
from hypothesis import strategies as st
from loudness import integrated_loudness
from waiting import slow_case

from qwen_megakernel import SamplingParams, TextError, TTSEngine
from qwen_megakernel.cli import main
from qwen_megakernel.commands.book_files import Cue, text_of
from qwen_megakernel.commands.book_text import MAX_PIECE_CHARS, Break, Piece, read_book
from qwen_megakernel.commands.narrate import HIGHEST_PEAK, Binder, Leveller, in_order
from qwen_megakernel.commands.options import Pauses, pauses_of
from qwen_megakernel.commands.output import SpeechFile
from qwen_megakernel.model.edges import SILENCE
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.speech import encoders
from spoken_text.cutting import sentences_of, split_evenly
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


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    Path("book.md").write_text(BOOK, encoding="utf-8")
    return tmp_path


def speak(*args: object) -> int:
    return main(["speak", *map(str, args), "--device", "cpu", "--threads", "1", "--seed", "3"])


def samples_of(path: str) -> np.ndarray:
    return soundfile.read(path, dtype="float32")[0]


def piece(text: str = "x", behind: Break = Break.SENTENCE) -> Piece:
    return Piece(text, behind, 0, 0, None, 1)


def files() -> set[str]:
    return {path.name for path in Path().iterdir()}


# ---------------------------------------------------------------- cutting

words = st.text("abcdef", min_size=1, max_size=12)
sentences = st.builds(
    lambda words, mark, gap: " ".join(words) + mark + gap,
    st.lists(words, min_size=1, max_size=40),
    st.sampled_from([".", "!", "?", ",", ""]),
    st.sampled_from([" ", "  ", "\n"]),
)
texts = st.lists(sentences, min_size=1, max_size=30).map("".join)


@given(texts | st.text(max_size=400), st.integers(1, 300))
def test_joined_the_pieces_are_the_text_and_none_is_too_long(text, most):
    pieces = split_evenly(text, most)
    assert "".join(pieces) == text
    assert all(len(piece.strip()) <= most or regex.fullmatch(r"\X", piece.strip()) for piece in pieces)
    assert "".join(sentences_of(text)) == text


@given(st.lists(st.integers(3, 60), min_size=1, max_size=40), st.integers(60, 200))
def test_as_few_pieces_as_can_be_none_of_them_a_stub(lengths, most):
    """Of sentences that all fit."""
    text = " ".join("X" * (length - 1) + "." for length in lengths)
    pieces = [len(piece.strip()) for piece in split_evenly(text, most)]
    greedy, room = 0, -1
    for length in lengths:
        if room < length + 1:
            greedy, room = greedy + 1, most + 1
        room -= length + 1
    assert len(pieces) == greedy
    mean = sum(pieces) / len(pieces)
    for one, other in zip(pieces, pieces[1:], strict=False):
        # Could one sentence change sides, they would not be more even.
        assert abs(one - other) <= 61 or min(one, other) + 61 > most or max(one, other) - 61 < mean


def test_a_paragraph_a_little_too_long_becomes_two_halves():
    text = "This is a sentence of some length, and more. " * 7
    lengths = [len(piece.strip()) for piece in split_evenly(text, MAX_PIECE_CHARS)]
    assert len(text) > MAX_PIECE_CHARS and sorted(lengths) == [134, 179]


@given(st.text("abc ,", min_size=400, max_size=900).filter(lambda text: len(text.strip()) > 300))
def test_a_sentence_that_is_too_long_is_cut_evenly_too(text):
    lengths = [len(piece.strip()) for piece in split_evenly(text, 300)]
    assert len(lengths) <= math.ceil(len(text) / 300) + 1


def test_a_text_of_hundred_pages_is_cut_at_once():
    """Time that is linear in the text, also without any paragraph, sentence or word."""
    for text in ("A sentence of some length. " * 12_000, "word " * 60_000, "x" * 300_000):
        assert len(split_evenly(text, 300)) <= len(text) / 270 + 1


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Mr. Smith met Dr. J. R. Brown. He left.", ["Mr. Smith met Dr. J. R. Brown. ", "He left."]),
        ('"Look!" he said. "No." She left.', ['"Look!" he said. ', '"No." ', "She left."]),
        ("z. B. hier. Gut?", ["z. B. hier. ", "Gut?"]),
        ("好的。是吗？“好！”", ["好的。", "是吗？", "“好！”"]),
    ],
)
def test_sentences(text, expected):
    assert sentences_of(text) == expected


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


def test_pauses_are_exact_whatever_silence_the_pieces_have(fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    for pauses in (Pauses(0.15, 0.45, 0.9, 1.8), Pauses(0.0, 0.0, 0.01, 0.2)):
        out: list[np.ndarray] = []
        binder, ends = Binder(out.append, RATE, pauses), []
        behinds = [Break(rng.integers(4)) for _ in range(8)]
        for behind in behinds:
            sound = speech(rng, *rng.integers(200, 20_000, 3) + [800, 500, 0])
            sound[rng.integers(200)] = 0.9  # a click
            binder.begin(piece(behind=behind))
            for part in np.array_split(sound, rng.integers(1, 9)):
                binder.add(part)
            ends.append(binder.end())
        whole = np.concatenate(out)
        for (first, _), behind, (_, before) in zip(ends[1:], behinds[1:], ends, strict=False):
            least = max(pauses[behind], 0.01)  # the ends of a cut fade for 5 ms each
            assert least - 1e-6 <= first - before <= least + 1e-6
            assert np.abs(whole[round(before * RATE) : round(first * RATE)]).max(initial=0) <= SILENCE
        for first, last in ends:
            assert min(abs(whole[round(first * RATE)]), abs(whole[round(last * RATE) - 1])) > SILENCE
        assert binder.seconds == pytest.approx(len(whole) / RATE) and np.abs(whole).max() < 0.5, "no click is left"


def test_a_piece_of_silence_harms_nothing():
    out: list[np.ndarray] = []
    binder = Binder(out.append, RATE, Pauses(0.1, 0.2, 0.3, 0.4), Leveller(-19, RATE))
    for sound in (np.zeros(RATE, np.float32), np.full(RATE, 0.1, np.float32), np.zeros(0, np.float32)):
        binder.begin(piece())
        binder.add(sound)
        first, last = binder.end()
        assert 0 <= first <= last
    assert 1 < binder.seconds < 2.5


def test_many_are_open_and_they_come_in_order():
    began, closed, most = [], [], 0

    class Stream:
        def __init__(self, item):
            began.append(item)
            self.item, self.left = item, random.randint(0, 12)

        def heard(self):
            yield from (("chunk", self.item) for _ in range(self.left))
            yield "audio", self.item

        def close(self):
            closed.append(self.item)

    ended = []
    spoken = in_order(range(50), Stream, lambda _item, stream: stream.heard(), 6)
    for item, (kind, own) in spoken:
        assert item == own
        assert began != [] and (most or began == [0]), "the first sound waits for no other piece"
        most = max(most, len(began) - len(ended))
        if kind == "audio":
            ended.append(item)
        if item == 40:
            break
    spoken.close()
    assert ended == list(range(len(ended))) and 1 < most <= 6
    assert closed == began[len(ended) - (ended[-1] == 40) :], "whoever stops listening leaves nothing open"


@pytest.mark.parametrize("target", [-30.0, -19.0])
def test_quiet_and_loud_pieces_come_out_equally_loud(target, fresh_seed):
    rng = np.random.default_rng(fresh_seed)
    out: list[np.ndarray] = []
    leveller = Leveller(target, RATE)
    binder = Binder(out.append, RATE, Pauses(0.15, 0.45, 0.9, 1.8), leveller)
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


def test_a_pause_that_is_not_given_is_twice_the_one_before():
    assert pauses_of("0.3") == pytest.approx((0.1, 0.3, 0.6, 1.2)) and pauses_of("6,2,8") == (2, 6, 2, 8)
    assert pauses_of("6") == (2, 6, 10, 10)


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


def test_mpeg4_without_its_package_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setattr(encoders, "find_spec", lambda _name: None)
    assert speak("--text", "x", "-o", "x.m4b") == 1
    assert ".m4b needs the package av: in the checkout, pip install -e '.[serve]', or choose" in capsys.readouterr().err


def test_chapter_marks_are_in_an_mpeg4_file():
    with SpeechFile("x.m4b", RATE) as file:
        for second, title in ((0.5, "Öne & <two>"), (2.25, "Last")):
            file.mark_chapter(second, title)
            file.write(pcm16(reference_audio(2.0)))
    with av.open("x.m4b") as read:
        marks = [(m["start"], m["end"], m["metadata"]["title"]) for m in read.chapters()]
        assert marks == [(0, 2250, "Öne & <two>"), (2250, 4000, "Last")]
        sound = np.concatenate([frame.to_ndarray()[0] for frame in read.decode(audio=0)])
    assert len(sound) == pytest.approx(4 * RATE, abs=1024) and np.abs(sound).max() > 0.01


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "text, trim",
    [(LATE, "none"), (f"[pause 200ms] {LATE} [pause 300ms]", "both")]
    + [slow_case(LATE, "both"), slow_case(f"[pause 200ms] {LATE} [pause 300ms]", "none")],
)
def test_a_text_of_one_piece_is_what_generate_says(text, trim):
    """Nothing is cut from it unless that is asked for."""
    with TTSEngine.load("demo", device="cpu", threads=1, max_streams=1) as engine:
        (piece,) = engine.pieces(text)
        audio = engine.generate(piece, sampling=SamplingParams(seed=3), trim=trim)
    assert speak("--text", text, "-o", "x.wav", "--trim", trim) == 0
    assert soundfile.read("x.wav", dtype="int16")[0].tobytes() == pcm16(audio.samples)


def test_a_pause_in_the_text_is_as_long_as_it_says():
    assert speak("--text", "[pause 200ms] Yes. [pause 1.2s] No.\n\n[pause 100ms] So. [pause 2s]", "-o", "x.wav") == 0
    yes, no, so = spoken(samples_of("x.wav"), RATE, 0.4)
    pauses = [yes[0], no[0] - yes[1], so[0] - no[1], soundfile.info("x.wav").duration - so[1]]
    assert pauses == pytest.approx([0.2, 1.2, 0.9, 2.0], abs=0.05)


@pytest.mark.slow
def test_however_many_slots_the_samples_are_the_same(capsysbinary, monkeypatch):
    said, opened, begin = [], [], TTSEngine.begin

    def count(self, *args):
        begun = begin(self, *args)
        opened.append(self.health()["streams"])
        return begun

    monkeypatch.setattr(TTSEngine, "begin", count)
    for slots in (1, 3):
        assert speak("--file", "book.md", "-o", f"{slots}.wav", "--max-streams", slots) == 0
        said.append(samples_of(f"{slots}.wav").tobytes())
        assert 1 < max(opened) <= 2 * slots, "several are open at once"
    assert said[0] == said[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    capsysbinary.readouterr()
    assert speak("--file", "book.md", "-o", "-") == 0
    assert capsysbinary.readouterr().out == soundfile.read("1.wav", dtype="int16")[0].tobytes()


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


def test_a_piece_that_ended_badly_is_said_again_and_the_others_are_not(monkeypatch, capsys):
    begin, seeds = TTSEngine.begin, []

    def bad_at_first(self, text, request, *args):
        seeds.append((str(text), request.seed))
        return begin(self, text, replace(request, max_frames=4) if seeds[-1] == ("Two", 3) else request, *args)

    monkeypatch.setattr(TTSEngine, "begin", bad_at_first)
    assert speak("--text", "# One\n# Two\n# Yes", "-o", "x.wav", "--retries", 2) == 0
    assert sorted(seeds) == [("One", 3), ("Two", 3), ("Two", 4), ("Yes", 3)]
    assert "retries 1, because" in capsys.readouterr().out
