"""`qwen-audiobook` reads HTML, folders of HTML, Word documents and PDFs."""

import sys
import zipfile
from pathlib import Path

import pytest

from qwen_audiobook.book import read_book
from qwen_audiobook.documents import _pdf_lines
from qwen_audiobook.source import Source, read_source
from qwen_megakernel import RequestError
from spoken_text.front_end import TextFrontEnd


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)


def texts(source: Source) -> list[str]:
    return [piece.text for piece in read_book(source.lines, TextFrontEnd().of_book(source.markup)).pieces]


def test_html_is_read_as_a_page():
    html = "<!DOCTYPE html>\n<html lang='de'><head><title>A &amp; B</title></head><body><h1>One</h1><p>[pause 99s]<br>x"
    Path("book.html").write_text(html, encoding="utf-8")
    source = read_source("book.html")
    assert texts(source) == ["One", "[pause 99s]\nx"] and source.tags == {"title": "A & B", "language": "de"}


def test_a_folder_of_html_is_read_in_the_order_of_its_index():
    names = ["page10.html", "page2.html", "page1.html"]
    for name in names:
        Path(name).write_text(f"<h1>{name}</h1><p>Yes.</p>", encoding="utf-8")
    assert texts(read_source("."))[::2] == names[::-1]
    links = "".join(f'<a href="{name}">x</a>' for name in names)
    Path("index.html").write_text(f"<html><title>T</title><p>{links}</p></html>", encoding="utf-8")
    source = read_source(".")
    assert texts(source)[::2] == names and source.tags["title"] == "T"


def test_lines_of_a_pdf_become_paragraphs_without_page_numbers():
    full = "It was late, and nobody was in the garden, and"
    pages = [[f"The House {n}", full, "it rained. And", "so on.", full, f"{n}"] for n in range(1, 6)]
    lines = list(_pdf_lines(pages, {0: "One", 2: "Two"}))
    book = read_book(lines, TextFrontEnd().of_book("none"))
    assert book.titles == ["One", "Two"]
    assert [piece.text for piece in book.pieces][:2] == [
        f"{full}\nit rained. And\nso on.",
        f"{full}\n{full}\nit rained. And\nso on.",
    ]


@pytest.mark.parametrize("module, kind", [("pypdf", "a PDF"), ("mammoth", "a Word document (DOCX)")])
def test_a_missing_package_is_named(module, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    Path("book").write_bytes(b"%PDF-1.7\n")
    if module == "mammoth":
        with zipfile.ZipFile("book", "w") as file:
            file.writestr("word/document.xml", "x")
    with pytest.raises(RequestError) as error:
        read_source("book")
    assert f"got {kind}; in the checkout, pip install -e 'packages/audiobook[" in str(error.value)


DOCUMENT = """<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>
<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>One</w:t></w:r></w:p>
<w:p><w:r><w:t>It was &lt;late&gt;.</w:t></w:r></w:p></w:body></w:document>"""
STYLES = """<w:styles xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">
<w:style w:type="paragraph" w:styleId="Heading1"><w:name w:val="Heading 1"/></w:style></w:styles>"""


def test_a_word_document_is_read():
    pytest.importorskip("mammoth")
    kinds = '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>'
    with zipfile.ZipFile("book.docx", "w") as file:
        for name, text in (
            ("word/document.xml", DOCUMENT),
            ("word/styles.xml", STYLES),
            ("[Content_Types].xml", kinds),
        ):
            file.writestr(name, text)
    source = read_source("book.docx")
    assert texts(source) == ["One", "It was <late>."] and read_book(source.lines, TextFrontEnd()).titles == ["One"]


def test_a_pdf_is_read():
    pypdf = pytest.importorskip("pypdf")
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = pypdf.PdfWriter()
    name, font = NameObject, DictionaryObject()
    font.update({name("/Type"): name("/Font"), name("/Subtype"): name("/Type1"), name("/BaseFont"): name("/Helvetica")})
    for number in range(2):
        sheet, stream = writer.add_blank_page(200, 200), DecodedStreamObject()
        stream.set_data(f"BT /F 12 Tf 10 100 Td (It was late, {number}.) Tj ET".encode())
        sheet[name("/Contents")] = writer._add_object(stream)
        fonts = DictionaryObject({name("/F"): writer._add_object(font)})
        sheet[name("/Resources")] = DictionaryObject({name("/Font"): fonts})
        writer.add_outline_item(title=f"Part {number}", page_number=number)
    writer.add_metadata({"/Title": "The House"})
    writer.write("book.pdf")
    source = read_source("book.pdf")
    assert texts(source) == ["It was late, 0.", "It was late, 1."] and source.tags == {"title": "The House"}
    assert read_book(source.lines, TextFrontEnd()).titles == ["Part 0", "Part 1"]
    pypdf.PdfWriter().write("empty.pdf")
    with pytest.raises(RequestError, match="got a PDF; it is broken|no text, only pictures"):
        read_source("empty.pdf")
