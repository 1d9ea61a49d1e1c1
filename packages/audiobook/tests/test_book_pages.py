"""`qwen-audiobook` reads books as they are: scene breaks, pages of every form, chapters, front and back matter."""

from pathlib import Path

import pytest
from books import page, write_epub

from qwen_audiobook.book import Book, read_book
from qwen_audiobook.source import read_source
from qwen_megakernel import RequestError
from spoken_text.front_end import TextFrontEnd

PLAIN = TextFrontEnd()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)


def read(path: str | Path = "book.epub", matter: str = "main", front_end: TextFrontEnd = PLAIN, **options) -> Book:
    source = read_source(str(path), matter)
    return read_book(source.lines, front_end.of_book(source.markup), **options)


def texts(book: Book) -> list[str]:
    return [piece.text for piece in book.pieces]


def epub_of(body: str, **options) -> Book:
    return read(write_epub({"b.xhtml": page(body)}), **options)


def toc(*entries: str, landmarks: str = "") -> dict:
    """A navigation document. `entries`: "target title", or another list in <li>."""
    items = "".join(
        entry if entry.startswith("<") else "<li><a href='{}'>{}</a></li>".format(*entry.split(" ", 1))
        for entry in entries
    )
    nav = f"<nav epub:type='toc'><ol>{items}</ol></nav><nav epub:type='landmarks'><ol>{landmarks}</ol></nav>"
    item = '<item id="n" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/>'
    return {"items": item, "files": {"OEBPS/nav.xhtml": page(nav)}}


# ---------------------------------------------------------------- signs

SIGNS = [
    "* * *",
    "***",
    "—",
    "~ ~",
    "-----",
    "⁂",
    "<!-- a note -->",
    "![alt](a.png)",
    "![alt][ref]",
    "<!-- two\nlines -->",
]


@pytest.mark.parametrize("normalize", ["off", "auto"])
@pytest.mark.parametrize("sign", SIGNS)
def test_signs_are_not_spoken(sign, normalize):
    front_end = TextFrontEnd("english", normalize)
    for text in (f"It was late.\n\n{sign}\n\nYes.", f"It was late.\n{sign}\nYes.", f"{sign}\n\nIt was late.\n\nYes."):
        book = read_book(text, front_end, by_sentence=True)
        assert texts(book) == book.sentences == ["It was late.", "Yes."]
        ends_scene = sign[0] not in "<!" and text[0] == "I"
        assert book.pieces[1].pause_s == (1.35 if ends_scene else 0), "silence of a scene break"


def test_underlined_titles_are_headings_and_a_line_below_prose_ends_a_scene():
    text = "Chapter One\n=====\nYes.\n\nThe Road\n-----\n\nNo.\n-----\n- item\n-----\n\n"
    text += "| a | b |\n|---|---|\n\n`<!-- x -->`"
    book = read_book(text, PLAIN)
    assert book.titles == ["Chapter One", "The Road"]
    assert texts(book) == ["Chapter One", "Yes.", "The Road", "No.", "- item", "| a | b |\n|---|---|", "`<!-- x -->`"]
    assert [piece.pause_s for piece in book.pieces][3:] == [0, 1.35, 1.35, 0]


def test_scene_breaks_of_an_epub_and_sentences_without_words():
    body = "<h1>One</h1><hr/><p>Yes.</p><hr/><p>—</p><p>No. “…” “Who?”</p><table><tr><td>—</td><td>x</td></tr></table>"
    book = epub_of(body + "<p>* * *</p><h2>Two</h2><p>So.</p>", by_sentence=True)
    assert texts(book) == ["One", "Yes.", "No.", "“Who?”", "x", "Two", "So."]
    assert [piece.pause_s for piece in book.pieces] == [0, 1.35, 1.35, 0, 0, 0, 0], "a chapter begins with its words"


@pytest.mark.parametrize("normalize", ["off", "auto"])
def test_a_book_that_mentions_markup_is_read(normalize):
    words = "The <audio> tag, <sub>x</sub>, [pause 20s], [pause ms] and `code` # _here_."
    body = f"<p>{words.replace('<', '&lt;')}</p>"
    assert texts(epub_of(body, front_end=TextFrontEnd("english", normalize))) == [words]


def test_a_markdown_book_may_name_tags_and_has_its_pauses(caplog):
    text = "Water is H<sub>2</sub>O, says <audio>. [pause 1s] Yes. [pause 20s], <break x=1> and [pause x"
    Path("book.md").write_text(text, encoding="utf-8")
    book = read("book.md")
    assert texts(book) == [part.strip() for part in text.split("[pause 1s]")] and book.pieces[1].pause_s == 1
    assert "it is no pause of 0 to 10 seconds: [pause 20s]" in caplog.text


# ---------------------------------------------------------------- pages

SVG = """<svg xmlns="http://www.w3.org/2000/svg"><title>no</title><style>no</style>
<text><tspan x="1" y="1">In the</tspan><tspan x="1" y="9">picture.</tspan></text></svg>"""
PREFIXED = """<h:html xmlns:h="http://www.w3.org/1999/xhtml"><h:head><h:title>no</h:title></h:head>
<h:body><h:h1>One</h:h1><h:p>Yes.</h:p><h:p>No.</h:p></h:body></h:html>"""


