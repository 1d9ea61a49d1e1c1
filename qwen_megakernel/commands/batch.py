"""`qwen-megakernel batch`: a sound file for every line of an input, as many at once as the engine has slots for."""

import argparse
import hashlib
import json
import reprlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from qwen_megakernel import TTSEngine
from qwen_megakernel.choices import MANIFEST
from qwen_megakernel.commands.batch_input import Line, count_lines, kind_of, read_lines
from qwen_megakernel.commands.manifest import Manifest
from qwen_megakernel.commands.options import (
    check_voice,
    engine_options,
    shown,
    slots_of,
    voice_options,
    voices_in,
)
from qwen_megakernel.commands.output import SpeechFile, check_format
from qwen_megakernel.commands.speak import WAIT_S, ended_like_ctrl_c, parts_of
from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.errors import EngineClosed, TTSError, VoiceError
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.server.process import load_for_good
from qwen_megakernel.speech.jobs import Job, JobResults
from qwen_megakernel.speech.mapping import SILENTLY, say
from qwen_megakernel.speech.options import RequestOptions, options_of
from qwen_megakernel.speech.request import SpeechRequest
from qwen_megakernel.speech.retries import ended_badly
from spoken_text.lexicon import lexicon_text

_SHOWN = 20  # failed lines to print at the end; the manifest has them all
_WRITERS, _BACKLOG = 8, 16
"""Threads that encode and write files. The next one gets files only while those before it have so many each: with a
slow disk, or a format that takes long. Two compete with the engine's thread more than one: on 2 cores with a simulated
GPU as fast as the demo voice's, a batch made 760 and 731 seconds of audio a second with one writer, 704 and 591 with
two (docs/log/2026-11-24.md#batch-runs-thread)."""


def run(args: argparse.Namespace) -> int:
    kind = kind_of(args.input, args.input_format)
    check_format("--format", f"x.{args.format}")
    options, voices = voice_options(args, "batch"), voices_in(args.voices)
    with ended_like_ctrl_c(), closing(Manifest(args.output)) as manifest:
        total = count_lines(args.input, kind)
        threads = manifest.threads() if args.threads is None else args.threads
        slots = slots_of(args)
        how = engine_options(args, max_streams=slots, max_queue=slots, queue_timeout=WAIT_S, threads=threads)
        with load_for_good(args.model, how) as engine:
            if args.ref_audio is not None:
                options["voice"] = engine.create_voice(args.ref_audio, args.ref_text)
            batch = _Batch(args, engine, manifest, options, voices)
            jobs = JobResults(map(batch.job, batch.lines_to_do(kind)), at_once=2 * engine.slots, ordered=False)
            left = "" if total is None else "/{total_fmt} lines |{bar}| about {remaining} left"
            bar = tqdm(total=total, bar_format="{n_fmt}" + left + "{postfix}", leave=False, disable=None)
            began = time.monotonic()
            try:
                with bar, closing(batch), closing(jobs) as entries:
                    for entry in entries:
                        batch.add(entry)
                        rate = batch.seconds / max(1e-9, time.monotonic() - began)
                        bar.set_postfix_str(f"{rate:.1f} s of audio a second", refresh=False)
                        bar.update(batch.done + batch.kept + batch.failures - bar.n)
            except BaseException:
                print(f"stopped {batch.told}; run the same command again to go on", file=sys.stderr)
                raise
            manifest.finish()
    return batch.report()


