"""Journal: what becomes of a request's record once it has ended: a line in the log, metrics, spans."""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, Protocol

from qwen_megakernel.errors import EngineBusy, NoWordsError
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.records import CURRENT, Record, Speech, serving
from qwen_megakernel.speech.session import SpeechSession

log = logging.getLogger("qwen_megakernel.access")

_PROBES = ("/health", "/ready", "/metrics", "/version")
"""Programs ask these every few seconds. A good answer has no span, and a line with --verbose only."""


class Counts(Protocol):
    """What counts requests and speech. The arguments are JSON: it may be in another process."""

    def answered(self, told: dict[str, Any]) -> None: ...
    def said(self, told: dict[str, Any]) -> None: ...


class Spans(Protocol):
    """What makes spans of records."""

    def record(self, record: Record, seconds: float) -> None:
        """Make the spans of a request that has ended, and set its `trace_id`. Returns at once."""

    def close(self) -> None:
        """Send what was not sent yet."""


class Journal:
    """Used in one event loop.

    Attributes:
        counts: None: nothing is counted.
        spans: None: there are no traces.
        over: the server has ended: what is not answered yet was cut by it, not by its client.
    """

    def __init__(self, spans: Spans | None, *, log_texts: bool):
        """`log_texts`: words of 4xx errors are logged, which may quote a text."""
        self._log_texts = log_texts
        self.counts: Counts | None = None
        self.spans = spans
        self.over = False

    def close(self) -> None:
        """Send what was not sent yet."""
        if self.spans:
            self.spans.close()

    @contextlib.contextmanager
    def entry(self, record: Record) -> Iterator[Record]:
        """Serve a request until the end of the block, and then tell of it, also if an exception ends it."""
        with serving(record):
            try:
                yield record
            except ConnectionError:  # the client is gone
                raise
            except Exception as error:
                record.error = record.error or ApiError.of(error)
                raise
            finally:
                self._end(record)

    def refuse(self, record: Record, error: ApiError) -> None:
        """Tell of a request that is refused before it is served."""
        with self.entry(record):
            record.error = error

    def fail(self, connection: Record, error: ApiError, **fields: Any) -> None:
        """The text that is spoken now has failed. Where none is, what the connection's client has sent is refused.
        `fields`: they tell which."""
        record = CURRENT.get()
        if record is None or record is connection:
            self.refuse(connection.child(**fields), error)
        else:
            record.error = error

    @contextlib.contextmanager
    def speech(self, session: SpeechSession, seed: int) -> Iterator[None]:
        """Tell of a session, which ends with the block. One that is refused has spoken nothing, and is not told."""
        speech = Speech(seed)
        try:
            yield
        except Exception as error:
            refused = isinstance(error, (NoWordsError, EngineBusy)) or not session.begun
            speech.finish_reason = "" if refused else "failed"
            raise
        finally:
            if audio := session.audio:
                if audio.finish_reason != "cancelled":  # else it was cut, has failed, or its text was refused
                    speech.finish_reason = audio.finish_reason
                speech.audio_s = audio.duration_s
                speech.compute_s, speech.first_audio_s, speech.lead_s = audio.compute_s, audio.ttfc_s, audio.lead_s
                speech.stages = {stage: took for stage, took in vars(audio.timings).items() if took is not None}
            if speech.finish_reason:
                self._said(speech)

    def _said(self, speech: Speech) -> None:
        if record := CURRENT.get():
            record.speeches.append(speech)
        if self.counts:
            of = {name: getattr(record, name, "") for name in ("protocol", "key", "id")}
            self.counts.said(vars(speech) | of)

    def _end(self, record: Record) -> None:
        unheard = record.status in (None, 408) or any(each.finish_reason == "cancelled" for each in record.speeches)
        if self.over and unheard and (record.error is None or record.error.status == 408):
            record.error = ApiError(503, "closing", "the answer was cut: the server has ended")
            record.status = None if record.status == 408 else record.status
        seconds, error, probe = time.monotonic() - record.begun, record.error, record.path in _PROBES
        if self.spans and not probe:
            self.spans.record(record, seconds)
        if self.counts:
            told = {name: getattr(record, name) for name in ("protocol", "route", "key", "characters")}
            told |= {"status": record.answer, "seconds": seconds, "reason": error.reason if error else ""}
            self.counts.answered(told)
        level = logging.ERROR if _is_ours(error) else logging.DEBUG if probe and error is None else logging.INFO
        log.log(level, "request", extra={"fields": self._told(record, seconds)})

    def _told(self, record: Record, seconds: float) -> dict[str, Any]:
        """The fields of its line."""
        names = ("protocol", "client", "key", "method", "path", "trace_id")
        told: dict[str, Any] = {"request_id": record.id}
        told |= {name: value for name in names if (value := getattr(record, name))}
        told |= {"status": record.answer, "duration_s": round(seconds, 4)} | record.fields
        if speeches := record.speeches:
            first, last = speeches[0], speeches[-1]
            told |= {"characters": record.characters, "seed": first.seed, "finish_reason": last.finish_reason}
            told |= {"audio_s": round(sum(speech.audio_s for speech in speeches), 3)}
            times = {"queue_s": first.stages.get("queue"), "first_audio_s": first.first_audio_s, "lead_s": first.lead_s}
            told |= {name: round(value, 4) for name, value in times.items() if value is not None}
        if error := record.error:
            told |= {"code": error.code} | ({"field": error.field} if error.field else {})
            if error.status >= 500 or self._log_texts:
                told["error"] = error.message
        return told


def _is_ours(error: ApiError | None) -> bool:
    """The server has failed. Clients who are refused, and speech that may end well the next time, are ordinary."""
    if error is None:
        return False
    return error.status == 500 and not error.retryable or error.status == 503 and error.code in ("dead", "failed")
