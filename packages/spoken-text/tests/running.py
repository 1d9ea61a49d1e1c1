"""Python processes of their own."""

import subprocess
import sys

PATIENCE_S = 180.0  # far more than anything takes


def run_python(code: str, *args: str) -> str:
    """What a Python process prints, which must end well."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout
