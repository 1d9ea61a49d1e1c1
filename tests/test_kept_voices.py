"""What does not depend on the text is computed once per voice, and changes nothing."""

import dataclasses
import gc
import threading

import numpy as np
import pytest
import torch
from callers import say, voice_of
from waiting import PATIENCE_S, until

from qwen_megakernel import SamplingParams
from qwen_megakernel.model.vocoder import TorchVocoder

TEXT = "Hello there, how are you today?"


@pytest.fixture
def base(backend):
    with backend.probed(backend.folder("base"), max_streams=3, kept_voices=4) as engine:
        yield engine


def forget(engine) -> None:
    """Others take its place among the four that are kept."""
    for _ in range(4):
        engine.generate(TEXT, voice=voice_of(engine, 2), max_frames=1)


def work(engine, monkeypatch) -> dict[str, int]:
    """Counts frames that the vocoder decodes."""
    vocoder, done = engine.probes.vocoder, {"frames": 0}
    listen, speak = vocoder.listen, "follow" if vocoder.follows else "push"
    inner = getattr(vocoder, speak)

    def listened(slot, portion):
        done["frames"] += 0 if isinstance(vocoder, TorchVocoder) else len(portion.codes)  # whose listen() pushes
        listen(slot, portion)

    def spoken(slots, *args):
        done["frames"] += args[1] * len(slots) if speak == "follow" else args[0].shape[0] * args[0].shape[1]
        return inner(slots, *args)

    monkeypatch.setattr(vocoder, "listen", listened)
    monkeypatch.setattr(vocoder, speak, spoken)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("frames", [0, 3, 20, 60])
@pytest.mark.parametrize("non_streaming_mode", [False, True])
def test_the_kept_path_says_what_the_first_one_said(base, frames, non_streaming_mode):
    """More and less reference than text; byte for byte."""
    voice = voice_of(base, frames)
    request = {"voice": voice, "non_streaming_mode": non_streaming_mode, "max_frames": 30}
    first = base.generate(TEXT, sampling=SamplingParams(seed=1), **request)
    base.generate("Another text in between.", sampling=SamplingParams(seed=2), **request)
    kept = base.generate(TEXT, sampling=SamplingParams(seed=1), **request)
    assert base.snapshot().kept_prefixes == 1
    forget(base)
    again = base.generate(TEXT, sampling=SamplingParams(seed=1), **request)
    for audio in (kept, again):
        assert np.array_equal(audio.codes, first.codes) and np.array_equal(audio.samples, first.samples)


def test_the_reference_goes_through_the_vocoder_once(base, monkeypatch):
    voice, done = voice_of(base, 60), work(base, monkeypatch)
    for expected in (60 + 5, 5, 5):
        before = done["frames"]
        base.generate(TEXT, voice=voice, max_frames=5)
        assert done["frames"] - before == expected
    copy = dataclasses.replace(voice, ref_codes=voice.ref_codes.clone())
    before = done["frames"]
    base.generate(TEXT, voice=copy, max_frames=5)
    assert done["frames"] - before == 5, "a voice is what it sounds like, wherever it was loaded from"


def test_eight_at_once_and_other_languages_decode_the_reference_once(backend, monkeypatch):
    with backend.probed(backend.folder("base"), max_streams=8) as engine:
        voice, done = voice_of(engine, 60), work(engine, monkeypatch)
        languages = ["auto", "german", "english", "auto"] * 2
        said = [engine.submit(TEXT, voice=voice, language=language, max_frames=5) for language in languages]
        assert all(utterance.result(timeout=PATIENCE_S).frames == 5 for utterance in said)
        assert done["frames"] == 60 + 8 * 5


def test_who_waits_for_the_decode_of_another_goes_on_when_that_is_cancelled(base, monkeypatch):
    voice, listen = voice_of(base, 200), base.probes.vocoder.listen
    begun, cancelled = threading.Event(), threading.Event()

    def listen_slowly(*args) -> None:
        begun.set()
        cancelled.wait(PATIENCE_S)
        listen(*args)

    monkeypatch.setattr(base.probes.vocoder, "listen", listen_slowly)
    first, second = (base.submit(TEXT, voice=voice, max_frames=5, sampling=SamplingParams(seed=1)) for _ in range(2))
    assert begun.wait(PATIENCE_S)
    first.cancel()
    cancelled.set()
    said = second.result(timeout=PATIENCE_S)
    again = base.generate(TEXT, voice=voice, max_frames=5, sampling=SamplingParams(seed=1))
    assert first.result().finish_reason == "cancelled" and np.array_equal(said.samples, again.samples)


