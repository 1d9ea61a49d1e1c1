"""Reference audio -> `Voice`: a speaker vector, and with a transcript the codes of the audio itself.

Cloning needs a Base checkpoint. The speaker vector comes from the checkpoint's ECAPA-TDNN over a mel spectrogram
(Desplanques et al., 2020; layer by layer after qwen_tts 0.1.1's Qwen3TTSSpeakerEncoder). The codes come from the speech
tokenizer's encoder half, which is transformers' Mimi.

Audio and voice files are data from outside. libsndfile decodes audio, whose length is bounded before. Voices are
safetensors; nothing is ever unpickled.
"""

import hashlib
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qwen_megakernel.checkpoint.codec_config import CodecConfig
from qwen_megakernel.checkpoint.config import SpeakerEncoderConfig
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.errors import AudioError, CheckpointError, RequestError, VoiceError
from qwen_megakernel.model.text import check_unicode

MIN_SECONDS, MAX_SECONDS = 0.5, 60.0
"""Length of reference audio. Less than that holds hardly a word for the speaker vector; 60 s are 750 of 2,048 rows."""

_FORMAT = "qwen_megakernel.voice.1"
_MAX_VOICE_BYTES = 4 << 20
_MAX_REF_TEXT = 10_000  # characters; a minute of speech has a thousand
_MAX_CHANNELS = 16
_BLOCK = 1 << 16  # samples a channel, decoded at once
_RATES = range(4_000, 384_001)
_SILENCE = 1e-4  # peak; -80 dBFS

RefAudio = str | Path | tuple[np.ndarray, int]


