"""Both Pipecat services in real pipelines, on the demo voice: frames and their order, interruptions, settings, rates,
words, errors."""

import asyncio
import gc
import re
import threading
import time
from inspect import signature
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import pytest
import soxr
import torch
from callers import parts_of
from hearing import spoken
from kept import Kept
from listener import PacedOutput
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    FunctionCallsStartedFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMTextFrame,
    MetricsFrame,
    TextType,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
    TTSTextFrame,
    TTSUpdateSettingsFrame,
)
from pipecat.metrics.metrics import ProcessingMetricsData, TTFAMetricsData, TTFBMetricsData, TTSUsageMetricsData
from pipecat.pipeline.pipeline import Pipeline
from pipecat.services.tts_service import TextAggregationMode, TTSService, WebsocketTTSService
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory
from pipelines import NO_TIME_OUT, Until, came, log_of_services, of, one_start_and_stop, pcm, play, turn
from probes import probed
from serving import made_by, ready
from waiting import slow_case, until, until_in_loop

from qwen_megakernel import (
    EngineBusy,
    KernelFault,
    LanguageError,
    RequestError,
    SamplingError,
    SamplingParams,
    SpeakerError,
    TTSEngine,
    Voice,
    VoiceError,
)
from qwen_megakernel.checkpoint.load import DEMO_FOLDER
from qwen_megakernel.engine.utterance import Utterance
from qwen_megakernel.pipecat import audio_context
from qwen_megakernel.pipecat.audio_context import AudioContext
from qwen_megakernel.pipecat.remote import WebsocketServiceArguments
from qwen_megakernel.pipecat.sentences import Sentences
from qwen_megakernel.pipecat.service import ServiceArguments
from qwen_megakernel.pipecat_tts import MegakernelTTSService
from qwen_megakernel.speech.rates import SpeechRates
from qwen_megakernel.speech.words import is_unspaced, words_of
from qwen_megakernel.websocket_tts import MegakernelWebsocketTTSService
from spoken_text.lexicon import Lexicon

Settings = MegakernelTTSService.Settings
SAVED_VOICE = Voice(torch.zeros(8), None, None, "0")
SENTENCE, TOKEN = TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN
in_both_modes = pytest.mark.parametrize("mode", [SENTENCE, TOKEN])
mostly_in_sentence_mode = pytest.mark.parametrize("mode", [SENTENCE, slow_case(TOKEN)])
mostly_in_token_mode = pytest.mark.parametrize("mode", [slow_case(SENTENCE), TOKEN])
LEXICON = Lexicon({"sql": "sequel"})


@pytest.fixture(scope="module")
def engine(backend):
    return backend.demo()


@pytest.fixture(scope="module")
def url(engine):
    """Of a server of the same engine."""
    with ready(lambda: Kept(engine), defaults={"lexicon": LEXICON}) as server:
        yield server.url  # the service finds the socket


def run(service, frames: list[Frame | Until], rate: int = 24000) -> tuple[list[Frame], list[Frame]]:
    """Everything that came out, downstream and upstream, up to an EndFrame behind the last."""
    return asyncio.run(play(service, frames, rate=rate))


def service_of(engine, seed: int = 3, **options) -> MegakernelTTSService:
    settings = options.pop("settings", Settings(voice="ada", seed=seed))
    return MegakernelTTSService(engine=engine, settings=settings, trim_leading_silence=False, **options)


@pytest.fixture(params=["local", slow_case("remote")])
def make(request, engine):
    """make(mode, **settings) -> a service with this engine in its process or behind a server."""
    remote = request.param == "remote"
    where = {"url": request.getfixturevalue("url")} if remote else {"engine": engine}

    def make(mode=SENTENCE, lexicon=None, **settings):
        service = MegakernelWebsocketTTSService if remote else MegakernelTTSService
        options = {"lexicon": lexicon} if lexicon and not remote else {}
        given = service.Settings(**{"voice": "ada", "seed": 3} | settings)
        options |= {"text_aggregation_mode": mode, "trim_leading_silence": False}
        return service(settings=given, **where, **options)

    return make


def said(engine, text: str, mode=SENTENCE, **request) -> np.ndarray:
    """What the engine makes of it with the settings of `service_of` and `make`, int16."""
    request = {"speaker": "ada", "sampling": SamplingParams(seed=3), "non_streaming_mode": mode is not TOKEN} | request
    return np.rint(np.clip(made_by(engine, text, **request).samples, -1, 1) * 32767).astype(np.int16)


def same(heard: np.ndarray, *expected: np.ndarray, most: int = 1) -> bool:
    """most: 1 where the last bit depends on the company that a frame is decoded in."""
    whole = np.concatenate(expected).astype(int)
    return len(heard) == len(whole) and np.abs(heard - whole).max() <= most


