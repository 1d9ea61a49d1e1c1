"""Tables of words, which are data files: shared.toml for all languages, and `words.toml` in each language's folder."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def table_of(name: str) -> dict[str, Any]:
    """A file of this package, such as "shared" or "de/words", read once."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


def shared_words(name: str) -> frozenset[str]:
    """A list of words of shared.toml."""
    return frozenset(table_of("shared")[name].split())
