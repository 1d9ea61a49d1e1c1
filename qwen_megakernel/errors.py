"""Every error the package raises on purpose.

    TTSError
    ├── CheckpointError            a checkpoint folder that cannot be trusted: name, shape, value, layout
    │   └── CheckpointNotFoundError   nothing under that name: no folder, not in the hub cache, no network
    ├── BackendError               the backend asked for cannot run on this machine
    ├── RequestError (ValueError)  what the caller asked for is refused, nothing running is harmed
    │   ├── TextTooLongError       the text needs more positions than a slot has
    │   └── AudioError             reference audio that cannot be used
    ├── EngineBusyError            every slot is taken
    ├── EngineClosedError          the engine was closed, or its owner thread died
    └── KernelFault                a wait inside the kernel outlasted its limit; the context lives, `recover()`

Messages say what was expected, what came, and what to do.
"""


class TTSError(Exception):
    """Base of every error of this package."""


class CheckpointError(TTSError):
    """A checkpoint that does not hold what its own config.json promises."""


class CheckpointNotFoundError(CheckpointError):
    """No checkpoint was found under the name given."""


class BackendError(TTSError):
    """The requested backend cannot run here."""


class RequestError(TTSError, ValueError):
    """A request the engine refuses; it takes nothing and harms nobody."""


class TextTooLongError(RequestError):
    """The text cannot fit into one slot."""


class AudioError(RequestError):
    """Reference audio that is missing, unreadable, silent, too short or too long."""


class EngineBusyError(TTSError):
    """All slots are taken; try again when one is free."""


class EngineClosedError(TTSError):
    """The engine is closed."""


class KernelFault(TTSError):
    """A wait inside the kernel gave up; the launch ended normally and its results mean nothing."""
