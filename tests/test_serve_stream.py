"""vLLM-Omni's streaming socket: utterances one behind the other, PCM out; and what a hostile client gets."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import logging
import random
import re
import socket
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from callers import parts_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import PATIENCE_S, Running, connect, places_taken, ready, running, small_demo, until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from qwen_megakernel import SamplingParams, TTSEngine
from qwen_megakernel.checkpoint.synthetic import NO_EOS
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.stream_api import _Text

TEXT = "Hello there, how are you today?"
CONFIG = {"task_type": "CustomVoice", "response_format": "pcm", "stream_audio": True, "speed": 1.0, "voice": "ada"}
LIMITS = Limits(max_text=600, max_body=8192, idle_s=10 * PATIENCE_S, total_s=10 * PATIENCE_S)


@pytest.fixture(scope="module")
def server():
    with ready(small_demo, limits=LIMITS) as server:
        yield server


class Client:
    """Sends, and keeps what comes.

    Attributes:
        told: every message; a binary one as {"type": "audio"}.
        pcm: of the latest audio.start.
    """

    def __init__(self, line: ClientConnection):
        self.line, self.told, self.pcm = line, [], b""

    def say(self, kind: str, **fields) -> None:
        self.line.send(json.dumps({"type": kind} | fields))

    def configure(self, **more) -> None:
        self.say("session.config", **(CONFIG | {"seed": 5} | more))

    def take(self) -> dict:
        message = self.line.recv(timeout=PATIENCE_S)
        if isinstance(message, bytes):
            self.pcm += message
            message = '{"type": "audio"}'
        told = json.loads(message)
        self.told.append(told)
        if told["type"] == "audio.start":
            self.pcm = b""
        return told

    def until(self, kind: str) -> dict:
        while (told := self.take())["type"] != kind:
            pass
        return told

    def answers(self) -> bool:
        """As LiveKit's keep-alive asks it."""
        self.say("input.done")
        return self.take()["type"] == "session.done"


@pytest.fixture
def client(server):
    with connect(server.stream_url) as line:
        yield Client(line)


def said(server: Running, text: str = TEXT, seed: int = 5, **options):
    options = {"non_streaming_mode": False, "sampling": SamplingParams(seed=seed), "speaker": "ada"} | options
    return server.service.engine.generate(text, **options)


def test_two_turns_of_words_are_what_the_engine_says(server, client, fresh_seed):
    rng = random.Random(fresh_seed)
    client.configure(language="Auto")
    for turn, text in enumerate((TEXT, "And now for something else.")):
        at = 0
        while at < len(text):
            size = rng.randint(1, 9)
            client.say("input.text", text=text[at : at + size])
            at += size
        client.say("input.done")
        start = client.until("audio.start")
        done, audio = client.until("audio.done"), said(server, text)
        assert client.pcm == pcm16(audio.samples)
        assert start.pop("sentence_text") in text
        wanted = {"utterance_index": turn, "sentence_index": 0, "format": "pcm", "sample_rate": 24000, "channels": 1}
        assert start == {"type": "audio.start", "seed": 5} | wanted
        ended = {"utterance_index": turn, "sentence_index": 0, "total_bytes": len(client.pcm), "error": False}
        assert done == {"type": "audio.done", "finish_reason": audio.finish_reason} | ended
        assert client.take() == {"type": "session.done", "utterance_index": turn, "total_sentences": 1}


def test_speech_begins_before_its_text_is_complete(client):
    client.configure()
    client.say("input.text", text="Hello there, ")
    while client.take()["type"] != "audio":
        pass
    client.say("input.text", text="how are you?")
    client.say("input.done")
    assert client.until("audio.done")["error"] is False


@pytest.mark.parametrize("late", [False, True])
def test_a_text_whose_end_is_there_already_is_spoken_as_a_whole(late):
    """Its codes are the same either way; the whole text saves a call into the engine."""
    inbox = [("input.text", {"text": "you today?"}), ("input.done", {})]

    class Stream:
        service = SimpleNamespace(limits=LIMITS)
        has_message = property(lambda _self: bool(inbox) and not late)

        async def next_message(self):
            return inbox.pop(0)

    async def take() -> _Text:
        text = _Text(Stream())
        text.add({"text": "Hello there, how are "})
        assert await text.begins()
        await text.glance()
        return text

    text = asyncio.run(take())
    assert text.complete is not late and text.pending == ("Hello there, how are " if late else TEXT)


def test_an_empty_flush_is_answered_at_once(client):
    client.configure()
    for turn, text in enumerate((None, "", " \n")):
        if text is not None:
            client.say("input.text", text=text)
        client.say("input.done")
        assert client.take() == {"type": "session.done", "utterance_index": turn, "total_sentences": 0}


