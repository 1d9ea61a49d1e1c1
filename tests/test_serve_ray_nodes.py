"""Three Ray nodes on this machine, as if on three: examples/ray/cluster.yaml, a proxy on each, replicas on the CPU. One
node is killed under load, then another comes."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from measure_replicas import ENVIRONMENT
from serving import PATIENCE_S, until
from test_serve_ray import OPTIONS, TEXT, Long, check_sockets, engine, long_pcm, post, said  # noqa: F401 (engine)
from websockets.sync.client import connect

pytestmark = pytest.mark.ray
ENDLESS = " ".join([TEXT] * 120)  # takes most of a minute to make
ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


class Node:
    """One `ray start` and every process that comes of it. `url`: of its proxy."""

    def __init__(self, environment: dict[str, str], folder: str, *options: str, port: int):
        self.url, self.log = f"http://127.0.0.1:{port}", Path(folder, f"{port}.log")
        common = ["--block", "--object-store-memory", "100000000", "--dashboard-agent-listen-port", "0"]
        common += ["--min-worker-port", "0", "--max-worker-port", "0"]  # 0: free ones; nodes share this machine's ports
        command = [str(BIN / "ray"), "start", *common, *options]
        with self.log.open("w") as log:
            own_port = {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(port)}
            self.process = subprocess.Popen(command, env=environment | own_port, stdout=log, stderr=log)
        # One after the other: of two that start at once one may wait for the other's raylet.
        until(lambda: "Ray runtime started" in self.log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            whole = psutil.Process(self.process.pid)
            for process in [whole, *whole.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Cluster:
    """`head` has a proxy and no replica; its proxy draws between those of `workers`, each with room for one."""

    def __init__(self, folder: str):
        self.gcs, client, dashboard, self.port = free_ports(4)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = os.environ | ENVIRONMENT | token | {"PYTHONPATH": str(ROOT)}
        self.environment.pop("QWEN_MEGAKERNEL_TOKEN", None)
        ports = ["--port", str(self.gcs), "--ray-client-server-port", str(client), "--dashboard-port", str(dashboard)]
        ports += ["--temp-dir", folder, "--include-dashboard", "false"]
        self.folder, self.workers = folder, []
        self.head = Node(self.environment, folder, "--head", "--num-cpus", "0", *ports, port=self.port)

    def add(self) -> Node:
        (port,) = free_ports(1)
        address = ["--address", f"127.0.0.1:{self.gcs}", "--num-cpus", "1"]
        self.workers.append(Node(self.environment, self.folder, *address, port=port))
        return self.workers[-1]

    def deploy(self) -> None:
        config = yaml.safe_load((ROOT / "examples/ray/cluster.yaml").read_text())
        config["http_options"] |= {"host": "127.0.0.1", "port": self.port}
        (speech,) = config["applications"]
        speech["args"] |= OPTIONS | {"model": "demo", "max_streams": 16, "min_replicas": 2, "max_replicas": 2}
        del speech["deployments"]  # of GPUs' load
        path = Path(self.folder, "cluster.yaml")
        path.write_text(yaml.safe_dump(config))
        command = [str(BIN / "serve"), "run", str(path), "--address", f"127.0.0.1:{self.gcs}", "--non-blocking"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert not done.returncode, done.stderr


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # sockets need a short path
        cluster = Cluster(folder)
        try:
            cluster.add(), cluster.add()
            cluster.deploy()
            until(lambda: replica_of(cluster.head) and len({*map(replica_of, cluster.workers)} - {None}) == 2)
            yield cluster
        finally:
            for node in (*cluster.workers, cluster.head):
                node.kill()


def healthy(node: Node) -> bool:
    """What a load balancer asks."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{node.url}/-/healthz", timeout=PATIENCE_S).status_code == 200
    return False


def replica_of(node: Node) -> str | None:
    """Which replica a call through this node's proxy gets; None if it gets none."""
    with contextlib.suppress(httpx.TransportError):
        answer = post(1, "Hello.", url=node.url, again=(429,))
        return answer.headers["X-Replica"] if answer.status_code == 200 else None


def test_each_node_s_proxy_serves_and_prefers_its_own_replica(cluster, engine):  # noqa: F811
    reached = set()
    until(lambda: reached.add(replica_of(cluster.head)) or len(reached - {None}) == 2)  # drawn: it has none of its own
    until(lambda: {replica_of(node) for node in cluster.workers} == reached - {None})
    for node in cluster.workers:
        own = replica_of(node)
        with ThreadPoolExecutor(4) as pool:
            told = list(pool.map(lambda seed, node=node: post(seed, url=node.url), range(4)))
        assert [answer.content for answer in told] == [said(engine, seed) for seed in range(4)]
        assert {answer.headers["X-Replica"] for answer in told} == {own}


def test_a_killed_node_fails_its_own_calls_only_and_a_new_one_takes_its_place(cluster, engine):  # noqa: F811
    head, kept, lost = cluster.head, *cluster.workers
    victim, survivor = replica_of(lost), replica_of(kept)
    with contextlib.ExitStack() as opened:
        lines = []
        while {line.response.headers["X-Replica"] for line in lines} != {victim, survivor}:  # the router draws
            url = head.url.replace("http", "ws") + "/v1/audio/speech/socket"
            lines.append(opened.enter_context(connect(url, open_timeout=PATIENCE_S)))
            assert json.loads(lines[-1].recv(timeout=PATIENCE_S))["type"] == "hello"
        through = Long(1, lost.url, ENDLESS)
        while (routed := Long(2, head.url, ENDLESS)).replica != victim:
            routed.leave()
        whole = Long(0, kept.url)
        assert whole.replica == survivor and whole.going_on and routed.going_on and through.going_on
        lost.kill()
        check_sockets(lines, victim)  # before the calls end: that may take longer than a socket may be silent
        for call in (routed, through):
            call.join()
            assert isinstance(call.error, httpx.TransportError)  # its last chunk is missing, or the connection is
        whole.join()
        assert whole.error is None and whole.pcm == long_pcm(engine, whole.seed)
    assert replica_of(kept) == survivor and [healthy(node) for node in (head, kept, lost)] == [True, True, False]
    until(lambda: replica_of(head) == survivor)

    fresh = cluster.add()
    until(lambda: replica_of(fresh) not in (None, victim, survivor))
    assert post(1, url=fresh.url).content == said(engine, 1)
