"""pipecat-qwen-megakernel (integrations/pipecat): what it hands on, what is built, and what its documents say."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import fields
from importlib import import_module, metadata
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pipecat.processors.filters.identity_filter import IdentityFilter
from test_pipecat_transports import load_script

import pipecat_qwen_megakernel as package
import qwen_megakernel
from qwen_megakernel.pipecat_tts import MegakernelTTSService
from qwen_megakernel.speech.options import options_of
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "integrations" / "pipecat"
PAGE = FOLDER / "docs" / "qwen-megakernel.mdx"
EXAMPLE = "integrations/pipecat/examples/voice_bot.py"
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SERVICES = (MegakernelTTSService, MegakernelWebsocketTTSService)
URL = "ws://127.0.0.1:1/v1/audio/speech/socket"
NAMES = {
    "DEFAULT_MODEL": "pipecat_tts",
    "MegakernelTTSService": "pipecat_tts",
    "MegakernelTTSSettings": "pipecat_tts",
    "MegakernelWebsocketTTSService": "websocket_tts",
    "SpeechSettings": "websocket_tts",
}


def read(path: str | Path) -> str:
    return (FOLDER / path).read_text(encoding="utf-8")


# ---------------------------------------------------------------- what it hands on


def test_its_names_are_the_same_objects():
    assert set(package.__all__) == set(NAMES) <= set(dir(package))
    for name, module in NAMES.items():
        assert getattr(package, name) is getattr(import_module(f"qwen_megakernel.{module}"), name)
    assert {service.Settings for service in SERVICES} == {package.MegakernelTTSSettings, package.SpeechSettings}
    with pytest.raises(AttributeError, match="DEFAULT_MODEL, MegakernelTTSService"):
        _ = package.MegakernelTtsService


def test_type_checkers_see_the_same_names():
    block = next(
        node for node in ast.parse(read("pipecat_qwen_megakernel/__init__.py")).body if isinstance(node, ast.If)
    )
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == {name: f"qwen_megakernel.{module}" for name, module in NAMES.items()}


def needed_by(name: str) -> set[str]:
    """A distribution and all that it needs, with the extras that it names."""
    found, coming = set(), [(name, frozenset[str]())]
    while coming:
        name, extras = coming.pop()
        if (name, extras) not in found:
            found.add((name, extras))
            for wanted in map(Requirement, metadata.requires(name) or ()):
                if not wanted.marker or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                    coming.append((canonicalize_name(wanted.name), frozenset(wanted.extras)))
    return {name for name, _ in found}


def test_a_servers_client_needs_only_what_the_documents_install():
    """No torch above all, although `qwen-megakernel` needs it."""
    for text in (read("README.md"), read(ROOT / "docs" / "pipecat.md")):
        assert re.search(
            r"^pip install pipecat-ai python-iso639 regex(\n| && )pip install --no-deps -e packages/spoken-text -e \.",
            text,
            re.M,
        )
    code = "import sys; from pipecat_qwen_megakernel import MegakernelWebsocketTTSService; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    loaded, imported = done.stdout.splitlines()[-1].split(), set()
    assert not {"torch", "transformers", "qwen_megakernel.speech.engine"} & {*loaded}
    folders = {"qwen_megakernel": ROOT, "spoken_text": ROOT / "packages" / "spoken-text"}
    ours = [name for name in loaded if name.partition(".")[0] in folders]
    for path in (folders[name.partition(".")[0]] / f"{name.replace('.', '/')}.py" for name in ours):
        body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
        imported |= {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in body if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in imported}
    owners = {root: of for root, of in metadata.packages_distributions().items() if root in roots}
    assert {"pipecat", "spoken_text"} <= roots  # which imports iso639 and regex at their first use
    there = needed_by("pipecat-ai") | {"python-iso639", "regex", "qwen-megakernel", "spoken-text"}
    assert not {root: of for root, of in owners.items() if not {canonicalize_name(name) for name in of} & there}


# ---------------------------------------------------------------- what is built


def build(folder: Path, kind: str, out: Path) -> Path:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)], cwd=folder, check=True)
    (made,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


def test_wheel_and_sdist_hold_the_package_and_the_main_packages_version(tmp_path):
    """The wheel is made of the sdist, beside nothing of the checkout: there is the version of the main package."""
    with tarfile.open(build(FOLDER, "sdist", tmp_path)) as sdist:
        assert {name.partition("/")[2] for name in sdist.getnames()} == {
            "CHANGELOG.md",
            "LICENSE",
            "PKG-INFO",
            "README.md",
            "examples/voice_bot.py",
            "pipecat_qwen_megakernel/__init__.py",
            "pipecat_qwen_megakernel/py.typed",
            "pyproject.toml",
            ".gitignore",
        }
        sdist.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    with zipfile.ZipFile(build(unpacked, "wheel", tmp_path)) as wheel:
        about = f"pipecat_qwen_megakernel-{qwen_megakernel.__version__}.dist-info"
        assert set(wheel.namelist()) == {
            "pipecat_qwen_megakernel/__init__.py",
            "pipecat_qwen_megakernel/py.typed",
            f"{about}/METADATA",
            f"{about}/RECORD",
            f"{about}/WHEEL",
            f"{about}/licenses/LICENSE",
        }
        assert "Name: pipecat-qwen-megakernel\n" in wheel.read(f"{about}/METADATA").decode()


def test_it_needs_the_main_package_and_extras_of_it():
    main = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    everything = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["example"]]
    for needed in map(Requirement, everything):
        assert needed.name == main["name"] and needed.extras <= main["optional-dependencies"].keys()
        assert needed.specifier.contains(qwen_megakernel.__version__)
    assert PROJECT["requires-python"] == main["requires-python"] and PROJECT["license"] == main["license"]
    assert read("LICENSE") == read(ROOT / "LICENSE")


@pytest.mark.parametrize("builder", [SdistBuilder, WheelBuilder])
def test_the_main_package_leaves_it_out(builder):
    files = [file.relative_path for file in builder(str(ROOT)).recurse_included_files()]
    assert any("pipecat_tts.py" in name for name in files)
    assert not [name for name in files if "integrations" in name]


# ---------------------------------------------------------------- what its documents say


def test_the_readme_has_what_pipecats_guide_asks_for():
    headings = ["Installation", "Usage with a Pipecat pipeline", "Running the example", "Compatibility", "Maintainers"]
    assert re.findall(r"^## (.*)$", read("README.md"), re.M) == [*headings, "Licence"]


def test_the_tested_version_is_the_pinned_one():
    pinned = re.search(r"^pipecat-ai==(\S+)$", read(ROOT / "constraints.txt"), re.M)[1]
    oldest = re.search(r"^OLDEST_PIPECAT := (\S+)$", read(ROOT / "Makefile"), re.M)[1]
    for path in (FOLDER / "README.md", PAGE):
        assert f"Tested with Pipecat v{pinned}. The oldest supported version is {oldest}." in read(path)
    assert f"**Tested with Pipecat v{pinned}**; {oldest} is the oldest supported" in read(ROOT / "README.md")
    assert f"Pipecat v{pinned}; the oldest supported is {oldest}" in read(ROOT / "docs" / "pipecat.md")


def test_the_changelog_has_the_version_or_is_open():
    newest = re.search(r"^## \[(.*?)\]", read("CHANGELOG.md"), re.M)[1]
    assert newest in ("Unreleased", qwen_megakernel.__version__)


def test_every_link_leads_somewhere():
    for path in FOLDER.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", read(path), flags=re.S)):
            assert (path.parent / link).exists(), f"{path}: {link}"


def test_the_page_lists_the_parameters_of_the_services():
    page = read(PAGE)
    for service in SERVICES:
        section = page.split(f"\n### {service.__name__}\n")[1].split("\n### ")[0]
        listed = re.findall(r'<ParamField\s+path="(\w+)"\s+type="[^"]+"\s+(?:default="([^"]*)"|(required))', section)
        takes = inspect.signature(service).parameters.values()
        assert sorted((name, default or needed) for name, default, needed in listed) == sorted(
            (one.name, "required" if one.default is one.empty else str(one.default))
            for one in takes
            if one.kind is not one.VAR_KEYWORD
        )


def test_the_page_lists_the_settings():
    rows = dict(re.findall(r"^\| `(\w+)` .*\| (.*?) +\|$", read(PAGE).split("\n### Settings\n")[1], re.M))
    for service in SERVICES:
        assert rows.keys() == {field.name for field in fields(service.Settings)} - {"extra"}
    without = options_of("pipecat").keys() - options_of("remote").keys()
    assert {name for name, about in rows.items() if "A server has its own" in about} == without


@pytest.mark.parametrize("path", [FOLDER / "README.md", PAGE])
async def test_what_they_show_runs(path, monkeypatch):
    """Both services, each in a pipeline or beside one."""
    warmed = []

    async def warmup(model):
        warmed.append(model)

    monkeypatch.setattr(MegakernelTTSService, "warmup", warmup)
    names = {name: IdentityFilter() for name in ("stt", "user_aggregator", "llm", "assistant_aggregator")}
    names["transport"] = type("Transport", (), {"input": IdentityFilter, "output": IdentityFilter})
    spoken = []
    for block in re.findall(r"^```python\n(.*?)^```$", read(path), re.M | re.S):
        waits = compile(block, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if (coroutine := eval(waits, names)) is not None:
            await coroutine
        spoken.append(type(names["tts"]))
    assert spoken == list(SERVICES)
    assert names["tts"] not in names["pipeline"].processors and len(names["pipeline"].processors) == 9
    assert warmed == (["demo"] if path == PAGE else [])


def test_the_files_for_pipecats_documentation_name_the_page():
    row, page, redirect = re.findall(r"^```\n(.*?)\n```$", read("docs/README.md"), re.M | re.S)
    place = f"api-reference/server/services/tts/{PAGE.stem}"
    title = re.search(r'^sidebarTitle: "(.*)"$', read(PAGE), re.M)[1]
    assert row == f"| [{title}](/{place}) | `uv add {PROJECT['name']}` | Community |"
    assert json.loads(f"[{page.rstrip(',')}]") == [place]
    assert json.loads(redirect.rstrip(",")) == {
        "source": f"/server/services/tts/{PAGE.stem}",
        "destination": f"/{place}",
    }
    links = re.findall(r"https://github\.com/OWNER/qwen_megakernel/(?:tree|blob)/main/([^\"\s)]+)", read(PAGE))
    assert len(links) > 2 and all((ROOT / link).exists() for link in links)


def test_the_example_speaks_in_its_process_or_through_a_server(monkeypatch):
    """tests/test_evals.py talks to it in both ways."""
    monkeypatch.delenv("QWEN_MEGAKERNEL_URL", raising=False)
    assert type(load_script(EXAMPLE).make_tts()) is MegakernelTTSService
    monkeypatch.setenv("QWEN_MEGAKERNEL_URL", URL)
    assert type(load_script(EXAMPLE).make_tts()) is MegakernelWebsocketTTSService
