"""Installs what `make dist` built as a stranger would, in empty folders away from the checkout, and speaks there:
`make test-dist`.

For each Python, in environments of their own: spoken-text alone, then a sentence; wheel and sdist by pip, then
`doctor`, `speak` and `serve`; qwen-audiobook beside the wheel, then a book; each extra alone by uv, then its entrance;
the wheel by `uv tool run`. It ends with a table, and with 1 if anything failed or nothing ran. Without an NVIDIA GPU a
Python for which only CUDA's torch is to be had (gigabytes) is left out, and the table says so; UV_TORCH_BACKEND=cpu
takes PyTorch's own CPU builds.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import wave
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
UV = Path(sys.executable).with_name("uv")
ENTRANCES = {
    "serve": "qwen_megakernel.server.app",
    "wyoming": "qwen_megakernel.server.wyoming.api",
    "pipecat": "qwen_megakernel.pipecat_tts, qwen_megakernel.websocket_tts",
    "bot": "qwen_megakernel.bot_page, qwen_megakernel.pipecat_tts",
    "ray": "qwen_megakernel.serve_ray",
}
"""Extra -> what is imported with it alone."""
READ = {"de": ("Es kostet 5 €.", "Es kostet fünf Euro."), "en": ("It is 5 km.", "It is five kilometers.")}
"""Language -> a sentence, and what spoken-text makes of it."""
COLD_S = 0.5
"""CPU seconds that it may take for one, with the start of the process: 0.2 where little else runs."""
BOOK = "---\ntitle: Mine\n---\n# One\n\nHello.\n\n# Two\n\nIt is late.\n"
HAS_GPU = shutil.which("nvidia-smi") is not None
PATIENCE_S = 120


def environment() -> dict[str, str]:
    """Of every command: nothing leads to this checkout, and without a GPU torch is the release with a CPU build."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if not HAS_GPU:
        kept |= dict.fromkeys(("PIP_CONSTRAINT", "UV_CONSTRAINT"), str(ROOT / "constraints-cpu.txt"))
    return kept


