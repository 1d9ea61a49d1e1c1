"""OpenAI's speech API as stock clients use it: events, formats, names, batches; and voices over HTTP."""

import base64
import io
import json
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import quote

import httpx
import numpy as np
import openai
import pytest
import soundfile
import torch
from cases import reference_audio
from entrances import JUNK, fuzzed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import (
    PATIENCE_S,
    TEXT,
    cloning,
    endless,
    get,
    hold_second_piece,
    post,
    ready,
    recording,
    request,
    running,
    said,
    slots_taken,
    small_demo,
    stream,
    until,
)
from waiting import slow_case

from qwen_megakernel import EngineBusy, TTSEngine, TTSError, Voice, VoiceError, cli
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.openai.bodies import SPEECH
from qwen_megakernel.speech import encoders
from qwen_megakernel.speech.saved_voices import SavedVoices
from spoken_text.lexicon import Lexicon

BATCH, VOICES = f"{SPEECH}/batch", "/v1/voices"
SLOTS = 4
PYDANTIC = ("Input should", "valid string", "pydantic", "Field required", "Value error", "Extra inputs")


@pytest.fixture(scope="module")
def server():
    limits = Limits(max_text=600, max_batch=8, max_batch_text=1000)
    names = {"served_names": ["bot-voice"], "voice_aliases": {"Alloy": "ada", "ash": "MAX"}}
    with ready(small_demo, limits=limits, **names) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(lines) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


# ---------------------------------------------------------------- events and formats


