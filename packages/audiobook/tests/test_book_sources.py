"""`qwen-audiobook` with books as others save them: front matter, footnotes, EPUB, encodings, files without text, and
subtitles as the text was written."""

import io
import os
import re
import sys
import tracemalloc
import zipfile
from collections import Counter
from pathlib import Path

import av
import pytest
import soundfile
from books import page, write_epub
from command import audiobook as speak
from hypothesis import given
from hypothesis import strategies as st
from waiting import slow_case

from qwen_audiobook import epub
from qwen_audiobook.book import Book, read_book
from qwen_audiobook.front_matter import split_front_matter
from qwen_audiobook.source import read_source
from qwen_audiobook.text_bytes import decoded
from qwen_audiobook.written import with_written
from qwen_megakernel import Lexicon, RequestError, TextError
from spoken_text.front_end import TextFrontEnd

pytestmark = pytest.mark.usefixtures("loads_once")

PLAIN = TextFrontEnd()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)


def said(book: Book) -> list[tuple[int, str]]:
    return [(piece.chapter, piece.text) for piece in book.pieces]


def read(path: str | Path, **options) -> Book:
    return read_book(read_source(str(path)).lines, PLAIN, **options)


def refused(path: str | Path) -> str:
    with pytest.raises(RequestError) as error:
        read(path)
    return str(error.value)


# ---------------------------------------------------------------- front matter


@pytest.mark.parametrize(
    "text, tags",
    [
        ('---\ntitle: "My: Book" # mine\nauthor: Ann Lee\ndate: 2020\n---\n', ("My: Book", "Ann Lee")),
        ("---\r\ntitle: >-\r\n  Long\r\n  title\r\nauthors:\r\n- A B\r\n- C\r\n---\r\n", ("Long title", "A B, C")),
        ("---\n# note\ntitle: 'It''s'\nauthor: [A B, \"C, D\"]\n...\n", ("It's", "A B, C, D")),
        ("---\nauthor:\n  - name: Ann Lee\n    affiliation: X\n  - Bo\nlayout: post\n---\n", (None, "Ann Lee, Bo")),
        ("---\nTitle: T\n\ndescription: |\n  One.\n\n  Two.\n---\n", ("T", None)),
        ("---\nmood: dark\n---\n", (None, None)),
        ('+++\ntitle = "T"\nauthors = ["A", "B"]\n[params]\nx = 1\n+++\n', ("T", "A, B")),
    ],
)
def test_front_matter_is_not_read_and_becomes_tags(text, tags):
    told, rest, first = split_front_matter(text + "# One\nYes.", "x")
    assert (told.get("title"), told.get("author")) == tags
    assert rest == "# One\nYes." and first == text.count("\n") + 1
    Path("book.md").write_text(text + "\n[pause 99s] No.", encoding="utf-8")
    with pytest.raises(TextError, match=f"line {first + 1}: "):  # lines are counted from the file's first one
        read("book.md")


@pytest.mark.parametrize(
    "text",
    ["---\n\nIt was late.\n\n---\n\nYes.", "---\nAda: Who is there?\nMax: Me.\n---\nYes.", "---\ntitle: no end"]
    + ["---\nIt was late.\n---\n", "---\n---\nYes.", "+++\nIt was late.\n+++\nYes.", "Yes.\n---\ntitle: x\n---\n"]
    + ["---\nNote: it was late.\n---\nYes.", "+++\nx = " + "[" * 20_000 + "\n+++\nYes.", "----\ntitle: x\n----\n"],
)
def test_prose_between_rules_stays(text):
    assert split_front_matter(text, "x") == ({}, text, 1)


@pytest.mark.parametrize("lines, number", [("title: My: Book", 2), ("author: @ann", 2), ("title: 'x\nlang: en", 4)])
def test_front_matter_that_is_no_yaml_is_told_and_not_read_aloud(lines, number):
    Path("book.md").write_text(f"---\n{lines}\n---\nYes.", encoding="utf-8")
    assert refused("book.md").startswith(f"--file book.md, line {number}: the front matter is no YAML; put a value")