# ---------------------------------------------------------------- what is heard


def test_a_sentence_is_what_the_engine_says(engine):
    down, up = run(service_of(engine), [TTSSpeakFrame("Hello there, how are you?")])
    assert np.array_equal(pcm(down), said(engine, "Hello there, how are you?"))
    kinds = [type(f) for f in down if isinstance(f, (TTSStartedFrame, TTSAudioRawFrame, TTSStoppedFrame))]
    assert kinds[0] is TTSStartedFrame and kinds[-1] is TTSStoppedFrame and one_start_and_stop(down)
    frames = 3 if engine.threads else 1  # a CPU's first chunk, of one frame, is too little to begin with
    assert len(of(down, TTSAudioRawFrame)[0].audio) == frames * 2 * 1920
    assert not of(up, ErrorFrame) and all(len(f.audio) for f in of(down, TTSAudioRawFrame))


def test_a_turn_of_three_sentences_has_one_start_and_one_stop(engine, make):
    text = ("Hello there. ", "How are you today? ", "I am fine.")
    with log_of_services() as lines:
        down, up = run(make(), turn(*text))
    assert one_start_and_stop(down) and not of(up, ErrorFrame)
    assert [line.split()[0] for line in lines if " eos, " in line] == ["DEBUG"] * 3
    assert [line for line in lines if line.startswith("INFO")] == [lines[-1]] and " 3 utterances ended, RTF " in lines[
        -1
    ]
    assert same(pcm(down), *(said(engine, part.strip()) for part in text), most=0)
    assert [frame.text.strip() for frame in of(down, TTSTextFrame)] == "".join(text).split()
    assert all(frame.metadata["time_is_estimated"] != engine.measures_words for frame in of(down, TTSTextFrame))


@pytest.mark.parametrize("layout", [True, False])
def test_the_layout_of_sentences_can_be_chosen_and_changed(engine, make, layout):
    text = "Hello there."
    frames = [TTSSpeakFrame(text), update(non_streaming_mode=not layout), TTSSpeakFrame(text)]
    down, up = run(make(non_streaming_mode=layout), frames)
    expected = [said(engine, text, non_streaming_mode=how) for how in (layout, not layout)]
    assert same(pcm(down), *expected, most=0) and not of(up, ErrorFrame)


@mostly_in_token_mode
def test_written_text_is_normalized_and_the_context_has_it_as_it_was_written(engine, make, mode):
    text = "**SQL** runs 5 km."
    service = make(mode, LEXICON, language="en", normalize="auto")
    down, up = run(service, turn("**S", "QL** runs ", "5 k", "m."))
    wanted = said(engine, "sequel runs five kilometers.", mode, language="en")
    assert len(pcm(down)) == len(wanted) and not of(up, ErrorFrame)
    assert " ".join(w.text.strip() for w in of(down, TTSTextFrame)) == text


@in_both_modes
def test_a_pause_is_silence_and_words_behind_it_come_later(make, mode):
    down, up = run(make(mode), turn("Yes [pause 2s] no."))
    loud = np.flatnonzero(np.abs(pcm(down).astype(int)) > 100)
    assert np.diff(loud).max() / 24000 == pytest.approx(2.0, abs=0.02) and not of(up, ErrorFrame)
    assert " ".join(w.text.strip() for w in of(down, TTSTextFrame)) == "Yes [pause 2s] no."


@pytest.mark.parametrize("service", [MegakernelTTSService, MegakernelWebsocketTTSService])
def test_tokens_cannot_have_the_layout_of_whole_text(service):
    where = {"model": "demo"} if service is MegakernelTTSService else {"url": "ws://localhost"}
    for mode, message in ((True, "in TOKEN mode text comes in pieces: leave"), ("no", "non_streaming_mode must be")):
        settings = service.Settings(voice="ada", non_streaming_mode=mode)
        with pytest.raises(RequestError, match=message):
            service(settings=settings, text_aggregation_mode=TOKEN, **where)
    service(settings=service.Settings(voice="ada", non_streaming_mode=False), text_aggregation_mode=TOKEN, **where)


def test_tokens_become_one_utterance_as_if_the_text_had_come_whole(engine, make):
    tokens = ["Hel", "lo the", "re, ", "how ", "are y", "ou? ", "I am ", "fine."]
    down, up = run(make(TOKEN), turn(*tokens, pause=0.01))
    assert same(pcm(down), said(engine, "".join(tokens), TOKEN))
    assert one_start_and_stop(down) and not of(up, ErrorFrame)


def test_speech_starts_before_the_turn_ends(make):
    frames = [*turn("Hello there my ", "friend and ")[:-1], came(TTSAudioRawFrame), *turn()[-1:]]
    down, _ = run(make(TOKEN), frames)
    end = next(i for i, f in enumerate(down) if isinstance(f, LLMFullResponseEndFrame))
    assert of(down[:end], TTSAudioRawFrame)


