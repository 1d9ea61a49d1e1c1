"""What README.md and docs/ show is run: Python, command lines, examples. Links lead somewhere, quotes are said."""

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from cases import reference_audio
from lora import stand_in, train
from recipe import MADE, follow, suited
from serving import running
from waiting import until

import qwen_audiobook.cli as audiobook
from qwen_audiobook.command import narrate_book
from qwen_megakernel import TTSEngine, cli
from qwen_megakernel.checkpoint.load import Checkpoint, find_cached
from qwen_megakernel.checkpoint.synthetic import NO_EOS
from qwen_megakernel.choices import PUBLISHED
from qwen_megakernel.commands import demo, options
from qwen_megakernel.model.voice import Voice

ROOT = Path(__file__).parents[1]
DOCS = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
GUIDES = [name for name in DOCS if not name.startswith("docs/log/")]  # which tells what was once run
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCS}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"^    ((?:python|qwen-megakernel|serve|make|pip|curl) .*)$", re.M)
SPAN = re.compile(r"`([^`\n]+)`")
CITED = re.compile(r"\bdocs/([\w/-]+\.md)#([\w-]+)|\bdocs/(log/\d[\w-]+\.md)")
LINK = re.compile(r"""(?:\]\(|\bsrc="|\bsrcset=")([^)"\s]+)[)"]""")
PIPECAT_RUNNER = Path(importlib.util.find_spec("pipecat.runner").origin).with_name("run.py")

NOT_RUN = {
    "qwen-megakernel serve": "runs until it is told to stop; tests/test_serve.py starts it",
    "qwen-megakernel wyoming": "runs until it is told to stop; tests/test_wyoming.py starts it",
    "qwen-megakernel build": "needs a GPU",
    "python": "a bot runs until it is stopped (the examples below are tested), a benchmark for minutes",
    "make": "makes environments",
    "pip": "needs a network",
    "hf": "needs a network",
    "kubectl": "needs a cluster; image/tests/test_image.py builds what it applies",
    "source": "is the shell's",
    "aplay": "needs a sound card",
    "serve": "needs Ray; tests/test_serve_ray.py deploys the same application",
}
"""Commands that are read and not run, by their first words, and why."""

FOREIGN_OPTIONS = {"--gpus": "docker", "--metrics-export-port": "ray", "--gpu-memory-utilization": "vllm"}
PYTHON_ELSEWHERE = {"docs/livekit.md": "test_clients.py"}
EXAMPLES = {
    **dict.fromkeys(
        ("minimal_bot.py", "token_mode.py", "change_voice.py", "two_bots.py"), "test_pipecat_transports.py"
    ),
    **dict.fromkeys(("local_agent.py", "local_agent.compose.yaml"), "test_pipecat_transports.py"),
    **dict.fromkeys(("one_box.yaml", "cluster.yaml"), "test_serve_ray.py"),
    **dict.fromkeys(("talks.yaml", "ears.py"), "test_evals.py"),
    "livekit_agent.py": "test_clients.py",
    "home_assistant.yaml": "test_wyoming.py",
    "kubernetes": "../image/tests/test_image.py",
    **dict.fromkeys(("dashboard.json", "alerts.yaml"), "test_operating.py"),
    **dict.fromkeys(("nginx.conf", "Caddyfile"), "test_operating.py"),
}


# ---------------------------------------------------------------- what stands there


def blocks(name: str, language: str) -> Iterator[tuple[int, str]]:
    """First line and text of a document's fenced blocks."""
    for found in FENCE.finditer(TEXTS[name]):
        if found[1] == language:
            yield TEXTS[name].count("\n", 0, found.start()) + 2, found[2]


