"""The demo voice's training: work that goes on over several calls, and labels from phonemes' durations."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "demo_voice"))
import pace
import pitch_phase
import teacher


@pytest.fixture
def numbers(monkeypatch):
    """Phonemes 1 to 9 sound; 16 is silent and 99 a stress mark."""
    known = {k: k for k in range(1, 10)} | {0: 0, 16: 0, 99: None}
    monkeypatch.setattr(teacher, "phone_numbers", lambda: known)


def spoken(durations):
    """A tone where something sounds."""
    n = sum(durations)
    samples = 0.3 * np.sin(np.arange(n) * 0.1).astype(np.float32)
    samples[: durations[0]] = samples[n - durations[-1] :] = 0
    return samples, np.array(durations)


def test_places_and_phonemes_follow_the_durations(numbers):
    ids, words = [0, 1, 2, 16, 99, 3, 0], [(1, 3, 0, 2), (4, 6, 3, 5)]
    durations = [4800, 4800, 4800, 4800, 2400, 7200, 4800]
    samples, place, phone = teacher.utterance("ab cd", [(0, ids, words)], [spoken(durations)], "ada")
    assert len(samples) % 1920 == 0 and len(samples) == 1920 * len(place) == 1920 * len(phone)
    # Speech begins after LEAD: 24,000 samples of it, in 12.5 frames.
    assert place[0] == 0 and (np.diff(place.astype(int)) >= 0).all()
    assert place[7] / 64 == pytest.approx(2.0 + 1920 / 4800, abs=0.1)  # between the words
    assert place[-1] / 64 == pytest.approx(5.9, abs=0.02)  # the end of the text
    assert phone[0].tolist() == [0, 0]
    assert phone[2].tolist() == [1, 1] and phone[4].tolist() == [2, 2]
    assert phone[9].tolist() == [3, 3], "a stress mark's time belongs to the sound after it"
    assert teacher.level(samples / 32768) == pytest.approx(teacher.LEVEL, abs=0.1)


def test_pitch_comes_to_the_same_phase_at_every_frame(fresh_seed):
    """A voice of eight harmonics whose pitch wanders, with a pause. It fades within 8 ms there and at both ends:
    resampling a hard edge overshoots by up to 12 % (Gibbs), however well the phase is kept."""
    rng, n = np.random.default_rng(fresh_seed), 60 * pitch_phase.HOP
    hz = rng.uniform(100, 250) * (1 + 0.1 * np.interp(np.arange(n), np.linspace(0, n, 9), rng.uniform(-1, 1, 9)))
    turns = np.cumsum(hz) / pitch_phase.RATE
    frames = np.arange(n) / pitch_phase.HOP
    loudness = np.interp(frames, [0, 0.1, 24.9, 25, 30, 30.1, 59.9, 60], 0.1 * np.array([0, 1, 1, 0, 0, 1, 1, 0]))
    voice = loudness * sum(np.cos(2 * np.pi * k * turns) / k for k in range(1, 9))
    boundaries = [k for k in range(2, 59) if not 22 < k < 33]

    def phases(samples):
        return [pitch_phase.phase(samples, k * pitch_phase.HOP, hz[k * pitch_phase.HOP]) for k in boundaries]

    before, warped = phases(voice), pitch_phase.in_phase(voice, 60, 400)
    assert np.std(before) > 0.15 and np.abs(phases(warped)).max() < 0.06
    assert len(warped) == n and np.abs(warped).max() < 1.1 * np.abs(voice).max()
    assert np.abs(warped[26 * pitch_phase.HOP : 29 * pitch_phase.HOP]).max() < 1e-4


def test_durations_that_do_not_sum_to_the_sound_are_refused(numbers):
    samples, durations = spoken([4800, 4800, 4800])
    with pytest.raises(ValueError, match="14400 .*14399"):
        teacher.utterance("a", [(0, [0, 1, 0], [(1, 2, 0, 1)])], [(samples, durations - [0, 0, 1])], "ada")


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "state"
    with pytest.raises(RuntimeError):
        with pace.whole(path) as f:
            f.write(b"half")
            raise RuntimeError
    assert not path.exists()
    with pace.whole(path) as f:
        f.write(b"all")
    assert path.read_bytes() == b"all"


def test_a_training_goes_on_where_the_last_call_stopped():
    now = [0.0]
    clock = pace.Pace(seconds=100, minutes=1, clock=lambda: now[0])
    now[0] = 20  # opening the data is not training, but counts for the call
    clock.start(before=50)
    now[0] = 59
    assert clock.trained == 89 and clock.fraction == 0.89 and not clock.call_is_over
    now[0] = 60
    assert clock.call_is_over
    for fraction, status in ((0.9, pace.MORE), (1.0, 0)):
        with pytest.raises(SystemExit) as ended:
            clock.leave(fraction)
        assert ended.value.code == status
