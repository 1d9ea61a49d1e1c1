"""The engine's surface: what is said, in what company, and what happens to those who ask wrongly; on the PyTorch
backend and, where there is a GPU for it, on the megakernel."""

import contextlib
import gc
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from callers import say, seeded
from probes import token_count
from serving import slots_taken
from waiting import PATIENCE_S, run_all, run_python, slow_case, until

from qwen_megakernel import (
    BackendError,
    ChunkStream,
    EngineBusy,
    EngineClosed,
    InstructError,
    LanguageError,
    NoWordsError,
    OutOfMemoryError,
    RequestError,
    SamplingParams,
    SpeakerError,
    TextError,
    TextTooLongError,
    TTSEngine,
    VoiceError,
)
from qwen_megakernel.sampling_params import GREEDY

TEXT = "Hello there, how are you today?"


@pytest.fixture(scope="module")
def engine(backend) -> TTSEngine:
    return backend.engine()


def wait_idle(engine: TTSEngine) -> None:
    until(lambda: engine.health()["streams"] == 0)


# ---------------------------------------------------------------- what comes out


def test_joined_chunks_are_the_whole(engine):
    request = {"sampling": seeded(5), "max_frames": 27}
    stream = engine.stream(TEXT, **request)
    chunks = list(stream)
    audio = engine.generate(TEXT, **request)
    assert [len(c.codes) for c in chunks] == [1, 2, 4, 8, 8, 4]
    assert np.array_equal(np.concatenate([c.samples for c in chunks]), audio.samples)
    assert np.array_equal(np.concatenate([c.codes for c in chunks]), audio.codes)
    assert audio.samples.dtype == np.float32 and audio.codes.dtype == np.int64
    assert audio.sample_rate == 24000 and len(audio.samples) == 27 * 1920 and np.abs(audio.samples).max() <= 1
    assert stream.utterance.result().finish_reason == audio.finish_reason == "length"
    assert 0 < audio.ttfc_s <= audio.compute_s and audio.rtf == audio.compute_s / audio.duration_s


def untimed_s(audio) -> float:
    """Seconds before the first chunk that belong to no stage."""
    return audio.ttfc_s - sum(vars(audio.timings).values())


def test_who_reads_the_samples_first_joins_them(engine):
    audio = engine.submit(TEXT, max_frames=3).result(timeout=PATIENCE_S)
    assert [len(part) for part in audio.sound] == [1920] * 3 and audio.duration_s == pytest.approx(0.24)
    parts, samples = list(audio.sound), audio.samples
    assert np.array_equal(samples, np.concatenate(parts)) and audio.samples is samples
    assert len(audio.sound) == 1 and audio.sound[0] is samples, "the parts' memory is free"


def test_every_stage_is_timed(engine):
    whole = engine.generate(TEXT, max_frames=20)
    pieces = engine.submit(max_frames=20)
    pieces.push_text(TEXT)
    pieces.end_text()
    for audio in (whole, pieces.result()):
        stages = vars(audio.timings).values()
        assert len(stages) == 6 and all(seconds >= 0 for seconds in stages)
        assert audio.frames == 20 and audio.lead_s is not None and audio.lead_s < audio.duration_s
    stopped = engine.submit(TEXT)
    stopped.cancel()
    assert stopped.result().timings.tokenise > 0
    assert engine.generate(TEXT, max_frames=1).lead_s is None
    # No stage is missing and none counts twice; a busy machine may stop a thread between two, but not every time.
    until(lambda: abs(untimed_s(engine.generate(TEXT, max_frames=1))) < 0.05)


def test_the_lead_is_what_a_listener_has_left(own_engine, monkeypatch):
    """A frame of 80 ms takes 120 ms or more each time: the listener falls behind by at least 40 ms with each."""
    collect = own_engine.probes.decoder.collect
    monkeypatch.setattr(own_engine.probes.decoder, "collect", lambda: (time.sleep(0.12), collect())[1])  # a slow device
    audio = own_engine.generate(TEXT, max_frames=4, chunk_frames=1)
    # The last chunk comes latest: by 3 delays at least, and not after the utterance's end.
    assert 3 * 0.08 - (audio.compute_s - audio.ttfc_s) <= audio.lead_s < 3 * (0.08 - 0.12) + 1e-3