def test_pieces_and_whole_texts_share_what_is_kept(base, monkeypatch):
    voice, done = voice_of(base, 60), work(base, monkeypatch)
    whole = base.generate(TEXT, voice=voice, max_frames=5, sampling=SamplingParams(seed=1))
    utterance = say(base.submit(voice=voice, max_frames=5, sampling=SamplingParams(seed=1)), TEXT)
    assert np.array_equal(utterance.result().codes, whole.codes) and done["frames"] == 60 + 5 + 5


@pytest.mark.slow
def test_other_voices_languages_and_texts_are_not_mixed_up(base):
    one = voice_of(base, 20)
    vector, codes = torch.randn_like(one.speaker_embedding), one.ref_codes.clone()
    codes[3, 7] += 1 if codes[3, 7] == 0 else -1
    others = [
        {"voice": dataclasses.replace(one, speaker_embedding=vector)},
        {"voice": dataclasses.replace(one, ref_codes=codes)},
        {"voice": dataclasses.replace(one, ref_text="another text of it")},
        {"voice": dataclasses.replace(one, ref_codes=None, ref_text=None)},
        {"voice": one, "language": "german"},
    ]
    request = {"sampling": SamplingParams(seed=1), "max_frames": 12}
    expected = []
    for other in others:
        forget(base)
        expected.append(base.generate(TEXT, **other, **request))
    assert len({audio.samples.tobytes() for audio in expected}) == len(others)
    base.generate(TEXT, voice=one, **request)
    for _ in range(2):
        for other, before in zip(others, expected, strict=True):
            assert np.array_equal(base.generate(TEXT, **other, **request).samples, before.samples)


def test_a_voice_that_was_written_to_is_another_voice(base):
    voice = voice_of(base, 20)
    request = {"voice": voice, "sampling": SamplingParams(seed=1), "max_frames": 12}
    before = base.generate(TEXT, **request)
    voice.speaker_embedding.neg_()
    after = base.generate(TEXT, **request)
    forget(base)
    assert not np.array_equal(before.codes, after.codes)
    assert np.array_equal(base.generate(TEXT, **request).codes, after.codes)


def test_few_voices_are_kept_whoever_holds_utterances_that_have_ended(base):
    held = []
    for _ in range(7):
        held.append(base.submit(TEXT, voice=voice_of(base, 10), max_frames=2))
        held[-1].result()
    gc.collect()
    until(lambda: base.snapshot().kept_prefixes == 4)  # the engine's thread lets go of an utterance in its own time
    assert base.snapshot().kept_openings == base.snapshot().kept_references == 4
    assert all(utterance.result().frames == 2 for utterance in held)


@pytest.mark.slow
def test_one_voice_speaks_on_several_engines_at_once(backend):
    with backend.probed(backend.folder("base")) as first, backend.load(backend.folder("base")) as second:
        voice = voice_of(first, 20)
        request = {"voice": voice, "sampling": SamplingParams(seed=5), "max_frames": 20}
        said = [engine.submit(TEXT, **request) for engine in (first, second) for _ in range(4)]
        said = [utterance.result(timeout=PATIENCE_S) for utterance in said]
    assert all(np.array_equal(audio.codes, said[0].codes) for audio in said)
    assert all(np.array_equal(audio.samples, said[0].samples) for audio in said)


def test_after_a_fault_nothing_kept_is_trusted(base):
    base.generate(TEXT, voice=voice_of(base, 10), max_frames=2)
    assert base.snapshot().kept_prefixes == 1
    base.probes.decoder.recover()
    assert base.snapshot().kept_prefixes == 0


def test_named_speakers_share_their_opening_too(backend):
    with backend.load(kept_voices=1) as engine:
        request = {"speaker": "ryan", "language": "english", "sampling": SamplingParams(seed=8), "max_frames": 20}
        kept = [engine.generate(TEXT, **request) for _ in range(2)][1]
        engine.generate(TEXT, speaker="ryan", language="german", max_frames=1)  # takes its place
        assert np.array_equal(engine.generate(TEXT, **request).samples, kept.samples)
