"""Requests as other servers' clients send them, over HTTP: names of fields, pages of other sites, lists of voices."""

import asyncio
import base64
import gzip
import io
import json
import math
import socket
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from serving import TEXT, cloning, get, post, ready, recording, request, said, small_demo
from waiting import until_in_loop

from qwen_megakernel import TTSEngine
from qwen_megakernel.errors import BackendError, EngineBusy, RequestError
from qwen_megakernel.server.clones import Clone, Clones, read_clone
from qwen_megakernel.server.fields import FIELDS
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.openai.bodies import BATCH, SPEECH
from qwen_megakernel.server.origins import Origins
from qwen_megakernel.speech.rates import SpeechRates

PCM = {"response_format": "pcm", "seed": 5}


@pytest.fixture(scope="module")
def server():
    with ready(small_demo, openai_voices=True) as server:
        yield server


@pytest.mark.parametrize(
    "fields",
    [
        {"model": None},
        {"model": "", "voice": " Ada ", "language": "", "instructions": "  "},
        {"voice": "", "speaker": "ADA", "speed": "1.0", "response_format": "PCM", "seed": "5", "stream": "true"},
        {"voice": {"id": "ada"}, "language": "Auto", "task_type": "CustomVoice", "sample_rate": 24000},
        {"lang_code": None, "normalization_options": {"normalize": False}, "speakers": "false"},
        {"max_tokens": 4096, "max_new_tokens": None},
        {"temperature": None, "top_p": None, "retries": None, "word_timestamps": False},
        dict.fromkeys(("instructions", "speed", "stream_format", "language", "non_streaming_mode")),
    ],
    ids=str,
)
def test_fields_of_other_servers_change_nothing_that_they_do_not_say(server, fields):
    answer = server.post(**PCM | fields)
    assert answer.status_code == 200, answer.text
    assert answer.content == said(server) and "x-ignored" not in answer.headers


def test_the_volume_is_a_factor_on_the_samples(server):
    plain = np.frombuffer(said(server), "<i2").astype(float)
    for volume in (0, 0.5, "4"):
        heard = np.frombuffer(server.post(**PCM, volume_multiplier=volume).content, "<i2")
        assert abs(heard - np.clip(float(volume) * plain, -32767, 32767)).max() <= 4
    loud = server.post(**PCM, volume_multiplier=4, stream=False)
    clipped = (abs(4 * plain) > 32767 + 2).sum()
    assert 0 < clipped <= int(loud.headers["x-clipped"]) <= (abs(4 * plain) > 32767 - 2).sum()
    items = [{"input": TEXT, "volume_multiplier": 0}, TEXT]
    told = post(server.url + BATCH, json={"voice": "ada", "inputs": items, "volume_multiplier": 1} | PCM).json()["data"]
    silent, same = (base64.b64decode(entry["audio"]) for entry in told)
    assert same == said(server) and silent == bytes(len(same))


def test_a_top_k_of_minus_one_is_no_limit(server):
    unlimited, one = (server.post(**PCM, top_k=k).content for k in (0, 1))
    assert server.post(**PCM, top_k=-1).content == unlimited != one