def test_health_and_metrics_count(own_engine):
    counts = {"streams": 0, "running": 0, "queued": 0, "max_streams": 3, "sustained": 3}
    counts |= {"pages": own_engine.probes.decoder.pages, "pages_reserved": 0, "pages_filled": 0}
    assert own_engine.health() == {"status": "ok", "backend": own_engine.backend} | counts
    own_engine.generate(TEXT, max_frames=7)
    stopped = own_engine.submit(TEXT)
    stopped.cancel()
    stopped.result()
    counts = own_engine.metrics()
    assert (counts["utterances"], counts["length"], counts["cancelled"], counts["failed"]) == (2, 1, 1, 0)
    assert counts["frames"] >= 7 and counts["kernel_faults"] == counts["busy"] == counts["timed_out"] == 0


def test_end_of_speech_ends_it(backend):
    audio = backend.engine(eos_gain=4.0).generate(TEXT, sampling=seeded(0))
    assert audio.finish_reason == "eos" and 2 <= len(audio.codes) < 200
    assert len(audio.samples) == len(audio.codes) * 1920


def test_a_slot_is_used_to_its_last_position_and_text_that_cannot_fit_is_refused_with_the_number(backend):
    with backend.load(max_positions=64, max_streams=1) as engine:
        with pytest.raises(TextTooLongError, match=r"\d+ positions .*64"):
            engine.generate("the quick brown fox jumps over the lazy dog " * 9)
        assert engine.health()["streams"] == 0
        audio = engine.generate("Yes.", non_streaming_mode=False, runaway_guard=False)
        # Prompt: role 3, tags 3, speaker 1, bridge 1, text 1; the frame that the last row yields needs no row.
        assert audio.finish_reason == "length" and len(audio.codes) == 64 - 9 + 1
        assert "its slot is full: the model did not find its end." in audio.why_cut(engine.config.max_frames)
        assert "the 56 frames that the checkpoint allows (max_new_tokens)" in audio.why_cut(56)


# ---------------------------------------------------------------- determinism


def test_the_same_seed_says_the_same_in_any_company(own_engine):
    alone = own_engine.generate(TEXT, sampling=seeded(11), max_frames=30)
    others = [own_engine.submit(f"{TEXT} {n}", sampling=seeded(n), max_frames=40) for n in range(2)]
    beside = own_engine.generate(TEXT, sampling=seeded(11), max_frames=30)
    others[0].cancel()
    after = own_engine.generate(TEXT, sampling=seeded(11), max_frames=30)
    for audio in (beside, after):
        assert np.array_equal(audio.codes, alone.codes) and np.array_equal(audio.samples, alone.samples)
    assert not np.array_equal(own_engine.generate(TEXT, sampling=seeded(12), max_frames=30).codes, alone.codes)


def test_a_fresh_seed_is_reported_and_repeats_and_numpy_numbers_are_numbers(engine):
    first, second = (engine.generate(TEXT, max_frames=12) for _ in range(2))
    assert first.seed != second.seed and not np.array_equal(first.codes, second.codes)
    again = engine.generate(TEXT, max_frames=12, sampling=seeded(first.seed))
    assert again.seed == first.seed and np.array_equal(again.codes, first.codes)
    sampling = SamplingParams(seed=np.int64(4), top_k=np.int32(5), temperature=np.float32(0.5))
    audio = engine.generate(TEXT, sampling=sampling, max_frames=np.int64(3), chunk_frames=np.int64(2))
    assert audio.seed == 4 and len(audio.codes) == 3


def test_greedy_needs_both_switches(engine):
    """As in the reference, do_sample=False leaves codes 1..15 sampled."""
    half = [engine.generate(TEXT, max_frames=10, sampling=SamplingParams(do_sample=False, seed=s)) for s in (1, 2)]
    assert half[0].codes[0, 0] == half[1].codes[0, 0] and not np.array_equal(half[0].codes, half[1].codes)
    full = [engine.generate(TEXT, max_frames=10, sampling=GREEDY) for _ in range(2)]
    assert np.array_equal(full[0].codes, full[1].codes)


# ---------------------------------------------------------------- speakers, languages, layouts


def codes_of(engine, **request) -> bytes:
    return engine.generate(TEXT, sampling=GREEDY, max_frames=8, **request).codes.tobytes()


