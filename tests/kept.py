"""Engines that are loaded once for the whole run: to load the demo takes longer than to say a word with it."""

from dataclasses import replace
from pathlib import Path

from qwen_megakernel import TTSEngine
from qwen_megakernel.engine.options import EngineOptions


class Kept:
    """An engine that who uses it may not close. What a test sets on it, another test does not see."""

    def __init__(self, engine: TTSEngine):
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def __enter__(self) -> "Kept":
        return self

    def __exit__(self, *_) -> None:
        """Nothing is closed."""

    def close(self, drain_s: float = 0.0) -> None:
        """Who loaded it does that."""


ENGINES: dict[str, TTSEngine] = {}
_load = TTSEngine.load


def kept(model: str | Path, options: EngineOptions | None = None, **changes) -> Kept:
    """As `TTSEngine.load`, in whose place a test may put it."""
    options = replace(options or EngineOptions(), **changes)
    asked = f"{model} {options}"
    if asked not in ENGINES:
        ENGINES[asked] = _load(model, options)
    return Kept(ENGINES[asked])