def test_values_of_front_matter_stay_as_they_were_written():
    text = "---\ntitle: 1984\nauthor: No\nlang: no\nbomb: &a [x, x]\nmore: [*a, *a]\n---\n"
    assert split_front_matter(text, "x")[0] == {"title": "1984", "author": "No", "language": "no"}


@given(st.text("-+a:\n\r #[]{}'\"|>t", max_size=60))
def test_front_matter_of_any_form_does_no_harm(text):
    for rule in ("---", "+++"):
        whole = f"{rule}\n{text}\n{rule}\nYes."
        _, rest, first = split_front_matter(whole, "x")
        assert whole.endswith(rest) and rest.endswith("Yes.") or not rest.strip()
        assert len(re.split(r"\r\n?|\n", whole)) == len(re.split(r"\r\n?|\n", rest)) + first - 1


@pytest.mark.parametrize("ending", [".m4b", slow_case(".m4a"), ".mp3", slow_case(".flac"), slow_case(".opus")])
def test_tags_are_in_the_file_and_options_win(ending):
    text = "---\ntitle: Mine\nauthor: Ann Lee\nlang: de-AT\n---\nYes."
    Path("book.md").write_text(text, encoding="utf-8")
    assert speak("--file", "book.md", "-o", f"x{ending}", "--author", "Bo Ray") == 0
    with av.open(f"x{ending}") as file:
        tags = {name.lower(): value for name, value in (file.metadata | file.streams[0].metadata).items()}
    assert (tags["title"], tags["artist"], tags["album"]) == ("Mine", "Bo Ray", "Mine")
    assert ending not in (".m4b", ".m4a") or tags["language"] == "deu"


def test_files_of_chapters_have_their_own_titles():
    Path("book.md").write_text("---\ntitle: Mine\n---\nYes.\n# Two\nNo.", encoding="utf-8")
    assert speak("--file", "book.md", "-o", "x.flac", "--split", "chapters") == 0
    tags = [soundfile.SoundFile(f"x-0{n}.flac") for n in (1, 2)]
    assert [(file.title, file.album, file.tracknumber) for file in tags] == [("1", "Mine", "1"), ("Two", "Mine", "2")]


# ---------------------------------------------------------------- footnotes

NOTES = """# One
Yes[^1] and[^b] no[^9].

[^1]: First note,
  which goes on.

    It has two paragraphs.
Not a note.
[^c]: Nobody refers to it.

```
[^1]: code[^1]
```
# Two
So[^1] be it[^far].

[^1]: Another first.[^deep]

# Three
End.

[^b]: Second.
[^far]: Far.
[^deep]: Deep.
"""


def test_footnotes_are_left_out():
    expected = [(0, "One"), (0, "Yes and no[^9]."), (0, "Not a note."), (0, "```\n[^1]: code[^1]\n```")]
    assert said(read_book(NOTES, PLAIN)) == [*expected, (1, "Two"), (1, "So be it."), (2, "Three"), (2, "End.")]


def test_footnotes_are_read_at_the_end_of_their_chapter():
    book = read_book(NOTES, PLAIN, footnotes="end")
    notes = ["First note,\nwhich goes on.", "It has two paragraphs.", "Second.", "Nobody refers to it."]
    assert [text for chapter, text in said(book) if chapter == 0][4:] == notes
    assert [text for chapter, text in said(book) if chapter == 1][2:] == ["Another first.", "Far.", "Deep."]
    assert [text for chapter, text in said(book) if chapter == 2] == ["Three", "End."]
    assert book.pieces[4].line == 4 and len(book.titles) == 3


def test_the_command_reads_footnotes_only_if_asked(monkeypatch):
    texts = []

    def stop(_engine, pieces, *_rest):
        texts.append([(piece.chapter, piece.text) for piece in pieces])
        raise KeyboardInterrupt

    monkeypatch.setattr("qwen_audiobook.command.narrate", stop)
    for footnotes in ([], ["--footnotes", "end"]):
        assert speak("--text", "Yes[^1].\n\n[^1]: No.", "-o", "x.wav", *footnotes) == 130
    assert texts == [[(0, "Yes.")], [(0, "Yes."), (0, "No.")]]


