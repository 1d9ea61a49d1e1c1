"""Engines that several users in one process share: loaded once for the first, closed behind the last."""

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass

from qwen_megakernel.engine import TTSEngine

_WARM_UP_TEXT = "Hello there."


@dataclass
class _Shared:
    engine: "Future[TTSEngine]"
    users: int = 0


_shared: dict[tuple, _Shared] = {}
_lock = threading.Lock()


async def acquire(model: str, **options) -> TTSEngine:
    """The process's engine for these arguments of `TTSEngine.load`; loaded, and warmed with a real utterance, in a
    thread of its own if nobody has it yet. Every `acquire` needs a `release`.

    Raises:
        TTSError: it cannot be loaded; the next `acquire` tries again.
    """
    key = (str(model), *sorted((name, str(value)) for name, value in options.items()))
    with _lock:
        shared = _shared.get(key)
        first = shared is None
        if first:
            shared = _shared[key] = _Shared(Future())
        shared.users += 1
    if first:
        threading.Thread(target=_load, args=(key, shared, model, options), name="qwen_megakernel load").start()
    try:
        return await asyncio.shield(asyncio.wrap_future(shared.engine))
    except BaseException:
        _leave(key, shared)
        raise


async def release(engine: TTSEngine) -> None:
    """One user less; the last one closes the engine, in a thread."""
    with _lock:
        found = [(k, s) for k, s in _shared.items() if s.engine.done() and not s.engine.exception()]
    for key, shared in found:
        if shared.engine.result() is engine and _leave(key, shared):
            await asyncio.to_thread(engine.close)


def _leave(key: tuple, shared: _Shared) -> bool:
    """True for the last one."""
    with _lock:
        shared.users -= 1
        last = shared.users <= 0 and _shared.get(key) is shared
        if last:
            del _shared[key]
    if last and not shared.engine.done():  # its only user was cancelled while it loaded
        shared.engine.add_done_callback(lambda loaded: None if loaded.exception() else loaded.result().close())
        return False
    return last


def _load(key: tuple, shared: _Shared, model: str, options: dict) -> None:
    try:
        engine = TTSEngine.load(model, **options)
        warm_up(engine)
    except BaseException as error:
        with _lock:
            if _shared.get(key) is shared:
                del _shared[key]
        shared.engine.set_exception(error)
    else:
        shared.engine.set_result(engine)


def warm_up(engine: TTSEngine) -> None:
    """One short utterance, so that the first caller does not pay for what is made at first use. A Base checkpoint is
    warmed by its first voice."""
    if engine.variant != "base":
        engine.generate(_WARM_UP_TEXT, max_frames=4)
