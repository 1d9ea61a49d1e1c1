"""What an operator sees of a server and sets: lines of the log, ids, metrics, keys, its end, certificates."""

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import warnings
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import serving as serving_tests
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from entrances import SocketClient
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from serving import (
    TEXT,
    access,
    connect,
    fronts_of,
    get,
    post,
    ready,
    running,
    said,
    same,
    slots_taken,
    small_demo,
    stream,
)
from waiting import PATIENCE_S, until, until_in_loop
from websockets.exceptions import InvalidStatus
from websockets.protocol import State
from websockets.server import ServerProtocol

from qwen_megakernel import BackendError, TTSEngine, cli
from qwen_megakernel.commands.config import actions_of, printed
from qwen_megakernel.commands.options import server_options
from qwen_megakernel.errors import EngineBusy, EngineClosed, EngineDied, NoWordsError, SpeechError
from qwen_megakernel.server import logs, watch
from qwen_megakernel.server.api_error import ApiError, Refused
from qwen_megakernel.server.app import config_of
from qwen_megakernel.server.connections import SocketConnection
from qwen_megakernel.server.journal import Journal
from qwen_megakernel.server.keys import Keys
from qwen_megakernel.server.limits import Limits
from qwen_megakernel.server.openai.bodies import SPEECH
from qwen_megakernel.server.options import ServerOptions, rows_of
from qwen_megakernel.server.quotas import Quotas, Usage
from qwen_megakernel.server.records import Record, Speech, serving
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.server.traces import Traces
from qwen_megakernel.server.watch import Watched
from spoken_text.lexicon import Lexicon

ID = "bot-1/turn:7"
"""A request's id that a client chooses."""
TOKEN = "a-long-secret"
MONITORING = Path(__file__).parents[1] / "examples/monitoring"


@pytest.fixture(scope="module")
def server():
    with ready(small_demo) as server:
        yield server


@pytest.fixture(autouse=True)
def all_levels(caplog):
    with caplog.at_level(logging.INFO):
        yield


def logged(caplog) -> str:
    """All that the server has logged."""
    ours = [each for each in caplog.records if each.name.startswith("qwen_megakernel")]
    return " ".join(f"{each.getMessage()} {getattr(each, 'fields', '')}" for each in ours)


