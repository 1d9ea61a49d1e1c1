"""Reference audio and voices."""

import dataclasses
import pickle
import tracemalloc

import numpy as np
import pytest
import soundfile
import torch
from cases import reference_audio
from safetensors.torch import save_file

from qwen_megakernel import AudioError, RequestError, Voice, VoiceError
from qwen_megakernel.checkpoint.config import GREEDY
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.model.vocoder import TorchVocoder
from qwen_megakernel.model.voice import load_audio, log_mel

RATE = 24000


def test_files_and_arrays_are_the_same_audio(tmp_path):
    samples = reference_audio()
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    assert np.array_equal(load_audio(tmp_path / "a.wav", RATE), samples)
    assert np.array_equal(load_audio(str(tmp_path / "a.wav"), RATE), load_audio((samples, RATE), RATE))


def test_channels_are_averaged_and_integers_scaled(tmp_path):
    left, right = reference_audio(seed=1), reference_audio(seed=2)
    stereo = np.stack([left, right], axis=1)
    assert np.allclose(load_audio((stereo, RATE), RATE), (left + right) / 2, atol=1e-7)
    pcm = (left * 32767).astype(np.int16)
    soundfile.write(tmp_path / "a.flac", pcm, RATE)
    assert np.allclose(load_audio((pcm, RATE), RATE), pcm / 32768.0, atol=1e-7)
    assert np.array_equal(load_audio(tmp_path / "a.flac", RATE), load_audio((pcm, RATE), RATE))


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_other_rates_are_resampled(rate):
    tone = np.sin(2 * np.pi * 440 * np.arange(int(1.1 * rate)) / rate).astype(np.float32)
    ours = load_audio((tone, rate), RATE)
    expected = np.sin(2 * np.pi * 440 * np.arange(len(ours)) / RATE)
    assert len(ours) == np.ceil(len(tone) * RATE / rate)
    assert np.abs(ours - expected)[2000:-2000].max() < 1e-3


def sound(seconds: float, rate: int = RATE) -> np.ndarray:
    return reference_audio(seconds, rate)


