"""What the container image is made of: locked packages agree with pyproject.toml and constraints.txt."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from qwen_megakernel.backend import build

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
SERVER = [Requirement(line) for line in PROJECT["dependencies"] + EXTRAS["serve"] + EXTRAS["wyoming"]]
ENTRY = re.compile(r"^([a-z0-9-]+)==(\S+)( ; .+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.M)
LINUX = {"sys_platform": "linux", "os_name": "posix", "platform_system": "Linux", "implementation_name": "cpython"}
MACHINES = [
    LINUX | {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    for python in ("3.11", "3.12", "3.13")
    for machine in ("x86_64", "aarch64")
]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pins(name: str) -> dict[str, str]:
    """Versions in a file of constraints."""
    return {canonicalize_name(found[1]): found[2] for found in re.finditer(r"^([\w.-]+)==(\S+)", text(name), re.M)}


# ---------------------------------------------------------------- what is locked


def installed(name: str, machine: dict[str, str]) -> dict[str, str]:
    """What pip installs from a lock on a machine, with versions."""
    found = {}
    for package, version, marker, _ in ENTRY.findall(text(name)):
        if Requirement(package + marker).marker is None or Requirement(package + marker).marker.evaluate(machine):
            assert package not in found, f"{package} is locked twice"
            found[package] = version
    return found


@pytest.mark.parametrize("name", ["build", "cpu", "cuda"])
def test_a_lock_holds_versions_with_hashes_and_nothing_else(name):
    """No address, no option, no version without a hash."""
    body = text(f"image/{name}.txt").split("#    make lock\n")[1]
    assert ENTRY.sub("", body) == "" != body


@pytest.mark.parametrize("machine", MACHINES, ids=lambda at: f"{at['python_version']} {at['platform_machine']}")
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_lock_holds_the_tested_versions_of_all_that_the_server_needs(name, machine):
    locked, tested = installed(f"image/{name}.txt", machine), pins("constraints.txt") | pins("constraints-cpu.txt")
    for needed in SERVER:
        if needed.marker is None or needed.marker.evaluate(machine):
            assert needed.specifier.contains(locked[canonicalize_name(needed.name)]), needed
    cuda = {package for package in locked if re.match("cuda-|nvidia-|triton$", package)}
    assert bool(cuda) == (name == "cuda")
    for package, version in locked.items():
        assert package in cuda or version.removesuffix("+cpu") == tested[package], package


def test_only_the_lock_for_the_cpu_has_the_cpu_build_of_torch():
    tested = pins("constraints-cpu.txt")["torch"]
    assert installed("image/cpu.txt", MACHINES[0])["torch"] == f"{tested}+cpu"
    assert installed("image/cuda.txt", MACHINES[0])["torch"] == tested


def test_what_builds_a_source_package_is_locked_in_the_same_version():
    building = installed("image/build.txt", MACHINES[0])
    assert building.pop("pip") and building == {"setuptools": installed("image/cpu.txt", MACHINES[0])["setuptools"]}


def test_the_image_has_the_nvcc_that_doctor_recommends():
    asked = dict(line.split("==") for line in text("image/cuda.in").splitlines() if not line.startswith("#"))
    locked = installed("image/cuda.txt", MACHINES[0])
    assert set(asked) == set(build._PIP_COMPILER) and set(asked.values()) == {"13.0.*"}
    assert locked["cuda-toolkit"].startswith("13.0.") and all(locked[name].startswith("13.0.") for name in asked)
