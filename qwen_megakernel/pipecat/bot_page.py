"""A web page to talk to a bot with (bot_page.html), on the server of Pipecat's runner."""

import argparse
from pathlib import Path


def run(parser: argparse.ArgumentParser | None = None) -> None:
    """Pipecat's runner for the `bot(runner_args)` of the calling script, with our page at /. Ours needs no internet;
    the runner's own, at /client, loads a script from there.

    Args:
        parser: With the script's own options, as for the runner's `main`.
    """
    from fastapi.responses import FileResponse
    from pipecat.runner.run import app, main

    @app.get("/", include_in_schema=False)  # the first route for a path is the one that counts
    async def page():
        return FileResponse(Path(__file__).with_name("bot_page.html"))

    main(parser)