def samples(text: str) -> dict[tuple[str, frozenset], float]:
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def total(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    wanted = frozenset(labels.items())
    return sum(
        value for (each, has), value in samples(text).items() if each == f"qwen_megakernel_{name}" and wanted <= has
    )


def told_last(line) -> dict:
    """What a socket tells of a context's end."""
    while True:
        message = line.recv(PATIENCE_S)
        if isinstance(message, str) and (told := json.loads(message))["type"] in ("end", "error"):
            return told


# ---------------------------------------------------------------- the log


def test_a_request_is_a_line_with_its_id_and_without_its_text(server, caplog):
    answer = post(
        server.url + SPEECH,
        json={"model": "demo", "input": TEXT, "voice": "ADA", "response_format": "pcm", "seed": 5},
        headers={"x-request-id": ID},
    )
    told = access(caplog, 1)[0]
    assert answer.headers["x-request-id"] == told["request_id"] == ID
    expected = {"protocol": "http", "client": "127.0.0.1", "method": "POST", "path": SPEECH, "status": 200}
    expected |= {"voice": "ADA", "seed": 5, "finish_reason": "eos", "characters": len(TEXT)}
    assert expected.items() <= told.items() and TEXT not in logged(caplog)
    assert min(told["duration_s"], told["audio_s"], told["first_audio_s"]) > 0 and "code" not in told


def test_a_long_path_is_cut():
    assert Record("http", path="/" * 300).path == "/" * 200


@pytest.mark.parametrize("wrong", ["two words", "x" * 129, "\u00e9".encode().decode("latin-1")])
def test_an_id_that_could_be_misread_is_replaced(server, wrong):
    answer = get(f"{server.url}/v1/models", headers={"x-request-id": wrong.encode("latin-1")})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


REFUSED = (
    (lambda url: post(url + SPEECH, json={"input": TEXT, "voice": "nobody"}), 400, "invalid"),
    (lambda url: post(url + SPEECH, json={"input": TEXT, "model": "other"}), 404, "model_not_found"),
    (lambda url: post(url + SPEECH, content=b"{}" * 40_000), 413, "invalid"),
    (lambda url: get(url + "/v1/models", headers={"host": "evil.example"}), 403, "forbidden"),
    (lambda url: get(url + "/nothing?secret=1"), 404, "invalid"),
    (lambda url: get(url + "/health", headers={"x": "y" * 20_000}), 431, "invalid"),
)


@pytest.mark.parametrize("ask, status, code", REFUSED)
def test_a_refusal_is_counted_and_logged_once(server, caplog, ask, status, code):
    before = get(f"{server.url}/metrics").text
    answer = ask(server.url)
    told, error = access(caplog, 1)[0], answer.json()["error"]
    assert (answer.status_code, error["code"], told["status"], told["code"]) == (status, code, status, code)
    assert answer.headers["x-request-id"] == error["request_id"] == told["request_id"]
    after = get(f"{server.url}/metrics").text
    assert total(after, "refusals_total") - total(before, "refusals_total") == 1
    assert total(after, "refusals_total", reason=code) - total(before, "refusals_total", reason=code) == 1
    assert "secret" not in logged(caplog) and TEXT not in logged(caplog)
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


def test_a_socket_that_is_refused_is_counted_and_logged_once(server, caplog):
    before = get(f"{server.url}/metrics").text
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{server.port}/nowhere", additional_headers={"x-request-id": ID})
    told = access(caplog, 1)[0]
    assert (told["protocol"], told["status"], told["request_id"]) == ("websocket", 404, ID)
    assert refused.value.response.headers["x-request-id"] == ID
    after = get(f"{server.url}/metrics").text
    assert total(after, "refusals_total") - total(before, "refusals_total") == 1
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


def test_each_text_of_a_socket_is_a_line_with_the_sockets_id(server, caplog):
    with connect(server.socket_url, additional_headers={"x-request-id": ID}) as line:
        assert line.response.headers["x-request-id"] == ID
        for name, more in (("good", {}), ("bad", {"voice": "nobody"})):
            line.send(json.dumps({"type": "text", "context": name, "text": "Hi.", "end": True} | more))
            kinds = ("end", "error")
            while (
                isinstance(message := line.recv(PATIENCE_S), bytes)
                or (last := json.loads(message))["type"] not in kinds
            ):
                pass
        line.send(json.dumps({"type": "flush", "context": "none"}))
        error = json.loads(line.recv(PATIENCE_S))
    assert (last["request_id"], error["request_id"]) == (ID, ID)
    good, bad, none, whole = access(caplog, 4)
    assert all(told["request_id"] == ID and told["protocol"] == "socket" for told in (good, bad, none, whole))
    assert (good["context"], good["status"], good["finish_reason"]) == ("good", 200, "eos")
    assert (bad["context"], bad["status"], bad["code"]) == ("bad", 400, "invalid")
    assert (none["context"], none["code"], whole["status"]) == ("none", "invalid", 101)


@pytest.mark.parametrize(
    "error, begun, told",
    [
        (NoWordsError(""), True, []),
        (EngineBusy(""), True, []),
        (SpeechError(""), False, []),
        (SpeechError(""), True, ["failed"]),
    ],
)
def test_who_was_refused_has_spoken_nothing(error, begun, told):
    with serving(Record("http")) as record, contextlib.suppress(type(error)):
        with Journal(None, log_texts=False).speech(SimpleNamespace(begun=begun, audio=None), seed=5):
            raise error
    assert [speech.finish_reason for speech in record.speeches] == told


def test_speech_that_failed_and_was_then_cancelled_has_failed():
    audio = SimpleNamespace(finish_reason="cancelled", duration_s=1.0, compute_s=0.1, ttfc_s=0.1, lead_s=0.1)
    audio.timings = SimpleNamespace()
    with serving(Record("http")) as record, contextlib.suppress(SpeechError):
        with Journal(None, log_texts=False).speech(SimpleNamespace(begun=True, audio=audio), seed=5):
            raise SpeechError("")
    assert [(speech.finish_reason, speech.audio_s) for speech in record.speeches] == [("failed", 1.0)]


@pytest.mark.parametrize("status, log_texts, told", [(400, False, False), (400, True, True), (500, False, True)])
def test_words_of_an_error_that_may_quote_a_text_are_logged_if_texts_are(status, log_texts, told, caplog):
    journal = Journal(None, log_texts=log_texts)
    journal.refuse(Record("http"), ApiError(status, "invalid", "A secret."))
    assert ("error" in access(caplog, 1)[0]) == told


def test_a_client_who_has_gone_has_made_no_error_and_probes_have_no_span():
    journal, spans = Journal(None, log_texts=False), []
    journal.spans = SimpleNamespace(record=lambda record, seconds: spans.append(record.path))
    for path in ("/health", SPEECH):
        record = Record("http", path=path)
        with contextlib.suppress(ConnectionError), journal.entry(record):
            raise ConnectionResetError
        assert record.error is None
    assert spans == [SPEECH]


@pytest.mark.parametrize("status, code", [(200, None), (None, "closing")])
def test_what_was_answered_before_the_servers_end_was_not_cut_by_it(status, code, caplog):
    journal = Journal(None, log_texts=False)
    journal.over = True
    with journal.entry(Record("http")) as record:
        record.status = status
    assert access(caplog, 1)[0].get("code") == code


def test_a_line_of_several_speeches_has_the_first_wait_and_all_seconds(caplog):
    with Journal(None, log_texts=False).entry(Record("socket")) as record:
        waits = ({"queue": 0.1}, {"queue": 0.2})
        record.speeches += [Speech(seed, "eos", 1.5, stages=wait) for seed, wait in enumerate(waits)]
    told = access(caplog, 1)[0]
    assert (told["seed"], told["queue_s"], told["audio_s"]) == (0, 0.1, 3.0)


def test_lines_are_written_by_another_thread_and_dropped_where_nobody_takes_them():
    go, written = threading.Event(), io.StringIO()

    class Stuck(logging.StreamHandler):
        def emit(self, record: logging.LogRecord) -> None:
            assert go.wait(PATIENCE_S)
            super().emit(record)

    handler = Stuck(written)
    handler.setFormatter(logs.JsonFormatter())
    lines, logger = logs.LogQueue(handler, {"front": 2}), logging.Logger("qwen_megakernel.some")
    logger.addHandler(lines)
    with serving(Record("http", ID)):
        for _ in range(10_050):
            logger.info("said %s", "a\nb")
    assert lines.dropped >= 40
    go.set()
    lines.flush()
    logger.info("later")
    lines.flush()
    told = [json.loads(line) for line in written.getvalue().splitlines()]
    assert told[0]["message"] == "said a\nb" and told[0]["request_id"] == ID and told[0]["front"] == 2
    assert told[-1]["message"] == "later" and told[-1]["lines_dropped"] == lines.dropped


def test_no_client_can_make_up_a_line_of_text():
    record = logging.LogRecord("qwen_megakernel.access", logging.INFO, "", 0, "request", None, None)
    record.fields = {"path": '/a b"\n2026 ERROR', "key": ""}
    line = logs.TextFormatter().format(record)
    assert line.endswith(' INFO access request path="/a b\\"\\n2026 ERROR" key=""') and "\n" not in line


def test_each_line_of_a_server_is_json_to_the_last(monkeypatch, capfd):
    """Also a wrong option, Python's warnings, and what ends a thread or the command."""

    def broken(_args) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("a part is old", UserWarning, stacklevel=1)
        thread = threading.Thread(target=lambda: [][0], name="some")
        thread.start()
        thread.join()
        raise ValueError("two\nlines")

    words = ["serve", "--log-format", "json"]
    assert cli.main([*words, "--model", "/nowhere"]) == 1
    monkeypatch.setattr(cli, "function_of", lambda args: broken)
    assert cli.main(words) == 1
    wrong, warned, thread, failed = map(json.loads, capfd.readouterr().err.splitlines())
    assert wrong["message"].startswith("error: no folder '/nowhere'") and wrong["level"] == "ERROR"
    assert "a part is old" in warned["message"] and warned["level"] == "WARNING"
    assert "IndexError" in thread["traceback"] and "some" in thread["message"]
    assert "ValueError: two\nlines" in failed["traceback"] and failed["level"] == "CRITICAL"


def test_files_for_tls_that_cannot_be_used_are_named(tmp_path, capsys):
    (tmp_path / "cert.pem").write_text("no certificate")
    assert cli.main(["serve", "--ssl-certfile", str(tmp_path / "cert.pem")]) == 1
    assert f"error: the files for TLS, {tmp_path / 'cert.pem'}, cannot be used" in capsys.readouterr().err


# ---------------------------------------------------------------- metrics


def test_names_and_types_of_metrics_are_as_prometheus_wants_them(server):
    server.post(input="Hi.", response_format="pcm")
    with contextlib.suppress(InvalidStatus):
        connect(f"ws://127.0.0.1:{server.port}/nowhere")
    text = get(f"{server.url}/metrics").text
    families = list(text_string_to_metric_families(text))
    assert problems_of(families) == [] and len(families) > 30
    for name in ("queue_seconds", "first_audio_seconds", "audio_duration_seconds", "real_time_factor_ratio"):
        assert total(text, f"{name}_count", protocol="http", model="demo") >= 1, name
    assert total(text, "utterances_total", protocol="http", model="demo", finish_reason="eos") >= 1
    assert total(text, "build_info", model="demo", backend="torch") == 1
    assert total(text, "engine_memory_bytes") >= 0 and "process_resident_memory_bytes" in text
    exemplars = get(f"{server.url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}).text
    seen = [s for family in openmetrics(exemplars) for s in family.samples if s.exemplar]
    assert len(seen) > 3 and all(s.exemplar.labels["request_id"] for s in seen), "a time leads to its request"
    assert problems_of(text_string_to_metric_families("# TYPE a_milliseconds counter\na_milliseconds 1\n"))


def problems_of(families) -> list[str]:
    """What `promtool check metrics` would find."""
    found = []
    for family in families:
        name, kind = family.name, family.type
        if not family.documentation:
            found.append(f"{name}: no help")
        if kind == "counter" and not all(s.name.endswith(("_total", "_created")) for s in family.samples):
            found.append(f"{name}: a counter ends with _total")
        if kind != "counter" and name.endswith(("_total", "_count", "_sum", "_bucket")):
            found.append(f"{name}: only a counter may be called so")
        if not re.fullmatch("[a-z_:][a-z0-9_:]*", name):
            found.append(f"{name}: small letters, digits and _")
        units = "_(milli|micro|nano)seconds|_(minutes|hours|kilobytes|megabytes|percent|ms)(_|$)"
        if re.search(units, name) or kind in name.split("_"):
            found.append(f"{name}: base units, and no name of a type")
        found += [f"{name}: label {label}" for s in family.samples for label in s.labels if label.startswith("__")]
    return found


def test_gaps_are_counted(server):
    said = {"protocol": "socket", "key": "", "id": ID, "finish_reason": "eos", "audio_s": 2.0, "compute_s": 4.0}
    said |= {"first_audio_s": 0.2, "lead_s": -0.3, "stages": {"queue": 0.1}, "protocol": "made up"}
    server.service.journal.counts.said(said)
    text = get(f"{server.url}/metrics").text
    assert total(text, "gaps_total", protocol="made up") == 1
    assert total(text, "least_lead_seconds_bucket", protocol="made up", le="0.0") == 1
    assert total(text, "real_time_factor_ratio_bucket", protocol="made up", le="1.0") == 0


# ---------------------------------------------------------------- keys


def write_keys(path: Path, **keys: str) -> None:
    """Names -> keys and limits, such as "secret; streams = 1"."""
    tables = []
    for name, told in keys.items():
        key, *limits = told.split("; ")
        digests = [hashlib.sha256(each.encode()).hexdigest() for each in key.split()]
        tables.append("\n".join([f"[keys.{name}]", f"sha256 = {json.dumps(digests)}", *limits]))
    path.write_text("\n".join(tables))


def asked(server, key: str, **body):
    bearing = {"authorization": f"Bearer {key}"}
    return post(server.url + SPEECH, json={"input": "Hi.", "response_format": "pcm"} | body, headers=bearing)


@pytest.fixture
def with_keys(tmp_path):
    path = tmp_path / "keys.toml"
    write_keys(path, old="alpha", small="beta; streams = 1; characters_per_minute = 10")
    with ready(small_demo, keys_file=path, token=TOKEN) as server:
        yield server, path


def test_keys_have_names_and_limits_and_change_without_cutting_anybody(with_keys, caplog, monkeypatch):
    server, path = with_keys
    for key, status in (("alpha", 200), ("beta", 200), (TOKEN, 200), ("gamma", 401), ("x", 401)):
        assert asked(server, key).status_code == status
    told = access(caplog, 5)
    assert [each.get("key") for each in told] == ["old", "small", None, None, None]
    refused = asked(server, "beta", input="A text of many characters.")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    bearing = {"authorization": "Bearer alpha"}
    with connect(server.socket_url, additional_headers=bearing) as line:
        line.recv(PATIENCE_S)
        line.send(json.dumps({"type": "text", "context": "a", "text": "Hello there, "}))
        line.recv(PATIENCE_S)
        write_keys(path, new="gamma")
        [watched] = server.service.watched
        watched.look()
        assert asked(server, "alpha").status_code == 401 and asked(server, "gamma").status_code == 200
        line.send(json.dumps({"type": "text", "context": "a", "text": "you.", "end": True}))
        assert told_last(line)["finish_reason"] == "eos", "who speaks goes on"
        line.send(json.dumps({"type": "text", "context": "b", "text": "More.", "end": True}))
        assert json.loads(line.recv(PATIENCE_S))["code"] == "unauthorized", "but begins no more"
    path.write_text("[keys")
    watched.look()
    assert asked(server, "gamma").status_code == 200, "a broken file changes nothing"
    text = get(f"{server.url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
    assert total(text, "utterances_total", key="old") == 2 and total(text, "characters_total", key="small") == 3
    assert total(text, "refusals_total", key="small", reason="key_characters") == 1
    assert not any(secret in logged(caplog) for secret in ("alpha", "beta", "gamma", TOKEN))


def test_a_key_speaks_no_more_texts_at_once_than_it_may(with_keys):
    server, path = with_keys
    bearing = {"authorization": "Bearer beta"}
    with connect(server.socket_url, additional_headers=bearing) as line:
        line.send(json.dumps({"type": "text", "context": "a", "text": "Ah, "}))
        until(lambda: server.service.sessions)
        refused = asked(server, "beta", input="Hi")
        assert refused.status_code == 429 and "1 texts at once" in refused.json()["error"]["message"]
        assert asked(server, "alpha").status_code == 200
    until(lambda: asked(server, "beta", input="Hi").status_code == 200)


def test_fronts_count_for_a_key_together(tmp_path, server):
    path = tmp_path / "keys.toml"
    write_keys(path, bot="alpha; streams = 1; characters_per_minute = 1000")
    with fronts_of(server.service, 2, keys_file=path) as fronts:
        one, other = (front.server for front in fronts)
        with connect(one.socket_url, additional_headers={"authorization": "Bearer alpha"}) as line:
            line.send(json.dumps({"type": "text", "context": "a", "text": "Hello there, "}))
            until(lambda: one.service.sessions)
            assert asked(other, "alpha").status_code == 429
        until(lambda: asked(other, "alpha").status_code == 200)


def test_characters_fill_up_within_a_minute():
    now = [0.0]
    usage = Usage(lambda: now[0])
    assert usage.take_characters("a", 60, 60) == 0 and usage.take_characters("a", 30, 60) == 30
    now[0] = 30.0
    assert usage.take_characters("a", 30, 60) == 0 and usage.take_characters("b", 600, 60) == 0, "a long one owes"
    assert usage.take_characters("b", 1, 60) == pytest.approx(541)
    assert usage.take_characters("a", 15, 60) == 15, "what has filled up is taken"
    now[0] = 3000.0
    assert usage.take_characters("a", 60, 60) == 0 and usage.take_characters("a", 1, 60) == 1, "no more than a minute's"


async def test_who_must_wait_is_told_for_how_long_and_in_whole_seconds(tmp_path):
    write_keys(tmp_path / "keys.toml", a="x; characters_per_minute = 600")
    quotas, now = Quotas(Keys(None, tmp_path / "keys.toml")), [0.0]
    quotas.usage = Usage(lambda: now[0])
    await quotas.take_characters("a", 600)
    for count, seconds in ((1, 1), (12, 2), (594, 60)):
        with pytest.raises(Refused) as refused:
            await quotas.take_characters("a", count)
        assert refused.value.error.retry_s == seconds


async def test_a_patient_text_waits_until_its_key_has_a_stream(tmp_path):
    write_keys(tmp_path / "keys.toml", a="x; streams = 1")
    quotas = Quotas(Keys(None, tmp_path / "keys.toml"))

    async def speak() -> None:
        async with quotas.stream("a", patient=True):
            pass

    async with quotas.stream("a", patient=False):
        waiting = asyncio.create_task(speak())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_a_limit_that_comes_later_counts_from_none(tmp_path):
    """A key that had no limit has taken no stream, so it gives none back."""
    path = tmp_path / "keys.toml"
    write_keys(path, a="x")
    keys = Keys(None, path)
    quotas = Quotas(keys)
    async with quotas.stream("a", patient=False):
        write_keys(path, a="x; streams = 1")
        keys.reread()
    async with quotas.stream("a", patient=False):
        with pytest.raises(Refused):
            await quotas.stream("a", patient=False).__aenter__()


def test_a_digest_may_be_in_upper_case(tmp_path):
    digest = hashlib.sha256(b"x").hexdigest().upper()
    (tmp_path / "keys.toml").write_text(f"[keys.a]\nsha256 = '{digest}'")
    assert Keys(None, tmp_path / "keys.toml").of(b"x").name == "a"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "1 to 1000 tables"),
        ("[keys.a]\nsha256 = 'x'", "64 hex digits"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nstream = 1", "unknown 'stream'"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nstreams = 0", "above 0"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nstreams = true", "above 0"),
        ("[keys.a]\nsha256 = []", "64 hex digits"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\n[keys.b]\nsha256 = '{'0' * 64}'", "the same key"),
        ("\n".join(f"[keys.a{number}]" for number in range(1001)), "1 to 1000 tables .* got 1001"),
        ("[keys.'a b']\n", "a name has"),
        ("keys", "not TOML"),
    ],
)
def test_a_wrong_file_of_keys_is_refused(tmp_path, text, words):
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(BackendError, match=words):
        Keys(None, tmp_path / "keys.toml")


# ---------------------------------------------------------------- files for Prometheus and Grafana


def queries() -> list[str]:
    """Those of dashboard and alerts, with Grafana's variables filled in."""
    board = json.loads((MONITORING / "dashboard.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    found += [rule["expr"] for rule in rules]
    return [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in found]


def test_each_query_of_dashboard_and_alerts_finds_its_metrics_and_labels(server):
    """What Prometheus adds is not there: `up` and `instance`."""
    server.post(input="Hi.", response_format="pcm")
    with contextlib.suppress(InvalidStatus):
        connect(f"ws://127.0.0.1:{server.port}/nowhere")
    gaps = {"protocol": "http", "key": "", "id": "", "finish_reason": "eos", "audio_s": 2.0, "compute_s": 4.0}
    server.service.journal.counts.said(gaps | {"first_audio_s": 0.2, "lead_s": -0.3, "stages": {}})
    labels: dict[str, set[str]] = {"up": {"job"}}
    for name, has in samples(get(f"{server.url}/metrics").text):
        labels.setdefault(name, set()).update(label for label, _ in has)
    assert len(queries()) > 30
    for query in queries():
        names = re.findall(r"\b(?:qwen_megakernel|process)_\w+|\bup\b", query)
        assert names and set(names) <= labels.keys(), query
        used = re.findall(r"(\w+)=~?\"", query) + re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", query)))
        assert set(used) <= {"instance", "job"}.union(*(labels[name] for name in names)), query


def test_the_queries_are_promql():
    parser = pytest.importorskip("promql_parser")
    for query in queries():
        parser.parse(query)


def test_the_page_for_whoever_is_on_call_explains_each_alert():
    page = (MONITORING.parents[1] / "docs/operating.md").read_text()
    for rule in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]:
        assert f"### {rule['alert']}\n" in page
        assert rule["annotations"]["runbook"] == f"docs/operating.md#{rule['alert'].lower()}"


def test_the_proxies_pass_on_what_sockets_and_streams_need(tmp_path):
    folder = MONITORING.parent / "proxies"
    nginx, caddy = (folder / "nginx.conf").read_text(), (folder / "Caddyfile").read_text()
    said = dict(re.findall(r"^ +(proxy_(?:read|send)_timeout) (\d+)s;", nginx, re.M))
    assert len(said) == 2 and all(int(seconds) > Limits().total_s for seconds in said.values())
    for header in ("Upgrade $http_upgrade", "Connection $tts_connection", "Host $host", "X-Request-Id $request_id"):
        assert f"proxy_set_header {header};" in nginx
    assert "proxy_buffering off;" in nginx and "flush_interval -1" in caddy and "health_uri /ready" in caddy
    if program := shutil.which("nginx"):
        write_certificate(tmp_path, "tts.example")
        plain = nginx.replace("/etc/ssl/tts.example.pem", str(tmp_path / "cert.pem"))
        plain = plain.replace("/etc/ssl/tts.example.key", str(tmp_path / "key.pem"))
        (tmp_path / "nginx.conf").write_text(f"events {{}}\npid {tmp_path}/pid;\nhttp {{\n{plain}\n}}\n")
        subprocess.run([program, "-t", "-c", str(tmp_path / "nginx.conf")], check=True)


def test_speech_that_the_servers_end_has_cut_is_told_as_such(server, caplog):
    """Not as that of a client that has left."""
    asked = {"model": "demo", "input": " ".join([TEXT] * 20), "voice": "ada", "response_format": "pcm"}
    before = total(get(f"{server.url}/metrics").text, "refusals_total", reason="closing")
    try:
        with stream("POST", server.url + SPEECH, json=asked) as answer:
            parts = answer.iter_raw()  # kept: its end would end the answer
            next(parts)
            server.service.journal.over = True
        told = access(caplog, 1)[0]
    finally:
        server.service.journal.over = False
    assert (told["status"], told["code"], told["finish_reason"]) == (200, "closing", "cancelled")
    assert min(told["audio_s"], told["first_audio_s"]) > 0  # also of speech that nobody hears to its end
    assert total(get(f"{server.url}/metrics").text, "refusals_total", reason="closing") == before + 1


# ---------------------------------------------------------------- options from everywhere


def options_of(monkeypatch, *words: str, file: str = "", **variables: str):
    for name, value in variables.items():
        monkeypatch.setenv(f"QWEN_MEGAKERNEL_{name}", value)
    if file:
        path = monkeypatch.tmp_path / "config.toml"
        path.write_text(file)
        words = (*words, "--config", str(path))
    return cli.make_parser().parse_args(["serve", *words])


@pytest.fixture
def given(monkeypatch, tmp_path):
    monkeypatch.tmp_path = tmp_path
    return lambda *words, **more: options_of(monkeypatch, *words, **more)


FILE = """
max_streams = 3
max-positions = 300
ui = true
allow_upload = true
allow_origin = ["https://a.example", "https://b.example"]
voice_alias = {alloy = "ada"}
host = "::1"
"""


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(given):
    words = ("--max-streams", "5", "--no-ui")
    args = given(*words, file=FILE, MAX_STREAMS="4", MAX_POSITIONS="400", ALLOW_UPLOAD="off", TOKEN="x", UI="yes")
    assert (args.max_streams, args.max_positions, args.host, args.port) == (5, 400, "::1", 8000)
    assert (args.ui, args.allow_upload, args.token) == (False, False, "x")
    options = server_options(args, "serve")
    assert options.allow_origins == ("https://a.example", "https://b.example")
    assert options.voice_aliases == {"alloy": "ada"} and not options.ui
    given_once = given("--allow-origin", "https://c.example", file=FILE)
    assert given_once.allow_origins == ["https://c.example"], "a list replaces the other, it is not added to it"


def test_printed_options_are_a_file_that_gives_the_same(given, tmp_path, monkeypatch):
    args = given("--token", "secret", file=FILE, ALLOW_ORIGIN="https://c.example, https://d.example")
    told = printed(args, actions_of(args.parser))
    assert "secret" not in told and "# token is set  # command line" in told
    assert f"max_streams = 3  # file {tmp_path / 'config.toml'}" in told and "port = 8000  # default" in told
    assert 'allow_origin = ["https://c.example", "https://d.example"]  # environment' in told
    monkeypatch.delenv("QWEN_MEGAKERNEL_ALLOW_ORIGIN")
    again = given("--token", "secret", file=told)
    without = {"sources", "config", "parser", "rules"}
    for name in vars(args).keys() - without:  # a flag that is off may be None
        assert (getattr(again, name) or None) == (getattr(args, name) or None), name


def test_each_option_can_come_from_a_file_or_the_environment(given):
    actions = actions_of(given().parser)
    typed = {row.typed or name for name, (_, row) in rows_of("serve").items()}
    assert {name.replace("-", "_") for name in typed} < actions.keys() and {"port", "model", "speed"} < actions.keys()


@pytest.mark.parametrize(
    "file, variables, words",
    [
        ("max_stream = 3", {}, "unknown option 'max_stream'; did you mean max_streams?"),
        ("[server]\nport = 1", {}, "unknown option 'server'"),
        ("", {"MAX_STREAM": "3"}, "unknown option QWEN_MEGAKERNEL_MAX_STREAM; did you mean max_streams?"),
        ("ui = 1", {}, "ui must be true or false, got 1"),
        ("", {"UI": "maybe"}, "QWEN_MEGAKERNEL_UI must be true or false, got 'maybe'"),
        ("port = 'x'", {}, "--port: expected an integer, got 'x'"),
        ("port = [1]", {}, "port must be one text or number, got [1]"),
        ("port", {}, "is not TOML"),
    ],
)
def test_a_wrong_option_is_refused_by_name(given, capsys, file, variables, words):
    with pytest.raises(SystemExit):
        given(file=file, **variables)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "entrance, option, value, words",
    [
        ("serve", "--grace-seconds", "-1", "must be 0 to"),
        ("wyoming", "--metrics-port", "70000", "must be 1 to 65535, got 70000"),
    ],
)
def test_what_would_not_start_is_not_printed(capsys, entrance, option, value, words):
    assert cli.main([entrance, option, value, "--print-config"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and f"{option} {words}" in told.err


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_option(given):
    names = ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "METRICS_SERVICE_HOST")
    args = given(PORT="tcp://10.0.0.1:8000", MODEL="", **dict.fromkeys(names, "x"))
    assert (args.port, args.model) == (8000, "demo")


def test_an_option_of_the_other_server_in_the_environment_is_none_of_this_one(monkeypatch):
    monkeypatch.setenv("QWEN_MEGAKERNEL_TOKEN", "secret")
    assert not hasattr(cli.make_parser().parse_args(["wyoming"]), "token")


# ---------------------------------------------------------------- its end, its certificate


def test_after_the_signal_requests_are_taken_until_the_grace_is_over(caplog):
    """The app's own end is what follows the signal; here it is told by hand."""
    with ready(small_demo, grace_seconds=3600.0) as server:
        loop = server.service._tasks[0].get_loop()
        stopping = asyncio.run_coroutine_threadsafe(server.service.drain(), loop)
        until(lambda: get(f"{server.url}/ready").status_code == 503)
        answer = server.post(input="Hi.", response_format="pcm")
        assert answer.status_code == 200 and answer.headers["connection"] == "close"
        with connect(server.socket_url) as line:
            assert json.loads(line.recv(PATIENCE_S))["type"] == "hello"
        assert get(f"{server.url}/health").json()["status"] == "draining"
        loop.call_soon_threadsafe(server.service._grace.set)
        stopping.result(PATIENCE_S)
        assert server.post().status_code == 503
        with pytest.raises(InvalidStatus, match="503"):
            connect(server.socket_url)


async def test_a_server_that_was_never_ready_has_no_grace():
    service = EngineService(lambda: None, ServerOptions(grace_seconds=9 * PATIENCE_S), model="x")
    await asyncio.wait_for(service.drain(), PATIENCE_S)
    assert service.state == "draining" and not service.serves


@pytest.mark.parametrize(
    "state, kind", [("dead", EngineDied), ("failed", EngineDied), ("loading", EngineClosed), ("draining", EngineClosed)]
)
def test_who_comes_too_late_is_told_whether_the_engine_is_dead(state, kind):
    service = EngineService(lambda: None, ServerOptions(), model="x")
    service._engine, service.state = object(), state
    with pytest.raises(EngineClosed) as refused:
        service.check_ready()
    assert refused.type is kind


@pytest.mark.parametrize("name", ["seed", "retries", "max_frames"])
def test_who_fixes_an_attempt_may_be_the_operator(name):
    services = [EngineService(lambda: None, ServerOptions(defaults=told), model="x") for told in ({}, {name: 3})]
    assert [service.fixes_attempts({}) for service in services] == [False, True]
    assert services[0].fixes_attempts({name: 3})


async def test_a_drain_waits_for_sound_that_a_client_has_yet_to_take():
    class Unsent(set):
        looks = 0

        def __bool__(self) -> bool:
            self.looks += 1
            return self.looks < 3

    service = EngineService(lambda: None, ServerOptions(drain_seconds=PATIENCE_S), model="x")
    service.unsent_sockets = Unsent()
    await service.drain()
    assert service.unsent_sockets.looks == 3


def write_certificate(folder: Path, name: str) -> None:
    """A new key and its certificate, cert.pem and key.pem."""
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(who).issuer_name(who).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now).not_valid_after(now + timedelta(1))
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "cert.pem").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))


