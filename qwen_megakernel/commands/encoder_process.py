"""An encoder in a process of its own, for hours of sound.

FFmpeg's AAC takes 1,024 samples at a time, and PyAV waits for the interpreter after each of them. Beside an engine's
thread that leaves less than half of its speed (docs/log/2026-11-28.md#encoder-process).

    python -m qwen_megakernel.commands.encoder_process FILE_DESCRIPTOR

Standard input: a line of JSON and the cover's bytes. Then, for each block, its size in 4 bytes and its PCM16. A size of
0 ends the sound; a line of JSON with the chapters follows. The exit status is an errno if the file cannot be written.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

import numpy as np

from qwen_megakernel.errors import TTSError
from qwen_megakernel.speech.encoders import encoder

_SIZE = 4  # bytes of a block's size


class EncoderProcess:
    """An `Encoder` that leaves the work to another process. It raises OSError: the file cannot be written, or the
    process cannot be started. TTSError: it has ended otherwise."""

    def __init__(
        self,
        name: str,
        file: IO[bytes],
        rate: int,
        chapters: Sequence[tuple[int, str]],
        tags: Mapping[str, str],
        cover: bytes | None,
    ):
        """`file`: a real one, which only the process writes. For the others see `encoder`."""
        command = [sys.executable, "-m", __name__, str(file.fileno())]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[file.fileno()], env=env, start_new_session=True
        )  # a session of its own: Ctrl-C is for us
        self._chapters = chapters
        head = {"name": name, "rate": rate, "tags": dict(tags), "cover": len(cover or b"")}
        self._send(json.dumps(head).encode() + b"\n", cover or b"")

    def write(self, samples: np.ndarray) -> None:
        if len(samples):
            data = samples.astype("<i2", copy=False).tobytes()
            self._send(len(data).to_bytes(_SIZE, "little"), data)

    def close(self) -> None:
        self._send(bytes(_SIZE), json.dumps(self._chapters).encode() + b"\n")
        self._end()

    def _send(self, *parts: bytes) -> None:
        assert self._process.stdin
        try:
            for part in parts:
                self._process.stdin.write(part)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._end()

    def _end(self) -> None:
        self._process.communicate()
        status = self._process.returncode
        if status > 1:
            raise OSError(status, os.strerror(status))
        if status:
            raise TTSError(f"the encoder's process ended with status {status}: run the same command again")


def main() -> None:
    source = sys.stdin.buffer

    def read(size: int) -> bytes:
        if len(data := source.read(size)) < size:
            sys.exit(1)  # whoever speaks is gone
        return data

    head = json.loads(source.readline())
    chapters: list[tuple[int, str]] = []
    cover = read(head["cover"]) or None
    with open(int(sys.argv[1]), "r+b") as file:
        made = encoder(head["name"], file, head["rate"], chapters, head["tags"], cover)
        while size := int.from_bytes(read(_SIZE), "little"):
            made.write(np.frombuffer(read(size), "<i2"))
        chapters += map(tuple, json.loads(source.readline()))
        made.close()


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(error.errno)
