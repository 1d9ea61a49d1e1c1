"""Fixtures and hooks of the engine's own tests, of the same checkout."""

from fixtures import *  # noqa: F403
