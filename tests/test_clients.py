"""Others' clients, as they are published, against the server: run with `make test-clients`."""

import asyncio
import gc
import importlib.util
import re
from contextlib import aclosing
from pathlib import Path

import pytest
from serving import PATIENCE_S, TEXT, Running, cloning, ready, recording, until

from qwen_megakernel import TTSEngine

pytest.importorskip("livekit.agents", reason="make test-clients installs it")
baseten = pytest.importorskip("livekit.plugins.baseten", reason="make test-clients installs it")
lk_openai = pytest.importorskip("livekit.plugins.openai", reason="make test-clients installs it")

import aiohttp  # noqa: E402
from livekit.agents import Agent, AgentSession, APIConnectOptions, APIError  # noqa: E402
from livekit.agents.utils import http_context  # noqa: E402
from livekit.agents.voice.io import AudioOutput, AudioOutputCapabilities  # noqa: E402
from livekit.plugins.baseten import qwen3_tts  # noqa: E402

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # theirs: they leave sockets open
]

ONCE = APIConnectOptions(max_retry=0, timeout=PATIENCE_S)
EXAMPLE = Path(__file__).parents[1] / "examples" / "livekit_agent.py"


@pytest.fixture(scope="module", autouse=True)
def their_sockets_are_collected_here():
    """And not before the next file's first test, which is not told to ignore them."""
    yield
    gc.collect()


def demo() -> TTSEngine:
    return TTSEngine.load("demo", device="cpu", max_streams=4, max_positions=256)


@pytest.fixture(scope="module")
def server():
    with ready(demo, token="secret", voice_aliases={"ash": "ada"}) as server:  # LiveKit's default voice
        yield server