def test_a_pipe_and_a_folder_are_refused_at_once():
    os.mkfifo("book.md")
    assert "--file book.md: a text is a regular file, but this is something else" in refused("book.md")
    assert "this is a folder" in refused(".")


def test_a_long_book_is_not_held_as_lines():
    """The lines of a text without footnotes are made one by one."""
    text = "It was late, and nobody was in the garden. It was late.\n\n" * 20_000
    tracemalloc.start()
    try:
        for _line in read_source_of(text).lines:
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * len(text)


def read_source_of(text: str):
    Path("long.md").write_text(text, encoding="utf-8")
    return read_source("long.md")


# ---------------------------------------------------------------- EPUB

NCX = """<!DOCTYPE ncx PUBLIC "-//NISO//DTD ncx 2005-1//EN" "http://www.daisy.org/z3986/2005/ncx-2005-1.dtd">
<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/"><navMap>
<navPoint><navLabel><text>First</text></navLabel><content src="b.xhtml"/></navPoint>
<navPoint><navLabel><text>Second</text></navLabel><content src="a%20a.xhtml#two"/></navPoint></navMap></ncx>"""
ONE = {"b.xhtml": page("<h1>One</h1><p>Yes.</p>")}


def test_an_epub_is_read_in_the_order_of_its_spine():
    body = "<h1>One <i>and</i><br/>only</h1>\n<p>It was <b>da</b>rk&nbsp;&amp;\n late.</p>"
    body += "<p>[ada] Who?<br/>[max] Me.</p>"
    more = "<h2>Two</h2><div>A<p>B</p>C</div><ul><li>x</li><li>y</li></ul><h3>Deep</h3><script>no()</script><p/>"
    more += "<ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby><hr/><p hidden=''>no</p><p>co\xadop<img alt='no'/></p>"
    more += "<p><span class='pagenum'>[Pg 12]</span></p>"
    book = read(write_epub({"b.xhtml": page(body), "a.xhtml": page(more)}), speakers=True)
    assert said(book) == [
        *((0, text) for text in ("One and only", "It was dark & late.", "Who?", "Me.")),
        *((1, text) for text in ("Two", "A", "B", "C", "x", "y", "Deep", "漢", "coop")),
    ]
    assert [piece.speaker for piece in book.pieces[:4]] == [None, None, "ada", "max"]
    assert book.titles == ["One and only", "Two"]
    assert read_source("book.epub").tags == {"title": "The House", "author": "Ann Lee, Bo Ray", "language": "en-GB"}


@pytest.mark.parametrize("kind", ["nav", "ncx"])
def test_the_table_of_contents_tells_chapters_where_there_are_no_headings(kind):
    pages = {"b.xhtml": page("<p class='c'>I</p><p>Yes.</p>"), "a a.xhtml": page("<p>Rest.</p><p id='two'>II</p>")}
    nav = "<nav epub:type='landmarks'><ol><li><a href='a%20a.xhtml'>No</a></li></ol></nav><nav epub:type='toc'><ol><li>"
    nav += "<a href='b.xhtml'><i>First</i></a></li><li><a href='a%20a.xhtml#two'>Second</a></li></ol></nav>"
    items = '<item id="n" href="toc.ncx" media-type="application/x-dtbncx+xml"/>'
    if kind == "nav":
        items = '<item id="n" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/>'
    files = {"OEBPS/toc.ncx": NCX} if kind == "ncx" else {"OEBPS/nav.xhtml": page(nav)}
    book = read(write_epub(pages, items=items, spine='toc="n"' if kind == "ncx" else "", files=files))
    assert said(book) == [(0, "I"), (0, "Yes."), (0, "Rest."), (1, "II")] and book.titles == ["First", "Second"]


