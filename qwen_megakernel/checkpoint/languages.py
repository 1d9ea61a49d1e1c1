"""Languages by name and by code: the one table for Python, the command line, Pipecat, HTTP and the WebSocket."""

import functools
import re
from collections.abc import Sequence

from qwen_megakernel.errors import LanguageError

NAMES = {"zh": "chinese", "en": "english", "fr": "french", "de": "german", "it": "italian", "ja": "japanese"}
NAMES |= {"ko": "korean", "pt": "portuguese", "ru": "russian", "es": "spanish"}
"""ISO 639-1 codes of the languages of the published checkpoints -> how `codec_language_id` names them."""
_CODES = {name: code for code, name in NAMES.items()}


def primary_subtag(tag: str) -> str:
    """The language part of a BCP 47 tag, in lower case: "en" for "EN", "en-US" and "en_US"."""
    return re.split("[-_]", tag.lower())[0]


def find_language(asked: str, known: Sequence[str]) -> str:
    """The language that a caller means, as `known` spells it. `asked` is one of `known`, or its code, alone or with a
    region such as "en-US", in upper or lower case. Raises LanguageError: it is none of them."""
    if isinstance(asked, str):
        asked = str(asked)  # Pipecat's `Language` is a str with another repr
        if (name := _find(asked, tuple(known))) is not None:
            return name
    raise LanguageError(f"unknown language {asked!r}; known: {listed(known)}")


@functools.lru_cache(256)
def _find(asked: str, known: tuple[str, ...]) -> str | None:
    """Kept, because every request asks."""
    names = (asked.lower(), NAMES.get(primary_subtag(asked)))
    return next((name for name in names if name in known), None)


def codes_of(known: Sequence[str]) -> list[str]:
    """The ISO 639-1 codes of the languages that have one, in the same order. "auto" and dialects have none."""
    return [_CODES[name] for name in known if name in _CODES]


def listed(known: Sequence[str]) -> str:
    """The names with their codes, for people: "auto, english (en)"."""
    return ", ".join(f"{name} ({_CODES[name]})" if name in _CODES else name for name in known)
