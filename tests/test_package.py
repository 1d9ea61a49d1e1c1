"""What the package promises as a package: names, layers, the wheel, the README's tree."""

import ast
import re
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import qwen_megakernel

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "qwen_megakernel"
# Arrows point down only: a module imports from lower layers.
LAYERS = [
    {"errors", "pcm"},
    {"config", "fp8"},
    {"layout"},
    {"build", "checkpoint", "transformer", "sampling", "text", "reference"},
    {"kernels", "quantize", "voice", "vocoder", "synthetic", "frame", "runaway", "word_times"},
    {"prompt", "frame_graphs"},
    {"frame_decoder", "request", "vocoder_graphs", "prefill", "listener", "twin"},
    {"megakernel", "stream"},
    {"backend", "owner"},
    {"utterance"},
    {"engine"},
    {"__init__", "shared_engine"},
    {"pipecat_shared", "serve_speech", "verify"},
    {"serve_metrics"},
    {"serve_http", "serve_page", "serve_socket"},
    {"serve_guard"},
    {"serve", "bench"},
    {"cli", "serve_ray", "serve_ray_proxy", "pipecat_tts", "websocket_tts", "bot_page", "offline_llm"},
]
PIPECAT = {"pipecat_shared", "pipecat_tts", "websocket_tts", "bot_page", "offline_llm"}
SERVE = {name for layer in LAYERS for name in layer if name.startswith("serve")}
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_every_module_has_a_layer():
    assert {p.stem for p in PACKAGE.glob("*.py")} == set(LEVEL)


@pytest.mark.parametrize("name", sorted(LEVEL))
def test_imports_point_down(name):
    for imported in imports_of(PACKAGE / f"{name}.py"):
        if imported.split(".")[0] == "qwen_megakernel":
            below = imported.removeprefix("qwen_megakernel").strip(".") or "__init__"
            assert LEVEL[below] < LEVEL[name], imported
        assert imported != "pickle", imported
        assert not imported.startswith("pipecat") or name in PIPECAT, imported
        assert imported != "asyncio" or name in PIPECAT | SERVE | {"shared_engine"}, imported


def test_the_public_names_are_what_can_be_imported():
    assert set(qwen_megakernel._MODULES) == set(qwen_megakernel.__all__) <= set(dir(qwen_megakernel))
    for name, module in qwen_megakernel._MODULES.items():
        assert getattr(qwen_megakernel, name) is getattr(import_module(f"qwen_megakernel.{module}"), name)
    with pytest.raises(AttributeError, match="Vioce"):
        _ = qwen_megakernel.Vioce


def test_type_checkers_see_the_names_where_they_are():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == {name: f"qwen_megakernel.{module}" for name, module in qwen_megakernel._MODULES.items()}


def test_importing_touches_no_gpu_and_no_transformers():
    code = (
        "import sys, torch; from qwen_megakernel import *; "
        "print('transformers' in sys.modules, torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return next(out.glob("*.whl"))


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


def test_the_wheel_holds_every_file_of_package_and_csrc(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files", "qwen_megakernel", "csrc"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.split():
        assert name.replace("csrc/", "qwen_megakernel/csrc/", 1) in inside, name
    assert tracked.stdout, "git lists the files of a checkout"
    assert wheel.stat().st_size <= 12_000_000
    assert sum(p.stat().st_size for p in (PACKAGE / "demo_voice").rglob("*") if p.is_file()) <= 16_000_000


def test_the_readmes_file_tree_is_the_tree():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in [
        *PACKAGE.glob("*.py"),
        ROOT / "csrc",
        ROOT / "tests",
        ROOT / "docs",
        ROOT / "demo_pipeline.py",
        ROOT / "examples",
    ]:
        assert path.name in readme, path.name


def test_nothing_in_the_repository_names_this_machine():
    """No absolute path of a developer's machine, no package registry's host."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wrong = re.compile(
        "|".join(["/" + "work/", "/" + "root/", "pypi" + r"\.org", "python" + "hosted", "/opt/" + "wheels"])
    )
    for name in tracked:
        if Path(name).suffix in {".py", ".md", ".toml", ".txt", ".json", ".yml", ""}:
            found = wrong.search((ROOT / name).read_text(encoding="utf-8", errors="replace"))
            assert not found, (name, found and found.group())
