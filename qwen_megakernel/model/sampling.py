"""Logits -> a code: the sampler.

The order of steps is the one that transformers' generate builds for `qwen_tts` 0.1.1 (tests/test_sampling.py compares
them): for code 0 repetition penalty, minimum length, suppressed ids; then for every code temperature, top-k (ties with
the k-th stay), top-p, and one draw.

Draws are counter-based: the noise of a candidate depends on (seed, frame, code group, candidate id) alone. So a
sequence's codes do not depend on what runs beside it, or on how often anything else drew. The noise is Gumbel's, so
that argmax(logits + noise) is a draw from softmax(logits) (Maddison et al., "A* Sampling", 2014). It is built from IEEE
add, multiply and divide alone, each rounded once, which every device can repeat bit for bit.

Settings that differ from request to request may be Python numbers, or tensors with their values on the device. The bits
are the same. Nothing here waits for a device, so a captured CUDA graph can read such tensors anew in every replay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from qwen_megakernel.checkpoint.config import MIN_FRAMES, TalkerConfig
from qwen_megakernel.sampling_params import SamplingParams

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_LN2 = math.log(2.0)

_T = TypeVar("_T")


def filled(setting: _T | None) -> _T:
    """A setting of a request: `SamplingParams.over` has left no None."""
    assert setting is not None
    return setting


def key_schedule(seed: int) -> list[tuple[int, int]]:
    """The two 32-bit keys of every Philox round, from a seed of 64 bits (low word first)."""
    key0, key1 = seed & _MASK, seed >> 32
    return [(key0 + n * _KEY_INCREMENTS[0] & _MASK, key1 + n * _KEY_INCREMENTS[1] & _MASK) for n in range(_ROUNDS)]


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], keys: Sequence[tuple[int, int]] | Tensor) -> Tensor:
    """First word of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). The counter is
    four int64 tensors that hold 32-bit words and broadcast; the result holds such words too. `keys`: `key_schedule` of
    the seed, or the same as int64 [10, 2] on the counter's device."""
    a, b, c, d = counter
    for key0, key1 in keys:
        # 64-bit products wrap in int64; only their bits matter.
        first, second = a * _ROUND_MULTIPLIERS[0], c * _ROUND_MULTIPLIERS[1]
        a, b, c, d = (
            (second >> 32 & _MASK) ^ b ^ key0,
            second & _MASK,
            (first >> 32 & _MASK) ^ d ^ key1,
            first & _MASK,
        )
    return a


