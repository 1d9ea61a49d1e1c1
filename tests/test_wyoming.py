"""The Wyoming server, asked by the protocol's own client; and what a hostile client gets."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from callers import parts_of
from entrances import JUNK, fuzzed
from hypothesis import strategies as st
from serving import PATIENCE_S, TEXT, places_taken, said, same, small_demo, until
from serving import Running as RunningService
from waiting import free_port, slow_case

pytest.importorskip("wyoming", reason="the extra [wyoming] is not installed")

from wyoming.audio import AudioChunk, AudioStop  # noqa: E402
from wyoming.client import AsyncTcpClient  # noqa: E402
from wyoming.error import Error  # noqa: E402
from wyoming.event import Event  # noqa: E402
from wyoming.info import Describe, Info  # noqa: E402
from wyoming.ping import Ping  # noqa: E402
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeStopped, SynthesizeVoice  # noqa: E402

from qwen_megakernel import BackendError, TTSEngine, __version__, cli  # noqa: E402
from qwen_megakernel.checkpoint.synthetic import NO_EOS  # noqa: E402
from qwen_megakernel.server.limits import Limits  # noqa: E402
from qwen_megakernel.server.options import ServerOptions  # noqa: E402
from qwen_megakernel.server.process import ENGINE_GONE, bind  # noqa: E402
from qwen_megakernel.server.service import EngineService  # noqa: E402
from qwen_megakernel.server.wyoming.api import WyomingServer, tell_metrics  # noqa: E402
from qwen_megakernel.speech.session import SpeechSession  # noqa: E402

ROOT = Path(__file__).parents[1]
LONG = " ".join([TEXT] * 3)
ADA, ZOE = SynthesizeVoice(name="ada"), SynthesizeVoice(name="zoe")
LIMITS = Limits(max_text=600, max_body=8192, idle_s=10 * PATIENCE_S, text_s=10 * PATIENCE_S, total_s=10 * PATIENCE_S)


class Running(RunningService):
    """A server in a thread of the test process."""

    def __init__(self, server: WyomingServer, port: int, loop: asyncio.AbstractEventLoop):
        super().__init__(port, server.service)
        self.server, self.loop = server, loop


def listens(listener: socket.socket) -> bool:
    try:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # closed: the server has ended
        return False


@contextlib.contextmanager
def running(load: Callable[[], TTSEngine] = small_demo, **options) -> Iterator[Running]:
    """Until the block ends; with `limits`, `voices`, and `defaults` of speech.

    It begins once the server listens: who connects before that is refused.
    """
    listener, failed, made = bind("127.0.0.1", 0), [], []
    port = listener.getsockname()[1]
    told = ServerOptions(limits=options.pop("limits", LIMITS), voices=options.pop("voices", None), defaults=options)
    loop = asyncio.new_event_loop()

    async def main() -> None:
        made.append(WyomingServer(EngineService(load, told, model="demo")))
        await made[0].run(listener)

    def run() -> None:
        try:
            loop.run_until_complete(main())
        except BaseException as error:
            failed.append(error)
        finally:
            left = asyncio.all_tasks(loop)
            if left:
                failed.append(AssertionError(f"still running: {left}"))
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: not thread.is_alive() or listens(listener))
        if not failed:
            yield Running(made[0], port, loop)
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: made[0].stop(drain=False))
        thread.join(timeout=PATIENCE_S)
        assert not thread.is_alive(), "the server does not end"
    if failed:
        raise failed[0]


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server
        server.at_rest()


@pytest.fixture(autouse=True)
def nothing_is_logged_as_an_error(caplog):
    with caplog.at_level(logging.INFO):
        yield
    logged = caplog.get_records("call")
    bad = [record.getMessage() for record in logged if record.levelno >= logging.WARNING or record.exc_info]
    bad = [message for message in bad if not message.startswith(("left out a tag", "this voice cannot read"))]
    assert not bad, bad


@dataclasses.dataclass
class Heard:
    """What a client was sent."""

    types: list[str] = dataclasses.field(default_factory=list)
    pcm: bytes = b""
    rates: set[int] = dataclasses.field(default_factory=set)
    times: list[int] = dataclasses.field(default_factory=list)
    error: Error | None = None

    def take(self, event: Event) -> None:
        if self.types[-1:] != [event.type]:
            self.types.append(event.type)
        if AudioChunk.is_type(event.type):
            chunk = AudioChunk.from_event(event)
            assert (chunk.width, chunk.channels) == (2, 1)
            self.pcm += chunk.audio
            self.rates.add(chunk.rate)
            self.times.append(chunk.timestamp)
        elif Error.is_type(event.type):
            self.error = Error.from_event(event)


async def hear(client: AsyncTcpClient, last=None, heard: Heard | None = None) -> Heard:
    """What comes, up to an event of the type `last`, or until the server closes the connection."""
    heard = heard or Heard()
    async with asyncio.timeout(PATIENCE_S):
        while event := await client.read_event():
            heard.take(event)
            if last and last.is_type(event.type):
                break
    return heard


def talk(server: Running, conversation: Callable[[AsyncTcpClient], Awaitable]):
    """What a conversation returns, of a client that connects for it."""

    async def main():
        async with AsyncTcpClient("127.0.0.1", server.port) as client:
            return await conversation(client)

    return asyncio.run(main())


def ask(server: Running, *events, last=None) -> Heard:
    """Send events, and hear what comes of them."""

    async def conversation(client: AsyncTcpClient) -> Heard:
        for event in events:
            await client.write_event(event if isinstance(event, Event) else event.event())
        return await hear(client, last)

    return talk(server, conversation)


@pytest.fixture
def seeds(server, monkeypatch) -> None:
    """Every request has the seed 5."""
    monkeypatch.setitem(server.service.options.defaults, "seed", 5)


def streamed(server: Running, text: str) -> bytes:
    """What ada says of a text that comes in pieces."""
    parts = parts_of(server.service.engine, text.lstrip(), speaker="ada")
    return b"".join(said(server, part, non_streaming_mode=False) for part in parts)


# ---------------------------------------------------------------- what it is


def test_it_describes_itself(server):
    async def conversation(client):
        await client.write_event(Describe().event())
        return Info.from_event(await client.read_event())

    (program,) = talk(server, conversation).tts
    assert program.supports_synthesize_streaming and program.installed and program.version == __version__
    assert program.name == "qwen_megakernel" and "demo" in program.description
    assert [voice.name for voice in program.voices] == list(server.service.engine.speakers)
    for voice in program.voices:
        assert voice.languages == ["en"] and voice.installed and voice.speakers is None
        assert "Qwen3-TTS" in voice.attribution.name and voice.attribution.url.startswith("https://")


def test_ping_and_what_it_does_not_know(server):
    async def conversation(client):
        for event in (Event("transcribe", {"name": "x"}), Event("select-program", {"name": "y"}), Ping("here").event()):
            await client.write_event(event)
        return await client.read_event()

    answer = talk(server, conversation)
    assert answer.type == "pong" and answer.data == {"text": "here"}


# ---------------------------------------------------------------- speech


@pytest.mark.parametrize(
    "voice, speaker",
    [
        (ADA, "ada"),
        (SynthesizeVoice(name="MAX"), "max"),
        (SynthesizeVoice(name="max", speaker="max"), "max"),
        (SynthesizeVoice(language="en-US"), "ada"),
        (None, "ada"),
        ({"speaker": "max", "name": None}, "max"),
    ],
    ids=str,
)
def test_whole_text_is_what_the_engine_says(server, seeds, voice, speaker):
    own = isinstance(voice, dict)
    asked = Event("synthesize", {"text": TEXT, "voice": voice, "text_format": "text"}) if own else None
    heard = ask(server, asked or Synthesize(TEXT, voice=voice), last=AudioStop)
    assert heard.types == ["audio-start", "audio-chunk", "audio-stop"] and heard.rates == {24000}
    language = "english" if isinstance(voice, SynthesizeVoice) and voice.language else None
    assert heard.pcm == said(server, speaker=speaker, language=language)
    assert heard.times == sorted(heard.times) and heard.times[0] == 0 and len(set(heard.times)) == len(heard.times)


@pytest.mark.slow
def test_long_text_is_cut_at_sentences(server, seeds):
    pieces = server.service.engine.pieces(LONG)
    assert len(pieces) > 1
    heard = ask(server, Synthesize(LONG, voice=ADA), last=AudioStop)
    assert heard.pcm == b"".join(said(server, piece) for piece in pieces)


def test_requests_of_one_connection_come_one_behind_the_other(server, seeds):
    short = "Hello there."

    async def conversation(client):
        for event in [Synthesize(short, voice=SynthesizeVoice(name="max")), *start(short), SynthesizeStop()] * 2:
            await client.write_event(event.event())
        return [await hear(client, last) for last in (AudioStop, SynthesizeStopped) * 2]

    made = [said(server, short, speaker="max"), streamed(server, short)] * 2
    for heard, wanted in zip(talk(server, conversation), made, strict=True):
        assert same(heard.pcm, wanted) and heard.times[0] == 0


def test_a_connection_may_ask_for_more_than_may_wait(server):
    async def conversation(client):
        for _ in range(6):  # of 4 times 600 characters
            await client.write_event(Synthesize("." * 500).event())
            heard = await hear(client, AudioStop)
        return heard

    heard = talk(server, conversation)
    assert heard.types == ["audio-start", "audio-stop"] and not heard.error


PIECES = [(TEXT, 1), (f"  {TEXT}\n", 7), slow_case(TEXT, 7), slow_case(f"  {TEXT}\n", 1)]


@pytest.mark.parametrize("text, size", PIECES + [slow_case(LONG, size) for size in (1, 7, 1000)])
def test_text_in_pieces_is_the_streaming_layout(server, seeds, text, size):
    """With the whole text in front of the stop, as Home Assistant sends it for older servers."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    events = [SynthesizeStart(voice=ADA), *map(SynthesizeChunk, pieces), Synthesize(text, voice=ADA), SynthesizeStop()]
    heard = ask(server, *events, last=SynthesizeStopped)
    assert heard.types == ["audio-start", "audio-chunk", "audio-stop", "synthesize-stopped"]
    assert same(heard.pcm, streamed(server, text))


