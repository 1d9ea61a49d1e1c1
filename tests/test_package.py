"""What the package promises as a package: names, layers, the wheel, the tree in the docs."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import qwen_megakernel

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "qwen_megakernel"
DOORS = {
    "bot_page": ["TurnLog", "check_port", "log_to_console", "run"],
    "offline_llm": ["OfflineLLM", "answer"],
    "pipecat_tts": ["DEFAULT_MODEL", "MegakernelTTSService", "MegakernelTTSSettings"],
    "serve_ray": ["Args", "app"],
    "serve_ray_proxy": ["middleware"],
    "websocket_tts": ["MegakernelWebsocketTTSService", "SpeechSettings"],
}
"""Public import paths whose code is in the rooms behind, and what is found there."""

ASYNC = {f"speech/{name}" for name in ("jobs", "patience", "saved_voices", "session", "shared", "stall_watch")}
"""Modules outside pipecat/ and server/ that know asyncio."""


def module_names() -> list[str]:
    """Of the package, such as "engine/loop"; `__init__` files of sub-packages are empty."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(path.as_posix() for path in paths if path.name != "__init__" or len(path.parts) == 1)


def printed_layers() -> dict[str, tuple[int, int]]:
    """What docs/architecture.md prints under "What may import what": module -> (line from below, column from the
    left)."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.split("## What may import what", 1)[1].split("```")[1]
    rows, levels = [row.partition(":") for row in block.strip().splitlines()], {}
    for height, (package, _, columns) in enumerate(reversed(rows)):
        folder = "" if package.strip() == "qwen_megakernel" else f"{package.strip()}/"
        for column, names in enumerate(columns.split("|")):
            for name in names.split():
                assert folder + name not in levels, f"{folder}{name} is printed twice"
                levels[folder + name] = height, column
    return levels


def imports_of(path: Path) -> set[str]:
    """Dotted names; of `from package import module` the module's."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            inside = ROOT / node.module.replace(".", "/")
            found |= {f"{node.module}.{a.name}" for a in node.names if (inside / f"{a.name}.py").is_file()}
    return found


def test_every_module_is_in_the_printed_list_and_no_other():
    assert sorted(printed_layers()) == module_names()


@pytest.mark.parametrize("name", module_names())
def test_imports_go_one_way(name):
    levels = printed_layers()
    for imported in imports_of(PACKAGE / f"{name}.py"):
        if imported.split(".")[0] == "qwen_megakernel":
            module = imported.removeprefix("qwen_megakernel").strip(".").replace(".", "/") or "__init__"
            if not (PACKAGE / module).is_dir():
                assert levels[module] < levels[name], imported
        assert imported != "pickle", imported
        folder = name.partition("/")[0] if "/" in name else ""
        assert not imported.startswith("pipecat") or folder == "pipecat", imported
        assert imported != "asyncio" or folder in ("pipecat", "server") or name in ASYNC, imported


ALSO = {
    "spoken_text": set(),
    "qwen_megakernel": {"spoken_text"},
    "qwen_check": {"qwen_megakernel"},  # comes with qwen_megakernel, which names it in strings alone
    "qwen_audiobook": {"spoken_text", "qwen_megakernel"},
}
"""Our packages, and which others each imports."""


