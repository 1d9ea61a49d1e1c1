"""The options of a server: one row each leads from every entrance that takes it to the server."""

import argparse
import dataclasses
import resource
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen_megakernel import BackendError, cli
from qwen_megakernel.commands.options import server_options
from qwen_megakernel.server.app import make_app
from qwen_megakernel.server.limits import MOST_VALUES, Limits, allow_files, too_many_values
from qwen_megakernel.server.options import ServerOptions, rows_of

CERT = ["--ssl-certfile", "cert.pem"]
"""Without it the other options of TLS are refused."""
GIVEN: dict[str, tuple[Any, list[str]]] = {
    "voices": (Path("some"), ["--voices", "some"]),
    "allow_foreign_voice": (True, ["--allow-foreign-voice"]),
    "served_names": (("one", "two"), ["--served-name", "one", "--served-name", "two"]),
    "voice_aliases": ({"nova": "ada", "ash": "max"}, ["--voice-alias", "nova=ada", "--voice-alias", "ash = max"]),
    "openai_voices": (True, ["--voice-alias", "OpenAI"]),
    "lexicon_file": (None, []),
    "token": ("secret", ["--token", "secret"]),
    "keys_file": (Path("keys.toml"), ["--keys-file", "keys.toml"]),
    "allow_upload": (True, ["--allow-upload"]),
    "allow_clone": (True, ["--allow-clone"]),
    "allow_origins": (("https://a.example",), ["--allow-origin", "https://a.example"]),
    "ui": (True, ["--ui"]),
    "log_texts": (True, ["--log-texts"]),
    "log_format": ("json", ["--log-format", "json"]),
    "grace_seconds": (5.0, ["--grace-seconds", "5"]),
    "drain_seconds": (600.0, ["--drain-seconds", "600"]),
    "otlp_endpoint": ("http://127.0.0.1:4318", ["--otlp-endpoint", "http://127.0.0.1:4318"]),
    "metrics_port": (9100, ["--metrics-port", "9100"]),
    "ssl_certfile": (Path("cert.pem"), ["--ssl-certfile", "cert.pem"]),
    "ssl_keyfile": (Path("key.pem"), ["--ssl-keyfile", "key.pem", *CERT]),
    "ssl_keyfile_password": ("secret", ["--ssl-keyfile-password", "secret", *CERT]),
    "ssl_ca_certs": (Path("ca.pem"), ["--ssl-ca-certs", "ca.pem", *CERT]),
    "defaults": ({"speed": 1.5}, ["--speed", "1.5"]),
    "limits": (Limits(), []),
}
"""Field -> a value, and the words of a command line that stand for it."""
ALSO = {"serve": {"openai_voices", "allow_foreign_voice"}, "wyoming": {"allow_foreign_voice"}}
"""Fields without a row that a command fills: by another option, or by the engine's."""


def read(*words: str) -> argparse.Namespace:
    return cli.make_parser().parse_args(words)


def test_every_option_has_a_value_here_and_those_with_a_row_an_entrance():
    assert set(GIVEN) == {field.name for field in dataclasses.fields(ServerOptions)}
    rows = {name for entrance in ("serve", "wyoming", "ray") for name in rows_of(entrance)}
    assert set(GIVEN) - {"openai_voices", "lexicon_file", "defaults", "limits"} == rows


@pytest.mark.parametrize("command", ["serve", "wyoming"])
@pytest.mark.parametrize("name", GIVEN)
def test_a_command_line_leads_to_the_server(command, name, capsys):
    value, words = GIVEN[name]
    if name in rows_of(command).keys() | ALSO[command] | {"defaults", "limits", "lexicon_file"}:
        also = {"ssl_certfile": Path("cert.pem")} if words[-2:] == CERT else {}
        assert server_options(read(command, *words), command) == ServerOptions(**also | {name: value})
    else:
        with pytest.raises(SystemExit):
            read(command, *words)
        assert "unknown option" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "wyoming"])
def test_connections_follow_the_slots(command):
    for slots, connections in ((1, 512), (256, 512), (1024, 2048)):
        limits = server_options(read(command, "--max-streams", str(slots)), command).limits
        assert limits == Limits(connections=connections)


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "connections"),
    [
        (1024, 9999, 9999, 2048),
        (1024, -1, 2320, 2048),
        (4096, 4096, None, 2048),
        (-1, -1, None, 2048),
        (1024, 2000, 2000, 2000 - 16 - 256),
        (256, 256, None, 256 - 16 - 128),
        (64, 64, None, 64 - 16 - 32),
        (16, 16, None, 1),
    ],
)
def test_no_more_connections_than_files(soft, hard, allowed, connections, monkeypatch, caplog):
    """Wanted are 2048 connections, 16 spare ones and 256 other files. -1: no limit."""
    made = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: made.append(both))
    wanted = Limits(connections=2048, max_text=9)
    assert allow_files(wanted) == dataclasses.replace(wanted, connections=connections)
    assert made == ([(allowed, hard)] if allowed else [])
    assert ("`ulimit -n 2320`" in caplog.text) == (connections < 2048)


