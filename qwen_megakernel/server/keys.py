"""Keys: who may use a server, and how much of it."""

import hashlib
import logging
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_megakernel.errors import BackendError

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("streams", "characters_per_minute")
_MOST_KEYS = 1000  # each is a label of metrics


@dataclass(frozen=True)
class Key:
    """Attributes:
    name: for log and metrics; empty: of the one token.
    streams: texts that are spoken at once; None: as many as the server takes.
    characters_per_minute: of texts; None: no limit.
    """

    name: str = ""
    streams: int | None = None
    characters_per_minute: int | None = None


class Keys:
    """The token, and the keys of a file. Any thread may call its methods."""

    def __init__(self, token: str | None, path: Path | None):
        """
        Args:
            path: of the file, which `read_keys` describes. None: there is none.

        Raises:
            BackendError: the file cannot be read, or is wrong.
        """
        self._token = {_digest(token.encode()): Key()} if token is not None else {}
        self.path = path
        self.by_name: dict[str, Key] = {}
        self._by_digest = self._token
        if path:
            self.reread()

    @property
    def needed(self) -> bool:
        """Clients must send a key."""
        return bool(self._token) or self.path is not None

    def of(self, given: bytes) -> Key | None:
        """The key that a client has sent. It is found by its digest, so times tell nothing about others."""
        return self._by_digest.get(_digest(given))

    def reread(self) -> None:
        """Read the file again. Raises BackendError: as the class; then the former keys stay."""
        assert self.path
        by_digest = read_keys(self.path)
        self.by_name = {key.name: key for key in by_digest.values()}
        self._by_digest = by_digest | self._token


def read_toml(option: str, path: Path) -> dict[str, Any]:
    """Read the file that this option names. Raises BackendError: it cannot be read, or is no TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BackendError(f"{option} {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BackendError(f"{option} {path} is not TOML: {error}") from None


def read_keys(path: Path) -> dict[str, Key]:
    """The keys of a TOML file by their digests. For each key it has a table `[keys.NAME]`:

        sha256 = "..."                  # of the key, in hex; or a list of several, while clients change to a new key
        streams = 4                     # if you like
        characters_per_minute = 20000   # if you like

    Raises:
        BackendError: it cannot be read, or is wrong.
    """
    told = read_toml("--keys-file", path)
    tables = told.pop("keys", {})
    if told or not isinstance(tables, dict) or not 0 < len(tables) <= _MOST_KEYS:
        words = f"1 to {_MOST_KEYS} tables [keys.NAME] and nothing else"
        raise BackendError(f"--keys-file {path} must have {words}, got {', '.join([*told][:3]) or len(tables)}")
    found: dict[str, Key] = {}
    for name, table in tables.items():
        key = _key_of(name, dict(table) if isinstance(table, dict) else {}, str(path))
        for digest in key[1]:
            if found.setdefault(digest, key[0]) != key[0]:
                raise BackendError(f"--keys-file {path}: {name} and {found[digest].name} have the same key")
    return found


def _key_of(name: str, table: dict[str, Any], path: str) -> tuple[Key, list[str]]:
    where = f"--keys-file {path}, [keys.{name[:80]}]"
    if not _NAME.fullmatch(name):
        raise BackendError(f"{where}: a name has 1 to 64 of A-Z a-z 0-9 _ . -")
    digests = table.pop("sha256", None)
    digests = digests if isinstance(digests, list) else [digests]
    if not digests or not all(isinstance(one, str) and _DIGEST.fullmatch(one.lower()) for one in digests):
        raise BackendError(f"{where}: sha256 must be 64 hex digits, or a list of such: `printf %s KEY | sha256sum`")
    if unknown := sorted(table.keys() - set(_LIMITS)):
        raise BackendError(f"{where}: unknown {unknown[0][:80]!r}; known: sha256, {', '.join(_LIMITS)}")
    for limit, most in table.items():
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise BackendError(f"{where}: {limit} must be an integer above 0, got {most!r}")
    return Key(name, **table), [one.lower() for one in digests]


def _digest(key: bytes) -> str:
    """Keys are long and random, so a fast hash suffices."""
    return hashlib.sha256(key).hexdigest()