@pytest.mark.parametrize(
    "audio, message",
    [
        ((sound(0.2), RATE), "must last 0.5 to 60 seconds, got 0.20"),
        ((np.zeros(0, np.float32), RATE), "must last"),
        ((np.ones(3600 * 8000, np.int8), 8000), "must last 0.5 to 60 seconds, got 3600.00"),
        ((np.zeros(RATE, np.float32), RATE), "silent"),
        ((np.full(RATE, np.nan, np.float32), RATE), "NaN"),
        ((sound(1), 0), "sample rate"),
        ((sound(1), 24000.5), "sample rate"),
        ((sound(1).reshape(10, 10, -1), RATE), r"\[n\] or \[n, channels\]"),
        ((sound(1)[None], RATE), r"\[n\] or \[n, channels\]"),
        ((np.array(["a"] * RATE), RATE), "floating or signed"),
        (sound(1), "ref_audio must be a path or"),
        ("nowhere.wav", "nowhere.wav: cannot be read as audio"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_audio_that_cannot_be_used_is_refused_with_the_reason(audio, message):
    with pytest.raises(AudioError, match=message):
        load_audio(audio, RATE)


def test_a_small_file_of_many_channels_takes_no_more_than_its_sound(tmp_path):
    path, tone = tmp_path / "wide.flac", 0.3 * np.sin(np.arange(48_000 * 30) / 50)
    soundfile.write(path, np.repeat(tone[:, None], 8, axis=1), 48_000)
    tracemalloc.start()
    try:
        samples = load_audio(path, 24_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(samples) == 24_000 * 30 and peak < 30e6  # decoded at once it is 46 MB, and as much again
    assert np.array_equal(load_audio(path, 48_000), soundfile.read(path, dtype="float32")[0].mean(axis=1))


def test_files_that_are_no_audio_are_refused(tmp_path):
    (tmp_path / "text.wav").write_text("not audio")
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "voice.pkl").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "headerless.raw").write_bytes(bytes(100_000))
    for name in ("text.wav", "empty.wav", "voice.pkl", "headerless.raw"):
        with pytest.raises(AudioError, match=name):
            load_audio(tmp_path / name, RATE)
    soundfile.write(tmp_path / "hour.wav", np.ones(3600 * 4000, np.int16), 4000)
    with pytest.raises(AudioError, match="must last"):
        load_audio(tmp_path / "hour.wav", RATE)


def test_log_mel_has_a_frame_per_256_samples():
    assert log_mel(torch.randn(10_000), 128, RATE).shape == (128, 10_000 // 256)


# ---------------------------------------------------------------- voices


@pytest.fixture(scope="module")
def base(tiny, engine_for):
    return engine_for(tiny("base", eos_gain=0.0))


@pytest.fixture(scope="module")
def voices(base) -> dict[str, Voice]:
    audio = (reference_audio(), RATE)
    return {"xvector": base.create_voice(audio), "icl": base.create_voice(audio, "this is the text of it")}


def test_a_voice_has_one_code_row_per_frame_of_its_audio(voices):
    assert voices["icl"].ref_codes.shape == (int(np.ceil(1.7 * 12.5)), 16)
    assert voices["xvector"].ref_codes is None
    assert torch.equal(voices["icl"].speaker_embedding, voices["xvector"].speaker_embedding)


@pytest.mark.parametrize("kind", ["xvector", "icl"])
def test_a_saved_voice_speaks_the_same(kind, voices, base, tmp_path):
    voices[kind].save(tmp_path / "v.safetensors")
    loaded = Voice.load(tmp_path / "v.safetensors")
    assert loaded.ref_text == voices[kind].ref_text and loaded.fingerprint == voices[kind].fingerprint
    said = [base.generate("Hello there.", voice=v, sampling=GREEDY, max_frames=12) for v in (voices[kind], loaded)]
    assert np.array_equal(said[0].codes, said[1].codes) and np.array_equal(said[0].samples, said[1].samples)


def test_reference_audio_is_context_and_is_cut_by_exact_count(voices, base):
    """The vocoder hears the reference first; what is returned has exactly the new frames."""
    audio = base.generate("Hello there.", voice=voices["icl"], sampling=GREEDY, max_frames=9)
    assert audio.codes.shape == (9, 16) and len(audio.samples) == 9 * 1920
    tensors = Checkpoint.open(base.model).vocoder(torch.device("cpu"), torch.float32)
    vocoder = TorchVocoder(base.config.codec.vocoder, tensors, slots=2)
    whole = vocoder.push([0], torch.cat([voices["icl"].ref_codes, torch.from_numpy(audio.codes)])[None])[0]
    cold = vocoder.push([1], torch.from_numpy(audio.codes)[None])[0]
    assert np.abs(audio.samples - whole[-9 * 1920 :].numpy()).max() <= 2e-5
    assert np.abs(audio.samples - cold.numpy()).max() > 1e-3


def test_a_voice_of_another_checkpoint_is_refused(voices, tiny, engine_for):
    other = engine_for(tiny("base", seed=3))
    with pytest.raises(RequestError, match="another checkpoint"):
        other.generate("Hello.", voice=voices["xvector"])


def test_a_doctored_voice_is_refused(voices, base):
    codes = voices["icl"].ref_codes.clone()
    codes[0, 0] = 10**6
    with pytest.raises(RequestError, match="broken voice"):
        base.generate("Hello.", voice=dataclasses.replace(voices["icl"], ref_codes=codes))


@pytest.mark.parametrize(
    "tensors, metadata",
    [
        ({"speaker_embedding": torch.zeros(64)}, {"format": "something else"}),
        ({"other": torch.zeros(64)}, {"format": "qwen_megakernel.voice.1"}),
        ({"speaker_embedding": torch.full((64,), torch.nan)}, {"format": "qwen_megakernel.voice.1"}),
        (
            {"speaker_embedding": torch.zeros(64), "ref_codes": torch.zeros(3, 16)},
            {"format": "qwen_megakernel.voice.1", "ref_text": "x"},
        ),
        (
            {"speaker_embedding": torch.zeros(64), "ref_codes": torch.zeros(3, 16, dtype=torch.int64)},
            {"format": "qwen_megakernel.voice.1"},
        ),
    ],
)
def test_files_that_are_no_voice_are_refused(tensors, metadata, tmp_path):
    save_file(tensors, tmp_path / "v.safetensors", metadata)
    with pytest.raises(RequestError, match="voice"):
        Voice.load(tmp_path / "v.safetensors")


def test_pickles_and_huge_files_are_refused(tmp_path):
    (tmp_path / "v.pt").write_bytes(pickle.dumps({"speaker_embedding": 1}))
    with pytest.raises(RequestError, match="cannot be read"):
        Voice.load(tmp_path / "v.pt")
    (tmp_path / "big").write_bytes(bytes(5 << 20))
    with pytest.raises(RequestError, match="at most"):
        Voice.load(tmp_path / "big")
    with pytest.raises(RequestError, match="cannot be read"):
        Voice.load(tmp_path / "nowhere")


def test_only_base_checkpoints_make_voices(tiny, engine_for):
    with pytest.raises(RequestError, match="Base checkpoint; this one is custom_voice"):
        engine_for(tiny("custom_voice")).create_voice((reference_audio(), RATE))


def test_a_voice_that_cannot_be_written_or_made_is_an_error_of_ours(voices, base, tmp_path, tiny, engine_for):
    with pytest.raises(RequestError, match="cannot be written"):
        voices["icl"].save(tmp_path / "nowhere" / "v.safetensors")
    with pytest.raises(AudioError, match="out of range"):
        base.create_voice((reference_audio() * np.float32(1e30), RATE))


@pytest.mark.parametrize("text", ["  ", b"hi", "\ud800", "x" * 20_000])
def test_a_transcript_that_cannot_be_one_is_refused(base, text):
    with pytest.raises(RequestError, match="ref_text|Unicode"):
        base.create_voice((reference_audio(), RATE), text)


@pytest.mark.parametrize(
    "change",
    [
        {"speaker_embedding": None},
        {"speaker_embedding": np.zeros(64, np.float32)},
        {"speaker_embedding": torch.zeros(64, dtype=torch.bfloat16)},
        {"speaker_embedding": torch.full((64,), torch.nan)},
        {"speaker_embedding": torch.zeros(64, device="meta")},
        {"ref_codes": torch.zeros(3, 16)},
        {"ref_codes": torch.zeros(0, 16, dtype=torch.int64)},
        {"ref_codes": [[1] * 16]},
        {"ref_codes": None},
        {"ref_text": None},
        {"ref_text": 5},
        {"ref_text": "\ud800"},
    ],
    ids=str,
)
def test_a_broken_voice_is_refused_by_name_and_not_saved(voices, base, change, tmp_path):
    broken = dataclasses.replace(voices["icl"], **change)
    for use in (lambda: base.generate("Hello.", voice=broken), lambda: broken.save(tmp_path / "v.safetensors")):
        with pytest.raises(RequestError, match="broken voice|Unicode"):
            use()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [5, None, b"x", "/tmp/\0"])
def test_what_is_no_path_is_no_voice(path, voices):
    with pytest.raises(VoiceError):
        Voice.load(path)
    with pytest.raises(VoiceError):
        voices["icl"].save(path)
