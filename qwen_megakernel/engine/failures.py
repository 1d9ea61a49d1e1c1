"""Failures: an error ends the sequences that it concerns, and no others."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.sequence import SpeechSequence
from qwen_megakernel.errors import KernelFault, SpeechError

log = logging.getLogger(__name__)

MOST_FAULTS = 3
"""Kernel faults in a row, with no sound between them, after which the kernels are given up. A guess: one may be chance,
and a second one may follow from it."""
MOST_FAULTS_ON_TRIAL = 2
"""The same on a card that only the self-check has tried. There a second fault is more likely the kernel's own."""


class Failures:
    """`alone` and `together` do not catch a KernelFault, because it concerns every sequence (`all`). Nor do they catch
    what `check_device` raises, because it ends the engine."""

    def __init__(self, admission: Admission, check_device: Callable[[], None], void: Callable[[], None] | None = None):
        """`check_device`: raises the device's error if the device is lost. `void`: called once when kernels on trial
        are given up. None: they are not on trial."""
        self._admission = admission
        self._check_device = check_device
        self._void = void
        self._most = MOST_FAULTS if void is None else MOST_FAULTS_ON_TRIAL
        self.in_a_row = 0  # kernel faults since the last sound

    @property
    def too_many(self) -> bool:
        """Are the kernels to be given up?"""
        return self.in_a_row >= self._most

    def alone(self, sequence: SpeechSequence, step: Callable[..., str | None], *args: object) -> None:
        """Run one step of a sequence. If it returns a finish reason or raises, this sequence alone ends."""
        if sequence.result.settled:
            return
        try:
            reason = step(sequence, *args)
            if reason is not None:
                self._admission.settle(sequence, reason)
        except KernelFault:
            raise
        except BaseException as error:
            self._admission.settle(sequence, error=error)
            log.exception("an utterance failed")
            if not isinstance(error, SpeechError):
                self._check_device()

    @contextlib.contextmanager
    def together(self, sequences: list[SpeechSequence], what: str) -> Iterator[None]:
        """Work for several sequences. If it raises, they all end."""
        try:
            yield
        except KernelFault:
            raise
        except Exception as error:
            self._check_device()
            for sequence in sequences:
                self._admission.settle(sequence, error=error)
            log.exception("%s failed", what)

    def all(self, running: list[SpeechSequence], error: KernelFault) -> None:
        """End all running sequences after a kernel fault."""
        self._admission.tally("kernel_faults")
        self.in_a_row += 1
        for sequence in running:
            self._admission.settle(sequence, error=error)
        if self.too_many and self._void:
            void, self._void = self._void, None
            void()