def test_documented_fields_that_change_nothing_are_named(server):
    given = {name: "x" for name, field in FIELDS.items() if field.ignored}
    answer = server.post(**PCM, **given)
    assert answer.content == said(server) and answer.headers["x-ignored"].split(", ") == list(given)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"voice": "ada", "speaker": "max"}, "speaker", "two names of one field"),
        ({"max_new_tokens": "many"}, "max_frames", "must be an integer"),
        ({"max_tokens": 4, "max_new_tokens": 5}, "max_new_tokens", "two names of one field"),
        ({"top_k": -2}, "top_k", "top_k"),
        ({"initial_codec_chunk_frames": -1}, "initial_codec_chunk_frames", "from 0 to 1000"),
        ({"task_type": "Base"}, "task_type", "set task_type to 'CustomVoice'"),
        ({"sample_rate": 11}, "sample_rate", "must be one of 8000"),
        ({"ref_audio": "https://example.com/a.wav"}, "ref_audio", "opens no addresses"),
        ({"ref_audio": "/etc/passwd"}, "ref_audio", "opens no addresses and no files"),
        ({"ref_audio": "UklGRg=="}, "ref_audio", "--allow-clone"),
        ({"ref_text": "Hello."}, "ref_text", "send both"),
        ({"speaker_embedding": [0.0]}, "speaker_embedding", "--allow-clone"),
        ({"normalization_options": 3}, "normalization_options", "must be an object"),
        ({"pitch": 3}, "pitch", "unknown field"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_with_field_and_remedy(server, fields, field, words):
    answer = server.post(**fields)
    told = answer.json()["error"]
    assert answer.status_code == 400 and told["param"] == field and words in told["message"]


@pytest.mark.parametrize("rate", [8000, 16000, 48000])
def test_a_sample_rate_is_kept(server, rate):
    answer = server.post(response_format="wav", seed=5, sample_rate=rate, stream=False)
    samples, got = soundfile.read(io.BytesIO(answer.content))
    assert got == rate and int(answer.headers["content-length"]) == len(answer.content)
    assert abs(len(samples) / rate - len(said(server)) / 48000) < 0.05


def test_an_answer_that_is_not_streamed_has_its_length_and_the_times_of_words(server):
    answer = server.post(response_format="wav", seed=5, stream=False, word_timestamps=True)
    samples, _ = soundfile.read(io.BytesIO(answer.content))
    words = json.loads(answer.headers["x-word-timestamps"])
    assert answer.headers["x-word-timestamps-measured"] == "true"
    assert [word["word"] for word in words] == TEXT.split()
    assert words[-1]["end_ms"] == pytest.approx(len(samples) / 24, abs=2)
    assert all(one["end_ms"] == two["start_ms"] for one, two in zip(words, words[1:], strict=False))
    assert server.post(**PCM, word_timestamps=True).headers["x-ignored"] == "word_timestamps"


def test_requests_share_their_voices_pace_and_teach_it(server, monkeypatch):
    used, of = [], SpeechRates.of
    monkeypatch.setattr(SpeechRates, "of", lambda self, who: used.append(of(self, who)) or used[-1])
    monkeypatch.setattr(TTSEngine, "measures_words", False)
    paces = []
    for voice in ("ada", "ada", "max"):
        assert server.post(**PCM, voice=voice, stream_format="sse", word_timestamps=True).status_code == 200
        paces.append(used[-1].seconds)
    assert used[0] is used[1] is not used[2] and paces[0] != paces[1]


def events_of(answer) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


def test_events_tell_words_while_they_are_spoken(server):
    answer = server.post(**PCM, stream_format="sse", word_timestamps=True)
    events = events_of(answer)
    kinds = [event["type"] for event in events]
    assert kinds[-1] == "speech.audio.done" and kinds.index("speech.audio.words") < len(kinds) - 2
    words = [word["word"] for event in events if event["type"] == "speech.audio.words" for word in event["words"]]
    assert words == TEXT.split()
    assert all(event["measured"] for event in events if event["type"] == "speech.audio.words")
    audio, before = b"", 0  # before: without the latest sound
    for event in events:
        if event["type"] == "speech.audio.delta":
            audio, before = audio + base64.b64decode(event["audio"]), len(audio)
        elif event["type"] == "speech.audio.words":
            ends = [word["end_ms"] * 48 for word in event["words"]]
            assert before - 48 <= ends[0] <= ends[-1] <= len(audio) + 48, "as soon as the sound of a word is made"
    assert audio == said(server)


def test_stream_means_events_only_for_clients_that_accept_them(server):
    body = {"input": TEXT, "voice": "ada", "stream": True, **PCM}
    plain = post(server.url + SPEECH, json=body)
    assert plain.content == said(server)
    events = post(server.url + SPEECH, json=body, headers={"accept": "text/event-stream"})
    assert events.headers["content-type"].startswith("text/event-stream")


def test_a_batch_of_items_is_answered_in_vllm_omnis_form(server):
    items = [{"input": TEXT, "seed": 5}, {"input": "", "speaker": "max"}, {"input": "Hi.", "voice": "nobody"}]
    shared = {"voice": "ada", "response_format": "pcm"}
    refused = post(server.url + BATCH, json=shared | {"items": items})
    assert refused.status_code == 400 and "inputs.1.input" in refused.json()["error"]["param"]
    told = post(server.url + BATCH, json=shared | {"items": [items[0], items[2]]}).json()
    assert (told["total"], told["succeeded"], told["failed"]) == (2, 1, 1)
    spoken, failed = told["results"]
    assert base64.b64decode(spoken["audio_data"]) == said(server) and spoken["media_type"] == "audio/pcm"
    assert spoken["status"] == "success" and spoken["usage"]["output_tokens"] > 0
    assert failed["status"] == "error" and "unknown voice" in failed["error"]


# ---------------------------------------------------------------- several speakers


def test_names_in_brackets_change_the_speaker(server):
    text = "[ada] Hello there. [voice:max] And you? [pause 400ms] [ada] Fine."
    answer = server.post(**PCM, input=text, speakers=True)
    silence = b"\0" * (24000 * 2 * 39 // 100)  # but for the fade at its ends
    parts = [said(server, "Hello there."), said(server, "And you?", speaker="max"), said(server, "Fine.")]
    assert answer.content.startswith(parts[0]) and silence in answer.content
    assert abs(len(answer.content) - len(b"".join(parts)) - len(silence)) < 24000  # silence beside a pause is cut
    assert server.post(**PCM, input="[ada] Hi.", allow_voice_tags=True).content == said(server, "Hi.")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[eve] Hello.", "unknown; known: ada"),
        ("Hello. [voice:eve] Hi.", "'eve'"),
        ("Hi\n[eve] Hello.", "Write \\[eve]"),
    ],
)
def test_unknown_speakers_are_told(server, text, words):
    told = server.post(**PCM, input=text, speakers=True).json()["error"]
    assert words in told["message"] and told["param"] == "input"