def test_a_renewed_certificate_is_shown_to_new_connections(tmp_path):
    def shown(port: int) -> bytes:
        return ssl.get_server_certificate(("127.0.0.1", port)).encode()

    write_certificate(tmp_path, "old")
    files = {"ssl_certfile": tmp_path / "cert.pem", "ssl_keyfile": tmp_path / "key.pem"}
    with running(small_demo, **files) as server:
        before = shown(server.port)
        assert before == files["ssl_certfile"].read_bytes()
        write_certificate(tmp_path, "new")
        [watched] = server.service.watched
        watched.look()
        assert shown(server.port) == files["ssl_certfile"].read_bytes() != before
        served, key = files["ssl_certfile"].read_bytes(), files["ssl_keyfile"].read_bytes()
        write_certificate(tmp_path, "newer")
        files["ssl_keyfile"].write_bytes(key)
        watched.look()
        assert shown(server.port) == served, "its key has not come yet"
        until(lambda: server.service.state == "ready")


@pytest.fixture
def behind_tls(tmp_path):
    """The options of a server behind TLS, and what its clients trust."""
    write_certificate(tmp_path, "localhost")
    trusted = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    trusted.check_hostname = False
    return {"ssl_certfile": tmp_path / "cert.pem", "ssl_keyfile": tmp_path / "key.pem"}, trusted