def _minus_log(x_minus_1: Tensor, exponent: Tensor | int) -> Tensor:
    """-log((1 + x_minus_1) * 2**exponent), |x_minus_1| <= 1/2, by the series of atanh in fp32."""
    s = x_minus_1 / (x_minus_1 + 2.0)
    square = s * s
    series = torch.full_like(square, 1.0 / 17.0)
    for denominator in (15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * square + 1.0 / denominator
    return -(exponent * _LN2 + s * series * 2.0)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x > 0 as (mantissa - 1, exponent) with the mantissa in [0.75, 1.5)."""
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F400000) >> 23  # 0x3F400000 is 0.75
    return (bits - (exponent << 23)).view(torch.float32) - 1.0, exponent.float()


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """32-bit words (int64) -> standard Gumbel noise, fp32.

    The noise is -log(-log(1 - v)) with v = (bits + 1/2) / 2**32. The winners of a draw have a small v, so small v's
    keep full resolution: log(1 - v) is computed from v itself where 1 - v would round.
    """
    v = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    mantissa, exponent = _split(1.0 - v)
    small = v < 0.5
    exponential = _minus_log(torch.where(small, -v, mantissa), exponent.masked_fill(small, 0.0))
    return _minus_log(*_split(exponential))


def gumbel_noise(seed: int, frame: int, groups: range, vocab_size: int, device: torch.device) -> Tensor:
    """Noise of every candidate of some code groups of one frame: fp32 [len(groups), vocab_size]."""
    candidate = torch.arange(vocab_size, device=device)[None]
    group = torch.arange(groups.start, groups.stop, device=device)[:, None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return gumbel_from_bits(philox((candidate, group, zero + frame, zero), key_schedule(seed)))


@dataclass(frozen=True)
class Draw:
    """How one kind of code is drawn: the code 0 settings or the `subtalker_*` ones."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float

    @classmethod
    def code0(cls, p: SamplingParams) -> "Draw":
        return cls(filled(p.do_sample), filled(p.temperature), filled(p.top_k), filled(p.top_p))

    @classmethod
    def predictor(cls, p: SamplingParams) -> "Draw":
        do_sample, temperature = filled(p.subtalker_dosample), filled(p.subtalker_temperature)
        return cls(do_sample, temperature, filled(p.subtalker_top_k), filled(p.subtalker_top_p))

    @property
    def shape(self) -> tuple[bool, int, bool]:
        """The settings that decide which steps a draw takes. A captured graph is bound to them, and to nothing else of
        a draw."""
        return (True, self.top_k, self.top_p < 1.0) if self.do_sample else (False, 0, False)

    @property
    def numbers(self) -> tuple[float, float]:
        """The numbers that those steps compute with: 1 / temperature, and the probability that top-p may leave out."""
        # The reciprocal, because torch rounds a division differently on a GPU and on a CPU. The kernel does the same.
        return 1.0 / self.temperature, 1.0 - self.top_p

    def filtered(self, logits: Tensor, numbers: Sequence[float | Tensor] | None = None) -> Tensor:
        """Temperature, top-k and top-p: logits fp32 [vocab] -> fp32 [vocab] with -inf where an id is out. `numbers`: a
        request's own as fp32 [] each, for any draw of this `shape`; None takes this draw's."""
        scale, left_out = numbers or self.numbers
        logits = logits * scale
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < kth, -math.inf)
        if self.top_p < 1.0:
            ascending, order = logits.sort()
            out = ascending.softmax(-1).cumsum(-1) <= left_out
            out[-1:].fill_(False)
            logits = logits.masked_fill(torch.zeros_like(out).scatter(0, order, out), -math.inf)
        return logits

    def __call__(self, logits: Tensor, noise: Tensor | None, numbers: Sequence[float | Tensor] | None = None) -> Tensor:
        """Draw one id, int64 []. `noise` is Gumbel's, fp32 [vocab]. Without `do_sample` it is not read, and the id is
        the likeliest one, the lowest of a tie. `numbers`: as `filtered` takes them."""
        if self.do_sample:
            assert noise is not None
            logits = self.filtered(logits, numbers) + noise
        return logits.argmax(-1)


class Code0Rules:
    """The rules for code 0's logits, as in the reference implementation: repetition penalty, minimum length, suppressed
    ids. Holds the history of one sequence. Its tensors are written in place, because a captured graph knows them by
    their address."""

    def __init__(self, config: TalkerConfig, repetition_penalty: float, device: torch.device):
        ids = torch.arange(config.vocab_size, device=device)
        self._eos = ids == config.codec_eos_id
        self._suppressed = (ids >= config.first_suppressed_id) & ~self._eos
        self._seen = torch.zeros_like(self._eos)
        self._penalty, self._reciprocal = torch.empty(2, dtype=torch.float32, device=device).unbind()
        self.restart(repetition_penalty)

    def restart(self, repetition_penalty: float) -> None:
        """Begin a sequence: no code 0 has been drawn yet."""
        self._seen.zero_()
        self._penalty.fill_(repetition_penalty)
        self._reciprocal.fill_(1.0 / repetition_penalty)

    def __call__(self, logits: Tensor, frame: int | Tensor) -> Tensor:
        """Logits fp32 [vocab] -> fp32 [vocab]. An id that was drawn before has the penalty applied once. End of speech
        is barred before `MIN_FRAMES` frames; tags and speakers are barred always. `frame` counts from 0."""
        penalised = torch.where(logits < 0, logits * self._penalty, logits * self._reciprocal)
        barred = self._suppressed | (self._eos & (frame < MIN_FRAMES))
        return torch.where(self._seen, penalised, logits).masked_fill(barred, -math.inf)

    def remember(self, code0: Tensor) -> None:
        """Add a code 0, int64 [], to the history."""
        self._seen.index_fill_(0, code0[None], True)
