"""What a client with a token can do to the server over its WebSockets: nothing that others notice."""

import json
import random
import time
from os import environ

import pytest
from attacks import TOKEN, frame, is_closed, send_all, target
from waiting import until

pytestmark = pytest.mark.attacks
PATHS = ("/v1/audio/speech/socket", "/v1/audio/speech/stream")
LIMITS = {"header_s": 2.0, "idle_s": 5.0, "text_s": 6.0}
_MOST = 20 << 20
_SECONDS = float(environ.get("ATTACK_SECONDS", "4"))
"""Of the fuzzer."""


FLOODS = {
    "empty frames of a message": (frame(1, b"{", end=False), frame(0, end=False)),
    "pings": (b"", frame(9)),
    "full pings": (b"", frame(9, b"a" * 125)),
    "pongs": (b"", frame(10, b"a")),
    "empty messages": (b"", frame(1)),
    "binary messages": (b"", frame(2)),
    "our own pings": (b"", frame(1, b'{"type":"ping"}')),
    "messages without a context": (b"", frame(1, b'{"type":"end","context":"a"}')),
    "messages that wait": (
        frame(1, b'{"type":"text","context":"a","text":"Hello ","turn":"t"}')
        + frame(1, b'{"type":"text","context":"b","text":"Hello ","turn":"t"}'),
        frame(1, json.dumps({"type": "text", "context": "b", "text": "", "x": "a" * 60_000}).encode()),
    ),
    "voices that are asked for": (b"", frame(1, b'{"type":"voice.list"}')),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("begin, more", FLOODS.values(), ids=FLOODS)
def test_a_flood_that_is_never_read_goes_nowhere(attacked, path, begin, more):
    line = attacked.server.raw_socket(path)

    def attack() -> None:
        line.sendall(begin)
        send_all(line, more * max(1, 65536 // len(more)), _MOST, seconds=1.0)

    attacked.attack(attack)
    until(lambda: is_closed(line))


BROKEN = {
    "no UTF-8": frame(1, b"\xff"),
    "no frame": b"\xff\xff\xff",
    "an unknown frame": frame(3),
    "a continuation of nothing": frame(0, b"a"),
    "half a closing code": frame(8, b"\x01"),
    "a frame without a mask": b"\x81\x01a",
    "a frame of exabytes": b"\x81\xff" + b"\x7f" * 12,
    "no JSON": frame(1, b"{"),
    "deep JSON": frame(1, b"[" * 60_000),
    "many values": frame(1, b"[%s]" % b",".join([b"0"] * 30_000)),
    "binary": frame(2, b"a"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("first", BROKEN.values(), ids=BROKEN)
def test_a_bad_first_frame_is_one_line_in_the_log_at_most(attacked, path, first):
    before = attacked.server.log().count("\n")
    lines = [attacked.server.raw_socket(path), attacked.server.raw_socket(path)]
    lines[0].sendall(first)
    lines[1].sendall(first[: len(first) // 2])
    time.sleep(0.01)
    lines[1].sendall(first[len(first) // 2 :])
    until(lambda: all(map(is_closed, lines)))
    assert attacked.server.log().count("\n") <= before + len(lines)


def test_an_hour_of_pauses_is_left_out(attacked):
    def attack() -> None:
        with attacked.server.speaker() as line:
            text = "Hello." + "[pause 10s]" * 368 + "You."
            line.send(json.dumps({"type": "text", "context": "a", "text": text, "end": True, "words": True}))
            sizes, end = [], False
            while not end:
                message = line.recv()
                if isinstance(message, bytes):
                    sizes.append(len(message))
                else:
                    assert '"error"' not in message
                    end = json.loads(message)["type"] == "end"
        assert 60 < json.loads(message)["seconds"] < 75 and max(sizes) <= 4 + 2 * 2 * 24_000

    attacked.attack(attack)


def test_who_asks_for_speech_and_does_not_read_it_costs_others_nothing(attacked):
    """Two of four slots; more would make the listener wait in the queue, as any other caller may."""
    line = attacked.server.raw_socket()

    def attack() -> None:
        for name in "ab":
            asked = {"type": "text", "context": name, "text": "Hello there. " * 300, "end": True}
            line.sendall(frame(1, json.dumps(asked).encode()))
        time.sleep(LIMITS["idle_s"] + 1)  # the attack is that nobody reads for so long

    attacked.attack(attack)


# ---------------------------------------------------------------- a fuzzer

_WORDS = [
    *(b"GET / HTTP/1.1\r\n", b"POST /v1/audio/speech HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\n", b"\r\n", b"HTTP/1.1"),
    *(b"CONNECT a:1 HTTP/1.1\r\n", b"OPTIONS * HTTP/1.1\r\n", b"GET http://[ HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\n"),
    *(b"GET /v1/audio/speech/socket HTTP/1.1\r\n", b"Authorization: Bearer " + TOKEN.encode() + b"\r\n", b"\x00\xff"),
    *(b"Connection: Upgrade\r\n", b"Upgrade: websocket\r\n", b"Upgrade: h2c\r\n", b"Sec-WebSocket-Version: 13\r\n"),
    *(b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n", b"Host: localhost\r\n", b"Connection: close\r\n", b"SM\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"5\r\nabcde\r\n", b"0\r\n\r\n", b"Content-Length: 5\r\n"),
    b"Expect: 100-continue\r\n",
]
_VALUES = [None, True, 0, -1, 1e308, "", "a", "\ud800", "ada", "demo", "Hello.", [], {}, [[]], {"id": 1}, "x" * 300]
_FIELDS = ["type", "context", "text", "end", "words", "turn", "voice", "seed", "model", "input", "inputs", "speed"]
_FIELDS += ["response_format", "stream_format", "name", "audio", "language", "normalize", "trim", "max_frames"]
_TYPES = ["text", "flush", "end", "cancel", "ping", "session.config", "input.text", "input.done", "voice.add"]


def _message(draw: random.Random) -> bytes:
    told = {draw.choice(_FIELDS): draw.choice(_VALUES) for _ in range(draw.randrange(6))}
    if draw.random() < 0.8:
        told |= {"type": draw.choice(_TYPES), "context": draw.choice(["a", "b"])}
    text = json.dumps(told).encode()
    return text if draw.random() < 0.8 else text[: draw.randrange(len(text) + 1)]


def _frames(draw: random.Random) -> bytes:
    kinds = (0, 1, 1, 1, 1, 2, 3, 8, 9, 10)
    made = [frame(draw.choice(kinds), _message(draw), end=draw.random() < 0.8) for _ in range(draw.randrange(1, 6))]
    return b"".join(made) if draw.random() < 0.9 else draw.randbytes(draw.randrange(1, 40))


def test_nothing_random_is_an_error_of_ours(attacked, fresh_seed):
    """`REPEAT_SEED` repeats it, and ATTACK_SECONDS is how long it takes."""
    draw, server = random.Random(fresh_seed), attacked.server

    def attack() -> None:
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            kind = draw.randrange(3)
            if kind == 0:
                with server.line() as line:
                    send_all(line, b"".join(draw.choices(_WORDS, k=draw.randrange(1, 12))), 1)
            elif kind == 1:
                with server.raw_socket(draw.choice(PATHS)) as line:
                    send_all(line, _frames(draw), 1)
                    time.sleep(0.005)
            else:
                body = _message(draw)
                path = draw.choice(["/v1/audio/speech", "/v1/audio/speech/batch", "/v1/voices", "/v1/voices/a"])
                status, _ = server.ask(path, draw.choice(["POST", "PUT", "GET"]), body, token=True)
                assert status < 500 or status == 503

    attacked.attack(attack)


def test_a_stop_in_the_middle_of_all_this_is_clean(tmp_path):
    """`target` looks at how it ends."""
    with target(tmp_path, **LIMITS) as server:
        lines = []
        for begin, more in FLOODS.values():
            line = server.raw_socket()
            line.sendall(begin)
            send_all(line, more * max(1, 65536 // len(more)), 1 << 20, seconds=0.2)
            lines.append(line)
        for first in BROKEN.values():
            lines.append(server.raw_socket())
            lines[-1].sendall(first)
        assert server.ask("/health")[0] == 200  # behind what was sent before
