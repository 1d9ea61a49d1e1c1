"""vLLM-Omni's streaming socket: utterances one behind the other, PCM out; and what a hostile client gets. See also
test_entrances.py."""

import base64
import contextlib
import io
import json
import random
import re
from types import SimpleNamespace

import pytest
import soundfile
from callers import parts_of
from entrances import JUNK, NO_MESSAGE, StreamClient, fuzzed
from hypothesis import strategies as st
from serving import PATIENCE_S, TEXT, Running, audio_of, cloning, connect, endless, ready, recording, same, small_demo
from test_entrances import LIMITS
from websockets.exceptions import ConnectionClosed

from qwen_megakernel.engine.audio import Audio
from qwen_megakernel.model.pcm import pcm16
from qwen_megakernel.server.omni.api import _Text


@pytest.fixture(scope="module")
def server():
    with ready(small_demo, limits=LIMITS) as server:
        yield server


@pytest.fixture
def client(server):
    with connect(server.stream_url) as line:
        yield StreamClient(line)


def audio_in_pieces(server: Running, text: str = TEXT, **options) -> Audio:
    return audio_of(server, text, **{"non_streaming_mode": False} | options)


def said(server: Running, text: str = TEXT, **options) -> bytes:
    return pcm16(audio_in_pieces(server, text, **options).samples)


def test_two_turns_of_words_are_what_the_engine_says(server, client, fresh_seed):
    rng = random.Random(fresh_seed)
    client.configure(language="Auto")
    for turn, text in enumerate((TEXT, "And now for something else.")):
        at = 0
        while at < len(text):
            size = rng.randint(1, 9)
            client.speak(text[at : at + size], end=False)
            at += size
        client.speak()
        start = client.until("audio.start")
        done, audio = client.until("audio.done"), audio_in_pieces(server, text)
        assert same(client.pcm, pcm16(audio.samples))
        assert start.pop("sentence_text") in text
        wanted = {"utterance_index": turn, "sentence_index": 0, "format": "pcm", "sample_rate": 24000, "channels": 1}
        assert start == {"type": "audio.start", "seed": 5} | wanted
        ended = {"utterance_index": turn, "sentence_index": 0, "total_bytes": len(client.pcm), "error": False}
        assert done == {"type": "audio.done", "finish_reason": audio.finish_reason} | ended
        assert client.take() == {"type": "session.done", "utterance_index": turn, "total_sentences": 1}


def test_speech_begins_before_its_text_is_complete(client):
    client.configure()
    client.speak("Hello there, ", end=False)
    client.until("audio")
    assert client.hear("how are you?")["error"] is False


@pytest.mark.parametrize("late", [False, True])
async def test_a_text_whose_end_is_there_already_is_spoken_as_a_whole(late):
    """Its codes are the same either way; the whole text saves a call into the engine."""
    inbox = [("input.text", {"text": "you today?"}), ("input.done", {})]

    class Stream:
        service = SimpleNamespace(limits=LIMITS)
        has_message = property(lambda _self: bool(inbox) and not late)

        async def next_message(self):
            return inbox.pop(0)

    text = _Text(Stream())
    text.add({"text": "Hello there, how are "})
    assert await text.begins()
    await text.glance()
    assert text.complete is not late and text.pending == ("Hello there, how are " if late else TEXT)


def test_an_empty_flush_is_answered_at_once(client):
    client.configure()
    for turn, text in enumerate((None, "", " \n")):
        client.speak(*([] if text is None else [text]))
        assert client.take() == {"type": "session.done", "utterance_index": turn, "total_sentences": 0}


