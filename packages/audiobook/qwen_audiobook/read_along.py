"""A read-along book: EPUB 3 with the text, the sound, and media overlays (SMIL) that say when each sentence is heard.
Readers such as Thorium mark the sentence while they play it."""

import html
import shutil
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from posixpath import normpath

from qwen_audiobook.book import Book
from qwen_audiobook.files import Place
from qwen_megakernel.commands.output import check_writable, new_file
from qwen_megakernel.commands.pieces import Break
from qwen_megakernel.errors import RequestError

SOUNDS = {".mp3": "audio/mpeg", ".m4a": "audio/mp4", ".m4b": "audio/mp4"}
"""Endings of sound that every reader plays, and their media types."""
_PICTURES = {"cover.png": "image/png", "cover.jpg": "image/jpeg"}

_CONTAINER = """<?xml version="1.0" encoding="utf-8"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>
<rootfile full-path="OEBPS/package.opf" media-type="application/oebps-package+xml"/></rootfiles></container>
"""
_PACKAGE = """<?xml version="1.0" encoding="utf-8"?>
<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/">
<dc:identifier id="id">{id}</dc:identifier><dc:title>{title}</dc:title>{author}<dc:language>{language}</dc:language>
<meta property="dcterms:modified">1980-01-01T00:00:00Z</meta>
<meta property="media:active-class">spoken</meta>
{durations}
</metadata>
<manifest>
<item id="nav" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/>
<item id="style" href="style.css" media-type="text/css"/>
{items}
</manifest>
<spine>{spine}</spine>
</package>
"""
_PAGE = """<?xml version="1.0" encoding="utf-8"?>
<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops" xml:lang="{language}">
<head><title>{title}</title><link rel="stylesheet" href="style.css"/></head>
<body>
{body}
</body></html>
"""
_SMIL = """<?xml version="1.0" encoding="utf-8"?>
<smil xmlns="http://www.w3.org/ns/SMIL" version="3.0"><body>
{pars}
</body></smil>
"""


def check_read_along(path: str, output: str | None) -> None:
    """`output`: of the sound. Raises RequestError: no such book can be made, or be written there."""
    if Path(path).suffix.lower() != ".epub":
        raise RequestError(f"--read-along: expected a file that ends in .epub, got {path!r}")
    if output is None or Path(output).suffix.lower() not in SOUNDS:
        raise RequestError(f"--read-along holds the sound of --output too: end that in {', '.join(SOUNDS)}")
    check_writable("--read-along", path)


def write_read_along(
    path: str, book: Book, places: Sequence[Place], tags: Mapping[str, str], cover: bytes | None
) -> None:
    """Write the book. The same sound gives the same bytes. `places`: of the whole sound, with the times of all
    sentences. `tags`: "title", "author" and "language", as far as they are known. Raises RequestError: it cannot be
    written."""
    sounds = {f"sound-{n}{Path(place.path).suffix.lower()}": place for n, place in enumerate(places, 1)}
    files: dict[str, str | bytes] = {"style.css": ".spoken { background: #fe9; }\n"}
    if cover:
        files["cover.png" if cover.startswith(b"\x89") else "cover.jpg"] = cover
    chapters = _chapters(book, sounds, _escaped(tags.get("language", "und")))
    for number, chapter in chapters.items():
        files |= {f"chapter-{number}.xhtml": chapter.page, f"chapter-{number}.smil": chapter.smil}
    files["nav.xhtml"] = _navigation(chapters, tags)
    files["package.opf"] = _package(chapters, [*sounds, *files], tags)
    try:
        with new_file(Path(path).resolve()) as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo("mimetype"), "application/epub+zip")  # first, and not compressed
            for name, data in {"../META-INF/container.xml": _CONTAINER, **files}.items():
                entry = zipfile.ZipInfo(normpath(f"OEBPS/{name}"))  # with ZIP's first date, not today's
                archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
            for name, place in sounds.items():
                with open(place.path, "rb") as sound, archive.open(zipfile.ZipInfo(f"OEBPS/{name}"), "w") as copy:
                    shutil.copyfileobj(sound, copy)
    except OSError as error:
        raise RequestError(f"--read-along {path}: {error.strerror or error}; name another place") from None


