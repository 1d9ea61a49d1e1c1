"""Failures: what goes wrong ends those it concerns, and nobody else."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from qwen_megakernel.engine.admission import Admission
from qwen_megakernel.engine.sequence import Sequence
from qwen_megakernel.errors import KernelFault, SpeechError

log = logging.getLogger(__name__)

MOST_FAULTS = 3
"""Kernel faults in a row, with no sound between them, after which a kernel is given up. A guess: one may be chance, and
a second its echo."""
MOST_FAULTS_ON_TRIAL = 2
"""The same on a card that the self-check alone speaks for. A second fault there is more likely the kernel's own."""


class Failures:
    """`alone` and `together` let a KernelFault pass, which concerns every sequence (`all`). They let pass what
    `check_device` raises, which ends the engine.

    Attributes:
        in_a_row: kernel faults since the last sound.
    """

    def __init__(self, admission: Admission, check_device: Callable[[], None], void: Callable[[], None] | None = None):
        """
        Args:
            check_device: raises what the device raises, if it is lost.
            void: called once when the kernels are given up, which are then on trial; None: they are not.
        """
        self._admission, self._check_device, self._void = admission, check_device, void
        self._most = MOST_FAULTS if void is None else MOST_FAULTS_ON_TRIAL
        self.in_a_row = 0

    @property
    def too_many(self) -> bool:
        """Are the kernels to be given up?"""
        return self.in_a_row >= self._most

    def alone(self, sequence: Sequence, step: Callable[..., str | None], *args) -> None:
        """One step of a sequence, which ends it if it returns a finish reason. What it raises ends this one alone."""
        if sequence.settled:
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
    def together(self, sequences: list[Sequence], what: str) -> Iterator[None]:
        """Work for several sequences. What it raises ends them all."""
        try:
            yield
        except KernelFault:
            raise
        except Exception as error:
            self._check_device()
            for sequence in sequences:
                self._admission.settle(sequence, error=error)
            log.exception("%s failed", what)

    def all(self, running: list[Sequence], error: KernelFault) -> None:
        """A kernel gave up: whatever runs ends."""
        self._admission.tally("kernel_faults")
        self.in_a_row += 1
        for sequence in running:
            self._admission.settle(sequence, error=error)
        if self.too_many and self._void:
            void, self._void = self._void, None
            void()
