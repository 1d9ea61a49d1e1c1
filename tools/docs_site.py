"""What MkDocs needs besides docs/: README as the first page, and the files of the repository that pages link to."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
_PICTURE = re.compile(r'\b(src|srcset)="([^"]+)"')  # of <picture>: MkDocs leaves HTML as it is
_PLACE = "repository"  # their folder in the site


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page and what is linked outside docs/."""
    files.append(File.generated(config, "index.md", content=_first_page()))
    pages = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    pages["index.md"] = _first_page()
    for linked in sorted({name for uri, text in pages.items() for name in _outside(uri).findall(text)}):
        path = ROOT / linked
        files.append(File.generated(config, _address(linked), content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def address(picture: re.Match) -> str:
        file = files.get_file_from_path(picture[2])
        if file is None:
            raise PluginError(f"{page.file.src_uri} shows a picture that is not in docs/: {picture[2]}")
        return f'{picture[1]}="{get_relative_url(file.url, page.url)}"'

    uri = page.file.src_uri
    up = "../" * uri.count("/")
    return _PICTURE.sub(address, _outside(uri).sub(lambda link: f"]({up}{_address(link[1])})", markdown))


def _outside(uri: str) -> re.Pattern:
    """Finds the links of a page, by its path in docs/, that leave docs/."""
    up = re.escape("../" * (uri.count("/") + 1))
    return re.compile(rf"\]\({up}((?!\.\./)[^)#\s]+)\)")


def _first_page() -> str:
    """README as if it were in docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!docs/|https?:|#)", "](../", text)
    return re.sub(r'(\]\(|=")docs/', r"\1", text)


def _address(linked: str) -> str:
    """Where a file of the repository stands in the site. A page of Markdown would be read as one of ours, and its links
    lead elsewhere."""
    return f"{_PLACE}/{linked}" + (".txt" if linked.endswith(".md") else "")