def commands(text: str) -> Iterator[list[str]]:
    """Of a shell block, as words: without what is set in front of them, a pipe's one by one."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if not set(word) <= set("|&;"):
                command.append(word)
                continue
            while command and re.match(r"[A-Z_]+=", command[0]):
                del command[0]
            if command:
                yield [command[0].removeprefix(".venv/bin/"), *command[1:]]
            command = []


def shell_blocks(name: str) -> list[str]:
    return [text for _, text in blocks(name, "sh")] + INDENTED.findall(FENCE.sub("", TEXTS[name]))


def is_run(command: list[str]) -> bool:
    return command[0] not in NOT_RUN and " ".join(command[:2]) not in NOT_RUN


def options_of(script: Path) -> set[str]:
    """As its source gives them to argparse."""
    return set(re.findall(r'add_argument\(\s*(?:"-\w",\s*)?"(--[\w-]+)"', script.read_text(encoding="utf-8")))


def options_of_commands() -> dict[str, set[str]]:
    """Of a command with commands of its own, all of theirs too."""
    return {name: options_within(parser) for name, parser in commands_of(cli.make_parser()).items()}


def options_of_books() -> set[str]:
    return options_within(audiobook.make_parser())


def options_within(parser: argparse.ArgumentParser) -> set[str]:
    return set(parser._option_string_actions).union(*map(options_within, commands_of(parser).values()))


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})


def fields_of(path: Path, name: str) -> set[str]:
    """Of a class, without importing its module, or the one that this imports it from."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return fields_of(ROOT / (node.module.replace(".", "/") + ".py"), name)
    node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}


# ---------------------------------------------------------------- where it is run


