"""Engines whose parts a test may replace, made through the front door: over a backend of the test's own."""

import contextlib
from dataclasses import replace
from pathlib import Path

import torch
from waiting import PATIENCE_S, until

from qwen_megakernel import TTSEngine
from qwen_megakernel.backend.interfaces import LoadedModel
from qwen_megakernel.backend.select import Backend
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.errors import EngineClosed
from qwen_megakernel.model.text import TextTokenizer
from qwen_megakernel.trust.selection import Selection


class Probe:
    """A part of a backend. A test sets a method here; what it does not set goes to the real part."""

    def __init__(self, real):
        self.real = real

    def __getattr__(self, name: str):
        return getattr(self.real, name)


class ProbedBackend:
    """A backend that keeps hold of what it made.

    Attributes:
        decoder, vocoder: probes of the latest.
        check_device: what an engine calls to find out whether its device is lost.
    """

    def __init__(self, real: Backend):
        self.real = real

    def __getattr__(self, name: str):
        return getattr(self.real, name)

    def load(self, slots: int, max_positions: int, pages: int | None = None) -> LoadedModel:
        model = self.real.load(slots, max_positions, pages)
        self.decoder, self.vocoder, self.check_device = Probe(model.decoder), Probe(model.vocoder), model.check_device
        return replace(model, decoder=self.decoder, vocoder=self.vocoder, check_device=lambda: self.check_device())

    def lose_device(self, error: BaseException) -> None:
        """Whatever is launched from now on fails, and the device with it."""

        def lost(*_args):
            raise error

        self.decoder.launch = self.decoder.start = self.check_device = lost


def probed(
    model: str | Path,
    *,
    backend: str = "torch",
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    wrap: type[ProbedBackend] = ProbedBackend,
    **options,
) -> TTSEngine:
    """An engine with its `ProbedBackend` as `engine.probes`. `options` are `EngineOptions`'."""
    plan = Selection(backend, device, dtype).choose(Checkpoint.open(model))
    probes = wrap(replace(plan, vocoder_obstacle=None, void=None))  # our kernels, whether somebody checked them or not
    engine = TTSEngine(str(model), plan.checkpoint, probes, EngineOptions(**({"queue_timeout": PATIENCE_S} | options)))
    engine.probes = probes
    return engine


def fail(part: Probe, name: str, error: BaseException, *, times: int = 1, after: int = 0) -> None:
    """Calls of a method raise `error`, so many of them, behind the first `after`. What is collected is collected."""
    call, wrong = getattr(part, name), iter([None] * after + [error] * times)

    def failing(*args):
        error = next(wrong, None)
        said = call(*args) if error is None or name == "collect" else None
        if error:
            raise error
        return said

    setattr(part, name, failing)


def kill(engine: TTSEngine) -> None:
    """End an engine of `probed` as a lost device does."""
    engine.probes.lose_device(ZeroDivisionError("the device is lost"))
    with contextlib.suppress(EngineClosed):  # what was still running may have ended it already
        engine.submit("Hello.", max_frames=1)
    until(lambda: engine.health()["status"] == "dead")


def token_count(model: str, text: str) -> int:
    checkpoint = Checkpoint.open(model)
    return len(TextTokenizer(checkpoint.folder, checkpoint.config.talker.text_vocab_size).encode(text))
