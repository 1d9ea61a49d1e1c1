"""Requests over HTTP by published clients and as published programs send them: `make test-clients`.

Open WebUI, SillyTavern, xiaozhi and Open-LLM-VTuber are programs, not packages; their requests are written down here as
they send them (November 2026). test_serve_clients.py has more of their kind.
"""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import PATIENCE_S, TEXT, cloning, connect, get, post, ready, recording, small_demo

from qwen_megakernel.server.fields import FIELDS
from qwen_megakernel.speech.options import options_of

openai = pytest.importorskip("openai", reason="make test-clients installs it")

pytestmark = pytest.mark.clients
NODE_MODULES = Path(os.environ.get("NODE_CLIENTS", ".venv-clients/node_modules")).absolute()
BEARING = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server():
    with ready(small_demo, token="secret", openai_voices=True) as server:
        yield server


def is_mp3(data: bytes) -> bool:
    return data[:1] == b"\xff" and len(data) > 2000


def test_open_webui_finds_voices_and_models_and_speaks(server):
    voices = get(f"{server.url}/v1/audio/voices", headers=BEARING).json()["voices"]
    models = get(f"{server.url}/v1/audio/models", headers=BEARING).json()["models"]
    named = {voice["id"]: voice["name"] for voice in voices}
    assert "ada" in named and "tts-1" in [model["id"] for model in models]
    payload = {"input": TEXT, "voice": "alloy", "model": "tts-1"}
    assert is_mp3(post(f"{server.url}/v1/audio/speech", json=payload, headers=BEARING).content)


@pytest.mark.parametrize(
    "body",
    [
        {"input": TEXT, "response_format": "mp3", "voice": "alloy", "speed": 1, "model": "tts-1"},  # SillyTavern
        {"model": "tts-1", "input": TEXT, "voice": "nova", "response_format": "wav", "speed": 1.0},  # xiaozhi
        {"model": "kokoro", "input": TEXT, "voice": "", "response_format": "mp3", "speed": 1.0},
    ],
    ids=["SillyTavern", "xiaozhi", "config template"],
)
def test_programs_with_openais_interface_speak(server, body):
    answer = post(f"{server.url}/v1/audio/speech", json=body, headers=BEARING)
    if body["model"] == "kokoro":
        told = answer.json()["error"]
        assert answer.status_code == 404 and told["param"] == "model" and "known: demo" in told["message"]
    else:
        assert answer.status_code == 200 and len(answer.content) > 2000


def test_vllm_omnis_http_examples_speak(tiny):
    sound = "data:audio/wav;base64," + base64.b64encode(recording()).decode()
    with cloning(tiny, allow_clone=True) as server:
        payload = {
            "input": "Hello, this is a cloned voice",
            "task_type": "Base",
            "language": "Auto",
            "ref_audio": sound,
            "ref_text": "Original transcript of the reference audio",
            "response_format": "wav",
            "max_new_tokens": 12,
            "stream": False,
        }
        answer = post(f"{server.url}/v1/audio/speech", json=payload)
        assert answer.status_code == 200 and answer.content[:4] == b"RIFF"
        payload |= {
            "stream": True,
            "response_format": "pcm",
            "initial_codec_chunk_frames": 1,
            "x_vector_only_mode": True,
        }
        assert len(post(f"{server.url}/v1/audio/speech", json=payload).content) > 2000


def test_vllm_omnis_socket_example_speaks(server):
    """As streaming_speech_client.py of its examples does: two texts on one socket, with times of words."""
    config = {"speaker": "ada", "task_type": "CustomVoice", "language": "Auto", "response_format": "pcm", "speed": 1.0}
    config |= {"word_timestamps": True, "stream_audio": True, "split_granularity": "none"}
    with connect(server.stream_url, additional_headers=BEARING) as line:
        line.send(json.dumps({"type": "session.config"} | config))
        for _ in range(2):
            for word in TEXT.split(" "):
                line.send(json.dumps({"type": "input.text", "text": f"{word} "}))
            line.send(json.dumps({"type": "input.done"}))
            size, words = 0, []
            while (told := json.loads(line.recv(timeout=PATIENCE_S)))["type"] != "session.done":
                assert told["type"] in ("audio.start", "audio.chunk", "audio.done"), told
                if told["type"] == "audio.chunk":
                    size += len(base64.b64decode(told["audio_b64"]))
                    words += [word["word"] for word in told["timestamps"]]
            assert size > 24000 and words == TEXT.split()
        line.send(json.dumps({"type": "session.close"}))


