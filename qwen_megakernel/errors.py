"""Every error the package raises on purpose.

    TTSError
    ├── CheckpointError            a checkpoint folder that cannot be trusted: name, shape, value, layout
    │   └── CheckpointNotFoundError   nothing under that name: no folder, not in the hub cache, no network
    ├── BackendError               the backend asked for cannot run on this machine
    │   └── OutOfMemoryError       no memory is left; names the setting to lower
    ├── RequestError (ValueError)  what the caller asked for is refused, nothing running is harmed
    │   ├── TextError              not a string, not valid Unicode, blank; a tag or a lexicon that cannot be used
    │   │   ├── NoWordsError       blank, or nothing but signs that are not spoken
    │   │   ├── TextTooLongError   the text needs more positions than a slot has
    │   │   └── TextEndedError     more text after its end
    │   ├── SpeakerError           unknown, or the checkpoint has no named speakers
    │   ├── LanguageError          unknown
    │   ├── InstructError          not a string, not valid Unicode; on a server, ignored by the checkpoint
    │   ├── SpeedError             a speed out of its range
    │   ├── VoiceError             a voice that is missing, broken, or of another checkpoint
    │   ├── AudioError             reference audio that cannot be used
    │   └── SamplingError          a sampling value out of its range
    ├── EngineBusy                 every slot is taken and the queue is full, or the wait in it was too long
    ├── EngineClosed               the engine was closed
    │   └── EngineDied             its thread died, or its device was lost; nobody closed it
    ├── SpeechError                samples that are not numbers; their utterance has failed
    ├── SpeechCutError             the model did not find the end of its speech; another seed may
    ├── CallbackError              a callback that did not return; its utterance has failed
    └── KernelFault                a wait inside the kernel outlasted its limit; the context lives, `recover()`

Messages say what was expected, what came, and what to do.
Those about text come from spoken_text, which raises them too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from spoken_text.errors import LanguageError as LanguageError
from spoken_text.errors import NoWordsError as NoWordsError
from spoken_text.errors import RequestError as RequestError
from spoken_text.errors import TextError as TextError
from spoken_text.errors import TextTooLongError as TextTooLongError
from spoken_text.errors import TTSError as TTSError


class CheckpointError(TTSError):
    """A checkpoint that does not hold what its own config.json promises."""


class CheckpointNotFoundError(CheckpointError):
    """No checkpoint was found under the name given."""


class BackendError(TTSError):
    """The requested backend cannot run here."""


class OutOfMemoryError(BackendError):
    """The model and its slots, or one utterance more, do not fit into the device's memory."""

    @classmethod
    def of(cls, error: BaseException) -> "OutOfMemoryError | None":
        """This error for another library's that says the same; None: it says something else.

        Python, NumPy and torch on a GPU have types for it. Torch on a CPU, CUDA's own calls and cuBLAS have words:
        "DefaultCPUAllocator: not enough memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED".
        """
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if isinstance(error, TTSError) or not kinds & {"MemoryError", "RuntimeError", "OSError", "SafetensorError"}:
            return None
        words = str(error).lower()
        told = "out of memory" in words or "alloc_failed" in words or "memory" in words and "alloc" in words
        if not (told or kinds & {"MemoryError", "OutOfMemoryError"}):
            return None
        return cls(f"no memory was left ({error or 'MemoryError'}); lower max_streams, or let other programs use less")


@contextmanager
def memory_told() -> Iterator[None]:
    """Raises OutOfMemoryError: in place of another library's error that says the same."""
    try:
        yield
    except Exception as error:
        if told := OutOfMemoryError.of(error):
            raise told from error
        raise


class TextEndedError(TextError):
    """A piece of text that came after the end of its utterance's text."""


class SpeakerError(RequestError):
    """A speaker the checkpoint does not have."""


class InstructError(RequestError):
    """An instruct that cannot be followed."""


class SpeedError(RequestError):
    """A speed out of its range."""


class VoiceError(RequestError):
    """A voice this checkpoint cannot speak with."""


class AudioError(RequestError):
    """Reference audio that is missing, unreadable, silent, too short or too long."""


class SamplingError(RequestError):
    """A sampling value out of its range."""


class EngineBusy(TTSError):
    """All slots are taken and so is the queue; try again later."""


class EngineClosed(TTSError):
    """The engine is closed."""


class EngineDied(EngineClosed):
    """The engine ended by itself: its thread died, or its device does not answer."""


class SpeechError(TTSError):
    """The model's samples for an utterance are not numbers."""


class SpeechCutError(TTSError):
    """Speech that reached the end of its slot, or the checkpoint's limit, before the model ended it."""

    @staticmethod
    def words(seconds: float, where: str, remedy: str = "") -> str:
        """Its message, by the seconds that were spoken, where it was cut, and what else may help."""
        words = "the model did not find its end. Try again with another seed, or shorten the text"
        return f"speech was cut after {seconds:.1f} s, {where}: {words}{remedy}"


class CallbackError(TTSError):
    """An utterance's `on_chunk` did not return in time."""


class KernelFault(TTSError):
    """A wait inside the kernel timed out. The launch ended normally, but its results are invalid."""
