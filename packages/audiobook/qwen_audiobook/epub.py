"""EPUB: a ZIP archive of XHTML pages. A package file (OPF) tells their order.

ebooklib would read it, but has a licence (AGPL) that ours does not allow.
"""

import re
import xml.etree.ElementTree as ET
import zipfile
import zlib
from collections.abc import Iterator
from posixpath import normpath
from typing import IO
from xml.parsers import expat

from qwen_audiobook.lines import Line
from qwen_audiobook.text_bytes import decoded, not_text
from qwen_audiobook.xhtml import contents_of, lines_of, path_of
from qwen_megakernel.errors import RequestError

MOST_BYTES = 50_000_000  # of all pages together, unpacked: a hundred long novels
MOST_FILES = 10_000  # and pages in the order

_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_PAGES = ("application/xhtml+xml", "text/html", "application/xml", "text/x-oeb1-document")
_FONTS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")  # ways to garble fonts: no DRM
_ENCODING = re.compile(rb"""(?:<\?xml[^>]*\sencoding|<meta[^>]*\bcharset)\s*=\s*["']?([\w.-]+)""")
_ENTITIES = re.compile(r"<!DOCTYPE[^>\[]*\[(?:(?!\]\s*>).)*<!ENTITY", re.I | re.S)


class Epub:
    """A context manager that reads a book."""

    def __init__(self, file: IO[bytes], where: str):
        """`file`: a ZIP archive, such as `text_bytes.foreign_kind` finds one. `where`: names it in messages. Raises
        RequestError: it is broken, or no EPUB."""
        self._where = where
        self._left = MOST_BYTES
        try:
            self._zip = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise RequestError(f"{where}: it begins as an EPUB or ZIP, but is broken: {error}; get it again") from None
        self._names = set(self._zip.namelist())
        if len(self._names) > MOST_FILES:
            raise RequestError(f"{where}: it holds {len(self._names)} files, more than {MOST_FILES}; split the book")

    def __enter__(self) -> "Epub":
        return self

    def __exit__(self, *_error: object) -> None:
        self._zip.close()

    def read(self) -> tuple[dict[str, str], Iterator[Line]]:
        """What the package file tells about the book ("title", "author", "language"), and the lines of its pages.

        Raises:
            RequestError: it is no EPUB, is locked or broken, or passes a limit; for pages when they are read.
        """
        opf = self._opf()
        package = self._xml(opf)
        metadata = package.find("{*}metadata")
        items: dict[str, tuple[str, str, str]] = {}  # path, media type, properties
        for item in package.findall("{*}manifest/{*}item"):
            kind = (item.get("media-type") or "").lower()
            items[item.get("id", "")] = item.get("href", ""), kind, item.get("properties") or ""
        spine, order = package.find("{*}spine"), []
        for reference in [] if spine is None else spine.findall("{*}itemref"):
            href, kind, properties = items.get(reference.get("idref", ""), ("", "", ""))
            if href and kind in _PAGES and "nav" not in properties.split():
                order.append((self._inside(opf, href), reference.get("linear") == "no"))
        if not order:
            raise RequestError(f"{self._where}: its package file {opf} lists no pages; export the book again")
        if len(order) > MOST_FILES:
            raise RequestError(f"{self._where}: it lists {len(order)} pages, more than {MOST_FILES}; split the book")
        self._refuse_locked({page for page, _ in order})
        toc = "" if spine is None else spine.get("toc", "")
        return _told(metadata), self._lines(order, self._marks(opf, items, toc))

    def _opf(self) -> str:
        """The package file's name."""
        if _CONTAINER in self._names:
            for root in self._xml(_CONTAINER).findall(".//{*}rootfile"):
                if (name := normpath(root.get("full-path", ""))) in self._names:
                    return name
        if found := sorted(name for name in self._names if name.lower().endswith(".opf")):
            return found[0]
        raise not_text(self._where, *self._other_kind())

    def _other_kind(self) -> tuple[str, str]:
        how = "save it as plain text (UTF-8) in a word processor"
        if "word/document.xml" in self._names:
            return "a Word document (DOCX)", how
        if "content.xml" in self._names:
            return "an OpenDocument file (ODT)", how
        if "[Content_Types].xml" in self._names:
            return "an Office document", how
        return "a ZIP archive without a package file (.opf)", "unpack it and name the text in it, or make an EPUB of it"

    def _inside(self, page: str, href: str) -> str:
        path, _ = path_of(page, href)
        if path.startswith(("/", "../")) or path == ".." or re.match(r"[a-z]+:|\\", href, re.I):
            raise RequestError(f"{self._where}: {page} names {href!r}, which is outside of the book; export it again")
        return path if path in self._names else normpath(path_of(page, href.replace("%", "%25"))[0])

    def _refuse_locked(self, pages: set[str]) -> None:
        if _ENCRYPTION not in self._names:
            return
        for locked in self._xml(_ENCRYPTION).findall(".//{*}EncryptedData"):
            method, target = locked.find("{*}EncryptionMethod"), locked.find(".//{*}CipherReference")
            algorithm = "" if method is None else method.get("Algorithm", "")
            path = "" if target is None else path_of("", target.get("URI", ""))[0]
            if algorithm not in _FONTS or path in pages:
                why = f"it is locked by DRM ({_ENCRYPTION}), so nobody but its own reader can open its pages"
                raise RequestError(f"{self._where}: {why}; get the book without DRM")

    def _marks(self, opf: str, items: dict[str, tuple[str, str, str]], toc: str) -> dict[str, dict[str, str]]:
        """Where the table of contents says that chapters begin: page -> id or "" -> title."""
        entries: list[tuple[str, str]] = []
        page = ""
        navigation = [href for href, _, properties in items.values() if "nav" in properties.split()]
        if navigation and (page := self._inside(opf, navigation[0])) in self._names:
            entries = contents_of(self._page(page))
        ncx = [items[toc][0]] if toc in items else []
        ncx += [href for href, kind, _ in items.values() if kind == "application/x-dtbncx+xml"]
        if not entries and ncx and (page := self._inside(opf, ncx[0])) in self._names:
            tree = self._xml(page)
            for point in [*tree.findall("{*}navMap/{*}navPoint"), *tree.findall("{*}navMap/{*}navPoint/{*}navPoint")]:
                content, label = point.find("{*}content"), point.find("{*}navLabel/{*}text")
                if content is not None and label is not None:
                    entries.append((content.get("src", ""), " ".join("".join(label.itertext()).split())))
        marks: dict[str, dict[str, str]] = {}
        for target, title in entries:
            path, fragment = path_of(page, target)
            if title:
                marks.setdefault(path, {}).setdefault(fragment, title)
        return marks

    def _lines(self, order: list[tuple[str, bool]], marks: dict[str, dict[str, str]]) -> Iterator[Line]:
        for page, is_aside in order:
            lines = lines_of(self._page(page), page, marks.get(page, {}))
            if lines is None:
                raise RequestError(f"{self._where}: {page} is not XHTML; export the book again")
            yield Line("", 1, file=page)
            # Pages beside the order hold footnotes, pictures and advertisements.
            yield from (line for line in lines if not is_aside or line.note is not None)

    def _page(self, name: str) -> str:
        data = self._data(name)
        found = _ENCODING.search(data[:1024])
        text = ""
        if found and not data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
            try:
                text = data.decode(found[1].decode())
            except (LookupError, UnicodeDecodeError):
                text = ""
        text = text or decoded(data, f"{self._where}, {name}")[0]
        if _ENTITIES.search(text[:10_000]):
            raise self._refused_entities(name)
        return text

    def _xml(self, name: str) -> ET.Element:
        """A file's tree. Declared entities are refused before any is read: they can grow without end, or name files."""
        data = self._data(name)

        def refuse(*_declaration: object) -> None:
            raise self._refused_entities(name)

        checker = expat.ParserCreate()
        checker.EntityDeclHandler = refuse
        try:
            checker.Parse(data, True)
            return ET.fromstring(data)
        except (expat.ExpatError, ET.ParseError, ValueError, LookupError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{self._where}: {name} is not XML: {error}; export the book again") from None

    def _refused_entities(self, name: str) -> RequestError:
        why = f"{name} declares entities (<!ENTITY), which books do not need and which can do harm"
        return RequestError(f"{self._where}: {why}; export the book again")

    def _data(self, name: str) -> bytes:
        if name not in self._names:
            raise RequestError(f"{self._where}: it lists {name}, but does not hold it; get the book again")
        try:
            if self._zip.getinfo(name).flag_bits & 1:
                raise RequestError(f"{self._where}: {name} is locked by a password; unlock the book first")
            with self._zip.open(name) as file:
                data = file.read(self._left + 1)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError) as error:
            raise RequestError(f"{self._where}: {name} cannot be unpacked: {error}; get the book again") from None
        if len(data) > self._left:
            raise RequestError(f"{self._where}: its text is longer than {MOST_BYTES // 10**6} MB; split the book")
        self._left -= len(data)
        return data


def _told(metadata: ET.Element | None) -> dict[str, str]:
    """What the metadata tell: "title", "author" and "language"."""
    told: dict[str, str] = {}
    if metadata is None:
        return told
    for name, element in (("title", "title"), ("author", "creator"), ("language", "language")):
        found = list(metadata.iter(f"{{http://purl.org/dc/elements/1.1/}}{element}"))
        if element == "creator":
            role = "{http://www.idpf.org/2007/opf}role"
            found = [one for one in found if one.get(role) == "aut"] or found
        texts = [" ".join("".join(one.itertext()).split())[:1000] for one in found]
        texts = [text for text in texts if text]
        if texts:
            told[name] = ", ".join(texts) if name == "author" else texts[0]
    return told
