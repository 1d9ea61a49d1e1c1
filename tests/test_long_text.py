"""`speak` with long texts: pieces, pauses, files; and books, which are for another package."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from cases import reference_audio
from hearing import spoken
from waiting import slow_case

from qwen_megakernel import SamplingParams, TextError, TTSEngine
from qwen_megakernel.cli import main
from qwen_megakernel.commands.narrate import Binder, in_order
from qwen_megakernel.commands.options import Pauses, pauses_of
from qwen_megakernel.commands.output import SpeechFile
from qwen_megakernel.commands.pieces import Break, Piece, read_pieces
from qwen_megakernel.commands.text_input import read_text
from qwen_megakernel.model.edges import SILENCE
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.speech import encoders
from spoken_text.front_end import TextFrontEnd

pytestmark = pytest.mark.usefixtures("loads_once")

RATE = 24000
PLAIN, LATE = TextFrontEnd(), "It is late."
BOOK = """# One

Yes. "No!" he said.

It is late.

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
    return Piece(text, behind)


def files() -> set[str]:
    return {path.name for path in Path().iterdir()}


# ---------------------------------------------------------------- pieces, pauses


def test_paragraphs_headings_and_code_are_told_apart():
    text = "Before.\n\n# One #\nText.\n### Deeper\n```\n# no\n\nheading\n```\n## Two\r\n\r\n[pause 2s] End. [pause 1s]"
    pieces, after_s = read_pieces(text, PLAIN)
    assert [(piece.text, piece.behind.name, piece.pause_s) for piece in pieces] == [
        ("Before.", "CHAPTER", 0),
        ("One", "CHAPTER", 0),
        ("Text.", "PARAGRAPH", 0),
        ("Deeper", "PARAGRAPH", 0),
        ("```\n# no\n\nheading\n```", "PARAGRAPH", 0),
        ("Two", "CHAPTER", 0),
        ("End.", "PARAGRAPH", 2),
    ]
    assert after_s == 1
    with pytest.raises(TextError, match="line 3: "):
        read_pieces("One.\n\n[pause 99s] Two.", PLAIN)


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


def test_a_pause_that_is_not_given_is_twice_the_one_before():
    assert pauses_of("0.3") == pytest.approx((0.1, 0.3, 0.6, 1.2)) and pauses_of("6,2,8") == (2, 6, 2, 8)
    assert pauses_of("6") == (2, 6, 10, 10)


# ---------------------------------------------------------------- files


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


def test_an_unknown_language_is_no_tag():
    with SpeechFile("x.m4b", 24000, tags={"title": "T", "language": "nonsense"}) as file:
        file.write(bytes(48000))
    with av.open("x.m4b") as read_again:
        assert read_again.metadata["title"] == "T"


# ---------------------------------------------------------------- what is for qwen-audiobook

INSTALL = "qwen-audiobook (in the checkout: pip install -e packages/audiobook)"


@pytest.mark.parametrize(
    "data, told",
    [
        (b"PK\x03\x04 and so on", "expected plain text in UTF-8"),
        (b"{\\rtf1 Yes.}", "expected plain text in UTF-8"),
        (b"%PDF-1.7 Yes.", "expected plain text in UTF-8"),
        ("Où vas-tu ?".encode("cp1252"), "expected plain text in UTF-8"),
        (b"Yes.\0", "expected plain text in UTF-8"),
        (b"---\r\ntitle: Mine\r\n---\r\nYes.", "it begins with front matter"),
        (b'+++\ntitle = "Mine"\n+++\nYes.', "it begins with front matter"),
        (b"# One\nYes[^1].\n\n[^1]: No.", "it has footnotes"),
    ],
    ids=str,
)
def test_speak_names_the_package_for_books(data, told, capsys):
    Path("book.md").write_bytes(data)
    assert speak("--file", "book.md", "-o", "x.wav") == 1
    error = capsys.readouterr().err
    assert f"--file book.md: {told}" in error and INSTALL in error and files() == {"book.md"}


@pytest.mark.parametrize("option", ["--split=chapters", "--subtitles=x.srt", "--speakers", "--title=Mine"])
def test_options_for_books_name_it_too(option, capsys):
    with pytest.raises(SystemExit):
        speak("--text", "Yes.", option)
    assert f"unknown option {option.split('=')[0]}: it is for books, which {INSTALL} reads" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["---\n\nIt was late.\n\n---", "---\nAda: Who is there?\nMax: Me.\n---\nYes."])
def test_prose_between_rules_is_spoken(text):
    Path("text.md").write_text(text, encoding="utf-8")
    assert read_text("text.md") == text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_text_with_a_byte_order_mark_is_read(encoding):
    Path("text.txt").write_bytes("Öne 日\r\n".encode(encoding))
    assert read_text("text.txt") == "Öne 日\r\n"


def test_chapters_without_marks_are_told(caplog):
    assert speak("--file", "book.md", "-o", "x.m4b") == 0
    assert f"the file gets no chapter marks: {INSTALL} makes them" in caplog.text


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


def test_a_piece_that_ended_badly_is_said_again_and_the_others_are_not(monkeypatch, capsys):
    begin, seeds = TTSEngine.begin, []

    def bad_at_first(self, text, request, *args):
        seeds.append((str(text), request.seed))
        return begin(self, text, replace(request, max_frames=4) if seeds[-1] == ("Two", 3) else request, *args)

    monkeypatch.setattr(TTSEngine, "begin", bad_at_first)
    assert speak("--text", "# One\n# Two\n# Yes", "-o", "x.wav", "--retries", 2) == 0
    assert sorted(seeds) == [("One", 3), ("Two", 3), ("Two", 4), ("Yes", 3)]
    assert "retries 1, because" in capsys.readouterr().out
