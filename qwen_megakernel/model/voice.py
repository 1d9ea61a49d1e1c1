"""Reference audio -> `Voice`: a speaker vector, and with a transcript the codes of the audio itself.

Cloning needs a Base checkpoint. The speaker vector comes from the checkpoint's ECAPA-TDNN over a mel spectrogram
(Desplanques et al., 2020; layer by layer after qwen_tts 0.1.1's Qwen3TTSSpeakerEncoder). The codes come from the speech
tokenizer's encoder half, which is transformers' Mimi.

Voice files are data from outside. They are safetensors; nothing is ever unpickled.
"""

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qwen_megakernel.checkpoint.codec_config import CodecConfig
from qwen_megakernel.checkpoint.config import SpeakerEncoderConfig
from qwen_megakernel.checkpoint.load import Checkpoint
from qwen_megakernel.choices import PUBLISHED
from qwen_megakernel.errors import AudioError, CheckpointError, RequestError, TTSError, VoiceError, memory_told
from qwen_megakernel.model.audio_file import MAX_SECONDS, check_file
from qwen_megakernel.model.recording import Recording, RefAudio, load_recording
from spoken_text.cutting import check_unicode
from spoken_text.files import size_of_file

log = logging.getLogger(__name__)

MAX_RECORDINGS = 10  # the most recordings of one voice

_FORMAT = "qwen_megakernel.voice.1"
_MAX_VOICE_BYTES = 4 << 20
MOST_REF_TEXT = 10_000  # characters; a minute of speech has a thousand
_MAX_NOTES, _MAX_NOTE = 50, 300  # four of every recording at most, of some 100 characters each
_MAX_FINGERPRINT = 64  # ours have 16


