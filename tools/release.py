"""Checks that tag, packages and changelog name one version, and prints that version's changelog. It needs nothing
installed: `python tools/release.py v1.2.3 > notes.md`."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r'^__version__ = "(.+)"$', re.M)
HEADING = re.compile(r"^## \[(.+?)\](?: - \d{4}-\d\d-\d\d)?$", re.M)


class NotReadyError(Exception):
    """What keeps a version from being released."""


def notes(tag: str, packages: Mapping[str, str], changelog: str) -> str:
    """The changelog of the version that `tag` names.

    Args:
        packages: the text of each package's `__init__.py`, by its path. They are released together, with one number.
        changelog: text of CHANGELOG.md, the newest version first.

    Raises:
        NotReadyError: they name different versions, or the version has no changes or no date.
    """
    wanted = tag.removeprefix("v")
    if not re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag):
        raise NotReadyError(f"expected a tag such as v1.2.3 or v1.2.3rc1, got {tag!r}")
    for path, package in packages.items():
        stated = VERSION.search(package)
        if not stated or stated[1] != wanted:
            is_there = f"__version__ of {path} is {stated and stated[1]}"
            raise NotReadyError(f"the tag is {tag}, but {is_there}: change it, then tag again")
    _, newest, *rest = HEADING.split(changelog)
    if newest != wanted:
        raise NotReadyError(
            f"the tag is {tag}, but CHANGELOG.md begins with [{newest}]: name it [{wanted}] - and today"
        )
    if not re.search(rf"^## \[{re.escape(wanted)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.M):
        raise NotReadyError(f"[{wanted}] has no date in CHANGELOG.md: expected [{wanted}] - YYYY-MM-DD")
    if not (changes := rest[0].strip()):
        raise NotReadyError(f"[{wanted}] has no changes in CHANGELOG.md")
    return changes


def main(tag: str) -> int:
    paths = [ROOT / "qwen_megakernel" / "__init__.py", *sorted(ROOT.glob("packages/*/*/__init__.py"))]
    packages = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}
    try:
        print(notes(tag, packages, (ROOT / "CHANGELOG.md").read_text("utf-8")))
    except NotReadyError as error:
        print(f"cannot release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
