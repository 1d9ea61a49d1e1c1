"""When the machine runs short of memory, threads or files: what callers are told, and what goes on."""

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from serving import PATIENCE_S, TEXT, connect, post, ready, small_demo, until
from websockets.exceptions import ConnectionClosedError

from qwen_megakernel import OutOfMemoryError, RequestError, SamplingParams, TTSEngine, TTSError
from qwen_megakernel.errors import KernelFault, VoiceError
from qwen_megakernel.model.voice import Voice
from qwen_megakernel.server.api_error import ApiError
from qwen_megakernel.server.openai.bodies import BATCH
from qwen_megakernel.server.options import ServerOptions
from qwen_megakernel.server.service import EngineService
from qwen_megakernel.speech.saved_voices import SavedVoices

ON_CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: 8 bytes")
NO_MEMORY = [
    ON_CPU,
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    MemoryError(),
    np._core._exceptions._ArrayMemoryError((9,), np.dtype(np.float32)),
    torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    OSError(12, "Cannot allocate memory"),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RequestError("out of memory"),
    KernelFault("out of memory"),
    ValueError("cannot allocate memory"),
    OSError(28, "No space left on device"),
]
NO_THREAD = RuntimeError("can't start new thread")
HOW = {"speaker": "ada", "sampling": SamplingParams(seed=5)}


def failing(error: BaseException):
    def fail(*_args, **_options):
        raise type(error)(*error.args)  # a new one: its traceback holds what it came through

    return fail


@pytest.mark.parametrize("error", NO_MEMORY, ids=str)
def test_no_memory_is_one_error_whoever_tells_it(error):
    assert isinstance(OutOfMemoryError.of(error), OutOfMemoryError)
    told = ApiError.of(error)
    assert (told.status, told.code, told.retryable) == (503, "failed", True) and "lower max_streams" in told.message


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_not_called_memory(error):
    assert OutOfMemoryError.of(error) is None


def test_no_memory_at_load(monkeypatch):
    monkeypatch.setattr("qwen_megakernel.speech.engine.EngineCore", failing(ON_CPU))
    with pytest.raises(OutOfMemoryError, match="DefaultCPUAllocator"):
        TTSEngine.load("demo", device="cpu", max_streams=1, max_positions=160)


@pytest.mark.parametrize("name", ["request", "prompt", "piece", "slot", "frame", "vocoder", "end"])
def test_no_memory_fails_one_utterance_and_the_engine_goes_on(name, monkeypatch):
    engine = small_demo()
    whole = engine.generate("Yes.", **HOW)
    pipeline = engine._core.loop.pipeline
    where = {
        "request": (engine._requests, "check"),
        "prompt": (engine._prompts, "build"),
        "piece": (engine._prompts, "tokens"),
        "slot": (pipeline, "start"),
        "frame": (pipeline, "launch"),
        "vocoder": (pipeline, "push"),
        "end": ("qwen_megakernel.engine.output.Output.assemble",),
    }[name]
    with monkeypatch.context() as patch:
        patch.setattr(*where, failing(ON_CPU))
        with pytest.raises(OutOfMemoryError, match="DefaultCPUAllocator"):
            engine.generate("Yes.", **HOW)
    assert np.array_equal(engine.generate("Yes.", **HOW).samples, whole.samples)
    until(lambda: engine.health()["streams"] == 0)


def test_no_memory_for_a_piece_of_text(monkeypatch):
    engine = small_demo()
    utterance = engine.submit(**HOW)
    monkeypatch.setattr(utterance._sequence.input.pieces, "push", failing(ON_CPU))
    with pytest.raises(OutOfMemoryError):
        utterance.push_text("Yes, ")
    with pytest.raises(OutOfMemoryError):
        utterance.result(PATIENCE_S)


# ---------------------------------------------------------------- a server


@pytest.fixture(scope="module")
def server():
    with ready(small_demo) as server:
        yield server


