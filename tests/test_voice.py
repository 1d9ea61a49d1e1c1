"""Reference audio and voices."""

import dataclasses
import io
import json
import os
import pickle
import struct
import tracemalloc

import av
import numpy as np
import pytest
import soundfile
import torch
from cases import reference_audio
from safetensors.torch import save_file

from qwen_megakernel import AudioError, RequestError, SpeakerError, TTSEngine, Voice, VoiceError
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.model import audio_file
from qwen_megakernel.model.recording import load_recording
from qwen_megakernel.model.vocoder import TorchVocoder
from qwen_megakernel.model.voice import log_mel, mean_vector
from qwen_megakernel.sampling_params import GREEDY

RATE = 24000


def read_samples(audio, rate: int) -> np.ndarray:
    return load_recording(audio, rate, trim=False).samples


def test_files_and_arrays_are_the_same_audio(tmp_path):
    samples = reference_audio()
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    assert np.array_equal(read_samples(tmp_path / "a.wav", RATE), samples)
    assert np.array_equal(read_samples(str(tmp_path / "a.wav"), RATE), read_samples((samples, RATE), RATE))


def test_channels_are_averaged_and_integers_scaled(tmp_path):
    left, right = reference_audio(seed=1), reference_audio(seed=2)
    stereo = np.stack([left, right], axis=1)
    assert np.allclose(read_samples((stereo, RATE), RATE), (left + right) / 2, atol=1e-7)
    pcm = (left * 32767).astype(np.int16)
    soundfile.write(tmp_path / "a.flac", pcm, RATE)
    assert np.allclose(read_samples((pcm, RATE), RATE), pcm / 32768.0, atol=1e-7)
    assert np.array_equal(read_samples(tmp_path / "a.flac", RATE), read_samples((pcm, RATE), RATE))


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_other_rates_are_resampled(rate):
    tone = np.sin(2 * np.pi * 440 * np.arange(int(1.1 * rate)) / rate).astype(np.float32)
    ours = read_samples((tone, rate), RATE)
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
        (sound(1), "ref_audio"),
        ("nowhere.wav", "'nowhere.wav'"),
        ("https://a.b/me.wav", "'https://a.b/me.wav' is an address: download the recording, and give its file"),
        ("a\0b", "no recording 'a.*b'"),
        (".", r"^\.: .*folder"),
        ("/dev/zero", "^/dev/zero: "),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_audio_that_cannot_be_used_is_refused_with_the_reason(audio, message):
    with pytest.raises(AudioError, match=message):
        read_samples(audio, RATE)


