"""Modules that moved after 0.2.0: their old paths import the new ones, with a DeprecationWarning, until 0.4.0."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "qwen_megakernel.backend.auto": "qwen_megakernel.trust.auto",
    "qwen_megakernel.backend.verdicts": "qwen_megakernel.trust.verdicts",
    "qwen_megakernel.engine.engine": "qwen_megakernel.speech.engine",
    "qwen_megakernel.engine.mapping": "qwen_megakernel.speech.mapping",
    "qwen_megakernel.engine.request": "qwen_megakernel.speech.request",
    "qwen_megakernel.engine.retries": "qwen_megakernel.speech.retries",
    "qwen_megakernel.engine.shared": "qwen_megakernel.speech.shared",
    "qwen_megakernel.engine.word_times": "qwen_megakernel.speech.words",
    "qwen_megakernel.server.encoders": "qwen_megakernel.speech.encoders",
    "qwen_megakernel.server.saved_voices": "qwen_megakernel.speech.saved_voices",
}


class _MovedModules(MetaPathFinder, Loader):
    """Finds the old paths. Python asks it only for what is in no folder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        told = f"{old} is now {MOVED[old]}; the old path ends with 0.4.0"
        warnings.warn(told, DeprecationWarning, stacklevel=2)  # frames of importlib do not count
        sys.modules[old] = import_module(MOVED[old])  # what `import` then returns


def find_moved_modules() -> None:
    """Let Python's imports find the old paths."""
    sys.meta_path.append(_MovedModules())