@dataclass(frozen=True, eq=False)
class Voice:
    """A cloned voice: what a Base checkpoint needs to speak like reference audio. Made by `TTSEngine.create_voice`.

    Attributes:
        speaker_embedding: fp32 [hidden], on the CPU.
        ref_codes: int64 [frames, groups], on the CPU; None: the vector alone is used.
        ref_text: what the reference audio says; None exactly where `ref_codes` is.
        fingerprint: of the checkpoint that made the voice.
        notes: what is wrong with its recordings, in plain sentences.
    """

    speaker_embedding: Tensor
    ref_codes: Tensor | None
    ref_text: str | None
    fingerprint: str
    notes: tuple[str, ...] = ()

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
        """Check that this is a voice of some checkpoint. Raises VoiceError: a tensor has another dtype, shape or
        device, or is not finite. Or there are codes without text, or text without codes. Or fingerprint or notes are
        not short printable strings. TextError: the text is not valid Unicode."""
        vector, codes, text = self.speaker_embedding, self.ref_codes, self.ref_text
        ok = isinstance(vector, Tensor) and vector.dtype == torch.float32 and vector.ndim == 1
        ok = ok and vector.device.type == "cpu" and bool(vector.isfinite().all())
        ok = ok and (codes is None) == (text is None)
        if codes is not None:
            ok = ok and isinstance(codes, Tensor) and codes.dtype == torch.int64 and codes.device.type == "cpu"
            ok = ok and codes.ndim == 2 and codes.numel() > 0
            ok = ok and isinstance(text, str) and bool(text.strip()) and len(text) <= MOST_REF_TEXT
        if not ok:
            raise VoiceError(
                "broken voice: expected an fp32 vector, and either int64 codes [frames, groups] with the text that "
                "they say, or neither, all on the CPU"
            )
        ok = isinstance(self.notes, tuple) and len(self.notes) <= _MAX_NOTES
        ok = ok and all(_is_printable(note, _MAX_NOTE) for note in self.notes)
        if not (ok and _is_printable(self.fingerprint, _MAX_FINGERPRINT)):
            raise VoiceError(
                f"broken voice: expected a fingerprint of at most {_MAX_FINGERPRINT} printable characters, and a tuple "
                f"of at most {_MAX_NOTES} notes of at most {_MAX_NOTE}"
            )
        if text is not None:
            check_unicode(text)

    def save(self, path: str | Path) -> None:
        """Write the voice as one safetensors file. Raises VoiceError: it is broken (`check`), or cannot be written."""
        self.check()
        tensors = {"speaker_embedding": self.speaker_embedding.contiguous()}
        metadata = {"format": _FORMAT, "fingerprint": self.fingerprint, "notes": json.dumps(self.notes)}
        if self.ref_codes is not None and self.ref_text is not None:
            tensors["ref_codes"] = self.ref_codes.contiguous()
            metadata["ref_text"] = self.ref_text
        try:
            if os.path.lexists(path) and not os.path.isfile(path):  # a device or a pipe would be replaced by the file
                raise OSError("a voice can only be written to a regular file")
            save_file(tensors, path, metadata)
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise VoiceError(f"{path}: the voice cannot be written: {error}; name another file") from None

    @classmethod
    def load(cls, path: str | Path) -> "Voice":
        """Read a file that `save` wrote, in this version or in an older one. Raises VoiceError: the file is missing,
        too large, not a voice, or holds tensors of the wrong kind."""
        try:
            size_of_file(path, "a voice", _MAX_VOICE_BYTES)
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise VoiceError(f"{path}: not a voice file (format {metadata.get('format')!r:.99})")
                # Copied: whoever writes over a mapped file changes the voice, or ends the process by SIGBUS.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except VoiceError:
            raise
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            made = "make one of a recording with `qwen-megakernel voices make` or Voice.save"
            why = getattr(error, "strerror", None) or f"it is no safetensors file, or cut off ({error})"
            raise VoiceError(f"{path}: cannot be read as a voice: {why}; {made}") from None
        if not {"speaker_embedding"} <= set(tensors) <= {"speaker_embedding", "ref_codes"}:
            raise VoiceError(f"{path}: broken voice file: it must hold speaker_embedding, and may hold ref_codes")
        try:
            notes = json.loads(metadata.get("notes", "[]"))
            voice = cls(
                tensors["speaker_embedding"],
                tensors.get("ref_codes"),
                metadata.get("ref_text"),
                metadata.get("fingerprint", ""),
                tuple(notes) if isinstance(notes, list) else notes,
            )
            voice.check()
        except (RequestError, ValueError, RecursionError) as error:
            raise VoiceError(f"{path}: broken voice file: {error}") from None
        return voice


def _is_printable(text: object, most: int) -> bool:
    """Is it a string of at most `most` characters that a terminal may show?"""
    return isinstance(text, str) and len(text) <= most and text.isprintable()


def check_ref_options(ref_audio: str | list[str] | None, ref_text: str | None) -> None:
    """Check the command line's --ref-audio and --ref-text, as far as that needs no model. Raises RequestError for a
    text without its audio, AudioError for too many files or one that cannot be read, and what `text_of` raises."""
    files = [ref_audio] if isinstance(ref_audio, str) else ref_audio or []
    if ref_audio is not None:
        _check_count(len(files))
    elif text_of(ref_text) is not None:
        raise RequestError("--ref-text says what --ref-audio says; give both")
    text_of(ref_text)
    for file in files:
        check_file(file)


def text_of(ref_text: str | None) -> str | None:
    """The transcript of a reference audio; None if it is blank. Raises VoiceError: not a string, or too long.
    TextError: not valid Unicode."""
    if ref_text is None:
        return None
    if not isinstance(ref_text, str):
        raise VoiceError(f"ref_text must be a string or None, got {type(ref_text).__name__}")
    if len(ref_text) > MOST_REF_TEXT:
        raise VoiceError(
            f"ref_text must say what the recording says, in at most {MOST_REF_TEXT} characters, got {len(ref_text)}"
        )
    check_unicode(ref_text)
    return ref_text if ref_text.strip() else None