class Place:
    """An empty folder with a virtual environment in it."""

    def __init__(self, folder: Path, python: str):
        folder.mkdir()
        self.folder, self.bin = folder, folder / "venv" / "bin"
        self.run(python, "-m", "venv", "venv")

    def run(self, *command: str | Path) -> str:
        """What it writes to standard output. Raises CalledProcessError."""
        done = subprocess.run(
            command, cwd=self.folder, env=environment(), stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout

    def pip(self, *arguments: str) -> str:
        return self.run(self.bin / "python", "-m", "pip", "install", "--quiet", "--find-links", str(DIST), *arguments)

    def uv(self, *arguments: str | Path) -> None:
        self.run(UV, "pip", "install", "--quiet", "--find-links", DIST, "--python", self.bin / "python", *arguments)

    def imports(self, modules: str) -> None:
        """Raises CalledProcessError, also if the package does not come from this environment."""
        home = f"assert qwen_megakernel.__file__.startswith({str(self.folder)!r}), qwen_megakernel.__file__"
        self.run(self.bin / "python", "-c", f"import qwen_megakernel, {modules}; {home}")

    def size(self) -> str:
        """Of all that is installed."""
        return megabytes(
            sum(p.stat().st_size for p in self.bin.parent.rglob("*") if p.is_file() and not p.is_symlink())
        )


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def check_sound(path: Path) -> None:
    """Raises AssertionError: it holds less than half a second, or silence."""
    with wave.open(str(path)) as sound:
        pcm = sound.readframes(sound.getframerate() * 600)
    assert len(pcm) > 24_000 and max(pcm[1::2]) > 3, f"{path}: expected speech, got {len(pcm)} bytes of silence or less"


def speaks(place: Place) -> None:
    """Doctor and speak. The wheel's data travel along: the kernel's sources and the demo voice."""
    place.imports("qwen_megakernel.speech.engine")
    assert "demo (bundled" in place.run(place.bin / "qwen-megakernel", "doctor")
    place.run(place.bin / "qwen-megakernel", "speak", "--text", "Hello there.", "-o", "hello.wav")
    check_sound(place.folder / "hello.wav")
    (package,) = place.bin.parent.glob("lib/*/site-packages/qwen_megakernel")
    assert (package / "csrc" / "frame").is_dir() and (package / "py.typed").is_file(), package


@contextmanager
def serving(place: Place):
    """The address of a server of the demo voice."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [place.bin / "qwen-megakernel", "serve", "--model", "demo", "--port", str(port)]
    server = subprocess.Popen(command, cwd=place.folder, env=environment())
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.terminate()
        # uvicorn ends by the signal that ended it
        assert server.wait(PATIENCE_S) == -signal.SIGTERM, f"serve ended with {server.returncode}"


def serves(place: Place) -> None:
    with serving(place) as (address, server):
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urlopen(f"{address}/ready") as answer:
                    assert answer.status == 200
                break
            except URLError as error:  # it refuses, or answers 503 while it loads
                assert server.poll() is None and time.monotonic() < until, f"/ready: {error}"
                time.sleep(0.2)
        body = json.dumps(
            {"model": "demo", "input": "Hello.", "voice": "ada", "response_format": "wav", "stream": False}
        )
        request = Request(f"{address}/v1/audio/speech", body.encode(), {"Content-Type": "application/json"})
        with urlopen(request) as answer:
            (place.folder / "served.wav").write_bytes(answer.read())
    check_sound(place.folder / "served.wav")


def children_s() -> float:
    """CPU seconds of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def reads(place: Place) -> float:
    """spoken-text, without torch. Returns the CPU seconds of the quickest process."""
    took = []
    for language, (written, spoken) in [*READ.items()] * 3:
        before = children_s()
        said = place.run(place.bin / "python", "-m", "spoken_text", "--language", language, written)
        took.append(children_s() - before)
        assert said.strip() == spoken, said
    assert not list(place.bin.parent.glob("lib/*/site-packages/torch")), "spoken-text brought torch"
    assert min(took) < COLD_S, f"it read a sentence in {min(took):.2f} s, not in {COLD_S}"
    return min(took)


def narrates(place: Place) -> None:
    """A book in chapters with subtitles."""
    (place.folder / "book.md").write_text(BOOK, encoding="utf-8")
    book = ["--file", "book.md", "-o", "book.wav", "--split", "chapters", "--subtitles", "book.srt"]
    place.run(place.bin / "qwen-audiobook", *book)
    for number, sentence in (("01", "Hello."), ("02", "It is late.")):
        check_sound(place.folder / f"book-{number}.wav")
        assert sentence in (place.folder / f"book-{number}.srt").read_text(encoding="utf-8")


class NotRun(Exception):
    """A Python cannot be tried on this machine."""


def get_torch(place: Place) -> None:
    """Raises NotRun: for a machine without a GPU pip would fetch CUDA's torch. It asks for metadata alone."""
    if HAS_GPU:
        return
    if "UV_TORCH_BACKEND" in os.environ:  # uv knows PyTorch's index of CPU builds; pip then takes what is there
        place.uv("torch")
    report = json.loads(place.pip("--dry-run", "--report", "-", "torch"))
    if any(item["metadata"]["name"].startswith("nvidia-") for item in report["install"]):
        raise NotRun("no CPU build of torch for it here")


def version_of(python: str) -> str:
    """Raises NotRun: there is none, or only a name that starts none, as pyenv leaves them."""
    ask = [python, "-c", "import sys; print(sys.version.split()[0])"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise NotRun("no such Python here") from None


def try_python(python: str, wheel: Path, sdist: Path, folder: Path) -> Iterator[str]:
    """Everything with one Python; yields rows of the table. Raises NotRun, CalledProcessError or AssertionError."""
    text, books = one(DIST, "spoken_text-*.whl"), one(DIST, "qwen_audiobook-*.whl")
    alone = Place(folder / "text", python)
    alone.uv(text)
    yield f"{text.name} by uv: {alone.size()}; a sentence in {reads(alone):.2f} CPU seconds"

    by_pip = Place(folder / "wheel", python)
    get_torch(by_pip)
    by_pip.pip(str(wheel))
    speaks(by_pip)
    yield f"wheel by pip: {by_pip.size()} installed; doctor, speak"
    by_pip.pip(f"{wheel}[serve]")
    serves(by_pip)
    yield f"wheel[serve] by pip: {by_pip.size()}; serve"

    by_pip.pip(str(books))
    narrates(by_pip)
    yield f"{books.name} by pip: a book"

    as_tool = [UV, "tool", "run", "--quiet", "--find-links", DIST, "--python", by_pip.bin / "python", "--from", wheel]
    by_pip.run(*as_tool, "qwen-megakernel", "speak", "--text", "Hello.", "-o", "tool.wav")
    check_sound(by_pip.folder / "tool.wav")
    yield "wheel by uv tool run: speak"

    from_source = Place(folder / "sdist", python)
    get_torch(from_source)
    from_source.pip(f"{sdist}[serve]")
    speaks(from_source)
    serves(from_source)
    yield f"sdist[serve] by pip: {from_source.size()}; doctor, speak, serve"

    for extra, modules in ENTRANCES.items():
        alone = Place(folder / extra, python)
        alone.uv(f"{wheel}[{extra}]")
        alone.imports(modules)
        yield f"wheel[{extra}] by uv: {alone.size()}; import {modules}"
        shutil.rmtree(alone.folder)

    for companion in wheel.parent.glob("pipecat_qwen_megakernel-*.whl"):
        beside = Place(folder / "companion", python)
        beside.uv(f"{wheel}[pipecat]", companion)
        beside.imports("pipecat_qwen_megakernel")
        yield f"{companion.name} by uv: import pipecat_qwen_megakernel"


def one(folder: Path, pattern: str) -> Path:
    """Raises SystemExit: there is no such file, or more than one."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"expected one {pattern} in {folder}, found {len(found)}: `make dist` makes it")
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="install what `make dist` built, away from the checkout, and speak")
    parser.add_argument("pythons", nargs="+", help="interpreters; what is not here is left out")
    wheel, sdist = one(DIST, "qwen_megakernel-*.whl"), one(DIST, "qwen_megakernel-*.tar.gz")
    table = [f"{path.name}: {megabytes(path.stat().st_size)}" for path in sorted(DIST.iterdir())]
    ends: Counter[str] = Counter()
    for python in parser.parse_args().pythons:
        label = python
        try:
            label = f"Python {version_of(python)}"
            with tempfile.TemporaryDirectory(prefix="qwen-megakernel-") as folder:
                for row in try_python(python, wheel, sdist, Path(folder)):
                    table.append(f"{label}: {row}")
                    print(table[-1], flush=True)
            end = "passed"
        except NotRun as error:
            end = "skipped"
            table.append(f"{label}: not run: {error}")
        except (subprocess.CalledProcessError, AssertionError) as error:
            end = "failed"
            table.append(f"{label}: FAILED: {error}")
        ends[end] += 1
    print("", *table, sep="\n")
    print(f"{ends['passed']} passed, {ends['failed']} failed, {ends['skipped']} skipped")
    return 0 if ends["passed"] and not ends["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
