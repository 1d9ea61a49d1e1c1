"""The conversations of examples/evals, held with bots as `pipecat eval` holds them."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from waiting import free_port, until_in_loop

pytest.importorskip("pipecat.evals.session", reason="this Pipecat has no evals")
pytest.importorskip("uvicorn")
from pipecat.evals.scenario import EvalScenarioFile
from pipecat.evals.session import EvalSession
from pipecat.evals.suite import EvalManifest
from serving import get, ready, small_demo

ROOT = Path(__file__).parents[1]
TALKS = ROOT / "examples" / "evals" / "talks.yaml"
PACKAGE = ROOT / "integrations" / "pipecat"  # pipecat-qwen-megakernel
RUNS = EvalManifest.load(PACKAGE / "evals" / "suite.yaml").runs
TITLES = ["talks/counts", "talks/interrupted"]


@pytest.fixture(autouse=True)
def ears(monkeypatch):
    monkeypatch.syspath_prepend(TALKS.parent)


async def passes(bot: Path, scenarios: Iterable, **environment: str) -> None:
    port = free_port()
    command = [sys.executable, str(bot), "--host", "127.0.0.1", "--port", str(port)]
    paths = os.pathsep.join([str(PACKAGE), str(ROOT)])

    def answers() -> bool:
        assert process.poll() is None, "the bot has ended"
        with socket.socket() as line:
            return line.connect_ex(("127.0.0.1", port)) == 0

    environment = os.environ | {"PYTHONPATH": paths} | environment
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        await until_in_loop(answers)
        results = [await EvalSession.from_scenario(one, f"ws://127.0.0.1:{port}/ws").run() for one in scenarios]
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert [result.scenario_name for result in results] == TITLES
    assert all(result.passed for result in results), [result.failures for result in results]


@pytest.mark.slow
async def test_the_minimal_bot_passes():
    await passes(ROOT / "examples" / "minimal_bot.py", EvalScenarioFile.load(TALKS).scenarios)


def test_the_suite_of_pipecats_package_holds_the_same_conversations():
    assert [(run.scenario, run.scenario_path) for run in RUNS] == [(title, TALKS) for title in TITLES]
    assert {run.bot_path for run in RUNS} == {PACKAGE / "examples" / "voice_bot.py"}


@pytest.mark.slow
async def test_the_bot_of_pipecats_package_passes():
    await passes(RUNS[0].bot_path, [run.load() for run in RUNS])


@pytest.mark.slow
async def test_the_bot_of_pipecats_package_passes_with_a_server():
    with ready(small_demo) as server:
        await passes(RUNS[0].bot_path, [run.load() for run in RUNS], QWEN_MEGAKERNEL_URL=server.socket_url)
        spoken = re.search(r"^qwen_megakernel_audio_seconds_total{.*} (.*)", get(server.url + "/metrics").text, re.M)
    assert float(spoken[1]) > 2, "the server spoke, not the bot itself"