@pytest.mark.parametrize("rate", [8000, slow_case(16000), slow_case(48000)])
@mostly_in_token_mode
def test_other_rates_have_all_of_it_and_a_first_chunk_with_sound(engine, make, rate, mode):
    down, _ = run(make(mode), turn("Hello there, how are you?"), rate)
    frames, heard = of(down, TTSAudioRawFrame), pcm(down) / 32767
    assert all(f.sample_rate == rate and len(f.audio) and len(f.audio) % 2 == 0 for f in frames)
    assert len(frames[0].audio) / 2 / rate > 0.05
    whole = soxr.resample(said(engine, "Hello there, how are you?", mode) / 32767, 24000, rate, "HQ")
    both = min(len(whole), len(heard))
    assert len(heard) == pytest.approx(len(whole), abs=2)
    assert np.abs(heard[:both] - whole[:both]).max() < 1e-3, "no click at a chunk's edge, no tail lost"


def test_leading_silence_is_cut_where_asked_for(engine):
    text = "Hello there."
    service = MegakernelTTSService(engine=engine, settings=Settings(voice="ada", seed=3))
    plain, cut = said(engine, text), pcm(run(service, [TTSSpeakFrame(text)])[0])
    assert spoken(cut / 32767, 24000)[0][0] == pytest.approx(0.01, abs=0.02) and len(cut) < len(plain) - 1000
    assert np.abs(cut[:200]).max() < 0.02 * 32767, "no click is left"
    assert np.array_equal(cut[240:], plain[len(plain) - len(cut) + 240 :]), "the speech is what it was"


def test_before_a_function_call_all_that_was_written_is_given_to_the_utterance(engine, monkeypatch):
    """The call's frame overtakes tokens that still wait in the service's queue."""
    calls = []
    push, flush = Utterance.push_text, Utterance.flush
    monkeypatch.setattr(Utterance, "push_text", lambda self, text: calls.append(text) or push(self, text))
    monkeypatch.setattr(Utterance, "flush", lambda self: calls.append("flush") or flush(self))
    tokens = ["Let ", "me ", "lo", "ok"]
    call = FunctionCallsStartedFrame(function_calls=[])
    flushed = Until(lambda _: "flush" in calls)
    frames = [*turn(*tokens)[:-1], call, flushed, LLMTextFrame(" it up."), LLMFullResponseEndFrame()]
    down, up = run(service_of(engine, text_aggregation_mode=TOKEN), frames)
    assert calls == [*tokens, "flush", " it up."] and one_start_and_stop(down) and not of(up, ErrorFrame)


def test_a_saved_voice_speaks(engine_for, tiny, tmp_path):
    engine = engine_for(tiny("base", eos_gain=4.0))
    samples = np.random.default_rng(1).normal(0, 0.1, 24000).astype(np.float32)
    engine.create_voice((samples, 24000)).save(tmp_path / "me.safetensors")
    voice = Voice.load(tmp_path / "me.safetensors")
    down, up = run(service_of(engine, settings=Settings(voice=voice, seed=3)), [TTSSpeakFrame("Hello there.")])
    wanted = said(engine, "Hello there.", speaker=None, voice=voice, non_streaming_mode=None)
    assert np.array_equal(pcm(down), wanted) and not of(up, ErrorFrame)
    with pytest.raises(SpeakerError, match="voice"):
        MegakernelTTSService(engine=engine)


def test_a_foreign_voice_speaks_where_that_is_allowed(engine_for, tiny):
    engine = engine_for(tiny("custom_voice", eos_gain=4.0), allow_foreign_voice=True)
    voice = Voice(torch.randn(engine.config.talker.stack.hidden_size), None, None, "of a Base checkpoint")
    down, up = run(service_of(engine, settings=Settings(voice=voice, seed=3)), [TTSSpeakFrame("Hello there.")])
    wanted = said(engine, "Hello there.", speaker=None, voice=voice, non_streaming_mode=None)
    assert np.array_equal(pcm(down), wanted) and not of(up, ErrorFrame)
    options = {"model": engine.model, "settings": Settings(voice=voice)}
    with pytest.raises(VoiceError, match="Base.*allow_foreign_voice=True"):
        MegakernelTTSService(**options)
    MegakernelTTSService(**options, engine_options={"allow_foreign_voice": True})


# ---------------------------------------------------------------- metrics


