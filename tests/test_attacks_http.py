"""What a client without a token, and one with it, can do to the server over HTTP: nothing that others notice."""

import json

import pytest
from attacks import TOKEN, is_closed, send_all, target
from waiting import until

from qwen_megakernel.server.openai.bodies import BATCH, SPEECH, VOICES

pytestmark = pytest.mark.attacks
LIMITS = {"header_s": 2.0, "idle_s": 5.0, "connections": 64}
_MOST = 40 << 20  # bytes of one attack: enough for memory to show it
_UPGRADE = (
    b"GET /v1/audio/speech/socket HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
)
_CHUNKED = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
_BEARING = b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"


HANDSHAKES = {
    "a body": b"Content-Length: 5\r\n\r\nabcde",
    "a body that never comes": b"Content-Length: 5\r\n\r\n",
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n",
    "many headers": b"X: 1\r\n" * 90 + b"Y: 1\r\n" * 60 + b"\r\n",
    "a long header": b"X: " + b"a" * 9000 + b"\r\n\r\n",
    "a header that is none": b"X: \x7f\r\n\r\n",
    "no token": b"\r\n",
    "no end": b"",
}


@pytest.mark.parametrize("rest", HANDSHAKES.values(), ids=HANDSHAKES)
def test_a_handshake_that_cannot_be_is_answered_and_its_connection_closed(attacked, rest):
    line = attacked.server.line()
    line.sendall(_UPGRADE + rest)
    answer = line.recv(4096)
    assert answer.split(b" ")[1] in (b"400", b"401", b"408", b"431")
    until(lambda: is_closed(line))


def test_520_broken_handshakes_take_no_place(attacked):
    lines = [attacked.server.line() for _ in range(520)]

    def attack() -> None:
        for line in lines:
            send_all(line, _UPGRADE + HANDSHAKES["many headers"], 1)

    attacked.attack(attack)
    until(lambda: all(map(is_closed, lines)))


