"""Front matter: lines about a book at the beginning of its Markdown file. YAML stands between lines of `---`, TOML
between lines of `+++`."""

import re
import tomllib
from typing import Any

import yaml

from qwen_megakernel.errors import RequestError

_LONGEST = 65_536  # characters
_YAML = re.compile(r"---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.M | re.S)
_TOML = re.compile(r"\+\+\+[ \t]*\n(.*?)^\+\+\+[ \t]*(?:\n|\Z)", re.M | re.S)
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_KEYS = {"title": "title", "author": "author", "authors": "author", "creator": "author"}
_KEYS |= {"lang": "language", "language": "language"}
_KNOWN = set(_KEYS) | set("date draft subtitle description publisher rights tags categories keywords layout".split())


def split_front_matter(text: str, where: str) -> tuple[dict[str, str], str, int]:
    """A text's front matter, its rest, and the number of the rest's first line.

    Lines between two rules are front matter only if they are nothing else than keys and values. Keys are in lower case,
    or at least one is a usual one such as "Title"; "Ada: Who is there?" is prose.

    Args:
        where: names the file in messages.

    Returns:
        "title", "author" and "language" as far as they are given. Several authors are joined by commas.

    Raises:
        RequestError: the first key is a title, an author or a language, but the rest cannot be read as YAML.
    """
    head = text[:_LONGEST].replace("\r\n", "\n").replace("\r", "\n")
    told: dict[str, str] | None = None
    if found := _YAML.match(head):
        told = _yaml(found[1], where)
    elif found := _TOML.match(head):
        told = _toml(found[1])
    if not found or told is None:
        return {}, text, 1
    count = found[0].count("\n")
    ends = re.finditer(r"\r\n?|\n", text)
    end = next((end.end() for number, end in enumerate(ends, 1) if number == count), len(text))
    end = end if found[0].endswith("\n") else len(text)
    return told, text[end:], count + 1


def _yaml(block: str, where: str) -> dict[str, str] | None:
    """What a block of YAML tells; None if it is something else. Every value stays the string that it was written as."""
    try:
        given = yaml.load(block, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError) as error:
        if block.partition(":")[0].lower() not in _KEYS:
            return None
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 2}" if mark else ""  # the rule is line 1
        how = "put a value that has a colon or begins with a sign into quotes"
        raise RequestError(f"{where}{line}: the front matter is no YAML; {how}") from None
    if not isinstance(given, dict) or not all(isinstance(key, str) and _KEY.fullmatch(key) for key in given):
        return None
    if not (any(key.lower() in _KNOWN for key in given) or all(key.islower() for key in given)):
        return None
    return _told(given)


def _toml(block: str) -> dict[str, str] | None:
    """What a block of TOML tells; None if it is something else."""
    try:
        given = tomllib.loads(block)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    return _told(given) if given else None


def _told(given: dict[str, Any]) -> dict[str, str]:
    """ "title", "author" and "language", each as the first of its keys that is not blank has it. Entries of a list may
    have names: a person's, or the text of a title."""
    told: dict[str, str] = {}
    for key, value in given.items():
        if name := _KEYS.get(key.lower()):
            entries = value if isinstance(value, list) else [value]
            values = [one.get("name") or one.get("text") if isinstance(one, dict) else one for one in entries]
            words = (" ".join(one.split()) for one in values if isinstance(one, str))
            if shown := ", ".join(word for word in words if word):
                told.setdefault(name, shown[:1000])
    return told