def _check_count(recordings: int) -> None:
    if not 1 <= recordings <= MAX_RECORDINGS:
        raise AudioError(f"a voice is made from 1 to {MAX_RECORDINGS} recordings, got {recordings}")


def _texts_of(ref_audio: list[RefAudio], ref_text: str | None | list[str | None]) -> list[str | None]:
    """One text for every recording; at most one is not None."""
    texts = ref_text if isinstance(ref_text, list) else [ref_text, *[None] * (len(ref_audio) - 1)]
    if len(texts) != len(ref_audio):
        raise VoiceError(f"ref_text has {len(texts)} entries for {len(ref_audio)} recordings: give one each, or None")
    texts = [text_of(text) for text in texts]
    if (given := len(texts) - texts.count(None)) > 1:
        raise VoiceError(f"only one recording may have a text, but {given} have: give None for the others")
    return texts


class VoiceEncoder:
    """Makes voices with one Base checkpoint, on the CPU in fp32, one at a time; thread-safe. Its two encoders are
    loaded at first use."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._rate = checkpoint.config.codec.sample_rate
        self._lock = threading.Lock()

    def encode(
        self, ref_audio: RefAudio | list[RefAudio], ref_text: str | None | list[str | None] = None, *, trim: bool = True
    ) -> Voice:
        """See `TTSEngine.create_voice`."""
        config = self._checkpoint.config
        if config.speaker_encoder is None:
            raise VoiceError(
                f"a voice is made from audio by a Base checkpoint; this one is {config.variant} (speakers: "
                f"{', '.join(config.talker.speakers) or 'none, describe the voice with instruct'}); take one such as "
                f"{PUBLISHED[0]}"
            )
        if not isinstance(trim, bool):
            raise RequestError(f"trim must be True or False, got {trim!r}")
        if isinstance(ref_audio, list):
            _check_count(len(ref_audio))
        elif isinstance(ref_text, list):
            raise VoiceError("ref_text is a list, but ref_audio is not: give a list of recordings, or one text")
        several = ref_audio if isinstance(ref_audio, list) else [ref_audio]
        texts = _texts_of(several, ref_text)
        codes, text = None, next((text for text in texts if text is not None), None)
        with self._lock:
            recordings = [self._load(several, number, trim) for number in range(len(several))]
            try:
                with memory_told():
                    if text is not None:
                        codes = self._codec_encoder(recordings[texts.index(text)].samples)
                    vector = mean_vector([self._vector(recording.samples) for recording in recordings])
            except TTSError:
                raise
            except Exception as error:  # torch and transformers refuse sizes that a config may have
                folder = self._checkpoint.folder
                raise CheckpointError(f"{folder}: its encoders cannot be used: {error!r:.300}") from error
        notes = tuple(note for recording in recordings for note in recording.notes)
        for note in notes:
            log.info("a new voice: %s", note)
        return Voice(vector, codes, text, self._checkpoint.fingerprint, notes)

    def _load(self, several: list[RefAudio], number: int, trim: bool) -> Recording:
        """Load one recording. If there are several, notes and errors name it."""
        if len(several) == 1:
            return load_recording(several[0], self._rate, trim=trim)
        name = f"recording {number + 1} of {len(several)}"
        try:
            recording = load_recording(several[number], self._rate, trim=trim)
        except AudioError as error:
            raise AudioError(f"{name}: {error}") from None
        return Recording(recording.samples, tuple(f"{name}: {note}" for note in recording.notes))

    @cached_property
    def _codec_encoder(self) -> "CodecEncoder":
        return CodecEncoder(self._checkpoint.config.codec, self._checkpoint.codec_encoder())

    @cached_property
    def _speaker_encoder(self) -> "SpeakerEncoder":
        config, cpu = self._checkpoint.config.speaker_encoder, torch.device("cpu")
        assert config, "`encode` has looked"
        return SpeakerEncoder(config, self._checkpoint.speaker_encoder(cpu, torch.float32))

    def _vector(self, samples: np.ndarray) -> Tensor:
        vector = self._speaker_encoder(samples)
        if not vector.isfinite().all():
            raise AudioError("the speaker vector of ref_audio is not finite: use another recording or checkpoint")
        return vector


def mean_vector(vectors: Sequence[Tensor]) -> Tensor:
    """Speaker vectors fp32 [hidden] of several recordings -> the voice's. Its direction is that of the mean of the unit
    vectors, so that each recording counts the same. Its norm is their mean norm, because the encoder does not normalise
    and the talker adds the vector to a row as it is. A plain mean gets shorter as the recordings differ more. Raises
    AudioError: they point in opposite directions."""
    if len(vectors) == 1:
        return vectors[0]
    stacked = torch.stack(list(vectors)).double()
    norms = stacked.norm(dim=1, keepdim=True)
    direction = (stacked / norms).mean(dim=0)
    vector: Tensor = (direction / direction.norm() * norms.mean()).float()
    if not vector.isfinite().all():
        raise AudioError("the recordings have nothing in common: give recordings of one speaker")
    return vector


def log_mel(samples: Tensor, mel_dim: int, sample_rate: int) -> Tensor:
    """fp32 [n] -> log mel spectrogram [mel_dim, n // 256]: window 1024 (periodic Hann), hop 256, magnitude,
    Slaney's filters from 0 to half the rate, natural log floored at 1e-5."""
    from transformers.audio_utils import mel_filter_bank  # transformers takes seconds to import; cloning alone needs it

    filters = mel_filter_bank(513, mel_dim, 0.0, sample_rate / 2, sample_rate, norm="slaney", mel_scale="slaney")
    padded = F.pad(samples[None], (384, 384), mode="reflect")
    spectrum = torch.stft(padded, 1024, 256, window=torch.hann_window(1024), center=False, return_complex=True)
    magnitude = torch.sqrt(torch.view_as_real(spectrum[0]).square().sum(-1) + 1e-9)
    mel: Tensor = torch.from_numpy(filters).float().T @ magnitude
    return mel.clamp(min=1e-5).log()


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


class CodecEncoder:
    """The speech tokenizer's encoder half: 24 kHz PCM -> codes, through transformers' MimiModel."""

    def __init__(self, config: CodecConfig, tensors: Mapping[str, Tensor]):
        """`tensors` are the `encoder.*` ones without that prefix, fp32. Raises CheckpointError: the installed
        transformers does not take them, or one is not finite: any number at all gives codes."""
        from transformers import MimiConfig, MimiModel
        from transformers.utils import logging

        if wrong := next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None):
            raise CheckpointError(f"tensor 'encoder.{wrong}' is not finite; get the checkpoint again")
        self._frame = config.vocoder.samples_per_frame
        self._groups = config.vocoder.num_quantizers
        # The reference implementation's encoder attends to all earlier columns, whatever window its config names. So
        # the window here is larger than any reference audio (25 columns a second).
        fixed: dict[str, Any] = {"sliding_window": int(MAX_SECONDS) * 100, "attn_implementation": "sdpa"}
        mimi = MimiConfig(**{**config.encoder, **fixed})
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.ERROR)
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types for it
        try:
            # from_pretrained, not load_state_dict: transformers renames Mimi's modules between releases.
            with memory_told():
                loaded: Any = MimiModel.from_pretrained(  # a pair, because of output_loading_info
                    None, config=mimi, state_dict=dict(tensors), output_loading_info=True
                )
            self._mimi, report = loaded
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"speech_tokenizer/config.json: encoder_config: {error!r}") from error
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above
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
        codes: Tensor = self._mimi.encode(audio, num_quantizers=self._groups).audio_codes[0]
        return codes.T[: math.ceil(len(samples) / self._frame)].long().clone(memory_format=torch.contiguous_format)
