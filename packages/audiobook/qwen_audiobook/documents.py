"""Books that are no EPUB: HTML, a folder of HTML, Word documents and PDFs, as lines."""

import io
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from qwen_audiobook.epub import MOST_BYTES, MOST_FILES, Told
from qwen_audiobook.lines import Line
from qwen_audiobook.text_bytes import decoded, not_text
from qwen_audiobook.xhtml import EntitiesDeclared, page_of
from qwen_megakernel.errors import RequestError
from spoken_text.files import open_file, read_most

HTML = (".html", ".htm", ".xhtml")
_IS_HTML = re.compile(r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.{0,2000}?-->\s*)?<(?:!doctype\s+html|html)\b", re.I | re.S)
_TITLE = re.compile(r"<title[^>]*>([^<]{1,1000})</title", re.I)
_LANGUAGE = re.compile(r"<html[^>]*?\s(?:xml:)?lang\s*=\s*[\"']([\w-]+)", re.I)
_LINK = re.compile(r"<a\s[^>]*?href\s*=\s*[\"']([^\"'#]+)", re.I)
_PART = re.compile(r"(\d+)")
_ENDS = (".", "!", "?", "…", ":", '"', "”", "»", "。", "！", "？", "」")
_INSTALL = "in the checkout, pip install -e 'packages/audiobook[{extra}]' reads it"


def is_html(text: str) -> bool:
    """Is the text a page of HTML, by its beginning?"""
    return _IS_HTML.match(text[:4096]) is not None


def read_html(text: str, where: str, file: str = "") -> Told:
    """`file`: names the page, if it is one of several. Raises RequestError: it is no page."""
    try:
        page = page_of(text, file, {}, {})
    except EntitiesDeclared:
        raise RequestError(f"{where}: it declares entities (<!ENTITY), which can do harm; save it again") from None
    if page is None:
        raise RequestError(f"{where}: it is no HTML; save it again")
    title, language = _TITLE.search(text[:65_536]), _LANGUAGE.search(text[:65_536])
    tags = {"title": " ".join(unescape(title[1]).split())} if title else {}
    return Told(page.lines, tags | ({"language": language[1]} if language else {}))


def read_folder(folder: Path, where: str) -> Told | None:
    """The HTML pages of a folder, in the order in which its index.html links to them, else by their names. Returns
    None: it has none. Raises RequestError: they are too many or too long, or one is no page."""
    paths = sorted((path for path in folder.iterdir() if path.suffix.lower() in HTML), key=_natural)
    if not paths:
        return None
    if len(paths) > MOST_FILES:
        raise RequestError(f"{where}: it holds {len(paths)} pages, more than {MOST_FILES}; split the book")
    texts, left = {}, MOST_BYTES
    for path in paths:
        with open_file(path, "a page") as file:
            data = read_most(file, left)
        if len(data) > left:
            raise RequestError(f"{where}: its text is longer than {MOST_BYTES // 10**6} MB; split the book")
        left -= len(data)
        texts[path.name] = decoded(data, f"{where}, {path.name}")[0]
    index = next((name for name in texts if Path(name).stem.lower() == "index"), "")
    linked = [unquote(link) for link in _LINK.findall(texts.get(index, ""))]
    order = [name for name in dict.fromkeys(linked) if name in texts and name != index]
    told = Told([])
    for name in [*filter(None, [index]), *order, *(name for name in texts if name not in order and name != index)]:
        page = read_html(texts[name], f"{where}, {name}", name)
        is_contents = name == index and len(order) > 1
        told.lines += [Line("", 1, file=name)]
        told.lines += [replace(line, matter="toc") for line in page.lines] if is_contents else page.lines
        told.tags = told.tags or page.tags
    return told


def _natural(path: Path) -> list[tuple[int, str]]:
    """A key by which page 2 comes before page 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _PART.split(path.name.lower())]


def read_word(file: IO[bytes], where: str) -> Told:
    """Read a Word document (DOCX). Raises RequestError: it is broken, or the package mammoth is missing."""
    kind = "a Word document (DOCX)"
    try:
        import mammoth
    except ImportError:
        raise not_text(where, kind, _INSTALL.format(extra="docx")) from None
    try:
        file.seek(0)
        text = mammoth.convert_to_html(io.BytesIO(file.read())).value  # a file of its own would lead to others
    except Exception as error:  # of many kinds, by what is broken
        raise not_text(where, kind, f"it is broken ({error}); save it again") from None
    return read_html(text, where)


def read_pdf(file: IO[bytes], where: str) -> Told:
    """Read a PDF's text, with chapters by its outline. Raises RequestError: it is broken, locked, or has only pictures,
    or the package pypdf is missing."""
    try:
        import pypdf
    except ImportError:
        raise not_text(where, "a PDF", _INSTALL.format(extra="pdf")) from None
    try:
        reader = pypdf.PdfReader(file)
        if reader.is_encrypted and not reader.decrypt(""):
            raise RequestError(f"{where}: the PDF is locked by a password; unlock it first")
        pages = [page.extract_text().splitlines() for page in reader.pages]
        marks = dict(_outline(reader, reader.outline))
        known = reader.metadata
    except RequestError:
        raise
    except Exception as error:  # of many kinds, by what is broken
        raise not_text(where, "a PDF", f"it is broken ({error}); save it again") from None
    if not any(line.strip() for page in pages for line in page):
        how = "recognise its text first, such as with ocrmypdf"
        raise RequestError(f"{where}: its {len(pages)} pages have no text, only pictures; {how}")
    tags = {"title": known.title, "author": known.author} if known else {}
    return Told(list(_pdf_lines(pages, marks)), {name: value.strip() for name, value in tags.items() if value})


def _outline(reader, entries: list, level: int = 1) -> Iterator[tuple[int, str]]:
    """Page and title of each entry of the first two levels; the first of a page counts."""
    found: dict[int, str] = {}
    for entry in entries:
        if isinstance(entry, list):
            if level < 2:
                for page, title in _outline(reader, entry, level + 1):
                    found.setdefault(page, title)
        elif (page := reader.get_destination_page_number(entry)) is not None and entry.title:
            found.setdefault(page, " ".join(entry.title.split()))
    yield from found.items()


def _pdf_lines(pages: list[list[str]], marks: dict[int, str]) -> Iterator[Line]:
    """Lines with paragraphs told apart, without page numbers and running heads."""
    ends = Counter(_without_digits(page[at]) for page in pages for at in ((0, -1) if len(page) > 1 else ()))
    repeated = {text for text, count in ends.items() if not text or count > max(2, len(pages) // 5)}
    width = sorted(len(line) for page in pages for line in page)[-1] if any(pages) else 0
    for number, page in enumerate(pages):
        file = f"page {number + 1}"
        if number in marks:
            yield Line("", 1, file=file)
            yield Line("", 1, 1, title=marks[number], file=file)
        for at, text in enumerate(page, 1):
            if at in (1, len(page)) and _without_digits(text) in repeated:
                continue
            yield Line(" ".join(text.split()), at, file=file)
            if text.rstrip().endswith(_ENDS) and len(text) < 0.85 * width:  # a paragraph's last line
                yield Line("", at, file=file)


def _without_digits(text: str) -> str:
    return re.sub(r"[\d\s|–—-]+", "", text)