def test_openais_python_client_speaks_streams_and_names_no_model_of_ours(server, tmp_path):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", timeout=PATIENCE_S)
    assert "tts-1" in [model.id for model in client.models.list()]
    speech = client.audio.speech.create(model="gpt-4o-mini-tts", voice="shimmer", input=TEXT)
    assert is_mp3(speech.content)
    with client.audio.speech.with_streaming_response.create(  # as Open-LLM-VTuber speaks
        model="tts-1", voice="alloy", input=TEXT, response_format="wav", speed=1.0
    ) as streamed:
        streamed.stream_to_file(tmp_path / "a.wav")
    assert (tmp_path / "a.wav").stat().st_size > 24000
    with pytest.raises(openai.BadRequestError, match="unknown voice"):
        client.audio.speech.create(model="tts-1", voice="nobody", input=TEXT)


NODE = """
const { OpenAI } = require("openai");
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "secret" });
(async () => {
  const answer = await client.audio.speech.create({ model: "tts-1", voice: "alloy", input: process.argv[3] });
  const size = Buffer.from(await answer.arrayBuffer()).length;
  try {
    await client.audio.speech.create({ model: "tts-1", voice: "nobody", input: "Hi." });
  } catch (error) {
    console.log(JSON.stringify({ size, status: error.status, param: error.param, message: error.message }));
  }
})();
"""


def test_openais_node_client_speaks(server, tmp_path):
    if not shutil.which("node") or not (NODE_MODULES / "openai").is_dir():
        pytest.skip("needs node; make test-clients installs the package openai for it")
    program = tmp_path / "speak.cjs"
    program.write_text(NODE)
    node = ["node", str(program), server.url, TEXT]
    environment = os.environ | {"NODE_PATH": str(NODE_MODULES)}
    said = subprocess.run(node, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    told = json.loads(said.stdout)
    assert told["size"] > 2000 and told["status"] == 400 and told["param"] == "voice"


def test_curl_with_every_field_at_once(tiny, tmp_path):
    """Of fields that exclude each other one stays out: the vector and the second names."""
    sound = base64.b64encode(recording()).decode()
    values = {"model": "tts-1", "input": "Hello there.", "response_format": "pcm", "stream_format": "audio"}
    values |= {"stream": True, "sample_rate": 16000, "task_type": "Base", "word_timestamps": True, "speakers": True}
    values |= {"ref_audio": sound, "ref_text": "Hi.", "x_vector_only_mode": False, "voice": "", "language": "Auto"}
    values |= {"speed": 1.25, "seed": 5, "temperature": 0.9, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05}
    values |= {"trim": "start", "silence_s": 0.1, "normalize": "auto", "non_streaming_mode": False, "max_frames": 8}
    values |= {"volume_multiplier": 1.5, "chunk_frames": [1, 2], "instructions": "Slowly."}
    values |= {name: "x" for name, field in FIELDS.items() if field.ignored}
    socket_only = {"stream_audio", "split_granularity", "timestamp_type", "timestamp_transport_strategy"}
    left_out = {name for name, field in FIELDS.items() if field.same} | {"speaker_embedding", "retries"} | socket_only
    assert set(values) | left_out == {*FIELDS, *options_of("http")}
    body = tmp_path / "body.json"
    body.write_text(json.dumps(values))
    with cloning(tiny, allow_clone=True) as server:
        curl = ["curl", "--silent", "--dump-header", "-", "--output", str(tmp_path / "a.pcm"), "--data", f"@{body}"]
        curl += ["--header", "Content-Type: application/json", f"{server.url}/v1/audio/speech"]
        head = subprocess.run(curl, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
        assert "200 OK" in head and (tmp_path / "a.pcm").stat().st_size > 2000
        (ignored,) = (line for line in head.splitlines() if line.lower().startswith("x-ignored"))
        wanted = {name for name, field in FIELDS.items() if field.ignored} | {"instructions", "word_timestamps"}
        assert set(ignored.split(": ", 1)[1].split(", ")) == wanted
