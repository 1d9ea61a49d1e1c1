"""A web page to talk to a bot with (bot_page.html), on the server of Pipecat's runner, and the bot's console."""

import argparse
import asyncio
import logging
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from loguru import logger

from qwen_megakernel.pipecat.turn_log import TurnLog

__all__ = ["TurnLog", "check_port", "log_to_console", "run"]

_HARMLESS = (
    "Timeout: No audio frame received",
    "Media stream error while reading the audio",
    "No video transceiver",
    "No screen video transceiver",
)
"""Warnings of Pipecat's WebRTC about a caller without a microphone or a camera, or one who hangs up."""


def check_port() -> None:
    """See that the port of the command line is free. A script calls it before it loads a model.

    Raises:
        SystemExit: it is not; the message names `--port`.
    """
    options = _runner_options()
    if options.direct or options.transport == "vonage":  # these do not listen
        return

    async def listen() -> None:  # as uvicorn will, on every address that the host has
        if not 0 <= options.port < 2**16:
            raise OverflowError("a port is a number from 0 to 65535")
        server = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, options.host, options.port, start_serving=False
        )
        server.close()

    try:
        asyncio.run(listen())
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise SystemExit(
            f"error: cannot listen on {options.host}:{options.port}: {why}; choose another --port"
        ) from None


def run(parser: argparse.ArgumentParser | None = None) -> None:
    """Pipecat's runner for the `bot(runner_args)` of the calling script, with our page at /. Ours needs no internet;
    the runner's own, at /client, loads a script from there. With -v the console shows everything, else what
    `log_to_console` leaves.

    Args:
        parser: With the script's own options, as for the runner's `main`.
    """
    from fastapi.responses import FileResponse
    from pipecat.runner.run import app, main

    @app.get("/", include_in_schema=False)  # the first route for a path is the one that counts
    async def page():
        return FileResponse(Path(__file__).with_name("bot_page.html"))

    if not _runner_options().verbose:
        log_to_console()
        with suppress(ImportError):  # where it is missing the runner says so. It logs while it is imported
            import pipecat.transports.smallwebrtc.connection  # noqa: F401
        then = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app):
            log_to_console()  # the runner has asked for every DEBUG line meanwhile
            logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
            async with then(app):
                yield

        app.router.lifespan_context = lifespan
    main(parser)


def log_to_console(verbose: bool = False) -> None:
    """Let loguru write warnings, errors and TurnLog's lines to standard error, and nothing else.

    Args:
        verbose: Let it write everything.
    """
    logger.remove()
    if verbose:
        logger.add(sys.stderr, level="DEBUG")
    else:
        logger.add(sys.stderr, level="INFO", format="{time:HH:mm:ss} {level: <7} {message}", filter=_is_shown)


def _is_shown(record: dict) -> bool:
    if record["name"] == TurnLog.__module__:
        return True
    return record["level"].no >= logging.WARNING and not record["message"].startswith(_HARMLESS)


def _runner_options() -> argparse.Namespace:
    """Those of the runner's options that are needed before it runs."""
    from pipecat.runner.run import runner_host, runner_port

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host", default=runner_host())
    parser.add_argument("--port", type=int, default=runner_port())
    parser.add_argument("-d", "--direct", action="store_true")
    parser.add_argument("-t", "--transport")
    parser.add_argument("-v", "--verbose", action="count")
    return parser.parse_known_args()[0]