def test_words_come_with_their_times(client):
    client.configure(timestamp_type="word", timestamp_transport_strategy="sync")
    client.say("input.text", text=TEXT)
    client.say("input.done")
    aligned = client.until("audio.done")["timestamp_info"]["word_alignment"]
    starts, ends = aligned["word_start_times_seconds"], aligned["word_end_times_seconds"]
    assert aligned["words"] == TEXT.split() and starts[0] == 0 and starts == sorted(starts)
    assert ends[:-1] == starts[1:] and ends[-1] == round(len(client.pcm) / 48000, 3)


@pytest.mark.parametrize("whole", [True, False])
def test_text_longer_than_a_slot_goes_on_behind_a_sentence(server, client, whole):
    text = " ".join([TEXT] * 8 + ["The end."])
    client.configure(timestamp_type="word")
    for piece in [text] if whole else re.findall(r"\S+ ?", text):
        client.say("input.text", text=piece)
    client.say("input.done")
    done = client.until("audio.done")
    assert done["error"] is False and done["timestamp_info"]["word_alignment"]["words"] == text.split()
    parts = parts_of(server.service.engine, text)
    assert len(parts) > 1 and client.pcm == b"".join(pcm16(said(server, part).samples) for part in parts)
    assert client.take()["total_sentences"] == 1


@pytest.mark.parametrize("mode", [True, False])
def test_the_layout_of_whole_text_can_be_chosen(server, client, mode):
    client.configure(non_streaming_mode=mode, timestamp_type="word")
    for turn, text in enumerate((TEXT, "And now for something else.")):
        client.say("input.text", text=text)
        client.say("input.done")
        done = client.until("audio.done")
        assert client.pcm == pcm16(said(server, text, non_streaming_mode=mode).samples)
        assert done["utterance_index"] == turn
        assert done["timestamp_info"]["word_alignment"]["words"] == text.split()
        assert client.take()["type"] == "session.done"


def test_whole_text_longer_than_a_slot_is_cut_too(server, client):
    text = " ".join([TEXT] * 8 + ["The end."])
    client.configure(non_streaming_mode=True)
    client.say("input.text", text=text)
    client.say("input.done")
    pieces = server.service.engine.pieces(text, speaker="ada")
    assert client.until("audio.start")["sentence_text"] == text
    client.until("audio.done")
    spoken = [pcm16(said(server, piece, non_streaming_mode=True).samples) for piece in pieces]
    assert len(pieces) > 1 and client.pcm == b"".join(spoken) and client.take()["total_sentences"] == 1


def test_text_in_pieces_needs_the_streaming_layout(server, client):
    client.configure(non_streaming_mode=True)
    for piece in ("Hello there, ", "how are you?"):
        client.say("input.text", text=piece)
    told = client.take()
    assert told["type"] == "error" and told["field"] == "text" and told["utterance_index"] == 0
    assert "needs the whole text in one input.text, but more came: send it whole, or" in told["message"]
    client.say("input.done")
    assert client.take() == {"type": "session.done", "utterance_index": 0, "total_sentences": 0 + 1}
    client.say("input.text", text=TEXT)
    client.say("input.done")
    client.until("session.done")
    assert client.pcm == pcm16(said(server, non_streaming_mode=True).samples)


def test_settings_stay_until_others_come(server, client):
    client.configure()
    for voice, seed in ((None, 5), ("max", 6), (None, 6)):
        if voice:
            client.configure(voice=voice, seed=seed)
        client.say("input.text", text=TEXT)
        client.say("input.done")
        client.until("session.done")
    last = server.service.engine.generate(
        TEXT, speaker="max", sampling=SamplingParams(seed=6), non_streaming_mode=False
    )
    assert client.pcm == pcm16(last.samples)


def test_chunks_and_length_can_be_set(client):
    client.configure(initial_codec_chunk_frames=3, max_new_tokens=5)
    client.say("input.text", text=TEXT)
    client.say("input.done")
    client.until("audio.start")
    client.take()
    assert len(client.pcm) == 3 * 1920 * 2
    done = client.until("audio.done")
    assert done["finish_reason"] == "length" and done["error"] is False and len(client.pcm) == 5 * 1920 * 2


def test_who_hangs_up_frees_the_slot(server):
    for complete in (True, False):
        with connect(server.stream_url) as line:
            client = Client(line)
            client.configure()
            client.say("input.text", text=" ".join([TEXT] * 8))
            if complete:
                client.say("input.done")
            client.until("audio.start")
            line.socket.shutdown(socket.SHUT_RDWR)
        server.at_rest()


