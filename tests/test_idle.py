"""Nothing is accepted that does nothing: it is refused, or named in a warning or an answer."""

import logging
import re
from types import SimpleNamespace

import pytest
from entrances import SocketClient, StreamClient
from serving import connect, ready, small_demo

import demo_pipeline
from qwen_megakernel import RequestError, cli
from qwen_megakernel.commands.demo import make_parser
from qwen_megakernel.commands.idle import RULES, refuse_idle
from qwen_megakernel.pipecat_tts import MegakernelTTSService
from qwen_megakernel.server import fields
from qwen_megakernel.speech.options import RequestOptions, idle, table
from qwen_megakernel.speech.request import RequestChecker
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService

SPEAK, DEMO = ["speak", "--text", "Hi."], ["demo"]
REFUSED = [
    ([*SPEAK, "--list-speakers"], "--list-speakers speaks nothing, so --text would change nothing"),
    (["wyoming", "--silence-s", "0.3"], "--silence-s is what --trim leaves: give both"),
    (["speak", "--list-speakers", "--seed", "3"], "so --seed would change nothing"),
    (["serve", "--allow-upload"], "--allow-upload needs a Base checkpoint.*demo is custom_voice: leave it out"),
    (["serve", "--allow-clone"], "--allow-clone needs a Base checkpoint"),
    (["serve", "--max-queue", "0", "--queue-timeout", "3"], "--queue-timeout is the longest wait, but --max-queue 0"),
    (["wyoming", "--allow-network"], "--allow-network is for a --host that others reach"),
    ([*DEMO, "--bot", "--text", "Hi."], "--text is for text in, sound out: leave out one of the two"),
    ([*DEMO, "--bot", "-o", "x.wav"], "--output is for text in"),
    ([*DEMO, "--bot", "--play"], "--play is for text in"),
    ([*DEMO, "--text", "Hi.", "--llm-url", "http://x"], "--llm-url is for the bot: give --bot too"),
    ([*DEMO, "--text", "Hi.", "--stt", "types:SimpleNamespace"], "--stt is for the bot"),
    ([*DEMO, "--text", "Hi.", "--local-audio"], "--local-audio is for the bot"),
    ([*DEMO, "--bot", "--llm-model", "x"], "--llm-model is a model of --llm-url: give both"),
    ([*DEMO, "--bot", "--stt-options", '{"a": 1}'], "--stt-options are arguments of --stt: give both"),
]
"""Command lines, and a regular expression for the words."""


@pytest.mark.parametrize("words, told", REFUSED, ids=lambda part: " ".join(part) if isinstance(part, list) else "")
def test_an_option_that_would_change_nothing_is_refused(words, told, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command, *rest = words
    assert (demo_pipeline.main(rest) if command == "demo" else cli.main([*words, "--device", "cpu"])) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("error: ") and re.search(told, error), error
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["speak", "--list-speakers", "--model", "x", "--device", "cpu", "-v"],
        ["serve", "--queue-timeout", "3"],
        ["wyoming", "--allow-network", "--host", "0.0.0.0"],
        [*DEMO, "--bot", "--llm-url", "http://x", "--llm-model", "x", "--stt", "a:b", "--stt-options", '{"a": 1}'],
        [*DEMO, "--text", "Hi.", "-o", "x.wav", "--play"],
    ],
    ids=" ".join,
)
def test_beside_what_they_need_they_are_taken(words):
    command, *rest = words
    parser = make_parser("") if command == "demo" else cli.make_parser().parse_args(words).parser
    refuse_idle(parser.parse_args(rest), parser, RULES.get(command, ()))


def test_the_rules_are_about_options_that_there_are():
    for command, rules in RULES.items():
        parser = make_parser("") if command == "demo" else cli.make_parser().parse_args([command]).parser
        assert {rule.option for rule in rules} <= vars(parser.parse_args([])).keys()


# ---------------------------------------------------------------- options of speech and of engines


def test_an_option_of_speech_without_the_one_it_needs_is_found():
    assert idle({"silence_s": 0.1}) == idle({"silence_s": 0.1, "trim": "none"}) == {"silence_s": "trim"}
    assert idle({"silence_s": 0.1, "trim": "end"}) == idle({"silence_s": None}) == idle({"trim": "end"}) == {}
    assert {row.needs for row in table().values()} - {""} <= table().keys()