def test_brackets_are_text_without_speakers_and_in_prose(server):
    assert server.post(**PCM, input="[max] Hi.").content == said(server, "[max] Hi.")
    assert server.post(**PCM, input="Hi [laughs] there.", speakers=True).content == said(server, "Hi [laughs] there.")


# ---------------------------------------------------------------- lists and pages


def test_voices_and_models_are_listed_as_user_interfaces_ask_for_them(server):
    voices = get(f"{server.url}/v1/audio/voices").json()
    for path in ("/audio/voices", "/audio/models"):
        assert get(server.url + path).json() == get(f"{server.url}/v1{path}").json()
    names = [voice["id"] for voice in voices["voices"]]
    assert names[:2] == ["ada", "max"] and {"alloy", "shimmer"} <= set(names) and voices["uploaded_voices"] == []
    assert all(voice["name"] == voice["id"] for voice in voices["voices"])
    assert get(f"{server.url}/v1/audio/voices?legacy=true").json()["voices"] == names
    assert {"id": "tts-1", "name": "tts-1"} in get(f"{server.url}/v1/audio/models").json()["models"]
    assert server.post(**PCM, voice="alloy").content == said(server)
    assert server.post(**PCM, voice="ash").content == said(server, speaker="max")


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/voices", "/v1/audio/voices", "/metrics"])
def test_head_is_get_without_its_body(server, path):
    head, whole = request("HEAD", server.url + path), get(server.url + path)
    assert head.status_code == whole.status_code == 200 and head.content == b"" != whole.content


ORIGIN = "https://app.example:8443"
STAINLESS = "authorization,content-type,x-stainless-arch,x-stainless-retry-count"  # as OpenAI's SDK in a browser
ASKS = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.mark.parametrize("token", [None, "secret"])
def test_listed_origins_are_served_and_others_are_told_the_option(token):
    bearing = {"authorization": "Bearer secret"} if token else {}
    with ready(small_demo, token=token, allow_origins=[ORIGIN]) as server:
        asked = request("OPTIONS", server.url + SPEECH, headers=ASKS)
        assert asked.status_code == 204 and asked.headers["access-control-allow-origin"] == ORIGIN
        asks_more = request(
            "OPTIONS", server.url + SPEECH, headers=ASKS | {"access-control-request-headers": STAINLESS}
        )
        assert asked.headers["access-control-allow-headers"] == "authorization"
        chrome = request(
            "OPTIONS", server.url + SPEECH, headers=ASKS | {"access-control-request-private-network": "true"}
        )
        assert chrome.headers["access-control-allow-private-network"] == "true"
        assert asks_more.headers["access-control-allow-headers"] == STAINLESS
        answer = get(f"{server.url}/v1/models", headers={"origin": ORIGIN} | bearing)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
        assert "X-Seed" in answer.headers["access-control-expose-headers"] and answer.headers["vary"] == "Origin"
        refused = request("OPTIONS", server.url + SPEECH, headers=ASKS | {"origin": "https://evil.example"})
        assert refused.status_code == 403 and "--allow-origin" in refused.json()["error"]["message"]
        foreign = get(f"{server.url}/v1/models", headers={"origin": "https://evil.example"} | bearing)
        assert "access-control-allow-origin" not in foreign.headers
        assert foreign.status_code == (200 if token else 403)


