"""espeak-ng through ctypes: text to 22,050 Hz samples, with the times of words and phonemes.

One process per worker: the library is not re-entrant.
"""

import ctypes
import os
import zlib

import numpy as np

# name: (espeak voice, words per minute, pitch 0-99, pitch range 0-99)
SPEAKERS = {
    "ada": ("en-us+ada", 135, 50, 45),
    "max": ("en-us+klatt2", 135, 42, 45),
    "oliver": ("en-gb-x-rp+klatt2", 135, 40, 45),
}
SHARE = (0.36, 0.34, 0.30)
RATE = 22050
WORD, PHONEME = 1, 7


class Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_ms", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),
    ]


_state = {"lib": None, "callback": None, "voice": None}
_samples, _events = [], []


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(Event))
def _callback(wav, count, event):
    if wav and count > 0:
        _samples.append(np.ctypeslib.as_array(wav, (count,)).copy())
    i = 0
    while event[i].type:
        e = event[i]
        if e.type in (WORD, PHONEME):
            _events.append((e.type, e.sample, e.text_position, e.length, e.name))
        i += 1
    return 0


def init(folder):
    """Load the library and the voice data from `folder`."""
    for n in ("libsonic.so.0", "libpcaudio.so.0"):
        ctypes.CDLL(os.path.join(folder, n), mode=ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(os.path.join(folder, "libespeak-ng.so.1"))
    rate = lib.espeak_Initialize(2, 0, folder.encode(), 1)  # 2: synchronous; 1: phoneme events
    assert rate == RATE, rate
    lib.espeak_SetSynthCallback(_callback)
    _state["lib"] = lib


def speak(text, speaker):
    """Samples (int16) and events [(type, sample, text position, length, phoneme)]."""
    lib, (voice, wpm, pitch, spread) = _state["lib"], SPEAKERS[speaker]
    if _state["voice"] != speaker:
        assert lib.espeak_SetVoiceByName(voice.encode()) == 0, voice
        for parameter, value in ((1, wpm), (3, pitch), (4, spread)):
            lib.espeak_SetParameter(parameter, value, 0)
        _state["voice"] = speaker
    _samples.clear()
    _events.clear()
    b = text.encode() + b"\0"
    lib.espeak_Synth(b, ctypes.c_size_t(len(b)), 0, 1, 0, 1, None, None)
    return np.concatenate(_samples) if _samples else np.zeros(0, np.int16), list(_events)


def trim(x, threshold=100):
    """(samples without the silence at both ends, samples cut off in front); None when silent."""
    loud = np.flatnonzero(np.abs(x) > threshold)
    if not len(loud):
        return None, 0
    return x[loud[0] : loud[-1] + 1], int(loud[0])


def alignment(text, events, start, lead_ms, frames, frame_ms=80):
    """What is spoken when: for every frame the character position at its begin, and two phonemes.

    `start` is the sample that was put at `lead_ms`.  The position after the last word is that of
    the end-of-text token, len(text).  Phonemes are small numbers (0: pause) hashed from names.
    """

    def ms(sample):
        return (sample - start) * 1000 / RATE + lead_ms

    words = [(ms(s), p - 1, n) for t, s, p, n, _ in events if t == WORD]
    phones = [(ms(s), name) for t, s, _, _, name in events if t == PHONEME]
    pauses = np.array([t for t, name in phones if name.startswith(b"_")] + [1e9])
    times, chars = [], []
    for i, (t, c, n) in enumerate(words):
        end = pauses[np.searchsorted(pauses, t, "right")]
        stop = c + n
        if i + 1 < len(words):
            end, stop = min(end, words[i + 1][0]), min(stop, words[i + 1][1])
        end = min(end, frames * frame_ms)
        times += [t, max(end, t + 1)]
        chars += [c, max(stop, c)]
    times += [times[-1] + 80 if times else 0]
    chars += [len(text) + 0.9]
    times = np.maximum.accumulate(np.array(times))
    chars = np.maximum.accumulate(np.array(chars, float))
    edges = np.interp(np.arange(frames) * frame_ms, times, chars)
    begin = np.array([t for t, _ in phones] or [0.0])
    ids = [0 if n.startswith(b"_") else 1 + zlib.crc32(n) % 127 for _, n in phones] or [0]
    at = np.arange(frames)[:, None] * frame_ms + np.array([20, 60])[None]
    k = np.searchsorted(begin, at, "right") - 1
    phone = np.where(k >= 0, np.array(ids)[np.maximum(k, 0)], 0)
    return np.round(edges * 64).astype(np.uint16), phone.astype(np.uint8)