def test_an_engine_without_kernels_needs_no_fallback(caplog):
    for fallback in (None, "torch"):
        small_demo(fallback=fallback).close()
        assert ("fallback changes nothing: PyTorch speaks already" in caplog.text) is (fallback is not None)


@pytest.mark.parametrize("variant, told", [("base", True), ("voice_design", True), ("custom_voice", False)])
def test_foreign_voices_are_for_custom_voice(variant, told, caplog):
    checkpoint = SimpleNamespace(config=SimpleNamespace(variant=variant), fingerprint="")
    RequestChecker(checkpoint, None, allow_foreign_voice=True)
    assert ("allow_foreign_voice changes nothing" in caplog.text) is told


@pytest.fixture(scope="module")
def server():
    with ready(small_demo, allow_upload=True) as server:
        yield server


def test_an_engine_warns_once_and_its_prompt_is_of_what_is_spoken(server, caplog):
    engine = server.service.engine
    engine._requests._told_idle.clear()
    for _ in range(2):
        engine.request(silence_s=0.1)
        engine.request(silence_s=0.1, trim="both")
    assert [record.getMessage() for record in caplog.records] == [
        "silence_s changes nothing without trim: give both, or leave silence_s out"
    ]
    rows = [engine.prompt(text, normalize=mode).rows for text, mode in (("5 km", "auto"), ("five kilometers", "off"))]
    assert rows[0].equal(rows[1]) and len(engine.prompt("5 km").rows) != len(rows[0])


def test_a_server_names_what_changes_nothing(server):
    assert server.post(silence_s=0.1).headers["x-ignored"] == "silence_s"
    assert "x-ignored" not in server.post(silence_s=0.1, trim="both").headers
    told = server.post(x_vector_only_mode=True, response_format="flac", stream=True).headers["x-ignored"]
    assert told == "x_vector_only_mode, stream"
    assert server.post(stream=False, stream_format="sse").headers["x-ignored"] == "stream"
    with connect(server.socket_url) as line:
        client = SocketClient(line)
        client.hear("Hi.", silence_s=0.1)
        assert next(told for told in client.told if told["type"] == "begin")["ignored"] == ["silence_s"]
    with connect(server.stream_url) as line:
        client = StreamClient(line)
        client.configure(silence_s=0.1, timestamp_transport_strategy="async")
        client.speak("Hi.")
        assert client.until("audio.start")["ignored"] == ["silence_s", "timestamp_transport_strategy"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.service, "defaults", RequestOptions(trim="both"))
        assert "x-ignored" not in server.post(silence_s=0.1).headers, "the server's own trim is there"


@pytest.mark.parametrize(
    "given, ignored",
    [
        ({"ref_text": "Hi.", "speaker_embedding": [0.0]}, ["ref_text"]),
        ({"ref_text": "Hi.", "ref_audio": "x"}, []),
        ({"x_vector_only_mode": True, "ref_audio": "x"}, []),
        ({"x_vector_only_mode": False}, []),
    ],
)
def test_fields_of_a_voice_that_change_nothing_are_named(given, ignored):
    assert fields.told_apart(given, "http")[1] == ignored


def test_a_server_that_cannot_clone_says_so(caplog):
    with caplog.at_level(logging.WARNING), ready(small_demo, allow_upload=True):
        assert "no client can make or bring voices: demo is no Base checkpoint" in caplog.text


def test_a_service_with_an_engine_takes_nothing_to_load(server):
    engine = server.service.engine
    for given in ({"model": "other"}, {"engine_options": {"max_streams": 2}}):
        with pytest.raises(RequestError, match="'demo'.* model and engine_options"):
            MegakernelTTSService(engine=engine, **given)
    MegakernelTTSService(engine=engine, model="demo")


async def test_the_remote_service_passes_on_what_its_server_says(monkeypatch):
    warned = []
    monkeypatch.setattr("qwen_megakernel.pipecat.remote.logger.warning", warned.append)
    service = MegakernelWebsocketTTSService(url="ws://x")
    for names in (["silence_s"], ["silence_s"], []):
        service._warn_of_ignored(names)
    assert len(warned) == 1 and "silence_s changes nothing" in warned[0]