def test_footnotes_of_an_epub():
    one = "<h1>One</h1><p>Yes.<a epub:type='noteref' href='#n1'>1</a> No<sup><a href='n.xhtml#x'>2</a></sup>.</p>"
    one += "<aside epub:type='footnote' id='n1'><p><a href='#r1'>1.</a> First.</p></aside><p>5<sup>th</sup></p>"
    notes = "<section epub:type='endnotes'><h2>Notes</h2><ol>"
    notes += "<li id='x'><p>Far. <a href='b.xhtml'>↩</a></p></li></ol></section>"
    write_epub({"b.xhtml": page(one), "c.xhtml": page("<h1>Two</h1><p>End.</p>"), "n.xhtml": page(notes)})
    prose = [(0, "One"), (0, "Yes. No."), (0, "5th")]
    assert said(read("book.epub")) == [*prose, (1, "Two"), (1, "End.")]
    assert said(read("book.epub", footnotes="end")) == [*prose, (0, "First."), (0, "Far."), (1, "Two"), (1, "End.")]


def test_the_command_speaks_an_epub(monkeypatch, capsys):
    write_epub({"b.xhtml": page("<h1>One</h1><p>[max] Yes.</p>"), "c.xhtml": page("<h1>Two</h1><p>\n[nobody] No.</p>")})
    assert speak("--file", "book.epub", "-o", "x.m4b") == 0
    with av.open("x.m4b") as file:
        assert [mark["metadata"]["title"] for mark in file.chapters()] == ["One", "Two"]
        assert (file.metadata["title"], file.metadata["artist"]) == ("The House", "Ann Lee, Bo Ray")
        assert file.streams[0].metadata["language"] == "eng"
    assert speak("--file", "book.epub", "-o", "y.m4b", "--speakers") == 1
    assert "OEBPS/c.xhtml, line 4: unknown speaker 'nobody'; known: ada, max" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": io.BytesIO(Path("book.epub").read_bytes())}))
    assert [line.text for line in read_source("-").lines if line.level] == ["One", "Two"]


def locked(algorithm: str, path: str) -> dict[str, str]:
    data = (
        f'<e:EncryptionMethod Algorithm="{algorithm}"/><e:CipherData><e:CipherReference URI="{path}"/></e:CipherData>'
    )
    space = 'xmlns:e="http://www.w3.org/2001/04/xmlenc#"'
    return {"META-INF/encryption.xml": f"<encryption {space}><e:EncryptedData>{data}</e:EncryptedData></encryption>"}


AES, FONT = "http://www.w3.org/2001/04/xmlenc#aes128-cbc", "http://www.idpf.org/2008/embedding"
BOMB = '<!DOCTYPE c [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><container>&b;</container>'
THIEF = '<!DOCTYPE html [<!ENTITY x SYSTEM "file:///etc/passwd">]><html><body><p>&x;</p></body></html>'


