"""Calls with what no caller should give, and calls in a forked process: each ends at once, in an error of ours."""

import contextlib
import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from waiting import PATIENCE_S

from qwen_megakernel import (
    CheckpointError,
    EngineOptions,
    Lexicon,
    Pause,
    SamplingParams,
    TextFrontEnd,
    TTSEngine,
    TTSError,
)
from qwen_megakernel.engine.options import Patience
from qwen_megakernel.model.voice import Voice

NUMBERS = [5, -1.5, float("nan"), 10**400, True]
ODD = [*NUMBERS, b"x", ["x"], [None], {"a": 1}, {1: 2}, ("a", 5), object(), "\ud800", "a\0b", set(), type, np.zeros(3)]
SOUND = (0.1 * np.random.default_rng(0).standard_normal(24000).astype(np.float32), 24000)


@pytest.fixture(scope="module", params=["custom_voice", "base"])
def engine(tiny, request):
    with TTSEngine.load(tiny(request.param), device="cpu", threads=1, max_positions=128) as engine:
        yield engine


def odd(call, values=ODD) -> None:
    """The call takes a value, or refuses it in an error of ours."""
    for value in values:
        with contextlib.suppress(TTSError):
            call(value)


def test_texts(engine):
    how = {"voice": engine.placeholder_voice(), "max_frames": 1}
    request = engine.request(**how)
    odd(lambda value: engine.generate(value, **how))
    odd(lambda value: engine.stream(value, **how).close())
    odd(lambda value: engine.submit(value, **how).cancel())
    odd(lambda value: engine.begin(value, request).cancel())
    odd(lambda value: engine.pieces(value, **how))
    odd(lambda value: engine.prompt(value, **how))
    odd(engine.tokens)
    with pytest.raises(TTSError, match="text .*int"):
        engine.generate(5, **how)


def test_callbacks_requests_and_waits(engine):
    how = {"voice": engine.placeholder_voice(), "max_frames": 1}
    request = engine.request(**how)
    odd(lambda value: engine.submit("Yes.", value, **how).cancel())
    odd(lambda value: engine.submit("Yes.", on_end=value, **how).cancel())
    for call in (engine.turn, lambda value: engine.begin("Yes.", value), lambda value: engine.parts("Yes.", value)):
        for value in ODD:
            with pytest.raises(TTSError, match="request must come from"):
                call(value)
    odd(lambda value: engine.parts("Yes.", request, value))
    odd(lambda value: engine.turn(request, value))
    utterance = engine.submit("Yes.", **how)
    utterance.result()
    odd(utterance.result)
    open_text = engine.submit(None, **how)
    odd(open_text.push_text)
    open_text.cancel()


def test_many_requests(engine):
    how = {"voice": engine.placeholder_voice(), "max_frames": 1}
    odd(lambda value: list(engine.map(value, **how)))
    odd(lambda value: list(engine.map([value], **how)))
    odd(lambda value: list(engine.map([{"text": value}], **how)))
    odd(lambda value: list(engine.map(["Yes."], ordered=value, **how)))
    odd(lambda value: list(engine.map([{"text": "Yes.", value: 1}], **how)), [5, None, ("a",), "\ud800"])


ARRAYS = [np.zeros((3, 3, 3)), np.zeros(24000, complex), np.ones(24000, "O"), np.full(24000, 1e308), [[1], [1, 2]]]
ARRAYS += [np.ones(24000, "datetime64[s]"), np.ones(24000, [("a", "i4")]), np.zeros((24000, 0)), np.zeros(0)]
ARRAYS += [np.full(24000, 1e39), np.ones(24000, bool), [None] * 24000, np.full(24000, 5e-324), b"a" * 24000]
PATHS = ["/", "", "/dev/null", "/dev/full", "/proc/self/mem", "a" * 5000, b"/dev/zero", "~/x", "http://x/y", Path("/")]


def test_recordings(engine):
    odd(engine.create_voice, [*ODD, *PATHS, *ARRAYS])
    odd(lambda value: engine.create_voice([value]), [*ODD, *PATHS])
    odd(lambda value: engine.create_voice((value, 24000), "Yes."), [*ODD, *ARRAYS])
    odd(lambda value: engine.create_voice((SOUND[0], value)))
    odd(lambda value: engine.create_voice(SOUND, trim=value))
    odd(lambda value: engine.create_voice(SOUND, value), [5, -1.5, ["x", "y"], {"a": 1}, object(), "\ud800"])


