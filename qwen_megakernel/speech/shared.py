"""Engines that several users in one process share. The first user loads an engine, the last one closes it."""

import asyncio
import gc
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Unpack

from qwen_megakernel.backend.select import select_device
from qwen_megakernel.checkpoint.adapters import adapter_folders
from qwen_megakernel.checkpoint.dtypes import dtype_of, vocoder_dtype_of
from qwen_megakernel.checkpoint.fp8 import name_of
from qwen_megakernel.checkpoint.load import find_cached
from qwen_megakernel.choices import parts_of
from qwen_megakernel.engine.options import EngineArguments, EngineOptions
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.speech.engine import TTSEngine

_WARM_UP_TEXT = "Hello there."


@dataclass(eq=False)
class _SharedEngine:
    engine: "Future[TTSEngine]"
    users: int = 0

    @property
    def usable(self) -> bool:
        """It is being loaded, or it is alive."""
        if not self.engine.done():
            return True
        return not self.engine.exception() and self.engine.result().health()["status"] == "ok"


_Key = tuple[str, EngineOptions]
_shared: dict[_Key, _SharedEngine] = {}  # by model and options: what the next `acquire` finds
_used: set[_SharedEngine] = set()  # with at least one user; also a dead engine that was replaced
_lock = threading.Lock()


async def acquire(model: str, options: EngineOptions | None = None, **changes: Unpack[EngineArguments]) -> TTSEngine:
    """The process's engine for these arguments of `TTSEngine.load`. Every `acquire` needs a `release`.

    If nobody has it yet, or if it died, a thread loads it and warms it up with a real utterance. It then hides what is
    in memory from the garbage collector (`gc.freeze`), until the last engine is released. With torch, transformers and
    Pipecat in memory a full collection stops every call for 60 ms.

    Raises:
        TTSError: it cannot be loaded; the next `acquire` tries again.
    """
    options = _normalised(replace(options or EngineOptions(), **changes))
    key = (str(find_cached(model) or model), options)
    with _lock:
        shared = _shared.get(key)
        first = shared is None or not shared.usable
        if shared is None or first:
            shared = _shared[key] = _SharedEngine(Future())
            _used.add(shared)
        shared.users += 1
    if first:
        threading.Thread(target=_load, args=(key, shared, model, options), name="qwen_megakernel load").start()
    try:
        return await asyncio.shield(asyncio.wrap_future(shared.engine))
    except BaseException:
        _remove_user(shared)
        raise


async def release(engine: TTSEngine) -> None:
    """Remove a user of the engine. After the last one it is closed, in a thread."""
    with _lock:
        found = [s for s in _used if s.engine.done() and not s.engine.exception() and s.engine.result() is engine]
    if found and (closing := _remove_user(found[0])):
        await asyncio.to_thread(closing.join)


def _forget_all() -> None:
    """In a forked process: the engines, and threads that load them or hold the lock, have stayed where they were."""
    global _lock
    _lock = threading.Lock()
    _shared.clear()
    _used.clear()


os.register_at_fork(after_in_child=_forget_all)


def _normalised(options: EngineOptions) -> EngineOptions:
    """The same options for what means the same."""
    return replace(
        options,
        device=str(select_device(options.device)),
        weights=None if options.weights is None else name_of(parts_of(options.weights)),
        dtype=None if options.dtype is None else dtype_of(options.dtype),
        vocoder_dtype=vocoder_dtype_of(options.vocoder_dtype),
        adapters=tuple(adapter_folders(options.adapters)),
    )


def _remove_user(shared: _SharedEngine) -> threading.Thread | None:
    """Remove a user. After the last one the returned thread closes the engine, once it is loaded."""
    with _lock:
        shared.users -= 1
        if shared.users > 0:
            return None
        _used.discard(shared)
        for key in [k for k, s in _shared.items() if s is shared]:
            del _shared[key]
        if not _used:
            gc.unfreeze()
    closing = threading.Thread(target=_close, args=(shared,), name="qwen_megakernel close")
    closing.start()
    return closing


def _close(shared: _SharedEngine) -> None:
    if not shared.engine.exception():  # waits for a load that is under way
        shared.engine.result().close()


def _load(key: _Key, shared: _SharedEngine, model: str, options: EngineOptions) -> None:
    try:
        engine = TTSEngine.load(model, options)
        warm_up(engine)
    except BaseException as error:
        with _lock:
            if _shared.get(key) is shared:
                del _shared[key]
        shared.engine.set_exception(error)
    else:
        gc.collect()
        with _lock:
            if shared in _used:
                gc.freeze()
        shared.engine.set_result(engine)


def warm_up(engine: TTSEngine, voice: Voice | None = None) -> None:
    """Say one short utterance, so that the first caller does not pay for what is made at first use. It is not counted.

    Args:
        voice: for a Base checkpoint, which has no speakers. Without a voice such a checkpoint says nothing.
    """
    if engine.variant != "base" or voice is not None:
        engine.generate(_WARM_UP_TEXT, voice=voice, max_frames=4)
        engine.reset_metrics()
