"""Front matter: lines about a book at the beginning of its Markdown file. YAML stands between lines of `---`, TOML
between lines of `+++`.

YAML is read as plain keys and values. PyYAML would be one more dependency, and reads more than is needed.
"""

import re
import tomllib
from typing import Any

_LONGEST = 65_536  # characters
_YAML = re.compile(r"---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.M | re.S)
_TOML = re.compile(r"\+\+\+[ \t]*\n(.*?)^\+\+\+[ \t]*(?:\n|\Z)", re.M | re.S)
_ENTRY = re.compile(r"([A-Za-z_][\w.-]*)[ \t]*:(?:[ \t]+(.*)|)")
_MORE = re.compile(r"[ \t]|- |-$|#|$")  # begins a line that belongs to the entry before, a comment or a blank line
_NAMED = re.compile(r"(?:-[ \t]+)?(?:name|text)[ \t]*:[ \t]+(.*)")  # of an author, of a title
_ITEM = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^,]+)\s*,?""")
_KEYS = {"title": "title", "author": "author", "authors": "author", "creator": "author"}
_KEYS |= {"lang": "language", "language": "language"}
_KNOWN = set(_KEYS) | set("date draft subtitle description publisher rights tags categories keywords layout".split())


def split_front_matter(text: str) -> tuple[dict[str, str], str, int]:
    """A text's front matter, its rest, and the number of the rest's first line.

    Lines between two rules are front matter only if they are nothing else than keys and values. Keys are in lower case,
    or at least one is a usual one such as "Title"; "Ada: Who is there?" is prose.

    Returns:
        "title", "author" and "language" as far as they are given. Several authors are joined by commas.
    """
    head = text[:_LONGEST].replace("\r\n", "\n").replace("\r", "\n")
    told: dict[str, str] | None = None
    if found := _YAML.match(head):
        told = _yaml(found[1])
    elif found := _TOML.match(head):
        told = _toml(found[1])
    if not found or told is None:
        return {}, text, 1
    count = found[0].count("\n")
    ends = re.finditer(r"\r\n?|\n", text)
    end = next((end.end() for number, end in enumerate(ends, 1) if number == count), len(text))
    end = end if found[0].endswith("\n") else len(text)
    return told, text[end:], count + 1


def _yaml(block: str) -> dict[str, str] | None:
    """What a block of YAML tells; None if it is something else."""
    lines = block.split("\n")[:-1]
    entries: list[tuple[str, list[str]]] = []
    for line in lines:
        if entry := _ENTRY.fullmatch(line.rstrip()):
            entries.append((entry[1], [entry[2] or ""]))
        elif not _MORE.match(line) or not (entries or line.startswith("#")):
            return None
        elif entries:
            entries[-1][1].append(line.strip())
    keys = [key for key, _ in entries]
    if not entries or not (any(key.lower() in _KNOWN for key in keys) or all(key.islower() for key in keys)):
        return None
    told: dict[str, str] = {}
    for key, values in entries:
        if name := _KEYS.get(key.lower()):
            _tell(told, name, _value(values))
    return told


def _value(lines: list[str]) -> list[str]:
    """The values of an entry: one, or those of a list. `lines`: what follows the key."""
    first, more = lines[0], [line for line in lines[1:] if line and not line.startswith("#")]
    if re.fullmatch(r"[|>][-+\d]*", first):  # a block of text
        return [" ".join(more)]
    if first.startswith(("[", "{")):
        inside = " ".join([first, *more]).strip("[] ")
        items = [item.strip(" {}") for item in _ITEM.findall(inside)]
        return [_scalar(found[1]) for item in items if (found := _NAMED.fullmatch(item))] or list(map(_scalar, items))
    if first and not first.startswith("#"):
        return [_scalar(" ".join([first, *more]))]
    values = []
    for line in more:
        if named := _NAMED.fullmatch(line):
            values.append(_scalar(named[1]))
        elif not _ENTRY.fullmatch(item := line.removeprefix("-").strip()):
            values.append(_scalar(item))
    return values


def _scalar(text: str) -> str:
    text = text.strip()
    if found := re.match(r"'((?:[^']|'')*)'", text):
        return found[1].replace("''", "'")
    if found := re.match(r'"((?:[^"\\]|\\.)*)"', text):
        return re.sub(r"\\(.)", lambda escaped: {"n": " ", "t": " "}.get(escaped[1], escaped[1]), found[1])
    return re.split(r"(?:^|\s)#", text)[0].strip()


def _toml(block: str) -> dict[str, str] | None:
    """What a block of TOML tells; None if it is something else."""
    try:
        given: dict[str, Any] = tomllib.loads(block)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    told: dict[str, str] = {}
    for key, value in given.items():
        if name := _KEYS.get(key.lower()):
            values = value if isinstance(value, list) else [value]
            names = [item.get("name") if isinstance(item, dict) else item for item in values]
            _tell(told, name, [item for item in names if isinstance(item, str)])
    return told if given else None


def _tell(told: dict[str, str], name: str, values: list[str]) -> None:
    """Keep the first value that is not blank."""
    if shown := ", ".join(value for value in (" ".join(value.split()) for value in values) if value):
        told.setdefault(name, shown[:1000])