def test_audio_comes_while_text_comes(server):
    async def conversation(client):
        for event in (SynthesizeStart(voice=ADA), SynthesizeChunk("Hello there, how are ")):
            await client.write_event(event.event())
        heard = await hear(client, AudioChunk)
        await client.write_event(SynthesizeChunk("you today?").event())
        await client.write_event(SynthesizeStop().event())
        return await hear(client, SynthesizeStopped, heard)

    heard = talk(server, conversation)
    assert heard.types == ["audio-start", "audio-chunk", "audio-stop", "synthesize-stopped"]


def test_what_an_utterance_did_not_take_the_next_one_says(server, seeds, monkeypatch):
    """As behind a runaway, which ends an utterance before its text."""
    ended, push = [], SpeechSession.push_text

    async def push_text(self, text: str) -> None:
        if text == "you today?" and not ended:
            ended.append(text)
            self._parts.utterance.end_text()
            self._parts.utterance.result(PATIENCE_S)
        await push(self, text)

    monkeypatch.setattr(SpeechSession, "push_text", push_text)
    events = [*start("Hello there, "), SynthesizeChunk("you today?"), SynthesizeStop()]
    heard = ask(server, *events, last=SynthesizeStopped)
    assert same(heard.pcm, streamed(server, "Hello there, ") + streamed(server, "you today?")) and ended


