"""What a recogniser hears in the demo voice's speech (Debian's pocketsphinx, US English)."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import soundfile
import soxr

COMMAND = "pocketsphinx_continuous"
INSTALLED = shutil.which(COMMAND) is not None


def heard_words(samples: np.ndarray, sample_rate: int) -> list[str]:
    """Words in fp32 [samples], in order and in lower case."""
    speech = soxr.resample(samples, sample_rate, 16000)
    speech = np.concatenate([np.zeros(3200), 0.6 * speech / np.abs(speech).max(), np.zeros(4800)])
    # Digital silence throws the recogniser's noise estimate off.
    speech += np.random.default_rng(0).standard_normal(len(speech)) * 2e-4
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speech.wav"
        soundfile.write(file, speech, 16000)
        command = [COMMAND, "-infile", str(file), "-logfn", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return re.findall(r"[a-z']+", done.stdout.lower())