@pytest.mark.parametrize("broken", ["", "<br>"], ids=["xml", "html"])
def test_text_of_every_form_is_read(broken):
    body = f"{broken}<p><![CDATA[A & <b>]]> b.</p><p>a<object>o</object>b</p>{SVG}<p>&nbsp;&eacute;</p>"
    body += '<p><math alttext="a plus b"><mi>no</mi></math></p><p><math><mn>2</mn><mi>x</mi></math></p>'
    body += "<epub:switch><epub:case>no</epub:case><epub:default>so</epub:default></epub:switch>"
    expected = ["A & <b> b.", "a", "o", "b", "In the picture.", "é", "a plus b", "2 x", "so"]
    assert texts(epub_of(body)) == expected
    prefixed = PREFIXED.replace("<h:p>Yes.", "<h:br><h:p>Yes.") if broken else PREFIXED
    assert texts(read(write_epub({"b.xhtml": prefixed}))) == ["One", "Yes.", "No."]


def test_fallbacks_are_followed_and_what_is_no_page_is_told(capsys):
    items = '<item id="x" href="a.json" media-type="application/json" fallback="y"/><item id="y" href="a.psd" '
    items += 'media-type="image/psd" fallback="z"/><item id="z" href="z.svg" media-type="image/svg+xml"/>'
    items += '<item id="w" href="w.pdf" media-type="application/pdf" fallback="w"/>'
    order = '<itemref idref="x"/><itemref idref="w"/><itemref idref="none"/>'
    frame = page("<p>Yes.</p><iframe src='inside.xhtml'>no</iframe>")
    write_epub({"b.xhtml": frame}, items=items, order=order, files={"OEBPS/z.svg": SVG})
    assert texts(read()) == ["Yes.", "In the picture."]
    told = capsys.readouterr().err
    assert "w.pdf is no page (application/pdf)" in told and "'none' is in the order" in told
    assert "OEBPS/b.xhtml shows inside.xhtml in a frame" in told


def test_a_book_of_pictures_is_told():
    write_epub({"b.xhtml": page("<img src='a.png' alt='no'/>")})
    with pytest.raises(RequestError, match="its 1 pages have no text, only pictures; recognise their text first"):
        read()


def test_entities_may_not_be_declared_behind_a_long_comment():
    bomb = f'<!--{"x" * 20_000}--><!DOCTYPE html [<!ENTITY a "aaaa">]><html><p>&a;</p></html>'
    write_epub({"b.xhtml": bomb})
    with pytest.raises(RequestError, match="b.xhtml declares entities"):
        read()


# ---------------------------------------------------------------- chapters


def test_adjacent_headings_begin_one_chapter():
    body = "<h1>Chapter 1</h1><h2>The Road</h2><p>Yes.</p><h2>II.</h2><h2>Home</h2><p>No.</p>"
    body += "<hgroup><p>Three</p><h2>III</h2><p>The End</p></hgroup><p>So.</p>"
    book = epub_of(body)
    assert book.titles == ["Chapter 1: The Road", "II. Home", "Three: III: The End"]
    assert [piece.behind.name for piece in book.pieces][:3] == ["CHAPTER", "PARAGRAPH", "PARAGRAPH"]
    assert read_book("# Part\n\n## One\n\nYes.\n\n## Two\nNo.", PLAIN).titles == ["Part: One", "Two"]


def test_contents_that_are_finer_than_headings_decide():
    body = "<h1>The Book</h1>" + "".join(f"<p id='c{n}'>{n}</p><p>Yes.</p>" for n in range(1, 6))
    entries = [f"b.xhtml#c{n} Number {n}" for n in range(1, 6)]
    grouped = f"<li><span>Part</span><ol><li><span>Author</span><ol>{''.join(map(entry, entries))}</ol></li></ol></li>"
    for listed in (entries, [grouped]):
        book = read(write_epub({"b.xhtml": page(body)}, **toc(*listed)))
        assert book.titles == [f"Number {n}" for n in range(1, 6)]


def entry(text: str) -> str:
    return "<li><a href='{}'>{}</a></li>".format(*text.split(" ", 1))


@pytest.mark.parametrize("kind", ["nav", "ncx"])
def test_pages_deep_in_the_contents_are_chapters_and_sections_within_them_are_not(kind):
    pages = {f"c{n}.xhtml": page(f"<h4>{n}</h4><p>Yes.</p><h5 id='s'>Deep</h5><p>No.</p>") for n in range(3)}
    pages = {"p.xhtml": page("<h2>Book</h2>"), "q.xhtml": page("<h3>Part</h3>")} | pages
    book, part = ("p.xhtml", "Book"), ("q.xhtml", "Part")
    deep = [((f"c{n}.xhtml", f"Chapter {n}"), [((f"c{n}.xhtml#s", "Deep"), [])]) for n in range(3)]
    if kind == "nav":
        how = toc(listed(book, [(part, deep)]))
    else:
        points = (
            f"<ncx xmlns='http://www.daisy.org/z3986/2005/ncx/'><navMap>{point(book, [(part, deep)])}</navMap></ncx>"
        )
        item = '<item id="n" href="toc.ncx" media-type="application/x-dtbncx+xml"/>'
        how = {"items": item, "spine": 'toc="n"', "files": {"OEBPS/toc.ncx": points}}
    assert read(write_epub(pages, **how)).titles == ["Book: Part: Chapter 0", "Chapter 1", "Chapter 2"]


