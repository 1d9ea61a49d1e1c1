"""Where packages lie that are read without their own imports."""

from importlib.util import find_spec
from pathlib import Path


def folder(name):
    spec = find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"the package {name} is missing: install tools/demo_voice/requirements.txt")
    return Path(spec.submodule_search_locations[0])