@pytest.mark.parametrize(
    ("origin", "taken"),
    [
        ("app://obsidian.md", True),
        ("app://Obsidian.md", True),
        ("chrome-extension://abcdefghijklmnop", True),
        ("moz-extension://2b4c6d8e-0000-4000-8000-123456789abc", True),
        ("capacitor://localhost", True),
        ("http://[::1]:8080", True),
        ("file://", True),
        ("qrc://", True),
        ("example.com", False),
        ("https://*.example.com", False),
        ("https://exämple.com", False),
        ("https://example.com:x", False),
        ("https://", False),
        ("https://example.com/", False),
        ("https://me@example.com", False),
        ("null", False),
        ("*", False),
    ],
)
def test_any_origin_that_a_browser_names_may_be_listed(origin, taken):
    """Two that stand for pages of anybody need a token."""
    if taken:
        assert Origins([origin], has_token=False).are_listed(origin)
    else:
        with pytest.raises(BackendError, match="needs a token" if origin in ("*", "null") else "an origin is a scheme"):
            Origins([origin], has_token=False)
    if origin in ("*", "null"):
        assert Origins([origin], has_token=True).are_listed(origin)


def test_an_origin_with_its_schemes_own_port_is_the_one_that_browsers_send():
    origins = Origins(["https://app.example:443", "http://app.example:80", "http://b.example:443"], has_token=False)
    assert origins.are_listed("https://app.example") and origins.are_listed("http://app.example")
    assert origins.are_listed("http://b.example:443")


def test_another_kind_of_page_on_our_host_is_not_our_own(server):
    host = server.url.removeprefix("http://")
    assert get(f"{server.url}/v1/models", headers={"origin": f"http://{host}"}).status_code == 200
    for other in (f"capacitor://{host}", f"http://not{host}"):
        assert get(f"{server.url}/v1/models", headers={"origin": other}).status_code == 403


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "api-key"])
def test_the_schemes_of_authorization_have_no_case(scheme):
    with ready(small_demo, token="a b") as server:
        for token, status in (("a b", 200), ("a  b", 401), ("A b", 401)):
            assert get(f"{server.url}/v1/models", headers={"authorization": f"{scheme} {token}"}).status_code == status
        assert get(f"{server.url}/v1/models", headers={"authorization": "Basic a b"}).status_code == 401


@pytest.mark.parametrize("coding", ["gzip", "BR"])
def test_a_compressed_body_is_told_as_one(server, coding):
    body = gzip.compress(json.dumps({"input": "Hello."}).encode())
    head = {"content-type": "application/json", "content-encoding": coding}
    answer = post(server.url + SPEECH, content=body, headers=head)
    told = answer.json()["error"]["message"]
    assert answer.status_code == 415 and f"Content-Encoding {coding.lower()!r}: send it as it is" in told


def test_a_body_without_a_coding_is_taken(server):
    for coding in ("", "Identity"):
        assert post(server.url + SPEECH, json={"input": "Yes."}, headers={"content-encoding": coding}).is_success


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream_format": "sse"}])
@pytest.mark.parametrize("header", ["Host: localhost", "Expect: 100-continue"])
def test_a_client_of_http_1_0_gets_plain_bytes(server, fields, header):
    """Also without a Host, which it need not send, and without the "100 Continue" that it does not know."""
    body = json.dumps({"input": TEXT, "voice": "ada", **PCM, **fields}).encode()
    head = f"POST {SPEECH} HTTP/1.0\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 60) as line:
        line.sendall(head + body)
        told = b"".join(iter(lambda: line.recv(1 << 16), b""))
    answered, _, content = told.partition(b"\r\n\r\n")
    assert answered.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in answered
    assert content == server.post(input=TEXT, voice="ada", **PCM, **fields).content


@pytest.mark.parametrize("rate", [None, 8000])
def test_a_whole_file_states_its_length(server, rate):
    whole = server.post(input=TEXT, response_format="wav", seed=5, stream=False, sample_rate=rate).content
    batch = post(server.url + BATCH, json={"inputs": [TEXT], "response_format": "wav", "seed": 5, "sample_rate": rate})
    streamed = server.post(input=TEXT, response_format="wav", seed=5, sample_rate=rate).content
    for file in (whole, base64.b64decode(batch.json()["data"][0]["audio"])):
        assert int.from_bytes(file[4:8], "little") == len(file) - 8
        assert int.from_bytes(file[40:44], "little") == len(file) - 44
        assert file[44:] == streamed[44:] and streamed[4:8] == b"\xff\xff\xff\xff"


# ---------------------------------------------------------------- voices in a request