@pytest.mark.slow
async def test_clients_speak_side_by_side(server, seeds):
    async def one(text: str) -> Heard:
        async with AsyncTcpClient("127.0.0.1", server.port) as client:
            await client.write_event(Synthesize(text, voice=ADA).event())
            return await hear(client, AudioStop)

    texts = [f"{TEXT} {word}." for word in ("One", "Two", "Three", "Four")]
    for text, heard in zip(texts, await asyncio.gather(*map(one, texts)), strict=True):
        assert heard.pcm == said(server, text), text


def test_saved_voices_and_defaults(tiny, tmp_path):
    folder = tiny("base", eos_gain=NO_EOS)
    with TTSEngine.load(folder, device="cpu", max_streams=1, max_positions=64) as engine:
        for name in ("anna", "bert"):
            engine.placeholder_voice().save(tmp_path / f"{name}.safetensors")
    load = lambda: TTSEngine.load(folder, device="cpu", max_streams=1, max_positions=64)  # noqa: E731
    with running(load, voices=tmp_path, voice="bert", language="german") as server:
        voices = Info.from_event(server.server.info).tts[0].voices
        assert [voice.name for voice in voices] == ["anna", "bert"] and "de" in voices[0].languages
        asked = []
        begin = server.service.engine.begin
        server.service.engine.begin = lambda text, request, *on: asked.append(request) or begin(text, request, *on)
        for voice in (None, SynthesizeVoice(name="anna"), SynthesizeVoice(language="fr")):
            ask(server, Synthesize("Hallo.", voice=voice))
        assert [request.conditioning.language for request in asked] == ["german", "german", "french"]
        saved = server.service.saved_voices.by_name
        assert [request.conditioning.voice for request in asked] == [saved[name] for name in ("bert", "anna", "bert")]
        server.at_rest()


