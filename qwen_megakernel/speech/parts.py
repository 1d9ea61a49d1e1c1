"""Parts: how an engine says one text, part after part. The parts of `SpeechSession` that compute.

A text may outgrow a slot. It is then cut, mostly after a sentence (turn_text.py), and the engine says the parts one
after the other. Text after a pause, and text that comes after the model has said end of speech, is a new part too.
"""

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from qwen_megakernel.engine.audio import Audio, Chunk
from qwen_megakernel.errors import TextEndedError
from qwen_megakernel.model.edges import silent_end_s
from qwen_megakernel.model.turn_text import Turn
from qwen_megakernel.speech.base import AnySeat, BegunUtterance, SpeechEngine
from qwen_megakernel.speech.request import SpeechRequest
from qwen_megakernel.speech.retries import next_attempt
from spoken_text.cutting import check_unicode
from spoken_text.front_end import Reading
from spoken_text.pauses import Pause
from spoken_text.spoken_text import SpokenText
from spoken_text.stage import has_words

CUT = ("length", "cancelled")
"""Finish reasons after which no further part is said: it would not join what was heard."""


@dataclass
class _Part:
    """A part of the text that is said later."""

    text: str = ""  # so far, of text that comes in pieces
    pause_s: float = 0.0  # seconds of silence between this part and the one before
    ended: bool = False  # no more text of it will come
    spoken: SpokenText | None = None  # the part, if the text came whole

    @property
    def has_text(self) -> bool:
        return self.spoken is not None or has_words(self.text)


