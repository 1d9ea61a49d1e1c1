"""A conversation with a Pipecat service: a pipeline, an output that plays like a sound card, the LLM's context.
A script says what is sent, and what must have come of it."""

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from listener import PacedOutput
from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    CancelFrame,
    EndFrame,
    Frame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    StopFrame,
    TTSAudioRawFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
)
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipelines import Tap, of, running, worker_of
from waiting import until_in_loop

START, END = LLMFullResponseStartFrame, LLMFullResponseEndFrame
Step = Frame | float | Callable[["Talk"], Awaitable[None]]
"""A frame to send, seconds to wait, or something to do or to wait for."""


def tokens(text: str) -> list[Frame]:
    """As a language model writes them: a word with the blank before it."""
    return [LLMTextFrame(token) for token in re.findall(r"\s*\S+", text)]


def turn(text: str) -> list[Frame]:
    return [START(), *tokens(text), END()]


def until(kind: type[Frame], times: int = 1, up: bool = False) -> Step:
    """Wait for so many frames of a kind behind the service (`up`: on their way to the language model)."""
    return lambda talk: until_in_loop(lambda: len(of(talk.up if up else talk.down, kind)) >= times)


def until_heard(seconds: float) -> Step:
    """Wait until so much was played."""
    return lambda talk: until_in_loop(lambda: talk.heard_s >= seconds)


heard_something = until(BotStartedSpeakingFrame, up=True)


@dataclass
class Script:
    """What is sent, and what must come of it.

    Attributes:
        steps: frames and what stands between them; an EndFrame follows, unless one of them ends the pipeline.
        heard: sentences that must be heard whole, and nothing else; "A | B" in TOKEN mode: parts with a melody of
            their own. None: not told.
        seconds: least and most seconds that may be heard; None: what `heard` says.
        context: what the assistant has said, according to the LLM's context: "A | B": two messages. None: not told.
        errors: words of each error; at most one a row.
        turns: how often the bot may begin and end to speak; None: not told.
        settings: the service's, besides voice, seed and language.
        options: the service's other arguments.
        around: processors around the service.
        busy: its engine has no place for it.
        rate: of the output, in Hz.
    """

    steps: Sequence[Step]
    heard: str | None = None
    seconds: tuple[float, float] | None = None
    context: str | None = None
    errors: tuple[str, ...] = ()
    turns: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[Any], list[FrameProcessor]] = lambda service: [service]
    busy: bool = False
    rate: int = 24000


class Talk:
    """One conversation as it goes.

    Attributes:
        down, up: the frames that came out of the service, and those that go back to the language model.
        ended_s: seconds from the EndFrame to the pipeline's end, less the sound that was left to be heard.
    """

    def __init__(self, service: Any, script: Script):
        self.service, self.script = service, script
        self.down: list[Frame] = []
        self.up: list[Frame] = []
        self.output, self.context = PacedOutput(), LLMContext([])
        before = Tap(FrameDirection.UPSTREAM, self.up.append)
        behind = Tap(FrameDirection.DOWNSTREAM, self.down.append)
        assistant = LLMContextAggregatorPair(self.context).assistant()
        processors = before, *script.around(service), behind, self.output, assistant
        self.worker = worker_of(*processors, rate=script.rate)

    async def run(self) -> "Talk":
        async with running(self.worker):
            for step in self.script.steps:
                if isinstance(step, Frame):
                    await self.worker.queue_frame(step)
                elif callable(step):
                    await step(self)
                else:
                    await asyncio.sleep(step)
            self._sent = time.monotonic()
            if not any(isinstance(step, (EndFrame, CancelFrame, StopFrame)) for step in self.script.steps):
                await self.worker.queue_frame(EndFrame())
        last = self.output.heard[-1][0] if self.output.heard else 0.0
        self.ended_s = time.monotonic() - max(self._sent, last)
        return self

    # ------------------------------------------------------------ what came of it

    @property
    def heard_s(self) -> float:
        """Seconds of sound that were played; the last piece of 40 ms may be filled up."""
        return len(self.output.samples) / self.script.rate

    @property
    def said(self) -> str:
        """What the assistant has said, according to the LLM's context."""
        return " | ".join(m["content"] for m in self.context.get_messages() if m["role"] == "assistant")

    def check_always(self) -> None:
        """What holds for any conversation."""
        starts, stops = of(self.down, TTSStartedFrame), of(self.down, TTSStoppedFrame)
        interrupted = of(self.down, InterruptionFrame) or of(self.down, CancelFrame)
        assert len(stops) <= len(starts) and (interrupted or len(stops) == len(starts)), (starts, stops)
        assert not self.service._contexts and not self.service._readings
        # Pipecat's time-outs begin at 3 s. Where others keep the cores busy, a talk may take as long without any.
        assert self.ended_s < 3 or os.getloadavg()[0] > os.cpu_count(), "a time-out of Pipecat's ended it"
        assert all(frame.audio for frame in of(self.down, TTSAudioRawFrame))