@pytest.mark.parametrize("wrong, words", [({"voice": "zoe"}, "known: ada"), ({"language": "xx"}, "'xx'")])
def test_a_default_that_the_checkpoint_does_not_have_ends_it(wrong, words):
    with pytest.raises(ValueError, match=words), running(**wrong):
        pytest.fail("it serves")


# ---------------------------------------------------------------- what is refused


def start(text: str = TEXT) -> list:
    return [SynthesizeStart(voice=ADA), SynthesizeChunk(text)]


@pytest.mark.parametrize(
    "events, code, words",
    [
        ([Synthesize(TEXT, voice=ZOE)], "invalid", "unknown voice 'zoe'; known: ada, max, oliver"),
        ([SynthesizeStart(voice=ZOE)], "invalid", "known: ada, max, oliver"),
        ([Synthesize(TEXT, voice=SynthesizeVoice("ada", speaker="max"))], "invalid", "name 'ada' and speaker 'max'"),
        ([Synthesize(TEXT, voice=SynthesizeVoice(language="xx"))], "invalid", "unknown language 'xx'; known: auto"),
        ([Event("synthesize", {"text": "x", "text_format": "ssml"})], "invalid", "text_format must be 'text'"),
        ([Synthesize("x" * 601)], "invalid", "may have at most 600 characters, this one has 601"),
        ([SynthesizeStart(), SynthesizeChunk("Hello. " * 86)], "invalid", "this one has 602"),
        ([Synthesize("x" * 2400)], "protocol", "more than 2400 characters wait"),
        ([Synthesize(LONG), *[Synthesize("Hello. " * 80)] * 5], "protocol", "more than 2400 characters wait"),
        ([Event("synthesize")], "invalid", "synthesize: text must be a string, got None"),
        ([Event("synthesize", {"text": 3})], "invalid", "got 3"),
        ([Event("synthesize", {"text": TEXT, "voice": "ada"})], "invalid", "voice must be an object"),
        ([Event("synthesize", {"text": TEXT, "voice": {"name": ["ada"]}})], "invalid", "name of a voice must be"),
        ([Event("synthesize", {"text": TEXT, "voice": {"name": "a" * 65}})], "invalid", "at most 64 characters"),
        ([*start("Hello "), Event("synthesize-chunk", {"text": None})], "invalid", "synthesize-chunk: text must be"),
        ([SynthesizeChunk(TEXT)], "protocol", "synthesize-chunk came without synthesize-start"),
        ([SynthesizeStop()], "protocol", "synthesize-stop came without synthesize-start"),
        ([*start(), SynthesizeStart()], "protocol", "synthesize-start came twice"),
        ([Event("ping", {"text": 3})], "invalid", "ping: text must be a string"),
    ],
)
def test_what_is_wrong_is_told_and_logged_once_and_ends_the_connection(server, events, code, words, caplog):
    heard = ask(server, *events)
    assert heard.types[-1] == "error" and heard.error.code == code and words in heard.error.text
    server.at_rest()
    logged = [record.fields for record in caplog.records if record.name == "qwen_megakernel.access"]
    (refused,) = (fields for fields in logged if "code" in fields)
    assert refused["code"] == code and refused["protocol"] == "wyoming" and refused["client"] == "127.0.0.1"
    assert {fields["request_id"] for fields in logged} == {refused["request_id"]} and TEXT not in str(logged)