@in_both_modes
def test_metrics_are_pipecats_own(make, mode):
    """Time to the first byte and to the first sound once a turn, letters once each, processing by the sentence."""
    service = make(mode)
    down, up = run(service, turn("Hello there. ", "How are you?"))
    data = [entry for frame in of([*down, *up], MetricsFrame) for entry in frame.data]
    first = [e for e in data if isinstance(e, TTFBMetricsData) and e.value]
    sound = [e for e in data if isinstance(e, TTFAMetricsData)]
    letters = sum(e.value for e in data if isinstance(e, TTSUsageMetricsData))
    assert len(first) == len(sound) == 1 and sound[0].ttfa >= sound[0].ttfb == first[0].value > 0
    assert letters in (len("Hello there.") + len("How are you?"), len("Hello there. How are you?"))
    assert len([e for e in data if isinstance(e, ProcessingMetricsData) and e.value]) == (2 if mode is not TOKEN else 0)
    assert first[0].model == "demo" and first[0].processor == service.name


# ---------------------------------------------------------------- interruptions


def wait_free(engine) -> None:
    until(lambda: not engine.health()["streams"])


@in_both_modes
def test_an_interruption_ends_this_speech_and_the_next_turn_is_clean(engine, make, mode):
    long = "One two three four five six seven eight nine ten, and so on and on for a very long time. " * 12
    before = engine.metrics()["cancelled"]
    interrupted = [came(TTSAudioRawFrame), InterruptionFrame(), came(InterruptionFrame)]
    down, up = run(make(mode), [*turn(long)[:-1], *interrupted, *turn("Hello there.")])
    at = next(i for i, f in enumerate(down) if isinstance(f, InterruptionFrame))
    starts = [i for i, f in enumerate(down) if isinstance(f, TTSStartedFrame)]
    assert len(starts) == 2 and starts[0] < at < starts[1] and not of(up, ErrorFrame)
    assert not of(down[at : starts[1]], TTSAudioRawFrame), "nothing stale is heard"
    assert same(pcm(down[at:]), said(engine, "Hello there.", mode))
    wait_free(engine)
    assert engine.metrics()["cancelled"] - before <= 1  # 0 where it came between two sentences


async def test_a_call_does_not_notice_another_calls_interruption(engine, make):
    text = "Hello there, how are you today, my friend?"
    frames = [TTSSpeakFrame(text * 3), came(TTSAudioRawFrame), InterruptionFrame(), came(InterruptionFrame)]
    _, (down, _) = await asyncio.gather(play(make(), frames), play(make(), [TTSSpeakFrame(text)]))
    assert same(pcm(down), said(engine, text))
    wait_free(engine)


# ---------------------------------------------------------------- settings


def update(**settings) -> TTSUpdateSettingsFrame:
    return TTSUpdateSettingsFrame(delta=Settings(**settings))


def test_a_change_of_voice_is_heard_from_the_next_sentence_on(engine, make):
    frames = [TTSSpeakFrame("Hello there."), update(voice="max", temperature=0.5), TTSSpeakFrame("Hello there.")]
    down, up = run(make(), frames)
    other = {"speaker": "max", "sampling": SamplingParams.for_both(seed=3, temperature=0.5)}
    assert same(pcm(down), said(engine, "Hello there."), said(engine, "Hello there.", **other), most=0)
    assert not of(up, ErrorFrame)


@mostly_in_token_mode
def test_the_speed_changes_in_mid_call(engine, make, mode):
    text, frames = "Yes.", []
    for speed in (None, 2.0, 0.5, 1.0):
        frames += [update(speed=speed), *turn(text)]
    down, up = run(make(mode), frames)
    expected = [len(said(engine, text, mode, speed=speed)) for speed in (1.0, 2.0, 0.5, 1.0)]
    assert not of(up, ErrorFrame) and len(pcm(down)) == sum(expected)
    assert expected[1] == expected[0] // 2 == expected[2] // 4


def test_in_token_mode_a_change_of_voice_opens_a_new_utterance(engine, make):
    frames = [*turn("Hello there. ")[:-1], update(voice="max"), LLMTextFrame("How are you?"), LLMFullResponseEndFrame()]
    down, up = run(make(TOKEN), frames)
    expected = [said(engine, "Hello there. ", TOKEN), said(engine, "How are you?", TOKEN, speaker="max")]
    assert same(pcm(down), *expected) and not of(up, ErrorFrame)


@mostly_in_sentence_mode
def test_a_finished_sentence_keeps_the_voice_that_it_was_written_for(engine, make, mode):
    down, up = run(make(mode), [*turn("As ", "Ada.")[:-1], update(voice="max"), *turn(" Max.")[1:]])
    expected = [
        said(engine, "As Ada.", mode),
        said(engine, "Max." if mode is SENTENCE else " Max.", mode, speaker="max"),
    ]
    assert same(pcm(down), *expected) and not of(up, ErrorFrame)
    assert [frame.text.strip() for frame in of(down, TTSTextFrame)] == ["As", "Ada.", "Max."]