def run(call) -> None:
    """Run `call(http)` with LiveKit's HTTP session, within our patience."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as http:
            await call(http)

    asyncio.run(main())


def voice(server: Running, http: aiohttp.ClientSession, **options) -> baseten.TTS:
    options = {"task_type": "CustomVoice", "voice": "ada"} | options
    return baseten.TTS(
        model="qwen3-tts", model_endpoint=server.stream_url, api_key="secret", http_session=http, **options
    )


async def turn(tts: baseten.TTS, text: str = TEXT) -> tuple[float, list[str]]:
    """Say a text word by word. Returns seconds of audio, and the words that came with times."""
    stream, seconds, words = tts.stream(conn_options=ONCE), 0.0, []
    for word in text.split():
        stream.push_text(f"{word} ")
    stream.end_input()
    async with stream:
        async for event in stream:
            seconds += event.frame.duration
            words += event.frame.userdata.get("lk.timed_transcripts", [])
    assert all(0 <= word.start_time <= word.end_time <= seconds + 0.01 for word in words)
    return seconds, [str(word).strip() for word in words]


def test_livekits_qwen3_client_speaks_two_turns_on_one_socket(server):
    async def call(http) -> None:
        tts = voice(server, http, word_timestamps=True)
        sockets = set()
        for _ in range(2):
            seconds, words = await turn(tts)
            assert seconds > 1 and words == TEXT.split()
            sockets.add(tts._qwen3._warm.ws)
        assert len(sockets) == 1
        assert await tts._qwen3._empty_flush(tts._qwen3._warm.ws)  # its keep-alive
        frame = await tts.synthesize(TEXT, conn_options=ONCE).collect()
        assert frame.sample_rate == 24000 and frame.duration > 1
        tts.update_options(voice="max")
        assert (await turn(tts))[0] > 1
        await tts.aclose()

    run(call)


def test_what_the_guide_shows_speaks(server):
    guide = (EXAMPLE.parents[1] / "docs" / "livekit.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.S)
    for told, here in (("ws://127.0.0.1:8000/v1/audio/speech/stream", server.stream_url), ("none", "secret")):
        assert f'"{told}"' in block
        block = block.replace(f'"{told}"', f'"{here}"')
    names: dict = {}

    async def call(_http) -> None:
        async with http_context.open():
            exec(block.replace('"vivian"', '"ada"'), names)
            async with aclosing(names["tts"]) as tts:
                assert (await turn(tts))[0] > 1

    run(call)


def test_livekits_qwen3_client_interrupts(server):
    async def call(http) -> None:
        tts = voice(server, http)
        stream = tts.stream(conn_options=ONCE)
        stream.push_text(" ".join([TEXT] * 6))
        stream.flush()
        await anext(stream)
        await stream.aclose()
        await asyncio.to_thread(server.at_rest)
        assert (await turn(tts))[0] > 1
        await tts.aclose()

    run(call)


def test_livekits_qwen3_client_is_told_what_is_wrong(server):
    async def call(http) -> None:
        for options, words in (
            ({"task_type": "Base"}, "set task_type to 'CustomVoice'"),
            ({"voice": "eve"}, "known: ada"),
        ):
            tts = voice(server, http, **options)
            with pytest.raises(APIError, match=words):
                await turn(tts)
            await tts.aclose()
        listed = await qwen3_tts.list_voices(model_endpoint=server.stream_url, api_key="secret")
        assert listed["voices"][0] == "ada" and listed["uploaded_voices"] == []

    run(call)


def test_livekits_qwen3_client_registers_a_voice(tiny, tmp_path):
    file = tmp_path / "anna.wav"
    file.write_bytes(recording())

    async def call(http) -> None:
        options = {"model_endpoint": server.stream_url, "api_key": "secret"}
        assert (await qwen3_tts.register_voice(name="anna", ref_audio_path=str(file), **options)) == {"name": "anna"}
        tts = voice(server, http, task_type="Base", voice="anna", max_new_tokens=8)
        assert (await turn(tts))[0] > 0
        await tts.aclose()

    with cloning(tiny, allow_upload=True, token="secret") as server:
        run(call)


class Ears(AudioOutput):
    """Hears what a session says, and is done with it at once."""

    def __init__(self):
        super().__init__(label="ears", capabilities=AudioOutputCapabilities(pause=False), sample_rate=24000)
        self.seconds = 0.0

    async def capture_frame(self, frame) -> None:
        await super().capture_frame(frame)
        self.seconds += frame.duration

    def flush(self) -> None:
        super().flush()
        self.on_playback_finished(playback_position=self.seconds, interrupted=False)

    def clear_buffer(self) -> None:
        self.on_playback_finished(playback_position=self.seconds, interrupted=True)


def test_the_example_answers_and_is_interrupted(server, monkeypatch):
    monkeypatch.setenv("TTS_URL", server.stream_url)
    monkeypatch.setenv("QWEN_MEGAKERNEL_TOKEN", "secret")
    spec = importlib.util.spec_from_file_location("livekit_agent", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    async def call(_http) -> None:
        async with http_context.open():
            session, ears = AgentSession(llm=example.Echo(), tts=example.voice()), Ears()
            session.output.audio = ears
            await session.start(Agent(instructions=""), record=False)
            for text in (TEXT, "And again."):
                session.generate_reply(user_input=" ".join([TEXT] * 10))
                before = ears.seconds
                await asyncio.to_thread(until, lambda before=before: ears.seconds > before)
                await session.interrupt()
                await asyncio.to_thread(server.at_rest)
                before = ears.seconds
                await session.generate_reply(user_input=text)
                assert ears.seconds > before + 1
            assert session.history.messages()[-1].text_content.strip() == "You said: And again."
            await session.aclose()

    run(call)


def test_livekits_openai_client_speaks_with_its_defaults(server):
    async def call(_http) -> None:
        async with aclosing(lk_openai.TTS(base_url=f"{server.url}/v1", api_key="secret")) as tts:
            frame = await tts.synthesize(TEXT, conn_options=ONCE).collect()
        assert frame.sample_rate == 24000 and frame.duration > 1

    run(call)


@pytest.mark.parametrize("form", ["pcm", "mp3"])
def test_livekits_openai_client_speaks_with_our_names(server, form):
    async def call(_http) -> None:
        options = {"model": "demo", "voice": "ada", "response_format": form}
        async with aclosing(lk_openai.TTS(base_url=f"{server.url}/v1", api_key="secret", **options)) as tts:
            frame = await tts.synthesize(TEXT, conn_options=ONCE).collect()
        assert frame.sample_rate == 24000 and frame.duration > 1

    run(call)
