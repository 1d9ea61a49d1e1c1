"""The report of `qwen-megakernel verify`: the comparisons with their bounds, the timings, and the files."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor

from qwen_check.reference import Case
from qwen_megakernel.errors import RequestError

TIE = 1e-5
"""A draw is a tie if its two best logits differ by less than this times the largest logit, or times 1. A tie may go
either way: another order of sums moves logits by up to 2.5e-6 of that (docs/verification.md)."""


def parting(ours: np.ndarray, theirs: np.ndarray) -> tuple[int, int] | None:
    """(frame, group) of the first difference between codes [frames, 16], or None. It is (n, 0) if one ends after n
    equal frames and the other goes on."""
    n = min(len(ours), len(theirs))
    frames, groups = np.nonzero(ours[:n] != theirs[:n])
    if len(frames):
        return int(frames[0]), int(groups[0])
    return None if len(ours) == len(theirs) else (n, 0)


def tie(logits: Tensor) -> tuple[float, float]:
    """(gap, bound) of a draw from its logits [candidates]: the difference between the two best, and what it is below
    for a tie."""
    return abs(float(logits.topk(2).values.diff())), TIE * max(1.0, float(logits.nan_to_num(0.0, 0.0, 0.0).abs().max()))


def new_folder(output: str | None, model: str) -> Path:
    """The folder to write to. It is not made yet. `output`: its path; None: "verify-" and the model's name. Raises
    RequestError: the path is taken."""
    folder = Path(output or f"verify-{Path(model).expanduser().resolve().name}")
    with writing(folder):  # a name may be too long even to look up
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken:
        raise RequestError(
            f"--output: {str(folder)!r} is taken, and nothing is overwritten: name an empty or a new folder"
        )
    return folder


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises RequestError if the code inside cannot write in the folder."""
    try:
        yield
    except (OSError, soundfile.SoundFileError) as error:
        raise RequestError(
            f"--output: cannot write in {str(folder)!r} ({error}); make room there, or name another folder"
        ) from error


class Report:
    """Collects comparisons and timings, prints each at once, and writes the files. Methods that write
    raise RequestError: the folder or a file in it cannot be written."""

    def __init__(self, folder: Path, rate: int, cases: list[Case]):
        """`folder`: is made here if it does not exist. `rate`: sample rate of all samples, in Hz."""
        self._folder = folder
        self._rate = rate
        self.checks: list[dict] = []  # one for each comparison, in the form of report.json
        self.takes: list[dict] = []  # one for each timed utterance, in that form too
        self._pairs: list[dict[str, Any]] = [
            {"request": c.name, "text": c.text, "instruct": c.conditioning.instruct, "kind": kind, "files": {}}
            for kind in ("sampled", "greedy")
            for c in cases
        ]
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):  # an existing folder may be read-only
                pass

    @property
    def failed(self) -> int:
        """How many comparisons failed."""
        return sum(not check["holds"] for check in self.checks)

    def check(self, what: str, figure: str, bound: str, holds: bool) -> None:
        self.checks.append({"what": what, "figure": figure, "bound": bound, "holds": holds})
        print(f"{'ok' if holds else 'FAILS':6} {what:60} {figure:24} {bound}", flush=True)

    def near(self, what: str, ours, theirs, bound: float) -> None:
        """Compare tensors of one shape by their largest difference. A NaN fails."""
        ours, theirs = torch.as_tensor(ours).cpu(), torch.as_tensor(theirs).cpu()
        if ours.shape != theirs.shape:
            self.check(what, f"{list(ours.shape)} and {list(theirs.shape)}", "the same shape", False)
        else:
            figure = float((ours - theirs).abs().max())
            self.check(what, f"{figure:.1e}", f"at most {bound:.1e}", figure <= bound)

    def same_codes(
        self, what: str, ours: np.ndarray, theirs: np.ndarray, decided: Callable[[int, int], Tensor]
    ) -> None:
        """Compare codes [frames, 16] of two implementations that ran freely, up to the first difference. After it, each
        goes on from its own codes. `decided`: returns the logits [candidates] that decided the draw of (frame,
        group)."""
        part = parting(ours, theirs)
        if part is None:
            self.check(what, f"{len(ours)} frames equal", "equal", True)
        else:
            between, bound = tie(decided(*part))
            where = f"frame {part[0]} of {len(ours)} and {len(theirs)} on, group {part[1]}"
            figure = f"differ from {where}, gap {between:.1e} (later frames were not compared)"
            self.check(what, figure, f"equal, or a tie: a gap below {bound:.1e}", between < bound)

    def teacher_forced_codes(self, what: str, ours: np.ndarray, logits: list[Tensor]) -> None:
        """Compare every one of our codes [frames, 16] with the best candidate of a teacher-forced pass. `logits`:
        [frames, candidates] for each code group, computed from our codes."""
        best = torch.stack([group.argmax(-1) for group in logits], dim=1).cpu().numpy()
        parts = np.argwhere(ours != best).tolist()
        if not parts:
            self.check(what, f"{len(ours)} frames equal", "equal", True)
            return
        told = [(*part, *tie(logits[part[1]][part[0]])) for part in parts]
        frame, group, between, bound = next((one for one in told if not one[2] < one[3]), told[0])
        figure = f"{len(told)} of {ours.size} differ; at frame {frame}, group {group}: gap {between:.1e}"
        self.check(what, figure, f"equal, or each a tie: a gap below {bound:.1e}", between < bound)

    def take(self, row: int, by: str, samples: np.ndarray, compute_s: float, ttfc_s: float | None = None) -> None:
        """Record how long an utterance took, and write it as a WAV. `row`: index of its pair. `by`: "ours" or
        "reference". `samples`: fp32 [n]."""
        request, audio_s = self._pairs[row]["request"], len(samples) / self._rate
        if not audio_s:
            self.check(f"{request}: audio of {by}", "none", "some", False)
            return
        rtf = compute_s / audio_s
        take = {"request": request, "by": by, "audio_s": audio_s, "compute_s": compute_s, "rtf": rtf, "ttfc_s": ttfc_s}
        self.takes.append(take)
        ttfc = "" if ttfc_s is None else f", TTFC {1000 * ttfc_s:.1f} ms"
        print(f"time   {request:48} {by:11} {audio_s:.2f} s of audio in {compute_s:.2f} s, RTF {rtf:.3f}{ttfc}")
        self.wav(row, by, samples)

    def wav(self, row: int, by: str, samples: np.ndarray) -> None:
        """Write one side of a pair. Rows of sampled utterances come first, then those of greedy ones."""
        name = f"{row + 1:02}-{by}.wav"
        with writing(self._folder):
            soundfile.write(self._folder / name, samples, self._rate, "PCM_16")
        self._pairs[row]["files"][by] = name

    def write(self, about: dict) -> None:
        """Write report.json and index.html. `about` goes into report.json and holds "model"."""
        told = about | {"checks": self.checks, "takes": self.takes}
        report = json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False)
        # The data are in a script element, which only a "<" can end.
        data = json.dumps({"model": about["model"], "pairs": self._pairs}, allow_nan=False).replace("<", "\\u003c")
        page = Path(__file__).with_name("verify_page.html").read_text(encoding="utf-8")
        with writing(self._folder):
            (self._folder / "report.json").write_text(report, encoding="utf-8")
            (self._folder / "index.html").write_text(page.replace("{{data}}", data), encoding="utf-8")
