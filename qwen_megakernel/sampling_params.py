"""SamplingParams: how a request draws its codes."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_megakernel.errors import SamplingError

_WHOLE = (int, np.integer)
_REAL = (float, np.floating, *_WHOLE)


@dataclass(frozen=True)
class SamplingParams:
    """How codes are drawn. `None` takes the value from the checkpoint's generation_config.json.

    The names are those of the `qwen_tts` package; `subtalker_*` concern codes 1..15, the others code 0.

    Args:
        do_sample: False takes the most likely code 0 (set `subtalker_dosample=False` too for greedy speech).
        temperature: 0.001 to 1000; its reciprocal multiplies the logits in fp32.
        top_k: keep the k most likely ids and every tie with the k-th, at most 2**31 - 1; 0 keeps all.
        top_p: in (0, 1]; keep the smallest set of ids that holds this probability.
        repetition_penalty: 0.001 to 1000; applied once to every distinct code 0 spoken so far.
        seed: 0 <= seed < 2**64; the same request with the same seed gives the same codes.
            None draws a fresh one, which the result reports.

    Raises:
        SamplingError: a value outside its range.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    subtalker_dosample: bool | None = None
    subtalker_temperature: float | None = None
    subtalker_top_k: int | None = None
    subtalker_top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(name: str, kind: tuple, ok: Callable[[Any], bool], wanted: str) -> None:
            value = getattr(self, name)
            if value is None:
                return
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, kind) or not ok(value):
                raise SamplingError(f"{name} must be {wanted}, got {value!r}")
            object.__setattr__(self, name, int(value) if kind is _WHOLE else float(value))

        for name in ("do_sample", "subtalker_dosample"):
            flag = getattr(self, name)
            if flag is not None and not isinstance(flag, (bool, np.bool_)):
                raise SamplingError(f"{name} must be True or False, got {flag!r}")
        for name in ("temperature", "subtalker_temperature", "repetition_penalty"):
            wanted = "a number in 0.001..1000"
            if name != "repetition_penalty":
                wanted += " (at 0.001 speech is all but greedy)"
            check(name, _REAL, lambda v: 0.001 <= v <= 1000, wanted)
        for name in ("top_p", "subtalker_top_p"):
            check(name, _REAL, lambda v: 0 < v <= 1, "in (0, 1]")
        for name in ("top_k", "subtalker_top_k"):
            check(name, _WHOLE, lambda v: 0 <= v < 2**31, "an integer in 0 (keep all)..2**31-1")
        check("seed", _WHOLE, lambda v: 0 <= v < 2**64, "an integer in 0..2**64-1")

    @classmethod
    def for_both(
        cls,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
    ) -> "SamplingParams":
        """The same temperature, top_k and top_p for code 0 and for codes 1..15. Only code 0 has a penalty. Raises
        SamplingError: a value outside its range."""
        draw: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        of_others = {f"subtalker_{name}": value for name, value in draw.items()}
        return cls(**draw, **of_others, repetition_penalty=repetition_penalty, seed=seed)

    def over(self, defaults: "SamplingParams", seed: int | None = None) -> "SamplingParams":
        """These settings, with every None taken from `defaults`, and a seed that is still missing from `seed`."""
        filled = copy.copy(self)  # not `replace`, which would check every value again, for each request
        values = vars(filled)
        values.update({name: getattr(defaults, name) for name, value in values.items() if value is None})
        values["seed"] = seed if filled.seed is None else filled.seed
        return filled


GREEDY = SamplingParams(do_sample=False, subtalker_dosample=False)
"""The most likely code everywhere; what parity tests compare."""