def test_a_small_file_of_many_channels_takes_no_more_than_its_sound(tmp_path):
    path, tone = tmp_path / "wide.flac", 0.3 * np.sin(np.arange(48_000 * 30) / 50)
    soundfile.write(path, np.repeat(tone[:, None], 8, axis=1), 48_000)
    tracemalloc.start()
    try:
        samples = read_samples(path, 24_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(samples) == 24_000 * 30 and peak < 30e6  # decoded at once it is 46 MB, and as much again
    assert np.array_equal(read_samples(path, 48_000), soundfile.read(path, dtype="float32")[0].mean(axis=1))


@pytest.mark.parametrize(
    "name, content",
    [("text.wav", b"not audio"), ("empty.wav", b""), ("voice.pkl", pickle.dumps({"a": 1})), ("a.raw", bytes(100_000))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_no_audio_are_refused(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AudioError, match=name):
        read_samples(tmp_path / name, RATE)


# ---------------------------------------------------------------- files as the world makes them


def encoded(kind: str, codec: str | None, *, video: str = "", seconds: float = 1.0, channels: int = 2) -> bytes:
    """A tone in a container, by PyAV. `codec` None: without sound. `video`: the codec of a picture beside it."""
    file, rate, layout = io.BytesIO(), 48_000, "mono" if channels == 1 else "stereo"
    with av.open(file, "w", format=kind) as container:
        sound = codec and container.add_stream(codec, rate=rate, layout=layout)
        if video:
            pictures = container.add_stream(video, rate=10)
            pictures.width = pictures.height = 64
            pictures.pix_fmt = "yuv420p"
            for shade in range(10):
                image = np.full((64, 64, 3), shade, np.uint8)
                container.mux(pictures.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            container.mux(pictures.encode(None))
        if sound:
            frame = av.AudioFrame.from_ndarray(np.repeat(tone(seconds, rate), channels)[None], "s16", layout)
            frame.sample_rate, frame.pts = rate, 0
            resampler = av.AudioResampler(sound.codec_context.format, layout, rate)
            for piece in (*resampler.resample(frame), *resampler.resample(None), None):
                container.mux(sound.encode(piece))
    return file.getvalue()


def tone(seconds: float, rate: int) -> np.ndarray:
    return (9000 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)).astype(np.int16)


@pytest.mark.parametrize(
    "kind, codec, video",
    [
        ("ipod", "aac", ""),  # a phone's M4A
        ("ipod", "alac", ""),
        ("adts", "aac", ""),
        ("webm", "libopus", ""),  # what browsers record
        ("ogg", "libopus", ""),
        ("mp3", "libmp3lame", ""),
        ("mp4", "aac", "mpeg4"),
        ("webm", "libopus", "libvpx"),
        ("mov", "pcm_s16be", "mpeg4"),
        ("wav", "pcm_u8", ""),
        ("matroska", "pcm_u8", ""),
    ],
)
def test_recordings_of_phones_and_browsers_are_read(kind, codec, video, tmp_path):
    path = tmp_path / "me"
    path.write_bytes(encoded(kind, codec, video=video))
    samples, expected = read_samples(path, RATE), tone(1, RATE) / 32768
    assert len(samples) == pytest.approx(RATE, abs=2048), "and a coder's delay at most"
    spectrum = np.abs(np.fft.rfft(samples[4000:20_000]))
    assert spectrum.argmax() * RATE / 16_000 == pytest.approx(440, abs=2)
    assert samples[4000:20_000].std() == pytest.approx(expected.std(), rel=0.07)  # LAME takes 5 % off


def test_what_ffmpeg_reads_is_bounded(tmp_path, monkeypatch):
    path, decoded = tmp_path / "me.webm", []
    path.write_bytes(encoded("webm", "libopus", seconds=70, channels=1))
    monkeypatch.setattr(audio_file, "_mean", lambda frame: decoded.append(frame.samples))
    with pytest.raises(AudioError, match=r"me\.webm .*0\.5 to 60 seconds"):
        read_samples(path, RATE)
    assert sum(decoded) < 61 * 48_000
    for name, value, words in (
        ("MAX_CHANNELS", 1, "at most 1 channels, found 2"),
        ("RATES", range(4000, 8001), "the sample rate must be 4000 to 8000 Hz, got 48000"),
        ("_CODECS", "aac", "sound in opus is not taken: convert the file to WAV"),
        ("_MAX_BYTES", 99, "a recording's file has at most 99 bytes, this one has"),
        ("find_spec", lambda _name: None, r"expected WAV, .* need the package av: pip install -e '.\[serve\]', or"),
    ):
        path.write_bytes(encoded("webm", "libopus"))
        with monkeypatch.context() as patch, pytest.raises(AudioError, match=words):
            patch.setattr(audio_file, name, value)
            read_samples(path, RATE)


def test_a_file_opens_no_other_file(tmp_path):
    (tmp_path / "me.aac").write_bytes(encoded("adts", "aac"))
    lists = {
        "a.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1.0,\n{tmp_path}/me.aac\n#EXT-X-ENDLIST\n",
        "a.txt": f"ffconcat version 1.0\nfile {tmp_path}/me.aac\n",
        "a.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n",
    }
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(AudioError, match=f"{name}: .*WAV, FLAC"):
            read_samples(tmp_path / name, RATE)


def test_broken_recordings_are_refused_in_one_sentence(tmp_path):
    m4a, aac = encoded("ipod", "aac"), encoded("adts", "aac")
    for content, words in (
        (b"", "me: the file is empty: record it again"),
        (m4a[: len(m4a) // 2], "me: cannot be read as audio: expected a whole file in WAV"),
        (aac[:5000] + b"\xff" * 999 + aac[6000:], "me: the recording is damaged or cut off after 0.* seconds: record"),
        (encoded("mp4", None, video="mpeg4"), "me: expected sound, found video: give a recording with sound"),
        (encoded("ipod", "aac", seconds=0.2), "me must last 0.5 to 60 seconds, got 0.2"),
        (encoded("wav", "pcm_s16le")[:30], "me: cannot be read as audio"),
    ):
        (tmp_path / "me").write_bytes(content)
        with pytest.raises(AudioError, match=words) as error:
            read_samples(tmp_path / "me", RATE)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFFF])
@pytest.mark.parametrize("chunk", [b"", b"LIST\x05\0\0\0notes\0"])
@pytest.mark.parametrize("backend", ["libsndfile", "FFmpeg"])
def test_a_wav_without_a_length_is_read_to_its_end(size, chunk, backend, tmp_path, monkeypatch):
    sound, length = tone(1.5, RATE), struct.pack("<I", size)
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    path = tmp_path / "streamed.wav"
    path.write_bytes(b"RIFF" + length + b"WAVE" + fmt + chunk + b"data" + length + sound.tobytes())
    if backend == "FFmpeg":
        monkeypatch.setattr(audio_file, "_by_libsndfile", refuse)
    assert np.array_equal(read_samples(path, RATE), sound / np.float32(32768))


def refuse(*_args):
    raise soundfile.SoundFileRuntimeError("not this one")


def test_a_flac_without_a_length_is_read_to_its_end(tmp_path):
    flac = bytearray(encoded("flac", "flac"))
    flac[21] &= 0xF0
    flac[22:26] = bytes(4)  # the number of samples; 0: not known
    (tmp_path / "a.flac").write_bytes(flac)
    assert np.allclose(read_samples(tmp_path / "a.flac", 48_000), tone(1, 48_000) / 32768, atol=1e-4)


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


def test_a_voice_does_not_take_the_place_of_a_device(voices, tmp_path):
    os.mkfifo(tmp_path / "v.safetensors")
    with pytest.raises(VoiceError):
        voices["icl"].save(tmp_path / "v.safetensors")
    assert (tmp_path / "v.safetensors").is_fifo()


@pytest.mark.parametrize("kind", ["xvector", "icl"])
def test_a_saved_voice_speaks_the_same(kind, voices, base, tmp_path):
    voices[kind].save(tmp_path / "v.safetensors")
    loaded = Voice.load(tmp_path / "v.safetensors")
    assert loaded.ref_text == voices[kind].ref_text and loaded.fingerprint == voices[kind].fingerprint
    said = [base.generate("Hello there.", voice=v, sampling=GREEDY, max_frames=12) for v in (voices[kind], loaded)]
    assert np.array_equal(said[0].codes, said[1].codes) and np.array_equal(said[0].samples, said[1].samples)


def test_a_loaded_voice_stays_whatever_is_written_over_its_file(voices, tmp_path):
    path = tmp_path / "ben.safetensors"
    voices["icl"].save(path)
    voice = Voice.load(path)
    path.write_bytes(bytes(path.stat().st_size))  # were it mapped and the new file shorter, the process would end
    assert voice.digest == voices["icl"].digest


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


def test_a_doctored_voice_is_refused(voices, base):
    codes = voices["icl"].ref_codes.clone()
    codes[0, 0] = 10**6
    with pytest.raises(RequestError, match="voice"):
        base.generate("Hello.", voice=dataclasses.replace(voices["icl"], ref_codes=codes))


FORMAT = {"format": "qwen_megakernel.voice.1"}
VECTOR = torch.zeros(64)


@pytest.mark.parametrize(
    "tensors, metadata",
    [
        ({"speaker_embedding": VECTOR}, {"format": "something else"}),
        ({"other": VECTOR}, FORMAT),
        ({"speaker_embedding": VECTOR / 0}, FORMAT),
        ({"speaker_embedding": VECTOR, "ref_codes": torch.zeros(3, 16)}, FORMAT | {"ref_text": "x"}),
        ({"speaker_embedding": VECTOR, "ref_codes": torch.zeros(3, 16, dtype=torch.int64)}, FORMAT),
        *(
            ({"speaker_embedding": VECTOR}, FORMAT | words)
            for words in (
                {"notes": "no JSON"},
                {"notes": '{"a": 1}'},
                {"notes": "[1]"},
                {"notes": '["\\u001b[2J"]'},  # words that a terminal should not show
                {"notes": "[" * 100_000},
                {"notes": json.dumps(["x" * 301])},
                {"notes": json.dumps(["x"] * 51)},
                {"fingerprint": "\x1b[2J"},
                {"fingerprint": "0" * 65},
            )
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_files_that_are_no_voice_are_refused(tensors, metadata, tmp_path):
    save_file(tensors, tmp_path / "v.safetensors", metadata)
    with pytest.raises(VoiceError, match=r"v\.safetensors"):
        Voice.load(tmp_path / "v.safetensors")


def test_pickles_huge_files_and_none_are_refused(tmp_path):
    (tmp_path / "v.pt").write_bytes(pickle.dumps({"speaker_embedding": 1}))
    (tmp_path / "big").write_bytes(bytes(5 << 20))
    for name, words in (("v.pt", "cannot be read"), ("big", "at most"), ("nowhere", "cannot be read")):
        with pytest.raises(RequestError, match=words):
            Voice.load(tmp_path / name)


def test_a_voice_that_cannot_be_written_or_made_is_an_error_of_ours(voices, base, tmp_path, tiny, engine_for):
    with pytest.raises(RequestError, match="cannot be written"):
        voices["icl"].save(tmp_path / "nowhere" / "v.safetensors")
    with pytest.raises(AudioError):
        base.create_voice((reference_audio() * np.float32(1e30), RATE))


@pytest.mark.parametrize("text", [b"hi", "\ud800", "x" * 20_000])
def test_a_transcript_that_cannot_be_one_is_refused(base, text):
    with pytest.raises(RequestError, match="ref_text|Unicode"):
        base.create_voice((reference_audio(), RATE), text)


def test_a_blank_transcript_is_none(base):
    alone = base.create_voice((speech(), RATE))
    for text in ("", " \n", [" "]):
        voice = base.create_voice([(speech(), RATE)] if isinstance(text, list) else (speech(), RATE), text)
        assert voice.ref_text is None and voice.digest == alone.digest
    assert base.create_voice([(speech(), RATE)] * 2, ["", "it says this"]).ref_text == "it says this"


def test_a_list_of_one_recording_is_that_recording(base):
    alone = base.create_voice((speech(), RATE), "it says this")
    for text in ("it says this", ["it says this"]):
        assert base.create_voice([(speech(), RATE)], text).digest == alone.digest


WRONG_VECTORS = None, np.zeros(64, np.float32), VECTOR.bfloat16(), VECTOR / 0, torch.zeros(64, device="meta")
WRONG_CODES = None, [[1] * 16], torch.zeros(3, 16), torch.zeros(0, 16, dtype=torch.int64)


@pytest.mark.parametrize(
    "change",
    [
        *[{"speaker_embedding": wrong} for wrong in WRONG_VECTORS],
        *[{"ref_codes": wrong} for wrong in WRONG_CODES],
        *[{"ref_text": wrong} for wrong in (None, 5, "\ud800")],
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


# ---------------------------------------------------------------- what is wrong with a recording


def speech(seconds: float = 2.0, seed: int = 0) -> np.ndarray:
    """Like speech as far as levels go: sound with pauses, 60 dB below it."""
    samples = reference_audio(seconds, seed=seed)
    loud = np.arange(len(samples)) * 9 // len(samples) % 2 == 0
    return (samples * np.where(loud, 1.0, 1e-3)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return 1e-5 * np.random.default_rng(1).standard_normal(int(seconds * RATE)).astype(np.float32)


def test_silent_ends_are_cut_with_a_margin_and_told():
    audio = np.concatenate([silence(0.8), speech(), silence(0.5)])
    cut = load_recording((audio, RATE), RATE, trim=True)
    start = int(0.7 * RATE)
    assert np.array_equal(cut.samples[: 2 * RATE], audio[start : start + 2 * RATE]), "nothing of the sound is gone"
    assert cut.notes == ("1.1 s of silence were cut from its ends",)
    whole = load_recording((audio, RATE), RATE, trim=False)
    assert np.array_equal(whole.samples, audio) and not whole.notes


def test_what_can_be_heard_is_not_cut():
    soft = np.concatenate([0.01 * speech(0.5), speech(1.0)])  # 40 dB below the rest
    assert np.array_equal(load_recording((soft, RATE), RATE, trim=True).samples, soft)


def test_a_word_between_long_silence_is_too_short():
    audio = np.concatenate([silence(1), sound(0.2), silence(1)])
    with pytest.raises(AudioError, match=r"silence .*0\.5 to 60 seconds, got 0\.40"):
        load_recording((audio, RATE), RATE, trim=True)
    assert len(load_recording((audio, RATE), RATE, trim=False).samples) == len(audio)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_floats_in_the_range_of_int16_are_scaled_and_told(kind, tmp_path):
    audio = speech()
    large = (audio / np.abs(audio).max() * 20_000).astype(kind)
    soundfile.write(tmp_path / "a.wav", large, RATE, subtype="FLOAT")
    for given in ((large, RATE), (np.stack([large, large], axis=1), RATE), tmp_path / "a.wav"):
        recording = load_recording(given, RATE, trim=True)
        assert recording.notes == ("its samples were in the range of int16, so they were divided by 32,768",)
        assert np.allclose(recording.samples, large / 32768, atol=1e-6)


@pytest.mark.parametrize("peak", [2.5, 40, 40_000, 2.0**31, 1e300])
def test_samples_of_an_unknown_range_are_refused(peak):
    audio = speech().astype(np.float64)
    audio *= peak / np.abs(audio).max()
    with pytest.raises(AudioError, match="-1 to 1, .*peak"):
        load_recording((audio, RATE), RATE, trim=True)
    hot = load_recording((1.9 / peak * audio, RATE), RATE, trim=True)
    assert np.abs(hot.samples).max() == pytest.approx(1.9) and not hot.notes


@pytest.mark.parametrize("quieter", [1.0, 0.3])
def test_clipping_is_told_with_its_share_of_the_samples(quieter):
    audio = speech()
    clipped = np.clip(audio, -0.1, 0.1)
    (note,) = load_recording((quieter * clipped, RATE), RATE, trim=True).notes
    share = float(note.partition(" %")[0])
    assert "are clipped: record it again, more quietly" in note
    assert share == pytest.approx(100 * np.mean(np.abs(audio) >= 0.1), rel=0.4)
    assert not load_recording((audio, RATE), RATE, trim=True).notes


@pytest.mark.parametrize("below_db, told", [(10, True), (40, False)])
def test_noise_is_told_where_it_is_loud(below_db, told):
    audio = speech()
    level = np.sqrt(np.mean(audio[: RATE // 5] ** 2)) * 10 ** (-below_db / 20)
    noisy = audio + level * np.random.default_rng(1).standard_normal(len(audio))
    notes = load_recording((noisy, RATE), RATE, trim=True).notes
    assert [("its quiet parts are only 1" in note) for note in notes] == [True] * told


# ---------------------------------------------------------------- several recordings


def test_silent_ends_are_no_part_of_a_voice(base):
    """And one recording without such ends is the reference's own voice, which tests/test_oracle.py compares."""
    plain = base.create_voice((speech(), RATE), "it says this")
    padded = base.create_voice((np.concatenate([silence(0.8), speech(), silence(0.7)]), RATE), "it says this")
    kept = base.create_voice((np.concatenate([silence(0.8), speech(), silence(0.7)]), RATE), "it says this", trim=False)
    assert plain.digest == base.create_voice((speech(), RATE), "it says this", trim=False).digest
    assert abs(len(padded.ref_codes) - len(plain.ref_codes)) <= 3 and len(kept.ref_codes) >= len(plain.ref_codes) + 18
    assert not plain.notes and padded.notes == ("1.3 s of silence were cut from its ends",) and not kept.notes


def test_the_vector_of_several_recordings_is_between_theirs(base):
    audios = [(speech(2.0, seed), RATE) for seed in range(3)]
    vectors = torch.stack([base.create_voice(audio).speaker_embedding for audio in audios])
    voice = base.create_voice(audios)
    norms = vectors.norm(dim=1)
    mean = (vectors / norms[:, None]).mean(0)
    assert torch.allclose(voice.speaker_embedding, mean / mean.norm() * norms.mean(), atol=1e-6)
    assert voice.ref_codes is None and voice.fingerprint == base.create_voice(audios[0]).fingerprint


def test_loud_vectors_count_no_more_than_others():
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0])
    assert torch.allclose(mean_vector([a, b]), torch.tensor([2**0.5, 2**0.5]))
    assert mean_vector([a]) is a
    with pytest.raises(AudioError):
        mean_vector([a, -a])


def test_the_codes_are_those_of_the_recording_with_a_text(base):
    audios = [(speech(seconds), RATE) for seconds in (1.0, 2.0)]
    for texts, of in (("it says this", 0), (["it says this", None], 0), ([None, "it says this"], 1)):
        voice = base.create_voice(audios, texts)
        assert torch.equal(voice.ref_codes, base.create_voice(audios[of], "it says this").ref_codes)
        assert voice.ref_text == "it says this"


@pytest.mark.parametrize(
    "audio, text, kind, message",
    [
        ([], None, AudioError, "made from 1 to 10 recordings, got 0"),
        ([(speech(), RATE)] * 11, None, AudioError, "made from 1 to 10 recordings, got 11"),
        ([(speech(), RATE), (silence(1), RATE)], None, AudioError, "recording 2 of 2: ref_audio is silent"),
        ([(speech(), RATE), (sound(0.2), RATE)], None, AudioError, "recording 2 of 2: ref_audio must last"),
        ([(speech(), RATE)] * 2, ["a", "b"], VoiceError, "only one recording may have a text, but 2 have"),
        ([(speech(), RATE)] * 2, ["a"], VoiceError, "ref_text has 1 entries for 2 recordings"),
        ([(speech(), RATE)] * 2, [None, "x" * 10_001], VoiceError, "ref_text must say what .* got 10001"),
        ([0.1, 0.2], None, AudioError, "recording 1 of 2: ref_audio"),
        ((speech(), RATE), ["a"], VoiceError, "ref_text is a list, but ref_audio is not"),
    ],
)
def test_recordings_that_make_no_voice_are_refused(base, audio, text, kind, message):
    with pytest.raises(kind, match=message):
        base.create_voice(audio, text)
    with pytest.raises(RequestError, match="trim .*True or False"):
        base.create_voice(audio, text, trim=1)


def test_notes_name_their_recording_and_are_saved_with_the_voice(base, tmp_path, caplog):
    caplog.set_level("INFO", "qwen_megakernel")
    padded = np.concatenate([silence(0.8), speech(), silence(0.7)])
    voice = base.create_voice([(speech(), RATE), (padded, RATE)])
    assert voice.notes == ("recording 2 of 2: 1.3 s of silence were cut from its ends",)
    assert voice.notes[0] in caplog.text
    voice.save(tmp_path / "v.safetensors")
    assert Voice.load(tmp_path / "v.safetensors").notes == voice.notes
    assert dataclasses.replace(voice, notes=()).digest == voice.digest, "they change nothing that is said"
    save_file({"speaker_embedding": VECTOR}, tmp_path / "v.safetensors", FORMAT | {"fingerprint": "0123"})
    assert Voice.load(tmp_path / "v.safetensors").notes == (), "of an older version"


# ---------------------------------------------------------------- on another checkpoint


@pytest.fixture(scope="module")
def custom(tiny, engine_for):
    """1.7B's shape: it takes instruct."""
    return engine_for(tiny("custom_voice", size="tiny-adapter", eos_gain=0.0), allow_foreign_voice=True)


@pytest.fixture(scope="module")
def base_voice(tiny, engine_for) -> Voice:
    return engine_for(tiny("base", size="tiny-adapter", eos_gain=0.0)).create_voice((speech(), RATE), "it says this")


@pytest.mark.parametrize("instruct", [None, "Slowly, with a smile."])
def test_a_foreign_voice_stands_where_a_named_speaker_stands(custom, instruct):
    """With the speaker's own row as its vector it is that speaker, code by code."""
    tensors = Checkpoint.open(custom.model).talker(torch.device("cpu"), torch.float32)
    row = tensors["talker.model.codec_embedding.weight"][custom.config.talker.speakers["ryan"]]
    ryan = Voice(row.clone(), None, None, "of a Base checkpoint")
    request = {"instruct": instruct, "sampling": GREEDY, "max_frames": 12}
    expected = custom.generate("Hello there.", speaker="ryan", **request)
    assert np.array_equal(custom.generate("Hello there.", voice=ryan, **request).codes, expected.codes)
    assert not np.array_equal(custom.generate("Hello there.", speaker="serena", **request).codes, expected.codes)


def test_of_a_foreign_voice_the_vector_alone_is_used_and_instruct_shapes_it(custom, base_voice):
    alone = dataclasses.replace(base_voice, ref_codes=None, ref_text=None)
    request = {"sampling": GREEDY, "max_frames": 12}
    with_reference, without = (custom.prompt("Hello there.", voice=v) for v in (base_voice, alone))
    assert torch.equal(with_reference.rows, without.rows)
    said = [custom.generate("Hello there.", voice=v, **request) for v in (base_voice, alone)]
    assert np.array_equal(said[0].samples, said[1].samples)
    shaped = custom.generate("Hello there.", voice=base_voice, instruct="Whisper.", **request)
    assert not np.array_equal(said[0].codes, shaped.codes)


def test_a_foreign_voice_is_told_once(tiny, base_voice, caplog):
    model = tiny("custom_voice", size="tiny-adapter", eos_gain=0.0)
    with TTSEngine.load(model, device="cpu", max_streams=1, allow_foreign_voice=True) as engine:
        for _ in range(2):
            engine.request(voice=base_voice)
    assert caplog.text.count("The reference implementation does not do that, and we have not listened to it") == 1


def test_the_option_allows_nothing_else(tiny, engine_for, custom, base_voice):
    narrow = dataclasses.replace(base_voice, speaker_embedding=base_voice.speaker_embedding[:48].clone())
    hidden, options = custom.config.talker.stack.hidden_size, {"allow_foreign_voice": True}
    other_base = engine_for(tiny("base", size="tiny-adapter", seed=3), **options)
    design = engine_for(tiny("voice_design", size="tiny-adapter"), **options)
    for engine, request, kind, message in (
        (custom, {"voice": narrow}, VoiceError, f"vector has 48 numbers, but this checkpoint needs {hidden}: make"),
        (custom, {"speaker": "ryan"}, SpeakerError, "speaker='ryan' and voice= both say who speaks"),
        (other_base, {}, VoiceError, "another checkpoint"),
        (design, {}, VoiceError, "needs a Base checkpoint; this one is voice_design$"),
    ):
        with pytest.raises(kind, match=message):
            engine.generate("Hello.", **({"voice": base_voice} | request))