@pytest.fixture(scope="module")
def hub(tiny, tmp_path_factory):
    """A hub's cache, no network and no GPU: every published checkpoint is a tiny one, which speaks for 2.3 seconds."""
    from huggingface_hub import constants

    cache = tmp_path_factory.mktemp("hub")
    for name in PUBLISHED:
        *_, size, kind = name.split("-")
        variant = {"Base": "base", "CustomVoice": "custom_voice", "VoiceDesign": "voice_design"}[kind]
        repository = cache / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / "0123abc"
        size = "tiny" if size == "0.6B" else "tiny-adapter"
        shutil.copytree(tiny(variant, size=size, eos_gain=NO_EOS), snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0123abc")
        settings = json.loads((snapshot / "generation_config.json").read_text()) | {"max_new_tokens": 30}
        (snapshot / "generation_config.json").write_text(json.dumps(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def base(hub) -> Path:
    """The folder of the published Base."""
    return find_cached("Qwen/Qwen3-TTS-12Hz-0.6B-Base")


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory) -> Path:
    """A folder with what the recipe of docs/voices.md makes of a Base: a LoRA adapter and a fine-tune."""
    folder, timbre = tmp_path_factory.mktemp("trained"), Voice.nobody(64, Checkpoint.open(base).fingerprint)
    (folder / "base").symlink_to(base)
    timbre.save(folder / "me.safetensors")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "qwen_tts", stand_in())
        follow({"TTSEngine": TTSEngine, "timbre": timbre, "train": train})["adapted"].close()
    return folder


@pytest.fixture
def workplace(hub, base, tmp_path, monkeypatch):
    """A folder with the files that the documents speak of."""
    monkeypatch.chdir(tmp_path)
    Path("base").symlink_to(base)
    for seed, name in enumerate(("me.wav", "me_again.wav")):
        soundfile.write(name, reference_audio(seed=seed), 24000)
    Path("chapter.txt").write_text("Hello there. This is a chapter.", encoding="utf-8")
    Path("book.md").write_text("# One\n\n[ada] Hello.\n\n# Two\n\n[max] Yes.\n", encoding="utf-8")
    Path("lines.txt").write_text("Hello.\nHow are you?\n", encoding="utf-8")
    Path("lines.jsonl").write_text('{"id": "one", "text": "Hello."}\n', encoding="utf-8")
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def server(hub):
    with running(lambda: TTSEngine.load("demo")) as server:
        until(lambda: server.service.state == "ready")
        yield server


def at_our_server(text: str, request) -> str:
    """The documents' server stands at port 8000."""
    if not re.search(r"(127\.0\.0\.1|localhost):8000", text):
        return text
    return re.sub(r"(127\.0\.0\.1|localhost):8000", f"127.0.0.1:{request.getfixturevalue('server').port}", text)


# ---------------------------------------------------------------- blocks and commands


@pytest.mark.parametrize(
    "name", [name for name in DOCS if list(blocks(name, "python")) and name not in PYTHON_ELSEWHERE]
)
def test_python_blocks_run_one_behind_the_other(name, workplace, request, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwen_tts", stand_in())
    names = {"__name__": "docs", "train": train}
    try:
        for line, text in blocks(name, "python"):
            ours = suited(at_our_server(text, request), workplace / "base")
            exec(compile("\n" * (line - 1) + ours, name, "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, TTSEngine):
                value.close()


LONG = {f"docs/{name}.md" for name in ("verification", "benchmarks", "voices", "cards")}
WITH_COMMANDS = [
    pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in GUIDES if shell_blocks(name)
]


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_command_lines_are_read_by_the_real_parsers_and_run_where_they_can(
    name, workplace, trained, request, capsysbinary
):
    for made in MADE:
        Path(made).symlink_to(trained / made)
    missing = set()
    for block in shell_blocks(name):
        for command in commands(at_our_server(block, request)):
            check(command)
            if not is_run(command):
                continue
            if command[0].startswith("qwen-") or shutil.which(command[0]):
                run(command)
            else:
                missing.add(command[0])
    if missing:
        told = f"not installed here, so its commands in {name} were not run: {', '.join(sorted(missing))}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(told)


def check(command: list[str]) -> None:
    """Is there such a command, with such options?"""
    first, *rest = command
    if first == "qwen-megakernel":
        cli.make_parser().parse_args(rest)
    elif first == "qwen-audiobook":
        audiobook.make_parser().parse_args(rest)
    elif first == "python":
        given = {word for word in rest if word.startswith("--")}
        known = options_of(ROOT / rest[0]).union(*(options_of(Path(module.__file__)) for module in (demo, options)))
        assert given <= known, command
    elif first == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M), command
    elif first == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = [extra for word in rest for extra in re.findall(r"^(?:qwen-megakernel|\.)\[(.*)\]$", word)]
        assert set(extras) <= set(project["optional-dependencies"]), command
    elif first == "serve":
        module, _, _ = rest[1].partition(":")
        args = fields_of(ROOT / (module.replace(".", "/") + ".py"), "Args")
        assert {word.partition("=")[0] for word in rest[2:]} <= args, command
    else:
        assert first in ("curl", *NOT_RUN), f"what is to become of this command? {command}"


def run(command: list[str]) -> None:
    if command[0] == "qwen-megakernel":
        assert cli.main(command[1:]) == 0, command
    elif command[0] == "qwen-audiobook":
        assert cli.run(audiobook.make_parser().parse_args(command[1:]), narrate_book) == 0, command
    else:
        subprocess.run([*command, "--fail", "--silent", "--show-error"], check=True, timeout=60)
    for word, file in zip(command, command[1:], strict=False):
        if word == "--output" and file != "-" and command[1] != "voices":
            ending = "*." + (command[command.index("--format") + 1] if "--format" in command else "wav")
            sounds = list(Path(file).glob(ending)) if command[1] == "batch" else [file]
            assert sounds, command
            for sound in sounds:
                samples, rate = soundfile.read(sound)
                assert rate == 24000 and np.abs(samples).max() > 0.001, command


def test_the_site_has_every_page_in_its_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"[\w-]+\.md$", menu, re.M)
    assert sorted(listed) == sorted(["index.md", *(path.name for path in (ROOT / "docs").glob("*.md"))])


def test_every_block_is_python_a_shells_or_a_picture():
    for name in DOCS:
        for language, text in FENCE.findall(TEXTS[name]):
            assert language in ("python", "sh", ""), f"{name}: nothing runs {language}"
            assert language or not INDENTED.search("    " + text.replace("\n", "\n    ")), f"{name}: {text}"


def test_what_is_not_run_is_there():
    everything = [command for name in GUIDES for block in shell_blocks(name) for command in commands(block)]
    assert set(NOT_RUN) <= {words for command in everything for words in (command[0], " ".join(command[:2]))}


def test_commands_and_options_within_sentences_exist():
    by_command = options_of_commands()
    known = options_of_books().union(*by_command.values(), FOREIGN_OPTIONS)
    known |= options_of(PIPECAT_RUNNER).union(*map(options_of, [Path(demo.__file__), *ROOT.glob("benchmarks/*.py")]))
    for name in GUIDES:
        for span in SPAN.findall(FENCE.sub("", TEXTS[name])):
            first, *rest = span.split() or [""]
            given = {word.partition("=")[0] for word in (first, *rest) if re.match(r"--[a-z]", word)}
            if first == "qwen-megakernel":
                assert rest[0] in by_command and given <= by_command[rest[0]], f"{name}: {span}"
            elif first == "make" and rest:
                check([first, *rest])
            elif first.startswith("--") or first == "python":
                assert given <= known, f"{name}: {span}"


def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {name for names in re.findall(r"^([a-z][a-z -]*):(?!=)", makefile, re.M) for name in names.split()}
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  make (\S+) +\S", told, re.M)
    assert sorted(listed) == sorted(targets) == sorted(re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split())


def test_checkpoints_are_published_ones():
    for name in GUIDES:
        for found in re.findall(r"Qwen/Qwen3-TTS-[\w.-]*\w", TEXTS[name]):
            assert found in PUBLISHED, f"{name}: {found}"


# ---------------------------------------------------------------- examples


def test_every_example_is_tested():
    paths = [path for path in ROOT.glob("examples/**/*") if path.is_file() and path.suffix != ".pyc"]
    there = {"kubernetes" if "kubernetes" in path.parts else path.name for path in paths}
    assert there == set(EXAMPLES)
    for name, test in EXAMPLES.items():
        assert Path(name).stem in (ROOT / "tests" / test).read_text(encoding="utf-8")


# ---------------------------------------------------------------- links and quotes


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings, and those that are written."""
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M):
        slug = (
            re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower().replace(" ", "-")
        )
        count = sum(other == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", other) is not None for other in found)
        found.add(f"{slug}-{count}" if count else slug)
    return found


def links(name: str) -> list[tuple[Path, str]]:
    """A document's own: file, anchor."""
    folder, found = (ROOT / name).parent, []
    for link in LINK.findall(FENCE.sub("", TEXTS[name])):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            found.append(((folder / path).resolve() if path else ROOT / name, anchor))
    return found


def test_every_link_leads_somewhere():
    for name in DOCS:
        for path, anchor in links(name):
            assert path.exists(), f"{name}: {path}"
            assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), f"{name}: {path.name}#{anchor}"


def test_every_document_is_found_from_the_readme():
    seen, coming = set(), [ROOT / "README.md"]
    while coming:
        path = coming.pop()
        if path not in seen:
            seen.add(path)
            name = path.relative_to(ROOT).as_posix()
            coming += [linked for linked, _ in links(name)] if name in TEXTS else []
    assert {path for path in (ROOT / "docs").rglob("*") if path.is_file()} <= seen


def test_what_code_cites_is_there():
    """The log by the anchor of an entry: a day has up to a dozen."""
    folders = ("qwen_megakernel", "qwen_check", "packages", "csrc", "benchmarks", "tools")
    kinds = (".py", ".cu", ".cuh", ".cpp")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds):
        for name, anchor, day in CITED.findall(path.read_text(encoding="utf-8")):
            assert not day, f"{path}: {day} without an anchor"
            assert anchor in anchors((ROOT / "docs" / name).read_text(encoding="utf-8")), f"{path}: {name}#{anchor}"