@pytest.mark.parametrize(
    "service, options",
    [(MegakernelTTSService, {"model": "demo"}), (MegakernelWebsocketTTSService, {"url": "ws://localhost:1"})],
)
def test_an_argument_that_nobody_takes_is_refused(service, options):
    """Pipecat's own services speak with another voice then, and say nothing."""
    words = "has no argument language, voice; .*settings=.*: model, voice, language, instr"
    with pytest.raises(TypeError, match=words):
        service(**options, voice="ada", language="en")
    made = service(**options, sample_rate=16000, name="mine", text_aggregation_mode=TOKEN, settings=service.Settings())
    assert made.name == "mine"


@pytest.mark.parametrize(
    "typed, classes", [(ServiceArguments, TTSService.__mro__), (WebsocketServiceArguments, WebsocketTTSService.__mro__)]
)
def test_type_checkers_know_all_of_pipecats_arguments(typed, classes):
    """tests/typed/typed_calls.py shows what they say of others."""
    ours = {"self", "args", "kwargs", "settings", "push_text_frames", "push_stop_frames", "push_start_frame"}
    theirs = {}
    for one in (one for one in classes if "__init__" in vars(one) and one.__module__.startswith("pipecat.")):
        hints = get_type_hints(one.__init__)
        theirs |= {name: hints[name] for name in signature(one.__init__).parameters if name not in ours}
    known = get_type_hints(typed)
    assert {name: known.get(name) for name in theirs} == theirs
    assert known.keys() - theirs.keys() <= {"ws_send_timeout"}, "which Pipecat 1.13 does not have"


class Patient(MegakernelTTSService):
    """A subclass may have arguments of its own."""

    def __init__(self, *, patience: float, **kwargs):
        super().__init__(**kwargs)
        self.patience = patience


def test_a_subclass_may_take_more():
    assert Patient(model="demo", patience=3.0).patience == 3.0
    with pytest.raises(TypeError, match="argument patient"):
        Patient(model="demo", patience=3.0, patient=1)


WRONG = [
    ({"voice": "bob"}, SpeakerError, "unknown (voice|speaker) 'bob'; known: ada, max, oliver"),
    ({"voice": " "}, SpeakerError, "' '"),
    ({"language": "klingon"}, LanguageError, r"unknown language 'klingon'; known: auto, english \(en\)"),
    ({"language": Language.SV}, LanguageError, r"unknown language 'sv'; known: auto, english \(en\)"),
    ({"language": 7}, LanguageError, "language must be a string|got int"),
    ({"temperature": -1.0}, SamplingError, "temperature"),
    ({"top_p": 1.5}, SamplingError, "top_p"),
    ({"speed": 5}, RequestError, "speed must be a number from 0.25 to 4(.0)?, got 5"),
    ({"speed": True}, RequestError, "speed must be a number from 0.25 to 4(.0)?, got True"),
    ({"speed": "fast"}, RequestError, "speed must be a number from 0.25 to 4(.0)?, got 'fast'"),
    ({"instruct": 7}, RequestError, "instruct must be a string"),
    ({"normalize": "yes"}, RequestError, "normalize must be one of"),
    ({"normalize": 1}, RequestError, "normalize must be one of"),
    ({"trim": "all"}, RequestError, "trim must be one of"),
    ({"model": "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"}, RequestError, "model"),
    ({"voice": 7}, SpeakerError, "got int"),
]
LOCAL_WRONG = [
    ({"voice": SAVED_VOICE}, VoiceError, "needs a Base checkpoint"),
    ({"voice": ""}, SpeakerError, "known: ada, max, oliver"),
]


def test_changes_that_cannot_be_are_refused_and_nothing_changes(engine, make):
    service, rows = make(), [*WRONG]
    if isinstance(service, MegakernelTTSService):
        rows += [*LOCAL_WRONG, ({"instruct": "\ud800"}, RequestError, "instruct")]
    down, up = run(service, [*(update(**change) for change, *_ in rows), TTSSpeakFrame("Yes.")])
    for error, (change, _, message) in zip(of(up, ErrorFrame), rows, strict=True):
        assert re.search(message, error.error) and error.category is ErrorCategory.APPLICATION, change
    assert service.is_usable and same(pcm(down), said(engine, "Yes."), most=0)


def test_a_change_to_the_layout_of_whole_text_is_refused_in_token_mode(engine, make):
    service = make(TOKEN)
    down, up = run(service, [update(non_streaming_mode=True), *turn("Yes.")])
    (error,) = of(up, ErrorFrame)
    assert "comes in pieces: leave non_streaming_mode out" in error.error and service.is_usable
    assert same(pcm(down), said(engine, "Yes.", TOKEN))


@pytest.mark.parametrize("options, kind, message", [*WRONG, *LOCAL_WRONG], ids=str)
@pytest.mark.parametrize("given", ["engine", "model"])
def test_wrong_settings_are_refused_by_the_constructor(engine, options, kind, message, given):
    with pytest.raises(kind, match=message):
        MegakernelTTSService(**{given: engine if given == "engine" else "demo"}, settings=Settings(**options))