ENDLESS = {
    "a header": (b"GET / HTTP/1.1\r\nX: ", b"a" * 65536),
    "a URL": (b"GET /", b"a" * 65536),
    "headers": (b"GET / HTTP/1.1\r\n", b"X: a\r\n" * 10_000),
    "a trailer": (_CHUNKED + b"\r\n1\r\na\r\n0\r\nX: ", b"a" * 65536),
    "trailers": (_CHUNKED + b"\r\n1\r\na\r\n0\r\n", b"X: a\r\n" * 10_000),
    "a chunk's extension": (_CHUNKED + b"\r\n1;", b"a" * 65536),
    "a body without a token": (_CHUNKED + b"\r\n", b"10000\r\n" + b"a" * 65536 + b"\r\n"),
    "a body with a token": (_CHUNKED + _BEARING + b"\r\n", b"10000\r\n" + b"a" * 65536 + b"\r\n"),
    "requests at once": (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000),
    "refused requests at once": (b"", b"GET /v1/voices HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000),
    "bytes that are no HTTP": (b"", b"\x00" * 65536),
}


@pytest.mark.parametrize("begin, more", ENDLESS.values(), ids=ENDLESS)
def test_what_never_ends_is_cut_off(attacked, begin, more):
    line = attacked.server.line()

    def attack() -> None:
        line.sendall(begin)
        send_all(line, more, _MOST)

    attacked.attack(attack)
    until(lambda: is_closed(line))


SILENT = {
    "nothing": b"",
    "half a head": b"GET / HT",
    "half a handshake": _UPGRADE,
    "no body for what needs none": b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
    "no body": b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
    "no body with a token": b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    + _BEARING
    + b"\r\n",
}


@pytest.mark.parametrize("said", SILENT.values(), ids=SILENT)
def test_silent_connections_leave_room_for_health_and_mostly_for_others(attacked, said):
    server, lines = attacked.server, []

    def attack() -> None:
        for _ in range(3 * LIMITS["connections"]):
            line = server.line()
            line.sendall(said)
            lines.append(line)
        for _ in range(3):
            assert server.ask("/health")[0] == server.ask("/ready")[0] == 200
        if said != SILENT["no body with a token"]:
            assert server.ask("/v1/models", token=True)[0] == 200

    attacked.attack(attack)
    until(lambda: all(map(is_closed, lines)))
    assert server.ask("/v1/models", token=True)[0] == 200


def test_who_does_not_read_is_dropped(attacked):
    body = json.dumps({"model": "demo", "input": "Hello there. " * 300, "response_format": "wav"}).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n"
    asked = head % (SPEECH.encode(), len(body), _BEARING) + body
    line = attacked.server.line()

    def attack() -> None:
        line.sendall(asked)
        send_all(line, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100, 1 << 20, seconds=1.0)

    attacked.attack(attack)
    until(lambda: is_closed(line))


@pytest.mark.parametrize("response_format", ["pcm", "mp3", "flac"])
def test_pauses_of_an_hour_are_refused(attacked, response_format):
    text = "Hello." + "[pause 10s]" * 371 + "Good bye."
    body = json.dumps({"model": "demo", "input": text[:4096], "response_format": response_format}).encode()

    def attack() -> None:
        for _ in range(6):
            status, answer = attacked.server.ask(SPEECH, "POST", body, token=True)
            assert status == 400 and b"over 60 seconds longer than the speech before them" in answer

    attacked.attack(attack)


def test_a_minute_of_pauses_costs_others_nothing(attacked):
    text = "Hello. " + "[pause 10s]" * 6 + " Good bye."
    body = {"model": "demo", "voice": "ada", "input": text, "response_format": "mp3"}

    def attack() -> None:
        status, answer = attacked.server.ask(SPEECH, "POST", json.dumps(body).encode(), token=True)
        assert status == 200 and len(answer) > 60 * 96_000 / 8 * 0.9

    attacked.attack(attack)


BODIES = {
    "900,000 fields of a voice": (VOICES, lambda: b"{%s}" % b",".join(b'"%d":0' % n for n in range(900_000))),
    "a name of many fields": (VOICES, lambda: b'{"name":{%s}}' % b",".join(b'"%d":0' % n for n in range(900_000))),
    "100 fields of a voice": (VOICES, lambda: b"{%s}" % b",".join(b'"%d":0' % n for n in range(101))),
    "fields of a request": (SPEECH, lambda: b"{%s}" % b",".join(b'"%d":0' % n for n in range(7000))),
    "a voice of many fields": (SPEECH, lambda: b'{"voice":{%s}}' % b",".join(b'"%d":0' % n for n in range(7000))),
    "zeros for texts": (BATCH, lambda: b'{"model":"demo","inputs":[%s]}' % b",".join([b"0"] * 128_000)),
    "some zeros for texts": (BATCH, lambda: b'{"model":"demo","inputs":[%s]}' % b",".join([b"0"] * 1001)),
    "objects for texts": (BATCH, lambda: b'{"model":"demo","inputs":[%s]}' % b",".join([b"{}"] * 80_000)),
    "brackets": (BATCH, lambda: b"[" * 260_000),
}


@pytest.mark.parametrize("path, body", BODIES.values(), ids=BODIES)
def test_a_body_with_a_thousand_mistakes_has_one_error(attacked, path, body):
    content = body()

    def attack() -> None:
        status, answer = attacked.server.ask(path, "POST", content, token=True)
        assert status == 400 and len(answer) < 1000

    attacked.attack(attack)


def test_a_stop_in_the_middle_of_all_this_is_clean(tmp_path):
    """`target` looks at how it ends."""
    with target(tmp_path, **LIMITS) as server:
        lines = []
        for said in (*SILENT.values(), *(_UPGRADE + rest for rest in HANDSHAKES.values())):
            line = server.line()
            line.sendall(said)
            lines.append(line)
        for begin, more in ENDLESS.values():
            line = server.line()
            line.sendall(begin)
            send_all(line, more, 1 << 20, seconds=0.2)
            lines.append(line)
        assert server.ask("/health")[0] == 200  # behind what was sent before
