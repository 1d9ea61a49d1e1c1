"""The world's faults, each against servers of its own: `make test-faults`. Who survives gets the bytes of the same
request made alone. At the end it prints the table that docs/reliability.md shows."""

import contextlib
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from callers import made_up
from serving import recording, same
from test_operating import write_certificate
from waiting import PATIENCE_S, until
from world import CALLERS, CLOCK, TEXTS, TOKEN, WAYS, Proxy, Server, callers, in_pieces, nginx, serving

from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.server.limits import Limits

pytestmark = pytest.mark.faults

ALL, LATER = "all get all their sound", "later requests are what they were"
BROKEN = "an answer is whole, an error, or its connection breaks"
HELD: dict[tuple[str, str], list[bool]] = {}
"""By fault and promise: did it hold, try by try?"""


@pytest.fixture(scope="module", autouse=True)
def report(request):
    yield
    lines = ["| fault | promise | held of tried |", "|---|---|---|"]
    lines += [f"| {fault} | {promise} | {sum(held)} of {len(held)} |" for (fault, promise), held in HELD.items()]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join(lines))


@pytest.fixture
def rng(fresh_seed) -> random.Random:
    return random.Random(fresh_seed)


def judge(fault: str, promise: str, held: list[bool]) -> None:
    HELD[fault, promise] = held
    assert held and all(held)


def test_stopped_and_continued(rng):
    with serving() as server, callers(server, rng) as told:
        server.stop(20)
        judge("the process stands still for 20 s", ALL, [one.result() for one in told])