@pytest.fixture(
    params=[(NO_THREAD, 500, "the server failed"), (ON_CPU, 503, "OutOfMemoryError")], ids=["bug", "memory"]
)
def fault(request, server, monkeypatch):
    """Nothing can be spoken: the error, its HTTP status, and how its message begins."""
    monkeypatch.setattr(server.service._executor, "submit", failing(request.param[0]))
    return request.param


def told_of(error: dict, fault) -> None:
    assert error["code"] == "failed" and error["message"].startswith(fault[2]) and error["request_id"]
    assert error["retryable"] == (fault[1] == 503)


@pytest.mark.parametrize("more", [{}, {"stream_format": "sse"}, {"stream": False, "response_format": "wav"}])
def test_whatever_is_raised_has_openais_shape(server, fault, more):
    answer = server.post(**more)
    assert answer.status_code == fault[1] and answer.headers["content-type"] == "application/json"
    told_of(answer.json()["error"], fault)


def test_whatever_is_raised_before_the_api_has_openais_shape(server, monkeypatch):
    monkeypatch.setattr("qwen_megakernel.server.guard.Guard._check_access", failing(OSError(24, "Too many open files")))
    answer = server.post()
    assert answer.status_code == 500 and answer.json()["error"]["message"].startswith("the server failed")


def test_whatever_is_raised_amid_events_is_an_event(server, monkeypatch):
    monkeypatch.setattr("qwen_megakernel.server.openai.answers.Speech.usage", failing(NO_THREAD))
    answer = server.post(stream_format="sse", input="Yes.")
    last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
    assert answer.status_code == 200 and last["type"] == "error" and last["error"]["code"] == "failed"


def test_whatever_is_raised_amid_a_batch_is_an_entry(server, fault):
    answer = post(server.url + BATCH, json={"model": "demo", "inputs": [{"input": "Yes."}] * 2, "voice": "ada"})
    assert answer.status_code == 200 and len(answer.json()["data"]) == 2
    for entry in answer.json()["data"]:
        told_of(entry["error"], fault)


def test_whatever_is_raised_amid_sound_ends_it_early_and_is_logged(server, monkeypatch, caplog):
    monkeypatch.setattr("qwen_megakernel.speech.encoders.StreamEncoder.finish", failing(NO_THREAD))
    caplog.set_level("INFO")
    with pytest.raises(Exception, match="incomplete"):
        server.post(response_format="pcm", input="Yes.")
    until(lambda: any(getattr(record, "fields", {}).get("code") == "failed" for record in caplog.records))


def test_whatever_is_raised_is_a_message_of_a_socket(server, fault):
    with connect(server.socket_url) as line:
        line.recv(PATIENCE_S)
        line.send(json.dumps({"type": "text", "context": "a", "text": TEXT, "end": True}))
        told = json.loads(line.recv(PATIENCE_S))
        assert told["type"] == "error" and told["context"] == "a"
        told_of(told, fault)
    with connect(server.stream_url) as line:
        line.send(json.dumps({"type": "session.config"}))
        for kind in ({"type": "input.text", "text": TEXT}, {"type": "input.done"}):
            line.send(json.dumps(kind))
        told = json.loads(line.recv(PATIENCE_S))
        assert told["type"] == "error" and told["code"] == "failed"


@pytest.mark.parametrize("address", ["socket_url", "stream_url"])
def test_whatever_is_raised_by_a_socket_itself_is_its_last_message(server, address, monkeypatch):
    for kind in ("socket.api.Socket", "omni.session.Session"):
        monkeypatch.setattr(f"qwen_megakernel.server.{kind}._handle", failing(NO_THREAD))
    with connect(getattr(server, address)) as line:
        line.send("{}")
        messages = []
        with pytest.raises(ConnectionClosedError, match="1011"):
            while True:
                messages.append(json.loads(line.recv(PATIENCE_S)))
    assert messages[-1]["type"] == "error" and messages[-1]["code"] == "failed"


# ---------------------------------------------------------------- voices


