"""EPUB: a ZIP archive of XHTML pages. A package file (OPF) tells their order.

ebooklib would read it, but has a licence (AGPL) that ours does not allow. Others hand out pages as they are, and the
work is in the pages.
"""

import re
import xml.etree.ElementTree as ET
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from posixpath import normpath
from typing import IO, NamedTuple, TypeVar
from xml.parsers import expat

from qwen_audiobook.lines import Line
from qwen_audiobook.text_bytes import decoded, not_text
from qwen_audiobook.xhtml import EntitiesDeclared, contents_of, page_of, path_of
from qwen_megakernel.errors import RequestError

MOST_BYTES = 50_000_000  # of all pages together, unpacked: a hundred long novels
MOST_FILES = 10_000  # and pages in the order

_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_PAGES = ("application/xhtml+xml", "text/html", "application/xml", "text/x-oeb1-document", "image/svg+xml")
_FONTS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")  # ways to garble fonts: no DRM
_ENCODING = re.compile(rb"""(?:<\?xml[^>]*\sencoding|<meta[^>]*\bcharset)\s*=\s*["']?([\w.-]+)""")
_T = TypeVar("_T")
_DC = "{http://purl.org/dc/elements/1.1/}"


@dataclass
class Told:
    """An EPUB's text, and what it tells about itself."""

    lines: list[Line]  # with the beginnings of chapters by contents and by headings
    tags: dict[str, str] = field(default_factory=dict)  # "title", "author" and "language"
    cover: bytes | None = None  # the picture, as a file
    warnings: list[str] = field(default_factory=list)  # of what is not read


class _Item(NamedTuple):
    """An entry of the manifest."""

    href: str
    kind: str  # its media type
    properties: list[str]
    fallback: str  # the id of what stands for it


class _Page(NamedTuple):
    path: str
    is_aside: bool  # it is not in the reading order
    is_navigation: bool


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

    def read(self) -> Told:
        """Read the book. Raises RequestError: it is no EPUB, is locked or broken, has no text, or passes a limit."""
        opf = self._opf()
        package = self._xml(opf)
        items = {
            item.get("id", ""): _Item(
                item.get("href", ""),
                (item.get("media-type") or "").lower(),
                (item.get("properties") or "").split(),
                item.get("fallback", ""),
            )
            for item in package.findall("{*}manifest/{*}item")
        }
        told = Told([], _tags(package.find("{*}metadata")))
        spine = package.find("{*}spine")
        references = [] if spine is None else spine.findall("{*}itemref")
        if len(references) > MOST_FILES:
            count = f"it lists {len(references)} pages, more than {MOST_FILES}"
            raise RequestError(f"{self._where}: {count}; split the book")
        pages, pictures = [], 0
        for reference in references:
            item = _readable(items, reference.get("idref", ""))
            if item and item.kind in _PAGES:
                path = self._inside(opf, item.href)
                pages.append(_Page(path, reference.get("linear") == "no", "nav" in item.properties))
            elif item and item.kind.startswith("image/"):
                pictures += 1
            elif item:
                told.warnings.append(f"{item.href} is no page ({item.kind or 'no media type'}), so it is not read")
            else:
                told.warnings.append(f"the page {reference.get('idref', '')!r} is in the order, but not in the book")
        if not pages and not pictures:
            raise RequestError(f"{self._where}: its package file {opf} lists no pages; export the book again")
        self._refuse_locked({page.path for page in pages})
        contents = self._contents(opf, items, "" if spine is None else spine.get("toc", ""))
        guide = [(opf, one.get("href", ""), one.get("type", "")) for one in package.findall("{*}guide/{*}reference")]
        told.lines = self._lines(pages, _by_page(contents.entries), _by_page(contents.landmarks + guide), told.warnings)
        if not any(line.text for line in told.lines):
            count = f"{len(pages) + pictures} pages have no text, only pictures"
            raise RequestError(f"{self._where}: its {count}; recognise their text first, such as with tesseract")
        told.cover = self._cover(opf, package, items)
        return told

    @property
    def is_word(self) -> bool:
        """It is no EPUB, but a Word document. Raises RequestError: it is too long."""
        if "word/document.xml" not in self._names:
            return False
        if sum(one.file_size for one in self._zip.infolist() if one.filename.endswith(".xml")) > MOST_BYTES:
            raise RequestError(f"{self._where}: its text is longer than {MOST_BYTES // 10**6} MB; split the book")
        return True

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

    def _contents(self, opf: str, items: dict[str, _Item], toc: str) -> "_Contents":
        """What the navigation document says, or an older book's NCX."""
        page, entries, landmarks = "", [], []
        navigation = [item.href for item in items.values() if "nav" in item.properties]
        if navigation and (page := self._inside(opf, navigation[0])) in self._names:
            found = self._unrefused(page, lambda: contents_of(self._page(page)))
            entries, landmarks = found.entries, [(page, target, kind) for target, kind in found.landmarks]
        ncx = [items[toc].href] if toc in items else []
        ncx += [item.href for item in items.values() if item.kind == "application/x-dtbncx+xml"]
        if not entries and ncx and (page := self._inside(opf, ncx[0])) in self._names:
            entries = list(_points(self._xml(page).find("{*}navMap")))
        pages: set[str] = set()
        chapters = []
        for target, title, level in entries:
            path, _ = path_of(page, target)
            if level < 2 or path not in pages:  # deeper entries are sections, unless they have pages of their own
                chapters.append((page, target, title))
            pages.add(path)
        return _Contents(chapters, landmarks)

    def _lines(
        self,
        pages: list[_Page],
        marks: dict[str, dict[str, str]],
        matter: dict[str, dict[str, str]],
        warnings: list[str],
    ) -> list[Line]:
        lines: list[Line] = []
        for path, is_aside, is_navigation in pages:
            kinds = matter.get(path, {}) | ({"": "toc"} if is_navigation else {})
            text = self._page(path)
            page = self._unrefused(path, lambda: page_of(text, path, marks.get(path, {}), kinds))  # noqa: B023
            if page is None:
                raise RequestError(f"{self._where}: {path} is not XHTML; export the book again")
            for target in page.embedded:
                warnings.append(f"{path} shows {target} in a frame, which is not read")
            lines.append(Line("", 1, file=path))
            # Pages beside the order hold footnotes, pictures and advertisements.
            heard = [line for line in page.lines if not is_aside or line.note is not None]
            if is_aside and any(line.text and line.note is None and not line.matter for line in page.lines):
                warnings.append(f"{path} stands beside the order, so only its footnotes are read")
            lines += heard
        return lines

    def _cover(self, opf: str, package: ET.Element, items: dict[str, _Item]) -> bytes | None:
        """The picture of the cover, if there is one and it is intact."""
        named = {one.get("content", "") for one in package.findall("{*}metadata/{*}meta") if one.get("name") == "cover"}
        for name, item in items.items():
            if "cover-image" in item.properties or name in named and item.kind.startswith("image/"):
                path = self._inside(opf, item.href)
                return self._data(path) if path in self._names else None
        return None

    def _page(self, name: str) -> str:
        data = self._data(name)
        found = _ENCODING.search(data[:1024])
        text = ""
        if found and not data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
            try:
                text = data.decode(found[1].decode())
            except (LookupError, UnicodeDecodeError):
                text = ""
        return text or decoded(data, f"{self._where}, {name}")[0]

    def _unrefused(self, name: str, read: Callable[[], _T]) -> _T:
        try:
            return read()
        except EntitiesDeclared:
            raise self._refused_entities(name) from None

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


