"""Stand-ins for the servers of a bot's other models, with OpenAI's API: one that always hears the same words, and one
that always gives the same answer."""

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import soundfile


@dataclass
class ModelServers:
    """Both, at one URL.

    Attributes:
        hears: the transcript of every recording.
        tokens: what the language model streams.
        recordings: what was to be transcribed: the model's name, samples, rate.
        asked: what the language model was asked: the key, the request's JSON.
    """

    hears: str
    tokens: tuple[str, ...]
    url: str = ""
    recordings: list[tuple[str, np.ndarray, int]] = field(default_factory=list)
    asked: list[tuple[str, dict]] = field(default_factory=list)

    async def transcribe(self, request):
        from aiohttp import web

        form = await request.post()
        samples, rate = soundfile.read(io.BytesIO(form["file"].file.read()))
        self.recordings.append((form["model"], samples, rate))
        return web.json_response({"text": self.hears})

    async def complete(self, request):
        from aiohttp import web

        self.asked.append((request.headers["Authorization"], await request.json()))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in self.tokens:
            choice = {"index": 0, "delta": {"content": token}, "finish_reason": None}
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def model_servers(*tokens: str, hears: str = "") -> AsyncIterator[ModelServers]:
    from aiohttp import web

    servers = ModelServers(hears, tokens)
    app = web.Application()
    app.router.add_post("/v1/audio/transcriptions", servers.transcribe)
    app.router.add_post("/v1/chat/completions", servers.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    servers.url = "http://{}:{}/v1".format(*runner.addresses[0])
    try:
        yield servers
    finally:
        await runner.cleanup()
