"""Each error that the two services push: its category, and what Pipecat's policies and switchers make of it.

An error that lasts costs the service its work: END and CANCEL end the call, a backup takes over, else nobody speaks on.
After any other error the service itself speaks the next turn."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import pytest
from pipecat.frames.frames import EndFrame, TTSAudioRawFrame, TTSUpdateSettingsFrame
from pipecat.pipeline.service_switcher import (
    ServiceSwitcher,
    ServiceSwitcherStrategyFailover,
    ServiceSwitcherStrategyManual,
)
from pipecat.pipeline.worker import ProcessorUnusablePolicy
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TextAggregationMode, TTSService
from pipecat.utils.errors import ErrorCategory as Category
from pipelines import running, turn, worker_of
from serving import small_demo
from test_websocket_tts import HELLO, Server
from waiting import PATIENCE_S, slow_case, until_in_loop

from qwen_megakernel import EngineBusy, KernelFault, RequestError, SpeakerError
from qwen_megakernel.errors import EngineDied, OutOfMemoryError, SpeechError, TextTooLongError
from qwen_megakernel.pipecat import remote as pipecat_remote
from qwen_megakernel.pipecat_tts import MegakernelTTSService
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService

Settings = MegakernelWebsocketTTSService.Settings
CONTINUE, END, CANCEL = ProcessorUnusablePolicy
FAILOVER, MANUAL = ServiceSwitcherStrategyFailover, ServiceSwitcherStrategyManual
LASTS = {
    CONTINUE: ("nobody", "went on"),
    END: ("nobody", "ended"),
    CANCEL: ("nobody", "cancelled"),
    FAILOVER: ("backup", "went on"),
    MANUAL: ("nobody", "went on"),
}
"""Who speaks the turn behind an error that lasts, and how the call ended."""


class Local(MegakernelTTSService):
    """Raises what goes wrong in its set-up or at a text."""

    def __init__(self, wrong: dict[str, Exception], **options):
        super().__init__(engine=small_demo(), **options)
        self.wrong, self.asked = wrong, []

    async def _load_front_end(self) -> None:
        if "setup" in self.wrong:
            raise self.wrong["setup"]
        await super()._load_front_end()

    async def open_session(self, context_id, reading, text, *, complete):
        self.asked.append(text)
        if text in self.wrong:
            raise self.wrong[text]
        return await super().open_session(context_id, reading, text, complete=complete)


class Backup(TTSService):
    def __init__(self):
        super().__init__(settings=TTSSettings(model=None, voice=None, language=None))
        self.asked = []

    async def run_tts(self, text, context_id):
        self.asked.append(text)
        yield TTSAudioRawFrame(bytes(960), 24000, 1, context_id=context_id)


class Faulty(Server):
    """`statuses`, `hellos`: what its first connections are answered."""

    def __init__(self, script: Callable | None = None, statuses=(), hellos=()):
        super().__init__(script=script)
        self.statuses, self.hellos = [*statuses], [*hellos]

    @property
    def asked(self) -> list[str]:
        return [message["text"] for message in self.of("text")]

    def _admit(self, connection, request):
        return connection.respond(HTTPStatus(self.statuses.pop(0)), "no") if self.statuses else None

    async def _talk(self, socket):
        self.hello = self.hellos.pop(0) if self.hellos else HELLO
        await super()._talk(socket)


def at_one(fault: Callable) -> Callable:
    """A server's script: `fault(server, context)` befalls the text "One."."""

    async def script(server: Faulty, name: str, text: str) -> bool:
        return text == "One." and (await fault(server, name) or True)

    return script


def refused(code: str) -> Callable:
    return at_one(lambda server, name: server.fail(name, code, "no"))


async def warn(server: Faulty, name: str, text: str) -> None:
    await server.fail(None, "idle", "no message for 60 s")


async def lose(server: Faulty, name: str) -> None:
    server.socket.transport.abort()


async def go(server: Faulty, name: str) -> None:
    server._server.close(close_connections=False)
    server.socket.transport.abort()


@dataclass
class Row:
    """Attributes:
    wrong: what `Local` raises; faults: of a `Faulty` server, for the other service.
    lasts: the service cannot go on.
    change: of settings, which is the cause; without one it is the turn "One.".
    """

    category: Category
    wrong: dict[str, Exception] | None = None
    faults: dict[str, Any] = field(default_factory=dict)
    lasts: bool = False
    change: dict[str, Any] | None = None


def local(category: Category, error: Exception, **more) -> Row:
    return Row(category, {"One.": error}, **more)


def remote(category: Category, lasts: bool = False, **faults) -> Row:
    return Row(category, None, faults, lasts)