@pytest.mark.parametrize(
    "how",
    [
        {"response_format": "pcm"},
        {"response_format": "wav", "stream_audio": False},
        {"timestamp_type": "word"},
        {"word_timestamps": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("pieces", [("...",), ("\U0001f44d",), ("*", " *"), ("[pause]",), ("\u30fc",)], ids=ascii)
def test_text_without_words_is_a_moment_of_silence(client, pieces, how):
    client.configure(**how)
    client.speak(*pieces)
    start, done = client.until("audio.start"), client.until("audio.done")
    assert start["seed"] == 5 and done["error"] is False and done["finish_reason"] == "eos"
    chunks = [base64.b64decode(told["audio_b64"]) for told in client.told if told["type"] == "audio.chunk"]
    sound = b"".join(chunks) or client.pcm
    assert sound[44 * (start["format"] == "wav") :] == bytes(2 * 2400) and done["total_bytes"] == len(sound)
    assert client.take() == {"type": "session.done", "utterance_index": 0, "total_sentences": 1}


def test_words_come_with_their_times(client):
    client.configure(timestamp_type="word", timestamp_transport_strategy="sync")
    told = client.hear(TEXT)["timestamp_info"]
    aligned = told["word_alignment"]
    assert told["measured"]
    starts, ends = aligned["word_start_times_seconds"], aligned["word_end_times_seconds"]
    assert aligned["words"] == TEXT.split() and 0 <= starts[0] < 0.3 and starts == sorted(starts)
    assert ends[:-1] == starts[1:] and ends[-1] == round(len(client.pcm) / 48000, 3)


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.slow), False])
def test_text_longer_than_a_slot_goes_on_behind_a_sentence(server, client, whole):
    text = " ".join([TEXT] * 3 + ["The end."])
    client.configure(timestamp_type="word")
    done = client.hear(*([text] if whole else re.findall(r"\S+ ?", text)))
    assert done["error"] is False and client.words_of(done) == text.split()
    parts = parts_of(server.service.engine, text)
    assert len(parts) > 1 and client.pcm == b"".join(said(server, part) for part in parts)
    assert client.take()["total_sentences"] == 1


def test_text_in_pieces_needs_the_streaming_layout(server, client):
    client.configure(non_streaming_mode=True)
    client.speak("Hello there, ", "how are you?", end=False)
    told = client.take()
    assert told["type"] == "error" and told["field"] == "text" and told["utterance_index"] == 0
    assert "needs the whole text in one input.text, but more came: send it whole, or" in told["message"]
    client.speak()
    assert client.take() == {"type": "session.done", "utterance_index": 0, "total_sentences": 1}
    client.speak(TEXT)
    client.until("session.done")
    assert client.pcm == said(server, non_streaming_mode=True)


def test_settings_stay_until_others_come(server, client):
    client.configure()
    for voice, seed in ((None, 5), ("max", 6), (None, 6)):
        if voice:
            client.configure(voice=voice, seed=seed)
        client.hear("Hello there.")
    assert client.pcm == said(server, "Hello there.", seed=6, speaker="max")


@pytest.mark.parametrize("length", ["max_new_tokens", "max_tokens"])
def test_chunks_and_length_can_be_set(client, length):
    client.configure(initial_codec_chunk_frames=3, top_k=-1, **{length: 5})
    client.speak(TEXT)
    client.until("audio.start")
    client.take()
    assert len(client.pcm) == 3 * 1920 * 2
    done = client.until("audio.done")
    assert done["finish_reason"] == "length" and done["error"] is False and len(client.pcm) == 5 * 1920 * 2


@pytest.mark.parametrize("flushed", [True, False])
def test_session_close_ends_behind_what_was_flushed_and_drops_the_rest(server, client, flushed):
    client.configure()
    client.speak(TEXT if flushed else "Hello there, ", end=flushed)
    if not flushed:
        client.until("audio.start")
    client.say("session.close")
    with pytest.raises(ConnectionClosed):
        client.drain()
    if flushed:
        assert client.told[-1]["type"] == "session.done" and client.pcm == said(server)
        assert client.line.close_code == 1000
    server.at_rest()