@dataclass(frozen=True)
class _Chapter:
    title: str
    page: str
    smil: str
    seconds: float  # of speech


def _chapters(book: Book, sounds: Mapping[str, Place], language: str) -> dict[int, _Chapter]:
    """The chapters by their numbers."""
    first_pieces = [next(pieces) for _, pieces in groupby(book.pieces, lambda piece: piece.sentence)]
    heard = [(name, cue) for name, place in sounds.items() for cue in place.cues]
    chapters = {}
    for chapter, group in groupby(zip(first_pieces, heard, strict=True), lambda one: one[0].chapter):
        number, body, pars, seconds = chapter + 1, "", [], 0.0
        title = book.titles[chapter] or f"{number}"
        for at, (piece, (sound, cue)) in enumerate(group):
            new = "</p>\n<p>" if at and piece.behind >= Break.PARAGRAPH else " " if at else "<p>"
            body += f'{new}<span id="s{at}">{_escaped(cue.text)}</span>'
            clip = f'src="{sound}" clipBegin="{cue.first:.3f}s" clipEnd="{max(cue.last, cue.first + 0.001):.3f}s"'
            pars.append(f'<par><text src="chapter-{number}.xhtml#s{at}"/><audio {clip}/></par>')
            seconds += cue.last - cue.first
        page = _PAGE.format(language=language, title=_escaped(title), body=f"{body}</p>")
        chapters[number] = _Chapter(title, page, _SMIL.format(pars="\n".join(pars)), seconds)
    return chapters


def _navigation(chapters: Mapping[int, _Chapter], tags: Mapping[str, str]) -> str:
    entries = "".join(
        f'<li><a href="chapter-{number}.xhtml">{_escaped(chapter.title)}</a></li>'
        for number, chapter in chapters.items()
    )
    body = f'<nav epub:type="toc"><ol>{entries}</ol></nav>'
    title = _escaped(tags.get("title", "Contents"))
    return _PAGE.format(language=_escaped(tags.get("language", "und")), title=title, body=body)


def _package(chapters: Mapping[int, _Chapter], files: Sequence[str], tags: Mapping[str, str]) -> str:
    durations = [
        f'<meta property="media:duration" refines="#smil-{number}">{chapter.seconds:.3f}s</meta>'
        for number, chapter in chapters.items()
    ]
    total = sum(chapter.seconds for chapter in chapters.values())
    durations.append(f'<meta property="media:duration">{total:.3f}s</meta>')
    items = [
        f'<item id="page-{n}" href="chapter-{n}.xhtml" media-type="application/xhtml+xml" media-overlay="smil-{n}"/>'
        f'<item id="smil-{n}" href="chapter-{n}.smil" media-type="application/smil+xml"/>'
        for n in chapters
    ]
    for name in files:
        kind = SOUNDS.get(Path(name).suffix) or _PICTURES.get(name)
        properties = ' properties="cover-image"' if name in _PICTURES else ""
        if kind:
            items.append(f'<item id="{Path(name).stem}" href="{name}"{properties} media-type="{kind}"/>')
    author = f"<dc:creator>{_escaped(tags['author'])}</dc:creator>" if tags.get("author") else ""
    whole = "".join(chapter.page + chapter.smil for chapter in chapters.values())
    return _PACKAGE.format(
        id=f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, whole)}",
        title=_escaped(tags.get("title", "Untitled")),
        author=author,
        language=_escaped(tags.get("language", "und")),
        durations="\n".join(durations),
        items="\n".join(items),
        spine="".join(f'<itemref idref="page-{n}"/>' for n in chapters),
    )


def _escaped(text: str) -> str:
    """Text for XML, without the characters that it may not hold."""
    return html.escape("".join(c for c in text if c.isprintable() or c in " \t"))
