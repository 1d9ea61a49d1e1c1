"""AAC in an MPEG-4 file (.m4a, .m4b), with chapter marks. PyAV writes it (extra [serve])."""

from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import numpy as np

ENDINGS = (".m4a", ".m4b")
_BITS = 96_000  # per second


def missing() -> str | None:
    """Why such files cannot be written here, and what to do; None if they can."""
    if find_spec("av") is None:
        return "needs the package av: in the checkout, pip install -e '.[serve]', or choose another format"
    return None


class Mpeg4Sound:
    """A mono sound file; FFmpeg writes it."""

    def __init__(self, target: Any, rate: int, chapters: list[tuple[int, str]]):
        """
        Args:
            target: has `write`, `seek` and `tell`, like a file opened for binary writing.
            rate: sample rate in Hz.
            chapters: first sample and title of each. `close` reads them, because they come while sound is written.
        """
        import av  # imported here, because it loads FFmpeg, which other formats do not need

        self._new_frame = av.AudioFrame.from_ndarray
        self._container = av.open(target, "w", format="ipod")
        self._stream = self._container.add_stream("aac", rate=rate, layout="mono")
        self._stream.bit_rate = _BITS
        self._rate, self._chapters, self._samples = rate, chapters, 0
        self._closed = False

    def write(self, samples: np.ndarray) -> None:
        """Append int16 [n]."""
        if not len(samples):
            return
        frame = self._new_frame(np.ascontiguousarray(samples)[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._samples
        self._samples += len(samples)
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    def close(self) -> None:
        """Complete the file. Nothing can be written afterwards; another call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._samples:
            for packet in self._stream.encode(None):
                self._container.mux(packet)
        # The first chapter begins with the file, so that it includes the silence before its first sound.
        starts = [0, *(start for start, _ in self._chapters[1:]), self._samples]
        marks = [
            {"id": n, "start": starts[n], "end": starts[n + 1], "time_base": Fraction(1, self._rate)}
            | {"metadata": {"title": title}}
            for n, (_, title) in enumerate(self._chapters)
        ]
        # FFmpeg writes the marks at the end of the file; they are not known at its beginning.
        self._container.set_chapters(marks)
        self._container.close()
