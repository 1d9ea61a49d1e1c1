"""Observed: what an engine tells about itself."""

from qwen_megakernel.engine.core import EngineCore
from qwen_megakernel.engine.snapshot import Snapshot, snapshot_of
from qwen_megakernel.model.prompt import PromptBuilder


class Observed:
    """The part of `TTSEngine` that answers questions."""

    _core: EngineCore
    _prompts: PromptBuilder
    backend: str

    @property
    def slots(self) -> int:
        """How many utterances are spoken at once: `max_streams`, or fewer if the device sustains fewer."""
        return self._core.admission.running_limit

    def health(self) -> dict:
        """The engine's state. `status` is "ok", "draining", "closed" or "dead" (then with `error`). Of `max_streams`,
        `sustained` run at once for live listeners. `streams` utterances are open: of these, `running` have a slot and
        `queued` wait for one. `backend` is the attribute."""
        admission, slots = self._core.admission, self._core.loop.slots
        status = (
            "dead" if admission.fault else "closed" if admission.closed else "draining" if admission.draining else "ok"
        )
        health = {
            "status": status,
            "backend": self.backend,
            "streams": len(admission.open),
            "running": len(slots.running),
            "queued": len(slots.waiting),
            "max_streams": self._core.slots,
            "sustained": admission.running_limit,
        }
        return health | ({"error": repr(admission.fault)} if admission.fault else {})

    def metrics(self) -> dict[str, int]:
        """Counters since load and warm-up: utterances and frames. Utterances are counted by their end (eos, length,
        runaway, cancelled, failed), runaways by their kind (runaway_repeats, _silence, _babble). Further: said again
        (retries), refused by a full engine (busy), failed in the queue (timed_out), kernel_faults."""
        return self._core.admission.counts

    def reset_metrics(self) -> None:
        """Set the counters of `metrics()` to 0, as after a warm-up. No utterance may be open."""
        self._core.admission.forget()

    def snapshot(self) -> Snapshot:
        """What the engine holds at this moment, for tests and for finding leaks."""
        return snapshot_of(self._core, self._prompts.kept_openings)

    def count_retry(self) -> None:
        """For `metrics()`: an utterance is said again."""
        self._core.admission.tally("retries")