def has_ended(line: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return line.recv(1) == b""
    return True


def test_who_has_not_agreed_on_tls_makes_room_for_who_does(behind_tls):
    files, trusted = behind_tls
    limits = Limits(connections=3, spare_connections=0, header_s=10 * PATIENCE_S)
    with ready(small_demo, limits=limits, **files) as server, contextlib.ExitStack() as stack:
        connect = lambda: socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)  # noqa: E731
        silent = [stack.enter_context(connect()) for _ in range(3)]
        silent[1].sendall(b"\x16\x03")
        for line in silent:
            client = stack.enter_context(trusted.wrap_socket(connect()))
            assert has_ended(line)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(99).startswith(b"HTTP/1.1 200")


def test_as_many_connections_as_are_allowed_stay_open():
    with (
        ready(small_demo, limits=Limits(connections=3, spare_connections=0)) as server,
        contextlib.ExitStack() as stack,
    ):
        connect = lambda: socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)  # noqa: E731
        lines = [stack.enter_context(connect()) for _ in range(3)]
        for line in reversed(lines):  # once it is answered, all were open
            line.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert line.recv(99).startswith(b"HTTP/1.1 200")


def test_who_rests_longest_makes_room_and_who_is_answered_does_not():
    """Nor does a WebSocket, or who is answered a second request that came right behind the first."""
    health, body = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b'{"input": "Hi.", "response_format": "pcm"}'
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with ready(small_demo, limits=Limits(connections=4)) as server, contextlib.ExitStack() as stack:
        new = lambda: stack.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE_S))  # noqa: E731
        listens = SocketClient(stack.enter_context(connect(server.socket_url)))
        with slots_taken(server.service.engine):
            asks, gone = new(), new()
            asks.sendall(health + head % (SPEECH.encode(), len(body)) + body)
            until(lambda: server.service.sessions)
            gone.shutdown(socket.SHUT_WR)
            assert has_ended(gone)
            first, second, third = new(), new(), new()
            assert has_ended(first)
            for line in (second, third):
                line.sendall(health)
                assert line.recv(99).startswith(b"HTTP/1.1 200")
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 2:
            assert (more := asks.recv(9999))
            answer += more
        assert listens.answers()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03", b"GET / HTTP/1.1\r\n\r\n"])