def test_names_are_known_in_any_case_and_default_to_the_first_speaker(engine):
    assert engine.speakers[0] == "serena" and engine.languages[0] == "auto"
    assert "english" in engine.languages and not any("dialect" in name for name in engine.languages)
    assert codes_of(engine) == codes_of(engine, speaker="SERENA", language="Auto")
    assert codes_of(engine) != codes_of(engine, speaker="")
    assert codes_of(engine, speaker="ryan") != codes_of(engine)
    assert codes_of(engine, language="german") != codes_of(engine)
    for code in ("de", "DE", "de-AT", "de_DE", "de-Latn-DE"):
        assert codes_of(engine, language=code) == codes_of(engine, language="german")


def test_whole_text_is_non_streaming_by_default_and_pushed_text_streams(engine):
    assert codes_of(engine) == codes_of(engine, non_streaming_mode=True)
    assert codes_of(engine) != codes_of(engine, non_streaming_mode=False)
    utterance = say(engine.submit(sampling=GREEDY, max_frames=8), "Hello ", "there, how ar", "e you", " today?")
    assert utterance.result().codes.tobytes() == codes_of(engine, non_streaming_mode=False)


def test_instruct_is_honoured_by_some_and_warned_about_by_others(engine, backend, caplog):
    assert codes_of(engine, instruct="Speak slowly.") == codes_of(engine)
    assert "instruct is ignored" in caplog.text
    if backend.name == "torch":  # the kernel has no such dims
        large = backend.engine(size="tiny-adapter")
        assert codes_of(large, instruct="Speak slowly.") != codes_of(large)
        assert codes_of(large, instruct="") == codes_of(large)
    design = backend.engine("voice_design")
    assert codes_of(design, instruct="A deep voice.") != codes_of(design)


# ---------------------------------------------------------------- refusals


WRONG_CHUNKS = (0, (1, 10**400), [1] * 1001, (), 2.5, "12")


@pytest.mark.parametrize(
    "text, request_, kind, message",
    [
        *[(blank, {}, NoWordsError, "blank") for blank in ("", " \n\t")],
        (b"bytes", {}, TextError, "text"),
        ("\ud800", {}, TextError, "Unicode"),
        (TEXT, {"speaker": "bob"}, SpeakerError, "unknown speaker 'bob'; known: serena, vivian"),
        (TEXT, {"speaker": 3}, SpeakerError, "speaker must be a string, got 3"),
        (TEXT, {"language": "klingon"}, LanguageError, "unknown language 'klingon'; known: auto, chinese"),
        (TEXT, {"language": ""}, LanguageError, "unknown language ''"),
        (TEXT, {"language": "sichuan_dialect"}, LanguageError, "unknown language"),
        (TEXT, {"language": "sv-SE"}, LanguageError, r"unknown language 'sv-SE'; known: auto, chinese \(zh\), "),
        (TEXT, {"language": "-en"}, LanguageError, "unknown language '-en'"),
        (TEXT, {"language": 7}, LanguageError, "language must be a string, got 7"),
        (TEXT, {"instruct": 5}, InstructError, "instruct"),
        *[(TEXT, {"max_frames": wrong}, RequestError, "max_frames") for wrong in (0, 2.0)],
        *[(TEXT, {"chunk_frames": wrong}, RequestError, "chunk_frames") for wrong in WRONG_CHUNKS],
        *[(TEXT, {name: 3}, RequestError, name) for name in ("on_chunk", "on_end", "sampling")],
        (TEXT, {"runaway_guard": "yes"}, RequestError, "runaway_guard"),
        (TEXT, {"non_streaming_mode": 1}, RequestError, "non_streaming_mode"),
        (TEXT, {"trim": "all"}, RequestError, "trim"),
        (None, {"speaker": "bob"}, SpeakerError, "unknown speaker 'bob'"),
        (None, {"language": "klingon"}, LanguageError, "unknown language 'klingon'"),
        (TEXT, {"voice": "serena.wav"}, VoiceError, "a saved voice needs a Base checkpoint"),
        (None, {"non_streaming_mode": True}, RequestError, "layout"),
    ],
)
def test_a_wrong_request_is_refused_and_takes_no_slot(engine, text, request_, kind, message):
    with pytest.raises(kind, match=message) as refused:
        engine.submit(text, **request_)
    assert refused.type is kind
    for call in (engine.generate, engine.stream):
        with pytest.raises(RequestError, match="submit"):
            call(None)
    assert engine.health()["streams"] == 0 and engine.metrics()["failed"] == 0


