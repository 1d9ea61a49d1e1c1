"""Books as others save them, made for tests."""

import zipfile
from pathlib import Path

CONTAINER = """<?xml version="1.0"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>
<rootfile full-path="OEBPS/content.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""
METADATA = """<dc:title>The House</dc:title><dc:creator>Ann Lee</dc:creator><dc:creator>Bo Ray</dc:creator>
<dc:language>en-GB</dc:language>"""


def page(body: str) -> str:
    """An XHTML page."""
    head = (
        '<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops"><head><title>No</title>'
    )
    style = "<style>p { color: red }</style></head>"
    return f'<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE html>\n{head}{style}<body>{body}</body></html>'


def write_epub(
    pages: dict[str, str | bytes | None],
    path: str = "book.epub",
    *,
    metadata: str = METADATA,
    items: str = "",
    spine: str = "",
    order: str = "",
    files: dict[str, str | bytes | None] | None = None,
) -> Path:
    """Write an EPUB.

    Args:
        pages: in the order of the spine; None: the file is missing.
        items: more of the manifest. `spine`: attributes of the spine; `order`: more of it.
        files: other files; None leaves one out.
    """
    listed = "".join(
        f'<item id="p{n}" href="{name}" media-type="application/xhtml+xml"/>' for n, name in enumerate(pages)
    )
    order = "".join(f'<itemref idref="p{n}"/>' for n in range(len(pages))) + order
    opf = f"""<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/">{metadata}</metadata>
<manifest>{listed}{items}</manifest><spine {spine}>{order}</spine></package>"""
    whole: dict[str, str | bytes | None] = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER}
    whole |= {"OEBPS/content.opf": opf} | {f"OEBPS/{name}": text for name, text in pages.items()} | (files or {})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in whole.items():
            if data is not None:
                file.writestr(name, data)
    return Path(path)