def test_tls_that_is_not_agreed_on_in_time_ends_the_connection(behind_tls, sent):
    with running(small_demo, limits=Limits(header_s=0.5), **behind_tls[0]) as server:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as line:
            line.sendall(sent)
            while not has_ended(line):
                pass
        until(lambda: server.service.state == "ready")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_what_comes_right_behind_tls_is_read(behind_tls, loop, monkeypatch):
    """In one piece with the last bytes of TLS."""
    files, trusted = behind_tls
    monkeypatch.setattr(serving_tests, "config_of", partial(config_of, loop=loop))
    with ready(small_demo, **files) as server, socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as line:
        came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trusted.wrap_bio(came, goes)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                line.sendall(goes.read())
                came.write(line.recv(9999))
        tls.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        line.sendall(goes.read())
        answer = b""
        while b"\r\n" not in answer:
            came.write(line.recv(9999))
            with contextlib.suppress(ssl.SSLWantReadError):
                answer += tls.read(9999)
        assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_speech_goes_over_tls(behind_tls, loop, monkeypatch):
    """By HTTP, twice over one connection, and on a socket."""
    files, trusted = behind_tls
    monkeypatch.setattr(serving_tests, "config_of", partial(config_of, loop=loop))
    with ready(small_demo, **files) as server:
        truth, made = said(server), bytearray()
        asked = {"model": "demo", "input": TEXT, "voice": "ada", "seed": 5, "response_format": "pcm"}
        with httpx.Client(verify=trusted, timeout=PATIENCE_S) as client:
            for _ in range(2):
                answer = client.post(f"https://127.0.0.1:{server.port}{SPEECH}", json=asked)
                assert answer.status_code == 200 and same(answer.content, truth)
        with connect(f"wss://127.0.0.1:{server.port}/v1/audio/speech/socket", ssl=trusted) as line:
            line.send(
                json.dumps({"type": "text", "context": "a", "text": TEXT, "end": True, "seed": 5, "voice": "ada"})
            )
            while not isinstance(told := line.recv(PATIENCE_S), str) or json.loads(told)["type"] != "end":
                made += told[4:] if isinstance(told, bytes) else b""
        assert same(bytes(made), truth)