class Parts:
    """Not thread-safe: one call after the other. All but `cancel` and the properties compute.

    Attributes:
        complete: no more text will come.
        blank: the current part comes in pieces, and has no words yet.
        utterance: says the current part; None before `begin`.
    """

    def __init__(
        self,
        engine: SpeechEngine,
        request: SpeechRequest,
        reading: Reading | None,
        receive: "weakref.WeakMethod[Callable[[Chunk | None], None]]",
        seat: AnySeat,
    ):
        """
        Args:
            seat: all parts have it.
            receive: called with each chunk, and with None at each part's end. Weak, because its object refers to this
                one: without a cycle its memory is freed at once.
        """
        self._engine = engine
        self._request = request
        self._reading = reading
        self._receive = receive
        self._seat = seat
        self._turn: Turn | None = None  # of text that comes in pieces
        self._later: deque[_Part] = deque()
        self._current: SpokenText | None = None  # the current part, if its text came whole
        self._asked = request  # how the current part is said
        self._cancelled = False
        self.complete = True
        self.blank = False
        self.utterance: BegunUtterance | None = None

    def begin(self, text: str | SpokenText | None, opening: str, ended: bool) -> None:
        """See `SpeechSession.begin`. It can be called again if the engine was busy."""
        if text is not None:
            if not self._later:
                parts = self._engine.parts(text, self._request, self._reading)
                self._later += [_Part(ended=True, spoken=part) for part in parts]
            self.begin_next(None)
            return
        if ended and not self._reading and (whole := self._one_part(opening)):
            self._start(whole, self._request)
            return
        self._turn = self._engine.turn(self._request, self._reading)
        self.complete = False
        self._start(None, self._request)
        self.blank = True
        with suppress(TextEndedError):  # the utterance says why it has ended
            self.push(opening)
            if ended:
                self.end()

    def _one_part(self, text: str) -> SpokenText | None:
        """A text that comes in pieces, if all of it is there and is one part."""
        self._check(text)
        turn = self._engine.turn(self._request)
        texts = []
        for part in (*turn.push(text), *turn.finish()):
            if isinstance(part, Pause):
                return None
            texts.append(part)
        whole = "".join(texts)
        return SpokenText(whole) if whole.strip() else None

    def _start(self, text: SpokenText | None, request: SpeechRequest) -> BegunUtterance:
        self._current, self._asked = text, request
        receive = self._receive()
        assert receive, "who calls this has it"
        self.utterance = self._engine.begin(text, request, receive, partial(receive, None), self._seat)
        if self._cancelled:  # `cancel` came before the utterance existed
            self.utterance.cancel()
        return self.utterance

    @property
    def done(self) -> bool:
        """The engine has ended all parts so far."""
        return self.utterance is not None and self.utterance.done and not self._later

    # ------------------------------------------------------------ text in pieces

    def push(self, text: str) -> None:
        """See `Utterance.push_text`."""
        self._check(text)
        if self._turn:
            self._take(self._turn.push(text))

    def flush(self) -> None:
        """See `Utterance.flush`."""
        if self._turn and self.utterance:
            self._take(self._turn.flush())
            if not self._later:
                self.utterance.flush()

    def end_part(self) -> None:
        """The writer stalls: say the part to its end. What comes later is a new part."""
        if self._turn and self.utterance and (self._later or not self.utterance.done):
            self._take(self._turn.flush())
            if self._later or not self.blank:
                self._take(self._turn.end_part())

    def end(self) -> None:
        """See `Utterance.end_text`."""
        if self._turn and not self.complete:
            with suppress(TextEndedError):  # it was cut, or cancelled
                self._take(self._turn.finish())
        self.complete = True
        if self._later:
            self._later[-1].ended = True
        elif self.utterance:
            self.utterance.end_text()

    def _check(self, text: str) -> None:
        if not self._request.lenient:
            check_unicode(text)

    def _take(self, parts: list[str | Pause]) -> None:
        for part in parts:
            if isinstance(part, str):
                self._add(part)
            elif self._later and not self._later[-1].text.strip():
                self._later[-1].pause_s += part.seconds
            else:
                self._pause(part.seconds)

    def _pause(self, seconds: float) -> None:
        """End the last part, and append one behind a pause."""
        assert self.utterance
        last = self._later[-1] if self._later else None
        self._later.append(_Part(pause_s=seconds))  # first: once the current part ends, the loop asks what follows
        if last:
            last.ended = True
        elif self.blank:  # a pause comes first: this utterance has nothing to say
            self.utterance.cancel()
        else:
            self.utterance.end_text()

    def _add(self, text: str) -> None:
        """Append text to the last part."""
        assert self.utterance
        if self._later:
            self._later[-1].text += text
            return
        try:
            self.utterance.push_text(text)
            self.blank &= not text.strip()
        except TextEndedError:
            if self.complete or not self.utterance.done or self.utterance.result().finish_reason in CUT:
                raise
            self._later.append(_Part(text))

    # ------------------------------------------------------------ part after part

    @property
    def superseded(self) -> bool:
        """The current part had nothing to say, because a pause came first."""
        return self.blank and bool(self._later)

    @property
    def has_next(self) -> bool:
        """Another part can begin."""
        while self._later and self._later[0].ended and not self._later[0].has_text:
            self._later.popleft()
        return bool(self._later) and self._later[0].has_text

    def begin_next(self, before: Audio | None) -> None:
        """Begin the next part. `before`: the part before it. It can be called again if the engine was busy."""
        part = self._later[0]
        if part.spoken:
            self._start(part.spoken, self._request)
        else:
            silent_s = silent_end_s(before.samples, before.sample_rate) if before else 0.0
            pause_s = max(0.0, part.pause_s - silent_s)
            utterance = self._start(None, replace(self._request, before_s=pause_s or self._request.before_s))
            self.blank = False
            utterance.push_text(part.text)
            if part.ended:
                utterance.end_text()
        self._later.popleft()

    def next_attempt(self, audio: Audio) -> SpeechRequest | None:
        """How to say the current part again after `audio`. None: it ended well, no retry is left, or its text came in
        pieces."""
        return next_attempt(self._asked, audio) if self._current else None

    def repeat(self, request: SpeechRequest | None = None) -> None:
        """Say the current part again. `request`: how; None: as before."""
        self._start(self._current, request or self._asked)

    def cancel(self) -> None:
        """Stop before the next frame. Any thread may call it, at any time."""
        self._cancelled = True
        if self.utterance and not self.utterance.done:
            self.utterance.cancel()