@pytest.mark.parametrize("key", ["enc_dilations", "enc_res2net_scale"])
def test_an_encoder_with_impossible_sizes_is_an_error_of_the_checkpoint(key, tiny, tmp_path):
    folder = shutil.copytree(tiny("base"), tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    config["speaker_encoder_config"][key] = {"enc_dilations": [2**20] * 5, "enc_res2net_scale": 1000}[key]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError), TTSEngine.load(folder, device="cpu", threads=1, max_positions=32) as engine:
        engine.create_voice(SOUND)


def test_what_an_engine_is_loaded_with():
    odd(TTSEngine.load, [*ODD, *PATHS])
    odd(lambda value: TTSEngine.load("demo", value))
    for field in fields(EngineOptions):
        odd(lambda value, name=field.name: EngineOptions(**{name: value}))
    for name in "backend device dtype weights vocoder_dtype threads adapters fallback patience".split():
        for value in ({"a": 1}, object(), "\ud800", 10**400, np.zeros(3)):
            with pytest.raises(TTSError):
                TTSEngine.load("demo", **{"device": "cpu", name: value})
    for field in fields(Patience):
        odd(lambda value, name=field.name: Patience(**{name: value}))


def test_voices_and_what_is_drawn(tmp_path):
    odd(Voice.load, [*ODD, *PATHS])
    odd(Voice.nobody(8, "").save, ["/", "", "/proc/x", "a\0b", 10**400, object()])
    for field in fields(SamplingParams):
        odd(lambda value, name=field.name: SamplingParams(**{name: value}))
    odd(Pause)


def test_text_rules():
    for field in ("language", "normalize", "lexicon", "lenient"):
        odd(lambda value, name=field: TextFrontEnd(**{name: value}).whole("It is 5."))
    for normalize in ("off", "auto"):
        front_end = TextFrontEnd("en", normalize)
        for name in ("whole", "shown", "leaves_alone", "stream"):
            odd(getattr(front_end, name))
        odd(front_end.stream().push)
    odd(Lexicon)
    odd(lambda value: Lexicon({}, value))
    odd(lambda value: Lexicon({}, {"en": value}))
    odd(lambda value: Lexicon({"x": value}))
    words = Lexicon({"a": "b"})
    odd(words.apply)
    odd(words.may_change)
    odd(words.stream)
    odd(lambda value: words.stream().push(value))
    odd(lambda value: words.apply("a", value))
    odd(Lexicon.load, [*ODD, *PATHS])


def test_an_end_after_what_is_no_time(tiny):
    with TTSEngine.load(tiny("custom_voice"), device="cpu", threads=1, max_positions=32) as engine:
        for value in ("x", None, ["x"], object()):
            with pytest.raises(TTSError, match="drain_s"):
                engine.close(value)
        assert engine.health()["status"] == "ok"


# ---------------------------------------------------------------- forks

FORKED = """
import os, sys
from qwen_megakernel import EngineDied, TextEndedError, TTSEngine

engine = TTSEngine.load("demo", device="cpu", threads=1, max_streams=2)
running = engine.submit("Hello there.", seed=1)
pieces = engine.submit(None)
results = engine.map(["Yes."])
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert running.result().frames and [one.audio.frames > 0 for one in results] == [True]
    assert engine.health()["status"] == "ok"
    pieces.cancel()
    engine.close()
    sys.exit()
calls = [
    lambda: engine.generate("Yes."),
    lambda: next(engine.stream("Yes.")),
    lambda: engine.submit("Yes."),
    lambda: list(engine.map(["Yes."])),
    lambda: engine.create_voice("me.wav"),
    lambda: engine.prompt("Yes."),
    lambda: pieces.push_text("Yes."),
    running.result,
    lambda: next(results),
]
for call in calls:
    try:
        call()
    except (EngineDied, TextEndedError) as error:
        pass
    else:
        raise AssertionError("it answers")
health = engine.health()
assert health["status"] == "dead" and "forked" in health["error"], health
assert health["streams"] == health["running"] == health["queued"] == 0, health
assert engine.metrics() and not engine.snapshot().alive
engine.close()
os._exit(0)
"""


@pytest.mark.attacks
def test_in_a_forked_process_an_engine_is_dead_at_once_and_goes_on_where_it_was_loaded():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
