"""The image, built for the CPU and run as compose.yaml runs it: `make test-image`, which needs a container engine.

ENGINE: how to call it; docker, or podman, with options. IMAGE_BUILD: more options of its `build`, such as --build-arg
PIP_EXTRA_INDEX_URL=... (Dockerfile).
"""

import io
import json
import os
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.image

ROOT = Path(__file__).parents[2]
ENGINE = shlex.split(os.environ.get("ENGINE", "docker"))
IMAGE = "qwen-megakernel-test:cpu"
NAME = "qwen-megakernel-test"
TOKEN = "told-to-the-container-alone"
URL = "http://127.0.0.1:8000"
MAX_BYTES = 1_000_000_000


def engine(*words: str, check: bool = True, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    # Podman's own format drops the healthcheck.
    environment = os.environ | {"BUILDAH_FORMAT": "docker"}
    done = subprocess.run([*ENGINE, *words], capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)
    assert done.returncode == 0 or not check, f"{shlex.join(done.args)}: {done.stdout}{done.stderr}"
    return done


def inside(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return engine("exec", NAME, *words, check=check)


def status(path: str, **options) -> int:
    """Of an answer; 0: there is none yet."""
    try:
        with urllib.request.urlopen(urllib.request.Request(URL + path, **options), timeout=PATIENCE_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def speech(headers: dict[str, str]) -> urllib.request.Request:
    body = json.dumps({"model": "demo", "input": "Hello there.", "voice": "ada", "response_format": "wav"}).encode()
    headers = {"Content-Type": "application/json"} | headers
    return urllib.request.Request(f"{URL}/v1/audio/speech", body, headers)


def hardening() -> list[str]:
    """compose.yaml's, as options of `run`."""
    service = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["cpu"]
    named = {"tmpfs": "--tmpfs", "cap_drop": "--cap-drop", "security_opt": "--security-opt", "ports": "--publish"}
    assert service["read_only"] and all(service[key] for key in named)
    return ["--read-only", *(word for key in named for value in service[key] for word in (named[key], value))]


@pytest.fixture(scope="module")
def image() -> dict:
    """What the engine tells of the image, once it is built."""
    build = shlex.split(os.environ.get("IMAGE_BUILD", ""))
    began = time.monotonic()
    engine("build", "--build-arg", "VARIANT=cpu", *build, "--tag", IMAGE, ".", timeout=1800)
    (told,) = json.loads(engine("image", "inspect", IMAGE).stdout)
    print(f"built in {time.monotonic() - began:.0f} s, {told['Size'] / 1e6:.0f} MB")
    return told


@pytest.fixture(scope="module")
def server(image) -> Iterator[None]:
    """A container that speaks, with a cache that outlives it, as in compose.yaml."""
    began = time.monotonic()
    run = ["run", "--detach", "--name", NAME, *hardening(), "--volume", f"{NAME}:/home/tts/cache"]
    engine(*run, "--env", f"QWEN_MEGAKERNEL_TOKEN={TOKEN}", IMAGE, "--model", "demo")
    try:
        until(lambda: status("/ready") == 200)
        print(f"ready after {time.monotonic() - began:.0f} s")
        yield
    finally:
        engine("rm", "--force", NAME, check=False)
        engine("volume", "rm", NAME, check=False)


def test_the_image_is_small_and_says_what_it_is(image):
    assert image["Size"] < MAX_BYTES
    labels = image["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "qwen-megakernel"
    assert labels["org.opencontainers.image.licenses"] == "BSD-2-Clause"


def test_the_image_holds_no_token(image):
    assert not [line for line in image["Config"]["Env"] if "TOKEN" in line]


def test_without_a_token_it_does_not_listen(image):
    done = engine("run", "--rm", *hardening(), IMAGE, "--model", "demo", check=False)
    assert done.returncode == 1 and "QWEN_MEGAKERNEL_TOKEN" in done.stderr


def test_it_speaks_to_whoever_has_the_token(server):
    assert status("/v1/voices") == 401
    with urllib.request.urlopen(speech({"Authorization": f"Bearer {TOKEN}"}), timeout=PATIENCE_S) as answer:
        samples, rate = soundfile.read(io.BytesIO(answer.read()))
    assert rate == 24_000 and len(samples) > rate // 2
    assert np.sqrt(np.mean(samples**2)) > 0.01


def test_the_healthcheck_passes(image, server):
    check = image["Config"].get("Healthcheck") or image["Healthcheck"]  # docker's place, podman's place
    kind, *command = check["Test"]
    assert kind == "CMD"
    inside(*command)
    wrong = [word.replace("/health", "/nowhere") for word in command]
    assert inside(*wrong, check=False).returncode == 1


def test_it_is_nobody_and_may_write_to_its_cache_alone(server):
    assert inside("id", "-u").stdout.strip() == "10001"
    for place in ("/", "/home/tts", "/opt/venv", "/etc", "/var/lib"):
        assert "Read-only file system" in inside("touch", f"{place}/file", check=False).stderr, place
    inside("touch", "/home/tts/cache/file", "/tmp/file")
    state = inside("cat", "/proc/1/status").stdout
    assert "NoNewPrivs:\t1" in state and "CapEff:\t0000000000000000" in state and "CapBnd:\t0000000000000000" in state


def test_sigterm_ends_it_well(server):
    """The last test: the container is gone then. The engine would kill it after the time, with status 137."""
    began = time.monotonic()
    engine("stop", "-t", "20", NAME)
    print(f"ended after {time.monotonic() - began:.1f} s")
    assert engine("inspect", "--format", "{{.State.ExitCode}}", NAME).stdout.strip() == "0"
    logs = engine("logs", NAME)
    assert "Traceback" not in logs.stdout + logs.stderr