NO_MODEL_HAS = [{"voice": " "}, {"voice": 7}, {"language": 7}, {"language": ""}, {"top_p": 2.0}, {"speed": 0.1}]


@pytest.mark.parametrize("service", [MegakernelTTSService, MegakernelWebsocketTTSService])
@pytest.mark.parametrize("wrong", NO_MODEL_HAS, ids=str)
def test_what_no_model_has_is_refused_before_the_model_is_here(service, wrong):
    with pytest.raises(RequestError):
        service(settings=Settings(**wrong), **({} if service is MegakernelTTSService else {"url": "ws://localhost"}))


def test_the_same_model_by_another_name_is_no_change(engine):
    service = service_of(engine)
    down, up = run(service, [update(model=str(DEMO_FOLDER)), update(model=None), TTSSpeakFrame("Yes.")])
    assert not of(up, ErrorFrame) and service.settings.model == "demo" and len(pcm(down))


@pytest.mark.parametrize("language", [Language.EN_US, "en-GB", "en_us", "english", "English", None, "auto"])
def test_languages_are_understood_in_every_form(engine, language):
    service = MegakernelTTSService(engine=engine, settings=Settings(voice="ada", language=language))
    assert service.settings.language in ("english", "English", "en_us", None, "auto")
    assert engine.generate("Yes.", max_frames=1, **{"language": service.settings.language}).frames == 1


# ---------------------------------------------------------------- errors


@in_both_modes
def test_a_busy_engine_is_a_rate_limit_at_once_and_the_next_turn_speaks(mode):
    with TTSEngine.load("demo", device="cpu", max_streams=1, max_queue=0) as engine:
        taken = engine.submit()
        service = service_of(engine, text_aggregation_mode=mode, **NO_TIME_OUT)
        down, up = run(service, [*turn("Hello there."), came(TTSStoppedFrame)])
        errors = of(up, ErrorFrame)
        assert errors[0].category is ErrorCategory.RATE_LIMIT and isinstance(errors[0].exception, EngineBusy)
        assert one_start_and_stop(down) and service.is_usable
        taken.cancel()
        wait_free(engine)
        assert len(pcm(run(service_of(engine, text_aggregation_mode=mode), turn("Hello there."))[0]))


@in_both_modes
def test_a_kernel_fault_is_a_server_error_and_the_next_utterance_works(monkeypatch, mode):
    with probed("demo", max_streams=1) as engine:
        collect, calls = engine.probes.decoder.collect, []

        def faulty():
            codes = collect()
            calls.append(1)
            if len(calls) == 4:
                raise KernelFault("a wait gave up")
            return codes

        monkeypatch.setattr(engine.probes.decoder, "collect", faulty)
        frames = [*turn("Hello there."), came(TTSStoppedFrame), *turn("How are you?")]
        down, up = run(service_of(engine, text_aggregation_mode=mode), frames)
        errors = of(up, ErrorFrame)
        assert [e.category for e in errors] == [ErrorCategory.SERVER]
        assert one_start_and_stop(down, 2)
        expected = said(engine, "How are you?", mode)
        assert same(pcm(down)[-len(expected) :], expected)


@pytest.mark.slow
def test_three_busy_turns_are_three_rate_limits_and_nothing_else():
    """However slowly the LLM writes: its tokens open nothing again."""
    with TTSEngine.load("demo", device="cpu", max_streams=1, max_queue=0) as engine:
        taken = engine.submit()
        service = service_of(engine, text_aggregation_mode=TOKEN, stop_frame_timeout_s=1.0)
        slow = turn("Hello ", "there, ", pause=1.3)
        frames = [frame for times in (1, 2, 3) for frame in (*slow, came(TTSStoppedFrame, times))]
        down, up = run(service, frames)
        assert [e.category for e in of(up, ErrorFrame)] == 3 * [ErrorCategory.RATE_LIMIT] and service.is_usable
        assert one_start_and_stop(down, 3)
        taken.cancel()


@pytest.mark.slow
def test_a_turn_that_is_longer_than_a_slot_is_spoken_to_its_end():
    text = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen."
    with TTSEngine.load("demo", device="cpu", max_streams=1, max_positions=64) as engine:
        assert len(parts_of(engine, text)) > 1
        for how in ({"text_aggregation_mode": TOKEN}, {}):
            down, up = run(service_of(engine, **how), turn(*[f"{w} " for w in text.split()]))
            assert not of(up, ErrorFrame) and " ".join(w.text.strip() for w in of(down, TTSTextFrame)) == text
            assert one_start_and_stop(down)