@pytest.mark.parametrize("package", ALSO)
def test_packages_import_one_way(package):
    """What a package imports of ours is also what it says it needs."""
    (folder,) = (path for path in (*ROOT.glob("*"), *ROOT.glob("packages/*/*")) if path.name == package)
    paths = list(folder.rglob("*.py"))
    roots = {name.partition(".")[0] for path in paths for name in imports_of(path)}
    assert paths and roots & ALSO.keys() - {package} == ALSO[package]
    needed = tomllib.loads((folder.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = {Requirement(line).name.replace("-", "_") for line in needed}
    assert names & ALSO.keys() == ALSO["qwen_megakernel" if package == "qwen_check" else package]
    assert package != "spoken_text" or not roots & {"torch", "numpy", "transformers"}


def test_sub_packages_are_folders_and_nothing_more():
    folders = [path.parent for path in PACKAGE.glob("*/__init__.py")]
    assert {path.name for path in folders} == {name.split("/")[0] for name in printed_layers() if "/" in name}
    for folder in folders:
        assert not (folder / "__init__.py").read_text(encoding="utf-8").strip(), folder
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= 14


@pytest.mark.parametrize("name", module_names())
def test_files_stay_small(name):
    text = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (200 if name == "engine/loop" else 450)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
@pytest.mark.parametrize("name", DOORS)
def test_public_import_paths_lead_to_the_same_objects(name):
    if name.startswith("serve_ray"):
        pytest.importorskip("ray")
    door, inside = import_module(f"qwen_megakernel.{name}"), imports_of(PACKAGE / f"{name}.py")
    (home,) = (import_module(module) for module in inside)
    assert sorted(door.__all__) == DOORS[name]
    assert all(getattr(door, public) is getattr(home, public) for public in DOORS[name])


def test_the_public_names_are_what_can_be_imported():
    errors = (name for name, kind in vars(import_module("qwen_megakernel.errors")).items() if isinstance(kind, type))
    homes = qwen_megakernel._MODULES | dict.fromkeys(errors, ".errors")
    assert set(homes) == set(qwen_megakernel.__all__) <= set(dir(qwen_megakernel))
    for name, module in homes.items():
        assert getattr(qwen_megakernel, name) is getattr(import_module(module, "qwen_megakernel"), name)
    with pytest.raises(AttributeError, match="Vioce"):
        _ = qwen_megakernel.Vioce


def test_type_checkers_see_the_names_where_they_are():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == {name: resolve_name(home, "qwen_megakernel") for name, home in qwen_megakernel._MODULES.items()}


def test_importing_touches_no_gpu_and_no_transformers():
    code = "import sys, torch; from qwen_megakernel import *; "
    code += "print('transformers' in sys.modules, torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, *"-m pip wheel --quiet --no-deps --no-build-isolation -w".split(), str(out), "."]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_speaks_from_another_folder(wheel, tmp_path):
    """Installed beside nothing of this checkout: csrc and the demo voice travel inside."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import qwen_megakernel, qwen_megakernel.cli as cli; "
        f"assert qwen_megakernel.__file__.startswith({str(site)!r}); "
        "sys.exit(cli.main(['speak', '--text', 'Hello.', '--output', 'x.wav', '--device', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.wav").stat().st_size > 1920 * 2
    assert (site / "qwen_megakernel" / "csrc").is_dir()
    assert (site / "bin" / "qwen-megakernel").exists()


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_package_and_csrc(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "qwen_megakernel", "qwen_check", "csrc"], cwd=ROOT, capture_output=True, text=True
    )
    for name in tracked.stdout.split():
        assert name.replace("csrc/", "qwen_megakernel/csrc/", 1) in inside, name
    assert tracked.stdout, "git lists the files of a checkout"
    assert wheel.stat().st_size <= 18_000_000  # 16.6 MB of it are the demo voice
    assert sum(p.stat().st_size for p in (PACKAGE / "demo_voice").rglob("*") if p.is_file()) <= 25_000_000


def test_the_printed_file_tree_is_the_tree():
    """In docs/architecture.md every row exists, and everything that git tracks at the depth of a row has one."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.split("## The tree", 1)[1].split("```")[1]
    listed, folder = set(), ""
    for row in block.strip("\n").splitlines():
        if row.startswith(" " * 4):
            continue  # a sentence goes on
        names = row.strip().split("  ")[0].rstrip(",").split(", ")
        if not row.startswith(" "):
            folder = names[0] if names[0] == "qwen_megakernel/" else ""
            listed |= set(names)
        else:
            listed |= {folder + name for name in names}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    there = set()
    for path in (Path(name) for name in tracked):
        there.add(path.parts[0] + ("/" if len(path.parts) > 1 else ""))
        if path.parts[0] == "qwen_megakernel":
            there.add("/".join(path.parts[:2]) + ("/" if len(path.parts) > 2 else ""))
    hidden = {name for name in there if name.startswith(".")}
    assert listed == there - hidden


def test_nothing_in_the_repository_names_this_machine():
    """No absolute path of a developer's machine, no package registry's host."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    parts = ["/" + "work/", "/" + "root/", "pypi" + r"\.org", "python" + "hosted", "/opt/" + "wheels"]
    wrong = re.compile("|".join(parts))
    for name in tracked:
        if Path(name).suffix in {".py", ".md", ".toml", ".txt", ".json", ".yml", ""}:
            found = wrong.search((ROOT / name).read_text(encoding="utf-8", errors="replace"))
            assert not found, (name, found and found.group())