def test_a_server_ends_while_a_socket_closes():
    """Its client has said goodbye, and TLS has not ended yet."""
    line, closed = SocketConnection.__new__(SocketConnection), []
    conn = ServerProtocol(state=State.CLOSING)
    line.__dict__ |= {"conn": conn, "queue": asyncio.Queue(), "close_sent": False, "handshake_complete": True}
    line.__dict__ |= {"stop_keepalive": list, "transport": SimpleNamespace(close=lambda: closed.append(True))}
    line.shutdown()
    assert closed and line.queue.get_nowait()["type"] == "websocket.disconnect"


def test_a_key_that_needs_a_password_is_refused_and_nobody_is_asked(behind_tls, capsys):
    files, _ = behind_tls
    key = serialization.load_pem_private_key(files["ssl_keyfile"].read_bytes(), None)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files["ssl_keyfile"].write_bytes(key.private_bytes(pem, form, serialization.BestAvailableEncryption(b"secret")))
    options = [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
    assert cli.main(["serve", "--port", "99999", *options]) == 1
    assert "the files for TLS" in capsys.readouterr().err
    assert cli.main(["serve", "--port", "99999", *options, "--ssl-keyfile-password", "secret"]) == 1
    assert "there is no such port" in capsys.readouterr().err


def test_what_cannot_be_read_now_is_read_later(tmp_path, monkeypatch, caplog):
    """Such as a file that its owner alone may read, or one for which memory was missing: a key that was taken back must
    not stay good because of that."""
    file, came, fails = tmp_path / "keys.toml", [], [MemoryError()] * 3
    file.write_text("old")

    def reread() -> None:
        if fails:
            raise fails.pop()
        came.append(file.read_text())

    watched = Watched("the keys", [file], reread)
    file.write_text("newer")
    watched.look()
    watched.look()
    assert not came and len(fails) == 2, "it is not tried again at once"
    file.chmod(0o600)
    watched.look()
    assert not came and len(fails) == 1, "who may read it has changed"
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 60.0))
    watched.look()
    assert not came and not fails
    monkeypatch.undo()
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 120.0))
    for _ in range(2):
        watched.look()
    monkeypatch.undo()
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 300.0))
    watched.look()
    assert came == ["newer"], "and then it is as good as any other"
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 3


