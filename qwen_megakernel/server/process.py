"""What the processes of `serve` and `wyoming` share: checks before they listen, loading the engine, and exiting."""

import gc
import ipaddress
import logging
import os
import socket
import threading
from pathlib import Path

from qwen_megakernel.checkpoint.config import ModelConfig
from qwen_megakernel.checkpoint.load import Checkpoint, find_cached
from qwen_megakernel.engine.options import EngineOptions
from qwen_megakernel.errors import BackendError, CheckpointError
from qwen_megakernel.speech.engine import TTSEngine
from qwen_megakernel.trust.selection import Selection

log = logging.getLogger(__name__)

ENGINE_GONE = 70
"""Exit code (EX_SOFTWARE) of a server whose engine is dead or could not be loaded: start it again."""


def is_loopback(host: str) -> bool:
    """Can only this machine reach the host?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_model(model: str, options: EngineOptions) -> ModelConfig | None:
    """Check `TTSEngine.load`'s arguments without loading, so that a server that can never be ready does not listen.

    Returns:
        The checkpoint's config. None for a hub id that is not complete in the cache and must be downloaded.

    Raises:
        BackendError: the sizes, the device or the backend are not possible here.
        CheckpointError: no such model, a folder without a checkpoint, or an adapter that does not fit it.
    """
    selection = Selection(options.backend, options.device)
    if (folder := find_cached(model)) is None:
        return None
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError:
        if folder == Path(model).expanduser():
            raise
        return None
    selection.decide(checkpoint.config)
    return checkpoint.with_adapters(options.adapters).config


def load_for_good(model: str, options: EngineOptions) -> TTSEngine:
    """Load an engine for a process that does nothing else. It then hides all objects from the garbage collector
    (`gc.freeze`): with all of torch in memory, a full collection would delay every utterance.
    """
    engine = TTSEngine.load(model, options)
    gc.collect()
    gc.freeze()
    return engine


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that does not listen yet.

    Raises:
        BackendError: the port is taken or not allowed, or there is no such host.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Without the port: the system would take 99999 for 34463.
        _, kind, protocol, _, (address, _, *scope) = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port, *scope))
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "there is no such port"
        words = f"cannot listen on {host}:{port}: {why}; choose another --port, 0 to 65535, or --host"
        raise BackendError(words) from None
    return listener


def drop_stalled(listener: socket.socket, seconds: float) -> None:
    """The system drops a client of this listener that takes nothing for this time although something waits to be sent.
    It does so in every state of a connection, also when we have closed it."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))


END_S = 15.0  # at most, once the engine is gone


def exit_within(seconds: float) -> None:
    """End the process with `ENGINE_GONE` after this time at the latest. Its shutdown might wait for a device that
    does not answer."""
    last = threading.Timer(seconds, os._exit, (ENGINE_GONE,))
    last.daemon = True
    last.start()