class _Contents(NamedTuple):
    """Each entry is the page that it stands in, its target, and a title or a landmark's kind."""

    entries: list[tuple[str, str, str]]
    landmarks: list[tuple[str, str, str]]


def _points(parent: ET.Element | None, level: int = 0) -> Iterator[tuple[str, str, int]]:
    """Target, title and level of each entry of an NCX. Deeper ones than any book has are left out."""
    for point in parent.findall("{*}navPoint") if parent is not None and level < 20 else ():
        content, label = point.find("{*}content"), point.find("{*}navLabel/{*}text")
        if content is not None and label is not None:
            yield content.get("src", ""), " ".join("".join(label.itertext()).split()), level
        yield from _points(point, level + 1)


def _by_page(entries: list[tuple[str, str, str]]) -> dict[str, dict[str, str]]:
    """Page -> id, or "" for the page's beginning -> title or kind."""
    marks: dict[str, dict[str, str]] = {}
    for page, target, name in entries:
        path, fragment = path_of(page, target)
        if name:
            marks.setdefault(path, {}).setdefault(fragment, name)
    return marks


def _readable(items: dict[str, _Item], name: str) -> _Item | None:
    """The item, or the first of those that stand for it which is a page; None: there is no such item."""
    first = items.get(name)
    seen: set[str] = set()
    while (item := items.get(name)) and item.href and item.kind not in _PAGES and name not in seen:
        seen.add(name)
        name = item.fallback
    return item if item and item.href and item.kind in _PAGES else first


def _tags(metadata: ET.Element | None) -> dict[str, str]:
    """What the metadata tell: "title", "author" and "language". Translators and others with a role are no authors."""
    told: dict[str, str] = {}
    if metadata is None:
        return told
    refined = {one.get("refines"): one for one in metadata.findall("{*}meta") if one.get("property") == "role"}
    for name, element in (("title", "title"), ("author", "creator"), ("language", "language")):
        found = list(metadata.iter(_DC + element))
        if name == "author":
            roles = {}
            for one in found:
                more = refined.get(f"#{one.get('id')}")
                role = one.get("{http://www.idpf.org/2007/opf}role") or (more is not None and more.text) or ""
                roles[one] = role.strip().lower()
            found = [one for one in found if roles[one] == "aut"] or [one for one in found if not roles[one]]
        texts = [" ".join("".join(one.itertext()).split())[:1000] for one in found]
        texts = [text for text in texts if text]
        if texts:
            told[name] = ", ".join(texts) if name == "author" else texts[0]
    return told
