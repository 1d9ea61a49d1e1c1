"""The conversations of examples/evals, held with the minimal bot as `pipecat eval run` holds them."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pipelines import until
from test_pipecat_transports import free_port

pytest.importorskip("pipecat.evals.session", reason="this Pipecat has no evals")
pytest.importorskip("uvicorn")
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_the_minimal_bot_passes(monkeypatch):
    from pipecat.evals.scenario import EvalScenarioFile
    from pipecat.evals.session import EvalSession

    monkeypatch.syspath_prepend(EXAMPLES / "evals")  # of `ears`
    port = free_port()
    command = [sys.executable, "minimal_bot.py", "--host", "127.0.0.1", "--port", str(port)]
    scenarios = EvalScenarioFile.load(EXAMPLES / "evals" / "talks.yaml").scenarios

    def answers() -> bool:
        assert bot.poll() is None, "the bot has ended"
        with socket.socket() as line:
            return line.connect_ex(("127.0.0.1", port)) == 0

    async def hold() -> list:
        await until(answers)
        return [await EvalSession.from_scenario(one, f"ws://127.0.0.1:{port}/ws").run() for one in scenarios]

    bot = subprocess.Popen(command, cwd=EXAMPLES, stdout=subprocess.DEVNULL)
    try:
        results = asyncio.run(hold())
    finally:
        bot.terminate()
        bot.wait(timeout=60)
    assert len(results) == 2
    assert all(result.passed for result in results), [result.failures for result in results]
