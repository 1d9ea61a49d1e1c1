"""Fixtures of the engine's own tests, of the same checkout."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_found = spec_from_file_location("engine_fixtures", Path(__file__).parents[3] / "tests" / "conftest.py")
_theirs = module_from_spec(_found)
_found.loader.exec_module(_theirs)

fresh_seed = _theirs.fresh_seed
device_speed = _theirs.device_speed
checkpoint_root = _theirs.checkpoint_root
tiny = _theirs.tiny
loads_once = _theirs.loads_once
kept_engines_are_closed = _theirs.kept_engines_are_closed