@pytest.mark.parametrize("how", ["not written", "half written", "not renamed"])
def test_a_voice_that_is_not_replaced_leaves_no_file(how, tmp_path, monkeypatch):
    full = OSError(28, "No space left on device")
    voice, path = Voice.nobody(8, "a.b"), tmp_path / "ben.safetensors"
    voice.save(path)
    before, saved = path.read_bytes(), SavedVoices(tmp_path)

    async def make(*_args):
        return voice

    def half(_voice, part):
        part.write_bytes(b"half")
        raise full

    monkeypatch.setattr(saved, "make", make)
    if how == "not renamed":
        monkeypatch.setattr("pathlib.Path.replace", failing(full))
    else:
        monkeypatch.setattr(Voice, "save", half if how == "half written" else failing(MemoryError()))
    with pytest.raises((TTSError, MemoryError)):
        asyncio.run(saved.add(SimpleNamespace(speakers=()), "ben", b"", None, replace=True))
    saved.close()
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


def test_two_servers_that_save_a_voice_at_once_both_save_a_whole_one(tmp_path, monkeypatch):
    """In one folder, under one name: the one that is done last stays."""
    save, one, other = Voice.save, Voice.nobody(8, "one"), Voice.nobody(8, "other")

    async def add(voice: Voice) -> None:
        saved = SavedVoices(tmp_path)
        saved.make = lambda *_args: asyncio.sleep(0, voice)
        await saved.add(SimpleNamespace(speakers=()), "ben", b"", None)
        saved.close()

    def amid(voice: Voice, part: Path) -> None:
        save(voice, part)
        if voice is one:
            asyncio.run(add(other))
            assert Voice.load(part).fingerprint == "one"

    monkeypatch.setattr(Voice, "save", amid)
    asyncio.run(add(one))
    assert [file.name for file in tmp_path.iterdir()] == ["ben.safetensors"]
    assert Voice.load(tmp_path / "ben.safetensors").fingerprint == "one"


def test_a_link_that_leads_nowhere_is_told_by_name(tmp_path):
    (tmp_path / "ben.safetensors").symlink_to("nowhere")
    with pytest.raises(VoiceError, match=r"ben\.safetensors: cannot be read"):
        SavedVoices(tmp_path)


# ---------------------------------------------------------------- Wyoming


@pytest.mark.parametrize("error", [NO_THREAD, OSError(24, "Too many open files"), ON_CPU], ids=str)
def test_whatever_is_raised_is_an_error_of_wyoming(error, monkeypatch, caplog):
    wyoming = pytest.importorskip("test_wyoming")
    caplog.set_level("INFO")
    with wyoming.running() as server:
        monkeypatch.setattr(server.service._executor, "submit", failing(error))
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as line:
            line.sendall(b'{"type": "synthesize", "data": {"text": "Yes."}}\n')
            told = line.makefile("rb").read()
    assert b'"error"' in told and b"failed" in told
    fields = [record.fields for record in caplog.records if record.name == "qwen_megakernel.access"]
    assert [each["code"] for each in fields] == ["failed"]


def test_a_wyoming_server_that_cannot_end_in_order_ends_without_a_traceback(monkeypatch, caplog):
    api = pytest.importorskip("qwen_megakernel.server.wyoming.api")
    raised = []

    async def run(server, listener):
        os.kill(os.getpid(), signal.SIGTERM)
        await server._stopping.wait()
        raise NO_THREAD

    monkeypatch.setattr(api.WyomingServer, "run", run)
    monkeypatch.setattr(api.signal, "raise_signal", raised.append)
    with socket.socket() as listener:
        api.serve(EngineService(small_demo, ServerOptions(), model="demo"), listener)
    assert raised == [signal.SIGTERM]
    assert [record.exc_info for record in caplog.records] == [None] and "can't start new thread" in caplog.text


def test_without_threads_a_server_closes_its_engine(monkeypatch):
    closed = []

    async def close():
        service = EngineService(small_demo, ServerOptions(), model="demo")
        service._engine = SimpleNamespace(close=lambda: closed.append(True))
        monkeypatch.setattr("asyncio.to_thread", failing(NO_THREAD))
        await service.close()

    asyncio.run(close())
    assert closed == [True]