def is_healthy(server: Server) -> bool:
    """To one who connects now."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/health", timeout=10, verify=not server.url.startswith("https")).is_success
    return False


@pytest.mark.parametrize("files, encrypted", [(None, False), (256, False), (256, True)])
def test_silent_connections(files, encrypted, rng, tmp_path):
    """Encrypted: they do not even agree on TLS."""
    fault = "600 silent connections" + " before TLS" * encrypted + (f", {files} files allowed" if files else "")
    limits, tls = (f"--nofile={files}:{files}",) if files else (), None
    if encrypted:
        write_certificate(tls := tmp_path, "localhost")
    with serving(limits=limits, tls=tls) as server, callers(server, rng) as told, contextlib.ExitStack() as stack:
        healthy = []
        for _ in range(60):
            server.hold(stack, 10, b"" if encrypted else b"POST /v1/audio/speech HTTP/1.1\r\n")
            healthy.append(is_healthy(server))
        judge(fault, "`/health` answers", healthy)
        judge(fault, ALL, [one.result() for one in told])


def test_storm(rng):
    """They connect and are gone again; half of them reset the connection."""
    fault = "a storm of 10,000 connections"
    reset = struct.pack("ii", 1, 0)
    with serving() as server, callers(server, rng) as told:
        for _ in range(10_000):
            with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as line:
                if rng.random() < 0.5:
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                line.sendall(rng.choice((b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\0" * 99)))
        judge(fault, "`/health` answers", [server.answers("/health")])
        judge(fault, ALL, [one.result() for one in told])
        judge(fault, LATER, server.again())


def test_cancels_and_callers_who_do_not_read(rng):
    fault = "100 callers hang up or do not read"
    with serving() as server, callers(server, rng) as told, contextlib.ExitStack() as stack:
        body = b'{"model": "demo", "voice": "ada", "response_format": "pcm", "input": "%s"}' % TEXTS[2].encode()
        head = b"POST /v1/audio/speech HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += b"authorization: Bearer %s\r\n" % TOKEN.encode()
        for _ in range(100):
            with contextlib.ExitStack() as short:
                server.hold(rng.choice((stack, short)), 1, head + b"content-length: %d\r\n\r\n" % len(body) + body)
                time.sleep(rng.uniform(0, 0.05))
        judge(fault, "the others get all their sound", [one.result() for one in told])
        stack.close()
        server.at_rest()
        judge(fault, LATER, server.again())


def test_callers_who_do_everything(rng):
    """Eight, at any pace, in an order that the seed repeats. The process stands still now and then."""
    fault = "8 callers do everything that callers do"
    with serving() as server:
        alone = {(way, asked): way(server, asked, rng) for way in set(WAYS[:5]) for asked in server.alone}
        scripts = [(rng.getrandbits(32), rng.choices(WAYS, k=25)) for _ in range(8)]
        held, over = [], threading.Event()

        def call(script) -> None:
            luck = random.Random(script[0])
            for way in script[1]:
                asked = luck.choice(list(server.alone))
                said = way(server, asked, luck)
                if said is not None:
                    equal = same if way is in_pieces else bytes.__eq__
                    held.append(equal(said, alone[way, asked]))

        def stop_now_and_then() -> None:
            while not over.wait(5):
                server.stop(1)

        with ThreadPoolExecutor(9) as pool:
            stopping = pool.submit(stop_now_and_then)
            try:
                for done in [pool.submit(call, script) for script in scripts]:
                    done.result()
            finally:
                over.set()
            stopping.result()
        judge(fault, "who listens to the end gets all the sound", held)
        server.at_rest()
        judge(fault, LATER, server.again())


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_clock(rng, tmp_path, seconds):
    (tmp_path / "off").write_text("0")
    (tmp_path / "sitecustomize.py").write_text(CLOCK.format(path=str(tmp_path / "off")))
    with serving(paths=(tmp_path,)) as server, callers(server, rng) as told:
        (tmp_path / "new").write_text(str(seconds))
        (tmp_path / "new").replace(tmp_path / "off")
        fault = f"the clock jumps an hour {'ahead' if seconds > 0 else 'back'}"
        judge(fault, ALL, [one.result() for one in told])
        judge(fault, LATER, server.again())


def test_disk_full(rng, tiny, tmp_path):
    """The log goes to a full device, and at last no file can grow beyond 1 KB."""
    fault = "the disk is full: the log, and recordings that become voices"
    folder, voices = tiny("base"), tmp_path / "voices"
    voices.mkdir()
    checkpoint = Checkpoint.open(folder)
    made_up(checkpoint.config, 0, checkpoint.fingerprint).save(voices / "ada.safetensors")
    options = ("--allow-upload", "--max-frames", "20", "--voices", str(voices), "--served-name", "demo")
    with serving(*options, model=folder, log="/dev/full") as server:
        with callers(server, rng) as told:
            limit(server, "--fsize=1024:1024")
            files = {"audio_sample": ("a.wav", recording(seconds=2.0), "audio/wav")}
            fields = {"name": "new", "consent": "yes", "ref_text": "some text"}
            answers = [server.client.post("/v1/audio/voices", data=fields, files=files) for _ in range(2)]
            judge(fault, ALL, [one.result() for one in told])
        told = [answer.status_code >= 500 and bool(answer.json()["error"]["message"]) for answer in answers]
        judge(fault, "who sends a recording gets an error", told)
        judge(fault, "no half voice stays", [os.listdir(voices) == ["ada.safetensors"]])
        judge(fault, LATER, server.again())


def test_folders_deleted(rng, tmp_path):
    fault = "the folders of the model and of the voices are deleted"
    model, voices = tmp_path / "model", tmp_path / "voices"
    shutil.copytree(Checkpoint.open("demo").folder, model)
    voices.mkdir()
    with serving("--voices", str(voices), "--served-name", "demo", model=model) as server, callers(server, rng) as told:
        for folder in (model, voices):
            shutil.rmtree(folder)
        judge(fault, ALL, [one.result() for one in told])
        judge(fault, LATER, server.again())


def test_files_written_over(rng, tiny, tmp_path):
    """As `cp` does it, which leaves a file where it is. The new voice is none, so the former one stays."""
    fault = "the files of the model and of the voices are written over"
    model, voices = tmp_path / "model", tmp_path / "voices"
    shutil.copytree(tiny("base"), model)
    voices.mkdir()
    checkpoint = Checkpoint.open(model)
    made_up(checkpoint.config, 0, checkpoint.fingerprint).save(voices / "ada.safetensors")
    options = ("--max-frames", "40", "--voices", str(voices), "--served-name", "demo")
    with serving(*options, model=model) as server, callers(server, rng) as told:
        for path in tmp_path.rglob("*.safetensors"):
            path.write_bytes(b"something else")
        judge(fault, ALL, [one.result() for one in told])
        judge(fault, LATER, server.again())


def test_memory(rng):
    """What is mapped already stays, and nothing more can be."""
    fault = "the process gets no more memory"
    with serving() as server:
        with callers(server, rng, server.whole_or_broken) as told:
            with open(f"/proc/{server.process.pid}/statm") as file:
                most = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            limit(server, f"--as={most}:")
            more = [server.whole_or_broken((TEXTS[0], 0)) for _ in range(8)]
            judge(fault, BROKEN, [*more, *(one.result() for one in told)])
        limit(server, "--as=unlimited:")
        judge(fault, LATER, server.again())


def limit(server: Server, what: str) -> None:
    subprocess.run(["prlimit", "--pid", str(server.process.pid), what], check=True)


def test_a_proxy_stalls(rng):
    """For half as long as the server waits for a head, which the proxy may hold."""
    seconds = Limits().header_s / 2
    with serving() as server, contextlib.closing(Proxy(server.port)) as proxy:
        with callers(server, rng, lambda asked: server.same(asked, proxy.url)) as told:
            proxy.stalled.set()
            time.sleep(seconds)
            proxy.stalled.clear()
            judge(f"a proxy passes nothing on for {seconds:g} s", ALL, [one.result() for one in told])


def test_a_half_closed_proxy(rng):
    fault = "a proxy loses its clients and tells the server nothing"
    with serving() as server, contextlib.closing(Proxy(server.port)) as proxy:
        with (
            callers(server, rng, lambda asked: server.whole_or_broken(asked, proxy.url)) as told,
            callers(server, rng) as others,
        ):
            proxy.lose_clients()
            judge(fault, "the others get all their sound", [one.result() for one in others])
            proxy.close()
            assert all(one.result() for one in told)
        server.at_rest()
        judge(fault, LATER, server.again())


def test_sigterm(rng):
    with serving("--grace-seconds", "2") as server, callers(server, rng) as told:
        until(lambda: sum(one.running() for one in told) == CALLERS)
        running = [one for one in told if one.running()]
        server.process.send_signal(signal.SIGTERM)
        judge("SIGTERM", "who is spoken to gets all the sound", [one.result() for one in running])


def fronts_of(server: Server) -> list[int]:
    with open(f"/proc/{server.process.pid}/task/{server.process.pid}/children") as file:
        return [int(child) for child in file.read().split()]


def test_a_front_is_killed(rng):
    fault = "a front process is killed"
    with serving("--front-processes", "2") as server:
        with callers(server, rng, server.whole_or_broken) as told:
            os.kill(fronts_of(server)[-1], signal.SIGKILL)
            judge(fault, BROKEN, [one.result() for one in told])
        until(lambda: server.answers("/ready"))
        judge(fault, LATER, server.again())


def test_a_front_stands_still(rng):
    """Whoever the system gives to it waits meanwhile."""
    fault = "a front process stands still for 10 s"
    with serving("--front-processes", "2") as server, callers(server, rng) as told:
        front = fronts_of(server)[-1]
        os.kill(front, signal.SIGSTOP)
        time.sleep(10)
        os.kill(front, signal.SIGCONT)
        judge(fault, ALL, [one.result() for one in told])
        judge(fault, LATER, server.again())


@pytest.fixture
def two_behind_nginx(tmp_path):
    """Two servers and nginx's URL. Whoever restarts keeps its port. Each would measure how many threads of the CPU it
    needs, and other numbers of threads make other last bits of the samples. The grace is that of the example: nginx
    asks a server again up to 6 s after it has refused, so the other one must take requests for longer."""
    if not shutil.which("nginx"):
        pytest.skip("needs nginx")
    options = ("--grace-seconds", "15", "--drain-seconds", "300", "--threads", "1")
    with serving(*options) as one, serving(*options, alone=one.alone) as other:
        with nginx(tmp_path, [one.port, other.port]) as url:
            yield [one, other], url


def test_a_rolling_restart_behind_nginx(two_behind_nginx, rng):
    servers, url = two_behind_nginx
    over, held = threading.Event(), []

    def call(seed: int) -> None:
        luck = random.Random(seed)
        while not over.is_set():
            held.append(servers[0].same(luck.choice(list(servers[0].alone)), url))

    with ThreadPoolExecutor(CALLERS) as pool:
        calling = [pool.submit(call, rng.getrandbits(32)) for _ in range(CALLERS)]
        try:
            for server in servers:
                server.process.send_signal(signal.SIGTERM)
                server.process.wait(PATIENCE_S)
                server.start()
        finally:
            over.set()
        for one in calling:
            one.result()
    judge("a rolling restart of two servers behind nginx", "nobody is refused or cut", held)


def test_a_replica_behind_nginx_is_killed(two_behind_nginx, rng):
    fault = "one of two servers behind nginx is killed"
    (one, other), url = two_behind_nginx
    with callers(one, rng, lambda asked: one.whole_or_broken(asked, url)) as told:
        other.process.kill()
        judge(fault, BROKEN, [each.result() for each in told])
    judge(fault, LATER, one.again(url))
