"""Names as programs write them: files are read by their names, hashes and keys are left out."""

import re

from spoken_text.tables import table_of

_ENDING = "|".join(table_of("shared")["file_endings"].split())
_STEM = r"[\w@+~-]+(?:\.[\w@+~-]+)*"
_FOLDERS = r"(?:[A-Za-z]:[\\/]|~/|\.{1,2}/|/)?(?:[\w@.+~-]+[\\/])*"
_FILE = re.compile(rf"{_FOLDERS}(?:{_STEM}\.(?:{_ENDING})|\.[a-z][\w.-]+)(?::\d+)*", re.I)
_SHORT = re.compile(r"(?:.\.)+[a-z]|deg\.[cf]", re.I)  # "a.C." is an abbreviation
_PATH = re.compile(r"(?:[A-Za-z]:[\\/]|~/|\.{1,2}/|/)[\w@+~-][\w@.+~-]*(?:[\\/][\w@.+~-]+)*[\\/]?")
_CALL = re.compile(r"([A-Za-z_][\w.:]*)\(\)")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_BETWEEN = re.compile(r"[\\/]+")

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.I)
_HASH = re.compile(r"(?:sha\d{1,3}[:-]|0x)?(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,}")
_KEY = re.compile(r"(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])(?=\D*\d)[A-Za-z0-9+/_=-]{20,}")
_DATA = re.compile(r"data:[\w/+.-]+;base64,\S*")
_TURNS = re.compile(r"(?<=[0-9])(?=[A-Za-z])|(?<=[A-Za-z])(?=[0-9])")
HARDWARE = (
    r"[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}"
    r"|(?=[0-9A-Fa-f:]*(?:[A-Fa-f][0-9A-Fa-f]|::))[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}"
)
"""MAC and IPv6 addresses."""
_QUICK = re.compile(r"[\d./\\(]")


def is_secret(word: str) -> bool:
    """Is the word a hash, an identifier, a key or data, which nobody reads aloud? Codes in capitals, as of a booking,
    are none."""
    if len(word) < 7 or not _QUICK.search(word):
        return False
    if _UUID.fullmatch(word) or _DATA.match(word):
        return True
    if not (_HASH.fullmatch(word) or _KEY.fullmatch(word)):
        return False
    return len(_TURNS.findall(word)) >= (2 if len(word) < 20 else 3)


def spoken_name(word: str, dot: str) -> str | None:
    """The words in the name of a file or a function: "docs/a_b.md" is "docs a b dot md". None for any other word.

    Args:
        dot: how the language says a dot, with blanks around it if it uses them.
    """
    if not _QUICK.search(word):
        return None
    if call := _CALL.fullmatch(word):
        return _CAMEL.sub(" ", call[1].replace("::", dot).replace(".", dot))
    if (not _FILE.fullmatch(word) or _SHORT.fullmatch(word)) and not _PATH.fullmatch(word):
        return None
    parts = [part for part in _BETWEEN.split(word) if part.strip(".~:")]
    return " ".join(part.replace(".", dot).replace(":", " ").strip() for part in parts)