@pytest.mark.parametrize(
    "message, words",
    [
        *NO_MESSAGE,
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
    assert told["type"] == "error" and re.search(words, told["message"])
    assert client.answers()


@pytest.mark.parametrize(
    "wrong, words",
    [({"text": 3}, "text must be a string, got 3"), ({}, "got None"), ({"text": "x" * 600}, "may have at most 600")],
)
def test_text_that_cannot_be_taken_ends_its_utterance_alone(server, client, wrong, words):
    client.configure()
    client.speak("Hello there, ", end=False)
    client.until("audio.start")
    client.say("input.text", **wrong)
    assert words in client.until("error")["message"]
    assert client.take()["error"] is True
    client.speak("This is not said.")
    assert client.take()["type"] == "session.done"
    client.speak(TEXT)
    client.until("session.done")
    assert client.pcm == said(server)


def test_settings_of_an_open_utterance_stay(client):
    client.configure()
    client.speak("Hello there, ", end=False)
    client.until("audio.start")
    client.configure(voice="max")
    assert "send input.done first" in client.until("error")["message"]
    client.say("voice.list")
    assert client.until("voice.list.result")["voices"][0] == "ada"
    client.speak()
    assert client.until("audio.done")["error"] is False


def test_speech_that_its_slot_cuts_is_an_error(tiny):
    with endless(tiny) as server, connect(server.stream_url) as line:
        client = StreamClient(line)
        client.configure(voice=None)
        client.speak("Hello.")
        assert "its slot is full" in client.until("error")["message"]
        assert client.take()["error"] is True and client.take()["type"] == "session.done"


def test_voices_are_added_used_and_deleted(tiny, tmp_path):
    audio = base64.b64encode(recording()).decode()
    with cloning(tiny, voices=tmp_path, allow_upload=True) as server, connect(server.stream_url) as line:
        client = StreamClient(line)
        for wrong, field in (
            ({"name": "../x", "audio_data": audio}, "name"),
            ({"name": "ben"}, "audio_data"),
            ({"name": "ben", "audio_data": "?"}, "audio_data"),
            ({"name": "ben", "audio_data": "/etc/passwd"}, "audio_data"),
            ({"name": "ben", "audio_data": audio, "ref_text": 3}, "ref_text"),
            ({"name": "ben", "audio_data": "data:audio/wav," + audio}, "audio_data"),
            ({"name": "ben", "audio_data": audio, "speaker_embedding": [1]}, "speaker_embedding"),
        ):
            client.say("voice.add", **wrong)
            told = client.take()
            assert told["type"] == "error" and told["field"] == field, told
        url = "data:audio/wav;base64," + audio
        client.say("voice.add", name="ben", audio_data=url, ref_text=" ", audio_format="wav", consent="yes")
        assert client.take() == {"type": "voice.add.result", "success": True, "voice": {"name": "ben"}}
        client.say("voice.list")
        listed = {"type": "voice.list.result", "voices": [], "uploaded_voices": [{"name": "ben"}]}
        assert client.take() == listed
        client.configure(task_type="Base", voice="Ben", max_new_tokens=4)
        assert client.hear("Hello.")["error"] is False
        client.until("session.done")
        for kind in ("voice.delete", "voice.remove"):
            client.say(kind, name="ben")
            assert client.take() == {"type": f"{kind}.result", "success": True, "name": "ben"}
            client.say(kind, name="ben")
            assert client.take()["field"] == "name"
            client.say("voice.add", name="ben", audio_data=audio)
            client.take()
        assert [path.name for path in tmp_path.iterdir()] == ["ben.safetensors"]


def test_a_flood_that_nobody_answers_ends_the_socket(server, client):
    client.configure()
    client.speak(" ".join([TEXT] * 8))
    with contextlib.suppress(ConnectionClosed):
        for _ in range(100_000):
            client.speak("x", end=False)
    with pytest.raises(ConnectionClosed):
        client.drain()
    server.at_rest()


kinds = ["session.config", "input.text", "input.done", "voice.list", "voice.add", "voice.delete", "voice.remove"]
messages = st.fixed_dictionaries({"type": st.sampled_from([*kinds, "session.close"]) | JUNK}) | st.fixed_dictionaries(
    {"type": st.sampled_from(kinds)},
    optional={
        "text": st.text(max_size=40) | JUNK,
        "voice": st.sampled_from(["ada", "max"]) | JUNK,
        "language": st.sampled_from(["Auto", "English"]) | JUNK,
        "seed": st.integers(0, 9) | JUNK,
        "speed": st.just(1.0) | JUNK,
        "temperature": st.floats(0.1, 2) | JUNK,
        "top_k": st.integers(1, 99) | JUNK,
        "max_new_tokens": st.integers(1, 20) | JUNK,
        "initial_codec_chunk_frames": st.integers(0, 9) | JUNK,
        "timestamp_type": st.just("word") | JUNK,
        "name": st.text(max_size=9) | JUNK,
        "audio_data": st.text(max_size=9) | JUNK,
    },
)
config = {"type": "session.config", "response_format": "pcm", "voice": "ada"}
good = st.sampled_from([config, {"type": "input.text", "text": TEXT}, {"type": "input.done"}])


sent = st.lists((messages | good).map(json.dumps) | st.text(max_size=30) | st.binary(max_size=30), max_size=8)


@pytest.fixture(scope="module")
def taking_voices():
    """A server that makes voices, for a model that takes none."""
    with ready(small_demo, limits=LIMITS, allow_upload=True) as server:
        yield server


@fuzzed(st.tuples(st.booleans(), sent), "taking_voices")
def test_nothing_that_a_client_sends_is_an_error_of_ours(server, speaking_and_sent):
    speaking, sent = speaking_and_sent
    with connect(server.stream_url, close_timeout=1) as line:
        client = StreamClient(line)
        with contextlib.suppress(ConnectionClosed):
            if speaking:
                client.configure()
                client.speak("Hello there, ", end=False)
                client.until("audio.start")
            for message in sent:
                line.send(message)
            client.say("session.close")
            client.drain()
    assert not [told for told in client.told if told.get("code") == "failed"], client.told
    server.at_rest()


# ---------------------------------------------------------------- as vLLM-Omni's own client asks


@pytest.mark.parametrize("left_out", [(), ("response_format", "stream_audio")])
def test_chunks_carry_audio_and_the_words_whose_times_are_known(client, server, left_out):
    client.configure(word_timestamps=True, **dict.fromkeys(left_out))
    client.speak(TEXT)
    done = client.until("audio.done")
    chunks = [told for told in client.told if told["type"] == "audio.chunk"]
    audio = b"".join(base64.b64decode(chunk["audio_b64"]) for chunk in chunks)
    assert audio == said(server) and done["total_bytes"] == len(audio)
    words = [word for chunk in chunks for word in chunk["timestamps"]]
    assert [word["word"] for word in words] == TEXT.split() and chunks[0]["timestamps"] == []
    assert words[-1]["end_ms"] == pytest.approx(len(audio) / 48, abs=1)
    assert all(chunk["measured"] for chunk in chunks if chunk["timestamps"])
    assert [chunk["chunk_id"] for chunk in chunks] == list(range(len(chunks)))
    assert chunks[0]["chunk_start_ms"] == 0 and chunks[-1]["chunk_end_ms"] == len(audio) // 48
    assert not any(told["type"] == "audio" for told in client.told)


def test_times_of_words_may_come_behind_all_audio(client):
    client.configure(timestamp_type="word", timestamp_transport_strategy="async")
    assert "timestamp_info" not in client.hear(TEXT)
    told = client.take()
    assert told["type"] == "timestamps" and client.words_of(told) == TEXT.split()
    assert client.take()["type"] == "session.done"


def test_without_stream_audio_an_utterance_is_one_file(client, server):
    for fields, rate in (
        ({"response_format": "wav"}, 24000),
        ({"response_format": "FLAC", "sample_rate": "16000"}, 16000),
    ):
        client.told.clear()
        client.configure(stream_audio=None, **fields)
        done = client.hear(TEXT)
        samples, got = soundfile.read(io.BytesIO(client.pcm), dtype="int16")
        assert got == rate and done["total_bytes"] == len(client.pcm)
        assert sum(told["type"] == "audio" for told in client.told) == 1
        assert abs(len(samples) / rate - len(said(server)) / 48000) < 0.05
        client.until("session.done")


def test_speaker_is_voice_and_what_changes_nothing_is_named(client, server):
    client.configure(voice=None, speaker="Max", language="", split_granularity="sentence", extra_params={"a": 1})
    client.speak(TEXT)
    assert client.until("audio.start")["ignored"] == ["extra_params"]
    client.until("audio.done")
    assert client.pcm == said(server, speaker="max")


def test_settings_bring_a_voice_along(tiny):
    sound = base64.b64encode(recording()).decode()
    with cloning(tiny, allow_clone=True) as server:
        with connect(server.stream_url) as line:
            client = StreamClient(line)
            config = {"task_type": "Base", "voice": None, "max_new_tokens": 6, "ref_text": "Hi."}
            client.configure(**config, ref_audio=sound)
            assert client.hear("Hello there.")["error"] is False
            client.until("session.done")
            client.configure(**config, ref_audio="https://example.com/a.wav")
            assert "opens no addresses" in client.take()["message"]
        with connect(server.socket_url) as line:
            settings = {"ref_audio": sound, "ref_text": "Hi.", "max_frames": 6, "seed": 5}
            line.send(json.dumps({"type": "text", "context": "a", "text": "Hello there.", "end": True} | settings))
            pcm = b""
            while (told := line.recv(timeout=PATIENCE_S)) and not (isinstance(told, str) and '"end"' in told):
                pcm += told[4:] if isinstance(told, bytes) else b""
                assert isinstance(told, bytes) or "error" not in told, told
        assert pcm == client.pcm and len(server.service._clones._made) == 1