@pytest.mark.parametrize(
    "book, told",
    [
        ({"pages": ONE, "files": locked(AES, "OEBPS/b.xhtml")}, "locked by DRM"),
        ({"pages": ONE, "files": locked(FONT, "OEBPS/b.xhtml")}, "locked by DRM"),
        ({"pages": ONE, "files": {"OEBPS/content.opf": None}}, "without a package file"),
        ({"pages": ONE, "files": {"META-INF/container.xml": BOMB}}, "container.xml declares entities"),
        ({"pages": ONE, "files": {"OEBPS/content.opf": BOMB}}, "content.opf declares entities"),
        ({"pages": ONE, "files": {"OEBPS/content.opf": "<package>"}}, "content.opf is not XML"),
        ({"pages": {"b.xhtml": THIEF}}, "b.xhtml declares entities"),
        ({"pages": {"../../etc/passwd": None}}, "outside of the book"),
        ({"pages": {"/etc/passwd": None}}, "outside of the book"),
        ({"pages": {"file:///etc/passwd": None}}, "outside of the book"),
        ({"pages": {"b.xhtml": None}}, "does not hold it"),
        ({"pages": {"b.xhtml": "<p>x</p>" + "<a " * 50_000}}, "b.xhtml is not XHTML"),
        ({"pages": {}}, "lists no pages"),
        ({"pages": {"b.xhtml": page("<p>" + "x" * 300_000)}}, "its text is longer than"),
        ({"pages": {f"{n}.xhtml": page("<p>x</p>") for n in range(30)}}, "files, more than 20"),
        ({"pages": ONE, "order": '<itemref idref="p0"/>' * 30}, "pages, more than 20"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_an_epub_is_told_in_one_sentence(book, told, monkeypatch, capsys):
    monkeypatch.setattr(epub, "MOST_BYTES", 200_000)
    monkeypatch.setattr(epub, "MOST_FILES", 20)
    write_epub(**book)
    assert speak("--file", "book.epub", "-o", "x.wav") == 1
    error = capsys.readouterr().err
    assert told in error and "--file book.epub: " in error and "; " in error and len(error.splitlines()) == 1


def test_garbled_fonts_are_no_lock_and_a_missing_container_does_no_harm():
    files = locked(FONT, "OEBPS/font.otf") | {"META-INF/container.xml": None}
    assert said(read(write_epub(ONE, files=files))) == [(0, "One"), (0, "Yes.")]


def test_pages_in_other_encodings():
    pages = page("<h1>Öne</h1>").replace('"utf-8"', '"iso-8859-1"').encode("latin-1")
    assert said(read(write_epub({"b.xhtml": pages}))) == [(0, "Öne")]
    assert said(read(write_epub({"b.xhtml": page("<h1>Öne</h1>").encode("utf-16")}))) == [(0, "Öne")]


def test_a_broken_archive_is_named():
    whole = write_epub(ONE).read_bytes()
    Path("cut.epub").write_bytes(whole[: len(whole) // 2])
    assert "is broken" in refused("cut.epub")
    at = whole.index(b"OEBPS/b.xhtml") + 20
    Path("bad.epub").write_bytes(whole[:at] + bytes(20) + whole[at + 20 :])
    assert "cannot be unpacked" in refused("bad.epub")


# ---------------------------------------------------------------- encodings

TEXTS = {
    "Über den Wäldern lag Nebel. Die Tür war groß.": ("cp1252", "latin-1"),
    "Il était déjà très tard. Où vas-tu, mon frère ? «Ça va.»": ("cp1252", "latin-1"),
    "It was a café — “nice,” she said. She didn’t go.": ("cp1252",),
    "¿Qué pasó mañana? El niño soñó.": ("cp1252",),
    "A canção não é tão má.": ("cp1252",),
    "Było późno. W ogrodzie nie było nikogo. Źdźbło żółte.": ("cp1250", "iso8859-2"),
    "Bylo pozdě. Žluťoučký kůň úpěl ďábelské ódy.": ("cp1250",),
    "Было поздно. В саду никого не было. Кто там?": ("cp1251", "koi8-r"),
    "もう遅かった。庭には誰もいなかった。": ("shift_jis", "euc_jp"),
    "已经很晚了。花园里没有人。": ("gb18030",),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_text_with_a_mark_and_utf_8(encoding, capsys):
    Path("book.txt").write_bytes("# Öne 日\r\n\r\nYes.".encode(encoding))
    assert said(read("book.txt")) == [(0, "Öne 日"), (0, "Yes.")]
    assert not capsys.readouterr().err


@pytest.mark.parametrize("text, encoding", [(text, name) for text, names in TEXTS.items() for name in names])
def test_legacy_encodings_are_told_apart(text, encoding, capsys):
    for whole in (text, f"{text}\n\n" * 40):
        Path("book.txt").write_bytes(whole.encode(encoding))
        assert "".join(line.text for line in read_source("book.txt").lines) == whole.replace("\n", "")
        assert "--file book.txt: read as " in capsys.readouterr().err


def test_a_wrong_byte_in_utf_8_is_named_and_not_guessed():
    with pytest.raises(RequestError, match="line 2 .*0xe9.*UTF-8"):
        decoded("Öne ä ö ü.\nCaf".encode() + b"\xe9", "x")
    with pytest.raises(RequestError, match="UTF-16"):
        decoded(b"\xff\xfea", "x")


FILES = {
    "a PDF": b"%PDF-1.7\n%\xe2\xe3",
    "an old Office document (DOC)": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
    "a rich text document (RTF)": b"{\\rtf1 Yes.}",
    "a Kindle book (MOBI)": b"Title".ljust(60, b"\0") + b"BOOKMOBI",
    "an image (PNG)": b"\x89PNG\r\n\x1a\n",
    "an image (JPEG)": b"\xff\xd8\xff\xe0",
    "sound or video": b"ID3\x04\0",
    "a compressed file": b"\x1f\x8b\x08\0",
    "a binary file": b"Yes.\0\1",
}
INSIDE = {"a Word document (DOCX)": "word/document.xml", "an OpenDocument file (ODT)": "content.xml", "a ZIP": "x.txt"}


@pytest.mark.parametrize("kind", [*FILES, *INSIDE])
def test_files_without_text_are_named_with_what_to_do(kind, capsys):
    if kind in FILES:
        Path("book.txt").write_bytes(FILES[kind])
    else:
        with zipfile.ZipFile("book.txt", "w") as file:
            file.writestr(INSIDE[kind], "x")
    assert speak("--file", "book.txt", "-o", "x.wav") == 1
    error = capsys.readouterr().err
    assert f"--file book.txt: expected text, Markdown or EPUB, got {kind}" in error and "; " in error


# ---------------------------------------------------------------- subtitles


def written(text: str, language: str, lexicon: Lexicon | None = None) -> list[tuple[str, str]]:
    book = read_book(text, TextFrontEnd(language, "auto", lexicon), by_sentence=True)
    return [(piece.text, book.sentences[piece.sentence]) for piece in book.pieces]


def test_sentences_keep_their_written_form():
    text = "It costs **$5**. [pause 500ms] See https://example.com/a. He has 5.\n\n`x` is 3 km[^1]? Yes.\n\n[^1]: 7"
    assert written(text, "english") == [
        ("It costs five dollars.", "It costs $5."),
        ("See example dot com.", "See https://example.com/a."),
        ("He has five.", "He has 5."),
        ("x is three kilometers?", "x is 3 km?"),
        ("Yes.", "Yes."),
    ]
    assert written("Use SQL now. Yes.", "english", Lexicon({"sql": "sequel"}))[0] == ("Use sequel now.", "Use SQL now.")


def test_a_mark_that_ends_no_sentence_when_spoken():
    """As in German dates; also in a text that repeats itself, at once."""
    text = "Text eins. Am 3. Mai kam er. Ja, am 3. Mai. Die 3. Person."
    seen = ["Text eins.", "Am 3. Mai kam er.", "Ja, am 3. Mai.", "Die 3. Person."]
    assert [form for _, form in written(text, "german")] == seen
    again = written("Am 3. Mai kostet es 5 km. " * 2000, "german")
    assert Counter(again) == {("Am dritten Mai kostet es fünf Kilometer.", "Am 3. Mai kostet es 5 km."): 2000}


@given(st.lists(st.text("ab1 .", max_size=30), max_size=4), st.lists(st.text("ab2 .", max_size=30), max_size=4))
def test_each_sentence_gets_something_to_show(spoken, shown):
    paired = list(with_written([part for part in spoken if part.strip()], [part for part in shown if part.strip()]))
    assert all(one.strip() and other.strip() for one, other in paired)


def test_subtitles_show_what_was_written():
    options = ("--normalize", "auto", "--language", "en", "--subtitles", "x.srt")
    assert speak("--text", "It is **5 km**. Yes.", "-o", "x.wav", *options) == 0
    blocks = Path("x.srt").read_text(encoding="utf-8").split("\n\n")
    assert [block.split("\n")[2] for block in blocks] == ["It is 5 km.", "Yes."]