def test_base_needs_a_voice_and_has_no_speakers(backend):
    base = backend.engine("base")
    with pytest.raises(VoiceError, match="create_voice"):
        base.generate(TEXT)
    with pytest.raises(SpeakerError, match="speakers"):
        base.generate(TEXT, speaker="serena")
    assert base.speakers == ()


@pytest.mark.parametrize(
    "text",
    [
        slow_case("Привет, как дела? Сегодня хорошая погода, и мы идём гулять в парк. " * 2),
        "今天天气很好，我们去公园散步吧。" * 4,
        slow_case("Hello there, how are you? " * 2 + "x" * 400),
        "a\U0001f600" * 100,
    ],
    ids=["russian", "chinese", "a word of 400", "emoji"],
)
def test_every_piece_of_a_long_text_fits_a_slot_and_leaves_room_for_speech(backend, text):
    with backend.probed(max_positions=160) as engine:
        with pytest.raises(TextTooLongError):
            engine.submit(text)
        start, prompts = engine.probes.decoder.start, []
        engine.probes.decoder.start = lambda slot, prompt, *how: (prompts.append(prompt), start(slot, prompt, *how))
        pieces = [str(piece) for piece in engine.pieces(text)]
        assert len(pieces) > 1 and "".join("".join(pieces).split()) == "".join(text.split())
        room = []
        for piece in pieces:
            engine.generate(piece, max_frames=1)  # it is not refused
            room.append(160 - len(prompts[-1].rows) + 1)
            assert room[-1] >= 4 * token_count(engine.model, piece)