async def test_each_of_several_is_looked_after_and_so_is_what_changes_within_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.01)
    file, folder, came = tmp_path / "keys.toml", tmp_path / "voices", {"keys": 0, "voices": 0}
    folder.mkdir()
    for path in (file, folder / "ada"):
        path.write_text("old")
    reread = lambda what: came.update({what: came[what] + 1})  # noqa: E731
    both = [Watched(what, [path], partial(reread, what)) for what, path in (("keys", file), ("voices", folder))]
    watching = asyncio.create_task(watch.watch(both))
    for path in (file, folder / "ada"):
        path.write_text("another")
    await until_in_loop(lambda: all(came.values()))
    watching.cancel()


def test_voices_and_a_lexicon_are_read_again(tiny, tmp_path):
    lexicon, voices = tmp_path / "words.json", tmp_path / "voices"
    voices.mkdir()
    lexicon.write_text('{"SQL": "sequel"}')
    folder = tiny("base", size="tiny", eos_gain=4.0)
    load = lambda: TTSEngine.load(folder, device="cpu", max_streams=2, max_positions=256)  # noqa: E731
    more = {"allow_upload": True, "defaults": {"lexicon": Lexicon.load(lexicon)}, "lexicon_file": lexicon}
    with ready(load, voices=voices, **more) as server:
        service = server.service
        of_voices, of_lexicon = service.watched
        for name in ("anna", "ben"):
            service.engine.placeholder_voice().save(voices / f"{name}.safetensors")
        of_voices.look()
        assert service.voice_names() == ["anna", "ben"]
        default = service.request({}).conditioning.voice
        assert default is service.saved_voices.by_name["anna"], "the first in the alphabet"
        assert server.post(voice="anna", response_format="pcm").status_code == 200
        kept = service.saved_voices.by_name["ben"]
        (voices / "anna.safetensors").unlink()
        (voices / "carla.safetensors").write_text("no voice")
        of_voices.look()
        assert service.voice_names() == ["anna", "ben"], "nothing changes where a file is broken"
        (voices / "carla.safetensors").unlink()
        of_voices.look()
        assert service.saved_voices.by_name == {"ben": kept}
        (voices / "anna.safetensors").symlink_to("nowhere")
        of_voices.look()
        voices.rename(tmp_path / "elsewhere")
        of_voices.look()
        assert service.saved_voices.by_name == {"ben": kept}, "a disk may be gone for a moment"
        (tmp_path / "elsewhere").rename(voices)
        (voices / "anna.safetensors").unlink()
        (voices / "anna.safetensors").symlink_to("ben.safetensors")
        of_voices.look()
        assert service.voice_names() == ["anna", "ben"], "whichever came first"
        assert service.request({}).conditioning.voice is service.saved_voices.by_name["anna"]
        lexicon.write_text('{"SQL": "my sequel"}')
        of_lexicon.look()
        assert service.defaults["lexicon"].apply("SQL") == "my sequel"


