"""A web page to talk to a bot (bot_page.html), on the server of Pipecat's runner, and the bot's console."""

import argparse
import asyncio
import logging
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from qwen_megakernel.pipecat.turn_log import TurnLog

if TYPE_CHECKING:
    from loguru import Record  # only its stubs have it

_HARMLESS = (
    "Timeout: No audio frame received",
    "Media stream error while reading the audio",
    "No video transceiver",
    "No screen video transceiver",
)
"""Warnings of Pipecat's WebRTC about a caller without a microphone or a camera, or one who hangs up."""


def check_port() -> None:
    """Check that the command line's port is free. A script calls this before it loads a model. Raises SystemExit: it is
    not free; the message names `--port`."""
    options = _runner_options()
    if options.direct or options.transport == "vonage":  # these do not listen
        return

    async def listen() -> None:  # like uvicorn, on every address of the host
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
    """Run Pipecat's runner for the calling script's `bot(runner_args)`, with our page at /. Our page needs no internet;
    the runner's own page at /client loads a script from it. With -v the console shows everything, else what
    `log_to_console` leaves. `parser`: has the script's own options, as for the runner's `main`."""
    from fastapi.responses import FileResponse
    from pipecat.runner.run import app, main

    @app.get("/", include_in_schema=False)  # the first route for a path is the one that counts
    async def page():
        return FileResponse(Path(__file__).with_name("bot_page.html"))

    if not _runner_options().verbose:
        log_to_console()
        with suppress(ImportError):  # if missing, the runner says so. Its import logs
            import pipecat.transports.smallwebrtc.connection  # noqa: F401
        then = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app):
            log_to_console()  # by now the runner has switched on every DEBUG line
            logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
            async with then(app):
                yield

        app.router.lifespan_context = lifespan
    main(parser)


def log_to_console(verbose: bool = False) -> None:
    """Let loguru write warnings, errors and TurnLog's lines to standard error, and nothing else. `verbose`: let it
    write everything."""
    logger.remove()
    if verbose:
        logger.add(sys.stderr, level="DEBUG")
    else:
        logger.add(sys.stderr, level="INFO", format="{time:HH:mm:ss} {level: <7} {message}", filter=_is_shown)


def _is_shown(record: "Record") -> bool:
    if record["name"] == TurnLog.__module__:
        return True
    return record["level"].no >= logging.WARNING and not record["message"].startswith(_HARMLESS)


def _runner_options() -> argparse.Namespace:
    """The runner's options that are needed before it runs."""
    from pipecat.runner.run import runner_host, runner_port

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host", default=runner_host())
    parser.add_argument("--port", type=int, default=runner_port())
    parser.add_argument("-d", "--direct", action="store_true")
    parser.add_argument("-t", "--transport")
    parser.add_argument("-v", "--verbose", action="count")
    return parser.parse_known_args()[0]