def test_session_close_ends_behind_what_was_flushed(server, client):
    client.configure()
    client.say("input.text", text=TEXT)
    client.say("input.done")
    client.say("session.close")
    with pytest.raises(ConnectionClosed):
        while True:
            client.take()
    assert client.told[-1]["type"] == "session.done" and client.pcm == pcm16(said(server).samples)
    assert client.line.close_code == 1000


def test_session_close_drops_what_was_not_flushed(server, client):
    client.configure()
    client.say("input.text", text="Hello there, ")
    client.until("audio.start")
    client.say("session.close")
    with pytest.raises(ConnectionClosed):
        while True:
            client.take()
    server.at_rest()


@pytest.mark.parametrize(
    "wrong, field, words",
    [
        ({"task_type": "Base"}, "task_type", "is a CustomVoice checkpoint, got task_type 'Base': set task_type to"),
        ({"task_type": "VoiceDesign"}, "task_type", "is a CustomVoice checkpoint"),
        ({"model": "tts-9"}, "model", "this server's model is 'demo', got 'tts-9'"),
        ({"voice": "alloy"}, "voice", "unknown voice 'alloy'; known: ada"),
        ({"voice": 3}, "voice", "voice must be a string, got 3"),
        ({"language": "klingon"}, "language", "unknown language"),
        ({"instructions": "Slowly."}, "instructions", "leave them out"),
        ({"instructions": "x" * 2001}, "instructions", "2001 characters, at most 2000"),
        ({"response_format": "wav"}, "response_format", "response_format must be 'pcm', got 'wav'"),
        ({"response_format": None}, "response_format", "response_format must be 'pcm', but is missing"),
        ({"stream_audio": False}, "stream_audio", "stream_audio must be True"),
        ({"stream_audio": 1}, "stream_audio", "stream_audio must be True"),
        ({"speed": 5}, "speed", "speed must be a number from 0.25 to 4.0, got 5"),
        ({"speed": True}, "speed", "speed must be a number, got True"),
        ({"sample_rate": 16000}, "sample_rate", "sample_rate must be 24000"),
        ({"timestamp_type": "phoneme"}, "timestamp_type", "must be 'word'"),
        ({"timestamp_transport_strategy": "async"}, "timestamp_transport_strategy", "must be 'sync'"),
        ({"word_timestamps": True}, "word_timestamps", "ask for timestamp_type 'word'"),
        ({"split_granularity": "sentence"}, "split_granularity", "spoken as it comes"),
        ({"ref_audio": "/etc/passwd"}, "ref_audio", "add one with voice.add"),
        ({"x_vector_only_mode": True}, "x_vector_only_mode", "must be False"),
        ({"max_new_tokens": 0}, "max_new_tokens", "at least 1"),
        ({"initial_codec_chunk_frames": 1001}, "initial_codec_chunk_frames", "0 to 1000"),
        ({"seed": "5"}, "seed", "seed must be an integer, got '5'"),
        ({"non_streaming_mode": 1}, "non_streaming_mode", "non_streaming_mode must be true or false, got 1"),
        ({"temperature": 0}, None, "temperature"),
        ({"dance": 1}, "dance", "unknown field 'dance' of session.config; known: model, voice"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_had_name_field_and_remedy(client, wrong, field, words):
    client.configure()
    client.configure(**wrong)
    told = client.take()
    assert told["type"] == "error" and told["code"] == "invalid" and told["retryable"] is False
    assert told.get("field") == field and words in told["message"]
    assert client.answers()  # the session goes on


@pytest.mark.parametrize(
    "message, words",
    [
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("[]", "must be a JSON object, got []"),
        (b"\0" * 8, "JSON in a text frame, got a binary one"),
        ("[" * 8000, "must be JSON"),
        ("x" * 8193, "has 8193 characters, at most 8192"),
        ('{"type": "dance"}', "type must be one of session.config, input.text, input.done"),
        ('{"type": ["input.text"]}', "type must be one of"),
        ("{}", "type must be one of session.config"),
        ('{"type": "input.done", "x": 1}', "unknown field 'x' of input.done; known: none"),
        ('{"type": "input.text", "text": "x", "voice": "ada"}', "unknown field 'voice' of input.text; known: text"),
        ('{"type": "input.text", "text": "Hello"}', "send session.config first"),
        ('{"type": "voice.add", "name": "x"}', "start it with --allow-upload"),
        ('{"type": "voice.delete", "name": "x"}', "start it with --allow-upload"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_message_is_told_so_and_the_session_goes_on(client, message, words):
    client.line.send(message)
    told = client.take()
    assert told["type"] == "error" and words in told["message"]
    assert client.answers()


@pytest.mark.parametrize(
    "wrong, words",
    [({"text": 3}, "text must be a string, got 3"), ({}, "got None"), ({"text": "x" * 600}, "may have at most 600")],
)
def test_text_that_cannot_be_taken_ends_its_utterance_alone(server, client, wrong, words):
    client.configure()
    client.say("input.text", text="Hello there, ")
    client.until("audio.start")
    client.say("input.text", **wrong)
    assert words in client.until("error")["message"]
    assert client.take()["error"] is True
    client.say("input.text", text="This is not said.")
    client.say("input.done")
    assert client.take()["type"] == "session.done"
    client.say("input.text", text=TEXT)
    client.say("input.done")
    client.until("session.done")
    assert client.pcm == pcm16(said(server).samples)


def test_settings_of_an_open_utterance_stay(client):
    client.configure()
    client.say("input.text", text="Hello there, ")
    client.until("audio.start")
    client.configure(voice="max")
    assert "send input.done first" in client.until("error")["message"]
    client.say("voice.list")
    assert client.until("voice.list.result")["voices"][0] == "ada"
    client.say("input.done")
    assert client.until("audio.done")["error"] is False


def test_speech_that_its_slot_cuts_is_an_error(tiny):
    folder = tiny("custom_voice", eos_gain=NO_EOS)
    load = lambda: TTSEngine.load(folder, device="cpu", max_streams=1, max_positions=48)  # noqa: E731
    with running(load, model="tiny") as server:
        until(lambda: server.service.state == "ready")
        with connect(server.stream_url) as line:
            client = Client(line)
            client.say("session.config", response_format="pcm")
            client.say("input.text", text="Hello.")
            client.say("input.done")
            assert "its slot is full" in client.until("error")["message"]
            assert client.take()["error"] is True and client.take()["type"] == "session.done"
        server.at_rest()


def test_a_full_server_is_busy(server, client):
    client.configure()
    with places_taken(server.service.engine, 8):
        client.say("input.text", text=TEXT)
        told = client.until("error")
        assert told["code"] == "busy" and told["retryable"] is True
        client.say("input.done")
        assert client.take()["type"] == "session.done"
    server.at_rest()


def test_a_text_that_does_not_go_on_is_ended():
    with running(small_demo, limits=dataclasses.replace(LIMITS, text_s=0.3, idle_s=1.0)) as server:
        until(lambda: server.service.state == "ready")
        with connect(server.stream_url) as line:
            client = Client(line)
            client.configure()
            client.say("input.text", text="Hello there, ")
            assert "no more text came" in client.until("error")["message"]
            with pytest.raises(ConnectionClosed):  # and who says no more is let go
                while True:
                    client.take()
        assert client.told[-1]["code"] == "idle" and "input.done to keep" in client.told[-1]["message"]
        server.at_rest()


@pytest.mark.parametrize("scheme", ["Bearer", "Api-Key"])
def test_the_token_comes_in_either_scheme(scheme):
    with running(small_demo, token="secret") as server:
        for given in ({}, {"Authorization": f"{scheme} wrong"}, {"Authorization": "Basic secret"}):
            with pytest.raises(InvalidStatus) as refused:
                connect(server.stream_url, additional_headers=given)
            assert refused.value.response.status_code == 401
        until(lambda: server.service.state == "ready")
        with connect(server.stream_url, additional_headers={"Authorization": f"{scheme} secret"}) as line:
            assert Client(line).answers()


def test_pages_of_others_are_not_let_in(server):
    with pytest.raises(InvalidStatus) as refused:
        connect(server.stream_url, origin="https://evil.example")
    assert refused.value.response.status_code == 403


def test_who_comes_too_early_is_told_to_try_again():
    def never() -> TTSEngine:
        raise RuntimeError("not today")

    with running(never) as server:
        until(lambda: server.service.state == "failed")
        with connect(server.stream_url) as line:
            client = Client(line)
            told = client.take()
            assert told["code"] == "closing" and told["retryable"] is True
            with pytest.raises(ConnectionClosed):
                client.take()
        assert line.close_code == 1013


def test_voices_are_added_used_and_deleted(tiny, tmp_path):
    folder, file = tiny("base", size="tiny", eos_gain=2.0), io.BytesIO()
    soundfile.write(file, np.random.default_rng(1).uniform(-0.3, 0.3, 24000), 24000, format="WAV")
    audio = base64.b64encode(file.getvalue()).decode()
    load = lambda: TTSEngine.load(folder, device="cpu", max_streams=2, max_positions=512)  # noqa: E731
    with running(load, voices=tmp_path, upload=True) as server:
        until(lambda: server.service.state == "ready")
        with connect(server.stream_url) as line:
            client = Client(line)
            for wrong, field in (
                ({"name": "../x", "audio_data": audio}, "name"),
                ({"name": "ben"}, "audio_data"),
                ({"name": "ben", "audio_data": "?"}, "audio_data"),
                ({"name": "ben", "audio_data": "/etc/passwd"}, "audio_data"),
                ({"name": "ben", "audio_data": audio, "ref_text": " "}, "ref_text"),
                ({"name": "ben", "audio_data": audio, "speaker_embedding": [1]}, "speaker_embedding"),
            ):
                client.say("voice.add", **wrong)
                told = client.take()
                assert told["type"] == "error" and told["field"] == field, told
            client.say("voice.add", name="ben", audio_data=audio, audio_format="wav", consent="yes")
            assert client.take() == {"type": "voice.add.result", "success": True, "voice": {"name": "ben"}}
            client.say("voice.list")
            listed = {"type": "voice.list.result", "voices": [], "uploaded_voices": [{"name": "ben"}]}
            assert client.take() == listed
            client.say("session.config", response_format="pcm", task_type="Base", voice="Ben", max_new_tokens=4)
            client.say("input.text", text="Hello.")
            client.say("input.done")
            assert client.until("audio.done")["error"] is False
            client.until("session.done")
            for kind in ("voice.delete", "voice.remove"):
                client.say(kind, name="ben")
                assert client.take() == {"type": f"{kind}.result", "success": True, "name": "ben"}
                client.say(kind, name="ben")
                assert client.take()["field"] == "name"
                client.say("voice.add", name="ben", audio_data=audio)
                client.take()
        assert [path.name for path in tmp_path.iterdir()] == ["ben.safetensors"]
        server.at_rest()


def test_a_flood_that_nobody_answers_ends_the_socket(server, client):
    client.configure()
    client.say("input.text", text=" ".join([TEXT] * 8))
    client.say("input.done")
    with contextlib.suppress(ConnectionClosed):
        for _ in range(100_000):
            client.say("input.text", text="x")
    with pytest.raises(ConnectionClosed):
        while True:
            client.take()
    server.at_rest()


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
kinds = ["session.config", "input.text", "input.done", "voice.list", "voice.add", "voice.delete", "voice.remove"]
messages = st.fixed_dictionaries({"type": st.sampled_from([*kinds, "session.close"]) | junk}) | st.fixed_dictionaries(
    {"type": st.sampled_from(kinds)},
    optional={
        "text": st.text(max_size=40) | junk,
        "voice": st.sampled_from(["ada", "max"]) | junk,
        "language": st.sampled_from(["Auto", "English"]) | junk,
        "seed": st.integers(0, 9) | junk,
        "speed": st.just(1.0) | junk,
        "temperature": st.floats(0.1, 2) | junk,
        "top_k": st.integers(1, 99) | junk,
        "max_new_tokens": st.integers(1, 20) | junk,
        "initial_codec_chunk_frames": st.integers(0, 9) | junk,
        "timestamp_type": st.just("word") | junk,
        "name": st.text(max_size=9) | junk,
        "audio_data": st.text(max_size=9) | junk,
    },
)
good = st.sampled_from(
    [{"type": "session.config"} | CONFIG, {"type": "input.text", "text": TEXT}, {"type": "input.done"}]
)


@pytest.fixture(scope="module")
def cloning():
    """A server that makes voices, for a model that takes none."""
    with ready(small_demo, limits=LIMITS, upload=True) as server:
        yield server


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.booleans(),
    st.lists((messages | good).map(json.dumps) | st.text(max_size=30) | st.binary(max_size=30), max_size=8),
)
def test_nothing_that_a_client_sends_is_an_error_of_ours(cloning, caplog, speaking, sent):
    with connect(cloning.stream_url, close_timeout=1) as line, caplog.at_level(logging.DEBUG):
        client = Client(line)
        with contextlib.suppress(ConnectionClosed):
            if speaking:
                client.configure()
                client.say("input.text", text="Hello there, ")
                client.until("audio.start")
            for message in sent:
                line.send(message)
            client.say("session.close")
            while True:
                client.take()
    assert not [told for told in client.told if told.get("code") == "failed"], client.told
    assert "Traceback" not in caplog.text and not [record for record in caplog.records if record.exc_info]
    cloning.at_rest()