def test_speech_that_its_slot_cuts_is_an_error_and_the_rest_no_part_of_the_context():
    """A number of 18 digits, each of which takes longer to say than any word."""
    rest = "and these are the words that nobody in the whole wide world ever hears."
    with TTSEngine.load("demo", device="cpu", max_streams=1, max_positions=64) as engine:
        down, up = run(service_of(engine, text_aggregation_mode=TOKEN), turn("797979797979797979 ", rest))
        (error,) = of(up, ErrorFrame)
        assert error.category is ErrorCategory.APPLICATION and "its slot is full" in error.error
        assert one_start_and_stop(down)
        assert "hears." not in [w.text.strip() for w in of(down, TTSTextFrame)]


# ---------------------------------------------------------------- shared engines


async def test_services_of_one_model_share_an_engine_and_the_last_one_closes_it():
    before = set(threading.enumerate())
    first = await MegakernelTTSService.warmup("demo", device="cpu")
    second = await MegakernelTTSService.warmup("demo", device="cpu")
    other = await MegakernelTTSService.warmup("demo", device="cpu", max_streams=2)
    assert first is second and other is not first
    assert gc.get_freeze_count() > 10_000, "a full collection no longer looks at what is loaded"
    service = MegakernelTTSService(model="demo", engine_options={"device": "cpu"}, settings=Settings(seed=1))
    await MegakernelTTSService.shutdown(first)
    down, _ = await play(service, [TTSSpeakFrame("Yes.")])
    assert len(pcm(down)) and first.health()["status"] == "ok"
    await MegakernelTTSService.shutdown(second)
    await MegakernelTTSService.shutdown(other)
    assert first.health()["status"] == other.health()["status"] == "closed"
    assert gc.get_freeze_count() == 0
    # asyncio keeps the threads of its own executor, as many as were busy at once.
    await until_in_loop(lambda: all(t.name.startswith("asyncio_") for t in set(threading.enumerate()) - before))


def test_without_a_warm_up_the_pipeline_loads_and_lets_go():
    service = MegakernelTTSService(model="demo", settings=Settings(voice="max", seed=1))
    asyncio.run(service.set_usable(False))  # as in an earlier pipeline, whose engine died
    down, up = run(service, [TTSSpeakFrame("Yes.")])
    assert len(pcm(down)) and not of(up, ErrorFrame) and service._engine is None


async def test_an_engine_that_died_is_not_handed_out_again():
    dead = await MegakernelTTSService.warmup("demo", device="cpu")
    dead.close()
    fresh = await MegakernelTTSService.warmup("demo", device=None if not torch.cuda.is_available() else "cpu")
    assert fresh is not dead and fresh.health()["status"] == "ok"
    await MegakernelTTSService.shutdown(dead)
    assert fresh.health()["status"] == "ok"
    await MegakernelTTSService.shutdown(fresh)
    assert fresh.health()["status"] == "closed"


# ---------------------------------------------------------------- words


def test_words_come_in_order_and_never_ahead_of_their_audio(engine, monkeypatch):
    """Without the waits of the listener, which a slow machine's words have in their times."""
    monkeypatch.setattr(audio_context, "_LEAST_GAP_S", float("inf"))
    text = "Hello there, how are you today? I am fine, thank you."
    for mode in (SENTENCE, TOKEN):
        down, _ = run(service_of(engine, text_aggregation_mode=mode), turn(*[w + " " for w in text.split()]))
        words = of(down, TTSTextFrame)
        assert " ".join(w.text.strip() for w in words) == text
        assert all(w.metadata["time_is_estimated"] != engine.measures_words for w in words)
        assert [w.pts for w in words] == sorted(w.pts for w in words)
        made = 0.0
        first = words[0].pts
        for frame in down:
            if isinstance(frame, TTSAudioRawFrame):
                made += len(frame.audio) / 2 / frame.sample_rate
            elif isinstance(frame, TTSTextFrame):
                assert (frame.pts - first) / 1e9 <= made + 1e-6


@mostly_in_token_mode
def test_the_transport_gets_the_first_frame_before_pipecat_gets_words(engine, monkeypatch, mode):
    monkeypatch.setattr(audio_context, "_HEAD_START_S", 0.5)  # also enough on a busy machine
    service, output, sent = service_of(engine, text_aggregation_mode=mode), PacedOutput(), []
    add = service.add_word_timestamps

    async def spied(*args, **options) -> None:
        sent.append(time.monotonic())
        await add(*args, **options)

    monkeypatch.setattr(service, "add_word_timestamps", spied)
    run(Pipeline([service, output]), turn("Hello there. "))
    assert output.heard[0][0] < sent[0]