def test_events_hold_the_audio_and_then_its_usage(server, client):
    asked = {"model": "gpt-4o-mini-tts", "voice": "alloy", "input": TEXT, "speed": 1.0, "extra_body": {"seed": 5}}
    speech = client.audio.speech.with_streaming_response
    with speech.create(response_format="pcm", stream_format="sse", **asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        *deltas, done = events_of(answer.iter_lines())
    assert {event["type"] for event in deltas} == {"speech.audio.delta"} and len(deltas) > 2
    pcm = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert pcm == said(server)
    usage = {"input_tokens": len(server.service.engine.tokens(TEXT).text), "output_tokens": len(pcm) // 3840}
    assert done == {"type": "speech.audio.done", "usage": usage | {"total_tokens": sum(usage.values())}}


def test_speech_that_is_cut_ends_its_events_with_an_error(tiny, caplog):
    with endless(tiny) as server:
        answer = server.post(input="Hello.", voice=None, stream_format="sse", response_format="pcm")
        *deltas, last = events_of(answer.text.splitlines())
    assert answer.status_code == 200 and deltas and last["type"] == "error"
    assert "speech was cut after" in last["error"]["message"] and last["error"]["retryable"] is True
    assert "Traceback" not in caplog.text


STREAMED = [("pcm", "audio"), ("mp3", "sse"), slow_case("mp3", "audio")]
STREAMED += [slow_case(name, how) for name in ("opus", "aac", "wav") for how in ("audio", "sse")]


@pytest.mark.parametrize("name, stream_format", STREAMED)
def test_formats_come_while_they_are_made(server, monkeypatch, name, stream_format):
    """The second piece of the text is not begun before the first was heard."""
    pieces, heard = hold_second_piece(monkeypatch, server.service.engine)
    text = " ".join([TEXT] * 3)
    body = {"model": "demo", "input": text, "response_format": name, "stream_format": stream_format}
    with stream("POST", server.url + SPEECH, json=body) as answer:
        chunks = answer.iter_raw()
        first = next(chunks)
        heard.set()
        rest = b"".join(chunks)
    assert len(first) > 100 and len(pieces) > 1 and len(rest) > len(first)


@pytest.mark.parametrize("name", ["mp3", "opus", "aac"])
def test_a_format_whose_library_is_missing_is_refused_with_the_remedy(server, monkeypatch, name):
    monkeypatch.setattr(encoders, "find_spec", lambda _name: None)
    for path, body in ((SPEECH, {"input": TEXT}), (BATCH, {"inputs": [TEXT]})):
        refused = server.post(path, response_format=name, **body)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "response_format"
        assert error["message"].startswith(f"{name} needs the package av: on the server, pip install -e '.[serve]'")
    assert server.post(input="Hi.", response_format="flac").status_code == 200


@pytest.mark.parametrize("name", encoders.MEDIA)
def test_an_encoder_without_samples_makes_no_error(name):
    encoders.StreamEncoder(name, 24000).finish()


@pytest.mark.parametrize("name", sorted(encoders.MEDIA.keys() - {"opus"}))  # Ogg's serial numbers are random
def test_however_a_sound_is_cut_its_bytes_are_the_same(name):
    sound, made = reference_audio(1.0), []
    for size in (1, 480, len(sound)):
        encoder = encoders.StreamEncoder(name, 24000)
        made.append(b"".join(encoder.encode(sound[at : at + size]) for at in range(0, len(sound), size)))
        made[-1] += encoder.finish()
    assert made[0] == made[1] == made[2]


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "model, voice, speaker",
    [
        ("demo", "alloy", "ada"),
        ("bot-voice", {"id": "ALLOY"}, "ada"),
        ("tts-1", "ash", "max"),
        ("tts-1-hd", "Max", "max"),
        ("gpt-4o-mini-tts", "ada", "ada"),
    ],
    ids=str,
)
def test_listed_names_are_the_served_model_and_an_alias_speaks_with_its_voice(server, client, model, voice, speaker):
    assert model in [listed.id for listed in client.models.list()]
    made = server.post(model=model, voice=voice, input="Hi.", seed=5, response_format="pcm")
    assert made.content == said(server, "Hi.", speaker=speaker)


def test_aliases_are_listed_and_others_are_no_voices(server):
    assert get(server.url + VOICES).json()["aliases"] == {"alloy": "ada", "ash": "max"}
    error = server.post(voice="nova").json()["error"]
    assert error["message"] == "unknown voice 'nova'; known: ada, max, oliver, alloy, ash" and error["param"] == "voice"


@pytest.mark.parametrize(
    "options, words",
    [
        (["--voice-alias", "alloy=nobody"], "the alias 'alloy' names 'nobody', which is not a voice here; known: ada"),
        (["--voice-alias", "ada=max"], "the alias 'ada' of 'max' is a voice's name already: choose another alias"),
        *((["--served-name", name], "1 to 256 printable characters, got") for name in (" ", "", "a\nb", "x" * 257)),
    ],
    ids=str,
)
def test_names_that_lead_nowhere_end_the_server_before_it_listens(capsys, options, words):
    assert cli.main(["serve", "--model", "demo", "--device", "cpu", *options]) == 1
    assert words in capsys.readouterr().err


def test_an_alias_without_a_voice_is_no_option(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--voice-alias", "alloy"])
    assert "expected ALIAS=VOICE, such as alloy=ada, or openai, got 'alloy'" in capsys.readouterr().err


def test_an_alias_of_a_model_that_is_not_here_yet_is_checked_once_it_is():
    with running(small_demo, voice_aliases={"alloy": "nobody"}) as server:
        until(lambda: server.service.state == "failed")
        assert "the alias 'alloy' names 'nobody'" in server.service.error


# ---------------------------------------------------------------- fields


def test_instructions_that_the_model_ignores_are_told(server, client):
    raw = client.audio.speech.with_raw_response
    asked = {"instructions": "Slowly.", "response_format": "pcm", "extra_body": {"seed": 5}}
    told = raw.create(model="demo", voice="ada", input=TEXT, **asked)
    assert told.headers["x-ignored"] == "instructions" and told.content == said(server)
    assert "x-ignored" not in raw.create(model="demo", voice="ada", input="Hi.").headers


WRITTEN = "**SQL** runs [pause 900ms] 5 km."
LEXICON = Lexicon({"sql": "sequel"})


def test_written_text_is_normalized_and_pauses_are_silence():
    """With the server's lexicon."""
    with ready(small_demo, defaults={"lexicon": LEXICON, "normalize": "auto"}) as server:
        request = {"input": WRITTEN, "voice": "ada", "seed": 5, "response_format": "pcm", "language": "en"}
        options = {"normalize": "auto", "lexicon": LEXICON, "language": "en"}
        assert server.post(**request, trim="both").content == said(server, WRITTEN, trim="both", **options)
        malformed = server.post(**request | {"input": "Hello [pause soon]."})
        assert malformed.status_code == 400 and "pause 500ms" in malformed.json()["error"]["message"]


def bad_ends(monkeypatch, engine: TTSEngine, whys: list[str]) -> list[int]:
    """So does each utterance that is said from now on end, by a limit of frames. Seeds that they are said with."""
    begin, seeds, whys = engine.begin, [], iter(whys)

    def limited(text, request, *args):
        seeds.append(request.seed)
        return begin(text, replace(request, max_frames=6) if next(whys) == "length" else request, *args)

    monkeypatch.setattr(engine, "begin", limited)
    return seeds


def test_whole_answers_are_said_again_where_they_end_badly(server, monkeypatch):
    engine = server.service.engine
    wanted, before = said(server, seed=7), engine.metrics()["retries"]
    with monkeypatch.context() as patch:
        seeds = bad_ends(patch, engine, ["length", "length", "eos"])
        made = server.post(voice="ada", seed=5, response_format="flac", retries=2)
    assert seeds == [5, 6, 7] and made.headers["x-attempts"] == "3" and made.headers["x-seed"] == "5"
    assert soundfile.read(io.BytesIO(made.content), dtype="int16")[0].tobytes() == wanted
    with monkeypatch.context() as patch:
        bad_ends(patch, engine, ["length", "eos"])
        (entry,) = entries(server.post(BATCH, inputs=[TEXT], voice="ada", seed=6, response_format="pcm", retries=5))
    assert entry["attempts"] == 2 and base64.b64decode(entry["audio"]) == wanted
    assert engine.metrics()["retries"] == before + 3
    told = get(f"{server.url}/metrics").text
    for name, count in (('retries_total{model="demo"}', before + 3), ('runaways_total{kind="babble",model="demo"}', 0)):
        assert f"qwen_megakernel_{name} {count}.0" in told


def test_the_last_attempt_that_ends_badly_is_told(server, monkeypatch):
    seeds = bad_ends(monkeypatch, server.service.engine, ["length"] * 3)
    refused = server.post(voice="ada", seed=5, response_format="flac", retries=2)
    error = refused.json()["error"]
    assert refused.status_code == 500 and "the model did not find its end" in error["message"]
    assert (error["code"], error["retryable"], refused.headers["retry-after"]) == ("failed", True, "1")
    assert seeds == [5, 6, 7]


def test_a_whole_answer_is_said_again_unless_its_seeds_are_fixed(server, monkeypatch):
    engine = server.service.engine
    with monkeypatch.context() as patch:
        seeds = bad_ends(patch, engine, ["length", "length", "eos"])
        made = server.post(voice="ada", response_format="wav", stream=False)
    assert made.headers["x-attempts"] == "3" and seeds == [int(made.headers["x-seed"]) + n for n in range(3)]
    with monkeypatch.context() as patch:
        bad_ends(patch, engine, ["length", "eos"])
        (entry,) = entries(server.post(BATCH, inputs=[TEXT], voice="ada", response_format="pcm"))
    assert entry["attempts"] == 2 and entry["object"] == "speech"
    for fixed in ({"seed": 5}, {"retries": 0}):
        with monkeypatch.context() as patch:
            seeds = bad_ends(patch, engine, ["length"])
            refused = server.post(voice="ada", response_format="flac", **fixed)
        assert refused.status_code == 500 and len(seeds) == 1
    capped = server.post(voice="ada", response_format="flac", max_frames=4)
    assert capped.status_code == 200 and "x-attempts" not in capped.headers
    assert "x-attempts" not in server.post(voice="ada", response_format="flac").headers


@pytest.mark.parametrize("how", [{"response_format": "wav"}, {"response_format": "flac", "stream_format": "sse"}, {}])
def test_a_streamed_answer_cannot_be_said_again(server, how):
    error = server.post(retries=1, **how).json()["error"]
    assert error["param"] == "retries" and "an answer that is not streamed" in error["message"]
    assert server.post(input="Hi.", retries=0, **how).status_code == 200


# ---------------------------------------------------------------- a batch


def entries(answer: httpx.Response) -> list[dict]:
    told = answer.json()
    assert answer.status_code == 200 and told["object"] == "list"
    assert [entry["index"] for entry in told["data"]] == list(range(len(told["data"])))
    return told["data"]


def test_a_batch_is_answered_in_order_with_an_error_for_what_cannot_be_said(server, client):
    inputs = [TEXT, {"input": "Hi.", "voice": {"id": "ash"}, "seed": 6}, {"input": "No.", "voice": "nobody"}]
    inputs += [" ", "x" * 601, {"input": TEXT, "language": "en"}]
    answer = client.post(
        "/audio/speech/batch",
        body={"model": "tts-1", "voice": "alloy", "seed": 5, "response_format": "pcm", "inputs": inputs},
        cast_to=httpx.Response,
    )
    one, two, *wrong, last = entries(answer)
    assert base64.b64decode(one["audio"]) == said(server, TEXT) and one["seed"] == 5 and one["format"] == "pcm"
    assert base64.b64decode(two["audio"]) == said(server, "Hi.", 6, speaker="max") and two["seed"] == 6
    assert base64.b64decode(last["audio"]) == said(server, language="english")
    assert last["usage"]["output_tokens"] == len(base64.b64decode(last["audio"])) // 3840
    assert [entry["error"]["param"] for entry in wrong] == ["voice", "input", "input"]
    assert all(entry["object"] == "error" and "audio" not in entry for entry in wrong)


@pytest.mark.parametrize("name", ["wav", "mp3", "flac"])
def test_a_batch_holds_whole_files(server, name):
    for entry in entries(server.post(BATCH, inputs=["Hi.", "Ho."], response_format=name)):
        assert soundfile.info(io.BytesIO(base64.b64decode(entry["audio"]))).samplerate == 24000


def test_a_batch_takes_all_slots_and_no_more(server, monkeypatch):
    engine, most, together = server.service.engine, 0, threading.Barrier(SLOTS)
    begin = engine.begin

    def count_and_begin(*args):
        nonlocal most
        if most < SLOTS:  # the first ones wait for each other: they are there at the same time
            together.wait(PATIENCE_S)
        most = max(most, len(server.service.sessions))
        return begin(*args)

    monkeypatch.setattr(engine, "begin", count_and_begin)
    assert len(entries(server.post(BATCH, inputs=["Hi."] * 6, response_format="pcm"))) == 6
    assert most == SLOTS


def test_a_batch_waits_for_slots_that_others_have(server, monkeypatch):
    engine, refused = server.service.engine, []
    begin = engine.begin

    def busy_at_first(*args):
        if len(refused) < 4:
            refused.append(args)
            raise EngineBusy("no place")
        return begin(*args)

    monkeypatch.setattr(engine, "begin", busy_at_first)
    assert all("audio" in entry for entry in entries(server.post(BATCH, inputs=["Hi."] * 2, response_format="pcm")))
    assert len(refused) == 4


def test_who_leaves_a_batch_cancels_all_of_it(server):
    body = json.dumps({"model": "demo", "inputs": [TEXT * 3] * 8}).encode()
    head = f"POST {BATCH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    before = server.service.engine.metrics()
    with slots_taken(server.service.engine):
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: len(server.service.sessions) == SLOTS)
        until(lambda: not server.service.sessions)
    server.at_rest()
    after = server.service.engine.metrics()
    assert after["utterances"] - before["utterances"] <= 2 * SLOTS, "no other one has begun"


NO_BATCH = [
    ({"inputs": []}, "inputs must not be empty, got []", "inputs"),
    ({"inputs": ["x"] * 9}, "inputs has 9 entries, at most 8 are allowed", "inputs"),
    ({"inputs": ["x" * 501] * 2}, "inputs have 1002 characters, at most 1000 are allowed", "inputs"),
    ({"inputs": "x"}, "inputs must be a list, got 'x'", "inputs"),
    ({"inputs": ["x", 3]}, "inputs.1 must be a JSON object, got 3", "inputs.1"),
    ({"inputs": ["x", ""]}, "inputs.1.input must not be empty, got ''", "inputs.1.input"),
    (
        {"inputs": [{"text": "x"}]},
        "input is missing: send a JSON object; its fields: input, task_type",
        "inputs.0.input",
    ),
    ({"inputs": [{"input": "x", "model": "y"}]}, "unknown field 'inputs.0.model'; known: input", "inputs.0.model"),
    ({"inputs": ["x"], "stream_format": "sse"}, "unknown field 'stream_format'; known: model", "stream_format"),
    ({"inputs": ["x"], "model": "tts-2"}, "known: demo, bot-voice, tts-1", "model"),
]


@pytest.mark.parametrize("wrong, words, param", NO_BATCH, ids=lambda value: str(value)[:30])
def test_a_batch_that_is_none_is_refused(server, wrong, words, param):
    refused = server.post(BATCH, **wrong)
    error = refused.json()["error"]
    assert refused.status_code == (404 if param == "model" else 400)
    assert words in error["message"] and error["param"] == param


# ---------------------------------------------------------------- voices


@pytest.fixture(scope="module")
def studio(tiny, tmp_path_factory):
    """A server that makes voices, and the folder that it keeps them in. One is there already."""
    folder = tmp_path_factory.mktemp("voices")
    with TTSEngine.load(tiny("base", size="tiny", eos_gain=2.0), device="cpu", max_streams=1) as engine:
        engine.placeholder_voice().save(folder / "anna.safetensors")
    with cloning(tiny, voices=folder, allow_upload=True, limits=Limits(max_upload=200_000)) as server:
        yield server, folder


def test_voices_are_made_replaced_and_deleted_by_forms(studio):
    server, folder = studio
    anna = Voice.load(folder / "anna.safetensors")
    made = server.post(input="Hi.", voice="anna", response_format="pcm", seed=5)
    assert made.content == said(server, "Hi.", speaker=None, voice=anna)
    made = post(server.url + VOICES, data={"name": "ben"}, files={"audio": ("ben.wav", recording())})
    assert made.status_code == 201 and made.json() == {"id": "ben", "object": "voice"}
    first = server.service.saved_voices.by_name["ben"]
    assert server.post(input="Hi.", voice="ben").status_code == 200
    encoded, voices = base64.b64encode(recording()).decode(), server.service.saved_voices.by_name
    lines = base64.encodebytes(recording()).decode()
    for form in (encoded, lines, lines.replace("\n", "\r\n"), "data:audio/wav;base64," + encoded):
        assert post(server.url + VOICES, json={"name": "same", "audio": form, "text": ""}).status_code == 201
        same = voices["same"]
        assert torch.equal(first.speaker_embedding, same.speaker_embedding), "JSON and a form, the same voice"
        assert same.ref_text is None and request("DELETE", f"{server.url}{VOICES}/same").status_code == 200
    blank = post(server.url + VOICES, data={"name": "same", "text": " "}, files={"audio": ("a", m4a())})
    assert blank.status_code == 201 and voices["same"].ref_text is None
    url = f"{server.url}{VOICES}/Ben"
    replaced = request("PUT", url, data={"text": "Noise."}, files={"audio": ("x", recording(2))})
    assert replaced.status_code == 200 and replaced.json()["id"] == "ben"
    assert voices["ben"].ref_text == "Noise." and Voice.load(folder / "ben.safetensors").ref_text == "Noise."
    assert {path.stem for path in folder.iterdir()} == {"anna", "ben", "same"}
    for name in ("ben", "same", "anna"):
        deleted = request("DELETE", f"{server.url}{VOICES}/{name}")
        assert deleted.json() == {"id": name, "object": "voice", "deleted": True}
    assert not list(folder.iterdir()) and not get(server.url + VOICES).json()["data"]
    for name in ("ben", "default"):
        refused = server.post(voice=name)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "voice"
        assert error["message"].startswith("there are no voices yet: POST /v1/voices")
    anna.save(folder / "anna.safetensors")
    server.service.saved_voices.by_name["anna"] = anna


async def test_a_voice_that_cannot_be_written_leaves_the_old_one(tmp_path):
    def half(path) -> None:
        path.write_bytes(b"half of it")
        raise OSError("no space left")

    (tmp_path / "ben.safetensors").write_bytes(b"as it was")
    voices = SavedVoices(None)
    voices._folder, voices.by_name = tmp_path, {"ben": "as it was"}
    engine = SimpleNamespace(speakers=(), create_voice=lambda path, text: SimpleNamespace(save=half))
    with pytest.raises(TTSError, match="could not be kept"):
        await voices.add(engine, "ben", b"", None, replace=True)
    assert voices.by_name == {"ben": "as it was"} and (tmp_path / "ben.safetensors").read_bytes() == b"as it was"


async def test_there_are_a_thousand_voices_at_most():
    voices = SavedVoices(None)
    engine = SimpleNamespace(speakers=(), create_voice=lambda path, text: text)
    voices.by_name = dict.fromkeys(map(str, range(999)))
    await voices.add(engine, "last", b"", "new")
    with pytest.raises(VoiceError, match="there are 1000 voices already"):
        await voices.add(engine, "more", b"", "new")
    await voices.add(engine, "7", b"", "newer", replace=True)
    assert len(voices.by_name) == 1000 and voices.by_name["7"] == "newer"


def m4a() -> bytes:
    file, sound = io.BytesIO(), np.random.default_rng(1).integers(-9000, 9000, 24_000, np.int16)
    encoder = encoders.encoder(".m4a", file, 24_000)
    encoder.write(sound)
    encoder.close()
    return file.getvalue()


WAV, BEN = recording(), {"name": "ben"}
FILE, BASE64 = {"audio": ("a.wav", WAV)}, base64.b64encode(WAV).decode()
FORM = {"content-type": "multipart/form-data"}
NO_VOICE = [
    ({"data": BEN, "files": {"audio": (None, "text")}}, 400, "audio must be a file of the form", "audio"),
    ({"files": FILE}, 400, "name is missing", "name"),
    ({"data": {"name": "../x"}, "files": FILE}, 400, "a voice's name must be 1 to 64 of a-z 0-9 _ -", "name"),
    ({"data": {"name": "x" * 65}, "files": FILE}, 400, "name must have at most 64 characters", "name"),
    ({"data": {"name": "anna"}, "files": FILE}, 400, "already", "name"),
    ({"data": BEN | {"text": "x" * 10_001}, "files": FILE}, 400, "text must have at most 10000 characters", "text"),
    ({"data": BEN | {"path": "/etc/passwd"}, "files": FILE}, 400, "unknown field 'path'", "path"),
    ({"data": {"name": ["ben", "ben"]}, "files": FILE}, 400, "one came twice", None),
    ({"data": BEN, "files": {"audio": ("a", b"no sound")}}, 400, "the recording", "audio"),
    ({"data": BEN, "files": {"audio": ("a", bytes(200_001))}}, 400, "may have at most 200000 bytes", "audio"),
    ({"data": BEN, "files": {"audio": ("a", bytes(400_000))}}, 413, "the body is too long", None),
    ({"content": b"x", "headers": FORM}, 400, "the form cannot be read", None),
    ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415, "or send a form, as multipart/form-data", None),
    ({"content": b"{"}, 400, "the body must be JSON", None),
    ({"content": b"[1]"}, 400, "the body must be a JSON object, got [1]", None),
    ({"json": BEN | {"audio": "?"}}, 400, "", "audio"),
    ({"json": BEN | {"audio": base64.b64encode(b"no sound").decode()}}, 400, "the recording", "audio"),
    ({"json": BEN | {"audio": "/etc/passwd"}}, 400, "", "audio"),
    ({"json": BEN | {"audio": BASE64, "text": 3}}, 400, "text must be a string", "text"),
    ({"json": BEN | {"audio": ""}}, 400, "the recording: the file is empty", "audio"),
    ({"json": BEN | {"audio": "data:audio/wav," + BASE64}}, 400, "audio must be base64", "audio"),
    ({"json": BEN | {"audio": "A" * 266_672}}, 400, "may have at most 200000 bytes", "audio"),
    ({"json": BEN | {"audio": "A" * 266_664 + "\n" * 999}}, 400, "cannot be read as audio", "audio"),
    ({"json": {"name": "../x", "audio": BASE64}}, 400, "a voice's name must be", "name"),
    ({"json": {"name": "anna", "audio": BASE64}}, 400, "already", "name"),
]


