"""What the container image is made of: locked packages, the Dockerfile, compose.yaml and examples/kubernetes.yaml agree
with pyproject.toml, constraints.txt and the server. image/tests/test_container.py builds and runs the image."""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from qwen_megakernel import cli
from qwen_megakernel.backend import card
from qwen_megakernel.choices import TOKEN
from qwen_megakernel.server.app import make_app
from qwen_megakernel.server.guard import OPEN
from qwen_megakernel.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
PROJECT, TEXT = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for folder in ("", "packages/spoken-text")
)
EXTRAS = PROJECT["optional-dependencies"]
LINES = PROJECT["dependencies"] + EXTRAS["serve"] + EXTRAS["wyoming"] + TEXT["dependencies"]
SERVER = [needed for needed in map(Requirement, LINES) if needed.name != TEXT["name"]]  # of others
CACHE = "/home/tts/cache"
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
    assert set(asked) == set(card._PIP_COMPILER) and set(asked.values()) == {"13.0.*"}
    assert locked["cuda-toolkit"].startswith("13.0.") and all(locked[name].startswith("13.0.") for name in asked)


# ---------------------------------------------------------------- how it is run


def dockerfile(instruction: str) -> list[str]:
    """What stands behind each of an instruction's uses, with continued lines joined."""
    return re.findall(rf"^{instruction} (.+)$", text("Dockerfile").replace("\\\n", " "), re.M)


def served(image_command: list[str]) -> argparse.Namespace:
    """What the command line makes of the image's entry point with a command behind it."""
    (entry,) = map(json.loads, dockerfile("ENTRYPOINT"))
    assert entry[0] in PROJECT["scripts"]
    args = cli.make_parser().parse_args([*entry[1:], *image_command])
    assert args.run == "serve:serve" and args.host == "0.0.0.0"
    return args


def routes() -> set[str]:
    """Paths that answer GET without a token."""
    app = make_app(lambda: None, ServerOptions(token="secret"), model="demo")
    return {path for path, methods in app.openapi()["paths"].items() if "get" in methods} & set(OPEN)


def test_base_images_and_python_packages_are_pinned_by_hash():
    bases = [line for line in dockerfile("ARG") if "_BASE=" in line]
    assert len(bases) == 2 and all(re.search(r"=[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}$", base) for base in bases)
    assert set(dockerfile("FROM")) == {
        "${CUDA_BASE} AS cuda",
        "${CPU_BASE} AS cpu",
        "${VARIANT} AS packages",
        "${VARIANT}",
    }
    installs = re.findall(r"pip install ([^&\n]*)", "\n".join(dockerfile("RUN")))
    assert len(installs) == 3 and all("--require-hashes" in line or "--no-deps --no-index" in line for line in installs)


def test_the_image_is_built_from_nothing_but_our_wheels_and_the_locks():
    assert text(".dockerignore").split() == ["*", "!dist/*.whl", "!image/*.txt"]
    copied = {word for line in dockerfile("COPY") if "--from" not in line for word in line.split()[:-1]}
    assert copied == {"image/build.txt", "image/${VARIANT}.txt", "dist/qwen_megakernel-*.whl", "dist/spoken_text-*.whl"}


def test_the_dockerfile_says_what_the_server_takes():
    (command,) = map(json.loads, dockerfile("CMD"))
    (port,), (check,) = dockerfile("EXPOSE"), dockerfile("HEALTHCHECK")
    assert served(command).port == int(port)
    assert re.search(r"http://127.0.0.1:(\d+)(/\w+)", check).groups() == (port, "/health") and "/health" in routes()


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_compose_says_what_the_server_and_the_image_take(profile):
    compose = yaml.safe_load(text("compose.yaml"))
    service = compose["services"][profile]
    assert set(compose["services"]) == {"gpu", "cpu"} and service["profiles"] == [profile]
    args = served([re.sub(r"\$\{\w+:-(.+)\}", r"\1", word) for word in service["command"]])
    assert service["ports"] == [f"127.0.0.1:{args.port}:{args.port}"]
    assert [volume.split(":")[1] for volume in service["volumes"]] == [CACHE, str(args.voices)]
    assert set(service["environment"]) == {TOKEN}
    assert ("deploy" in service) == (profile == "gpu") == (service["build"] == ".")
    if profile == "cpu":
        assert {arg.split("=")[0] for arg in service["build"]["args"]} <= {
            arg.split("=")[0] for arg in dockerfile("ARG")
        }


def test_kubernetes_says_what_the_server_and_the_image_take():
    claim, deployment, service = yaml.safe_load_all(text("examples/kubernetes.yaml"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = served(container["args"])
    assert container["ports"] == [{"name": "http", "containerPort": args.port}]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/health",
    }
    assert all(probe["port"] == "http" and probe["path"] in routes() for probe in probes.values())
    assert [variable["name"] for variable in container["env"]] == [TOKEN]
    assert container["env"][0]["valueFrom"]["secretKeyRef"]
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {"cache": CACHE, "tmp": "/tmp"}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    assert dockerfile("USER") == ["{runAsUser}:{runAsGroup}".format(**pod["securityContext"])]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == "http"


def test_everything_that_is_kept_is_below_the_cache():
    """The models of the hub, the compiled kernel and its verdicts: the rest of the container may be read-only."""
    code = "import huggingface_hub.constants as hub; from qwen_megakernel.backend import build; "
    code += "print(hub.HF_HOME, build.cache_root())"
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_HOME", "TORCH_EXTENSIONS_DIR")}
    (setting,) = re.findall(r"XDG_CACHE_HOME=\S+", "\n".join(dockerfile("ENV")))
    environment = kept | dict([setting.split("=")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [f"{CACHE}/huggingface", f"{CACHE}/torch_extensions"]
    assert dockerfile("VOLUME") == [CACHE]
