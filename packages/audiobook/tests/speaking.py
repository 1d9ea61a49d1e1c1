"""An engine that speaks noise at once, for tests of what a book's command makes of speech."""

import zlib
from types import SimpleNamespace

import numpy as np

from qwen_audiobook.cli import make_parser
from qwen_audiobook.command import narrate_book
from qwen_megakernel.cli import run
from qwen_megakernel.commands.narrate import Narrated
from spoken_text.spoken_text import SpokenText

RATE = 24000


class NoiseEngine:
    """Each text has its own noise, by its seed."""

    sample_rate, speakers, variant, slots, threads, backend = RATE, ("ada", "max"), "custom_voice", 2, 1, "torch"

    def __init__(self, stop_behind: int | None = None):
        """`stop_behind`: Ctrl-C comes after so many pieces."""
        self.spoken: list[tuple[str, str | None]] = []  # texts and speakers
        self._stop_behind = stop_behind

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass

    def parts(self, text: SpokenText, _request) -> list[SpokenText]:
        return [text]

    def request(self, **options):
        return SimpleNamespace(**{"seed": None, "speaker": None} | options)

    def narrate(self, _engine, pieces, after_s, request_of, binder, _progress) -> Narrated:
        """As `narrate.narrate`."""
        for piece in pieces:
            if len(self.spoken) == self._stop_behind:
                raise KeyboardInterrupt
            request = request_of(piece)
            rng = np.random.default_rng(zlib.crc32(f"{request.seed} {request.speaker} {piece.text}".encode()))
            sound = rng.uniform(-0.3, 0.3, RATE // 10 + 100 * len(piece.text)).astype(np.float32)
            binder.begin(piece)
            for part in np.array_split(sound, rng.integers(1, 4)):
                binder.add(part)
            binder.end()
            self.spoken.append((piece.text, request.speaker))
        if binder.pauses is not None:
            binder.silence(after_s)
        return Narrated(seconds=binder.seconds, ends=["eos"])


def speak(monkeypatch, *args: object, stop_behind: int | None = None) -> tuple[int, NoiseEngine]:
    """The command's exit code, and the engine that spoke."""
    engine = NoiseEngine(stop_behind)
    monkeypatch.setattr("qwen_audiobook.command.load", lambda *_args: engine)
    monkeypatch.setattr("qwen_audiobook.command.narrate", engine.narrate)
    return run(make_parser().parse_args([*map(str, args), "--device", "cpu"]), narrate_book), engine