def test_text_that_fits_is_one_piece_and_what_no_slot_can_hold_is_refused(backend):
    with backend.load(backend.folder("voice_design"), max_positions=192) as engine:
        assert [str(piece) for piece in engine.pieces(f" {TEXT}\n")] == [TEXT]
        with pytest.raises(TextTooLongError, match="instruct and reference"):
            engine.pieces(TEXT, instruct="Slowly, please. " * 40)
        for wrong, kind in ((" ", TextError), (None, TextError), ("\ud800", TextError)):
            with pytest.raises(kind):
                engine.pieces(wrong)
        with pytest.raises(LanguageError):
            engine.pieces(TEXT, language="klingon")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backend": "fast"}, "backend"),
        ({"backend": "megakernel", "device": "cpu"}, "the megakernel cannot run here: it needs an NVIDIA GPU"),
        *[({"device": wrong}, "device") for wrong in ("tpu9", "", object())],
        ({"dtype": torch.float16}, "dtype"),
        ({"vocoder_dtype": "int8"}, "vocoder_dtype"),
        *[({"max_streams": wrong}, "max_streams") for wrong in (0, 1.5)],
        ({"max_positions": 1}, "max_positions"),
        ({"max_queue": -1}, "max_queue"),
        *[({"queue_timeout": wrong}, "queue_timeout") for wrong in (-1, float("nan"), float("inf"))],
        ({"kept_voices": 0}, "kept_voices"),
        ({"allow_foreign_voice": "yes"}, "allow_foreign_voice"),
    ],
)
def test_what_cannot_be_loaded_says_why(tiny, options, message):
    with pytest.raises(BackendError, match=message):
        TTSEngine.load(tiny("custom_voice"), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(tiny):
    with pytest.raises(BackendError, match="no CUDA GPU"):
        TTSEngine.load(tiny("custom_voice"), device="cuda")


# ---------------------------------------------------------------- cancel, abandon, fail, close


def test_cancel_keeps_what_was_made(own_engine):
    stream = own_engine.stream(TEXT, max_frames=2000, chunk_frames=1)
    first = next(stream)
    stream.utterance.cancel()
    audio = stream.utterance.result(timeout=PATIENCE_S)
    assert audio.finish_reason == "cancelled" and 1 <= len(audio.codes) < 2000
    assert np.array_equal(audio.samples[:1920], first.samples) and len(audio.samples) == 1920 * len(audio.codes)
    wait_idle(own_engine)


def test_an_abandoned_iterator_frees_its_slot(own_engine):
    for started in (True, False):
        stream = own_engine.stream(TEXT, max_frames=2000)
        if started:
            next(stream)
        del stream
        gc.collect()
        wait_idle(own_engine)
    assert own_engine.metrics()["cancelled"] == 2


def test_an_utterance_whose_text_never_came_can_be_cancelled(own_engine):
    utterance = own_engine.submit()
    utterance.push_text("Hel")
    utterance.cancel()
    assert utterance.result(timeout=PATIENCE_S).finish_reason == "cancelled" and len(utterance.result().codes) == 0
    with pytest.raises(RequestError):
        utterance.push_text("lo")
    assert own_engine.health()["streams"] == 0


def test_threads_push_text_one_after_the_other(own_engine, monkeypatch):
    utterance = own_engine.submit()
    pieces = utterance._sequence.input.pieces
    push, inside, most, both = pieces.push, [], [], threading.Event()

    def slowly(text: str) -> torch.Tensor:
        inside.append(text)
        if len(inside) == 2:
            both.set()
        both.wait(0.2)
        most.append(len(inside))
        inside.remove(text)
        return push(text)

    monkeypatch.setattr(pieces, "push", slowly)
    run_all(lambda: utterance.push_text("Hello "), lambda: utterance.push_text("there "))
    utterance.cancel()
    assert most == [1, 1]


def test_an_utterance_that_has_ended_keeps_nothing_of_its_text(own_engine):
    """Who holds it keeps its sound. What was made of the text may have megabytes."""
    with slots_taken(own_engine):
        utterance = own_engine.submit()
        utterance.push_text("Hello there, how are ")
        utterance.push_text("you today? I am well.")
        given = utterance._sequence.input
        tokens = utterance.tokens[:]
        assert given.pieces and not given.rows.empty() and tokens
        utterance.cancel()
        utterance.result(timeout=PATIENCE_S)
        assert given.pieces is None and given.rows.empty()
        assert utterance.tokens == tokens, "they tell words that are still to be told"


def test_a_callback_that_raises_fails_its_own_utterance(own_engine):
    def bad(chunk):
        raise RuntimeError("callback broke")

    other = own_engine.submit(TEXT, sampling=seeded(3), max_frames=20)
    with pytest.raises(RuntimeError, match="callback broke"):
        own_engine.submit(TEXT, on_chunk=bad, max_frames=20).result(timeout=PATIENCE_S)
    assert len(other.result(timeout=PATIENCE_S).codes) == 20
    assert own_engine.health()["status"] == "ok" and own_engine.metrics()["failed"] == 1
    assert len(other.result(timeout=float("inf")).codes) == 20


@pytest.mark.parametrize("how", ["whole", "cancel", "blank", "raise", "close"])
def test_the_end_is_called_once_and_comes_last(own_engine, how):
    said, ended = [], threading.Event()

    def hear(chunk):
        said.append(chunk)
        if how == "raise":
            raise RuntimeError("callback broke")

    def end():
        assert not ended.is_set()
        said.append("end")
        ended.set()
        raise RuntimeError("the end broke too")

    utterance = own_engine.submit(on_chunk=hear, on_end=end, max_frames=2000 if how in ("cancel", "close") else 9)
    if how == "blank":
        for call in (lambda: say(utterance, "  "), lambda: utterance.result(timeout=PATIENCE_S)):
            with pytest.raises(TextError, match="blank"):
                call()
    else:
        say(utterance, TEXT)
    if how == "cancel":
        utterance.cancel()
    if how == "close":
        own_engine.close()
    assert ended.wait(PATIENCE_S) and utterance.done and said[-1] == "end" and said.count("end") == 1
    own_engine.close()


def test_close_keeps_what_was_said_and_refuses_what_comes(backend):
    engine = backend.load(max_streams=2)
    stream = engine.stream(TEXT, max_frames=2000, chunk_frames=1)
    heard = [next(stream) for _ in range(3)]
    engine.close()
    engine.close()
    assert stream.utterance.done
    audio = stream.utterance.result()
    assert audio.finish_reason == "cancelled" and len(audio.codes) >= 3
    assert np.array_equal(audio.samples[: 3 * 1920], np.concatenate([c.samples for c in heard]))
    assert engine.health()["status"] == "closed"
    for call in (lambda: engine.generate(TEXT), lambda: engine.create_voice("x.wav")):
        with pytest.raises(EngineClosed):
            call()
    assert not engine.snapshot().alive


def test_cancelling_in_a_loop_keeps_nobody_from_speaking(own_engine):
    old = own_engine.submit(TEXT, max_frames=1)
    old.result()
    speaking, most = own_engine.submit(TEXT, max_frames=30), 0
    for _ in range(20_000):
        old.cancel()
        most = max(most, own_engine.snapshot().inbox)
    assert most < 5, "what changes nothing wakes nobody"
    for _ in range(20):
        with contextlib.suppress(EngineBusy):
            own_engine.submit().cancel()
    assert speaking.result(timeout=PATIENCE_S).frames == 30


def test_finalizers_may_use_the_engine(own_engine):
    """They run wherever the garbage collector does, in the middle of the engine's own calls too."""

    class Session:
        def __init__(self):
            self.me = self

        def __del__(self):
            own_engine.health()
            own_engine.metrics()

    threshold, held = gc.get_threshold(), [own_engine.submit() for _ in range(11)]
    gc.set_threshold(3)
    try:
        for _ in range(300):
            Session()
            with pytest.raises(EngineBusy):
                own_engine.submit("x")
    finally:
        gc.set_threshold(*threshold)
    for utterance in held:
        utterance.cancel()
    wait_idle(own_engine)


SIGNALS = """
import signal
from qwen_megakernel import EngineBusy, EngineClosed, TTSEngine

engine = TTSEngine.load("demo", backend={backend!r}, max_streams=1, max_queue=2)
utterance = engine.submit("Hello my friend. " * 9)
seen = []

def look(*_):
    seen.append(engine.health()["streams"] + engine.metrics()["busy"])
    utterance.cancel()
    if len(seen) == 100:
        signal.raise_signal(signal.SIGTERM)

def close(*_):
    signal.setitimer(signal.ITIMER_REAL, 0)
    engine.close()
    raise SystemExit(0 if utterance.result().finish_reason == "cancelled" else 3)

signal.signal(signal.SIGALRM, look)
signal.signal(signal.SIGTERM, close)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while True:
    try:
        engine.submit("Yes.").cancel()
    except (EngineBusy, EngineClosed):
        pass
"""


@pytest.mark.slow
def test_signal_handlers_may_use_and_close_the_engine(backend):
    """They interrupt the main thread anywhere, in the middle of the engine's own calls too."""
    run_python(SIGNALS.format(backend=backend.name))


def test_an_end_that_cannot_be_assembled_is_an_error_and_not_a_hang(own_engine, monkeypatch):
    def full(*_parts):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("qwen_megakernel.engine.output.np.frombuffer", full)
        for _ in range(2):
            with pytest.raises(OutOfMemoryError):
                own_engine.generate(TEXT, max_frames=2)
    assert own_engine.generate(TEXT, max_frames=2).frames == 2


def test_two_may_read_one_stream(own_engine):
    stream, got = own_engine.stream(TEXT, max_frames=20), []
    run_all(*[lambda: got.extend(stream)] * 2)
    assert sum(len(chunk.codes) for chunk in got) == 20


def test_an_interrupted_caller_leaves_nothing_running(own_engine, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    utterance = own_engine.submit()
    utterance.push_text(TEXT)
    with monkeypatch.context() as patch:
        patch.setattr("qwen_megakernel.model.prompt.PromptBuilder.build", interrupted)
        patch.setattr("qwen_megakernel.model.prompt_pieces.PromptPieces.end", interrupted)
        for call in (utterance.end_text, lambda: own_engine.generate(TEXT)):
            with pytest.raises(KeyboardInterrupt):
                call()
    with monkeypatch.context() as patch:
        patch.setattr("qwen_megakernel.engine.utterance.Utterance.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            own_engine.generate(TEXT, max_frames=2000)
    wait_idle(own_engine)


def test_a_callback_that_waits_for_its_own_utterance_is_refused(own_engine):
    for wait in (lambda u: u.result(), lambda u: list(ChunkStream(u))):
        held = []

        def tell(_chunk, wait=wait, held=held):
            until(lambda: held)
            wait(held[0])

        held.append(own_engine.submit(TEXT, on_chunk=tell, max_frames=5))
        with pytest.raises(RequestError, match="callback"):
            held[0].result(timeout=PATIENCE_S)
    wait_idle(own_engine)


def test_a_callback_may_wait_for_another_utterance(own_engine):
    said, request = [], {"max_frames": 3}
    own_engine.submit(TEXT, lambda _chunk: said.append(own_engine.generate(TEXT, **request)), **request).result()
    assert [audio.frames for audio in said] == [3, 3]


def test_a_callback_that_exits_ends_its_own_utterance(own_engine):
    with pytest.raises(SystemExit):
        own_engine.submit(TEXT, on_chunk=lambda _chunk: sys.exit(3), max_frames=5).result(timeout=PATIENCE_S)
    assert own_engine.health()["status"] == "ok"
    assert len(own_engine.generate(TEXT, max_frames=3).codes) == 3


@pytest.mark.parametrize("busy", [False, True])
def test_a_dropped_engine_ends_its_thread(backend, busy):
    before = set(threading.enumerate())
    engine = backend.load(max_streams=1)
    engine.generate(TEXT, max_frames=2)
    if busy:
        engine.submit(TEXT)
    mine = set(threading.enumerate()) - before
    assert len(mine) >= 2, "the loop's thread and the watchdog's"
    del engine
    gc.collect()
    for thread in mine:
        thread.join(timeout=PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "s = e.stream(T); next(s)",
        "e.submit(T, on_chunk=lambda c: None)",
        "e.submit(T); import time; time.sleep(0.3); del e",  # as a function's engine is dropped when it returns
    ],
)
def test_the_interpreter_may_exit_while_an_engine_speaks(backend, use):
    load = f"e = TTSEngine.load('demo', backend={backend.name!r})"
    run_python(f"from qwen_megakernel import TTSEngine; T = 'Hello my friend. ' * 9; {load}; {use}")


@pytest.mark.slow
def test_the_interpreter_waits_for_what_a_dropped_engine_frees(backend):
    code = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from probes import probed
class Slow:
    def __del__(self, sleep=time.sleep, write=os.write):
        sleep(0.5)
        write(1, b"freed")
def main():
    engine = probed("demo", backend={backend.name!r}, device={backend.device!r})
    engine.submit("Hello my friend. " * 9)
    engine.probes.decoder.model = Slow()
    del engine.probes
main()
time.sleep(0.3)
"""
    assert run_python(code) == "freed"


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_what_a_listener_does_to_its_chunk_stays_there(own_engine, speed):
    def mute(chunk):
        chunk.samples[:] = 0

    request = {"sampling": seeded(1), "max_frames": 5, "speed": speed}
    audio = own_engine.submit(TEXT, on_chunk=mute, **request).result()
    assert np.array_equal(audio.samples, own_engine.generate(TEXT, **request).samples)


# ---------------------------------------------------------------- other precisions


def test_bfloat16_speaks_on_a_cpu(tiny):
    options = {"device": "cpu", "dtype": torch.bfloat16, "max_streams": 1}
    with TTSEngine.load(tiny("custom_voice", eos_gain=0.0), **options) as engine:
        audio = engine.generate(TEXT, max_frames=5)
    assert audio.samples.dtype == np.float32 and np.isfinite(audio.samples).all() and np.abs(audio.samples).max() > 0


def test_a_bfloat16_vocoder_is_close_to_fp32(capsys):
    said = {}
    for dtype in ("float32", "bfloat16"):
        with TTSEngine.load("demo", device="cpu", max_streams=1, vocoder_dtype=dtype) as engine:
            said[dtype] = engine.generate(TEXT, sampling=seeded(2), max_frames=30)
    assert np.array_equal(said["float32"].codes, said["bfloat16"].codes)
    signal = said["float32"].samples
    snr = 10 * np.log10((signal**2).mean() / ((said["bfloat16"].samples - signal) ** 2).mean())
    with capsys.disabled():
        print(f" [bfloat16 vocoder, demo voice: SNR {snr:.1f} dB] ", end="")
    assert snr > 25