@contextlib.contextmanager
def telling_metrics(server: Running) -> Iterator[int]:
    """The port where Prometheus is answered."""

    async def told() -> asyncio.Server:
        return await tell_metrics(server.server, "127.0.0.1", 0)

    async def closed(listener: asyncio.Server) -> None:
        listener.close()
        await listener.wait_closed()

    listener = asyncio.run_coroutine_threadsafe(told(), server.loop).result()
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        server.service.journal.counts = None
        asyncio.run_coroutine_threadsafe(closed(listener), server.loop).result()


def test_prometheus_is_told_of_each_request_and_refusal(server):
    with telling_metrics(server) as port:
        ask(server, Synthesize(TEXT), last=AudioStop)
        ask(server, Synthesize(TEXT, SynthesizeVoice(name="nobody")))
        server.at_rest()
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            told = answer.read().decode()
    ended, key = 'qwen_megakernel_requests_total{key="",path="wyoming",protocol="wyoming",status="%d"} 1.0\n', 'key=""'
    assert ended % 200 in told and ended % 400 in told
    assert f'qwen_megakernel_refusals_total{{{key},protocol="wyoming",reason="invalid"}} 1.0\n' in told
    assert 'finish_reason="eos"' in told and "qwen_megakernel_connections 0.0" in told


def test_who_says_nothing_where_prometheus_asks_makes_room(server):
    with telling_metrics(server) as port, contextlib.ExitStack() as stack:
        connect = lambda: stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))  # noqa: E731
        silent = [connect() for _ in range(16)]
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.status == 200
        assert silent[0].recv(1) == b""


def test_a_port_for_metrics_that_is_taken_is_told(server):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BackendError, match="--metrics-port"):
        told = tell_metrics(server.server, "127.0.0.1", taken.getsockname()[1])
        asyncio.run_coroutine_threadsafe(told, server.loop).result()
    server.service.journal.counts = None


def answer(server: Running, text: str, streams: bool) -> Heard:
    asked = [SynthesizeStart(), SynthesizeChunk(text), SynthesizeStop()] if streams else [Synthesize(text)]
    return ask(server, *asked, last=SynthesizeStopped if streams else AudioStop)


@pytest.mark.parametrize(
    "text", ["  ", "\n", "...", "---", "\U0001f389", "[pause]", "[pause 1s]", "<emphasis></emphasis>"]
)
def test_what_has_no_words_is_an_answer_without_audio(server, text):
    for heard in (answer(server, text, False), answer(server, text, True)):
        assert heard.types[:2] == ["audio-start", "audio-stop"] and not heard.error


@pytest.mark.parametrize("streams", [slow_case(False), True])
def test_an_odd_tag_of_a_language_model_does_not_silence_the_answer(server, seeds, streams):
    heard = answer(server, "Hello there [pause], <break time=500ms/>my <emphasis>friend</emphasis>.", streams)
    wanted = "Hello there , my friend."
    assert not heard.error and same(heard.pcm, streamed(server, wanted) if streams else said(server, wanted))


JSON = b'{"type": "ping"%s}\n'


