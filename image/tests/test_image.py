"""What the container image is made of: locked packages, the Dockerfile, compose.yaml and examples/kubernetes agree with
pyproject.toml, constraints.txt and the server. image/tests/test_container.py builds and runs the image."""

import argparse
import json
import os
import re
import shutil
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
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
PROJECT, TEXT = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for folder in ("", "packages/spoken-text")
)
EXTRAS = PROJECT["optional-dependencies"]
LINES = PROJECT["dependencies"] + EXTRAS["serve"] + EXTRAS["traces"] + EXTRAS["wyoming"] + TEXT["dependencies"]
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
    assert building.pop("pip") and building["setuptools"] == installed("image/cpu.txt", MACHINES[0])["setuptools"]
    assert building.items() <= pins("constraints.txt").items() and "hatchling" in building


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
    host = dict(setting.split("=") for line in dockerfile("ENV") for setting in line.split())["QWEN_MEGAKERNEL_HOST"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QWEN_MEGAKERNEL_HOST", host)
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
        "${VARIANT} AS wheels",
        "${VARIANT} AS packages",
        "${VARIANT}",
    }
    installs = re.findall(r"pip install ([^&\n]*)", "\n".join(dockerfile("RUN")))
    assert len(installs) == 4 and all("--require-hashes" in line or "--no-deps --no-index" in line for line in installs)


def test_the_image_is_built_from_nothing_but_what_our_wheels_are_made_of_and_the_locks():
    sent = {line.removeprefix("!").removesuffix("/**") for line in text(".dockerignore").split() if line[0] == "!"}
    copied = {word for line in dockerfile("COPY") if "--from" not in line for word in line.split()[:-1]}
    locks = {"image/build.txt", "image/${VARIANT}.txt"}
    assert copied - locks == sent - {"image/*.txt", "dist/*.whl"}, "examples/local_agent.compose.yaml takes dist/*.whl"
    wheel = tomllib.loads(text("pyproject.toml"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], *wheel["force-include"], PROJECT["readme"], *PROJECT["license-files"]} < copied


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


KUBERNETES = ROOT / "examples/kubernetes"


def built(overlay: str) -> dict[str, dict]:
    """What Kustomize makes of a folder, by kind."""
    kubectl = shutil.which("kubectl") or pytest.skip("there is no kubectl")
    made = subprocess.run([kubectl, "kustomize", str(KUBERNETES / overlay)], capture_output=True, text=True, check=True)
    return {each["kind"]: each for each in yaml.safe_load_all(made.stdout)}


def test_kubernetes_says_what_the_server_and_the_image_take():
    deployment = yaml.safe_load((KUBERNETES / "base/deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = "/etc/qwen-megakernel/config/config.toml"
    args = served([word.replace(config, str(KUBERNETES / "base/config.toml")) for word in container["args"]])
    assert container["ports"] == [{"name": "http", "containerPort": args.port}] and args.log_format == "json"
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/health",
    }
    assert all(probe["port"] == "http" and probe["path"] in routes() for probe in probes.values())
    readiness = container["readinessProbe"]
    unrouted = readiness["periodSeconds"] * readiness["failureThreshold"] + readiness["timeoutSeconds"]
    assert args.grace_seconds > 2 * unrouted and args.drain_seconds >= Limits().total_s
    assert pod["terminationGracePeriodSeconds"] > args.grace_seconds + args.drain_seconds + 15
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["cache"] == CACHE and mounts["tmp"] == "/tmp" and mounts["config"] == str(Path(config).parent)
    assert args.keys_file.parent == Path(mounts["keys"]) and not pod["enableServiceLinks"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    assert dockerfile("USER") == ["{runAsUser}:{runAsGroup}".format(**pod["securityContext"])]


@pytest.mark.parametrize("overlay", ["base", "one-gpu", "monitored"])
def test_what_kustomize_makes_belongs_together(overlay):
    made = built(overlay)
    deployment = made["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert labels == deployment["selector"]["matchLabels"] == made["Service"]["spec"]["selector"]
    assert made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    volumes = {volume["name"]: volume for volume in deployment["template"]["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == made["ConfigMap"]["metadata"]["name"]
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == made["PersistentVolumeClaim"]["metadata"]["name"]
    alone = overlay == "one-gpu"
    assert deployment["strategy"]["type"] == ("Recreate" if alone else "RollingUpdate")
    assert made["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOnce" if alone else "ReadWriteMany"]
    if overlay == "monitored":
        assert made["ServiceMonitor"]["spec"]["selector"]["matchLabels"] == made["Service"]["metadata"]["labels"]
        assert made["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == made["Deployment"]["metadata"]["name"]


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
