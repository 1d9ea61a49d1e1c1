"""The options of a server from a file and from the environment, beside its command line."""

import argparse
import json
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from qwen_megakernel.choices import TOKEN
from qwen_megakernel.errors import BackendError
from qwen_megakernel.server.keys import read_toml
from qwen_megakernel.server.options import rows_of

PREFIX = TOKEN.removesuffix("TOKEN")
SECRETS = ("token", "ssl_keyfile_password")

_OTHERS = {f"{PREFIX}AUTO", f"{PREFIX}URL"}  # variables of other parts and of clients
_OF_KUBERNETES = re.compile(rf"{PREFIX}(.*_)?(SERVICE_.*|PORT_.*)")
"""What Kubernetes sets in every container for a Service "qwen-megakernel". It also sets ..._PORT=tcp://...."""
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options that a file may give, by their names there: as on the command line, with underscores."""
    without = ("help", "config", "print_config")
    named = {action: max(action.option_strings, key=len) for action in parser._actions if action.option_strings}
    names = {_name_of(flag, action): action for action, flag in named.items()}
    return {name: action for name, action in names.items() if action.dest not in without}


def _name_of(flag: str, action: argparse.Action) -> str:
    """Of "--ui" and "--no-ui" the first is the option's name."""
    flag = action.option_strings[0] if isinstance(action, argparse.BooleanOptionalAction) else flag
    return flag.removeprefix("--").replace("-", "_")


Layer = tuple[list[str], dict[str, bool]]
"""Options as words of a command line, and flags that are off, which have no word."""


def from_file(path: Path, actions: Mapping[str, argparse.Action]) -> Layer:
    """The options of a TOML file. Raises BackendError: it cannot be read, or has an unknown key or a value of a wrong
    kind."""
    where = f"--config {path}"
    told = {name.replace("-", "_"): value for name, value in read_toml("--config", path).items()}
    layer: Layer = [], {}
    for name, value in told.items():
        if name not in actions:
            raise BackendError(f"{where}: unknown option {name[:80]!r}{_hint(name, actions)}")
        _add(layer, name, value, actions[name], where)
    return layer


def from_environment(variables: Mapping[str, str], actions: Mapping[str, argparse.Action]) -> Layer:
    """The same of environment variables, such as QWEN_MEGAKERNEL_MAX_STREAMS. An empty one counts as none. A list's
    values are parted by commas. Raises BackendError: as `from_file`."""
    layer: Layer = [], {}
    for variable, text in variables.items():
        name = variable.removeprefix(PREFIX).lower()
        if name == variable.lower() or variable in _OTHERS or not text.strip():
            continue
        if _OF_KUBERNETES.fullmatch(variable) or name == "port" and "://" in text or name == "config":
            continue
        if name not in actions and name in _of_servers():
            continue  # of the other one: both may have the same environment
        if name not in actions:
            raise BackendError(f"environment: unknown option {variable[:80]}{_hint(name, actions)}")
        value: Any = text
        if isinstance(actions[name], argparse._AppendAction):
            value = [part.strip() for part in text.split(",")]
        elif actions[name].nargs == 0:
            if text.lower() not in (*_ON, *_OFF):
                raise BackendError(f"environment: {variable} must be true or false, got {text[:80]!r}")
            value = text.lower() in _ON
        _add(layer, name, value, actions[name], "environment")
    return layer


def _of_servers() -> set[str]:
    rows = [row for entrance in ("serve", "wyoming") for row in rows_of(entrance).items()]
    return {(row.typed or name).replace("-", "_") for name, (_, row) in rows} | {"front_processes", "allow_network"}


def _hint(name: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else "; `serve --help` lists them"


def _add(layer: Layer, name: str, value: Any, action: argparse.Action, where: str) -> None:
    words, off = layer
    flag, is_list = action.option_strings[0], isinstance(action, argparse._AppendAction)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise BackendError(f"{where}: {name} must be true or false, got {value!r}")
        if value:
            words.append(flag)
        else:
            off[action.dest] = False
        return
    values = value if is_list and isinstance(value, list) else [value]
    if is_list and isinstance(value, dict):
        values = [f"{key}={each}" for key, each in value.items()]
    for each in values:
        if not isinstance(each, str | int | float) or isinstance(each, bool) or not str(each).isprintable():
            kind = "a list of texts" if is_list else "one text or number"
            raise BackendError(f"{where}: {name} must be {kind}, got {value!r}")
        words.append(f"{flag}={each}")


def printed(args: argparse.Namespace, actions: Mapping[str, argparse.Action]) -> str:
    """The options in force as TOML, which --config reads. Behind each stands where it comes from. Secrets are left
    out."""
    lines = []
    for name, action in sorted(actions.items()):
        value, source = getattr(args, action.dest), args.sources.get(action.dest, "default")
        value = bool(value) if action.nargs == 0 else value
        if name in SECRETS and value is not None:
            lines.append(f"# {name} is set  # {source}")
        elif value is None:
            lines.append(f"# {name} is not set")
        else:
            if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
                value = ",".join(value)
            lines.append(f"{name} = {_toml(value)}  # {source}")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml('='.join(each) if isinstance(each, tuple) else each) for each in value)}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)


def config_file(given: Mapping[str, Any]) -> Path | None:
    """--config of a command line, or of the environment."""
    named = given.get("config") or os.environ.get(f"{PREFIX}CONFIG", "").strip()
    return Path(named) if named else None