def test_what_is_no_voice_is_refused(studio):
    server, folder = studio
    for wrong, status, words, param in NO_VOICE:
        refused = post(server.url + VOICES, **wrong)
        error = refused.json()["error"]
        assert refused.status_code == status and words in error["message"] and error["param"] == param, wrong
    for method in ("PUT", "DELETE"):
        refused = request(method, f"{server.url}{VOICES}/nobody")
        assert refused.status_code == 404 and "there is no saved voice 'nobody'" in refused.json()["error"]["message"]
    assert [path.stem for path in folder.iterdir()] == ["anna"]


@pytest.mark.parametrize("method, path", [("POST", VOICES), ("PUT", f"{VOICES}/ada"), ("DELETE", f"{VOICES}/ada")])
def test_without_leave_nobody_changes_voices(server, method, path):
    refused = request(method, server.url + path)
    assert refused.status_code in (404, 405) and "start it with --allow-upload" in refused.json()["error"]["message"]


# ---------------------------------------------------------------- whatever may come

MODEL = st.sampled_from(["demo", "tts-1"]) | JUNK
SETTINGS = {
    "voice": st.sampled_from(["ada", "alloy", {"id": "ash"}]) | JUNK,
    "instructions": JUNK,
    "speed": st.floats() | st.integers() | JUNK,
    "language": st.sampled_from(["en", "auto"]) | JUNK,
    "seed": st.integers(-1, 2**64) | JUNK,
    "response_format": st.sampled_from([*encoders.MEDIA, "mp4"]) | JUNK,
    "non_streaming_mode": JUNK,
    "retries": st.integers(-1, 7) | JUNK,
}
INPUT = st.sampled_from(["Hi.", "\ud800", "\x00", " ", "<|im_end|>"]) | JUNK
SPEECH_BODY = st.fixed_dictionaries({"model": MODEL, "input": INPUT}, optional=SETTINGS | {"x": JUNK})
EVENT_BODY = st.fixed_dictionaries({"model": st.just("demo"), "input": INPUT, "stream_format": st.just("sse")})
ITEM = INPUT | st.fixed_dictionaries({"input": INPUT}, optional={"voice": JUNK, "seed": JUNK, "x": JUNK})
BATCH_BODY = st.fixed_dictionaries({"model": st.just("demo"), "inputs": st.lists(ITEM, max_size=9) | JUNK})
VOICE_BODY = st.fixed_dictionaries({}, optional=dict.fromkeys(("name", "audio", "text", "x"), JUNK))
FUZZ = settings(max_examples=60, suppress_health_check=list(HealthCheck))


