"""Options that would change nothing beside the others on a command line. They are refused: who gives one expects
something of it. Where only the model or the text can tell, a warning of the code that acts on it says so."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import NamedTuple

from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.errors import RequestError


class Idle(NamedTuple):
    """An option that may be idle."""

    option: str  # as argparse calls it
    when: Callable[[argparse.Namespace], bool]  # with which others it would change nothing
    why: str  # what it is for, and what to do


def _is_local(args: argparse.Namespace) -> bool:
    from qwen_megakernel.server.process import is_loopback

    return is_loopback(args.host)


_FILE = "is for text in, sound out: leave out one of the two"
_CALL = "is for the bot: give --bot too, or leave it out"
_QUEUE = Idle(
    "queue_timeout",
    lambda args: args.max_queue == 0,
    "is the longest wait, but --max-queue 0 lets nobody wait: leave out one of them",
)
RULES: dict[str, tuple[Idle, ...]] = {
    "serve": (_QUEUE,),
    "wyoming": (
        _QUEUE,
        Idle("silence_s", lambda args: args.trim is None, "is what --trim leaves: give both, or leave it out"),
        Idle("allow_network", _is_local, "is for a --host that others reach: give --host 0.0.0.0 too, or leave it out"),
    ),
    "demo": (
        _QUEUE,
        *(Idle(option, lambda args: args.bot, _FILE) for option in ("text", "output", "play")),
        *(Idle(option, lambda args: not args.bot, _CALL) for option in ("local_audio", "llm_url", "stt")),
        Idle("llm_model", lambda args: args.llm_url is None, "is a model of --llm-url: give both, or leave it out"),
        Idle("stt_options", lambda args: args.stt is None, "are arguments of --stt: give both, or leave it out"),
    ),
}
"""By command."""

_LISTED = {"list_speakers", "model", "verbose", *(field.name for field in fields(EngineOptions))}
"""What may stand beside --list-speakers."""


def refuse_idle(args: argparse.Namespace, parser: argparse.ArgumentParser, rules: Sequence[Idle]) -> None:
    """Check a command's options by these rules. An option with its default's value counts as not given. Raises
    RequestError: one would change nothing; the message says what it needs."""
    given = [name for name in vars(args) if parser.get_default(name) != getattr(args, name)]
    for rule in rules:
        if rule.option in given and rule.when(args):
            raise RequestError(f"{_flag(rule.option)} {rule.why}")
    if "list_speakers" in given and (others := [name for name in given if name not in _LISTED]):
        raise RequestError(f"--list-speakers speaks nothing, so {_flag(others[0])} would change nothing: leave one out")


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
