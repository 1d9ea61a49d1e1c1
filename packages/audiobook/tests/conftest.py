"""Fixtures and hooks of the engine's own tests, of the same checkout."""

import pytest
from fixtures import *  # noqa: F403


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Where speech is kept."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "qwen-audiobook"