def test_words_wait_as_long_as_their_audio_did(engine, monkeypatch):
    """The LLM pauses for 100 s: what follows is heard after the pause, and its words have times behind it."""
    began, pause = time.monotonic(), []
    monkeypatch.setattr(audio_context, "monotonic", lambda: time.monotonic() + sum(pause))
    heard = Until(lambda down: len(pcm(down)) > 0.3 * 24000 and not pause and (pause.append(100.0) or True))
    frames = [*turn("One two three four. ")[:-1], heard, LLMTextFrame("Five six seven."), *turn()[-1:]]
    down, _ = run(service_of(engine, text_aggregation_mode=TOKEN), frames)
    words = {w.text.strip().lower(): w.pts / 1e9 for w in of(down, TTSTextFrame)}
    spoken = len(pcm(down)) / 24000
    assert words["six"] - words["one"] > 100 - spoken
    assert words["seven."] - words["one"] < 100 + spoken + (time.monotonic() - began)


def test_calls_share_the_voices_pace_and_teach_it_while_they_speak(make, monkeypatch):
    """It has learned by the first pause, long before the end."""
    used, paces, of_voice, add = [], [], SpeechRates.of, AudioContext._send_words

    async def spied(self, words) -> None:
        paces.append(used[-1].seconds)
        await add(self, words)

    monkeypatch.setattr(SpeechRates, "of", lambda self, who: used.append(of_voice(self, who)) or used[-1])
    monkeypatch.setattr(AudioContext, "_send_words", spied)
    monkeypatch.setattr(TTSEngine, "measures_words", False)
    for mode in (TOKEN, TOKEN, SENTENCE):
        down, _ = run(make(mode), turn("One two three four. ", "Five six seven."))
        assert all(frame.metadata["time_is_estimated"] for frame in of(down, TTSTextFrame))
        assert [frame.text.strip() for frame in of(down, TTSTextFrame)][-1] == "seven."
    assert len(used) == 4 and len(set(map(id, used))) == 1, "another call goes on with it"
    assert len(set(paces)) > 4, "it changes within a turn"


async def test_what_stands_between_sentences_is_kept():
    sentences, found = Sentences(aggregation_type=TextType.SENTENCE, language="en"), []
    for token in ("One.", "\n\n", "Two. ", " Three."):
        found += [(sentences.gap, one.text) async for one in sentences.aggregate(token)]
    rest = await sentences.flush()
    assert [*found, (sentences.gap, rest.text)] == [("", "One."), ("\n\n", "\n\nTwo."), ("  ", "Three.")]
    assert [one async for one in sentences.aggregate(" Four")] == []
    await sentences.handle_interruption()
    assert [one.text async for one in sentences.aggregate("\nFive. S")] == ["\nFive."] and sentences.gap == "\n"


@pytest.mark.parametrize("rate", [24000, 16000])
async def test_silence_that_is_cut_at_the_beginning_is_no_words_time(monkeypatch, rate):
    """And words wait while the first audio is too little to begin with."""
    monkeypatch.setattr(audio_context, "_HEAD_START_S", 0.0)
    monkeypatch.setattr(audio_context, "_LEAST_GAP_S", float("inf"))
    sent = []

    async def add(words, context_id, includes_inter_frame_spaces) -> None:
        sent.extend(words)

    service = SimpleNamespace(trims_silence=True, sample_rate=rate, add_word_timestamps=add)
    context, sound = AudioContext(service, "a", None), np.full(24000, 0.1, np.float32)
    context.begin(24000, least_first_s=0.3)
    assert context._to_frame(np.zeros(9600, np.float32)) is None
    assert context._to_frame(sound[:2400]) is None
    await context._send_words([("one", 0.4)])
    assert not sent, "they would come before their sound"
    made = context._to_frame(sound).num_frames / rate
    await context._send_words([("two", 0.9)])
    context.begin(24000)
    await context._send_words([("three", 0.2)])
    assert [word for word, _ in sent] == ["one", "two", "three"]
    assert [at for _, at in sent] == pytest.approx([0.01, 0.51, made + 0.2], abs=1e-3), "10 ms stay"


def test_words_of_many_scripts():
    assert words_of("Well, 3 of us!") == ["Well,", "3", "of", "us!"]
    assert words_of("今天，天气好。Hello 世界") == ["今", "天，", "天", "气", "好。", "Hello", "世", "界"]
    assert words_of("안녕하세요 친구") == ["안녕하세요", "친구"] and not is_unspaced("안녕")


async def test_the_event_loop_computes_no_prompt(engine, monkeypatch):
    """While two services speak. How long the loop stalls is the benchmark's question (measure_pipecat.py)."""
    threads = []
    begin = TTSEngine.begin
    monkeypatch.setattr(TTSEngine, "begin", lambda *a: threads.append(threading.get_ident()) or begin(*a))
    await asyncio.gather(*(play(service_of(engine), [TTSSpeakFrame("How are you today?")]) for _ in range(2)))
    assert len(threads) == 2 and threading.get_ident() not in threads
