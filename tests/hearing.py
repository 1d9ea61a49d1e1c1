"""When speech sounds, measured by its short-time level: independent of how the package finds it."""

import numpy as np


def spoken(samples: np.ndarray, rate: int, gap_s: float = 0.1, level_db: float = -50) -> list[tuple[float, float]]:
    """Begin and end in seconds of each stretch of speech in fp32 [n]: its RMS over 5 ms is above `level_db`, in dBFS,
    for 20 ms at least. Stretches less than `gap_s` apart are one."""
    size, step = rate // 200, rate // 1000
    power = np.convolve(samples.astype(np.float64) ** 2, np.ones(size) / size, "valid")[::step]
    changes = np.flatnonzero(np.diff(np.concatenate([[False], power > 10 ** (level_db / 10), [False]]).astype(int)))
    spans: list[tuple[float, float]] = []
    for first, stop in changes.reshape(-1, 2).tolist():
        if stop - first >= 16:  # windows, 1 ms apart
            begin, end = first / 1000, (stop + 4) / 1000
            if spans and begin - spans[-1][1] < gap_s:
                begin = spans.pop()[0]
            spans.append((begin, end))
    return spans