def test_files_that_are_named_exist():
    for name in GUIDES:
        for path in re.findall(r"\b(?:benchmarks|tests|docs|examples|csrc|tools)/[\w./-]*\w", TEXTS[name]):
            assert (ROOT / path).exists(), f"{name}: {path}"


def words_of(*paths: Path) -> str:
    """Every string of some modules, pieces of f-strings one by one."""
    said = []
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n".join(said)


def is_code(words: str) -> bool:
    try:
        ast.parse(words)
    except SyntaxError:
        return words.startswith(("-", "@", "qwen-megakernel ", "hf ", "make ", "GET "))
    return True


def test_what_troubleshooting_quotes_is_said_somewhere():
    """In `type`, with … for what differs; what is neither ours nor code is Pipecat's or uvicorn's."""
    ours = words_of(*(ROOT / "qwen_megakernel").rglob("*.py"), *ROOT.glob("packages/*/*_*/**/*.py"))
    others = ("pipecat.services.tts_service", "pipecat.pipeline.worker")
    others += ("uvicorn.protocols.websockets.websockets_sansio_impl",)
    theirs = words_of(*(Path(importlib.util.find_spec(module).origin) for module in others))
    quotes = [span for span in SPAN.findall(FENCE.sub("", TEXTS["docs/troubleshooting.md"])) if " " in span]
    quotes = [span for span in quotes if not is_code(span)]
    assert quotes
    for quote in quotes:
        for piece in re.split("…|QWEN_MEGAKERNEL_TOKEN", quote):
            assert piece.strip(" :") in ours or piece.strip(" :") in theirs, quote