ROWS = {
    "local: a speed out of range": Row(Category.APPLICATION, {}, change={"speed": 9.0}),
    "local: an unknown voice": Row(Category.APPLICATION, {}, change={"voice": "nobody"}),
    "local: another model": Row(Category.APPLICATION, {}, change={"model": "another"}),
    "local: a text that cannot be spoken": local(Category.APPLICATION, RequestError("no")),
    "local: a text that is too long": local(Category.APPLICATION, TextTooLongError("no")),
    "local: a busy engine": local(Category.RATE_LIMIT, EngineBusy("no")),
    "local: a kernel fault": local(Category.SERVER, KernelFault("no")),
    "local: samples that are no numbers": local(Category.SERVER, SpeechError("no")),
    "local: something unforeseen": local(Category.SERVER, RuntimeError("no")),
    "local: a dead engine": local(Category.SERVER, EngineDied("no"), lasts=True),
    "local: an engine that does not load": Row(Category.SERVER, {"setup": OutOfMemoryError("no")}, lasts=True),
    "local: a loaded model lacks the voice": Row(Category.INVALID_REQUEST, {"setup": SpeakerError("no")}, lasts=True),
    "remote: a speed out of range": Row(Category.APPLICATION, change={"speed": 9.0}),
    "remote: an unknown voice": Row(Category.APPLICATION, change={"voice": "nobody"}),
    "remote: a text that cannot be spoken": remote(Category.APPLICATION, script=refused("invalid")),
    "remote: a text that is cut": remote(
        Category.APPLICATION, script=at_one(lambda server, name: server.end(name, "One.", "length"))
    ),
    "remote: a busy engine": remote(Category.RATE_LIMIT, script=refused("busy")),
    "remote: a server that ends": remote(Category.SERVER, script=refused("closing")),
    "remote: a dead engine": remote(Category.SERVER, script=refused("dead")),
    "remote: speech that failed": remote(Category.SERVER, script=refused("failed")),
    "remote: a word about the socket": remote(Category.CONNECTIVITY, script=warn),
    "remote: a connection that is lost": remote(Category.CONNECTIVITY, script=at_one(lose)),
    "remote: a server that is gone": remote(Category.CONNECTIVITY, True, script=at_one(go)),
    "remote: another server lacks the voice": remote(
        Category.INVALID_REQUEST, True, script=at_one(lose), hellos=[HELLO, HELLO | {"voices": ["max"]}]
    ),
    "remote: the server lacks the voice": remote(
        Category.INVALID_REQUEST, True, hellos=[HELLO | {"voices": ["max"]}]
    ),
    "remote: another format": remote(Category.SERVER, hellos=[HELLO | {"format": "opus"}]),
    "remote: a server without a place": remote(
        Category.RATE_LIMIT, hellos=[{"type": "error", "code": "busy", "message": "no"}]
    ),
    **{
        f"remote: HTTP {status}": remote(category, category.is_permanent, statuses=[status])
        for status, category in (
            (401, Category.AUTHENTICATION), (403, Category.AUTHORIZATION), (404, Category.INVALID_REQUEST),
            (429, Category.RATE_LIMIT), (502, Category.SERVER), (503, Category.SERVER),
        )
    },
}  # fmt: skip


async def outcome(row: Row, end: Any, mode: TextAggregationMode) -> tuple[list[Category], str, str]:
    """The errors' categories, who was asked to speak the next turn, and how the call ended."""
    async with contextlib.AsyncExitStack() as stack:
        options = {"settings": Settings(voice="ada"), "text_aggregation_mode": mode}
        if row.wrong is None:
            server = asked_of = await stack.enter_async_context(Faulty(**row.faults))
            waits = {"reconnect_backoff_min_wait": 0.01, "reconnect_backoff_max_wait": 0.01}
            service = MegakernelWebsocketTTSService(url=server.url, **options, **waits)
        else:
            service = asked_of = Local(row.wrong, **options)
        backup, errors, ends = Backup(), [], []
        switched = end in (FAILOVER, MANUAL)
        around = ServiceSwitcher([service, backup], end) if switched else service
        worker = worker_of(around, processor_unusable_policy=CONTINUE if switched else end)

        @service.event_handler("on_error")
        async def on_error(service, error):
            errors.append(error.category)

        @worker.event_handler("on_pipeline_finished")
        async def on_pipeline_finished(worker, frame):
            ends.append(frame)

        async with running(worker):
            cause = [TTSUpdateSettingsFrame(delta=Settings(**row.change))] if row.change else turn("One.")
            await worker.queue_frames(cause)
            await until_in_loop(lambda: errors and service.is_usable is not row.lasts)
            if not row.lasts or end not in (END, CANCEL):
                await worker.queue_frames([*turn("Two."), EndFrame(reason="told")])
        who = "service" if "Two." in asked_of.asked else "backup" if "Two." in backup.asked else "nobody"
        ended = ends and isinstance(ends[0], EndFrame)  # nothing: it was cancelled before it began
        return errors, who, ("went on" if ends[0].reason == "told" else "ended") if ended else "cancelled"


@pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, slow_case(TextAggregationMode.TOKEN)])
@pytest.mark.parametrize("name", ROWS)
async def test_what_an_error_costs(monkeypatch, name, mode):
    monkeypatch.setattr(pipecat_remote, "_CONNECT_S", PATIENCE_S)  # a busy machine may need more than 5 s
    row = ROWS[name]
    expected = LASTS if row.lasts else dict.fromkeys(LASTS, ("service", "went on"))
    outcomes = await asyncio.gather(*(outcome(row, end, mode) for end in LASTS))
    assert {end: (who, how) for end, (_, who, how) in zip(LASTS, outcomes, strict=True)} == expected
    for errors, *_ in outcomes:
        assert errors[-1] is row.category and (row.lasts or {*errors} == {row.category}), errors