@pytest.mark.parametrize(
    "sent, words",
    [
        (b"\n", "must be a line of JSON"),
        (b"hello\n", "must be a line of JSON"),
        (b"[]\n", r"an object with a string as type and an object as data, got b'[]\n'"),
        (b"{}\n", "a string as type"),
        (b'{"type": 3}\n', "a string as type"),
        (b'{"type": ' + b"[" * 8000 + b"\n", "must be a line of JSON"),
        (b'{"type": ' + b"9" * 5000 + b"}\n", "must be a line of JSON"),
        (b"\xff\xfe\n", "must be a line of JSON"),
        (b"x" * 20_000, "header of an event has more than 8192 bytes"),
        (b"x" * 8193 + b"\n", "header of an event has more than 8192 bytes"),
        (JSON % b', "data": []', "an object as data"),
        (JSON % b', "data": null, "data_length": 2' + b"{}", "an object as data"),
        (JSON % b', "data_length": true', "must be numbers of bytes, at most 8192, got True"),
        (JSON % b', "data_length": "8"', '"data_length": "8"'),
        (JSON % b', "data_length": 8193', "must be numbers of bytes, at most 8192, got 8193"),
        (JSON % b', "payload_length": 1e3', "must be numbers of bytes, at most 8192, got 1000.0"),
        (JSON % (b', "payload_length": ' + b"9" * 4000), "at most 8192"),
        (JSON % b', "data_length": 2' + b"12", "must be a line of JSON"),
        (JSON % b', "data_length": 2' + b"\xff\xff", "must be a line of JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bytes_that_are_no_event_are_told(server, sent, words):
    heard = talk_bytes(server, sent)
    assert heard["type"] == "error" and heard["data"]["code"] == "protocol" and words in heard["data"]["text"]
    assert len(heard["data"]["request_id"]) == 32


def talk_bytes(server: Running, sent: bytes) -> dict | None:
    """The first event that comes back; None: the connection was closed without one."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as line, line.makefile("rb") as lines:
        line.sendall(sent)
        header = lines.readline()
        if not header:
            return None
        event = json.loads(header)
        return {"type": event["type"], "data": json.loads(lines.read(event.get("data_length", 0)) or "{}")}


def test_data_and_payload_beside_the_header(server):
    sent = b'{"type": "ping", "data": {"text": "a"}, "data_length": 13, "payload_length": 4}\n{"text": "b"}WAVE'
    assert talk_bytes(server, sent) == {"type": "pong", "data": {"text": "b"}}
    lone = b'{"type": "ping", "data": {"text": "\\ud800"}}\n'
    assert talk_bytes(server, lone)["data"]["code"] == "invalid"


def test_beyond_all_places_it_is_busy():
    with running(lambda: small_demo(max_streams=1, max_queue=0)) as server, places_taken(server.service.engine, 1):
        for events in ([Synthesize(TEXT)], start()):
            heard = ask(server, *events)
            assert heard.types == ["error"] and heard.error.code == "busy"


def test_silent_connections_make_room_and_others_do_not():
    with running(limits=dataclasses.replace(LIMITS, connections=2)) as server, contextlib.ExitStack() as stack:

        def line(sent: bytes) -> socket.socket:
            line = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S))
            line.sendall(sent + JSON % b"")
            assert b"pong" in line.recv(100)
            return line

        silent = [line(b"") for _ in range(2)]
        for begun in [b'{"type": "synthesize-start"}\n'] * 2:
            line(begun)
        for one in silent:
            while one.recv(100):  # the end of its pong, then the end
                pass
        heard = ask(server)
        assert heard.error.code == "busy" and "too many connections" in heard.error.text


def test_who_rests_longest_makes_room():
    with running(limits=dataclasses.replace(LIMITS, connections=2)) as server, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        old, silent = [stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S)) for _ in range(2)]
        old.sendall(b'{"type": "synthesize", "data": {"text": "Yes."}}\n')
        heard = old.makefile("rb")
        assert any(b'"audio-stop"' in line for line in heard)
        until(lambda: all(connection.rests for connection in server.server._connections.values()))
        stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
        assert silent.recv(100) == b"", "it was closed"
        old.sendall(JSON % b"")
        assert any(b'"pong"' in line for line in heard)


def test_a_sentence_that_does_not_fit_its_slot_is_told(tiny):
    folder = tiny("custom_voice", eos_gain=NO_EOS)
    with running(lambda: TTSEngine.load(folder, device="cpu", max_streams=1, max_positions=48)) as server:
        for events in ([Synthesize("Hello.")], [SynthesizeStart(), SynthesizeChunk("Hello."), SynthesizeStop()]):
            heard = ask(server, *events)
            assert heard.types == ["audio-start", "audio-chunk", "error"] and heard.error.code == "failed"
            assert "--max-positions" in heard.error.text
        server.at_rest()


# ---------------------------------------------------------------- who goes away, who is slow


WHOLE, OPEN = [Synthesize(LONG)], start("Hello there, how ")


@pytest.mark.parametrize(
    "how, events",
    [("close", WHOLE), ("reset", start(LONG)), ("close", OPEN)]
    + [slow_case("reset", WHOLE), slow_case("close", start(LONG)), slow_case("reset", OPEN)],
    ids=str,
)
def test_who_goes_away_frees_the_slot(server, events, how):
    async def conversation(client):
        for event in events:
            await client.write_event(event.event())
        await hear(client, AudioChunk)
        if how == "reset":
            client._writer.transport.abort()

    talk(server, conversation)
    server.at_rest()


def test_who_says_nothing_is_let_go():
    with running(limits=dataclasses.replace(LIMITS, idle_s=0.5)) as server:
        assert ask(server).error.code == "idle"
        assert talk_bytes(server, b'{"type":')["data"]["code"] == "idle"
        assert "did not come whole" in talk_bytes(server, JSON % b', "data_length": 5' + b"{")["data"]["text"]


@pytest.mark.parametrize(
    "limits, words",
    [({"text_s": 0.5, "idle_s": 0.2}, "no more text came for 0.5 s"), ({"total_s": 0.3}, "took more than 0.3 s")],
)
def test_a_text_that_does_not_go_on_or_takes_too_long_is_ended(limits, words):
    with running(limits=dataclasses.replace(LIMITS, **limits)) as server:
        for events in (start("Hello there, how "), [SynthesizeStart()]):
            heard = ask(server, *events)
            assert heard.error.code == "invalid" and words in heard.error.text
        server.at_rest()


@pytest.mark.slow
def test_who_does_not_read_is_let_go():
    """It asks for far more than the system keeps for it."""
    with running(limits=dataclasses.replace(LIMITS, idle_s=0.5)) as server, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", server.port))
        line.settimeout(PATIENCE_S)
        with pytest.raises(OSError):
            while True:
                line.sendall(b'{"type": "describe"}\n' * 1000)
        server.at_rest()


# ---------------------------------------------------------------- fuzz

KINDS = ["synthesize", "synthesize-start", "synthesize-chunk", "synthesize-stop", "describe", "ping", "audio-chunk"]
voices = st.fixed_dictionaries({}, optional={"name": st.sampled_from(["ada"]) | JUNK, "language": st.just("en") | JUNK})
texts = st.fixed_dictionaries({}, optional={"text": st.text(max_size=30) | JUNK, "voice": voices | JUNK})
headers = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS) | JUNK},
    optional={
        "data": texts | JUNK,
        "data_length": st.integers(0, 20) | JUNK,
        "payload_length": st.integers(0, 20) | JUNK,
        "version": JUNK,
    },
)
sane = st.builds(
    lambda kind, text, voice: {"type": kind, "data": {"text": text} | ({"voice": voice} if voice else {})},
    st.sampled_from(KINDS),
    st.text(max_size=20) | st.just("Hello. "),
    st.none() | st.just({"name": "ada"}),
)
some_bytes = st.binary(max_size=40) | (headers | sane).map(lambda header: json.dumps(header).encode() + b"\n")


@fuzzed(st.tuples(st.lists(some_bytes, max_size=8), st.booleans()))
def test_nothing_that_a_client_sends_is_an_error_of_ours(server, sent_and_hangs_up):
    sent, hangs_up = sent_and_hangs_up
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as line, line.makefile("rb") as lines:
        with contextlib.suppress(ConnectionError):
            line.sendall(b"".join(sent))
            if hangs_up:
                line.shutdown(socket.SHUT_WR)
                answer = lines.read()
                assert b'"code": "failed"' not in answer, answer
    server.at_rest()
    assert talk_bytes(server, JSON % b"") == {"type": "pong", "data": {"text": None}}


# ---------------------------------------------------------------- the process


@pytest.fixture
def process():
    started = []

    def start(*options: str) -> tuple[subprocess.Popen, int]:
        port = free_port()
        command = [sys.executable, "-W", "ignore", "-m", "qwen_megakernel.cli", "wyoming", "--port", str(port)]
        command += ["--device", "cpu", *options]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return started[-1], port

    yield start
    for each in started:
        each.kill()
        each.wait()
        each.stderr.close()


def wait_for(port: int) -> None:
    def listens() -> bool:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    until(listens)


@pytest.mark.slow
async def test_sigterm_lets_what_is_being_said_be_said(process):
    server, port = process("--max-streams", "1")
    wait_for(port)
    async with AsyncTcpClient("127.0.0.1", port) as client:
        await client.write_event(Synthesize(TEXT, voice=ADA).event())
        heard = await hear(client, AudioChunk)
        server.send_signal(signal.SIGTERM)
        await hear(client, heard=heard)
    assert heard.types == ["audio-start", "audio-chunk", "audio-stop"]
    assert server.wait(timeout=PATIENCE_S) == -signal.SIGTERM
    assert "Traceback" not in server.stderr.read()


@pytest.mark.slow
def test_ctrl_c_ends_it_in_order(process):
    server, port = process("--max-streams", "1")
    wait_for(port)
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(b'{"type": "synthesize", "data": {"text": "Hello there."}}\n')
        assert line.recv(1)
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=PATIENCE_S) == 130
    said = server.stderr.read()
    assert said.endswith("interrupted\n") and "Traceback" not in said


@pytest.mark.slow
def test_a_default_that_there_is_not_ends_the_process(process):
    server, _ = process("--max-streams", "1", "--voice", "zoe")
    assert server.wait(timeout=PATIENCE_S) == 1
    assert server.stderr.read().endswith("error: unknown voice 'zoe'; known: ada, max, oliver\n")


def test_an_engine_that_cannot_be_loaded_ends_the_process(monkeypatch, caplog):
    from qwen_megakernel.server.wyoming import api as wyoming_api

    ends = []
    monkeypatch.setattr(wyoming_api, "exit_within", ends.append)

    def load() -> TTSEngine:
        raise BackendError("no memory")

    service = EngineService(load, ServerOptions(), model="demo")
    assert wyoming_api.serve(service, bind("127.0.0.1", 0)) == ENGINE_GONE and ends
    assert "no memory" in caplog.text
    caplog.clear()


@pytest.mark.parametrize(
    "args, message",
    [
        (["--host", "0.0.0.0"], "give --allow-network"),
        (["--host", "no.such.host.invalid", "--allow-network"], "cannot listen on no.such.host.invalid:10200"),
        (["--voices", "nowhere"], "no folder 'nowhere'"),
        (["--max-streams", "0"], "--max-streams must be"),
        (["--model", "./nowhere"], "no folder"),
    ],
    ids=str,
)
def test_what_can_never_work_ends_it_before_it_loads(args, message, monkeypatch, capsys):
    from qwen_megakernel.server import process

    monkeypatch.setattr(process, "load_for_good", lambda *a, **k: pytest.fail("it loads"))
    assert cli.main(["wyoming", "--device", "cpu", *args]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_off_loopback_it_warns(monkeypatch, capsys, caplog):
    from qwen_megakernel.server.wyoming import api as wyoming_api

    monkeypatch.setattr(wyoming_api, "serve", lambda _service, listener: listener.close() or 0)
    assert cli.main(["wyoming", "--device", "cpu", "--host", "0.0.0.0", "--allow-network", "--port", "0"]) == 0
    told = capsys.readouterr().err
    assert "WARNING commands.serve everybody who reaches 0.0.0.0:" in told and ":0 " not in told, "the port that it got"
    caplog.clear()


def test_the_compose_file_says_what_the_command_line_takes():
    """examples/home_assistant.yaml"""
    service = yaml.safe_load((ROOT / "examples" / "home_assistant.yaml").read_text(encoding="utf-8"))["services"]["tts"]
    assert service["entrypoint"][0] == "qwen-megakernel"
    args = cli.make_parser().parse_args([*service["entrypoint"][1:], *service["command"]])
    assert args.run == "serve:wyoming" and args.allow_network and f":{args.port}" in service["ports"][0]
