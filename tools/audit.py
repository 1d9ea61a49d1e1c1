"""Asks an advisory service about each package of an environment: `python tools/audit.py .venv/bin/python`, in `make
audit`. pip-audit calls an environment clean if nothing answers it, so it is first asked about a package with known
holes."""

import subprocess
import sys
import tempfile
from pathlib import Path

KNOWN = "pyyaml==5.3"  # CVE-2020-14343 and others


class NoServiceError(Exception):
    """No advisory service answers."""


def pip_audit(requirements: list[str]) -> subprocess.CompletedProcess[str]:
    """Its status is 1 for a hole, for a package that the service does not know, and without a service."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text("\n".join(requirements), encoding="utf-8")
        options = ["--strict", "--no-deps", "--disable-pip", "--progress-spinner", "off", "--requirement", str(listed)]
        return subprocess.run([sys.executable, "-m", "pip_audit", *options], capture_output=True, text=True)


def installed(python: str) -> list[str]:
    """As requirements. A build such as torch 2.13.0+cpu has the holes of 2.13.0."""
    ask = [python, "-m", "pip", "list", "--format=freeze", "--exclude-editable", "--disable-pip-version-check"]
    listed = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    return [line.partition("+")[0] for line in listed.split()]


def audit(python: str) -> str:
    """pip-audit's report. Raises NoServiceError; CalledProcessError: a package has a hole, or is not known."""
    first = pip_audit([KNOWN])
    if "CVE-" not in first.stdout and "PYSEC-" not in first.stdout:
        raise NoServiceError(
            f"nothing was audited: no advisory service can be reached from here. Expected pip-audit to report {KNOWN}; "
            f"it said: {(first.stderr or first.stdout).strip().splitlines()[-1]}"
        )
    done = pip_audit(installed(python))
    done.check_returncode()
    return done.stdout or done.stderr


def main(python: str) -> int:
    try:
        print(audit(python))
    except NoServiceError as error:
        print(error, file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(error.stdout, error.stderr, sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