def listed(entry: tuple[str, str], more: list) -> str:
    inner = "".join(listed(*one) for one in more)
    return f"<li><a href='{entry[0]}'>{entry[1]}</a>{f'<ol>{inner}</ol>' if inner else ''}</li>"


def point(entry: tuple[str, str], more: list) -> str:
    inner = "".join(point(*one) for one in more)
    label = f"<navLabel><text>{entry[1]}</text></navLabel><content src='{entry[0]}'/>"
    return f"<navPoint>{label}{inner}</navPoint>"


def test_contents_decide_where_headings_are_finer_and_headings_where_contents_are_poor():
    chapters = {f"c{n}.xhtml": page(f"<h1>{n}</h1><p>Yes.</p><h2>Deep</h2><p>No.</p>") for n in range(3)}
    good = [f"c{n}.xhtml Chapter {n}" for n in range(3)]
    assert read(write_epub(chapters, **toc(*good))).titles == ["Chapter 0", "Chapter 1", "Chapter 2"]
    poor = ["c0.xhtml Start"]
    assert read(write_epub(chapters, **toc(*poor))).titles == ["0", "Deep", "1", "Deep", "2", "Deep"]
    one = page("".join(f"<h2>{n}</h2><p>Yes.</p>" for n in range(9)))
    assert len(read(write_epub({"b.xhtml": one}, **toc("b.xhtml Cover", "b.xhtml#no Start"))).titles) == 9


def test_titles_keep_their_subtitles_and_parts():
    pages = {"p.xhtml": page("<h1>Part One</h1>")}
    for n, name in enumerate(("I", "II")):
        head = f"<section id='s'><hgroup><h2>{name}</h2><p>The Road {n}</p></hgroup>"
        pages[f"c{n}.xhtml"] = page(f"{head}<p>Yes.</p></section>")
    book = read(write_epub(pages, **toc("p.xhtml Part One", "c0.xhtml#s I", "c1.xhtml#s II")))
    assert book.titles == ["Part One: I: The Road 0", "II: The Road 1"]
    pages = {
        "b.xhtml": page("<h1>Chapter 1</h1><h2 id='a'>The Road</h2><p>Yes.</p><h1>2</h1><h2 id='b'>X</h2><p>No.</p>")
    }
    book = read(write_epub(pages, **toc("b.xhtml#a The Road", "b.xhtml#b X")))
    assert book.titles == ["Chapter 1: The Road", "2: X"]
    assert [piece.chapter for piece in book.pieces] == [0, 0, 0, 1, 1, 1]


# ---------------------------------------------------------------- front and back matter


def test_front_and_back_matter_is_left_out_and_told(capsys):
    pages = {
        "t.xhtml": page("<section epub:type='titlepage'><h1>The House</h1></section>"),
        "i.xhtml": page("<section epub:type='imprint'><p>Printed.</p></section>"),
        "p.xhtml": page(
            "<div epub:type='frontmatter'><section epub:type='preface'><h2>Preface</h2></section>x y</div>"
        ),
        "b.xhtml": page("<h2>One</h2><p>It was late, and nobody was in the garden.</p>"),
        "c.xhtml": page("<p>Made with care.</p>"),
        "l.xhtml": page("<div class='pg-boilerplate'><div>Licence.</div></div><div>End.</div>"),
    }
    marks = (
        "<li><a epub:type='colophon' href='c.xhtml'>x</a></li><li><a epub:type='bodymatter' href='b.xhtml'>x</a></li>"
    )
    write_epub(pages, **toc(landmarks=marks), order='<itemref idref="n"/>')
    assert texts(read()) == ["Preface", "One", "It was late, and nobody was in the garden.", "End."]
    told = capsys.readouterr().err
    assert "titlepage (2 words), imprint (1 words), frontmatter (2 words), colophon (3 words)" in told
    assert "--matter all reads them" in told
    assert {"Printed.", "x y", "Made with care.", "Licence."} < set(texts(read(matter="all")))


def test_matter_that_is_most_of_the_book_is_the_book(capsys):
    assert texts(epub_of("<section epub:type='index'><p>All of the text.</p></section><p>x</p>"))
    assert not capsys.readouterr().err


def test_translators_are_no_authors():
    more = '<meta refines="#t" property="role" scheme="marc:relators">trl</meta>'
    creators = '<dc:creator id="a">Ann Lee</dc:creator><dc:creator id="t">Tom Ray</dc:creator>'
    write_epub({"b.xhtml": page("<p>Yes.</p>")}, metadata=creators + more)
    assert read_source("book.epub").tags["author"] == "Ann Lee"