def test_few_connections_stay_few_where_few_files_are_allowed(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    assert allow_files(Limits(connections=10)).connections == 10


@pytest.mark.parametrize("kind", [str, str.encode])
@pytest.mark.parametrize("mark", ",[{")
def test_values_of_json_are_counted_by_their_marks(mark, kind):
    assert not too_many_values(kind(mark * MOST_VALUES)) and too_many_values(kind(mark * (MOST_VALUES + 1)))


def test_what_the_command_knows_better_replaces_what_was_typed():
    assert server_options(read("serve", "--token", " x "), "serve", token="x") == ServerOptions(token="x")


@pytest.fixture
def on_ray(monkeypatch):
    """server/ray/app.py and the options that a replica's server gets. Without Ray there is a stand-in: nothing of it is
    called."""
    name, replica = "qwen_megakernel.server.ray.app", SimpleNamespace(replica_tag="one")
    if find_spec("ray") is None:
        serve = SimpleNamespace(Application=None, get_replica_context=lambda: replica)
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
        monkeypatch.setitem(sys.modules, "ray.serve", serve)
    monkeypatch.setitem(sys.modules, name, None)  # afterwards it is as before
    del sys.modules[name]
    module, made = import_module(name), []
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: replica)
    api = SimpleNamespace(add_middleware=lambda *_args, **_options: None, state=SimpleNamespace(metrics=None))
    monkeypatch.setattr(module, "_export", lambda metrics: None)
    monkeypatch.setattr(module, "set_up", lambda form: None)
    monkeypatch.setattr(module, "make_app", lambda _load, options, **_more: made.append(options) or api)
    return module, made


@pytest.mark.parametrize("name", rows_of("ray"))
def test_an_argument_of_ray_leads_to_the_server(on_ray, name):
    module, made = on_ray
    value, _ = GIVEN[name]
    written = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    module._make_app(module.Args(device="cpu", normalize="auto", **{name: written}), "secret")
    assert made == [ServerOptions(token="secret", drain_seconds=60.0, defaults={"normalize": "auto"}, **{name: value})]


@pytest.mark.parametrize(
    "token, keys, only_loopback", [(None, None, True), ("x", None, False), (None, "k.toml", False)]
)
def test_on_ray_a_token_or_keys_let_other_machines_in(on_ray, monkeypatch, token, keys, only_loopback):
    module, added = on_ray[0], []
    api = SimpleNamespace(add_middleware=lambda kind, **_: added.append(kind), state=SimpleNamespace(metrics=None))
    monkeypatch.setattr(module, "make_app", lambda *_args, **_options: api)
    module._make_app(module.Args(device="cpu", keys_file=keys), token)
    assert (module._OnlyLoopback in added) == only_loopback


def test_ray_is_told_every_metric_with_its_labels(on_ray):
    class Gauge:
        def __init__(self, name: str, about: str, labels: tuple[str, ...]):
            self.labels, self.values = labels, {}

        def set(self, value: float, labels: dict[str, str]) -> None:
            assert tuple(labels) == self.labels
            self.values[tuple(labels.values())] = value

    app, gauges = make_app(lambda: None, model="demo"), {}
    told = {"protocol": "http", "route": "/v1/models", "key": "", "status": 200, "seconds": 0.1, "characters": 0}
    for _ in range(2):
        app.state.metrics.answered(told | {"reason": "busy"})
        on_ray[0]._tell(app.state.metrics, gauges, Gauge)
    assert gauges["qwen_megakernel_requests_total"].values == {("http", "/v1/models", "200", ""): 2}
    assert gauges["qwen_megakernel_request_duration_seconds_bucket"].values["http", "+Inf"] == 2
    assert gauges["qwen_megakernel_ready"].values == {(): 0} and not [name for name in gauges if "_created" in name]


def test_ray_takes_no_other_options_of_a_server(on_ray):
    module, _ = on_ray
    for name in GIVEN.keys() - rows_of("ray"):
        with pytest.raises(ValueError, match=name):
            module.Args(**{name: GIVEN[name][0]})
    for wrong in ({"min_replicas": 2, "max_replicas": 1}, {"replica": 1}):
        with pytest.raises(ValueError, match="replica"):
            module.Args(**wrong)


@pytest.mark.parametrize("name", ["", " x", "x\n", "x" * 257])
def test_a_served_name_that_no_client_can_send_is_refused(name):
    with pytest.raises(BackendError, match="a served name has 1 to 256 printable characters"):
        ServerOptions(served_names=(name,))