def test_a_request_brings_its_voice_along(tiny):
    sound = base64.b64encode(recording()).decode()
    with cloning(tiny, allow_clone=True) as server:
        assert get(f"{server.url}/v1/voices").json()["clones"] is True
        body = {"voice": None, "input": "Hello.", "max_frames": 8, **PCM}
        first = server.post(**body, ref_audio=sound, ref_text="Hi.")
        assert first.status_code == 200, first.text
        url = f"data:audio/wav;base64,{sound}"
        assert server.post(**body, ref_audio=sound, ref_text="Hi.", task_type="Base").content == first.content
        alone = server.post(**body, ref_audio=url, ref_text="Hi.", x_vector_only_mode=True)
        assert alone.status_code == 200 and alone.content == server.post(**body, ref_audio=url).content
        assert alone.content != first.content
        vector = [0.25] * server.service.engine.config.talker.stack.hidden_size
        assert server.post(**body, speaker_embedding=vector).status_code == 200
        for fields, words in (
            ({"speaker_embedding": vector[1:]}, "numbers for this model"),
            ({"ref_audio": sound, "speaker_embedding": vector}, "send one of them"),
            ({"ref_audio": "UklGRg=="}, ""),
            ({"ref_audio": "!!!!"}, "base64"),
        ):
            refused = server.post(**body, **fields)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]
        inputs = [{"input": "Hello.", "ref_audio": sound, "ref_text": "Hi."}, {"input": "Hello."}]
        shared = {key: value for key, value in body.items() if key not in ("input", "voice")}
        batch = post(server.url + BATCH, json=shared | {"model": "demo", "inputs": inputs, "ref_audio": url}).json()
        assert [base64.b64decode(one["audio"]) for one in batch["data"]] == [first.content, alone.content]
        assert len(server.service._clones._made) == 2 and not server.service.saved_voices.by_name


def test_new_voices_are_bounded_and_known_ones_are_not(tiny):
    with cloning(tiny, allow_clone=True, limits=Limits(clones_a_minute=2)) as server:
        sounds = [base64.b64encode(recording(seed)).decode() for seed in range(3)]
        body = {"voice": None, "input": "Hello.", "max_frames": 4, **PCM}
        codes = [server.post(**body, ref_audio=sound).status_code for sound in (*sounds, sounds[0])]
        assert codes == [200, 200, 429, 200]


class MadeAtOnce:
    """In place of `SavedVoices`. `gate`: a voice waits for it."""

    def __init__(self):
        self.made, self.gate = [], asyncio.Event()
        self.gate.set()

    async def make(self, engine, audio, text):
        self.made.append(audio)
        await self.gate.wait()
        return audio


BASE = SimpleNamespace(variant="base")


async def test_the_voices_used_last_are_kept_and_new_ones_are_counted_by_the_minute(monkeypatch):
    saved, loop = MadeAtOnce(), asyncio.get_running_loop()
    clones = Clones(saved, Limits(clones=2, clones_a_minute=4))
    for audio in "abacab":
        await clones.voice(BASE, Clone(audio))
    assert saved.made == ["a", "b", "c", "b"]
    with pytest.raises(EngineBusy):
        await clones.voice(BASE, Clone("d"))
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 60)
    await clones.voice(BASE, Clone("d"))


def test_voices_are_told_apart_by_all_they_are_made_of():
    made_of = [
        {"audio": "a"},
        {"audio": "b"},
        {"audio": "a", "text": "b"},
        {"audio": "a", "text": "c"},
        {"vector": (0.5,)},
    ]
    assert len({Clone(**each).digest for each in made_of}) == len(made_of)


async def test_a_recording_that_is_too_long_is_not_read():
    saved = MadeAtOnce()
    with pytest.raises(RequestError, match="at most 99 bytes"):
        await Clones(saved, Limits(max_upload=99)).voice(BASE, Clone("A" * 400))
    assert not saved.made


async def test_who_leaves_takes_nobody_elses_voice_along():
    saved = MadeAtOnce()
    saved.gate.clear()
    clones = Clones(saved, Limits())
    gone, other = (asyncio.create_task(clones.voice(BASE, Clone("a"))) for _ in range(2))
    await until_in_loop(lambda: saved.made)
    gone.cancel()
    await asyncio.wait([gone])
    saved.gate.set()
    assert await other == "a" and saved.made == ["a"]


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("ref_audio", [], "one recording, got 0"),
        ("ref_audio", ["UklGRg=="] * 2, "one recording, got 2"),
        ("speaker_embedding", [], "1 to 8192 numbers"),
        ("speaker_embedding", [True], "1 to 8192 numbers"),
        *(("speaker_embedding", [0.5, wrong], "fp32") for wrong in (math.nan, math.inf, -1e39, 10**400)),
    ],
)
def test_what_is_no_recording_and_no_vector_is_refused(field, value, words):
    with pytest.raises(RequestError, match=words):
        read_clone({field: value})