@dataclass
class _Batch:
    """The state of a batch: what was spoken, kept and failed."""

    _args: argparse.Namespace
    _engine: TTSEngine
    _manifest: Manifest
    _options: RequestOptions
    _voices: dict[str, Voice]
    done: int = 0  # lines spoken in this run
    kept: int = 0  # lines from earlier runs
    failures: int = 0  # lines that failed
    seconds: float = 0.0  # of audio made in this run
    failed: list[dict[str, Any]] = field(default_factory=list)  # the first failed lines, with their errors

    def __post_init__(self) -> None:
        args, voice = self._args, self._options.get("voice")
        said = {name: getattr(args, name) for name in options_of("batch") if name not in ("voice", "lexicon")}
        self._shared = [args.model, args.adapters, args.weights, args.format, said]
        self._shared += [voice.digest.hex() if isinstance(voice, Voice) else None]
        self._shared += [args.lexicon and lexicon_text(args.lexicon)]
        self._writers = [ThreadPoolExecutor(1, thread_name_prefix="qwen_megakernel write") for _ in range(_WRITERS)]
        self._unwritten = [0] * _WRITERS  # files that each has; the jobs' thread counts them

    def close(self) -> None:
        for writer in self._writers:
            writer.shutdown(cancel_futures=True)

    def lines_to_do(self, kind: str) -> Iterator[Line]:
        """The input's lines, except unchanged lines that were spoken before."""
        for line in read_lines(self._args.input, kind):
            if line.id and not line.error and (first := self._manifest.claim(line.id, line.number)) is not None:
                line = replace(line, error=f"line {first} has the id {line.id!r} already: give each line its own")
            before = self._manifest.entry(line.id) if line.id and not line.error else None
            if before and before["request"] == self._digest(line) and self._file(line).is_file():
                self.kept += 1
            else:
                yield line

    def _file(self, line: Line) -> Path:
        return self._args.output / f"{line.id}.{self._args.format}"

    def _digest(self, line: Line) -> str:
        """A hash that changes if the line, or how it is spoken, changes."""
        whole = [*self._shared, line.text, line.options]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]

    def job(self, line: Line) -> Job[dict[str, Any]]:
        """Speak a line into its file, and return its manifest entry. Raises RequestError: nothing can be written. Other
        lines could not be written either."""
        entry: dict[str, Any] = {"id": line.id, "line": line.number, "file": None, "seconds": None, "seed": None}
        entry |= {"finish_reason": None, "attempts": None, "error": line.error}
        entry |= {"request": self._digest(line), "threads": self._engine.threads}
        if line.error:
            return entry
        audios: list[Audio] = []
        try:
            request, engine = self._request(line), self._engine
            for part in parts_of(engine, line.text, request):
                audios.append((yield from say(engine, part, request)))
        except EngineClosed:
            raise
        except TTSError as error:
            return entry | {"error": str(error)}
        path = self._file(line)
        writer = next((n for n, files in enumerate(self._unwritten) if files < _BACKLOG), -1)
        self._unwritten[writer] += 1

        def begin(ended: Callable[[], None]) -> "Future[None]":
            future = self._writers[writer].submit(self._write, path, audios)
            future.add_done_callback(lambda _future: ended())
            return future

        yield begin
        self._unwritten[writer] -= 1
        worst = next((audio for audio in audios if ended_badly(audio)), audios[-1])
        entry |= {"file": path.name, "seconds": round(sum(a.duration_s for a in audios), 3)}
        entry["seed"] = request.seed
        return entry | {"finish_reason": worst.finish_reason, "attempts": max(audio.attempts for audio in audios)}

    def _write(self, path: Path, audios: list[Audio]) -> None:
        with SpeechFile(str(path), self._engine.sample_rate, in_memory=True) as file:
            for audio in audios:
                file.write(pcm16(audio.samples))

    def _request(self, line: Line) -> SpeechRequest:
        own: RequestOptions = {**line.options}
        if "seed" not in own:  # from the id, so that the order of lines does not matter
            base = self._options.get("seed", 0)
            own["seed"] = int.from_bytes(hashlib.sha256(f"{base}\n{line.id}".encode()).digest()[:4]) >> 1
        if name := own.get("voice"):
            if name not in self._voices:
                known = ", ".join(self._voices) or "none: name their folder with --voices"
                raise VoiceError(f"unknown voice {reprlib.repr(name)}; known: {known}")
            own["voice"] = self._voices[name]
        options = cast(RequestOptions, {**SILENTLY, **self._options, **own})
        check_voice(self._engine.variant, options)
        return self._engine.request(**options)

    def add(self, entry: dict[str, Any]) -> None:
        """Count a line that is done or has failed."""
        self._manifest.add(entry)
        if entry["error"] is None:
            self.done, self.seconds = self.done + 1, self.seconds + entry["seconds"]
            return
        self.failures += 1
        if len(self.failed) < _SHOWN:
            self.failed.append(entry)

    @property
    def told(self) -> str:
        """The progress so far, in words."""
        told = f"{self.done} lines spoken, {self.seconds:.1f} s of audio"
        told += f"; {self.kept} were there already" if self.kept else ""
        return told + (f"; {self.failures} failed" if self.failures else "")

    def report(self) -> int:
        """Print what was done and what failed, and return the process's exit code."""
        print(f"wrote   {self._args.output.resolve()}: {self.told}")
        for entry in self.failed:
            named = f" ({entry['id']})" if entry["id"] else ""
            print(shown(f"failed  line {entry['line']}{named}: {entry['error']}"), file=sys.stderr)
        if more := self.failures - len(self.failed):
            print(f"failed  {more} more; {MANIFEST} lists them all", file=sys.stderr)
        return 1 if self.failures else 0