@dataclass(frozen=True, eq=False)
class Voice:
    """A cloned voice: what a Base checkpoint needs to speak like reference audio. Made by `TTSEngine.create_voice`.

    Attributes:
        speaker_embedding: fp32 [hidden], on the CPU.
        ref_codes: int64 [frames, groups], on the CPU; None: the vector alone is used.
        ref_text: what the reference audio says; None exactly where `ref_codes` is.
        fingerprint: of the checkpoint that made the voice.
    """

    speaker_embedding: Tensor
    ref_codes: Tensor | None
    ref_text: str | None
    fingerprint: str

    @classmethod
    def nobody(cls, hidden_size: int, fingerprint: str) -> "Voice":
        """A vector of zeros, for speech where the voice makes no difference."""
        return cls(torch.zeros(hidden_size), None, None, fingerprint)

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal for voices with equal tensors and text. Every call computes them anew, in a tenth of
        a millisecond, because tensors can be written to."""
        parts = [self.speaker_embedding] if self.ref_codes is None else [self.speaker_embedding, self.ref_codes]
        digest = hashlib.blake2b((self.ref_text or "").encode(), digest_size=16)
        for part in parts:
            digest.update(part.contiguous().numpy().tobytes())
        return digest.digest()

    def check(self) -> None:
        """Check that this is a voice of some checkpoint.

        Raises:
            VoiceError: a tensor has another dtype, shape or device or is not finite, or there are codes without text or
                text without codes.
            TextError: the text is not valid Unicode.
        """
        vector, codes, text = self.speaker_embedding, self.ref_codes, self.ref_text
        ok = isinstance(vector, Tensor) and vector.dtype == torch.float32 and vector.ndim == 1
        ok = ok and vector.device.type == "cpu" and bool(vector.isfinite().all()) and isinstance(self.fingerprint, str)
        ok = ok and (codes is None) == (text is None)
        if codes is not None:
            ok = ok and isinstance(codes, Tensor) and codes.dtype == torch.int64 and codes.device.type == "cpu"
            ok = ok and codes.ndim == 2 and codes.numel() > 0 and isinstance(text, str) and bool(text.strip())
            ok = ok and len(text) <= _MAX_REF_TEXT
        if not ok:
            raise VoiceError(
                "broken voice: expected an fp32 vector, and either int64 codes [frames, groups] with the text that "
                "they say, or neither, all on the CPU"
            )
        if text is not None:
            check_unicode(text)

    def save(self, path: str | Path) -> None:
        """Write the voice as one safetensors file.

        Raises:
            VoiceError: the voice is broken (`check`), or the file cannot be written.
        """
        self.check()
        tensors = {"speaker_embedding": self.speaker_embedding.contiguous()}
        metadata = {"format": _FORMAT, "fingerprint": self.fingerprint}
        if self.ref_codes is not None:
            tensors["ref_codes"] = self.ref_codes.contiguous()
            metadata["ref_text"] = self.ref_text
        try:
            save_file(tensors, path, metadata)
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise VoiceError(f"{path}: the voice cannot be written: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> "Voice":
        """Read a file that `save` wrote.

        Raises:
            VoiceError: the file is missing, too large, not a voice, or holds tensors of the wrong kind.
        """
        try:
            path = Path(path)
            if path.stat().st_size > _MAX_VOICE_BYTES:
                raise VoiceError(f"{path}: a voice file has at most {_MAX_VOICE_BYTES} bytes")
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise VoiceError(f"{path}: not a voice file (format {metadata.get('format')!r})")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except VoiceError:
            raise
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            made = "Voice.save and `speak --save-voice` make such files"
            raise VoiceError(f"{path}: cannot be read as a voice: {error}; {made}") from None
        if not {"speaker_embedding"} <= set(tensors) <= {"speaker_embedding", "ref_codes"}:
            raise VoiceError(f"{path}: broken voice file")
        voice = cls(
            tensors["speaker_embedding"],
            tensors.get("ref_codes"),
            metadata.get("ref_text"),
            metadata.get("fingerprint", ""),
        )
        try:
            voice.check()
        except RequestError as error:
            raise VoiceError(f"{path}: broken voice file: {error}") from None
        return voice


def check_ref_options(ref_audio: object | None, ref_text: str | None) -> None:
    """Check the command line's --ref-audio and --ref-text, as far as that needs no model.

    Raises:
        RequestError: a text without its audio. VoiceError, TextError: as `check_ref_text`.
    """
    if ref_text is None:
        return
    if ref_audio is None:
        raise RequestError("--ref-text says what --ref-audio says; give both")
    check_ref_text(ref_text)


def check_ref_text(ref_text: str) -> None:
    """Check the transcript of a reference audio.

    Raises:
        VoiceError: not a string, blank, or too long.
        TextError: not valid Unicode.
    """
    if not isinstance(ref_text, str):
        raise VoiceError(f"ref_text must be a string or None, got {type(ref_text).__name__}")
    if not ref_text.strip() or len(ref_text) > _MAX_REF_TEXT:
        raise VoiceError(
            f"ref_text must say what the reference audio says, in at most {_MAX_REF_TEXT} characters, or be left out; "
            f"got {len(ref_text)}, " + ("blank" if not ref_text.strip() else "too many")
        )
    check_unicode(ref_text)


class VoiceEncoder:
    """Makes voices with one Base checkpoint, on the CPU in fp32."""

    def __init__(self, checkpoint: Checkpoint):
        """
        Raises:
            VoiceError: the checkpoint is not a Base one.
        """
        config = checkpoint.config
        if config.speaker_encoder is None:
            raise VoiceError(
                f"a voice is made from audio by a Base checkpoint; this one is {config.variant} "
                f"(speakers: {', '.join(config.talker.speakers) or 'none, describe the voice with instruct'})"
            )
        self._checkpoint, self._rate = checkpoint, config.codec.sample_rate
        tensors = checkpoint.speaker_encoder(torch.device("cpu"), torch.float32)
        self._speaker_encoder = SpeakerEncoder(config.speaker_encoder, tensors)
        self._codec_encoder: CodecEncoder | None = None

    def encode(self, ref_audio: RefAudio, ref_text: str | None = None) -> Voice:
        """See `TTSEngine.create_voice`."""
        if ref_text is not None:
            check_ref_text(ref_text)
        samples = load_audio(ref_audio, self._rate)
        codes = None
        if ref_text is not None:
            if self._codec_encoder is None:
                self._codec_encoder = CodecEncoder(self._checkpoint.config.codec, self._checkpoint.codec_encoder())
            codes = self._codec_encoder(samples)
        vector = self._speaker_encoder(samples)
        if not vector.isfinite().all():
            raise AudioError(
                f"ref_audio is out of range: its largest sample is {np.abs(samples).max():.3g}, not near 1"
            )
        return Voice(vector, codes, ref_text, self._checkpoint.fingerprint)


# ---------------------------------------------------------------- audio


def load_audio(ref_audio: RefAudio, sample_rate: int) -> np.ndarray:
    """Reference audio as mono fp32 [samples] at `sample_rate`: channels averaged, resampled with soxr HQ.

    Args:
        ref_audio: path of a file that libsndfile reads, or (samples [n] or [n, channels], rate in Hz);
            integer samples are scaled by their type's range.

    Raises:
        AudioError: missing, not audio, empty, NaN, silent, or not of 0.5 to 60 seconds.
    """
    if isinstance(ref_audio, (str, Path)):
        samples, rate = _read_file(Path(ref_audio))
    elif isinstance(ref_audio, tuple) and len(ref_audio) == 2:
        try:
            samples, rate = np.asarray(ref_audio[0]), ref_audio[1]
        except (ValueError, TypeError, RuntimeError) as error:
            raise AudioError(f"samples cannot be read as an array: {error}") from None
    else:
        raise AudioError(f"ref_audio must be a path or (samples, rate), got {type(ref_audio).__name__}")
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or rate not in _RATES:
        raise AudioError(f"sample rate must be an integer in {_RATES.start}..{_RATES.stop - 1} Hz, got {rate!r}")
    if samples.ndim not in (1, 2) or samples.ndim == 2 and not 1 <= samples.shape[1] <= _MAX_CHANNELS:
        raise AudioError(f"samples must be [n] or [n, channels], got {list(samples.shape)}")
    rate = int(rate)
    _check_length(len(samples) / rate, "ref_audio")
    if np.issubdtype(samples.dtype, np.signedinteger):
        samples = samples / -float(np.iinfo(samples.dtype).min)
    elif not np.issubdtype(samples.dtype, np.floating):
        raise AudioError(f"samples must be floating or signed integers, got {samples.dtype}")
    samples = samples.astype(np.float32, copy=False)
    if samples.ndim == 2:
        samples = samples.mean(axis=1)
    if not np.isfinite(samples).all():
        raise AudioError("ref_audio holds NaN or infinite samples")
    if np.abs(samples).max() < _SILENCE:
        raise AudioError("ref_audio is silent")
    if rate != sample_rate:
        # The reference implementation calls librosa.resample, which is soxr HQ cut or padded to ceil(n * ratio).
        length = math.ceil(len(samples) * sample_rate / rate)
        samples = soxr.resample(samples, rate, sample_rate, quality="HQ")[:length]
        samples = np.pad(samples, (0, length - len(samples)))
    return np.ascontiguousarray(samples, dtype=np.float32)


def _read_file(path: Path) -> tuple[np.ndarray, int]:
    try:
        with soundfile.SoundFile(path) as file:
            if file.channels > _MAX_CHANNELS:
                raise AudioError(f"{path}: at most {_MAX_CHANNELS} channels, found {file.channels}")
            _check_length(file.frames / file.samplerate, str(path))
            # A header may understate the data, so decoding stops at the bound. It goes block by block, because a file
            # of 200 KB may hold a minute of 16 channels, which are 1.5 GB of samples.
            blocks = file.blocks(_BLOCK, frames=int(MAX_SECONDS * file.samplerate), dtype="float32", always_2d=True)
            mono = [block.mean(axis=1) for block in blocks]
            return np.concatenate(mono) if mono else np.zeros(0, np.float32), file.samplerate
    except (soundfile.SoundFileError, OSError, TypeError) as error:  # TypeError: headerless files (.raw)
        raise AudioError(f"{path}: cannot be read as audio: {error}") from None


def _check_length(seconds: float, what: str) -> None:
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise AudioError(f"{what} must last {MIN_SECONDS} to {MAX_SECONDS:.0f} seconds, got {seconds:.2f}")


# ---------------------------------------------------------------- speaker vector


def log_mel(samples: Tensor, mel_dim: int, sample_rate: int) -> Tensor:
    """fp32 [n] -> log mel spectrogram [mel_dim, n // 256]: window 1024 (periodic Hann), hop 256, magnitude,
    Slaney's filters from 0 to half the rate, natural log floored at 1e-5."""
    from transformers.audio_utils import mel_filter_bank  # transformers takes seconds to import; cloning alone needs it

    filters = mel_filter_bank(513, mel_dim, 0.0, sample_rate / 2, sample_rate, norm="slaney", mel_scale="slaney")
    padded = F.pad(samples[None], (384, 384), mode="reflect")
    spectrum = torch.stft(padded, 1024, 256, window=torch.hann_window(1024), center=False, return_complex=True)
    magnitude = torch.sqrt(torch.view_as_real(spectrum[0]).square().sum(-1) + 1e-9)
    return (torch.from_numpy(filters).float().T @ magnitude).clamp(min=1e-5).log()


class SpeakerEncoder:
    """ECAPA-TDNN without batch norm: log mel -> speaker vector."""

    def __init__(self, config: SpeakerEncoderConfig, tensors: Mapping[str, Tensor]):
        self._config = config
        self._w = {name.removeprefix("speaker_encoder."): tensor for name, tensor in tensors.items()}

    @torch.inference_mode()
    def __call__(self, samples: np.ndarray) -> Tensor:
        """Samples fp32 [n] at the encoder's rate -> speaker vector fp32 [enc_dim], not normalised."""
        c = self._config
        x = self._tdnn(log_mel(torch.from_numpy(samples), c.mel_dim, c.sample_rate)[None], "blocks.0", c.dilations[0])
        outputs = []
        for block in range(1, len(c.channels) - 1):
            x = self._se_res2net(x, f"blocks.{block}", c.dilations[block])
            outputs.append(x)
        x = self._tdnn(torch.cat(outputs, dim=1), "mfa", c.dilations[-1])
        mean, std = self._weighted_stats(self._attention(x), x)
        return self._conv(torch.cat([mean, std], dim=1), "fc")[0, :, 0].clone()

    def _conv(self, x: Tensor, name: str, dilation: int = 1) -> Tensor:
        """ "Same" convolution with reflected edges."""
        weight = self._w[f"{name}.weight"]
        total = dilation * (weight.shape[-1] - 1)
        if total:
            x = F.pad(x, (total // 2, total - total // 2), mode="reflect")
        return F.conv1d(x, weight, self._w[f"{name}.bias"], dilation=dilation)

    def _tdnn(self, x: Tensor, name: str, dilation: int = 1) -> Tensor:
        return F.relu(self._conv(x, f"{name}.conv", dilation))

    def _se_res2net(self, x: Tensor, name: str, dilation: int) -> Tensor:
        """1x1 TDNN, Res2Net (group i also takes group i - 1's output), 1x1 TDNN, squeeze and excitation."""
        first, *groups = self._tdnn(x, f"{name}.tdnn1").chunk(self._config.res2net_scale, dim=1)
        outputs = [first]
        for i, group in enumerate(groups):
            heard = group + outputs[-1] if i else group
            outputs.append(self._tdnn(heard, f"{name}.res2net_block.blocks.{i}", dilation))
        y = self._tdnn(torch.cat(outputs, dim=1), f"{name}.tdnn2")
        gate = F.relu(self._conv(y.mean(dim=2, keepdim=True), f"{name}.se_block.conv1"))
        return y * torch.sigmoid(self._conv(gate, f"{name}.se_block.conv2")) + x

    def _attention(self, x: Tensor) -> Tensor:
        """Attentive statistics pooling's weights over time, from each column and the clip's mean and std."""
        uniform = torch.full_like(x[:, :1], 1.0 / x.shape[2])
        context = torch.cat([x, *(s.expand_as(x) for s in self._weighted_stats(uniform, x))], dim=1)
        return self._conv(torch.tanh(self._tdnn(context, "asp.tdnn")), "asp.conv").softmax(dim=2)

    @staticmethod
    def _weighted_stats(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = (weight * x).sum(2, keepdim=True)
        variance = (weight * (x - mean).square()).sum(2, keepdim=True)
        return mean, variance.clamp(min=1e-12).sqrt()


# ---------------------------------------------------------------- reference codes


class CodecEncoder:
    """The speech tokenizer's encoder half: 24 kHz PCM -> codes, through transformers' MimiModel."""

    def __init__(self, config: CodecConfig, tensors: Mapping[str, Tensor]):
        """
        Args:
            tensors: the `encoder.*` tensors without that prefix, fp32.

        Raises:
            CheckpointError: the installed transformers does not take these tensors.
        """
        from transformers import MimiConfig, MimiModel
        from transformers.utils import logging

        self._frame, self._groups = config.vocoder.samples_per_frame, config.vocoder.num_quantizers
        # The reference implementation's encoder attends to all earlier columns, whatever window its config names. So
        # the window here is larger than any reference audio (25 columns a second).
        mimi = MimiConfig(**{**config.encoder, "sliding_window": int(MAX_SECONDS) * 100})
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            # from_pretrained, not load_state_dict: transformers renames Mimi's modules between releases.
            self._mimi, report = MimiModel.from_pretrained(
                None, config=mimi, state_dict=dict(tensors), output_loading_info=True
            )
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"speech_tokenizer/config.json: encoder_config: {error!r}") from error
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
        missing = [name for name in report["missing_keys"] if not name.startswith(("decoder", "upsample"))]
        if missing or report["unexpected_keys"]:
            raise CheckpointError(
                f"transformers' MimiModel does not fit the speech tokenizer's encoder: missing {sorted(missing)[:3]}, "
                f"unexpected {sorted(report['unexpected_keys'])[:3]}"
            )
        self._mimi.eval()

    @torch.inference_mode()
    def __call__(self, samples: np.ndarray) -> Tensor:
        """Samples fp32 [n] -> codes int64 [ceil(n / samples_per_frame), groups]."""
        audio = torch.from_numpy(samples)[None, None]
        codes = self._mimi.encode(audio, num_quantizers=self._groups).audio_codes[0]
        return codes.T[: math.ceil(len(samples) / self._frame)].long().clone(memory_format=torch.contiguous_format)