# ---------------------------------------------------------------- traces


def test_a_request_has_the_spans_of_its_stages_in_the_trace_of_its_client(server, caplog):
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, trace = InMemorySpanExporter(), "0af7651916cd43dd8448eb211c80319c"
    server.service.journal.spans = Traces(SimpleSpanProcessor(spans))
    try:
        headers = {"x-request-id": ID, "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        post(server.url + SPEECH, json={"input": "Hi.", "voice": "ada", "response_format": "pcm"}, headers=headers)
        with connect(server.socket_url) as line:
            told = {"type": "text", "context": "a", "text": "Hi.", "end": True}
            line.send(json.dumps(told | {"traceparent": headers["traceparent"]}))
            assert told_last(line)["type"] == "end"
        access(caplog, 3)
    finally:
        server.service.journal.close()
        server.service.journal.spans = None
    made = [span for span in spans.get_finished_spans() if f"{span.context.trace_id:032x}" == trace]
    stages = ["tokenise", "prompt", "queue", "prefill", "first_frame", "vocoder"]
    assert [span.name for span in made] == [
        *stages,
        "speak",
        f"POST {SPEECH}",
        *stages,
        "speak",
        server.socket_url[-23:],
    ]
    request = made[7]
    assert request.attributes["request.id"] == ID and f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert access(caplog, 3)[0]["trace_id"] == trace
    assert all(span.start_time <= span.end_time for span in made) and "Hi." not in str(
        [span.to_json() for span in made]
    )


def test_a_server_ends_although_its_collector_does_not_answer(monkeypatch):
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    closed = threading.Event()

    class Stuck(InMemorySpanExporter):
        def shutdown(self) -> None:
            assert closed.wait(PATIENCE_S), "it was waited for"

    monkeypatch.setattr("qwen_megakernel.server.traces._CLOSE_S", 0.05)
    Traces(SimpleSpanProcessor(Stuck())).close()
    closed.set()