def check_told(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"] and error["code"] and not any(words in error["message"] for words in PYDANTIC)


@fuzzed(st.tuples(st.just(SPEECH), SPEECH_BODY | EVENT_BODY) | st.tuples(st.just(BATCH), BATCH_BODY))
def test_no_body_leaves_anything_behind(server, asked):
    path, body = asked
    check_told(post(server.url + path, content=json.dumps(body), headers={"content-type": "application/json"}))
    server.at_rest()


@pytest.mark.slow
def test_no_voice_is_made_of_whatever_comes(studio, caplog):
    server, folder = studio
    names = st.sampled_from(["audio", "name", "text", "x", ""])

    @FUZZ
    @given(VOICE_BODY)
    def check_json(body) -> None:
        check_told(post(server.url + VOICES, content=json.dumps(body)))

    @FUZZ
    @given(st.lists(st.tuples(names, st.none() | st.just("a.wav"), st.binary(max_size=40)), max_size=4), st.binary())
    def check_form(parts, junk) -> None:
        check_told(post(server.url + VOICES, files=[(name, (file, data)) for name, file, data in parts]))
        kind = {"content-type": "multipart/form-data; boundary=a"}
        check_told(post(server.url + VOICES, content=b"--a\r\n" + junk + b"\r\n--a--", headers=kind))

    @FUZZ
    @given(st.text(max_size=80))
    def check_name(name) -> None:
        check_told(request("DELETE", f"{server.url}{VOICES}/{quote(name, safe='')}", timeout=PATIENCE_S))

    for check in (check_json, check_form, check_name):
        check()
    server.at_rest()
    assert [path.stem for path in folder.iterdir()] == ["anna"] and "Traceback" not in caplog.text
